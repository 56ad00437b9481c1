"""Converts the MoE layers, FFNs and linears of a model's config, after it has met the job and all overrides.

An override gets one node of the config, and a model converter gets the model; neither gets the job. So they only claim
MoE layers: :func:`claim` puts a config in a layer's place that keeps the settings and cannot be built. :func:`convert`
plans, checks and replaces, once for the whole model. torchtitan's ``Trainer`` calls ``_validate_cuda_graphs`` of its
config right after the overrides, before it builds anything: there it runs. Other trainers reach it by the model config
that ``Fp8FlowConverter`` returns. LoRAConverter has come before in both cases.

Whatever needs a trainer attaches by the job's config of metrics and by functions of torchtitan's
(:mod:`~titan_fp8moe.torchtitan03.parallel`).
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch.distributed as dist

from titan_fp8moe import patches
from titan_fp8moe.config import Fp8FlowMoEConfig
from titan_fp8moe.kernels import warm_up
from titan_fp8moe.torchtitan03 import job_checks, modules, parallel
from titan_fp8moe.torchtitan03 import names as tt
from titan_fp8moe.torchtitan03.lora import derive_adapted, owner_of
from titan_fp8moe.torchtitan03.metrics import Fp8FlowMetrics
from titan_fp8moe.trainer import auto_dispatch, compat, preflight
from titan_fp8moe.trainer.ahead import keep_host_ahead
from titan_fp8moe.trainer.plan import DENSE, LINEAR, MOE, SHARED, Part, announce, make_plan

_FFNS = {
    tt.FeedForward: modules.Fp8FlowFeedForward.Config,
    tt.SigmoidGatedFeedForward: modules.Fp8FlowGatedFeedForward.Config,
}


class Fp8FlowClaim(tt.MoE):
    """A MoE layer that :func:`convert` is going to replace. It cannot be built."""

    @dataclass(kw_only=True, slots=True)
    class Config(tt.MoE.Config):
        settings: Fp8FlowMoEConfig
        restored: Callable[[Any], tt.MoE.Config]  # from this config the layer's own; torchtitan would walk into a class

    def __init__(self, config: Config) -> NoReturn:
        raise RuntimeError(
            "fp8_flow_moe was to convert this MoE layer, but has met no job, as it does in torchtitan's Trainer; for "
            "another trainer name Fp8FlowConverter among the model's converters, in the place of the override, and let "
            "it call update_from_config(config=job) of the model's config"
        )


def claim(layer: tt.MoE.Config, settings: Fp8FlowMoEConfig) -> tt.MoE.Config:
    """A config that takes the place of ``layer`` until :func:`convert` runs.

    Raises:
        ValueError: it is claimed with other settings.
    """
    if not isinstance(layer, Fp8FlowClaim.Config):
        patches.wrap(tt.Trainer.Config, "_validate_cuda_graphs", _after_overrides, checked_on="torchtitan 0.3.0")
        restored = partial(tt.derive, target_cls=type(layer))
        return tt.derive(layer, Fp8FlowClaim.Config, settings=settings, restored=restored)
    if layer.settings != settings:
        raise ValueError(
            f"the model was converted with {layer.settings}, but fp8_flow_moe is {settings}; configure one of the two"
        )
    return layer


def _after_overrides(validate: Callable[[Any], None]) -> Callable[[Any], None]:
    """Converts claimed layers before a trainer's config checks CUDA graphs, which depend on their dispatchers."""

    def validate_(job: Any) -> None:
        model = job.model_spec.model if job.model_spec is not None else None
        claim = None if model is None else next((claim for _, claim, *_ in model.traverse(Fp8FlowClaim.Config)), None)
        if claim is not None:
            if claim.sharding_config is None:
                return  # the model has not met the job, which gives it sharding configs; torchtitan asks again
            model.convert() if hasattr(model, "convert") else convert(model, job, claim.settings)
        validate(job)

    return validate_


@dataclass
class Place:
    """A config and where it hangs in the tree, so that it can be replaced."""

    config: Any
    parent: Any
    key: str | int

    def replace(self, config: Any) -> None:
        self.config = config
        if isinstance(self.key, int):
            self.parent[self.key] = config
        else:
            setattr(self.parent, self.key, config)


def places(model: Any, kind: type) -> dict[str, Place]:
    return {name: Place(config, parent, key) for name, config, parent, key in model.traverse(kind)}


