"""Quantized weights that a module keeps: in place, never stale, in either form, and for good where they are frozen."""

import copy
import dataclasses
import functools
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from tests.layer import DEVICE, assert_equal, generations, refused, saved_bytes
from titan_fp8moe import Fp8FlowLinear, Fp8FlowMoEConfig, RoutedExperts, WeightCache, grouped_ffn, ops, recipe
from titan_fp8moe.layer import operands as operands_module
from titan_fp8moe.layer.experts import SAVED_OPS
from titan_fp8moe.layer.run import run_layer
from titan_fp8moe.layer.weights import ExpertWeights


class GroupedFFN(torch.nn.Module):
    """:func:`grouped_ffn` of four experts, with a cache."""

    def __init__(self, config):
        super().__init__()
        weights = torch.randn(3, 4, 128, 128, device=DEVICE) / 8
        self.w1, self.w2, self.w3 = (torch.nn.Parameter(w.clone()) for w in weights)
        self.config, self.cache = config, WeightCache()

    def forward(self, x, ends):
        cache = self.cache if self.config.cache_weights else None
        return grouped_ffn(x, self.w1, self.w2, self.w3, ends, cache=cache)


def _make(kind, trained, seed=0, **settings):
    """A module that keeps quantized weights, or has them stored, and its inputs, whose first needs a gradient."""
    torch.manual_seed(seed)
    config = Fp8FlowMoEConfig(cache_weights=trained)
    x = torch.randn(64, 128, device=DEVICE, requires_grad=True)
    if kind == "linear":
        return Fp8FlowLinear(128, 128, config=config, device=DEVICE).requires_grad_(trained), (x,)
    if kind == "grouped_ffn":
        return GroupedFFN(config), (x, torch.arange(16, 65, 16, dtype=torch.int32, device=DEVICE))
    settings = dict(recompute="experts" if kind == "forward" else "activation") | settings
    layouts = dict(cache_layouts=kind) if trained else {}
    config = dataclasses.replace(config, **layouts, **settings)
    module = RoutedExperts(4, 128, 128, config=config, device=DEVICE).requires_grad_(trained)
    if kind == "stored":
        module = RoutedExperts.from_fp8(*map(ops.Fp8Weight.quantize, (module.w1, module.w2, module.w3)))
    scores, ids = torch.rand(64, 4, device=DEVICE).topk(2)
    return module, (x, ids, scores)


def _without_cache(module):
    """A module that has the same parameters and quantizes them in every call."""
    other = copy.copy(module)
    other.config = dataclasses.replace(module.config, cache_weights=False, cache_layouts="both")
    return other


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kind", ["both", "forward", "linear", "grouped_ffn"])
def test_microbatches_share_quantized_weights(kind, compiled):
    """Bit for bit, and in memory that stays where it is when weights change: by a step, by a write that has a version,
    or by one that only a sample shows. A graph is compiled once."""
    torch._dynamo.reset()
    module, inputs = _make(kind, True)
    plain, weights, addresses = _without_cache(module), [*module.parameters()], set()
    optimizer = torch.optim.SGD(weights, lr=1.0)
    for w in weights:
        w.grad = torch.randn_like(w) / 8

    def step(run):
        out = run(*inputs)
        return [out.detach(), *torch.autograd.grad(out.sum(), [inputs[0], *weights])]

    run = torch.compile(module, backend="aot_eager", fullgraph=True) if compiled else module
    with torch._dynamo.config.patch(error_on_recompile=True):
        changes = (
            lambda: None, optimizer.step, lambda: [w.detach()[..., 3, 5].add_(1) for w in weights],
            lambda: [w.data.mul_(1.5) for w in weights],
        )  # fmt: skip
        for change in changes:
            change()
            for changed in (True, False):
                before = generations(module.cache)
                assert_equal(step(run), step(plain))
                after = generations(module.cache)
                assert after == [count + changed for count in before or [0] * len(after)]
            kept = [t.data_ptr() for operand in module.cache.copies.operands for t in operand if t is not None]
            addresses.add((*kept,))
    tensors = (3 if kind == "forward" else 4) * (1 if kind == "linear" else 2)
    assert len(kept) == tensors and len(addresses) == 1


