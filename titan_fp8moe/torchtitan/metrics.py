"""Reports NaNs and logs statistics after each step, where torchtitan's metrics decide whether to log."""

import functools
from collections.abc import Callable
from typing import cast

from torch import nn
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.tools import utils
from torchtitan.tools.logging import logger

from titan_fp8moe import patches
from titan_fp8moe.layer import statistics
from titan_fp8moe.trainer.nan_watch import NanWatch, log_statistics

_watching: list[NanWatch] = []


def watch(layers: dict[str, nn.Module]) -> None:
    """Gives the layers NaN flags, in the order of the forward. Those of an earlier model are forgotten.

    Extends ``MetricsProcessor.should_log``, which every rank calls after each step, also when no loss is logged.
    """
    _watching[:] = [NanWatch(list(layers), layers, utils.device_type, logger)]
    patches.wrap(MetricsProcessor, "should_log", _looking, checked_on="torchtitan 0.2.2")


def _looking(should_log: Callable[..., bool]) -> Callable[..., bool]:
    @functools.wraps(should_log)
    def wrapper(self: MetricsProcessor, step: int) -> bool:
        for nan_watch in _watching:
            nan_watch.after_step(cast(list[nn.Module], self.model_parts), step)
        if statistics.collecting():
            log_statistics(self, step, utils.device_type)
        settings = getattr(self.job_config, "fp8_flow_moe", None)  # a later job may be without
        every = settings.statistics_every if settings is not None else 0
        if every and (step + 1) % every == 0:
            statistics.collect()
        return should_log(self, step)

    return wrapper
