"""The GEMMs over expert groups: along M (forward, input gradient), along the contraction dim (weight gradient)."""

import torch
from torch import Tensor

from titan_fp8moe import recipe
from titan_fp8moe.kernels.gemm import grouped_mm as kernels
from titan_fp8moe.ops.backend import custom_op, use_kernels
from titan_fp8moe.recipe import TILE


@custom_op
def grouped_mm(
    a_MK: Tensor, a_scale: Tensor, b_ENK: Tensor, b_scale: Tensor, offsets_E: Tensor, out_dtype: torch.dtype
) -> Tensor:
    """out[m] = a[m] @ b[e]^T, (M, N); see :func:`titan_fp8moe.recipe.grouped_mm`.

    ``a_MK`` and ``b_ENK`` (E, N, K) are e4m3, their scales e8m0: ``a_scale`` (M, K // 128), column-major, ``b_scale``
    (E, N // 128, K // 128), of any strides; ``offsets_E`` int32, ``out_dtype`` bf16 or fp32. Rows of the result at and
    past ``offsets_E[-1]`` are undefined.
    """
    impl = kernels if use_kernels(a_MK) else recipe
    return impl.grouped_mm(a_MK, a_scale, b_ENK, b_scale, offsets_E, out_dtype)


@grouped_mm.register_fake
def _(a_MK, a_scale, b_ENK, b_scale, offsets_E, out_dtype):
    return a_MK.new_empty(a_MK.shape[0], b_ENK.shape[1], dtype=out_dtype)


@custom_op
def grouped_mm_wgrad(
    aT_NM: Tensor,
    aT_scale: Tensor,
    bT_KM: Tensor,
    bT_scale: Tensor,
    offsets_E: Tensor,
    out_dtype: torch.dtype,
    parts: int = 1,
) -> Tensor:
    """out[e] = sum of a[m]^T b[m] over expert e's rows; (parts * E, N // parts, K) in ``out_dtype``, bf16 or fp32.

    ``aT_NM`` and ``bT_KM`` are e4m3, their scales e8m0, as :func:`titan_fp8moe.ops.transpose_pair` returns them; see
    :func:`titan_fp8moe.recipe.grouped_mm_wgrad`. A ValueError if N is no multiple of 128 for each of ``parts``.
    """
    if (N := aT_NM.shape[0]) % (parts * TILE):
        raise ValueError(f"grouped_mm_wgrad: N is {N}, but {parts} weights need a multiple of {parts * TILE}")
    impl = kernels if use_kernels(aT_NM) else recipe
    return impl.grouped_mm_wgrad(aT_NM, aT_scale, bT_KM, bT_scale, offsets_E, out_dtype, parts)


@grouped_mm_wgrad.register_fake
def _(aT_NM, aT_scale, bT_KM, bT_scale, offsets_E, out_dtype, parts=1):
    return aT_NM.new_empty(parts * offsets_E.shape[0], aT_NM.shape[0] // parts, bT_KM.shape[0], dtype=out_dtype)
