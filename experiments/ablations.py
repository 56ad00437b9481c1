"""Compiled PyTorch functions that experiments compare parts of the recipe with."""

import torch
from torch import Tensor

from titan_fp8moe import recipe
from titan_fp8moe.recipe import E8M0, TILE


def dequantize_transpose_requantize(q_MD: Tensor, scale: Tensor, columns: int = TILE) -> tuple[Tensor, Tensor]:
    """Transposes fp8 rows through fp32: dequantizes them, transposes, and quantizes a second time.

    The baseline that arXiv 2511.02302 compares its scaling-aware transpose with; the second quantization rounds again.
    It replaces one operand of :func:`titan_fp8moe.recipe.transpose_pair`.

    Args:
        q_MD: (M, D) e4m3, M and D multiples of 128.
        scale: (M, D // 128) e8m0, any strides.
        columns: how many columns share a scale over 128 rows. 128 gives a scale per 128x128 block, as the weight
            gradient's GEMM takes it; 1 gives a scale per 128x1 tile, the paper's naive baseline, which it does not.

    Returns:
        qT (D, M) e4m3 and its scale (D // columns, M // 128) e8m0, from the amax of the dequantized values.
    """
    # Inductor has no e8m0 on a CPU: scales pass as bytes.
    q_t, byte = _requantize(q_MD, scale.view(torch.uint8), columns)
    return q_t, byte.view(E8M0)


@torch.compile
def _requantize(q_MD: Tensor, byte_MG: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    M, D = q_MD.shape
    x_DM = recipe.dequantize(q_MD, byte_MG).t().contiguous()
    q, byte = recipe.quantize_tiles(x_DM.view(D // columns, columns, M // TILE, TILE), (1, 3))
    return q.view(D, M), byte.view(D // columns, M // TILE).to(torch.uint8)


def requantized_pair(
    x_MD: Tensor,
    x_scale: Tensor,
    dy_MN: Tensor,
    dy_scale: Tensor,
    offsets_E: Tensor,
    mode: str,
    token_M: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Stands in for :func:`titan_fp8moe.ops.transpose_pair`, whatever the ``mode``: requantizes both operands.

    Arguments and results are those of the op, so the same weight-gradient GEMM follows.
    """
    if token_M is not None:
        x_MD, x_scale = recipe.permute_rows(x_MD, x_scale, token_M)
    return *dequantize_transpose_requantize(x_MD, x_scale), *dequantize_transpose_requantize(dy_MN, dy_scale)
