"""Compiles layers' kernels for Hopper GPUs into Triton's cache. The layers run on meta tensors, which collects their
launches. No GPU is needed.

:func:`main` does it for messages on the standard input, until that ends. A message is a pickle of the names of modules
and of another pickle: of Triton's environment variables, a function that returns launches, and its arguments.
"""

import contextlib
import importlib
import multiprocessing
import os
import pickle
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.runtime import driver

from titan_fp8moe.kernels import launch
from titan_fp8moe.recipe import E8M0

MAX_PROCESSES = 16
FORK = multiprocessing.get_context("fork")
NO_GPU: Any = SimpleNamespace(
    get_current_device=lambda: 0,
    get_current_stream=lambda device: 0,
    get_current_target=lambda: GPUTarget("cuda", 90, 32),
)
Launch = tuple[launch.Kernel, tuple[Any, ...], dict[str, Any]]

_launches: list[Launch] = []


def compile_all(layers: Iterable[Callable[[], Tensor | list[Tensor]]]) -> list[BaseException]:
    """Compiles what the layers, forwards on meta tensors, and their backwards launch. Returns the errors of those that
    failed. An op, which returns a list, has no backward here.

    The processes that share the work are forks, so call it where there is neither CUDA nor a thread.

    Example::

        experts = RoutedExperts(num_experts=64, dim=2048, hidden_dim=1408, device="meta", dtype=torch.bfloat16)
        x = torch.empty(128, 2048, device="meta", dtype=torch.bfloat16, requires_grad=True)
        scores, ids = torch.empty(128, 64, device="meta", requires_grad=True).topk(6)
        compile_all([lambda: experts(x, ids, scores)])
    """
    return _compile_launches(recorded(layers))


def _compile_launches(launches: list[Launch]) -> list[BaseException]:
    _launches[:] = launches
    cpus = len(os.sched_getaffinity(0)) - int(os.environ.get("LOCAL_WORLD_SIZE", 0))  # a rank needs one
    with ProcessPoolExecutor(max(1, min(cpus, MAX_PROCESSES, len(launches))), FORK) as pool:
        done = [pool.submit(_compile, index) for index in range(len(launches))]
    return [error for future in done if (error := future.exception()) is not None]


def recorded(layers: Iterable[Callable[[], Tensor | list[Tensor]]]) -> list[Launch]:
    """The layers' launches in their order, one for each kernel that they compile to."""
    with launch.recording() as launches:
        for layer in layers:
            out = layer()
            if isinstance(out, Tensor):
                out.backward(torch.empty_like(out))
        launch.launch_probe("meta")
    unique: dict[tuple, Launch] = {}
    for kernel, tensors, constants in launches:
        args = tuple(Pointer.of(arg) if isinstance(arg, Tensor) else arg for arg in tensors)
        unique.setdefault((kernel, *kernel._key(0, args, constants)[0]), (kernel, args, constants))
    return [*unique.values()]


@dataclass(frozen=True)
class Pointer:
    """In the place of a meta tensor, whose ``data_ptr()`` is 0 whatever its offset. Allocations are aligned."""

    dtype: torch.dtype
    offset: int

    @classmethod
    def of(cls, x: Tensor) -> "Pointer":
        return cls(torch.uint8 if x.dtype == E8M0 else x.dtype, int(x.storage_offset()) * x.itemsize)

    def data_ptr(self) -> int:
        return self.offset

    def get_device(self) -> int:
        return 0


def _compile(index: int) -> None:
    driver.set_active(NO_GPU)
    kernel, args, constants = _launches[index]
    compiled = kernel.compile(args, constants)
    # Triton 3.6 lets a C compiler build a launcher for each signature, 0.3 s each. Later ones have one for all.
    if hasattr(nvidia, "make_launcher"):
        with contextlib.suppress(Exception):  # without libcuda, on a node without a GPU, the job builds it
            nvidia.CudaLauncher(compiled.src, compiled.metadata)


def apply_message(message: bytes) -> list[Launch]:
    """Sets the message's environment. Returns its launches."""
    environment, make_launches, *args = pickle.loads(message)
    os.environ.update(environment)
    return make_launches(*args)


def _compile_message(message: bytes) -> None:
    _compile_launches(apply_message(message))


def main() -> None:
    """Each message has a process of its own. The job goes before them where CPUs are short."""
    os.nice(10)
    with contextlib.suppress(EOFError):
        while True:
            modules, message = pickle.load(sys.stdin.buffer)
            for module in modules:
                importlib.import_module(module)
            FORK.Process(target=_compile_message, args=(message,)).start()
