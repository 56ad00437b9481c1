"""Names the converted layer and operand in which a NaN or Inf showed first, and logs statistics after a step.

torchtitan trains on when the loss or the gradient norm is NaN, and one step later every layer is. The kernels that
quantize rows store a flag where they meet one (:data:`titan_fp8moe.rows.X`). After each step the ranks reduce
"who was first" on the device, and the answer is read a step later: no kernel and no sync more in a layer.
"""

import logging
from collections.abc import Iterable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titan_fp8moe.layer import statistics

NOBODY = 2**31 - 1


class NanWatch:
    """Gives the layers flags, in the order of the forward, and reads them after each step.

    Args:
        names: of all layers that are watched.
        layers: those that this rank holds, by name.
        device: of the flags.
        logger: gets the warning.
    """

    def __init__(self, names: list[str], layers: dict[str, nn.Module], device: str, logger: logging.Logger):
        self.names, self.device, self.logger = names, device, logger
        self.seen = torch.full((), NOBODY, dtype=torch.int32, device=device)  # the first answer of the device
        self.answer = torch.full((), NOBODY, dtype=torch.int32, device="cpu", pin_memory=self.seen.is_cuda)
        self.reported = False
        for name, module in layers.items():
            flags = torch.zeros(2, 16, dtype=torch.uint8, device=device)
            cast(Any, module).nan_flags, cast(Any, module).nan_index = flags, names.index(name)

    def after_step(self, model_parts: Iterable[nn.Module], step: int) -> None:
        """Warns of what the step before met, once, and asks about this one. All ranks must call it."""
        if not self.reported:
            self._report(
                int(self.answer), f"by step {step - 1}. Training goes on, but the weights are lost: resume from an"
            )
        first = self._first_here(model_parts)
        dist.all_reduce(first, op=dist.ReduceOp.MIN)  # always: a rank may read its answer later than another
        # The host may read late. The next steps, whose layers all hold NaNs, must not change the answer.
        self.seen = torch.where(self.seen < NOBODY, self.seen, first)
        self.answer.copy_(self.seen, non_blocking=True)

    def report_here(self, model_parts: Iterable[nn.Module]) -> None:
        """Warns of what this rank has met, at once: for a job that ends."""
        self._report(int(self._first_here(model_parts)), "on this rank. Resume from an")

    def _first_here(self, model_parts: Iterable[nn.Module]) -> Tensor:
        """When, in the order of a step, the first of this rank's operands held a NaN or Inf: () int32 on the device.

        The forward quantizes x of layers 0, 1..., the backward dy of the last layer, the one before...
        """
        all_modules: list[Any] = [module for part in model_parts for module in part.modules()]
        modules = [module for module in all_modules if getattr(module, "nan_flags", None) is not None]
        if not modules:
            return torch.full((), NOBODY, dtype=torch.int32, device=self.device)
        flags = torch.stack([module.nan_flags[:, 0] for module in modules])
        index = torch.tensor([module.nan_index for module in modules], dtype=torch.int32, device="cpu")
        order = torch.stack([index, 2 * len(self.names) - 1 - index], 1).to(flags.device, non_blocking=True)
        return torch.where(flags > 0, order, NOBODY).amin()

    def _report(self, order: int, and_then: str) -> None:
        if order == NOBODY:
            return
        self.reported = True
        places = [f"{name}, in its input x" for name in self.names]
        places += [f"{name}, in its output's gradient dy" for name in reversed(self.names)]
        self.logger.warning(
            f"FP8-Flow-MoE: a NaN or Inf showed first in {places[order]}, {and_then} earlier checkpoint. "
            "To see whether FP8 is the cause, leave the module in bf16: add it to fp8_flow_moe.filter_fqns, or remove "
            "it from linear_fqns"
        )


def log_statistics(metrics: Any, step: int, device: str) -> None:
    """Logs :mod:`titan_fp8moe.layer.statistics` of all ranks by torchtitan's metrics processor, and ends counting."""
    counts = statistics.take(device)
    dist.all_reduce(counts)
    metrics.logger.log({f"fp8_flow_moe/{name}": value for name, value in statistics.summarize(counts).items()}, step)