def test_samples_are_of_every_expert_and_weight():
    """Also of weights that are smaller than their sample."""
    for experts, N, K in ((1, 16, 16), (1, 128, 256), (8, 128, 256), (40, 128, 256)):
        pair = [torch.randn(experts, N, K) for _ in range(2)]
        state = torch.zeros(recipe.STATE_HEADER + 2 * recipe.num_samples(pair[0]), dtype=torch.int32)
        _, state = recipe.seen_weights(pair, state, None, True, None)
        for w in pair:
            for e in range(experts):
                w[e] *= -1
                changed, after = recipe.seen_weights(pair, state, None, False, None)
                assert changed and (after != state).sum() >= 30
                state = after
        assert not recipe.seen_weights(pair, state, None, False, None)[0]


@pytest.mark.parametrize("kind", ["both", "linear"])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("clear", [lambda _: WeightCache.clear_all(), lambda m: m.load_state_dict(m.state_dict())])
def test_what_clears_a_modules_cache(clear, kind, frozen):
    """After a change of a parameter without a version, as under FSDP, that no sample shows."""
    module, inputs = _make(kind, not frozen)
    before = module(*inputs)
    next(module.parameters()).data.view(-1, 128)[3, 5] += 5
    assert torch.equal(module(*inputs), before)
    clear(module)
    assert all(operand.state[0] == -1 for operand in module.cache.copies.operands)  # what a CUDA graph's replays read
    got = module(*inputs)
    assert torch.equal(got, copy.deepcopy(module)(*inputs)) and not torch.equal(got, before)


def test_compiling_a_module_leaves_the_buffers_of_others():
    """Their compiled code is shared by modules of one shape, whose buffers are made together."""
    torch.manual_seed(0)
    config = Fp8FlowMoEConfig(cache_weights=True)
    one, other, alike = (RoutedExperts(2, 128, H, config=config, device=DEVICE) for H in (128, 256, 128))
    x, (scores, ids) = torch.randn(8, 128, device=DEVICE), torch.rand(8, 2, device=DEVICE).topk(1)
    want = one(x, ids, scores)
    torch.compile(other, backend="eager")(x, ids, scores)
    average, another = copy.deepcopy(alike), copy.deepcopy(alike)
    assert average.cache.kind == another.cache.kind != alike.cache.kind  # blocks made of copies share a graph
    assert torch.equal(one(x, ids, scores), want) and alike.cache.copies is None
    torch.compile(one, backend="eager")(x, ids, scores)
    assert alike.cache.copies is not None
    assert average.cache.copies is None, "a copy that never runs gets no buffers"


def test_a_cache_tells_tensors_apart():
    """Views by offset, shape, strides and dtype, one at a time, and by version. Allocators use addresses again."""
    storage = torch.randn(3, 128, 128)
    first = storage[:2]
    others = [storage[1:], storage[:1], first.mT, first.view(torch.int32), first[:, :, ::1][:, :64]]
    keys = [operands_module.tensor_key(w) for w in (first, *others)]
    assert len({*keys}) == len(keys) and operands_module.tensor_key(storage[:2]) == keys[0]
    storage.add_(1)
    assert operands_module.tensor_key(storage[:2]) != keys[0]
    assert len({operands_module.tensor_key(torch.randn(1, 128, 128)) for _ in range(100)}) == 100


# --- graphs -----------------------------------------------------------------------------------------------------------


def test_no_capture_makes_buffers(monkeypatch):
    """They would lie in the graph's memory; a refresh that the host asks for would repeat in each replay."""
    capturing = True
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    cache, sizes = WeightCache(), [operands_module._sizes([torch.empty(2, 128, 128)])]
    with refused("fp8_flow_moe.cache_weights", "run it once before the capture", error=RuntimeError):
        cache._allocate(sizes, torch.device("cuda"))
    copies, forced = cache.buffers([[torch.empty(2, 128, 128)]]), []
    monkeypatch.setattr(operands_module, "tensor_key", lambda w: (w, 0))
    monkeypatch.setattr(
        ops, "refresh_weight", lambda group, q, q_t, scale, state, steps, force, _: forced.append(force)
    )
    first, other = (SimpleNamespace(is_cuda=False, at=at) for at in range(2))
    for weight in (first, first, other, SimpleNamespace(is_cuda=True), other):
        assert not copies.replayed or weight is other
        copies.refresh(0, [weight], None)
    assert forced == [True, False, True, False, False] and copies.replayed


