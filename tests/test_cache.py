"""Quantized weights that a module keeps: in place, never stale, in either form, and for good where they are frozen."""

import copy
import dataclasses
import pickle
from types import SimpleNamespace

import pytest
import torch

from tests.layer import DEVICE, CastCounter, CountingCache, apply_layer, assert_equal, make_layer, refused, saved_bytes
from titan_fp8moe import Fp8FlowLinear, Fp8FlowMoEConfig, RoutedExperts, WeightCache, ops, recipe, routed_experts
from titan_fp8moe.layer import cache as cache_module
from titan_fp8moe.layer.weights import ExpertWeights

LAYOUTS = pytest.mark.parametrize("layouts", ["both", "forward"])


class Layer:
    """A small layer with a cache."""

    def __init__(self, layouts="both", **settings):
        self.x, self.scores, self.ids, weights = make_layer(64)
        self.weights = ExpertWeights(*map(torch.nn.Parameter, weights))
        self.cache, self.config = CountingCache(layouts), Fp8FlowMoEConfig(**settings)
        self.leaves = [t.requires_grad_() for t in (self.x, self.scores, *self.weights)]

    def forward(self, cache):
        return apply_layer(self.x, self.weights, self.ids, self.scores, config=self.config, cache=cache)

    def step(self, cache):
        out = self.forward(cache)
        return [out.detach(), *torch.autograd.grad(out, self.leaves, torch.ones_like(out))]

    def check(self, quantized=None):
        """A microbatch with the cache equals one without."""
        before = self.cache.quantized
        assert_equal(self.step(self.cache), self.step(None))
        assert quantized is None or self.cache.quantized - before == 2 * quantized


@LAYOUTS
@pytest.mark.parametrize("recompute", ["none", "activation", "experts"])
def test_microbatches_share_quantized_weights(layouts, recompute):
    """Bit for bit, and in memory that stays where it is when weights change."""
    layer = Layer(layouts, recompute=recompute)
    optimizer = torch.optim.SGD(layer.weights, lr=1.0)
    layer.check(quantized=True)
    addresses = [t.data_ptr() for operand in layer.cache.operands for t in operand if t is not None]
    assert len(addresses) == (8 if layouts == "both" else 6)
    layer.check(quantized=False)
    for w in layer.weights:
        w.grad = torch.randn_like(w) / 8
    optimizer.step()
    layer.check(quantized=True)
    layer.check(quantized=False)
    assert addresses == [t.data_ptr() for operand in layer.cache.operands for t in operand if t is not None]


@pytest.mark.parametrize("shapes", [[(2, 200, 256)] * 2, [(3, 128, 200)], [(2, 256, 128)] * 2])
def test_the_transpose_of_quantized_weights_is_exact(shapes):
    """What the smaller form transposes equals quantizing the transpose anew, padding included."""
    weights = [torch.randn(shape, device=DEVICE) * torch.randn(shape[1], 1, device=DEVICE).exp() for shape in shapes]
    got = ops.quantize_weight_transposed(ops.quantize_weight(*weights))
    padded = [torch.nn.functional.pad(w, (0, 0, 0, -w.shape[1] % 128)) for w in weights]
    want = recipe.quantize_weight(torch.cat(padded, 1).mT.contiguous())
    assert_equal(got, want)


def _all_sampled(weights):
    for w in weights:
        w.data.mul_(0.99)  # its version stays, as in an EMA swap


def _one_by_hand(weights):
    with torch.no_grad():
        weights[1][0, 3, 5] += 1


def _replaced(weights):
    weights.w2.data = weights.w2.detach().clone().neg()


CHANGES = [_all_sampled, _one_by_hand, _replaced]


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_any_change_is_seen(change, frozen):
    """Through ``.data`` by a foreign optimizer or an EMA swap; of a single value by hand; another tensor."""
    layer = Layer()
    layer.check()
    change(layer.weights)
    operands = layer.cache.refresh((layer.weights.gate_up, (layer.weights.w2,)), frozen)
    assert sum(int(changed) for changed in operands) >= 1
    layer.check()


def test_samples_are_of_every_expert_and_weight():
    for experts in (1, 8, 40):
        pair = [torch.randn(experts, 128, 256) for _ in range(2)]
        state = torch.full((1 + 2 * recipe.num_samples(pair[0]),), -1, dtype=torch.int32)
        recipe.weights_changed(pair, state, None, False)
        for w in pair:
            for e in range(experts):
                w[e] *= -1
                before = state.clone()
                assert recipe.weights_changed(pair, state, None, False)
                assert (before != state).sum() >= 30
        assert not recipe.weights_changed(pair, state, None, False)


