"""The experts' weights: seen when they change, shared by microbatches, gathered in FP8."""

import copy
import functools
import pickle
import types
import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from tests.layer import CastCounter, make_layer, run
from titan_fp8moe import RoutedExperts, ops, routed_experts
from titan_fp8moe.config import Fp8FlowMoEConfig
from titan_fp8moe.layer import fp8_gather
from titan_fp8moe.layer.fp8_gather import Fp8GatheredWeight
from titan_fp8moe.torchtitan.converter import _SAVED_OPS


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
    return torch.nn.Parameter(Fp8GatheredWeight(ops.quantize_weight(weight.detach()), weight.shape[1:], weight.dtype))


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
        assert "quantize_weights" not in counter.ops and not counter.stray_casts
        for a, b in zip(got, want, strict=True):
            assert a.dtype == b.dtype and torch.equal(a, b)


def test_gate_and_up_that_were_padded_as_one():
    """The operand has padding behind each of the two."""
    x, scores, chosen, (w1, w2, _) = make_layer()
    fused, down = gathered(torch.randn(w1.shape[0], 160, w1.shape[2])), gathered(w2[:, :, :80])
    with pytest.raises(ValueError, match="keep them as w1 and w3"):
        routed_experts(x, fused, down, None, chosen, scores)


def test_weights_that_come_quantized_have_no_other_values():
    weight = gathered(torch.randn(2, 128, 256))
    assert weight.view_as(weight).quantized is weight.quantized
    assert weight.as_strided(weight.shape, weight.stride(), 0).quantized is weight.quantized
    transposed = weight.shape, (128 * 256, 1, 128)
    views = (lambda w: w[0], lambda w: w.view(-1), lambda w: w.as_strided(*transposed))
    for read in (torch.Tensor.sum, torch.Tensor.clone, torch.Tensor.double, *views):
        with pytest.raises(NotImplementedError, match="fp8_flow_moe.fp8_all_gather = false"):
            read(weight)


def test_weights_gathered_elsewhere_are_not_taken_for_these():
    """FSDP refills the memory that it gathered into the first time; the parameter is not made anew."""
    weight = gathered(torch.randn(2, 128, 256))
    here = [t.view(torch.uint8) for t in weight.quantized]
    elsewhere = [t.clone() for t in here]
    fp8_gather._post_all_gather(here, None, weight.dtype, out=weight)
    with pytest.raises(RuntimeError, match="fp8_flow_moe.fp8_all_gather = false"):
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
        assert other.fsdp_pre_all_gather.shard() is None
    alive = weakref.ref(shard)
    del shard
    assert alive() is None


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
