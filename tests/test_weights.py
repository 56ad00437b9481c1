"""The experts' weights: seen when they change, shared by microbatches, gathered in FP8."""

import copy
import functools
import pickle
import types
import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from tests.layer import CastCounter, apply_layer, make_layer, run
from titan_fp8moe import Fp8FlowLinear, RoutedExperts, ops, routed_experts
from titan_fp8moe.config import Fp8FlowMoEConfig
from titan_fp8moe.layer import cache as cache_module
from titan_fp8moe.layer import fp8_gather
from titan_fp8moe.layer.cache import WeightCache
from titan_fp8moe.layer.fp8_gather import Fp8GatheredWeight
from titan_fp8moe.layer.weights import ExpertWeights, both_operands
from titan_fp8moe.spec import BackwardSpec
from titan_fp8moe.torchtitan.converter import _SAVED_OPS


def test_changed_weights_are_seen():
    """No quantized weight survives a change of its parameter, however it is changed."""
    x, scores, chosen, weights = make_layer()
    params = [torch.nn.Parameter(w.clone()) for w in weights]
    first = routed_experts(x, *params, chosen, scores)
    with torch.no_grad():
        for p in params:
            p.data.mul_(2.0)
    torch.testing.assert_close(
        routed_experts(x, *params, chosen, scores),
        routed_experts(x, *[w * 2 for w in weights], chosen, scores),
        rtol=0,
        atol=0,
    )
    assert not torch.equal(first, routed_experts(x, *params, chosen, scores))


@pytest.mark.parametrize("trained", [(0,), (1,), (2,), (0, 2), (1, 2)])
def test_only_weights_that_are_trained_have_gradients(trained):
    x, scores, chosen, weights = make_layer()
    want = run(x, scores, chosen, weights, x, Fp8FlowMoEConfig())[3:]
    for i in trained:
        weights[i].requires_grad_()
    routed_experts(x, *weights, chosen, scores).backward(x)
    for i, (w, grad) in enumerate(zip(weights, want, strict=True)):
        assert torch.equal(w.grad, grad) if i in trained else w.grad is None


def gathered(weight):
    """A parameter as FSDP makes it of gathered FP8."""
    return torch.nn.Parameter(Fp8GatheredWeight(ops.quantize_weight(weight.detach()), weight.dtype))


@pytest.mark.parametrize("recompute", ["none", "activation", "experts"])
def test_weights_that_come_quantized(recompute):
    """Same numbers, nothing quantized again, gradients in the parameters' dtype; with checkpointing by op, too."""
    x, scores, chosen, weights = make_layer()
    weights = [w.bfloat16() for w in weights]
    config = Fp8FlowMoEConfig(recompute=recompute)
    want = run(x, scores, chosen, weights, x, config)[1:]
    leaves = [t.requires_grad_() for t in (x.clone(), scores, *map(gathered, weights))]

    def layer(x):
        return routed_experts(x, *leaves[2:], chosen, leaves[1], config=config)

    contexts = functools.partial(create_selective_checkpoint_contexts, list(_SAVED_OPS))
    for forward in (layer, functools.partial(checkpoint, layer, use_reentrant=False, context_fn=contexts)):
        with CastCounter() as counter:
            got = torch.autograd.grad(forward(leaves[0]), leaves, x.detach())
        assert "quantize_weight" not in counter.ops and not counter.stray_casts
        for a, b in zip(got, want, strict=True):
            assert a.dtype == b.dtype and torch.equal(a, b)


def test_weights_that_come_quantized_have_no_other_values():
    weight = gathered(torch.randn(2, 128, 256))
    assert weight.view_as(weight).quantized is weight.quantized
    assert weight.as_strided(weight.shape, weight.stride(), 0).quantized is weight.quantized
    transposed = weight.shape, (128 * 256, 1, 128)
    for read in (
        torch.Tensor.sum,
        torch.Tensor.clone,
        torch.Tensor.double,
        lambda w: w[0],
        lambda w: w.view(-1),
        lambda w: w.as_strided(*transposed),
    ):
        with pytest.raises(NotImplementedError, match="fp8_flow_moe.fp8_all_gather = false"):
            read(weight)


def test_weights_gathered_elsewhere_are_not_taken_for_these():
    """FSDP refills the memory that it gathered into the first time; the parameter is not made anew."""
    weight = gathered(torch.randn(2, 128, 256))
    here, elsewhere = (
        [t.view(torch.uint8) for t in ts] for ts in (weight.quantized, map(torch.clone, weight.quantized))
    )
    fp8_gather._post_all_gather(here, None, weight.dtype, out=weight)
    with pytest.raises(RuntimeError, match="other memory.*fp8_flow_moe.fp8_all_gather = false"):
        fp8_gather._post_all_gather(elsewhere, None, weight.dtype, out=weight)


