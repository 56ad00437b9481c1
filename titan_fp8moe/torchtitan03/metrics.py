"""torchtitan's metrics processor, which also watches for NaNs and logs statistics, whatever the trainer.

Trainers ask it at the start of each step whether they will log, and tell it the optimizers. A hook on these looks at
the step from outside, before a trainer ends the job because the loss is not finite.
"""

import contextlib
from dataclasses import dataclass, field
from typing import Any

from titan_fp8moe.layer import statistics
from titan_fp8moe.torchtitan03 import names as tt
from titan_fp8moe.trainer.compat import uncompiled
from titan_fp8moe.trainer.nan_watch import NanWatch, log_statistics
from titan_fp8moe.trainer.plan import natural, plain_name


class Fp8FlowMetrics(tt.MetricsProcessor):
    """Serves converted models.

    Attributes:
        nan_watch: from the first step on.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(tt.MetricsProcessor.Config):
        watched: list[str] = field(default_factory=list)
        """Names of the converted modules, on all ranks."""

        statistics_every: int = 0

    nan_watch: NanWatch | None = None

    def __init__(self, config: Config, **kwargs: Any):
        super().__init__(config, **kwargs)
        self.has_quantization = True  # no MFU against the bf16 peak
        self.eager = contextlib.ExitStack()  # of a step that is counted

    def should_log(self, step: int) -> bool:
        """torchtitan's answer. Every trainer asks once, at the start of a step."""
        self.step, self.logs_step = step, super().should_log(step)
        every = self.config.statistics_every
        if self.nan_watch is None:
            self.nan_watch = self._watch()
            self.optimizers.register_step_post_hook(lambda *_: self._after_step())
        elif every and step % every == 0:  # a run's first step is not counted
            statistics.collect()
            self.eager.enter_context(uncompiled(self.model_parts))  # compiled blocks count nothing
        return self.logs_step

    def _watch(self) -> NanWatch:
        """Gives flags to the modules that this rank holds, in the order of the forward as far as names tell. A MoE
        layer's routed experts have the flags, also of shared experts that join them."""
        modules = {plain_name(name): module for part in self.model_parts for name, module in part.named_modules()}
        names = sorted(self.config.watched, key=natural)
        here = {name: getattr(modules[name], "routed_experts", modules[name]) for name in names if name in modules}
        for name, module in here.items():
            if not hasattr(type(module), "nan_flags"):
                raise ValueError(
                    f"{type(module).__qualname__} has replaced {name} after fp8_flow_moe had converted the model; "
                    "apply that override before"
                )
        return NanWatch(names, here, tt.utils.device_type, tt.logger)

    def _after_step(self) -> None:
        assert self.nan_watch is not None
        self.nan_watch.after_step(self.model_parts, self.step)
        if self.logs_step and not self.nan_watch.reported:  # the trainer waits for the loss next, and may end the job
            self.nan_watch.report_here(self.model_parts)
        if statistics.collecting():
            self.eager.close()
            log_statistics(self, self.step, tt.utils.device_type)
