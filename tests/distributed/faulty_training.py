"""torchtitan's ``job.custom_config_module`` for a run in which ``$FAULT`` happens: ``<what>@<count>``. Rank 1 is the
one that is lost.

``forward`` and ``backward`` kill the rank in its count-th MoE layer, ``save`` in its count-th checkpoint, ``auto``
where ranks decide on symmetric memory for the count-th time; ``disk`` is full at everybody's count-th checkpoint.
"""

import errno
import itertools
import os
import signal
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemWriter

from titan_fp8moe.dispatch import auto
from titan_fp8moe.torchtitan import JobConfig  # noqa: F401  torchtitan looks for it here
from titan_fp8moe.torchtitan.modules import Fp8FlowMoE


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def install(what: str, count: int) -> None:
    layers: Iterator[int] = itertools.count(1)
    saves: Iterator[int] = itertools.count(1)
    decisions: Iterator[int] = itertools.count(1)
    forward, write, decide = Fp8FlowMoE.forward, FileSystemWriter.write_data, auto._greatest
    first = os.environ.get("RANK") == "0"

    def faulty_forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        now = torch.is_grad_enabled() and next(layers) == count and not first
        if now and what == "forward":
            die()
        out = forward(self, x)
        if now:
            out.register_hook(die)
        return out

    def faulty_write(self: Any, *args: Any) -> Any:
        if next(saves) == count:
            if what == "disk":
                raise OSError(errno.ENOSPC, "No space left on device")
            if not first:
                die()
        return write(self, *args)

    def faulty_decision(value: float) -> float:
        if next(decisions) == count and not first:
            die()
        return decide(value)

    if what == "auto":
        auto.CALM_STEPS, auto._greatest = 2, faulty_decision
    elif what in ("forward", "backward"):
        Fp8FlowMoE.forward = faulty_forward
    else:
        FileSystemWriter.write_data = faulty_write


if fault := os.environ.get("FAULT"):
    name, _, number = fault.partition("@")
    install(name, int(number))
