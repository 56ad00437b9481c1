"""Compiles Triton and Gluon kernels without a GPU, for sm_90 or another, and reads what ptxas says about them.

:func:`record_launches` runs a launch function on meta tensors, so that a test compiles exactly what training runs.
With ``TRITON_INTERPRET=1`` a test module that imports this one is skipped: an interpreted kernel is no JITFunction.
"""

import contextlib
import functools
import io
import os
import re
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor  # of plain Triton

from titan_fp8moe.kernels.compile import NO_GPU, Pointer
from titan_fp8moe.kernels.launch import Kernel, recording
from titan_fp8moe.layer.weights import ExpertWeights
from titan_fp8moe.recipe import BLOCK, E8M0, FP8

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("needs TRITON_INTERPRET unset", allow_module_level=True)

TRITON = tuple(map(int, triton.__version__.split(".")[:2]))


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=dtype in (torch.bfloat16, torch.float32))


def each(function: Callable[[Any], Any], weights: Any) -> ExpertWeights:
    return ExpertWeights(*map(function, weights))


def matrices(E: int, H: int, D: int, dtype: torch.dtype = torch.bfloat16, form: str = "apart") -> ExpertWeights:
    """Experts' weights: gate and up ``apart``, ``fused``, or ``turned``, which is fused and transposed; or a ``single``
    projection."""
    if form == "apart":
        return each(lambda shape: meta(E, *shape, dtype=dtype), ((H, D), (D, H), (H, D)))
    if form == "turned":
        return each(lambda shape: meta(E, *shape, dtype=dtype).detach().mT.requires_grad_(), ((D, 2 * H), (H, D)))
    return each(lambda shape: meta(E, *shape, dtype=dtype), ((2 * H if form == "fused" else H, D), (D, H)))


def rows(M: int, D: int) -> tuple[Tensor, Tensor]:
    """(M, D) e4m3 and column-major scales."""
    return meta(M, D, dtype=FP8), meta(D // BLOCK, M, dtype=E8M0).t()


@dataclass
class Compiled:
    """One kernel. Its resources are ptxas's words: Triton itself reports no spills for some kernels that have them."""

    name: str
    shared: int  # bytes per CTA
    asm: dict[str, Any] = field(repr=False)
    log: str = field(repr=False)  # ptxas's

    def __post_init__(self):
        def sum_of(pattern: str) -> int:
            return sum(map(int, re.findall(pattern, self.log)))

        self.registers = sum_of(r"Used (\d+) registers")
        self.stack = sum_of(r"(\d+) bytes stack frame")  # bytes per thread of local memory
        self.spills = sum_of(r"(\d+) bytes spill")  # bytes per thread stored and loaded
        # Such as C7514: WGMMAs serialized.
        self.warnings = [line for line in self.log.splitlines() if "warning" in line.lower() or "C75" in line]


def _ptxas(ptx: str, capability: int) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        target = ["--gpu-name", sm_arch_from_capability(capability)]
        options = ["--regAllocOptLevel=2"] if TRITON >= (3, 7) else []  # as Triton calls it
        command = [get_ptxas(capability).path, "-v", *options, *target, path, "-o", path.with_suffix(".cubin")]
        return subprocess.run(command, check=True, capture_output=True, text=True).stderr


class Launch(NamedTuple):
    """One recorded launch, with pointers in the place of meta tensors."""

    kernel: Kernel
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    constants: dict[str, Any]

    @property
    def name(self) -> str:
        return self.kernel.kernel.__name__

    @property
    def path(self) -> str:
        return f"{self.kernel.kernel.__module__}.{self.name}"

    @property
    def arguments(self) -> dict[str, Any]:
        """By name, and options."""
        return dict(zip(self.kernel.kernel.arg_names, self.args, strict=False)) | self.constants

    @property
    def key(self) -> tuple:
        """Launches that differ in it are compiled separately."""
        args = [Pointer.of(arg.base) if isinstance(arg, TensorDescriptor) else arg for arg in self.args]
        return self.kernel, *self.kernel._key(0, args, self.constants)[0]

    def compile(self, capability: int = 90) -> Compiled:
        if (found := _compiled.get((capability, self.key))) is not None:
            return found
        # Triton keeps what it compiled for a device, so each capability is another.
        target = GPUTarget("cuda", capability, 32)
        device = dict(get_current_device=lambda: capability, get_current_target=lambda: target)
        gpu = SimpleNamespace(**vars(NO_GPU) | device)
        with triton.knobs.nvidia.scope(), contextlib.redirect_stdout(io.StringIO()) as log:
            triton.knobs.nvidia.dump_ptxas_log = True
            with patch.object(driver, "_active", gpu):
                compiled = self.kernel.compile(self.args, self.constants)
        said = log.getvalue() or _ptxas(compiled.asm["ptx"], capability)  # nothing if it was in Triton's cache
        found = Compiled(self.name, compiled.metadata.shared, compiled.asm, said)
        return _compiled.setdefault((capability, self.key), found)


_compiled: dict[tuple, Compiled] = {}
_wrapped = functools.cache(Kernel)  # the GEMMs of other GPUs are not


def record_launches(function: Callable, *args: Any) -> list[Launch]:
    """Runs ``function`` on ``args`` (meta tensors) without launching anything; returns what it would launch."""
    launches = []

    def record(kernel, grid, *args, **constants):
        args = tuple(Pointer.of(arg) if isinstance(arg, Tensor) else arg for arg in args)
        launches.append(Launch(kernel, grid, args, constants))

    def record_plain(kernel, *args, grid, warmup, **constants):
        record(_wrapped(kernel), grid, *args, **constants)

    with patch.object(Kernel, "_launch", record), patch.object(JITFunction, "run", record_plain), recording():
        function(*args)
    return launches
