"""Compiles the kernels of a layer in parallel processes, before its first launch.

A layer has some 20 kernels, of which the six GEMMs take most of the time. Triton compiles each at its first launch, one
after the other. Here the layer first runs on meta tensors, which collects its launches. Forked processes then compile a
share each into Triton's cache on disk, where the launches find them. They begin when ``torch.compile`` traces the
layer, so that Inductor compiles meanwhile, or else at the layer's first call, which waits for them. A process that
fails costs nothing but time: what is not in the cache is compiled at its launch, as ever.

The processes only parse Python, run LLVM, and call ``ptxas`` and with Triton 3.6 a C compiler. They touch neither CUDA
nor a tensor in memory.
"""

import contextlib
import gc
import logging
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import torch
import triton
from torch import Tensor
from torch._dynamo import compiled_autograd
from torch._subclasses import FakeTensor
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.runtime import driver

from titan_fp8moe.kernels import launch
from titan_fp8moe.kernels.gemm.grouped_mm import is_hopper
from titan_fp8moe.recipe import E8M0

logger = logging.getLogger(__name__)

MAX_PROCESSES = 16
DEADLINE = 60.0
"""Seconds after which a process ends that has not compiled a kernel. A GEMM takes four. A process hangs if it needs a
lock that another thread held when it was forked."""

PATIENCE = 30.0
"""Seconds after which a call says for what it waits."""

HOPPER = GPUTarget("cuda", 90, 32)
Launch = tuple[launch.Kernel, tuple[Any, ...], dict[str, Any]]

seen: set[Hashable] = set()
"""The kinds of layers that were called in this process, for which :func:`compile_ahead` has nothing more to do."""

_begun: dict[Hashable, threading.Thread | None] = {}
"""The thread that waits for the processes that compile for a kind, until it is called; None if there are none. Without
one, those of a layer that is traced and never called would stay as zombies."""

_lock = threading.Lock()


def is_due(kind: Hashable, x: Tensor) -> bool:
    """Whether a layer of that kind, called with ``x``, is one for :func:`compile_ahead`."""
    return x.is_cuda and (isinstance(x, FakeTensor) or kind not in seen)


def compile_ahead(kind: Hashable, tensors: Sequence[Tensor | None], on_meta: Callable[[], None]) -> None:
    """Compiles what ``on_meta`` launches: a layer's forward and backward on meta tensors.

    One rank of a node does, on a Hopper GPU.

    Args:
        kind: is added to :data:`seen`.
        tensors: the layer's inputs and weights, of which the first is on the GPU. ``torch.compile`` traces with a
            fake one in its place: then the processes begin, and the call that launches waits for them. Sizes that are
            traced as symbols are known to that call alone.
    """
    x = cast(Tensor, tensors[0])
    traced = isinstance(x, FakeTensor)
    if traced and any(type(size) is not int for tensor in tensors if tensor is not None for size in tensor.shape):
        return
    with _lock:
        if kind in seen:
            return
        if kind not in _begun:
            _begun[kind] = _begin(x, on_meta)
        waiting = _begun[kind]
    if traced:
        return
    if waiting is not None:
        waiting.join(PATIENCE)
        if waiting.is_alive():
            logger.warning(f"FP8-Flow-MoE: kernels still compile in other processes after {PATIENCE:.0f} s")
            waiting.join()
    seen.add(kind)
    _begun.pop(kind, None)


def _begin(x: Tensor, on_meta: Callable[[], None]) -> threading.Thread | None:
    processes = min(len(os.sched_getaffinity(0)), MAX_PROCESSES)
    if os.environ.get("LOCAL_RANK", "0") != "0" or processes < 2 or not is_hopper(x):
        return None
    try:
        launches = recorded(on_meta)
        begun = begin([launches[index::processes] for index in range(processes)])
    except Exception as error:
        logger.warning(f"FP8-Flow-MoE: kernels compile one after the other, each at its first launch: {error!r}")
        return None
    waiting = threading.Thread(target=_wait_and_tell, args=(begun,), daemon=True)
    waiting.start()
    return waiting


def _wait_and_tell(processes: list[int]) -> None:
    if failed := wait(processes):
        logger.warning(
            f"FP8-Flow-MoE: {failed} of {len(processes)} processes that compile kernels ahead have failed or hung; "
            "what they have not compiled is compiled at its first launch"
        )


