"""The GEMMs over expert groups: along M (forward, input gradient), along the contraction dim (weight gradient).

On a GPU scales may have any strides; ``a_scale`` of a forward is column-major.

Both ops have a formula in ``torch.utils.flop_counter``. It knows no group ends and counts all rows of the buffer: each
group's padding, and the rows at and past ``offsets_E[-1]``.
"""

import torch
from torch.utils.flop_counter import register_flop_formula

from titan_fp8moe import recipe
from titan_fp8moe.kernels.gemm import grouped_mm as kernels
from titan_fp8moe.ops.backend import custom_op


def _fake_mm(a_MK, a_scale, b_ENK, b_scale, offsets_E, out_dtype, columns=None):
    return a_MK.new_empty(a_MK.shape[0], columns or b_ENK.shape[1], dtype=out_dtype)


def _fake_wgrad(a, a_scale, b, b_scale, offsets_E, out_dtype, parts=1, rows=None, columns=None, layout="apart"):
    E, rows, columns = offsets_E.shape[0], rows or a.shape[0] // parts, columns or b.shape[0]
    shapes = dict(
        apart=(parts * E, rows, columns), joined=(E, parts * rows, columns), transposed=(E, columns, parts * rows)
    )
    return a.new_empty(shapes[layout], dtype=out_dtype)


grouped_mm = custom_op(recipe.grouped_mm, kernels.grouped_mm, _fake_mm)
grouped_mm_wgrad = custom_op(recipe.grouped_mm_wgrad, kernels.grouped_mm_wgrad, _fake_wgrad)


@register_flop_formula([torch.ops.titan_fp8moe.grouped_mm, torch.ops.titan_fp8moe.grouped_mm_wgrad])
def _flops(a_shape, a_scale_shape, b_shape, *args, **kwargs) -> int:
    """2 M N K. Padding rows and unused rows of the buffer count."""
    return 2 * a_shape[0] * a_shape[1] * b_shape[-2]
