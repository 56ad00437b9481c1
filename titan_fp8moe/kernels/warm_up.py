"""Begins processes that compile a layer's kernels into Triton's cache on disk, beside the process that trains.

A layer has some 20 kernels, of which the six GEMMs take most of the time. Triton compiles each at its first launch, one
after the other. Nobody waits for the processes begun here: a launch finds its kernel in the cache, or compiles it as
ever. So a process that fails costs nothing but time. Run its module by hand to see why.

A torchtitan job begins ``python -m titan_fp8moe.warm_up`` when its model is converted: :func:`compile_job`. Other
layers begin :mod:`titan_fp8moe.kernels.compile` at their first call, unless ``torch.compile`` traces it.
"""

import contextlib
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Hashable
from subprocess import DEVNULL, PIPE
from typing import Any, cast

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.utils._pytree import tree_map_only
from triton import knobs

from titan_fp8moe.kernels.gemm import grouped_mm

seen: set[Hashable] = set()
"""The kinds of layers that were called in this process, for which :func:`compile_ahead` has nothing more to do."""

_begun: list[subprocess.Popen] = []  # Python warns of those that are collected while they run


def is_due(kind: Hashable, x: Tensor) -> bool:
    """Whether a layer of that kind, called with ``x``, is one for :func:`compile_ahead`."""
    traced = torch.compiler.is_compiling() or isinstance(x, FakeTensor)
    return x.is_cuda and not traced and kind not in seen


def compile_ahead(kind: Hashable, layer: Callable[..., Tensor], *args: Any) -> None:
    """Begins to compile what ``layer(*args)`` and its backward launch.

    Args:
        kind: is added to :data:`seen`.
        layer: is pickled by its name.
        args: trees of tensors and of what can be pickled. The first one is the layer's input.
    """
    seen.add(kind)
    if (process := begin("titan_fp8moe.kernels.compile")) is not None:
        x, *others = tree_map_only(Tensor, _like, args)
        with contextlib.suppress(OSError), cast(Any, process.stdin) as pipe:  # where the process has ended already
            pipe.write(pickle.dumps((layer, x.requires_grad_(), *others)))


def compile_job(*arguments: str) -> None:
    """Begins to compile the kernels of the torchtitan job of ``sys.argv``. ``arguments``: what
    :mod:`titan_fp8moe.warm_up` takes besides. It ends at once for programs whose arguments are their own."""
    ranks = f"--rank={os.environ.get('RANK', 0)}", f"--world-size={os.environ.get('WORLD_SIZE', 1)}"
    begin("titan_fp8moe.warm_up", *arguments, *ranks, *sys.argv[1:])


def begin(*command: str) -> subprocess.Popen | None:
    """Begins ``python -m`` and the command, silently and without a GPU, on one rank of a node that has Hopper GPUs and
    CPUs to spare.

    Also gives this process a ``TRITON_CACHE_DIR``: Inductor would set another one before the first launch.
    """
    os.environ.setdefault("TRITON_CACHE_DIR", knobs.cache.dir)
    first = os.environ.get("LOCAL_RANK", "0") == "0"
    if not first or len(os.sched_getaffinity(0)) < 2 or not grouped_mm._is_hopper(0):
        return None
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    environment.pop("TORCHELASTIC_RUN_ID", None)  # it is no rank
    python = sys.executable, "-m"
    _begun.append(subprocess.Popen([*python, *command], stdin=PIPE, stdout=DEVNULL, stderr=DEVNULL, env=environment))
    return _begun[-1]


def _like(tensor: Tensor) -> Tensor:
    """A meta tensor like this one, or like this rank's part of it."""
    local = getattr(tensor, "_local_tensor", tensor)
    like = torch.empty_strided(local.shape, local.stride(), dtype=local.dtype, device="meta")
    return like.requires_grad_(tensor.requires_grad)