@pytest.mark.gpu
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("layouts", ["both", "forward"])
def test_replays_of_a_captured_step(layouts, whole):
    """Two microbatches and the optimizer's step in one graph, or a microbatch: as eager steps."""
    assert_equal(*(_weights_and_grads(layouts, whole, captured) for captured in (False, True)))


def _weights_and_grads(layouts, whole, captured):
    module, inputs = _make(layouts, True)
    weights, stream, graph = [*module.parameters()], torch.cuda.Stream(), torch.cuda.CUDAGraph()
    optimizer, grads = torch.optim.SGD(weights, lr=1e-4), [torch.zeros_like(w) for w in weights]
    for w, grad in zip(weights, grads, strict=True):
        w.grad = grad

    def step():
        for _ in range(2 if whole else 1):
            torch._foreach_add_(grads, torch.autograd.grad(module(*inputs).sum(), weights))
        if whole:
            optimizer.step()

    torch.cuda.synchronize()  # the tensors were made on another stream
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    if captured:
        with torch.cuda.graph(graph, stream=stream):
            step()
    for i in range(4):
        (graph.replay if captured else step)()
        if not whole and i % 2:
            optimizer.step()
        if i == 2:
            for w in weights:
                w.data.mul_(1.5)  # as an EMA swap, or a foreign optimizer
    torch.cuda.synchronize()
    return [*(w.detach() for w in weights), *grads]


@pytest.mark.parametrize("recompute", ["none", "activation", "experts"])
@pytest.mark.parametrize("kind, save_h", [("both", "bf16"), ("both", "fp8"), ("linear", "bf16")])
def test_frozen_weights(kind, save_h, recompute):
    """Same output and gradients. Steps let only trained weights be quantized anew. Only what the gradient of x needs is
    saved."""
    module, inputs = _make(kind, True, recompute=recompute, save_h=save_h)

    def run(forward):
        out, kept = saved_bytes(lambda: forward(*inputs))
        return [out.detach(), *torch.autograd.grad(out.sum(), inputs[0])], kept

    want, trained = run(_without_cache(module))
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)  # of others
    for frozen in (False, False, True, True):
        module.requires_grad_(not frozen)
        got, kept = run(module)
        assert_equal(got, want)
        optimizer.step()
    assert {*generations(module.cache)} == {2}
    row, numbers = 128 + 1, 8 * len(generations(module.cache))  # a row has one scale
    gone = 128 * row if kind == "linear" else 64 * row * (recompute != "experts")
    gone += recipe.row_capacity(64 * 2, 4) * row * (recompute == "none" and kind != "linear")
    assert trained - kept + numbers == gone
    with torch.no_grad():
        assert torch.equal(module(*inputs), want[0])
    assert {*generations(module.cache)} == {2}


# --- identity ---------------------------------------------------------------------------------------------------------


def _teacher(module):
    weights = module.named_parameters()
    return {name: torch.randn_like(p) * 0.05 if p.is_floating_point() else p.flip(0) for name, p in weights}


def _functional_call(module, inputs, wrap=lambda call: call):
    """The outputs of a teacher, whose backward comes between two of the student's."""
    teacher, other = _teacher(module), copy.deepcopy(module)
    got = wrap(lambda *inputs: torch.func.functional_call(module, teacher, inputs))(*inputs)
    want = torch.func.functional_call(other, teacher, inputs)
    assert torch.equal(got, want)
    return got, want


def _compiled(function):
    return torch.compile(function, backend="aot_eager", fullgraph=True)


def _compiled_call(module, inputs):
    return _functional_call(module, inputs, _compiled)


def _write(module, inputs, values=None):
    """Other values in the parameters' memory."""
    for name, other in (values or _teacher(module)).items():
        module.get_parameter(name).data.copy_(other)


def _swap(module, inputs):
    """As an EMA that evaluates, and then brings the values back."""
    kept = {name: p.detach().clone() for name, p in module.named_parameters()}
    _write(module, inputs)
    module(*inputs)
    _write(module, inputs, kept)


def _replace(module, inputs, double=False):
    """Other tensors in the parameters, which stay."""
    for name, other in _teacher(module).items():
        module.get_parameter(name).data = other.repeat(2, *[1] * (other.dim() - 1)) if double else other
    module(*inputs)