def test_parameters_to_be_gathered_can_be_copied_and_saved():
    shard = torch.randn(2, 128, 128)
    fp8_gather.gather_in_fp8(types.SimpleNamespace(_local_tensor=shard))
    mesh_and_policy = [None] * 5
    (q, scale), _ = shard.fsdp_pre_all_gather(*mesh_and_policy)
    want = ops.quantize_weight(shard)
    assert torch.equal(q, want.q.view(torch.uint8)) and torch.equal(scale, want.scale.view(torch.uint8))
    for other in (pickle.loads(pickle.dumps(shard)), copy.deepcopy(shard)):
        assert torch.equal(other, shard)
        with pytest.raises(RuntimeError, match="copy of a parameter that FSDP gathers in FP8"):
            other.fsdp_pre_all_gather(*mesh_and_policy)
    alive = weakref.ref(shard)
    del shard
    assert alive() is None


@pytest.mark.parametrize("recompute", ["none", "activation", "experts"])
def test_gemm_1s_weights_are_quantized_again_only_to_repeat_it(recompute):
    weights = ExpertWeights(*make_layer()[3])
    operands = cache_module.cached_backward_operands(weights, None, BackwardSpec(recompute))
    assert (operands.w13 is not None) == (recompute == "experts")


@pytest.mark.parametrize("recompute", ["none", "activation", "experts"])
def test_microbatches_share_quantized_weights(recompute):
    x, scores, chosen, weights = make_layer()
    config, cache = Fp8FlowMoEConfig(recompute=recompute, cache_weights=True), WeightCache()
    leaves = [t.requires_grad_() for t in (x, scores, *weights)]

    def gradients(cache):
        with CastCounter() as counter:
            out = apply_layer(x, ExpertWeights(*weights), chosen, leaves[1], config=config, cache=cache)
            return torch.autograd.grad(out.square().sum(), leaves), counter.ops["quantize_weight"]

    want, _ = gradients(None)
    for quantizations in (2, 0, 0):  # both layouts of an operand at once
        got, count = gradients(cache)
        assert count == quantizations
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a, b)
    with torch.no_grad():
        weights[1].mul_(0.5)
        apply_layer(x, ExpertWeights(*weights), chosen, scores, config=config, cache=cache)
    want, _ = gradients(None)
    got, count = gradients(cache)
    assert count == 2 and torch.equal(got[0], want[0])


def test_stale_weights_are_freed_before_there_are_others(monkeypatch):
    weights = ExpertWeights(*make_layer()[-1])
    cache = WeightCache()
    old = weakref.ref(cache.get(weights)[0][0].q)
    weights.w1.mul_(0.5)
    quantize, alive = ops.quantize_weight_both, []
    monkeypatch.setattr(ops, "quantize_weight_both", lambda *w: alive.append(old() is not None) or quantize(*w))
    cache.get(weights)
    assert alive == [False, False]


@pytest.mark.parametrize("make", [
    lambda config: RoutedExperts(2, 128, 128, config=config), lambda config: Fp8FlowLinear(128, 128, config=config)
], ids=["RoutedExperts", "Fp8FlowLinear"])  # fmt: skip
def test_loading_a_state_dict_clears_a_modules_cache(make, monkeypatch):
    """Also where parameters have no versions, as under FSDP."""
    monkeypatch.setattr(cache_module, "_cache_key", lambda weight: 0)
    module = make(Fp8FlowMoEConfig(cache_weights=True))
    tensors = [p.detach() if p.dim() == 3 else p.detach()[None] for p in module.parameters()]
    quantize = both_operands if len(tensors) == 3 else ops.quantize_weight_both
    module.cache.get(tensors, quantize)
    module.load_state_dict(module.state_dict())
    assert module.cache.operands is None
    if isinstance(module, RoutedExperts):
        module.configure(Fp8FlowMoEConfig())
        module.load_state_dict(module.state_dict())


def test_experts_of_one_seed():
    """They differ, and what is drawn next does not depend on their number."""

    def draw(num_experts):
        torch.manual_seed(0)
        return RoutedExperts(num_experts, 128, 256), torch.rand(1)

    (module, after), (_, after_one) = draw(4), draw(1)
    assert torch.equal(after, after_one)
    experts = [w.flatten() for p in module.parameters() for w in p]
    assert len({tuple(w[:8].tolist()) for w in experts}) == len(experts) == 12
    for weight in (module.w1, module.w2):
        assert 0.99 < weight.abs().max() * weight.shape[2] ** 0.5 <= 1


