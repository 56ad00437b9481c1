"""How ops are defined, and which implementation they run: Triton kernels on a GPU, the recipe elsewhere.

The recipe runs on a GPU only when :func:`emulate` asked for it, never as a silent fallback.
"""

from collections.abc import Callable

import torch

_library = torch.library.Library("titan_fp8moe", "DEF")


def custom_op(function: Callable) -> torch._ops.OpOverload:
    """The op ``torch.ops.titan_fp8moe.<function's name, without leading underscore>``: functional, without gradient.

    Where ``torch.library.custom_op`` also guards against gradients and aliasing in Python at each call, which took
    about 15 µs on one CPU, this one costs what any op costs: a layer makes some 25 calls, and in small layers the host
    is what is waited for. Gradients are out of the question here: ops are called inside autograd functions only.
    """
    name = function.__name__.removeprefix("_")
    _library.define(name + torch.library.infer_schema(function, mutates_args=()))
    _library.impl(name, function, "CompositeExplicitAutograd")
    return getattr(torch.ops.titan_fp8moe, name).default


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