def _other_size(module, inputs):
    """The buffers that the forward has read are dropped by the module, not by its backward."""
    _replace(module, inputs, double=True)


def _replica(module, inputs):
    replica = module._replicate_for_data_parallel()
    replica._parameters = {name: None for name, p in module._parameters.items() if p is None}
    for name, values in _teacher(module).items():
        setattr(replica, name, values)
    replica(*inputs)


def _checkpointed(module, **options):
    return functools.partial(checkpoint, module, use_reentrant=False, **options)


def _checkpointed_by_op(module):
    return _checkpointed(module, context_fn=lambda: create_selective_checkpoint_contexts([*SAVED_OPS]))


BETWEEN = [
    (kind, lambda module: module, between)
    for kind in ("both", "forward", "linear")
    for between in (_functional_call, _swap, _replace, _write, _replica, _other_size)
]
BETWEEN += [("both", way, _functional_call) for way in (_checkpointed, _checkpointed_by_op)]
CASES = [(kind, trained, way, between) for kind, way, between in BETWEEN for trained in (False, True)]
CASES += [("both", True, _compiled, between) for between in (_functional_call, _compiled_call)]
CASES += [("stored", False, lambda module: module, between) for between in (_functional_call, _replace)]


@pytest.mark.parametrize("kind, trained, way, between", CASES)
def test_a_backward_has_the_weights_of_its_forward(kind, trained, way, between):
    """Whoever uses the module in between, with gradients or without; and the module goes on right. Generations are in
    graphs, where the device compares them. A loader may replace the memory of stored weights."""
    torch._dynamo.reset()
    module, inputs = _make(kind, trained)
    want = torch.autograd.grad(module(*inputs).sum(), inputs[0])
    for grad in (False, True):
        module, inputs = _make(kind, trained)
        run = way(module)
        first, second = run(*inputs), run(*inputs)
        with torch.set_grad_enabled(grad):
            outs = between(module, inputs)
        assert_equal(torch.autograd.grad(first.sum(), inputs[0]), want)
        if grad and outs:
            assert_equal(*(torch.autograd.grad(out.sum(), inputs[0]) for out in outs))
        assert_equal(torch.autograd.grad(second.sum(), inputs[0]), want)
        assert torch.equal(module(*inputs), copy.deepcopy(module)(*inputs))


def test_parameters_that_have_been_written_are_refused():
    """As nn.Linear does: a step between a forward and its backward."""
    module, inputs = _make("both", True)
    out = module(*inputs)
    module.w1.detach().mul_(2)
    with refused("modified by an inplace operation", error=RuntimeError):
        out.sum().backward()


@pytest.mark.parametrize("trained", [False, True], ids=["frozen", "cached"])
def test_one_graph_of_a_student_and_a_teacher(trained):
    """Which refreshes the same buffers three times, and must not take the third for the first."""
    torch._dynamo.reset()
    module, inputs = _make("both", trained)
    teacher = _teacher(module)

    def run(x, ids, scores):
        first = module(x, ids, scores)
        with torch.no_grad():
            other = torch.func.functional_call(module, teacher, (x, ids, scores))
        return first, other, module(x.flip(0), ids.flip(0), scores.flip(0)).flip(0)

    compiled, eager = torch.compile(run, backend="aot_eager", fullgraph=True)(*inputs), run(*inputs)
    assert_equal(compiled, eager)
    assert_equal(*(torch.autograd.grad(outs[0].sum(), inputs[0]) for outs in (compiled, eager)))


def test_threads():
    """That call a frozen module at once with two sets of weights, and their backwards."""
    module, (x, ids, scores) = _make("both", False)
    student, start = module.for_layer(), threading.Barrier(4)
    teacher = student._replace(weights=ExpertWeights(**_teacher(module)))  # functional_call would change the module

    def run(experts):
        leaf = x.detach().requires_grad_()
        if experts.cache is not None:
            start.wait()
        out = run_layer(leaf, ids, scores, experts)
        return [out.detach(), *torch.autograd.grad(out.sum(), leaf)]

    want = [run(experts._replace(cache=None)) for experts in (student, teacher)]
    with ThreadPoolExecutor(4) as pool:
        found = [*pool.map(run, [student, teacher] * 8)]
    for index, got in enumerate(found):
        assert_equal(got, want[index % 2])
