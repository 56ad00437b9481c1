"""Launching a kernel without asking Triton each time which compiled kernel it is.

A layer's forward and backward launch some 25 kernels, and where tokens are few the host is what is waited for. Most of
a launch's time Triton spends on binding the arguments, on what the kernel is to be specialized on, on finding that in
its cache, and on asking tensors and the driver for addresses. A :class:`Kernel` looks up a shorter key, and hands
addresses to what ``kernel[grid](...)`` returned when it was called with such arguments before.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime import driver
from triton.runtime.jit import JITFunction, KernelInterface

from titan_fp8moe.recipe import E8M0

_NO_TENSORS = (int, type(None), TensorDescriptor)


class Kernel:
    """A ``triton.jit`` or ``gluon.jit`` kernel, as a decorator: launched in the same way, remembers what was compiled.

    Positional arguments are all parameters that are no ``constexpr``, which come first; by name come the others, and
    options such as ``num_warps``. Scales, for whose dtype (e8m0) Triton has no name, arrive as uint8.

    Attributes:
        kernel: what was decorated. In Triton's interpreter it is called each time.
    """

    def __init__(self, kernel: KernelInterface):
        self.kernel = kernel
        self._compiled: dict[tuple, tuple[Any, Any, Any, tuple]] = {}
        if not isinstance(kernel, JITFunction):
            return
        constants = [param.is_constexpr for param in kernel.params]
        self._num_args = len(constants) - sum(constants)
        if any(constants[: self._num_args]):
            raise TypeError(f"{kernel.__name__}: constexpr parameters are to be the last")
        self._specialized = [not param.do_not_specialize for param in kernel.params[: self._num_args]]
        self._constants = [param.name for param in kernel.params[self._num_args :]]

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return functools.partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        if not isinstance(self.kernel, JITFunction):
            self.kernel[grid](*map(_readable, args), **constants)
            return
        active = driver.active
        device = active.get_current_device()
        key, values = self._key(device, args, constants)
        if (found := self._compiled.get(key)) is not None:
            compiled, function, metadata, values_of_constants = found
            grid = (*grid, 1, 1)[:3]
            hooks = knobs.runtime
            if getattr(hooks.launch_enter_hook, "calls", True) or getattr(hooks.launch_exit_hook, "calls", True):
                compiled[grid](*args, *values_of_constants)  # a profiler is told, also if it has put a hook of its own
                return
            stream = active.get_current_stream(device)
            # What compiled[grid] does, without hooks and what they are told, which are the three None.
            compiled.run(*grid, stream, function, metadata, None, None, None, *values, *values_of_constants)
            return
        if len(args) != self._num_args:
            raise TypeError(f"{self.kernel.__name__} takes {self._num_args} positional arguments, got {len(args)}")
        compiled = self.kernel[grid](*map(_readable, args), **constants)
        if compiled is not None:
            names = self._constants
            found = compiled, compiled.function, compiled.packed_metadata, tuple(constants[name] for name in names)
            self._compiled[key] = found

    def _key(self, device: int, args: tuple[Any, ...], constants: dict[str, Any]) -> tuple[tuple, list[Any]]:
        """All that Triton compiles another kernel for, but for its debugging knobs, which are to be set before a
        kernel's first launch: device, constants, options, and of the other arguments

        * of a tensor, dtype and alignment, and where it is: Triton refuses what is not on a GPU when it compiles;
        * of a number, whether it needs 64 bits and, if it is specialized on, whether it is 1 or a multiple of 16;
        * of a descriptor, dtype and block; the layout in shared memory follows from them.

        And what to launch with: the arguments, but addresses in place of tensors.
        """
        key, values = [device, *constants, *constants.values()], []
        append = key.append
        for arg, specialized in zip(args, self._specialized, strict=False):
            kind = type(arg)
            if kind is Tensor or kind not in _NO_TENSORS:  # most are: asked first
                append(arg.dtype)
                append(arg.get_device())
                arg = arg.data_ptr()
                append(arg & 15)
            elif kind is int:
                append(arg < 2**31)
                if specialized:
                    append(-1 if arg == 1 else arg & 15 == 0)  # 1 would be True
            elif kind is TensorDescriptor:
                append(arg.base.dtype)
                append(arg.block_shape[0])
                append(arg.block_shape[1])
            else:
                append(None)
            values.append(arg)
        return tuple(key), values


def _readable(arg: Any) -> Any:
    return arg.view(torch.uint8) if isinstance(arg, Tensor) and arg.dtype == E8M0 else arg
