"""Picks each function's implementation, Triton kernels on a GPU and the recipe elsewhere, and defines custom ops.

The recipe runs on a GPU only after :func:`emulate`, never as a silent fallback.
"""

import functools
import hashlib
import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast
from unittest import mock

import torch

from titan_fp8moe import patches
from titan_fp8moe.kernels.launch import is_recording, recording
from titan_fp8moe.kernels.warm_up import compile_traced

P = ParamSpec("P")
R = TypeVar("R")

_library = torch.library.Library("titan_fp8moe", "DEF")


def digest(package: Path) -> str:
    sources = b"".join(path.read_bytes() for path in sorted(package.rglob("*.py")))
    return hashlib.sha256(sources).hexdigest()[:16]


# Graphs in Inductor's cache on disk name these sources: it knows ops by name only, and a graph of another version may
# expect other results of them.
_tag = f"{torch.compiler.config.cache_key_tag} titan_fp8moe-{digest(Path(__file__).parents[1])}".strip()
patches.put(torch.compiler.config, "cache_key_tag", _tag, checked_on="torch 2.13 and 2.14")


def with_kernel(reference: Callable[P, R], kernel: Callable[..., Any]) -> Callable[P, R]:
    """The reference as a function that runs ``kernel`` where :func:`use_kernels` holds for its first tensor.

    ``kernel`` takes the same arguments, whose types stand at the reference.
    """

    @functools.wraps(reference)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        first: Any = args[0]
        if isinstance(first, list):
            first = first[0]
        return (kernel if use_kernels(first) else reference)(*args, **kwargs)

    return run


def custom_op(function: Callable[P, R], name: str = "", of_backward: bool = False) -> Callable[P, R]:
    """Registers a function of tensors as ``torch.ops.titan_fp8moe.<name>``, by default its own without the underscore.

    The op is functional: no result shares memory with an argument or another result. It may write to kept weights and
    NaN flags among its arguments, which the schema hides: graphs would copy them. To trace the op, PyTorch runs the
    function on fake tensors, where each kernel's Python allocates its results, and no kernel is launched. The recipe
    would do for most, but has up to a hundred operators.

    An op of a forward raises RuntimeError in a backward, as of a program that was exported under no_grad. One
    ``of_backward`` does without this check, which takes as long as the dispatcher itself.
    """
    name = name or function.__name__.removeprefix("_")
    _library.define(name + torch.library.infer_schema(function, mutates_args=()))
    _library.impl(name, function, "CompositeExplicitAutograd")
    op = getattr(torch.ops.titan_fp8moe, name).default

    def fake(*args: Any, **kwargs: Any) -> Any:
        if not is_recording():
            compile_traced(name, args, kwargs)
        with recording():
            return function(*args, **kwargs)

    torch.library.register_fake(op, fake, lib=_library)
    if not of_backward:
        torch.library.register_autograd(op, _no_gradient, lib=_library)
    return cast(Any, op)


def _no_gradient(ctx: Any, *_: Any) -> None:
    raise RuntimeError(
        "this program calls FP8 layers that were exported without gradients; train the module that was exported instead"
    )


def refuse_export(tensors: Iterable[Any]) -> None:
    """Raises RuntimeError where torch.export traces a layer that has gradients: the program would have none."""
    # The flag, not is_exporting(): before torch 2.13 torch.compile takes that for true, too.
    if not torch.compiler._is_exporting_flag or not torch.is_grad_enabled():
        return
    if any(t is not None and t.requires_grad for t in tensors):
        raise RuntimeError(
            "torch.export, and torch.distributed.pipelining.pipeline() by it, would lose the gradients of FP8 layers; "
            "export under torch.no_grad(), or train the module itself: PipelineStage takes modules"
        )


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates the backward of an autograd function around ops: refuses ``create_graph=True``.

    PyTorch's decorator of this name treats the gradients as constants, silently, where the incoming gradient is one. So
    do graphs of PyTorch 2.11, which is not visible here; graphs of later versions refuse by themselves.
    """

    @functools.wraps(backward)
    def wrapper(ctx: Any, *douts: Any) -> Any:
        if not torch.is_grad_enabled():
            return backward(ctx, *douts)
        if not torch.compiler.is_compiling():  # traced without create_graph
            raise RuntimeError(
                "FP8 layers have no second derivative, but this backward has create_graph=True; use bf16 layers for it"
            )
        with torch.no_grad():
            return backward(ctx, *douts)

    return wrapper


_emulating = os.environ.get("TITAN_FP8MOE_EMULATE") == "1"


def emulate(on: bool) -> None:
    """Switches every op of this process to :mod:`titan_fp8moe.recipe` on GPUs too. ``TITAN_FP8MOE_EMULATE=1`` in the
    environment does so from the start.

    Slow; for GPUs that the kernels do not support: AMD's, or compute capability below 8.9.
    """
    global _emulating
    _emulating = on


def emulating() -> bool:
    """Whether :func:`emulate`, or the environment, has switched the kernels off."""
    return _emulating


_gate: Callable[[], None] | None = None


def before_first_kernel(gate: Callable[[], None]) -> None:
    """Lets the first op that is to run kernels call ``gate``. If that raises, so does the next op."""
    global _gate
    _gate = gate


def use_kernels(x: torch.Tensor) -> bool:
    """Whether functions run their kernels on ``x``; where launches are recorded, their Python alone. The first call on
    a GPU calls the gate, which may raise."""
    if is_recording() or _emulating:
        return is_recording()
    if not x.is_cuda and x.device.type not in ("cpu", "meta"):
        raise RuntimeError(f"{x.device} is no GPU of NVIDIA's, which kernels need; set TITAN_FP8MOE_EMULATE=1")
    return x.is_cuda and (_gate is None or pass_gate())


def open_gate() -> AbstractContextManager[Any]:
    """Lets kernels run in this context."""
    return mock.patch(f"{__name__}._gate", None)


def pass_gate() -> bool:
    """Calls the gate, unless it has been passed."""
    global _gate
    if (gate := _gate) is not None:
        with open_gate():
            gate()
    _gate = None
    return True
