"""Defines the custom ops and picks their implementation: Triton kernels on a GPU, the recipe elsewhere.

The recipe runs on a GPU only after :func:`emulate`, never as a silent fallback.
"""

import functools
import inspect
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, Protocol, TypeVar, cast

import torch
from torch._library.autograd import Info, make_autograd_impl

from titan_fp8moe.kernels.launch import is_recording, recording

P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)

_library = torch.library.Library("titan_fp8moe", "DEF")
_is_dynamo_compiling, _len_torch_dispatch_stack = torch.compiler.is_dynamo_compiling, torch._C._len_torch_dispatch_stack
_ORDINARY = (torch.Tensor, torch.nn.Parameter)  # tensor types that a kernel can read


class CustomOp(Protocol[P, R_co]):
    """The result of :func:`custom_op`: called like the reference, with the op that PyTorch traces."""

    op: torch._ops.OpOverload
    register_fake: Callable[[Callable], Callable]

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R_co: ...


def intercepted() -> bool:
    """Whether PyTorch looks at each operator: torch.compile, fake tensors, activation checkpointing and the like."""
    return _is_dynamo_compiling() or _len_torch_dispatch_stack() > 0


def custom_op(
    reference: Callable[P, R_co], kernel: Callable[..., Any] | None = None, fake: Callable[..., Any] | None = None
) -> CustomOp[P, R_co]:
    """Defines a functional op without a gradient: ``torch.ops.titan_fp8moe.<the reference's name>``.

    The returned callable calls the op where :func:`intercepted`, and otherwise the kernel or the reference itself. A
    layer makes about 25 calls, and the dispatcher took a tenth of their host time (``torch.library.custom_op`` takes
    more). Small layers, and the forward of large ones, are CPU-bound. Only autograd functions call the ops, so the
    dispatcher's autograd is not needed.

    Args:
        reference: the specification, whose name may have a leading underscore.
        kernel: takes the same arguments, whose types stand at the reference, and runs where :func:`use_kernels` holds
            for the first tensor.
        fake: returns tensors of the same shapes, strides and dtypes; by default the kernel, whose launches do nothing
            then, or without one the reference, which calls ops. The recipe would do for most, but has up to a hundred
            operators: a layer traced ten times as long.

    Returns:
        The callable, with the attributes ``op`` and ``register_fake``, which replaces the fake.
    """
    name = reference.__name__.removeprefix("_")
    on_gpu, elsewhere = cast(tuple[Callable[..., Any], ...], (kernel or reference, reference))
    first_name = next(iter(inspect.signature(reference).parameters))

    def run(*args: Any) -> Any:
        first = args[0][0] if isinstance(args[0], list) else args[0]
        return (on_gpu if use_kernels(first) else elsewhere)(*args)

    def above(keys: Any, *args: Any) -> Any:
        if not (torch.is_grad_enabled() or _len_torch_dispatch_stack()):
            first = args[0][0] if isinstance(args[0], list) else args[0]
            if type(first) in _ORDINARY and not first.is_meta:
                return run(*args)
        return autograd(keys, *args)

    @functools.wraps(reference)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not (_is_dynamo_compiling() or _len_torch_dispatch_stack()):  # as intercepted(), without a call
            first = args[0] if args else kwargs[first_name]
            if isinstance(first, list):
                first = first[0]
            # DTensors and other subclasses must meet the op: they handle or refuse it.
            if type(first) in _ORDINARY:
                if use_kernels(first):
                    return on_gpu(*args, **kwargs)
                if not first.is_meta:
                    return elsewhere(*args, **kwargs)
        return op(*args, **kwargs)

    _library.define(name + torch.library.infer_schema(reference, mutates_args=()))
    _library.impl(name, run, "CompositeExplicitAutograd")
    op = getattr(torch.ops.titan_fp8moe, name).default
    torch.library.register_fake(op, fake or (reference if kernel is None else _without_launches(kernel)))
    autograd = make_autograd_impl(op, Info(_no_gradient, None))  # for a program that was exported under no_grad
    # Compiled code runs with gradients off, and makes up to 30 calls a layer. Of 9 us that the dispatcher takes for
    # each, 5 go to PyTorch's Python between autograd and the op, which ``above`` skips.
    _library.impl(name, above, "Autograd", with_keyset=True)
    defined = cast(CustomOp[P, R_co], call)
    defined.op = op
    defined.register_fake = functools.partial(torch.library.register_fake, op, allow_override=True)
    return defined


def _without_launches(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel's Python, which allocates its results. Nobody reads the launches that it records."""

    def fake(*args: Any, **kwargs: Any) -> Any:
        with recording():
            return kernel(*args, **kwargs)

    return fake


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
                "FP8 layers have no second derivative, but this backward has create_graph=True; leave it out, or use "
                "bf16 layers where the loss depends on gradients"
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
    """Whether an op runs its Triton kernels on ``x``."""
    return (x.is_cuda and not _emulating and (_gate is None or pass_gate())) or (is_recording() and x.is_meta)


@contextmanager
def open_gate() -> Iterator[Callable[[], None] | None]:
    """Lets kernels run in this context, and yields the gate."""
    global _gate
    gate, _gate = _gate, None
    try:
        yield gate
    finally:
        _gate = gate


def pass_gate() -> bool:
    """Calls the gate, unless it has been passed."""
    global _gate
    with open_gate() as gate:
        if gate is not None:
            gate()
    _gate = None
    return True


def check_caller(x: torch.Tensor) -> None:
    """Rejects calls that the layers' autograd functions or kernels cannot serve.

    Raises:
        RuntimeError: in a transform of torch.func or in torch.jit.trace.
        ValueError: for a GPU that is not the current one, on which kernels would run.
    """
    if not torch.compiler.is_compiling():
        if torch._C._are_functorch_transforms_active():
            raise RuntimeError(
                "FP8 layers have no rules for torch.func's transforms (vmap, grad, jacrev, ...); use backward() or "
                "torch.autograd.grad, and flatten a batch dim into the rows of x"
            )
        if torch.jit.is_tracing():
            raise RuntimeError("torch.jit cannot trace FP8 layers; use torch.export or torch.compile")
    if x.is_cuda and x.device.index != torch.cuda.current_device():
        raise ValueError(
            f"x is on {x.device}, but kernels run on the current device, {torch.cuda.current_device()}; call "
            "torch.cuda.set_device"
        )
