"""The activation, the router's score and quantization in one op, forward and backward."""

import torch
from torch import Tensor

from titan_fp8moe import recipe
from titan_fp8moe.kernels import swiglu as kernels
from titan_fp8moe.ops.backend import custom_op, note_nan, use_kernels
from titan_fp8moe.recipe import E8M0, FP8, TILE
from titan_fp8moe.spec import ExpertSpec


def _fake_rows(like: Tensor, M: int, D: int) -> tuple[Tensor, Tensor]:
    return like.new_empty(M, D, dtype=FP8), like.new_empty(D // TILE, M, dtype=E8M0).t()


def _no_rows(like: Tensor) -> tuple[Tensor, Tensor]:
    return like.new_empty(0, dtype=FP8), like.new_empty(0, dtype=E8M0)


@custom_op
def swiglu_quantize(
    h_M2H: Tensor,
    score_M: Tensor | None,
    offsets_E: Tensor,
    spec: str,
    keep_h: bool,
    nan_flag: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """:func:`titan_fp8moe.recipe.swiglu_quantize` for rows in expert order; can also quantize h itself.

    Args:
        h_M2H: (M, 2H) bf16, gate then up.
        score_M: (M,) fp32, or None where there is no router.
        offsets_E: (E,) int32; rows of the results at and past ``offsets_E[-1]`` are undefined.
        spec: an encoded :class:`titan_fp8moe.spec.ExpertSpec`.
        keep_h: whether to also quantize h, for a backward that saves it in fp8.
        nan_flag: see :func:`titan_fp8moe.ops.backend.note_nan`.

    Returns:
        q (M, H) e4m3, its scale (M, H // 128) e8m0, h (M, 2H) e4m3, its scale (M, 2H // 128) e8m0; the last two are
        empty unless ``keep_h``. Scales are column-major.
    """
    expert = ExpertSpec.decode(spec)
    if use_kernels(h_M2H):
        return kernels.swiglu_quantize(h_M2H, score_M, offsets_E, expert, keep_h, nan_flag)
    q, scale = recipe.swiglu_quantize(h_M2H, score_M, expert)
    note_nan(q, nan_flag)
    if keep_h:
        h_q, h_scale = recipe.quantize_hidden(h_M2H, score_M, expert)
        return q, scale, h_q, recipe.column_major(h_scale)
    return q, scale, q.new_empty(0), scale.new_empty(0)


@swiglu_quantize.register_fake
def _(h_M2H, score_M, offsets_E, spec, keep_h, nan_flag=None):
    M, H2 = h_M2H.shape
    h = _fake_rows(h_M2H, M, H2) if keep_h else _no_rows(h_M2H)
    return *_fake_rows(h_M2H, M, H2 // 2), *h


@custom_op
def swiglu_quantize_backward(
    d_MH: Tensor,
    h_M2H: Tensor,
    h_scale: Tensor | None,
    score_M: Tensor | None,
    offsets_E: Tensor,
    spec: str,
    recompute_a: bool,
    nan_flag: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """:func:`titan_fp8moe.recipe.swiglu_quantize_backward` for rows in expert order.

    Args:
        d_MH: (M, H) bf16, the gradient of GEMM 2's operand.
        h_M2H: (M, 2H) bf16, or e4m3 with ``h_scale`` (M, 2H // 128) e8m0.
        score_M: (M,) fp32, or None where there is no router.
        offsets_E: (E,) int32; rows of the results at and past ``offsets_E[-1]`` are undefined.
        spec: as in the forward.
        recompute_a: whether to also return GEMM 2's operand, for a backward that did not save it.
        nan_flag: see :func:`titan_fp8moe.ops.backend.note_nan`; for dh.

    Returns:
        dh (M, 2H) e4m3, its scale (M, 2H // 128) e8m0, GEMM 2's operand (M, H) e4m3, its scale (M, H // 128) e8m0,
        ds (M,) fp32. The operand is empty unless ``recompute_a``, ds without ``score_M``. Scales are column-major.
    """
    expert = ExpertSpec.decode(spec)
    if use_kernels(d_MH):
        return kernels.swiglu_quantize_backward(d_MH, h_M2H, h_scale, score_M, offsets_E, expert, recompute_a, nan_flag)
    h = h_M2H if h_scale is None else recipe.dequantize(h_M2H, h_scale)
    dh, dh_scale, a, a_scale, ds = recipe.swiglu_quantize_backward(d_MH, h, score_M, expert)
    note_nan(dh, nan_flag)
    if not recompute_a:
        a, a_scale = a.new_empty(0), a_scale.new_empty(0)
    return dh, dh_scale, a, a_scale, ds if score_M is not None else ds.new_empty(0)


@swiglu_quantize_backward.register_fake
def _(d_MH, h_M2H, h_scale, score_M, offsets_E, spec, recompute_a, nan_flag=None):
    M, H = d_MH.shape
    a = _fake_rows(d_MH, M, H) if recompute_a else _no_rows(d_MH)
    ds = d_MH.new_empty(0 if score_M is None else M, dtype=torch.float32)
    return *_fake_rows(d_MH, M, 2 * H), *a, ds
