"""GEMMs over expert groups: `grouped_mm` picks the Hopper kernels (Gluon) or the portable one (Triton)."""

# Triton 3.6's hash of a kernel depends on the order in which they are hashed, which is at their import.
from titan_fp8moe.kernels.gemm import forward, wgrad  # noqa: F401
