"""Lets torchtitan's metrics look at the flags of :mod:`titan_fp8moe.trainer.nan_watch` after each step."""

import functools
from typing import cast

from torch import nn
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.tools import utils
from torchtitan.tools.logging import logger

from titan_fp8moe.trainer.nan_watch import NanWatch

_watching: list[NanWatch] = []


def watch(layers: dict[str, nn.Module]) -> None:
    """Gives the layers flags, in the order of the forward. Those of an earlier model are forgotten."""
    _watching[:] = [NanWatch(list(layers), layers, utils.device_type, logger)]
    _look_after_each_step()


@functools.cache
def _look_after_each_step() -> None:
    """Extends ``MetricsProcessor.should_log``, which every rank calls after each step. Calling again does nothing."""
    should_log = MetricsProcessor.should_log

    @functools.wraps(should_log)
    def wrapper(self: MetricsProcessor, step: int) -> bool:
        _watching[0].after_step(cast(list[nn.Module], self.model_parts), step)
        return should_log(self, step)

    MetricsProcessor.should_log = wrapper