def test_frozen_weights_do_not_count_steps():
    """Steps of an optimizer of others change nothing in them; trained ones are quantized anew."""
    layer = Layer()
    groups = layer.weights.gate_up, (layer.weights.w2,)
    for frozen, want in ((True, 1), (True, 0), (False, 1), (False, 1), (True, 0)):
        assert [int(c) for c in layer.cache.refresh(groups, frozen)] == [want, want]
        torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0).step()


@pytest.mark.parametrize("make", [
    lambda config: RoutedExperts(2, 128, 128, config=config), lambda config: Fp8FlowLinear(128, 128, config=config)
], ids=["RoutedExperts", "Fp8FlowLinear"])  # fmt: skip
@pytest.mark.parametrize("frozen", [False, True])
def test_loading_a_state_dict_clears_a_modules_cache(make, frozen, monkeypatch):
    """Also where parameters have no versions, as under FSDP, and one value alone differs."""
    monkeypatch.setattr(cache_module, "_cache_key", lambda weight: 0)
    module = make(Fp8FlowMoEConfig(cache_weights=True)).requires_grad_(not frozen)
    groups = [[p if p.dim() == 3 else p[None]] for p in module.parameters()]
    state = module.state_dict()
    module.cache.refresh(groups, frozen)
    assert not any(module.cache.refresh(groups, frozen))
    module.load_state_dict(state)
    assert all(module.cache.refresh(groups, frozen))


def test_other_shapes_get_other_buffers():
    """Those of before are freed first; a copy of a cache is of no weights."""
    cache = WeightCache("forward")
    cache.refresh([[torch.randn(2, 128, 256)]], True)
    old = cache.operands[0].q
    cache.refresh([[torch.randn(2, 128, 256)]], True)
    assert cache.operands[0].q is old
    cache.refresh([[torch.randn(3, 128, 256)]], True)
    assert cache.operands[0].q.shape == (3, 128, 256)
    for other in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        assert other.layouts == "forward" and not other.operands


def test_compiling_a_module_leaves_the_buffers_of_others():
    """Their compiled code is shared by modules of one shape, whose buffers are made together."""
    torch.manual_seed(0)
    config = Fp8FlowMoEConfig(cache_weights=True)
    one, other, alike = (RoutedExperts(2, 128, H, config=config, device=DEVICE) for H in (128, 256, 128))
    x, (scores, ids) = torch.randn(8, 128, device=DEVICE), torch.rand(8, 2, device=DEVICE).topk(1)
    want = one(x, ids, scores)
    torch.compile(other, backend="eager")(x, ids, scores)
    assert torch.equal(one(x, ids, scores), want) and not alike.cache.operands
    torch.compile(one, backend="eager")(x, ids, scores)
    assert alike.cache.operands


def test_new_buffers_are_filled():
    cache, weight = WeightCache(kind="of two shapes"), torch.randn(2, 128, 256, device=DEVICE)
    cache.refresh([[weight]], True)
    want = cache.operands[0].q.clone()
    cache_module._allocate(cache, [cache_module._sizes([torch.randn(2, 128, 128)])], weight.device)
    cache.refresh([[weight]], True)
    assert torch.equal(cache.operands[0].q.view(torch.uint8), want.view(torch.uint8))


def test_a_cache_tells_views_of_one_storage_apart():
    """By offset, shape, strides and dtype, one at a time; and by version."""
    storage = torch.randn(3, 128, 128)
    first = storage[:2]
    others = [storage[1:], storage[:1], first.mT, first.view(torch.int32), first[:, :, ::1][:, :64]]
    keys = [cache_module._cache_key(w) for w in (first, *others)]
    assert all(a != b for i, a in enumerate(keys) for b in keys[:i])
    assert cache_module._cache_key(storage[:2]) == keys[0]
    storage.add_(1)
    assert cache_module._cache_key(storage[:2]) != keys[0]


