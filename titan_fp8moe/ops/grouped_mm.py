"""The GEMMs over expert groups: along M (forward, input gradient), along the contraction dim (weight gradient).

:mod:`titan_fp8moe.recipe` specifies the results. Both ops have a formula in ``torch.utils.flop_counter``. It knows no
group ends and counts all rows of the buffer: each group's padding, and the rows at and past ``offsets_E[-1]``.
"""

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from titan_fp8moe import recipe
from titan_fp8moe.kernels.gemm import grouped_mm as kernels
from titan_fp8moe.ops.backend import custom_op, use_kernels
from titan_fp8moe.recipe import TILE


@custom_op
def grouped_mm(
    a_MK: Tensor,
    a_scale: Tensor,
    b_ENK: Tensor,
    b_scale: Tensor,
    offsets_E: Tensor,
    out_dtype: torch.dtype,
    columns: int | None = None,
) -> Tensor:
    """:func:`titan_fp8moe.recipe.grouped_mm`. ``a_scale`` is column-major, ``b_scale`` may have any strides.

    ``out_dtype`` is bf16 or fp32, ``columns`` a multiple of 16. Rows at and past ``offsets_E[-1]`` are undefined.
    """
    if use_kernels(a_MK):
        return kernels.grouped_mm(a_MK, a_scale, b_ENK, b_scale, offsets_E, out_dtype, columns)
    # The recipe returns a view of all columns; graphs are compiled for the fake's strides.
    return recipe.grouped_mm(a_MK, a_scale, b_ENK, b_scale, offsets_E, out_dtype, columns).contiguous()


@grouped_mm.register_fake
def _(a_MK, a_scale, b_ENK, b_scale, offsets_E, out_dtype, columns=None):
    return a_MK.new_empty(a_MK.shape[0], columns or b_ENK.shape[1], dtype=out_dtype)


@register_flop_formula(torch.ops.titan_fp8moe.grouped_mm)
def _grouped_mm_flops(a_shape, a_scale_shape, b_shape, *args, **kwargs) -> int:
    """2 M N K. Padding rows and unused rows of the buffer count."""
    (M, K), (_, N, _) = a_shape, b_shape
    return 2 * M * N * K


@custom_op
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
    """:func:`titan_fp8moe.recipe.grouped_mm_wgrad`. Scales may have any strides, the result is contiguous.

    Raises:
        ValueError: N is no multiple of 128 for each of ``parts``. Or ``rows`` or ``columns`` is too large, or as many
            values of ``out_dtype`` take no multiple of 16 bytes.
    """
    if (N := aT_NM.shape[0]) % (parts * TILE):
        raise ValueError(f"grouped_mm_wgrad: N is {N}, but {parts} weights need a multiple of {parts * TILE}")
    for name, size, most in (("rows", rows, N // parts), ("columns", columns, bT_KM.shape[0])):
        if size is not None and not (0 < size <= most and size * out_dtype.itemsize % 16 == 0):
            raise ValueError(
                f"grouped_mm_wgrad: {name} is {size}; it must be in 1..{most}, and as many values of {out_dtype} a "
                "multiple of 16 bytes"
            )
    impl = kernels if use_kernels(aT_NM) else recipe
    # The recipe returns views; graphs are compiled for the fake's strides.
    return impl.grouped_mm_wgrad(
        aT_NM, aT_scale, bT_KM, bT_scale, offsets_E, out_dtype, parts, rows, columns, layout
    ).contiguous()


@grouped_mm_wgrad.register_fake
def _(
    aT_NM, aT_scale, bT_KM, bT_scale, offsets_E, out_dtype, parts=1, rows=None, columns=None, layout="apart",
):  # fmt: skip
    E, rows, columns = offsets_E.shape[0], rows or aT_NM.shape[0] // parts, columns or bT_KM.shape[0]
    shape = parts * E, rows, columns
    if layout != "apart":
        shape = (E, parts * rows, columns) if layout == "joined" else (E, columns, parts * rows)
    return aT_NM.new_empty(shape, dtype=out_dtype)


@register_flop_formula(torch.ops.titan_fp8moe.grouped_mm_wgrad)
def _grouped_mm_wgrad_flops(aT_shape, aT_scale_shape, bT_shape, *args, **kwargs) -> int:
    """2 M N K. Padding rows and unused rows of the buffer count."""
    (N, M), (K, _) = aT_shape, bT_shape
    return 2 * M * N * K
