"""Launches compiled kernels with less host time than Triton's ``kernel[grid](...)``.

A layer's forward and backward launch some 25 kernels. With few tokens they are CPU-bound. Triton spends most of a
launch on binding and specializing the arguments, on its cache lookup, and on asking tensors and the driver for
addresses. A :class:`Kernel` looks up a shorter key. It then hands addresses to the compiled kernel that Triton returned
for such arguments before.

Private interfaces of Triton that this file uses were checked with 3.6.0, 3.7.1, 3.8.0 and 3.9.0: ``compiled.run``,
``knobs.runtime`` and the attributes of ``kernel.params``. The first such launch of a process is
compared with Triton's own; if they differ, Triton launches everything (:func:`_is_fast`).
"""

import functools
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import JITFunction, KernelInterface

from titan_fp8moe.recipe import E8M0

_NO_TENSORS = (float, type(None), TensorDescriptor)


class Kernel:
    """Decorates a ``triton.jit`` or ``gluon.jit`` kernel, which is launched as before.

    Parameters that are no ``constexpr`` come first and are passed by position. ``constexpr`` parameters and options
    such as ``num_warps`` are passed by name. Scales arrive as uint8, since Triton has no name for their dtype, e8m0.

    Args:
        bound: options and ``constexpr`` parameters that every launch shares, and tensors that are None in every launch,
            which come last before the constexprs. They are not part of the cache key: a ``triton.jit`` function, whose
            hash is slow, and absent tensors cost a launch nothing here.

    Attributes:
        kernel: the decorated kernel. In Triton's interpreter every launch calls it.
    """

    def __init__(self, kernel: KernelInterface, **bound: Any):
        self.kernel, self._bound = kernel, bound
        self._compiled: dict[tuple, tuple[Any, Any, Any, tuple]] = {}
        self._interpreted = not isinstance(kernel, JITFunction)
        if self._interpreted:
            return
        # Triton 3.6's hash of a kernel depends on which others were hashed before. Hashed at import, a kernel has the
        # same in all processes.
        _ = kernel.cache_key
        constants = [param.is_constexpr or param.name in bound for param in kernel.params]
        num_args = len(constants) - sum(constants)
        self._specialized = [not param.do_not_specialize for param in kernel.params[:num_args]]
        self._constants = [param.name for param in kernel.params[num_args:]]

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return functools.partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        if _recordings and is_recording():  # nearly always without the call
            _recordings[threading.get_ident()].append((self, args, constants))
            return
        if not grid[0]:  # no rows
            return
        if self._interpreted:
            self.kernel[grid](*map(_readable, args), **constants, **self._bound)
            return
        side = _streams.get(threading.get_ident()) if _streams else None
        device = torch._C._cuda_getDevice()  # torch.cuda.current_device() looks first whether CUDA is initialized
        key, values = self._key(device, args, constants)
        if (found := self._compiled.get(key)) is not None and (_fast or _is_fast()):
            compiled, function, metadata, values_of_constants = found
            grid = (*grid, 1, 1)[:3]
            hooks = knobs.runtime
            if getattr(hooks.launch_enter_hook, "calls", True) or getattr(hooks.launch_exit_hook, "calls", True):
                with torch.cuda.stream(side):
                    compiled[grid](*args, *values_of_constants)  # calls a profiler's hooks, of whatever type they are
                return
            stream = torch._C._cuda_getCurrentRawStream(device) if side is None else side.cuda_stream
            # As compiled[grid] does, but without hooks and their metadata: the three None.
            compiled.run(*grid, stream, function, metadata, None, None, None, *values, *values_of_constants)
            return
        constants |= self._bound
        with torch.cuda.stream(side):
            compiled = self.kernel[grid](*map(_readable, args), **(_OPTIONS | constants))
        if compiled is not None:
            names = self._constants
            found = compiled, compiled.function, compiled.packed_metadata, tuple(constants[name] for name in names)
            self._compiled[key] = found

    def compile(self, args: tuple[Any, ...], constants: dict[str, Any]) -> Any:
        """Compiles the kernel for such a launch, for the target of Triton's active driver, into Triton's cache. Returns
        Triton's compiled kernel."""
        return self.kernel.warmup(*map(_readable, args), grid=(1,), **(_OPTIONS | constants | self._bound))

    def _key(self, device: int, args: tuple[Any, ...], constants: dict[str, Any]) -> tuple[tuple, list[Any]]:
        """The cache key of a launch, and the arguments with addresses in place of tensors.

        The key holds all that makes Triton compile another kernel: device, constants and options, and per argument

        * for a tensor its dtype, its alignment and its device: Triton rejects CPU tensors when it compiles;
        * for a number whether it needs 64 bits and, if it is specialized on, whether it is 1 or a multiple of 16;
        * for a descriptor its dtype and block, which determine the layout in shared memory.

        Triton's debugging knobs are missing: set them before a kernel's first launch.
        """
        key, values = [device, *constants, *constants.values()], [*args]
        for i, arg in enumerate(args):
            kind = type(arg)  # the most frequent ones first
            if kind is int:
                key.append(arg < 2**31)
                if self._specialized[i]:
                    key.append(-1 if arg == 1 else arg & 15 == 0)  # 1 would be True
            elif kind is Tensor or kind not in _NO_TENSORS:
                values[i] = address = arg.data_ptr()
                key.append(arg.dtype)
                key.append(arg.get_device())
                key.append(address & 15)
            elif kind is TensorDescriptor:
                key.append(arg.base.dtype)
                key.extend(arg.block_shape)
            else:
                key.append(kind)  # of a float the value is no part of the key
        return tuple(key), values


