"""Names the converted layer and operand in which a NaN or Inf showed first.

torchtitan trains on when the loss or the gradient norm is NaN, and one step later every layer is. The kernels that
quantize store a flag where they meet one (:class:`titan_fp8moe.rows.NanFlags`). After each step the ranks reduce
"who was first" on the device, and the answer is read a step later: no kernel and no sync more in a layer.
"""

import functools
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.tools import utils
from torchtitan.tools.logging import logger

from titan_fp8moe.rows import NanFlags

NOBODY = 2**31 - 1


@dataclass
class _Watch:
    """What is known of a job: the names of its layers, in the order of the forward, and :func:`first_seen`'s answer, on
    the device and on the host."""

    names: list[str]
    seen: Tensor | None = None
    answer: Tensor | None = None
    reported: bool = False


_job = _Watch([])


def watch(layers: dict[str, nn.Module]) -> None:
    """Gives the layers flags, in the order of the forward, and lets torchtitan look at them after each step."""
    global _job
    _job = _Watch([*layers])
    for index, module in enumerate(layers.values()):
        flags = torch.zeros(len(NanFlags._fields), 16, dtype=torch.uint8, device=utils.device_type)
        cast(Any, module).nan_flags, cast(Any, module).nan_index = flags, index
    _look_after_each_step()


def first_seen(modules: list[Any], num_layers: int) -> Tensor:
    """When, in the order of a step, the first of these layers' operands held a NaN or Inf: () int32 on the device.

    The forward quantizes x and a of layers 0, 1..., the backward dy and dh of the last layer, the one before...
    """
    if not modules:
        return torch.full((), NOBODY, dtype=torch.int32, device=utils.device_type)
    flags = torch.stack([module.nan_flags[:, 0] for module in modules])
    index = torch.tensor([module.nan_index for module in modules], device="cpu").unsqueeze(1)
    backward = 2 * (2 * num_layers - 1 - index)
    order = torch.cat([2 * index, 2 * index + 1, backward, backward + 1], 1).int()
    return torch.where(flags > 0, order.to(flags.device, non_blocking=True), NOBODY).amin()


def describe(order: int, names: list[str]) -> str:
    """The operand and the layer of :func:`first_seen`'s answer."""
    place, second = divmod(order, 2)
    backward = place >= len(names)
    name = names[2 * len(names) - 1 - place if backward else place]
    operand = (("its input x", "its hidden rows a"), ("its output's gradient dy", "its hidden rows' gradient dh"))
    return f"{name}, in {operand[backward][second]}"


@functools.cache
def _look_after_each_step() -> None:
    """Extends ``MetricsProcessor.should_log``, which every rank calls after each step. Calling again does nothing."""
    should_log = MetricsProcessor.should_log

    @functools.wraps(should_log)
    def wrapper(self: MetricsProcessor, step: int) -> bool:
        job = _job
        if job.answer is not None and (order := int(job.answer)) != NOBODY and not job.reported:
            job.reported = True
            logger.warning(
                f"FP8-Flow-MoE: a NaN or Inf showed first in {describe(order, job.names)}, by step {step - 1}. "
                "Training goes on, but the weights are lost: resume from an earlier checkpoint. "
                "fp8_flow_moe.filter_fqns leaves the layer in bf16, to see whether FP8 is the cause"
            )
        parts = cast(list[nn.Module], self.model_parts)
        modules = [m for part in parts for m in part.modules() if getattr(m, "nan_flags", None) is not None]
        first = first_seen(modules, len(job.names))
        dist.all_reduce(first, op=dist.ReduceOp.MIN)  # always: a rank may read its answer later than another
        # The host may read late. The next steps, whose layers all hold NaNs, must not change the answer.
        job.seen = first if job.seen is None else torch.where(job.seen < NOBODY, job.seen, first)
        if job.answer is None:
            job.answer = torch.full((), NOBODY, dtype=torch.int32, pin_memory=first.is_cuda)
        job.answer.copy_(job.seen, non_blocking=True)
        return should_log(self, step)

    MetricsProcessor.should_log = wrapper