def recorded(on_meta: Callable[[], None]) -> list[Launch]:
    """The launches that compile to different kernels, those of GEMMs first."""
    unique: dict[tuple, Launch] = {}

    def run() -> None:
        with launch.recording() as launches:
            on_meta()
            if launches:
                launch.launch_probe("meta")
        for kernel, tensors, constants in launches:
            args = tuple(_Pointer(arg) if isinstance(arg, Tensor) else arg for arg in tensors)
            unique.setdefault((id(kernel), *kernel._key(0, args, constants)[0]), (kernel, args, constants))

    # A thread has none of the modes and autograd states in which an op's forward is called. Compiled autograd is on for
    # the whole process: it would wait for the lock of a compilation that waits for this.
    with ThreadPoolExecutor(1) as thread, compiled_autograd._disable():
        thread.submit(run).result()
    # Triton 3.6's hash of a kernel depends on which others were hashed before, so this keeps the order of launches.
    for kernel, *_ in unique.values():
        _ = kernel.kernel.cache_key
    return sorted(unique.values(), key=lambda item: "gemm" not in item[0].kernel.__module__)


class _Pointer:
    """In the place of a meta tensor, whose ``data_ptr()`` is 0 whatever its offset. Allocations are aligned."""

    def __init__(self, x: Tensor):
        self.dtype = torch.uint8 if x.dtype == E8M0 else x.dtype
        self._offset = int(x.storage_offset()) * x.itemsize

    def data_ptr(self) -> int:
        return self._offset

    def get_device(self) -> int:
        return 0


def begin(shares: Sequence[list[Launch]], deadline: float = DEADLINE) -> list[int]:
    """Begins to compile each share in a process of its own, which ends if a kernel takes more than ``deadline`` seconds
    and that is not 0. Returns the processes; those that cannot be forked are left out."""
    processes = []
    # The destructor of a gloo group waits for threads that a fork does not have, so no process may collect one.
    collects = gc.isenabled()
    gc.disable()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12: this process has threads
        for share in filter(None, shares):
            try:
                pid = os.fork()
            except OSError as error:
                logger.warning(f"FP8-Flow-MoE: fewer processes compile kernels ahead than there are CPUs: {error!r}")
                break
            if pid == 0:
                _compile_and_exit(share, deadline)
            processes.append(pid)
    if collects:
        gc.enable()
    return processes


def wait(processes: list[int], seconds: float = 2 * DEADLINE) -> int:
    """Waits until all have ended, and returns how many are known to have failed. After ``seconds`` it kills those that
    have not: a fork of a process with a gloo group may hang before it can watch itself."""
    failed, deadline = 0, time.monotonic() + seconds
    for pid in processes:
        with contextlib.suppress(ChildProcessError):  # where SIGCHLD is ignored, nobody learns how a process ended
            while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
                if time.monotonic() > deadline:
                    os.kill(pid, signal.SIGKILL)
                time.sleep(0.02)
            failed += ended[1] != 0
    return failed


def _compile_and_exit(share: list[Launch], deadline: float) -> None:
    """A process's work. It ends without the cleanup that would free its parent's memory on the GPU."""
    status = 1
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
        signal.setitimer(signal.ITIMER_REAL, deadline)
        nowhere = os.open(os.devnull, os.O_RDWR)
        for descriptor in range(3):
            os.dup2(nowhere, descriptor)
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            if descriptor > 2:  # or a port of its parent's would stay open when that has ended
                with contextlib.suppress(OSError):  # the listing's own is closed
                    os.close(descriptor)
        compile_share(share, deadline)
        status = 0
    finally:
        os._exit(status)


def compile_share(share: list[Launch], deadline: float = 0) -> None:
    """Compiles the launches into Triton's cache, for a Hopper GPU that need not be there. Each has ``deadline`` seconds
    until a signal ends the process, if that is not 0."""
    triton.knobs.compilation.listener = None
    no_gpu: Any = SimpleNamespace(
        get_current_device=lambda: 0, get_current_stream=lambda device: 0, get_current_target=lambda: HOPPER
    )
    driver.set_active(no_gpu)
    for kernel, args, constants in share:
        if deadline:
            signal.setitimer(signal.ITIMER_REAL, deadline)
        compiled = kernel.compile(args, constants)
        # Triton 3.6 lets a C compiler build a launcher for each signature, 0.3 s each. Later ones have one for all.
        if hasattr(nvidia, "make_launcher"):
            with contextlib.suppress(Exception):  # without libcuda, on a node without a GPU, the job builds it
                nvidia.CudaLauncher(compiled.src, compiled.metadata)
