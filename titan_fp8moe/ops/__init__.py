"""The functions of the FP8 data flow, one family per file.

On a GPU a function runs its Triton kernel, elsewhere its reference, most often of :mod:`titan_fp8moe.recipe`, which has
the documentation: shapes, layouts, errors. PyTorch sees the ops of the layers that call them
(:mod:`titan_fp8moe.layer`). :data:`BUILDING_BLOCKS` are ops themselves, for graphs of one's own.

None has a gradient, because autograd would cast the gradient of an FP8 tensor to FP8.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from titan_fp8moe.ops.all_to_all import start_all_to_all, wait
from titan_fp8moe.ops.backend import custom_op, emulate
from titan_fp8moe.ops.grouped_mm import grouped_mm, grouped_mm_wgrad, transpose_pair
from titan_fp8moe.ops.lora import low_rank, low_rank_grads
from titan_fp8moe.ops.permute import (
    dispatch_routing,
    expert_routing,
    pack_combine,
    pack_dispatch,
    permute_rows,
    unpermute_gradients,
    unpermute_sum,
)
from titan_fp8moe.ops.quantize import (
    Fp8Weight,
    block_scales,
    dequantize_rows,
    quantize_group,
    quantize_rows,
    quantize_weight,
    quantize_weight_transposed,
    quantize_weights,
    refresh_weight,
)
from titan_fp8moe.ops.swiglu import swiglu_quantize, swiglu_quantize_backward, swiglu_quantize_op
from titan_fp8moe.recipe import unpack_combine, unpack_dispatch

BUILDING_BLOCKS: dict[str, Callable[..., Any]] = {
    "quantize_rows": quantize_rows,
    "quantize_weight": quantize_weights,
    "transpose_pair": transpose_pair,
    "swiglu_quantize": swiglu_quantize_op,
    "grouped_mm": grouped_mm,
    "grouped_mm_wgrad": grouped_mm_wgrad,
}
"""``torch.ops.titan_fp8moe.<name>``."""

for _name, _function in BUILDING_BLOCKS.items():
    custom_op(_function, _name)


@register_flop_formula([torch.ops.titan_fp8moe.grouped_mm, torch.ops.titan_fp8moe.grouped_mm_wgrad])
def _flops(a_shape, a_scale_shape, b_shape, *args, **kwargs) -> int:
    """2 M N K. No group ends are known: all rows of the buffer count, also each group's padding."""
    return 2 * a_shape[0] * a_shape[1] * b_shape[-2]
