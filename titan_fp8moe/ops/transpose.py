"""Transposes of the weight gradient's operands, fp8 to fp8."""

from torch import Tensor

from titan_fp8moe import recipe
from titan_fp8moe.kernels import transpose as kernels
from titan_fp8moe.ops.backend import custom_op, use_kernels
from titan_fp8moe.recipe import E8M0, TILE

MODES = ("balanced", "scaling_aware", "requantize")


@custom_op
def transpose_pair(
    x_MD: Tensor,
    x_scale: Tensor,
    dy_MN: Tensor,
    dy_scale: Tensor,
    offsets_E: Tensor,
    mode: str,
    token_M: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Both operands of a weight gradient, (M, D) and (M, N) e4m3 in expert order, with tokens as contraction dim.

    Their scales are e8m0, (M, D // 128) and (M, N // 128); ``mode`` is one of ``MODES``, else a ValueError. With
    ``token_M`` x and its scale are (T, D) and (T, D // 128) in token order, rows possibly strided (views of a payload).
    Returns xT (D, M), its scale, dyT (N, M), its scale; see :func:`titan_fp8moe.recipe.transpose_pair`.
    Columns at and past ``offsets_E[-1]`` are undefined.
    """
    if mode not in MODES:
        raise ValueError(f"transpose_pair: mode {mode!r}, expected one of {MODES}")
    if use_kernels(x_MD):
        return kernels.transpose_pair(x_MD, x_scale, dy_MN, dy_scale, offsets_E, mode, token_M)
    return recipe.transpose_pair(x_MD, x_scale, dy_MN, dy_scale, mode, token_M)


@transpose_pair.register_fake
def _(x_MD, x_scale, dy_MN, dy_scale, offsets_E, mode, token_M=None):
    M = dy_MN.shape[0]

    def like(q):
        D = q.shape[1]
        rows = D if mode == "requantize" else D // TILE
        return q.new_empty(D, M), q.new_empty(rows, M // TILE, dtype=E8M0)

    return *like(x_MD), *like(dy_MN)