def convert(model: Any, job: Any, settings: Fp8FlowMoEConfig) -> None:
    """Checks the job and replaces configs inside of ``model``, claims among them. Logs what is in FP8.

    Raises:
        ValueError: for a model, a job or hardware that cannot work. It names the setting and the remedy.
    """
    layers = places(model, tt.MoE.Config)
    for place in layers.values():
        if isinstance(place.config, Fp8FlowClaim.Config):
            place.replace(place.config.restored(place.config))
    world_size = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))
    dims = tt.ParallelDims.from_config(job.parallelism, world_size)
    ffns = places(model, tt.FeedForward.Config)
    plan = make_plan(
        layers,
        {name: place for name, place in ffns.items() if name.split(".")[-1] in (SHARED, DENSE)},
        places(model, tt.Linear.Config),
        settings,
        check_layer=lambda name, place: job_checks.check_classes(name, place.config),
        why_not_ffn=lambda place: _why_not_fp8(place.config, dims.tp),
        check_linear=lambda name, place: _check_linear(name, place.config, dims.tp),
    )
    fp8, in_fsdp = {part.name: part for part in plan if part.reason is None}, True
    way = f"dispatch over {settings.backend.description}" if dims.ep > 1 else ""
    if isinstance(job, tt.Trainer.Config):
        in_fsdp, way = _check(job, settings, dims, {name: p.module.config for name, p in fp8.items() if p.kind == MOE})
    announce(plan, settings, tt.logger, way, "" if in_fsdp or not fp8 else "experts outside of FSDP")
    if not fp8:
        return
    if preflight.trains_here():
        warm_up.use_inductors_ptxas()
        warm_up.begin()
    for part in fp8.values():
        if part.kind != MOE:  # shared experts before their layer
            config = part.module.config
            kind = modules.Fp8FlowLinear03.Config if part.kind == LINEAR else _FFNS[config._owner]
            part.module.replace(derive_adapted(config, kind, fp8_flow=settings))
    for name, part in fp8.items():
        if part.kind == MOE:
            # Under EP each of TP's ranks routes a part of the tokens whose shared experts they share.
            joins = f"{name}.{SHARED}" in fp8 and (dims.tp == 1 or dims.ep == 1)
            part.module.replace(_layer_in_fp8(part.module.config, settings, in_fsdp, joins))
    compat.fix_shape_inference()
    parallel.install()
    keep_host_ahead(tt.Trainer)
    auto_dispatch.run_steps_again(tt.Trainer)
    patches.log()
    _attach(job, settings, fp8)


def _check(job: Any, settings: Fp8FlowMoEConfig, dims: tt.ParallelDims, layers: dict[str, Any]) -> tuple[bool, str]:
    """Checks the job; says whether the experts stay in FSDP, and how tokens travel."""
    layout = job_checks.expert_layout(job, dims)
    way = auto_dispatch.prepare(settings, layout, job_checks.why_all_to_all(job), len(layers))
    job_checks.check_job(job, settings)
    preflight.check_dispatch(settings, layout)
    preflight.warn_of_settings_without_effect(settings, layout)
    for name, layer in layers.items():
        job_checks.check_layer(name, layer, settings, layout)
    return preflight.fsdp_has_work(job, layout, dims), way


def _check_linear(name: str, linear: Any, tp: int) -> None:
    if owner_of(linear) is not tt.Linear or linear.bias:
        raise ValueError(
            f"fp8_flow_moe.linear_fqns: {name} is a {type(linear).__qualname__}, bias {linear.bias}, no plain Linear "
            "without a bias; remove it from the list"
        )
    preflight.check_linear(name, linear.out_features, linear.in_features, tp)


def _why_not_fp8(ffn: Any, tp: int) -> str | None:
    linears = ffn.w1, ffn.w2, ffn.w3
    # Of a linear with adapters, whose owner is another, FP8 would see the base alone.
    if ffn._owner not in _FFNS or any(w._owner is not tt.Linear or w.bias for w in linears):
        return f"{ffn._owner.__qualname__} of {', '.join(w._owner.__qualname__ for w in linears)}"
    if tp > 1 and ffn._owner is tt.SigmoidGatedFeedForward:
        return "tensor parallelism places the gate of gated shared experts otherwise"
    return preflight.why_not_fp8_dims(ffn.w1.in_features, ffn.w1.out_features, tp)


def _layer_in_fp8(layer: Any, settings: Fp8FlowMoEConfig, in_fsdp: bool, fp8_shared: bool) -> Any:
    routed = layer.routed_experts
    is_gpt_oss = routed.inner_experts._owner is tt.GptOssGroupedExperts
    kind = modules.Fp8FlowGptOssExperts.Config if is_gpt_oss else modules.Fp8FlowGroupedExperts.Config
    routed = tt.derive(
        routed,
        modules.Fp8FlowRoutedExperts.Config,
        inner_experts=derive_adapted(routed.inner_experts, kind),
        token_dispatcher=modules.Fp8FlowDispatcher.Config(),
        fp8_flow=settings,
        in_fsdp=in_fsdp,
    )
    return tt.derive(layer, modules.Fp8FlowMoE.Config, routed_experts=routed, fp8_shared=fp8_shared)


def _attach(job: Any, settings: Fp8FlowMoEConfig, fp8: dict[str, Part]) -> None:
    """Gives the job a metrics processor that knows this package."""
    if not isinstance(job, tt.Trainer.Config):
        tt.logger.warning(
            f"FP8-Flow-MoE: {type(job).__qualname__} is not a Trainer.Config: off are the checks of the job, the NaN "
            "watch and statistics"
        )
        return
    if type(job.metrics) not in (tt.MetricsProcessor.Config, Fp8FlowMetrics.Config):
        tt.logger.warning(
            f"FP8-Flow-MoE: the NaN watch and statistics are off: {type(job.metrics).__qualname__} is not "
            "torchtitan's MetricsProcessor.Config"
        )
        return
    joined = {f"{name}.{SHARED}" for name, part in fp8.items() if getattr(part.module.config, "fp8_shared", False)}
    job.metrics = tt.derive(
        job.metrics,
        Fp8FlowMetrics.Config,
        watched=[name for name in fp8 if name not in joined],
        statistics_every=settings.statistics_every,
    )
