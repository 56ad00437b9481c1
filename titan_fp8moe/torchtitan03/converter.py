"""Converts a model's config: checks that the job can work, then replaces configs of MoE layers, FFNs and linears."""

import os
from dataclasses import dataclass
from typing import Any

from torchtitan.config.override import derive
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.models.common.feed_forward import FeedForward
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import MoE
from torchtitan.tools.logging import logger

from titan_fp8moe import SAVED_OPS, ops
from titan_fp8moe.config import Fp8FlowMoEConfig
from titan_fp8moe.torchtitan03 import job_checks
from titan_fp8moe.torchtitan03.modules import (
    Fp8FlowFeedForward,
    Fp8FlowGroupedExperts,
    Fp8FlowLinear03,
    Fp8FlowMoE,
    Fp8FlowRoutedExperts,
)
from titan_fp8moe.trainer import preflight
from titan_fp8moe.trainer.plan import DENSE, LINEAR, SHARED, Part, describe
from titan_fp8moe.trainer.plan import MOE as MOE_LAYER


class _Place:
    """A config and where it hangs in the tree, so that it can be replaced."""

    def __init__(self, config: Any, parent: Any, key: str | int):
        self.config, self.parent, self.key = config, parent, key

    def replace(self, config: Any) -> None:
        if isinstance(self.key, int):
            self.parent[self.key] = config
        else:
            setattr(self.parent, self.key, config)


def convert(job: Any, dims: ParallelDims) -> list[Part]:
    """Replaces configs in the model of a :class:`~titan_fp8moe.torchtitan03.trainer.Fp8FlowTrainer.Config`.

    Returns:
        What could run in FP8; parts without a reason have been converted.

    Raises:
        ValueError: for a job or hardware that cannot work. It names the setting and the remedy.
    """
    job_checks.check_job(job)
    config: Fp8FlowMoEConfig = job.fp8_flow_moe
    layout = job_checks.expert_layout(job, dims)
    preflight.warn_about_settings(config, layout.fsdp_shards)
    local_ranks = os.environ.get("LOCAL_WORLD_SIZE")
    preflight.check_dispatch(
        config,
        layout,
        None if local_ranks is None else int(local_ranks),
        remedy="lower parallelism.expert_parallel_degree",
    )
    plan = _plan(job.model_spec.model, config, layout, dims.tp)
    fp8 = {part.name: part for part in plan if part.reason is None}
    backend = preflight.check_hardware(config.emulate) if fp8 else "nothing to convert"
    for part in fp8.values():
        part.module.replace(_converted(part, config, dims.tp, f"{part.name}.{SHARED}" in fp8))
    if fp8:
        ops.emulate(config.emulate)
        job.activation_checkpoint = _saving_ops(job.activation_checkpoint)
    way = ""
    if layout.expert_shards > 1:
        way = f"dispatch over {config.backend.description}; "
    for line in describe(plan, f"{backend}; {way}{config.describe()}"):
        logger.info(line)
    return plan


def _plan(model: Any, config: Fp8FlowMoEConfig, layout: preflight.ExpertLayout, tp: int) -> list[Part]:
    """Every config that could become FP8, and why some do not. Checks all of them; changes nothing."""
    places = {name: _Place(cfg, parent, key) for name, cfg, parent, key in model.traverse(MoE.Config)}
    if not places:
        raise ValueError("fp8_flow_moe: the model has no MoE layer; use torchtitan's own --module, or a model with MoE")
    kinds = dict.fromkeys(places, MOE_LAYER)
    for name in list(places):
        layer = places[name].config
        if layer.shared_experts is not None:
            places[f"{name}.{SHARED}"] = _Place(layer.shared_experts, layer, SHARED)
            kinds[f"{name}.{SHARED}"] = SHARED
    for name, cfg, parent, key in model.traverse(FeedForward.Config):
        if name.split(".")[-1] == DENSE:
            places[name], kinds[name] = _Place(cfg, parent, key), DENSE
    filtered = preflight.matching([*kinds], config.filter_fqns, setting="filter_fqns")
    plan = []
    for name, kind in kinds.items():
        reason = "fp8_flow_moe.filter_fqns" if name in filtered else None
        if kind == MOE_LAYER and reason is None:
            job_checks.check_layer(name, places[name].config, config, layout)
        elif kind != MOE_LAYER and reason is None:
            reason = _why_not_fp8(places[name].config, tp)
        plan.append(Part(name, kind, places[name], reason))
    return plan + _plan_linears(model, config, [*kinds], tp)


def _plan_linears(model: Any, config: Fp8FlowMoEConfig, others: list[str], tp: int) -> list[Part]:
    """The linears that ``linear_fqns`` chooses, outside of MoE layers and FFNs."""
    if not config.linear_fqns:
        return []
    if tp > 1:
        raise ValueError(
            "fp8_flow_moe.linear_fqns under tensor parallelism is for torchtitan 0.2.2; leave it empty, or set "
            "parallelism.tensor_parallel_degree = 1"
        )
    places = {
        name: _Place(cfg, parent, key)
        for name, cfg, parent, key in model.traverse(Linear.Config)
        if not any(name.startswith(f"{other}.") for other in others)
    }
    chosen = preflight.matching([*places], config.linear_fqns, setting="linear_fqns")
    for name in chosen:
        linear = places[name].config
        if type(linear) is not Linear.Config or linear.bias:
            raise ValueError(
                f"fp8_flow_moe.linear_fqns: {name} is a {type(linear).__qualname__}, bias {linear.bias}, no plain "
                "Linear without a bias; remove it from the list"
            )
        preflight.check_linear(name, linear.out_features, linear.in_features, 1)
    return [Part(name, LINEAR, places[name], None) for name in chosen]


def _why_not_fp8(ffn: FeedForward.Config, tp: int) -> str | None:
    linears = ffn.w1, ffn.w2, ffn.w3
    if type(ffn) is not FeedForward.Config or any(type(w) is not Linear.Config or w.bias for w in linears):
        return f"{type(ffn).__qualname__} of {', '.join(type(w).__qualname__ for w in linears)}"
    if tp > 1:
        return "tensor parallelism of FFNs is FP8 with torchtitan 0.2.2 only"
    return preflight.why_not_fp8_dims(ffn.w1.in_features, ffn.w1.out_features, tp)


def _converted(part: Part, config: Fp8FlowMoEConfig, tp: int, fp8_shared: bool) -> Any:
    """The config that takes a part's place."""
    old = part.module.config
    if part.kind == LINEAR:
        return derive(old, Fp8FlowLinear03.Config, fp8_flow=config)
    if part.kind != MOE_LAYER:
        return derive(old, Fp8FlowFeedForward.Config, fp8_flow=config)
    routed = old.routed_experts
    experts = derive(routed.inner_experts, Fp8FlowGroupedExperts.Config, fp8_all_gather=config.fp8_all_gather)
    routed = derive(routed, Fp8FlowRoutedExperts.Config, inner_experts=experts, fp8_flow=config)
    shared, shared_config = "meanwhile" if tp == 1 else "apart", old.shared_experts
    if fp8_shared:
        shared, shared_config = "fp8", derive(old.shared_experts, Fp8FlowFeedForward.Config, fp8_flow=config)
    return derive(old, Fp8FlowMoE.Config, routed_experts=routed, shared_experts=shared_config, shared=shared)


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
    if isinstance(policy, SelectiveAC.Config):
        logger.warning(
            f"FP8-Flow-MoE: {type(policy).__qualname__} is a checkpointing policy of its own: let its get_save_ops "
            "return titan_fp8moe.SAVED_OPS too, or the experts are recomputed"
        )
    return policy
