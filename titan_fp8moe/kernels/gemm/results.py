"""The results of the weight gradients' GEMMs: which tensor a launch fills, for matrices of any size.

One launch fills the matrices of all parts where none of their rows is padding. Where some are, a launch fills those of
one part, in place: its descriptor has a dim for the experts, so that TMA drops the rows past an expert's last.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from titan_fp8moe.recipe import WGRAD_LAYOUTS


def wgrad(
    launch: Callable[..., None],
    operands: tuple[Tensor, Tensor, Tensor, Tensor],
    offsets_E: Tensor,
    out_dtype: torch.dtype,
    parts: int,
    rows: int | None,
    columns: int | None,
    layout: str,
) -> Tensor:
    """See :func:`titan_fp8moe.kernels.gemm.grouped_mm.grouped_mm_wgrad`.

    Args:
        launch: called with operands, ``offsets_E``, what to fill, and its ``parts``. With None for those the result is
            (E, rows, columns) of any strides but 1 along the columns, else as ``apart``.
        operands: aT_NM, aT_scale, bT_KM, bT_scale.
    """
    a, a_scale, b, b_scale = operands
    N, K, E, device = a.shape[0], b.shape[0], offsets_E.shape[0], a.device
    rows, columns = rows or N // parts, columns or K
    if layout == "transposed" and parts == 1:
        (a, a_scale, b, b_scale), (N, rows, columns), layout = (b, b_scale, a, a_scale), (K, columns, rows), "joined"
    if rows * parts == N and (layout == "apart" or parts == 1):
        out = torch.empty(parts * E, rows, columns, dtype=out_dtype, device=device)
        launch(a, a_scale, b, b_scale, offsets_E, out, parts)
        return out
    axis = WGRAD_LAYOUTS.index(layout)  # along which the parts follow each other
    shape = [E, columns, rows] if layout == "transposed" else [E, rows, columns]
    of_parts = torch.empty(*shape[:axis], parts, *shape[axis:], dtype=out_dtype, device=device)
    shape[axis] *= parts
    for part, part_scale, result in zip(a.chunk(parts), a_scale.chunk(parts), of_parts.unbind(axis), strict=True):
        pair = (b, b_scale, part, part_scale) if layout == "transposed" else (part, part_scale, b, b_scale)
        launch(*pair, offsets_E, result, None)
    return of_parts.view(shape)
