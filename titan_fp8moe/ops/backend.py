"""Which implementation an op runs: Triton kernels on a GPU, the recipe elsewhere.

The recipe runs on a GPU only when :func:`emulate` asked for it, never as a silent fallback.
"""

import torch

_emulating = False


def emulate(on: bool) -> None:
    """Runs every op through :mod:`titan_fp8moe.recipe` on GPUs too: slow, for GPUs the kernels do not support."""
    global _emulating
    _emulating = on


def use_kernels(x: torch.Tensor) -> bool:
    return x.is_cuda and not _emulating


def require_multiple_of_128(op: str, **dims: int) -> None:
    for name, size in dims.items():
        if size % 128:
            raise ValueError(
                f"{op}: {name} is {size}, but FP8 tiles are 128 wide; use a model whose {name} is a multiple of 128 "
                "on every rank (a smaller tensor-parallel degree makes local dims larger)"
            )
