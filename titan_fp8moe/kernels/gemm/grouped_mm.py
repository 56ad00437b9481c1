"""GEMMs over expert groups: picks the kernels in Gluon on Hopper, and those in plain Triton elsewhere.

========================  ==============  ==============================
GEMM                      Hopper (sm_90)  other GPUs, Triton interpreter
========================  ==============  ==============================
:func:`grouped_mm`        ``forward``     ``portable``
:func:`grouped_mm_wgrad`  ``wgrad``       ``portable``
========================  ==============  ==============================

The tensor cores sum the products of a block of 128 with about 14 bits. Blocks are summed in fp32.
"""

import torch
from torch import Tensor

from titan_fp8moe.kernels.gemm import forward, portable, wgrad
from titan_fp8moe.kernels.gemm.launch import is_hopper


def grouped_mm(
    a_MK: Tensor,
    a_scale: Tensor,
    b_ENK: Tensor,
    b_scale: Tensor,
    offsets_E: Tensor,
    out_dtype: torch.dtype,
    columns: int | None = None,
) -> Tensor:
    """out[m] = a[m] @ b[e]^T for the expert e whose group holds row m; see :func:`titan_fp8moe.recipe.grouped_mm`.

    Args:
        a_MK: (M, K) e4m3, unit stride along K; a_scale: (M, K // 128) e8m0, column-major.
        b_ENK: (E, N, K) e4m3, contiguous; b_scale: (E, N // 128, K // 128) e8m0, any strides.
        offsets_E: (E,) int32 on the device, the groups' ends: non-decreasing multiples of 128.
        columns: how many of the N columns to store; TMA drops the others. Their bytes in a row are a multiple of 16.

    Returns:
        (M, N or columns) out_dtype; rows at and past ``offsets_E[-1]`` are left uninitialized.
    """
    impl = forward if is_hopper(a_MK) else portable
    return impl.grouped_mm(a_MK, a_scale, b_ENK, b_scale, offsets_E, out_dtype, columns)


def grouped_mm_wgrad(
    aT_NM: Tensor,
    aT_scale: Tensor,
    bT_KM: Tensor,
    bT_scale: Tensor,
    offsets_E: Tensor,
    out_dtype: torch.dtype,
    parts: int = 1,
    rows: int | None = None,
    columns: int | None = None,
    layout: str = "apart",
) -> Tensor:
    """out[e] = sum of a[m]^T b[m] over expert e's rows; see :func:`titan_fp8moe.recipe.grouped_mm_wgrad`.

    Args:
        aT_NM: (N, M) e4m3, unit stride along M; aT_scale: (N // 128, M // 128) e8m0, any strides.
        bT_KM: (K, M) e4m3, unit stride along M; bT_scale: (K // 128, M // 128) e8m0, any strides.
        offsets_E: (E,) int32 on the device, the groups' ends: non-decreasing multiples of 128.
        parts, rows, columns, layout: as in the recipe. TMA drops other rows and columns. The bytes of a result's row,
            and of ``rows`` if ``transposed``, are a multiple of 16.

    Returns:
        As the recipe, contiguous.
    """
    impl = wgrad if is_hopper(aT_NM) else portable
    return impl.grouped_mm_wgrad(aT_NM, aT_scale, bT_KM, bT_scale, offsets_E, out_dtype, parts, rows, columns, layout)
