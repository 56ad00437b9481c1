"""The trainer whose config has the section ``fp8_flow_moe``, so that its settings are options of the command line."""

import contextlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import nn
from torchtitan.distributed import ParallelDims
from torchtitan.tools import utils
from torchtitan.tools.logging import logger
from torchtitan.trainer import Trainer

from titan_fp8moe.config import Fp8FlowMoEConfig
from titan_fp8moe.layer import statistics
from titan_fp8moe.layer.cache import WeightCache
from titan_fp8moe.torchtitan03.converter import convert
from titan_fp8moe.torchtitan03.job_checks import bf16_layers, compiles_model
from titan_fp8moe.torchtitan03.modules import Fp8FlowFeedForward, Fp8FlowLinear03, Fp8FlowMoE
from titan_fp8moe.trainer import compat
from titan_fp8moe.trainer.nan_watch import NanWatch
from titan_fp8moe.trainer.plan import MOE, SHARED, Part

_CONVERTED = (Fp8FlowFeedForward, Fp8FlowLinear03, Fp8FlowMoE)


class Fp8FlowTrainer(Trainer):
    """torchtitan's trainer of a model that it converts first.

    Raises:
        ValueError: for a job or hardware that cannot work. It names the setting and the remedy.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        fp8_flow_moe: Fp8FlowMoEConfig = field(default_factory=Fp8FlowMoEConfig)
        """Settings of the FP8 data flow."""

        def _validate_cuda_graphs(self) -> None:
            # torchtitan looks at dispatchers, of which converted layers only use the mesh.
            in_graphs, in_bf16 = not self.fp8_flow_moe.backend.syncs_host, bf16_layers(self)
            pipelines = self.parallelism.pipeline_parallel_degree > 1
            if in_graphs and not in_bf16 and not pipelines:
                return
            try:
                Trainer.Config._validate_cuda_graphs(self)
            except ValueError as error:
                if pipelines:
                    raise
                more = (
                    f"fp8_flow_moe.filter_fqns leaves {', '.join(in_bf16)} to it; remove them from the list"
                    if in_graphs
                    else "fp8_flow_moe reads split sizes on the host too, unless expert-parallel ranks share one node "
                    'and fp8_flow_moe.dispatch = "symmetric"'
                )
                raise ValueError(f"{error} {more}.") from error

    def __init__(self, config: Config):
        dims = ParallelDims.from_config(config.parallelism, int(os.environ.get("WORLD_SIZE", 1)))
        self.plan = [part for part in convert(config, dims) if part.reason is None]
        breaks = dims.ep > 1 and config.fp8_flow_moe.backend.syncs_host
        if breaks and compiles_model(config) and config.activation_checkpoint is not None:
            logger.warning(
                "FP8-Flow-MoE: MoE blocks run eagerly: the all-to-all breaks graphs, and a checkpointed block cannot "
                'be in pieces. Choose activation-checkpoint:none, or fp8_flow_moe.dispatch = "symmetric"'
            )
        compat.fix_shape_inference()
        with _graph_breaks_in_experts() if breaks else contextlib.nullcontext():
            super().__init__(config)
        modules = {_plain(name): module for part in self.model_parts for name, module in part.named_modules()}
        _check_replaced(self.plan, modules)
        self.nan_watch = _watch(self.plan, modules)
        self.counts_this_step = False
        self.metrics_processor.has_quantization |= bool(self.plan)  # no MFU against the bf16 peak

    def train_step(self, data_iterator: Any) -> None:
        """A step of torchtitan's, then what looks at it from outside: NaN flags, statistics and the weight caches."""
        if self.counts_this_step:
            statistics.collect()
        try:
            super().train_step(data_iterator)
        except RuntimeError as error:
            if "not finite" in str(error):  # torchtitan's, on all ranks that know the loss
                self.nan_watch.report_here(self.model_parts)
            raise
        WeightCache.clear_all()  # also where optimizers are not torch.optim's
        self.nan_watch.after_step(self.model_parts, self.step)
        if self.counts_this_step:
            counts = statistics.take(utils.device_type)
            dist.all_reduce(counts)
            summary = {f"fp8_flow_moe/{name}": value for name, value in statistics.summarize(counts).items()}
            self.metrics_processor.logger.log(summary, self.step)
        every = self.config.fp8_flow_moe.statistics_every
        self.counts_this_step = bool(every) and (self.step + 1) % every == 0


def _plain(name: str) -> str:
    """A module's name without the wrappers of compile and activation checkpointing."""
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


def _check_replaced(plan: list[Part], modules: dict[str, nn.Module]) -> None:
    """Overrides are applied after the conversion and could undo it. A pipeline stage holds some of the modules."""
    for part in plan:
        module = modules.get(part.name)
        if module is not None and not isinstance(module, _CONVERTED):
            raise ValueError(
                f"an override of --override.imports has replaced {part.name}, which fp8_flow_moe had converted, by a "
                f"{type(module).__qualname__}; remove the override, or leave the module in bf16 with "
                "fp8_flow_moe.filter_fqns"
            )


def _watch(plan: list[Part], modules: dict[str, nn.Module]) -> NanWatch:
    """Flags of all converted modules, in the order of the forward as far as names tell; a MoE layer's are those of its
    routed experts, which its FP8 shared experts join."""
    names = sorted((part.name for part in plan if part.kind != SHARED), key=_natural)
    flagged = {part.name: f"{part.name}.routed_experts" if part.kind == MOE else part.name for part in plan}
    here = {name: modules[flagged[name]] for name in names if flagged[name] in modules}
    return NanWatch(names, here, utils.device_type, logger)


def _natural(name: str) -> list[tuple[int, str]]:
    """Sorts layer 2 before layer 10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


@contextlib.contextmanager
def _graph_breaks_in_experts() -> Iterator[None]:
    """Lets blocks with converted MoE layers compile to several graphs. torchtitan asks for one, which the all-to-all's
    split sizes, read on the host, do not allow."""
    compile_module = nn.Module.compile

    def compile_(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        if any(isinstance(module, Fp8FlowMoE) for module in self.modules()):
            kwargs["fullgraph"] = False
        compile_module(self, *args, **kwargs)

    nn.Module.compile = compile_
    try:
        yield
    finally:
        nn.Module.compile = compile_module
