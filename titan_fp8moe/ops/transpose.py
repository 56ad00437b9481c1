"""The transpose of a weight gradient's two operands, fp8 to fp8."""

from torch import Tensor

from titan_fp8moe import recipe
from titan_fp8moe.kernels import transpose as kernels
from titan_fp8moe.ops.backend import with_kernel


def _transpose_pair(
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
    return recipe.transpose_pair(x_MD, x_scale, dy_MN, dy_scale, mode, token_M)


transpose_pair = with_kernel(_transpose_pair, kernels.transpose_pair)
