"""Products of low-rank adapters on quantized rows: :func:`titan_fp8moe.recipe.low_rank` and its gradients.

On a GPU they are PyTorch's bf16 grouped GEMMs on dequantized rows. These GEMMs read memory in steps of 16 bytes, so
ranks are padded to :data:`RANK_STEP`.
"""

import torch
from torch import Tensor

from titan_fp8moe import recipe
from titan_fp8moe.ops.backend import with_kernel
from titan_fp8moe.ops.quantize import dequantize_rows

RANK_STEP = 16


def _low_rank(q_MK, scale, a_ERK, b_ENR, offsets_E):
    """``a_ERK`` and ``b_ENR`` are contiguous or transposed views of what is."""
    return _rows_mm(_rows_mm(dequantize_rows(q_MK, scale, offsets_E), a_ERK, offsets_E), b_ENR, offsets_E)


def _low_rank_grads(x_MK, x_scale, dy_MN, dy_scale, a_ERK, b_ENR, offsets_E):
    x, dy = dequantize_rows(x_MK, x_scale, offsets_E), dequantize_rows(dy_MN, dy_scale, offsets_E)
    u, du = _rows_mm(x, a_ERK, offsets_E), _rows_mm(dy, b_ENR.transpose(1, 2), offsets_E)
    return torch._grouped_mm(du.t(), x, offs=offsets_E), torch._grouped_mm(dy.t(), u, offs=offsets_E)


def _rows_mm(x_MK: Tensor, w_ENK: Tensor, offsets_E: Tensor) -> Tensor:
    return torch._grouped_mm(x_MK, w_ENK.transpose(1, 2), offs=offsets_E)


low_rank = with_kernel(recipe.low_rank, _low_rank)
low_rank_grads = with_kernel(recipe.low_rank_grads, _low_rank_grads)
