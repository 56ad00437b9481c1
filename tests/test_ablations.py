"""The ablations of experiments/ablations.py against the specification."""

import pytest
import torch
import torch.nn.functional as F

from experiments.ablations import dequantize_transpose_requantize, permute_then_copy, requantized_pair
from experiments.numerics import double_quantization
from tests.layer import DEVICE, CastCounter, assert_equal
from tests.processes import run_script
from titan_fp8moe import grouped_mm, ops, recipe, routed_experts

M, D, N = 384, 256, 128


def quantized_rows(M: int, D: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of different sizes, one row and one 128x128 block of zeros."""
    x = torch.randn(M, D, device=DEVICE) * 2.0 ** torch.randint(-12, 13, (M, 1), device=DEVICE)
    x[5], x[128:256, :128] = 0, 0
    return recipe.quantize_rows(x)


@pytest.fixture
def eager():
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.mark.parametrize("columns", [128, 1])
def test_requantized_values(eager, columns):
    """Each scale is the smallest whose block fits e4m3, and each value is rounded once more, to half an ulp."""
    q, scale = quantized_rows(M, D)
    q_t, scale_t = dequantize_transpose_requantize(q, scale, columns)
    assert q_t.shape == (D, M) and scale_t.shape == (D // columns, M // 128)
    x = recipe.dequantize(q, scale, torch.float64).t()
    factor = torch.exp2(recipe.exponent(scale_t).double())
    amax = x.abs().view(D // columns, columns, M // 128, 128).amax((1, 3))
    assert (amax <= 448 * factor).all()
    smallest = scale_t.view(torch.uint8) == 1
    assert ((amax > 224 * factor) | smallest).all() and torch.equal(smallest, amax == 0)
    error = (recipe.dequantize(q_t, scale_t, torch.float64) - x).abs()
    # 3 bits of mantissa; e4m3's subnormals are multiples of 2**-9.
    bound = (x.abs() / 16).maximum(factor.repeat_interleave(columns, 0).repeat_interleave(128, 1) * 2.0**-10)
    assert (error <= bound).all() and (error > 0).any()


def test_same_gemm_as_the_recipe(eager):
    """x in token order, and the GEMM of the weight gradient on its results."""
    token_M = torch.randint(-1, 50, (M,), dtype=torch.int32, device=DEVICE)
    (x, x_scale), (dy, dy_scale) = (recipe.quantize_rows(torch.randn(*s, device=DEVICE)) for s in ((50, D), (M, N)))
    offsets_E = torch.tensor([128, M], dtype=torch.int32, device=DEVICE)
    x_t, x_t_scale, dy_t, dy_t_scale = requantized_pair(x, x_scale, dy, dy_scale, offsets_E, "balanced", token_M)
    got = ops.grouped_mm_wgrad(dy_t, dy_t_scale, x_t, x_t_scale, offsets_E, torch.float32)
    x_rows = recipe.dequantize(*recipe.permute_rows(x, x_scale, token_M))
    dy_rows = recipe.dequantize(dy, dy_scale)
    for dw, rows in zip(got, (slice(0, 128), slice(128, M)), strict=True):
        want = dy_rows[rows].t() @ x_rows[rows]
        assert (dw - want).norm() < 0.05 * want.norm()


def test_both_stand_in_under_compile(monkeypatch):
    """They keep the signatures of the ops that they replace, and one graph."""
    x, offsets_E = quantized_rows(M, D), torch.tensor([M], dtype=torch.int32, device=DEVICE)
    token_M = torch.randperm(M, device=DEVICE).int()
    row_TK = token_M.argsort().int().unsqueeze(1)

    def both(q, scale, row_TK, token_M, offsets_E):
        rows = ops.permute_rows(q, scale, row_TK, token_M, offsets_E)
        return *rows, *ops.transpose_pair(*rows, *rows, offsets_E, "balanced")

    permuted = ops.permute_rows(*x, row_TK, token_M, offsets_E)
    monkeypatch.setattr(ops, "permute_rows", permute_then_copy)
    monkeypatch.setattr(ops, "transpose_pair", requantized_pair)
    got = torch.compile(both, backend="aot_eager", fullgraph=True)(*x, row_TK, token_M, offsets_E)
    want = *permuted, *(2 * dequantize_transpose_requantize(*permuted))
    assert_equal(got, want)


def test_naive_blockwise():
    """A product per weight, each near bf16's."""
    script = """
import torch
from torchtitan.models.moe import moe
import experiments.throughput.setting as setting
from experiments.reference import relative_error
weights = [torch.randn(4, n, k) * 0.1 for n, k in ((128, 256), (256, 128), (128, 256))]
x, counts = torch.randn(96, 256), torch.tensor([32, 0, 40, 24])
want = moe._run_experts_for_loop(*weights, x, counts)
setting.naive_blockwise(None)
print(float(relative_error(moe._run_experts_grouped_mm(*weights, x, counts), want)))
"""
    found = run_script("-c", script)
    assert 0.02 < float(found.stdout) < 0.1, found.stderr


def test_only_fp32_scales_round_twice():
    """experiments/numerics: powers of two add no error by a second rounding, unless tokens differ in size."""
    normal, opposed = (double_quantization.errors(0, binades) for binades in (0, 3))
    columns, once = "rows, then columns", "once"
    assert normal[f"{columns}: fp32 scales"] > 1.3 * normal[f"{once}: fp32 scales"]
    for name in (columns, "balanced", "scaling_aware"):
        assert normal[f"{name}: powers of two"] == pytest.approx(normal[f"{once}: powers of two"], rel=0.01)
    assert opposed["balanced: powers of two"] == pytest.approx(opposed[f"{once}: powers of two"], rel=0.01)
    assert opposed["scaling_aware: powers of two"] > 1.5 * opposed[f"{columns}: powers of two"] > 0.1


def test_casts_of_a_conventional_flow_and_of_ours():
    """With a cast around each of three GEMMs rows of x and dy are cast six times. Their columns, which the weight
    gradients need, take six more where nobody transposes in FP8, as this stand-in does. Ours casts x and dout."""
    shapes = (2, 128, 256), (2, 256, 128), (2, 128, 256), (64, 256)
    w1, w2, w3, x = (torch.randn(s, device=DEVICE, dtype=torch.bfloat16).requires_grad_() for s in shapes)
    offs = torch.tensor([32, 64], dtype=torch.int32, device=DEVICE)
    with CastCounter() as conventional:
        gate, up = (grouped_mm(x, w.transpose(1, 2), offs=offs) for w in (w1, w3))
        grouped_mm(F.silu(gate) * up, w2.transpose(1, 2), offs=offs).sum().backward()
    assert conventional.ops["quantize_rows"] == 6 and 2 * conventional.ops["transpose_pair"] == 6
    ids = torch.arange(64, device=DEVICE).unsqueeze(1) // 32
    with CastCounter() as ours:
        routed_experts(x, w1, w2, w3, ids, torch.ones(64, 1, device=DEVICE)).sum().backward()
    assert ours.ops["quantize_rows"] == 2 and not ours.stray_casts