# --- graphs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layouts", "recompute", "frozen"),
    [
        ("both", "activation", False),
        ("forward", "activation", False),
        ("both", "experts", False),
        ("forward", "experts", False),
        ("forward", "activation", True),
        ("both", "experts", True),
    ],
)
def test_in_a_compiled_graph(layouts, recompute, frozen):
    """One graph, compiled once and asked first, refreshes its buffers: after a step, and after changes that only a
    sample shows."""
    config, uncached = (Fp8FlowMoEConfig(recompute=recompute, **cache) for cache in (dict(cache_weights=True), {}))
    config = dataclasses.replace(config, cache_layouts=layouts)
    experts = RoutedExperts(8, 256, 128, config=config, device=DEVICE).requires_grad_(not frozen)
    x, scores, ids, _ = make_layer(64)
    compiled = torch.compile(experts, backend="aot_eager", fullgraph=True)
    leaves = [x.requires_grad_(), scores.requires_grad_(), *([] if frozen else experts.parameters())]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)

    def check(refreshed):
        out = compiled(x, ids, scores)
        grads = torch.autograd.grad(out.sum(), leaves)
        want = routed_experts(x, experts.w1, experts.w2, experts.w3, ids, scores, config=uncached)
        assert_equal((out, *grads), (want, *torch.autograd.grad(want.sum(), leaves)))
        assert (experts.cache.operands[0].state[0] >= 0) and experts.cache.key is None
        if not refreshed:
            assert addresses == [operand.q.data_ptr() for operand in experts.cache.operands]

    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        check(True)
        addresses = [operand.q.data_ptr() for operand in experts.cache.operands]
        check(False)
        for w in experts.parameters():
            w.data.mul_(1.5)
        check(False)
        with torch.no_grad():
            experts.w2[0, 3, 5] += 1
        optimizer.step()  # of trained weights' versions and samples, the graph sees neither
        if frozen:
            experts.cache.clear()
        check(False)


def test_no_capture_makes_buffers(monkeypatch):
    """They would lie in the graph's memory; a refresh that the host asks for would repeat in each replay."""
    layer = Layer()
    groups = layer.weights.gate_up, (layer.weights.w2,)
    capturing = True
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(cache_module, "_cache_key", lambda w: object())
    weight = SimpleNamespace(is_cuda=True)
    with refused("fp8_flow_moe.cache_weights", "run it once before the capture", error=RuntimeError):
        layer.cache._prepare([[weight]])
    capturing = False
    layer.cache.refresh(groups, False)
    capturing = True
    assert not layer.cache._prepare([[weight]])


@pytest.mark.gpu
@LAYOUTS
def test_replays_of_a_captured_step(layouts):
    """Two microbatches and the optimizer's step in one graph, and two graphs of one microbatch each: as eager steps."""
    for whole in (True, False):
        steps = [_train(layouts, whole, captured) for captured in (False, True)]
        assert_equal(*steps)


def _train(layouts, whole, captured):
    torch.manual_seed(0)
    layer = Layer(layouts)
    optimizer = torch.optim.SGD(layer.weights, lr=1e-4)
    for w in layer.weights:
        w.grad = torch.zeros_like(w)

    def microbatch():
        out = layer.forward(layer.cache)
        grads = torch.autograd.grad(out, [*layer.weights], torch.ones_like(out))
        torch._foreach_add_([w.grad for w in layer.weights], grads)

    def step():
        microbatch()
        microbatch()
        optimizer.step()

    body = step if whole else microbatch
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()  # the tensors were made on another stream
    with torch.cuda.stream(stream):
        body()
    torch.cuda.synchronize()
    run = body
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            body()
        run = graph.replay
    for i in range(4):
        run()
        if not whole and i % 2:
            optimizer.step()
        if i == 2:
            for w in layer.weights:
                w.data.mul_(1.5)  # as an EMA swap, or a foreign optimizer
    torch.cuda.synchronize()
    return [w.detach().clone() for w in layer.weights] + [w.grad for w in layer.weights]


# --- frozen weights ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recompute", ["none", "activation", "experts"])
@pytest.mark.parametrize("save_h", ["bf16", "fp8"])
def test_frozen_experts(recompute, save_h):
    """Quantized once whatever the setting; same output and dx; only what dx needs is saved, and nothing of the weights
    is computed."""
    x, scores, ids, _ = make_layer(64)
    config = Fp8FlowMoEConfig(recompute=recompute, save_h=save_h)
    experts = RoutedExperts(8, 256, 128, config=config, device=DEVICE)
    experts.cache = CountingCache("forward")
    leaves = [x.requires_grad_(), scores.requires_grad_()]

    def run():
        with CastCounter() as counter:
            out, kept = saved_bytes(lambda: experts(x, ids, scores))
        with CastCounter() as backward:
            grads = torch.autograd.grad(out.sum(), leaves)
        return [out, *grads], kept, counter.ops + backward.ops

    want, trained, ops_trained = run()
    experts.requires_grad_(False)
    assert ops_trained["quantize_weight"] == 4 and not experts.cache.operands
    for _ in range(3):
        got, kept, counted = run()
        assert_equal(got, want)
        assert experts.cache.quantized == 2 and not counted["quantize_weight"]
        assert not counted["transpose_pair"] and not counted["grouped_mm_wgrad"]
    T, D, M, H = *x.shape, recipe.row_capacity(ids.numel(), 8), 128
    rows = 0 if recompute == "experts" else T * (D + D // 128)
    assert trained - kept == rows + (M * (H + H // 128) if recompute == "none" else 0)
    with torch.no_grad():
        assert torch.equal(experts(x, ids, scores), want[0])
    assert experts.cache.quantized == 2
