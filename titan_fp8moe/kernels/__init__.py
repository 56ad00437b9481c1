"""Triton and Gluon kernels with their launches. `titan_fp8moe.ops` wraps them, `titan_fp8moe.recipe` specifies them."""