def test_a_cache_knows_whose_weights_it_has():
    """Others with the same version, also where the old ones' memory is theirs now; and its copy is of none."""
    cache = WeightCache()
    for _ in range(3):
        weights = ExpertWeights(*make_layer()[-1])
        (w13, w2), _ = cache.get(weights)
        assert torch.equal(w2.q.view(torch.uint8), ops.quantize_weight(weights.w2).q.view(torch.uint8))
        del weights, w13, w2
    both = [torch.stack(pair) for pair in zip(make_layer()[-1], make_layer()[-1], strict=True)]
    views = [ExpertWeights(*(w[i] for w in both)) for i in range(2)]  # two layers' weights in one storage
    views.append(ExpertWeights(*(w.view(w.mT.shape) for w in views[1])))  # and others in the same place
    for weights in views:
        (_, w2), _ = cache.get(weights)
        assert torch.equal(w2.q.view(torch.uint8), ops.quantize_weight(weights.w2).q.view(torch.uint8))
    for other in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))):
        assert isinstance(other, WeightCache) and other.operands is None


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


def test_a_cache_under_compile():
    """It is asked for each time; a single graph, which could not, is refused."""
    x, scores, chosen, weights = make_layer()
    weights, cache, config = ExpertWeights(*map(torch.nn.Parameter, weights)), WeightCache(), Fp8FlowMoEConfig()

    def layer(x):
        return apply_layer(x, weights, chosen, scores, config=config, cache=cache)

    compiled = torch.compile(layer, backend="aot_eager")
    for _ in range(2):
        assert torch.equal(compiled(x), routed_experts(x, *weights, chosen, scores))
        with torch.no_grad():
            weights.w2.mul_(0.5)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="do without the cache"):
        torch.compile(layer, backend="aot_eager", fullgraph=True)(x)


@pytest.mark.parametrize("microbatches, dtype", [(1, torch.float32), (3, torch.float32), (3, torch.bfloat16)])
def test_stale_weights_are_noticed(microbatches, dtype):
    """Where an optimizer that is not torch.optim's updates parameters through ``.data``, at the latest when a cache has
    been used twice as often. Caches that are cleared by hand, and weights that do not change, raise nothing."""
    x, scores, chosen, weights = make_layer(dtype=dtype)
    weights, config = ExpertWeights(*map(torch.nn.Parameter, weights)), Fp8FlowMoEConfig()

    def steps(cache, count, update):
        for step in range(count):
            for _ in range(microbatches):
                apply_layer(x, weights, chosen, scores, config=config, cache=cache).sum().backward()
                if x.is_cuda:
                    torch.cuda.synchronize()
            for w in weights:
                w.data.sub_(w.grad, alpha=1e-3 if update else 0)
                w.grad = None
            yield step

    assert len(list(steps(WeightCache(), 4, update=False))) == 4
    for _ in steps(WeightCache(), 4, update=True):
        WeightCache.clear_all()
    with pytest.raises(RuntimeError, match="stale weights.*clear_all.*cache_weights to false"):
        list(steps(WeightCache(), 4, update=True))


def test_samples_are_of_every_expert_and_weight():
    for weights in ([w.clone() for w in make_layer()[-1]], [w.mT.contiguous().mT for w in make_layer()[-1]]):
        before = cache_module._sample(weights)
        for i, w in enumerate(weights):
            for e in range(w.shape[0]):
                changed = [v.clone() for v in weights]
                changed[i][e] *= -1
                share = (cache_module._sample(changed) != before).float().mean()
                assert 0.5 < share * len(weights) * w.shape[0] < 1.5


@pytest.mark.gpu
def test_a_cache_is_refused_in_a_cuda_graph():
    cache, weights = WeightCache(), ExpertWeights(*make_layer()[-1])
    cache.get(weights)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="cache_weights inside a CUDA graph"), torch.cuda.graph(graph):
        cache.get(weights)


@pytest.mark.gpu
def test_a_captured_optimizer_is_noticed():
    """Its replays run no hook."""
    x, scores, chosen, weights = make_layer(dtype=torch.bfloat16)
    weights, cache = ExpertWeights(*map(torch.nn.Parameter, weights)), WeightCache()
    optimizer = torch.optim.SGD(weights, lr=1.0)
    for w in weights:
        w.grad = torch.ones_like(w)
    optimizer.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    with pytest.raises(RuntimeError, match="stale weights"):  # noqa: PT012
        for _ in range(6):
            apply_layer(x, weights, chosen, scores, config=Fp8FlowMoEConfig(), cache=cache)
            torch.cuda.synchronize()
            graph.replay()


def test_any_optimizer_step_clears_caches():
    """Where it leaves versions as they are, as with FSDP's parameters."""
    weights = ExpertWeights(*map(torch.nn.Parameter, make_layer()[-1]))
    cache = WeightCache()
    old = cache.get(weights)
    assert cache.get(weights) is old
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0).step()
    assert cache.get(weights) is not old
