"""The transpose of a weight gradient's two operands, fp8 to fp8."""

from titan_fp8moe import recipe
from titan_fp8moe.kernels import transpose as kernels
from titan_fp8moe.ops.backend import with_kernel

transpose_pair = with_kernel(recipe.transpose_pair, kernels.transpose_pair)
