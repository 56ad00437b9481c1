"""``dispatch = "auto"``: the all-to-all for any routing, and symmetric memory once all ranks have had room there.

Symmetric memory is faster, but its buffers have a fixed size, and an untrained router may send all tokens to one rank.
Both backends have the same bits, so that they may take turns from step to step. Over the all-to-all the host knows how
many rows have come: :func:`note` compares them with the room. :func:`run_step` goes over to symmetric memory after
:data:`CALM_STEPS` steps that would have fit with a margin. If a step does not fit there, no weight has changed: it is
run again over the all-to-all, and the next attempt waits twice as many steps.

All ranks decide alike. Forwards without gradients, such as a validation's, always take the all-to-all.
"""

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist

from titan_fp8moe import patches
from titan_fp8moe.dispatch.symmetric.workspace import NoRoom, check_room

logger = logging.getLogger(__name__)

FULL = 0.8
"""The largest part of the room that the rows of a calm step take, on the fullest rank in its fullest layer."""

CALM_STEPS = 10

REPORT_EVERY = 100
"""Steps over the all-to-all after which the log says why."""

NO_MEMORY = 1e9
"""The share of the room that a rank reports whose GPU has no memory for it."""


@dataclass
class _State:
    """``device``: of the ranks' messages; None as long as nobody has called :func:`enable`."""

    device: torch.device | None = None
    capacity: float = 1.0
    fast: bool = False
    before: int = 2**63  # bytes that this rank holds before its first layer
    share: float = 0.0  # of the room, that the fullest layer of this step has needed on this rank
    shares: list[float] = field(default_factory=list)  # of the last steps, on the fullest rank
    calm: int = 0
    wait: int = 0
    asked: bool = True


_state = _State()


def enable(device: torch.device, capacity: float) -> None:
    """Lets ``auto`` use symmetric memory in this process, on all ranks alike, in steps that :func:`run_step` runs.
    ``capacity``: its room, as a multiple of what uniform routing needs."""
    vars(_state).update(vars(_State(device, capacity, wait=CALM_STEPS)))
    before_step = "torch.optim.optimizer:register_optimizer_step_pre_hook"
    patches.hook(before_step, _ask_once_a_step, checked_on="torch 2.11 to 2.15")


def disable() -> None:
    """Takes the all-to-all from now on."""
    vars(_state).update(vars(_State()))


def is_enabled() -> bool:
    return _state.device is not None


def is_fast() -> bool:
    """Whether a forward with gradients takes symmetric memory now."""
    return _state.fast


def note(needed: int, room: int, most: int) -> None:
    """Called by an all-to-all: rows or tokens that have come, how many symmetric memory has room for, and the most that
    can come."""
    share = needed / room
    if _state.share == 0 and cast(torch.device, _state.device).type == "cuda":
        _state.before = torch.cuda.memory_allocated(_state.device)
    _state.share = max(_state.share, share if room < most else min(share, FULL))


def run_step(step: Callable[[], Any], forget: Callable[[], None]) -> Any:
    """Runs a training step with its optimizer's step, a second time if symmetric memory had no room.

    Args:
        step: can be run again, with the same batch.
        forget: undoes what a forward has left behind in the model, such as the routers' counts.

    Returns:
        The step's result.
    """
    if not is_enabled():
        return step()
    try:
        _state.asked, _state.share = not _state.fast, 0.0
        result = step()
    except NoRoom as error:
        _state.fast, _state.calm, _state.wait = False, 0, 2 * _state.wait
        logger.warning(f"FP8-Flow-MoE: the step is run again over the all-to-all, and the next ones: {error}")
        forget()
        _state.share = 0.0
        result = step()
    finally:
        _state.asked = True
    if not _state.fast:
        _decide(_greatest(_state.share if _has_memory() else NO_MEMORY))
    return result


def _has_memory() -> bool:
    """Whether the GPU holds the layers' tensors at the size of the room. That of uniform routing is in the peak; not
    all that was made since the first layer grows with it."""
    device: Any = _state.device
    if device.type != "cuda":
        return True
    peak = torch.cuda.max_memory_reserved(device)
    return peak + (_state.capacity - 1) * (peak - _state.before) < torch.cuda.mem_get_info(device)[1]


def _decide(share: float) -> None:
    """After a step over the all-to-all, which would have taken this share of the room."""
    _state.shares.append(share)
    _state.calm = _state.calm + 1 if 0 < share <= FULL else 0
    _state.fast = _state.calm >= _state.wait
    steps, least, most = len(_state.shares), min(_state.shares), max(_state.shares)
    filled = f"the fullest rank would have filled {least:.0%} to {most:.0%} of its buffers"
    if _state.fast:
        logger.info(f"FP8-Flow-MoE: dispatch over symmetric memory from the next step on; in {steps} steps {filled}")
    elif steps == REPORT_EVERY:
        filled += f", more than {FULL:.0%}; a larger fp8_flow_moe.dispatch_capacity gives more room"
        reason = "a GPU has too little memory for its buffers" if most == NO_MEMORY else filled
        logger.info(f"FP8-Flow-MoE: {steps} steps over the all-to-all, none over symmetric memory: {reason}")
    if _state.fast or steps == REPORT_EVERY:
        _state.shares.clear()


def _ask_once_a_step(*_: Any) -> None:
    """Before the first optimizer of a step. Groups of other ranks know nothing of this one's room."""
    if _state.asked:
        return
    _state.asked, lacking = True, None
    try:
        check_room()
    except NoRoom as error:
        lacking = error
    if _greatest(lacking is not None):
        raise lacking or NoRoom("other expert-parallel ranks had too little room")


def _greatest(value: float) -> float:
    """The greatest value of all ranks. The host waits for the ranks, but not for its GPU."""
    device: Any = _state.device
    with torch.cuda.stream(_messages(device) if device.type == "cuda" else None):
        greatest = torch.tensor(float(value), dtype=torch.float64, device=device)
        dist.all_reduce(greatest, dist.ReduceOp.MAX)
        return greatest.item()


@functools.cache
def _messages(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
