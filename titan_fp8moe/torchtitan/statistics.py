"""Log numerics statistics next to the loss, to TensorBoard and W&B."""

import functools
from typing import Any, cast

import torch.distributed as dist
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.tools import utils

from titan_fp8moe.layer import statistics


@functools.cache
def log_statistics() -> None:
    """Make torchtitan log :mod:`titan_fp8moe.layer.statistics` every ``fp8_flow_moe.statistics_every`` steps.

    It extends ``MetricsProcessor.should_log``, which every rank calls after each step, also when no loss is logged.
    Calling again does nothing.
    """
    should_log = MetricsProcessor.should_log

    @functools.wraps(should_log)
    def wrapper(self: MetricsProcessor, step: int) -> bool:
        if statistics.collecting():
            counts = statistics.take(utils.device_type)
            dist.all_reduce(counts)
            self.logger.log({f"fp8_flow_moe/{k}": v for k, v in statistics.summarize(counts).items()}, step)
        every = cast(Any, self.job_config).fp8_flow_moe.statistics_every
        if every and (step + 1) % every == 0:
            statistics.collect()
        return should_log(self, step)

    MetricsProcessor.should_log = wrapper
