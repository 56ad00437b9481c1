"""How ops are defined, and which implementation they run: Triton kernels on a GPU, the recipe elsewhere.

The recipe runs on a GPU only when :func:`emulate` asked for it, never as a silent fallback.
"""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, Protocol, TypeVar, cast

import torch

P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)

_library = torch.library.Library("titan_fp8moe", "DEF")
_ORDINARY = (torch.Tensor, torch.nn.Parameter)  # types of tensors that a kernel can read


class CustomOp(Protocol[P, R_co]):
    """What :func:`custom_op` returns: called like the function, with the op that PyTorch traces."""

    op: torch._ops.OpOverload
    register_fake: Callable[[Callable], Callable]

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...


def custom_op(function: Callable[P, R_co]) -> CustomOp[P, R_co]:
    """Defines the op ``torch.ops.titan_fp8moe.<function's name, without leading underscore>``: functional, no gradient.

    What is returned is to be called, and has the op as ``op`` and its ``register_fake``. Where somebody traces or
    watches (torch.compile, fake tensors, activation checkpointing, any other dispatch mode), it calls the op; otherwise
    the function itself: a layer makes some 25 calls, PyTorch's dispatcher took a tenth of their Python's time
    (``torch.library.custom_op`` would take more), and the host is what is waited for where layers are small and in the
    forward of large ones. What the dispatcher would do for gradients is not missed: these are called inside autograd
    functions only.
    """
    name = function.__name__.removeprefix("_")
    _library.define(name + torch.library.infer_schema(function, mutates_args=()))
    _library.impl(name, function, "CompositeExplicitAutograd")
    op = getattr(torch.ops.titan_fp8moe, name).default
    untyped: Callable[..., Any] = function

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if args and not (kwargs or torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack()):
            first = args[0][0] if isinstance(args[0], list) else args[0]
            # A DTensor, or whatever else is no ordinary tensor, knows what to do with an op, or to refuse it.
            if type(first) in _ORDINARY and not first.is_meta:
                return untyped(*args)
        return op(*args, **kwargs)

    defined = cast(CustomOp[P, R_co], call)
    defined.op, defined.register_fake = op, functools.partial(torch.library.register_fake, op)
    return defined


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
