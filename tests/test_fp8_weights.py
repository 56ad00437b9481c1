"""Weights in FP8: frozen experts that are stored so, and parameters that FSDP gathers so."""

import copy
import pickle
import weakref

import pytest
import torch

from tests.layer import DEVICE, CastCounter, assert_equal, gathered, make_layer, refused
from titan_fp8moe import Fp8FlowMoEConfig, Fp8Weight, RoutedExperts, ops, recipe, routed_experts
from titan_fp8moe.layer import fp8_gather


def test_state_dicts_of_the_other_kind_are_refused():
    """Also with strict=False, where other names are no error: PyTorch would convert codes as numbers."""
    plain = RoutedExperts(2, 128, 128, device=DEVICE)
    stored = RoutedExperts.from_fp8(*(Fp8Weight.quantize(w) for w in (plain.w1, plain.w2, plain.w3)))
    codes = {"w2": stored.w2.view(recipe.FP8)}
    for module, state in ((stored, plain.state_dict()), (plain, stored.state_dict()), (plain, codes), (stored, codes)):
        before, outer = copy.deepcopy(module.state_dict()), torch.nn.ModuleDict({"experts": module})
        with refused("experts.w2 is", "RoutedExperts.from_fp8", error=RuntimeError):
            outer.load_state_dict({f"experts.{name}": value for name, value in state.items()}, strict=False)
        module.load_state_dict(before)


def test_settings_without_effect_on_stored_experts_are_refused():
    weights = (Fp8Weight.quantize(torch.zeros(2, 128, 128, device=DEVICE)) for _ in range(3))
    with refused("wgrad has no effect on experts stored in FP8"):
        RoutedExperts.from_fp8(*weights, config=Fp8FlowMoEConfig(wgrad="bf16"))


def test_deepseeks_blocks():
    """Scales are taken as they are, or rounded with the values. Their dtype decides: numbers in fp32 and bf16,
    exponents in e8m0 and uint8."""
    want = Fp8Weight.quantize(torch.randn(2, 256, 384, device=DEVICE))
    scale, exponents = recipe.exp2(recipe.exponent(want.scale)), want.scale.view(torch.uint8)
    other = scale * 1.3
    for given in (scale, scale.bfloat16(), want.scale, exponents, other, other.bfloat16()):
        got, rounded = (Fp8Weight.of_blocks(want.q, given, scales=scales) for scales in ("exact", "round"))
        assert_equal(got, (want.q, want.scale if given is exponents else given))
        assert [t.data_ptr() for t in got] == [want.q.data_ptr(), given.data_ptr()]
        factors = got.scale.double().repeat_interleave(128, 1).repeat_interleave(128, 2)
        assert_equal([got.dequantize(torch.float64)], [want.q.double() * factors])
        values = got.dequantize(torch.float32)
        assert_equal(rounded, got if got.scale.dtype == recipe.E8M0 else Fp8Weight.quantize(values))
    assert_equal([Fp8Weight.of_blocks(want.q, scale, scales="round").dequantize()], [want.dequantize()])
    got = Fp8Weight.of_blocks(want.q.mT.contiguous().mT, other.mT.contiguous().mT)
    assert_equal(got, (want.q, other))
    assert got.q.is_contiguous() and got.scale.is_contiguous()
    with refused("must be (E, N, K) e4m3 with one scale per 128x128 block"):
        Fp8Weight.of_blocks(want.q[:, :120], scale)
    integers = (torch.int8, torch.int16, torch.int32, torch.int64)
    for stored in (*map(exponents.to, integers), scale.half(), scale.to(recipe.FP8)):
        for scales in ("exact", "round"):
            with refused("one scale per 128x128 block, in fp32, bf16 or e8m0", f"(2, 2, 3) {stored.dtype}"):
                Fp8Weight.of_blocks(want.q, stored, scales=scales)


# --- gathered in FP8 by FSDP ------------------------------------------------------------------------------------------


def test_weights_that_come_quantized_are_not_quantized_again():
    x, scores, ids, weights = make_layer()
    leaves = [t.requires_grad_() for t in (x, scores, *map(gathered, weights))]
    with CastCounter() as counter:
        out = routed_experts(x, *leaves[2:], ids, scores, config=Fp8FlowMoEConfig(recompute="experts"))
        torch.autograd.grad(out.sum(), leaves)
    assert "quantize_weights" not in counter.ops and not counter.stray_casts


def test_weights_that_come_quantized_have_no_other_values():
    weight = gathered(torch.randn(2, 128, 256))
    assert weight.view_as(weight).quantized is weight.quantized
    assert weight.as_strided(weight.shape, weight.stride(), 0).quantized is weight.quantized
    transposed = weight.shape, (128 * 256, 1, 128)
    views = (lambda w: w[0], lambda w: w.view(-1), lambda w: w.as_strided(*transposed))
    for read in (torch.Tensor.sum, torch.Tensor.clone, torch.Tensor.double, *views):
        with pytest.raises(NotImplementedError, match="fp8_flow_moe.fp8_all_gather = false"):
            read(weight)


def test_parameters_to_be_gathered_can_be_copied_and_saved():
    shard = torch.randn(2, 128, 128)
    experts = fp8_gather.Fp8AllGather()
    experts.w1 = torch.nn.Parameter(torch.empty(0, 128, 128))
    experts.w1._local_tensor = shard
    experts.gather_in_fp8()
    mesh_and_policy = [None] * 5
    (q, scale), _ = shard.fsdp_pre_all_gather(*mesh_and_policy)
    want = ops.quantize_weight(shard)
    assert torch.equal(q, want.q.view(torch.uint8)) and torch.equal(scale, want.scale.view(torch.uint8))
    for other in (pickle.loads(pickle.dumps(shard)), copy.deepcopy(shard)):
        assert torch.equal(other, shard)
        assert other.fsdp_pre_all_gather.shard() is None
    alive = weakref.ref(shard)
    del shard, experts
    assert alive() is None
