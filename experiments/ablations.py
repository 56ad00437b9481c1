"""What experiments put in place of parts of the recipe, to see what these are worth."""

import torch
from torch import Tensor

from titan_fp8moe import ops, recipe
from titan_fp8moe.recipe import BLOCK, E8M0


@torch.compile(dynamic=False)
def _requantize(q_MD: Tensor, byte_MG: Tensor) -> tuple[Tensor, Tensor]:
    M, D = q_MD.shape
    x_DM = recipe.dequantize(q_MD, byte_MG).t().contiguous()
    q, byte = recipe.quantize_tiles(x_DM.view(D // BLOCK, BLOCK, M // BLOCK, BLOCK), (1, 3))
    return q.view(D, M), byte.view(D // BLOCK, M // BLOCK).to(torch.uint8)


def requantized(q_MD: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """One operand of :func:`titan_fp8moe.recipe.transpose_pair` through fp32, as arXiv 2511.02302's baseline does."""
    q_DM, byte = _requantize(q_MD, scale.view(torch.uint8))  # Inductor has no e8m0 on a CPU
    return q_DM, byte.view(E8M0)


@torch.library.custom_op("experiments::requantized_pair", mutates_args=())
def requantized_pair(
    x_MD: Tensor,
    x_scale: Tensor,
    dy_MN: Tensor,
    dy_scale: Tensor,
    offsets_E: Tensor,
    mode: str,
    token_M: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Stands in for :func:`titan_fp8moe.ops.transpose_pair`, whatever the ``mode``: requantizes both operands."""
    if token_M is not None:
        x_MD, x_scale = recipe.permute_rows(x_MD, x_scale, token_M)
    return *requantized(x_MD, x_scale), *requantized(dy_MN, dy_scale)


@requantized_pair.register_fake
def _(x_MD, x_scale, dy_MN, dy_scale, offsets_E, mode, token_M=None):
    M, (K, N) = dy_MN.shape[0], (x_MD.shape[1], dy_MN.shape[1])
    scales = [x_scale.new_empty(columns // BLOCK, M // BLOCK) for columns in (K, N)]
    return x_MD.new_empty(K, M), scales[0], dy_MN.new_empty(N, M), scales[1]


_permute_rows = ops.permute_rows


def permute_then_copy(
    q_TD: Tensor, scale: Tensor, row_TK: Tensor, token_M: Tensor, offsets_E: Tensor
) -> tuple[Tensor, Tensor]:
    """Stands in for :func:`titan_fp8moe.ops.permute_rows`: one more pass over the rows in expert order.

    Permuting and padding in two launches moves as many bytes, where few rows are padding.
    """
    q_MD, scale = _permute_rows(q_TD, scale, row_TK, token_M, offsets_E)
    same_M = torch.arange(token_M.shape[0], dtype=torch.int32, device=token_M.device)
    return _permute_rows(q_MD, scale.contiguous(), same_M.unsqueeze(1), same_M, offsets_E)
