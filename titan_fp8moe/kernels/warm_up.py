"""Starts processes that compile a layer's kernels, :mod:`titan_fp8moe.warm_up`.

A layer has some 20 kernels, of which the six GEMMs take most of the time. Triton compiles each at its first launch, one
after the other. The processes compile a share each into Triton's cache on disk. The process that trains goes on as
ever: what it finds in the cache it loads, and what is not there yet it compiles itself. So a process that fails or is
killed costs nothing but time, and Triton writes the entries of its cache in one piece.
"""

import functools
import json
import logging
import os
import subprocess
import sys

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

MAX_PROCESSES = 8

started = False
"""Whether :func:`start` was called in this process. Layers after the first are alike, or compile as ever."""


def start(
    x_TD: Tensor,
    topk_ids_TK: Tensor,
    nan_flags: Tensor | None,
    weights: list[Tensor | None],
    shared_weights: list[Tensor | None],
    layer: str,
) -> None:
    """Begins to compile for a process's first layer, given the arguments of its forward's op. One rank of a node does,
    on a Hopper GPU."""
    global started
    started = True
    cpus = len(os.sched_getaffinity(0)) - 1
    if os.environ.get("LOCAL_RANK", "0") != "0" or cpus < 1 or not _is_hopper(x_TD.device):
        return
    tensors = [x_TD, topk_ids_TK, nan_flags, *weights, *shared_weights]
    described = [None if t is None else (list(t.shape), str(t.dtype).removeprefix("torch.")) for t in tensors]
    processes = min(cpus, MAX_PROCESSES)
    # Without CUDA, and without torchrun's variables, which would make them ranks.
    hidden = {"CUDA_VISIBLE_DEVICES": "", "TITAN_FP8MOE_EMULATE": ""}
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")} | hidden
    for index in range(processes):
        work = json.dumps(dict(tensors=described, weights=len(weights), layer=layer, share=(index, processes)))
        try:
            subprocess.Popen(
                [sys.executable, "-m", "titan_fp8moe.warm_up", work], env=environment, stderr=subprocess.DEVNULL
            )
        except OSError as error:
            logger.warning(f"kernels compile one after the other, since a process cannot be started: {error!r}")
            return


@functools.cache
def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
