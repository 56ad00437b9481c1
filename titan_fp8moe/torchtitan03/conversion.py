"""A converted model's config, and what it does when it meets the job.

torchtitan's trainers call ``update_from_config(config=job)`` of the model's config before they build anything, and
``build()`` after all overrides. :meth:`Conversion.root` derives a config that first checks the job and settles what
depends on it. Whatever needs a trainer attaches by configs of the job (checkpointing, metrics) and by two functions of
torchtitan's (:mod:`~titan_fp8moe.torchtitan03.parallel`).
"""

import os
from dataclasses import dataclass, fields
from typing import Any

import torch.distributed as dist
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.config.override import derive
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.models.common.linear import Linear
from torchtitan.protocols.module import Module
from torchtitan.tools.logging import logger
from torchtitan.trainer import Trainer

from titan_fp8moe import SAVED_OPS, patches
from titan_fp8moe.config import Fp8FlowMoEConfig
from titan_fp8moe.torchtitan03 import job_checks, parallel
from titan_fp8moe.torchtitan03.metrics import Fp8FlowMetrics
from titan_fp8moe.torchtitan03.modules import (
    Fp8FlowFeedForward,
    Fp8FlowGatedFeedForward,
    Fp8FlowLinear03,
    Fp8FlowMoE,
)
from titan_fp8moe.trainer import compat, preflight
from titan_fp8moe.trainer.ahead import keep_host_ahead
from titan_fp8moe.trainer.experts import Placement
from titan_fp8moe.trainer.plan import LINEAR, MOE, SHARED, Part, announce

_CONVERTED = (Fp8FlowFeedForward.Config, Fp8FlowLinear03.Config, Fp8FlowMoE.Config)


def conversion_of(model_config: Any) -> "Conversion | None":
    """The conversion of a model's config, or None if it is torchtitan's own."""
    return getattr(model_config, "conversion", None)


class Conversion:
    """The settings of a converted model, and its parts with the reasons why some are not in FP8."""

    def __init__(self, settings: Fp8FlowMoEConfig, plan: list[Part]):
        self.settings, self.plan = settings, plan

    @property
    def fp8(self) -> dict[str, Part]:
        return {part.name: part for part in self.plan if part.reason is None}

    def root(self, model_config: Any) -> Any:
        """``model_config`` in a class that calls this conversion. Later converters may derive from it."""
        base, conversion_ = type(model_config), self

        class Config(base):
            conversion = conversion_

            def update_from_config(self, *, config: Any, **kwargs: Any) -> None:
                conversion_.meet(self, config)
                base.update_from_config(self, config=config, **kwargs)

            def build(self, **kwargs: Any) -> Any:
                conversion_.check_replaced(self)
                return base.build(self, **kwargs)

            def __reduce_ex__(self, protocol: Any) -> Any:
                if type(self) is not Config:  # a later converter's
                    return super().__reduce_ex__(protocol)
                return conversion_.root, (base(**_values(self)),)  # the class has no name to be found by

        Config.__name__, Config.__qualname__ = f"Fp8Flow{base.__name__}", f"Fp8Flow{base.__qualname__}"
        return Config(**_values(model_config))

    def meet(self, model: Any, job: Any) -> None:
        """Checks the job, settles what depends on it, and logs the plan.

        Raises:
            ValueError: for a job or hardware that cannot work. It names the setting and the remedy.
        """
        world_size = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))
        dims, configs = ParallelDims.from_config(job.parallelism, world_size), _configs(model)
        # A config function may have removed layers since.
        self.plan = [_settled(part, configs[part.name], dims.tp) for part in self.plan if part.name in configs]
        fp8, settings, placement = self.fp8, self.settings, Placement(in_fsdp=True)
        if isinstance(job, Trainer.Config):
            placement = self._check(job, dims, configs)
        way = f"dispatch over {settings.backend.description}" if dims.ep > 1 else ""
        announce(self.plan, settings, logger, way, "" if placement.in_fsdp or not fp8 else "experts outside of FSDP")
        for name, part in fp8.items():
            if part.kind == MOE:
                # Under EP each of TP's ranks routes a part of the tokens whose shared experts they share.
                joins = f"{name}.{SHARED}" in fp8 and (dims.tp == 1 or dims.ep == 1)
                configs[name].shared = "fp8" if joins else "meanwhile" if dims.tp == 1 else "apart"
                configs[name].checked = True
                configs[name].routed_experts.placement = placement
        if fp8:
            compat.fix_shape_inference()
            parallel.install()
            keep_host_ahead(Trainer)
            patches.log()
            self._attach(job, configs)

    def _check(self, job: Any, dims: ParallelDims, configs: dict[str, Any]) -> Placement:
        """Checks the job. The experts leave FSDP where it would gather and reduce them over one rank, for nothing."""
        settings, layout = self.settings, job_checks.expert_layout(job, dims)
        job_checks.check_job(job, settings)
        preflight.warn_about_settings(settings, layout.fsdp_shards)
        preflight.check_dispatch(settings, layout)
        for name, part in self.fp8.items():
            if part.kind == MOE:
                job_checks.check_layer(name, configs[name], settings, layout)
        return Placement(layout.fsdp_shards * dims.dp_replicate > 1 or parallel.fsdp_has_work(job))

    def _attach(self, job: Any, configs: dict[str, Any]) -> None:
        """Gives the job a checkpointing policy and a metrics processor that know this package."""
        if not isinstance(job, Trainer.Config):
            logger.warning(
                f"FP8-Flow-MoE: {type(job).__qualname__} is not a Trainer.Config: off are the checks of the job, "
                "checkpointing that keeps the experts' results, the NaN watch and statistics"
            )
            return
        job.activation_checkpoint = _saving_ops(job.activation_checkpoint)
        joined = {f"{name}.{SHARED}" for name, config in configs.items() if getattr(config, "shared", "") == "fp8"}
        watched = [name for name in self.fp8 if name not in joined]
        routed = [part.name for part in self.fp8.values() if part.kind == MOE]
        if type(job.metrics) in (MetricsProcessor.Config, Fp8FlowMetrics.Config):
            every = self.settings.statistics_every
            job.metrics = derive(
                job.metrics, Fp8FlowMetrics.Config, watched=watched, routed=routed, statistics_every=every
            )
        else:
            logger.warning(
                f"FP8-Flow-MoE: the NaN watch and statistics are off: {type(job.metrics).__qualname__} is not "
                "torchtitan's MetricsProcessor.Config"
            )

    def check_replaced(self, model: Any) -> None:
        """Overrides are applied after the conversion and could undo it.

        Raises:
            ValueError: one has done so.
        """
        configs = _configs(model)
        for name in self.fp8:
            if not isinstance(configs.get(name), _CONVERTED):
                raise ValueError(
                    f"an override of --override.imports has replaced {name}, which fp8_flow_moe had converted, by a "
                    f"{type(configs.get(name)).__qualname__}; remove the override, or leave the module in bf16 with "
                    "fp8_flow_moe.filter_fqns"
                )


