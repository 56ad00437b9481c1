"""Experts stored in FP8, also with block scales that are no powers of two, as DeepSeek, Qwen and GLM publish them.

``test_export_transformers.py`` loads such checkpoints with Transformers.
"""

import io

import pytest
import torch

from tests.layer import DEVICE, D, E, H, assert_equal, make_layer, refused
from titan_fp8moe import Fp8Weight, RoutedExperts, recipe, routed_experts

INTEGERS = {recipe.E8M0: torch.uint8, torch.float32: torch.int32, torch.bfloat16: torch.int16}


@pytest.mark.parametrize("dtype", INTEGERS)
def test_the_module_keeps_bytes(dtype: torch.dtype):
    """Through casts, graphs and state dicts. It shares a fused weight's memory, and reads no other dtype's scales."""
    x, scores, ids, weights = make_layer(dtype=torch.bfloat16)
    ints, powers = INTEGERS[dtype], [Fp8Weight.quantize(w) for w in weights]
    w1, w2, w3 = powers
    if dtype != recipe.E8M0:
        scales = [recipe.exp2(recipe.exponent(w.scale)) for w in powers]
        w1, w2, w3 = (Fp8Weight(w.q, (s * 1.3).to(dtype)) for w, s in zip(powers, scales, strict=True))
    experts = RoutedExperts.from_fp8(w1, w2, w3)
    want = routed_experts(x, w1, w2, w3, ids, scores)
    state = experts.state_dict()
    w13, w13_scale = experts.weights()[0]
    assert_equal([w13_scale.view(ints)], [torch.cat([w1.scale.view(ints), w3.scale.view(ints)], 1)])
    assert_equal([state["w13_scale"], state["w2_scale"]], [w13_scale.view(ints), w2.scale.view(ints)])
    assert sum(p.nbytes for p in experts.parameters()) == 3 * E * D * H * (1 + dtype.itemsize / 128**2)
    torch._dynamo.reset()
    compiled = torch.compile(experts, backend="aot_eager", fullgraph=True)
    other = RoutedExperts.from_fp8(*(Fp8Weight(*map(torch.zeros_like, w)) for w in (w1, w2, w3)))
    torch.save(state, file := io.BytesIO())
    other.load_state_dict(torch.load(io.BytesIO(file.getvalue())))
    fused = RoutedExperts.from_fp8(Fp8Weight(w13, w13_scale), w2)
    assert fused.w13.data_ptr() == w13.data_ptr()
    for module in (experts.float().bfloat16(), compiled, other, fused):
        assert torch.equal(module(x, ids, scores), want)
    with pytest.raises(RuntimeError, match="floating point"):
        experts.requires_grad_()
    if dtype != recipe.E8M0:
        with refused(f"w2_scale is {ints}", "from_fp8", error=RuntimeError):
            RoutedExperts.from_fp8(*powers).load_state_dict(state)
        with refused("gate and up must share E, K and the dtype of scales"):
            routed_experts(x, w1, w2, powers[2], ids, scores)


@pytest.mark.parametrize("hidden", [80, 200])
def test_gate_and_up_that_were_padded_as_one_are_refused(hidden: int):
    """They have the padded size of a larger H, of which gate would read rows of up."""
    w1, w2, w3 = (torch.randn(E, *shape, device=DEVICE) for shape in ((hidden, D), (D, hidden), (hidden, D)))
    fused, down = Fp8Weight.quantize(torch.cat([w1, w3], 1)), Fp8Weight.quantize(w2)
    with refused("padded as one", "as w1 and w3"):
        RoutedExperts.from_fp8(fused, down)
    RoutedExperts.from_fp8(Fp8Weight.quantize(w1), down, Fp8Weight.quantize(w3))
