"""The transpose of a weight gradient's two operands, fp8 to fp8."""

from torch import Tensor

from titan_fp8moe import recipe
from titan_fp8moe.kernels import transpose as kernels
from titan_fp8moe.ops.backend import custom_op, use_kernels
from titan_fp8moe.recipe import E8M0, TILE, TRANSPOSE_MODES


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
    """:func:`titan_fp8moe.recipe.transpose_pair` of rows in expert order; errors as there.

    Args:
        offsets_E: (E,) int32; columns of the results at and past ``offsets_E[-1]`` are undefined.
        token_M: with it, rows of x and its scale may be strided, as in a dispatched payload.
    """
    if mode not in TRANSPOSE_MODES:
        raise ValueError(f"transpose_pair: mode is {mode!r}; set it to one of {TRANSPOSE_MODES}")
    if use_kernels(x_MD):
        return kernels.transpose_pair(x_MD, x_scale, dy_MN, dy_scale, offsets_E, mode, token_M)
    return recipe.transpose_pair(x_MD, x_scale, dy_MN, dy_scale, mode, token_M)


@transpose_pair.register_fake
def _(x_MD, x_scale, dy_MN, dy_scale, offsets_E, mode, token_M=None):
    M = dy_MN.shape[0]

    def transposed(q):
        D = q.shape[1]
        return q.new_empty(D, M), q.new_empty(D // TILE, M // TILE, dtype=E8M0)

    return *transposed(x_MD), *transposed(dy_MN)
