"""Begins a process that compiles kernels into Triton's cache on disk, beside the process that trains.

A layer has some 20 kernels, of which the six GEMMs take most of the time. Triton compiles each at its first launch, one
after the other. The process begun here, :mod:`titan_fp8moe.kernels.compile`, compiles those of a message in parallel.
Nobody waits for it: a launch finds its kernel in the cache, or compiles it as ever.

A torchtitan job begins it when its model is converted, and sends all launches of its layers then. Elsewhere, and for
layers that ranks share, each kind of layer has a message at its first call, and each op when ``torch.compile`` traces
it.
"""

import contextlib
import functools
import io
import logging
import os
import pickle
import pkgutil
import subprocess
import sys
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from subprocess import DEVNULL, PIPE
from typing import Any, cast

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.utils._pytree import tree_leaves, tree_map_only
from triton import knobs
from triton.runtime.jit import JITFunction

from titan_fp8moe.kernels.compile import Launch, recorded
from titan_fp8moe.kernels.gemm import grouped_mm
from titan_fp8moe.kernels.launch import Kernel

logger = logging.getLogger(__name__)

seen: set[Hashable] = set()
"""The kinds of layers and ops that this process has called or traced: nothing more is to be done for them."""

_LAYERS = "titan_fp8moe.layer.experts", "titan_fp8moe.nn.grouped_mm"
"""With those that they import, they define all ops."""

_PROGRAM = """
import sys, types, torch

# Kernels need neither the layers nor Dynamo, which take as long to import as torch. A message names what it needs.
sys.modules["titan_fp8moe"] = package = types.ModuleType("titan_fp8moe")
package.__path__ = sys.argv[1:]
torch.compiler.disable = torch.compiler.assume_constant_result = lambda f=None, **_: f or (lambda f: f)
from titan_fp8moe.kernels.compile import main

main()
"""


@dataclass(frozen=True)
class Like:
    """A tensor, or this rank's part of it, without its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> "Like":
        local = getattr(tensor, "_local_tensor", tensor)
        return cls(tuple(local.shape), local.stride(), local.dtype, tensor.requires_grad)

    def on_meta(self) -> Tensor:
        like = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")
        return like.requires_grad_(self.requires_grad)


def is_due(kind: Hashable, x: Tensor) -> bool:
    """Whether a layer of that kind, called with ``x``, is one for :func:`compile_ahead`."""
    traced = torch.compiler.is_compiling() or isinstance(x, FakeTensor)
    return x.is_cuda and not traced and kind not in seen


def compile_job(layers: Iterable[Callable[[], Tensor]]) -> None:
    """Has the process, which has begun, compile what all layers of a job, forwards on meta tensors, and their backwards
    launch. It ends with them."""
    try:
        _send((), list, recorded(layers))
    except Exception as error:  # a job goes on without
        logger.warning(f"FP8-Flow-MoE: kernels compile one after the other, each at its first launch: {error!r}")
    cast(Any, begin()).stdin.close()


def compile_ahead(kind: Hashable, layer: Callable[..., Tensor], *args: Any) -> None:
    """Has the process compile what ``layer(*args)`` and its backward launch.

    Args:
        kind: is added to :data:`seen`.
        layer: is pickled by its name.
        args: trees of tensors and of what can be pickled. The first one is the layer's input.
    """
    x, *others = tree_map_only(Tensor, Like.of, args)
    seen.add(kind)
    _send(_LAYERS, launches_of, layer, replace(x, requires_grad=True), *others)


def compile_traced(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Has the process compile what an op of this package launches, if PyTorch traces it for a GPU and these sizes."""
    leaves = tree_leaves((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, FakeTensor)]
    if not tensors or not tensors[0].is_cuda or any(t._has_symbolic_sizes_strides for t in tensors):
        return
    if any(isinstance(leaf, torch.SymInt) for leaf in leaves):
        return
    kind = op, *((leaf.dtype, leaf.shape[1:]) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    if kind not in seen:
        use_inductors_ptxas()
        seen.add(kind)
        _send(_LAYERS, launches_of, run_op, op, *tree_map_only(Tensor, Like.of, (args, kwargs)))


def launches_of(function: Callable[..., Tensor | list[Tensor]], *args: Any) -> list[Launch]:
    """Records a layer's or an op's launches in the process: here users' contexts would change what it does. GEMMs come
    first, and the last launch before the first one, since a layer that is called compiles from the other end."""
    launches = recorded([functools.partial(function, *tree_map_only(Like, Like.on_meta, args))])
    return sorted(reversed(launches), key=lambda launch: "gemm" not in launch[0].kernel.__module__)


def run_op(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    return getattr(torch.ops.titan_fp8moe, op)(*args, **kwargs)


class _Pickler(pickle.Pickler):
    """Pickles Triton's functions by name, and a :class:`Kernel` by its function and what is bound."""

    def reducer_override(self, x: Any) -> Any:
        if isinstance(x, Kernel):
            return functools.partial(Kernel, **x._bound), (x.kernel,)
        if not isinstance(x, JITFunction):
            return NotImplemented
        path = f"{x.__module__}:{x.__name__}"
        return pkgutil.resolve_name, (path if pkgutil.resolve_name(path) is x else f"{path}.kernel",)


def _send(modules: tuple[str, ...], make_launches: Callable[..., list[Launch]], *args: Any) -> None:
    """Has the process compile what ``make_launches(*args)`` returns there, with these modules."""
    if (process := begin()) is not None:
        environment = {name: value for name, value in os.environ.items() if name.startswith("TRITON_")}
        _Pickler(message := io.BytesIO()).dump((environment, make_launches, *args))
        with contextlib.suppress(OSError, ValueError):  # where the process has ended, or this one is a fork
            cast(Any, process.stdin).write(pickle.dumps((modules, message.getvalue())))


def use_inductors_ptxas() -> None:
    """Sets the ptxas of this process as Inductor does once it compiles here: to torch's own, in some releases.

    Triton looks up kernels by the version of ptxas too, so a job would not find those that another ptxas has made.
    """
    from torch._inductor.runtime import compile_tasks  # its function is private: checked with torch 2.11, 2.13 and 2.14

    getattr(compile_tasks, "_set_triton_ptxas_path", lambda: None)()


@functools.cache
def begin() -> subprocess.Popen | None:
    """The process that compiles for this one, silently and without a GPU. It reads messages until this one closes the
    pipe or ends. One rank of a node has it, where there are Hopper GPUs and CPUs to spare.

    There it also gives each rank a ``TRITON_CACHE_DIR``: Inductor would set another one before the first launch.
    """
    if not grouped_mm._is_hopper(0):
        return None
    os.environ.setdefault("TRITON_CACHE_DIR", knobs.cache.dir)
    if os.environ.get("LOCAL_RANK", "0") != "0" or len(os.sched_getaffinity(0)) < 2:
        return None
    command = [sys.executable, "-c", _PROGRAM, str(Path(__file__).parents[1])]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.Popen(command, bufsize=0, stdin=PIPE, stdout=DEVNULL, stderr=DEVNULL, env=environment)
    stdin = cast(Any, process.stdin)
    os.set_blocking(stdin.fileno(), False)  # what does not fit is dropped, and with it the rest
    os.register_at_fork(after_in_child=stdin.close)  # a worker that outlives this process would keep the other
    return process
