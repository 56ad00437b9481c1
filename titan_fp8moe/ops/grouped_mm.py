"""The GEMMs over expert groups: along M (forward, input gradient), along the contraction dim (weight gradient). And the
transpose of a weight gradient's two operands, fp8 to fp8.

On a GPU scales may have any strides; ``a_scale`` of a forward is column-major.
"""

from titan_fp8moe import recipe
from titan_fp8moe.kernels import transpose
from titan_fp8moe.kernels.gemm import grouped_mm as kernels
from titan_fp8moe.ops.backend import with_kernel

grouped_mm = with_kernel(recipe.grouped_mm, kernels.grouped_mm)
grouped_mm_wgrad = with_kernel(recipe.grouped_mm_wgrad, kernels.grouped_mm_wgrad)
transpose_pair = with_kernel(recipe.transpose_pair, transpose.transpose_pair)