# Fused multiply-adds are the default of Triton 3.6 to 3.9, but 3.9 warns that 3.10 will change it.
_OPTIONS = {"enable_fp_fusion": True}

_recordings: dict[int, list[tuple[Kernel, tuple[Any, ...], dict[str, Any]]]] = {}
"""The launches of each thread that records."""


@contextmanager
def recording() -> Iterator[list[tuple[Kernel, tuple[Any, ...], dict[str, Any]]]]:
    """Yields the list to which this thread's launches in this context go, as kernel, arguments and constants. None
    runs. A context inside of another has the same list."""
    thread = threading.get_ident()
    outer = _recordings.get(thread)
    launches = _recordings[thread] = [] if outer is None else outer
    try:
        yield launches
    finally:
        if outer is None:
            del _recordings[thread]


def is_recording() -> bool:
    return bool(_recordings) and threading.get_ident() in _recordings


def is_tracing(x: Tensor) -> bool:
    """Whether PyTorch traces an op with ``x``, a fake tensor: nobody reads what is recorded, and sizes may be
    symbols."""
    return is_recording() and not x.is_meta


_streams: dict[int, "torch.cuda.Stream | None"] = {}
"""The stream of each thread's launches, where it is not PyTorch's current one."""


@contextmanager
def on_stream(stream: "torch.cuda.Stream | None") -> Iterator[None]:
    """Launches of this thread in this context go to ``stream``, by default to PyTorch's current one, which in any case
    stays the one that memory is allocated for."""
    thread = threading.get_ident()
    outer = _streams.get(thread)
    _streams[thread] = stream
    try:
        yield
    finally:
        _streams[thread] = outer


_fast: bool | None = None
"""Whether launches go past Triton's launcher; None until one has been compared with it."""


def _is_fast() -> bool:
    """Decides ``_fast`` by a kernel that stores its arguments: launched by Triton, which compiles it, and then here."""
    global _fast
    if _fast is not None or torch.cuda.is_current_stream_capturing():  # a capture cannot be waited for
        return bool(_fast)
    _fast = True  # also for the probe
    try:
        with on_stream(None):
            by_triton, here = (launch_probe("cuda").tolist() for _ in range(2))
        _fast, error = by_triton == here, f"kernels get {here} instead of {by_triton}"
    except Exception as raised:
        _fast, error = False, repr(raised)
    if not _fast:
        warnings.warn(
            f"titan_fp8moe launches kernels through Triton {triton.__version__}'s own launcher, which takes more host "
            f"time, because its shorter one does not fit this version: {error}",
            stacklevel=2,
        )
    return _fast


@Kernel
@triton.jit(do_not_specialize=["m"])
def _probe_kernel(x, scale, nothing, out, one, n, m, big, quarter, VALUE: tl.constexpr):
    tl.store(out, tl.load(x).to(tl.int64))
    tl.store(out + 1, tl.load(scale).to(tl.int64))
    tl.store(out + 2, one + 0 * big)
    tl.store(out + 3, n + 0 * big)
    tl.store(out + 4, m + 0 * big)
    tl.store(out + 5, big)
    tl.store(out + 6, VALUE + 0 * big)
    tl.store(out + 7, (quarter * 8 + 0 * big).to(tl.int64))
    if nothing is None:
        tl.store(out + 8, tl.program_id(1).to(tl.int64))


def launch_probe(device: str) -> Tensor:
    """Launches the kernel, and returns what it stores first. :mod:`titan_fp8moe.kernels.compile` compiles it ahead."""
    x = torch.full((1,), 3.0, dtype=torch.float32, device=device)
    scale = torch.full((1,), 5, dtype=torch.uint8, device=device).view(E8M0)
    out = torch.zeros(9, dtype=torch.int64, device=device)
    _probe_kernel[(1, 2)](x, scale, None, out, 1, 48, 7, 2**40 + 1, 0.25, VALUE=9)
    return out[:8]


def _readable(arg: Any) -> Any:
    return arg.view(torch.uint8) if isinstance(arg, Tensor) and arg.dtype == E8M0 else arg