def _values(config: Any) -> dict[str, Any]:
    return {f.name: getattr(config, f.name) for f in fields(config) if f.init}


def _configs(model: Any) -> dict[str, Any]:
    return {name: config for name, config, *_ in model.traverse(Module.Config, recurse=True)}


def _settled(part: Part, config: Any, tp: int) -> Part:
    """The part, with a reason to stay in bf16 that only the job or a later converter gives."""
    if part.reason is not None or part.kind == MOE:
        return part
    if part.kind == LINEAR:
        preflight.check_linear(part.name, config.out_features, config.in_features, tp)
        return part
    # A frozen linear has the same owner, one with LoRA adapters, of which FP8 would see the base alone, another.
    changed = [name for name in ("w1", "w2", "w3") if getattr(config, name)._owner is not Linear]
    if changed:
        part = part._replace(reason=f"{changed[0]} is a {getattr(config, changed[0])._owner.__qualname__}")
    elif tp > 1 and isinstance(config, Fp8FlowGatedFeedForward.Config):
        part = part._replace(reason="tensor parallelism places the gate of gated shared experts otherwise")
    else:
        part = part._replace(reason=preflight.why_not_fp8_dims(config.w1.in_features, config.w1.out_features, tp))
    if part.reason is not None:
        config.fp8_flow = None
    return part


class Fp8FlowSelectiveAC(SelectiveAC):
    """torchtitan's selective checkpointing, which also keeps the results of this package's ops."""

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        pass

    def get_save_ops(self) -> set:
        return super().get_save_ops() | set(SAVED_OPS)


def _saving_ops(policy: Any) -> Any:
    if type(policy) is SelectiveAC.Config:
        return derive(policy, Fp8FlowSelectiveAC.Config)
    if isinstance(policy, SelectiveAC.Config) and not isinstance(policy, Fp8FlowSelectiveAC.Config):
        logger.warning(
            f"FP8-Flow-MoE: {type(policy).__qualname__} is a checkpointing policy of its own: let its get_save_ops "
            "return titan_fp8moe.SAVED_OPS too, or the experts are recomputed"
        )
    return policy
