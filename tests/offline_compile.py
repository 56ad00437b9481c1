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
from typing import Any
from unittest.mock import patch

import pytest
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import JITFunction, mangle_type

from titan_fp8moe.recipe import BLOCK, E8M0, FP8

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("needs TRITON_INTERPRET unset", allow_module_level=True)

TRITON = tuple(map(int, triton.__version__.split(".")[:2]))


def meta(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def rows(M: int, D: int) -> tuple[Tensor, Tensor]:
    """(M, D) e4m3 and column-major scales."""
    return meta(M, D, dtype=FP8), meta(D // BLOCK, M, dtype=E8M0).t()


def no_driver(device: int = 0):
    """A context in which launches find this current device."""
    names = dict(_cuda_getDevice=lambda: device, _cuda_getCurrentRawStream=lambda device: f"stream {device}")
    return patch.multiple(torch._C, create=True, **names)


@dataclass
class Compiled:
    """One kernel. Its resources are ptxas's words: Triton itself reports no spills for some kernels that have them."""

    name: str
    capability: int
    shared: int  # bytes per CTA
    asm: dict[str, Any] = field(repr=False)
    log: str = field(repr=False)  # ptxas's of its compilation, or empty: then it was in Triton's cache

    @property
    def registers(self) -> int:
        return self._sum(r"Used (\d+) registers")

    @property
    def stack(self) -> int:
        """Bytes per thread of local memory."""
        return self._sum(r"(\d+) bytes stack frame")

    @property
    def spills(self) -> int:
        """Bytes per thread stored and loaded."""
        return self._sum(r"(\d+) bytes spill")

    @property
    def warnings(self) -> list[str]:
        """Such as C7514: WGMMAs serialized."""
        return [line for line in self._log.splitlines() if "warning" in line.lower() or "C75" in line]

    def _sum(self, pattern: str) -> int:
        return sum(int(n) for n in re.findall(pattern, self._log))

    @property
    def _log(self) -> str:
        return self.log or _ptxas(self.asm["ptx"], self.capability)


@functools.cache  # launches that differ in sizes only have the same PTX
def _ptxas(ptx: str, capability: int) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        target = ["--gpu-name", sm_arch_from_capability(capability)]
        options = ["--regAllocOptLevel=2"] if TRITON >= (3, 7) else []  # as Triton calls it
        command = [get_ptxas(capability).path, "-v", *options, *target, path, "-o", path.with_suffix(".cubin")]
        return subprocess.run(command, check=True, capture_output=True, text=True).stderr


@dataclass
class Launch:
    """One recorded launch, and how Triton would specialize the kernel on its arguments."""

    kernel: JITFunction
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    options: dict[str, Any]

    def specialization(self) -> tuple[dict[str, str], dict[str, Any], dict[tuple[int], list]]:
        """Signature, constants, and the arguments that are divisible by 16, without which there are no vector loads:
        launches that differ in them are compiled separately."""
        signature, constexprs, divisible = {}, {}, {}
        for i, param in enumerate(self.kernel.params):
            value = self.arguments.get(param.name, param.default if param.has_default else None)
            specialize = not param.do_not_specialize
            if param.is_constexpr or value is None or (specialize and type(value) is int and value == 1):
                signature[param.name], constexprs[param.name] = "constexpr", value
                continue
            signature[param.name], number = mangle_type(value), 1
            if isinstance(value, Tensor):  # fresh allocations are aligned; a view is as aligned as its offset
                number = value.storage_offset() * value.element_size()
            elif type(value) is int and specialize:
                number = value
            if number % 16 == 0:
                divisible[(i,)] = [["tt.divisibility", 16]]
        return signature, constexprs, divisible

    def compile(self, capability: int = 90) -> Compiled:
        source_class = GluonASTSource if self.kernel.is_gluon() else ASTSource
        source = source_class(self.kernel, *self.specialization())
        with triton.knobs.nvidia.scope(), contextlib.redirect_stdout(io.StringIO()) as log:
            triton.knobs.nvidia.dump_ptxas_log = True
            compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=self.options)
        return Compiled(self.kernel.__name__, capability, compiled.metadata.shared, compiled.asm, log.getvalue())


def record_launches(function: Callable, *args: Any) -> list[Launch]:
    """Runs ``function`` on ``args`` (meta tensors) without launching anything; returns what it would launch."""
    launches = []

    def run(kernel, *args, grid, warmup, **kwargs):
        arguments = dict(zip(kernel.arg_names, args, strict=False))
        options = {name: value for name, value in kwargs.items() if name not in kernel.arg_names}
        arguments |= {name: value for name, value in kwargs.items() if name in kernel.arg_names}
        launches.append(Launch(kernel, grid, arguments, options))

    with patch.object(JITFunction, "run", run), no_driver():
        function(*args)
    return launches
