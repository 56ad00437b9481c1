"""``dispatch = "auto"``: the all-to-all for any routing, and symmetric memory once its buffers can have room enough.

Symmetric memory is faster, but its buffers have a fixed size, and an untrained router may send all tokens to one rank.
Both backends have the same bits, so that they may take turns from step to step. Over the all-to-all the host knows how
many rows have come: :func:`note` finds the room that they need. After :data:`CALM_STEPS` steps :func:`run_step` goes
over to symmetric memory, with room for the fullest of them, if :data:`ROOMS` has it and the GPUs have the memory. If a
step does not fit there, no weight has changed: it is run again over the all-to-all, and the next attempt waits twice as
many steps.

All ranks decide alike. Forwards without gradients, such as a validation's, always take the all-to-all.
"""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist

from titan_fp8moe import patches
from titan_fp8moe.dispatch.symmetric.workspace import NoRoom, check_room

logger = logging.getLogger(__name__)

ROOMS = 1.25, 1.5, 1.75, 2.0, 2.25, 2.5
"""Sizes of the buffers, as multiples of what uniform routing needs. Layers compile again for each."""

MARGIN = 1.1
"""How much more room than the fullest rank has needed in its fullest layer."""

CALM_STEPS = 20

REPORT_AFTER = 100
"""Steps over the all-to-all after which the log says why."""


@dataclass
class _State:
    """``device``: None as long as nobody has called :func:`enable`."""

    device: torch.device | None = None
    hosts: Any = None  # the process group of all ranks' messages
    room: str = ""  # of the buffers, as text: a graph would take a number that changes for a variable
    before: int = 2**63  # bytes that this rank holds before its first layer
    needed: float = 0.0  # the room that this step's fullest layer has needed on this rank
    loads: list[float] = field(default_factory=list)  # the rooms that this step's layers have just filled on this rank
    load: float = 1.0  # their mean, in the fullest step
    recent: list[float] = field(default_factory=list)  # the rooms of the last steps, on the fullest rank
    steps: int = 0  # over the all-to-all, since symmetric memory
    wait: int = 0
    asked: bool = True


_state = _State()


def enable(device: torch.device) -> None:
    """Lets ``auto`` use symmetric memory in this process, on all ranks alike, in steps that :func:`run_step` runs."""
    vars(_state).update(vars(_State(device, wait=CALM_STEPS)))
    before_step = "torch.optim.optimizer:register_optimizer_step_pre_hook"
    patches.hook(before_step, _ask_once_a_step, checked_on="torch 2.11 to 2.15")


def disable() -> None:
    """Takes the all-to-all from now on."""
    vars(_state).update(vars(_State()))


def is_enabled() -> bool:
    return _state.device is not None


def is_fast() -> bool:
    """Whether a forward with gradients takes symmetric memory now."""
    return _state.room != ""


def room() -> float:
    """The size of the buffers in symmetric memory, as a multiple of what uniform routing needs."""
    return float(_state.room or 0)


def note(needed: tuple[int, int], most: float, capacities: Callable[[float], tuple[int, int]]) -> None:
    """Called by an all-to-all.

    Args:
        needed: the rows and the dispatched tokens that have come.
        most: the room that always suffices.
        capacities: how many of both a room holds.
    """
    if not _state.loads and cast(torch.device, _state.device).type == "cuda":
        _state.before = torch.cuda.memory_allocated(_state.device)
    _state.loads.append(needed[0] / capacities(1)[0])
    for room in ROOMS:
        held = zip(needed, capacities(room), capacities(most), strict=True)
        if room >= _state.needed and all(MARGIN * number <= has or has == limit for number, has, limit in held):
            _state.needed = room
            return
    _state.needed = math.inf


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
        _state.asked, _state.needed, _state.loads = not is_fast(), 0.0, []
        result = step()
    except NoRoom as error:
        _state.room, _state.wait = "", 2 * _state.wait
        logger.warning(f"FP8-Flow-MoE: the step is run again over the all-to-all, and the next ones: {error}")
        forget()
        result = step()
    finally:
        _state.asked = True
    if not is_fast():
        _decide(_greatest(_state.needed))
    return result


def _has_memory(room: float) -> bool:
    """Whether the GPU holds the layers' tensors at this size. The peak holds those of the fullest step; not all that is
    made after the first layer's begin grows with them."""
    device: Any = _state.device
    if device.type != "cuda":
        return True
    grows = torch.cuda.max_memory_reserved(device) - _state.before
    return _state.before + room / _state.load * grows < torch.cuda.mem_get_info(device)[1]


def _decide(needed: float) -> None:
    """After a step over the all-to-all, whose fullest layer would have needed this room."""
    if not needed:  # no layer has travelled
        return
    if _state.loads:
        _state.load = max(_state.load, sum(_state.loads) / len(_state.loads))
    _state.recent.append(needed)
    del _state.recent[: -_state.wait]
    _state.steps += 1
    steps, room = _state.steps, max(_state.recent)
    uniform = "times the rows of uniform routing"
    if room > ROOMS[-1]:
        reason = f"a rank would have needed room for more than {ROOMS[-1]} {uniform}"
    elif len(_state.recent) < _state.wait:
        reason = f"the next attempt follows after {_state.wait}"
    elif _greatest(not _has_memory(room)):
        reason = f"a GPU has too little memory for {room} {uniform}"
    else:
        _state.room, _state.recent, _state.steps = str(room), [], 0
        way = f"dispatch over symmetric memory from the next step on, with room for {room} {uniform}"
        logger.info(f"FP8-Flow-MoE: {way}; so far {steps} steps over the all-to-all")
        return
    if steps == REPORT_AFTER:
        logger.info(f"FP8-Flow-MoE: {steps} steps over the all-to-all, none over symmetric memory: {reason}")


def _ask_once_a_step(*_: Any) -> None:
    """Before the first optimizer of a step. A group's ranks find alike that one of them lacks room; other groups know
    nothing of it."""
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
    """The greatest value of all ranks. Only their hosts exchange it: a collective of GPUs would wait for earlier work,
    and the host for both."""
    if _state.hosts is None:
        _state.hosts = dist.new_group(backend="gloo")
    greatest = torch.tensor(float(value), dtype=torch.float64, device="cpu")
    dist.all_reduce(greatest, dist.ReduceOp.MAX, _state.hosts)
    return greatest.item()
