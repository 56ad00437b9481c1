"""The model converter: replaces configs of MoE layers, FFNs and linears, and lets the model's config meet the job.

``model_registry(flavor, converters=[Fp8FlowConverter.Config(save_h="fp8")])`` serves every trainer that takes a model
spec. A converter sees the model alone. Whatever depends on the job is done by
:class:`~titan_fp8moe.torchtitan03.conversion.Conversion`.
"""

from dataclasses import dataclass, fields
from typing import Any

from torchtitan.components.quantization import QuantizationConverter
from torchtitan.config.override import derive
from torchtitan.models.common.feed_forward import FeedForward, SigmoidGatedFeedForward
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import MoE
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts

from titan_fp8moe.config import Fp8FlowMoEConfig
from titan_fp8moe.torchtitan03 import job_checks
from titan_fp8moe.torchtitan03.conversion import Conversion, conversion_of
from titan_fp8moe.torchtitan03.modules import (
    Fp8FlowDispatcher,
    Fp8FlowFeedForward,
    Fp8FlowGatedFeedForward,
    Fp8FlowGptOssExperts,
    Fp8FlowGroupedExperts,
    Fp8FlowLinear03,
    Fp8FlowMoE,
    Fp8FlowRoutedExperts,
)
from titan_fp8moe.trainer import preflight
from titan_fp8moe.trainer.plan import DENSE, LINEAR, MOE, SHARED, Candidates, Part, make_plan


class Fp8FlowConverter(QuantizationConverter):
    """Converts the MoE layers and FFNs that ``filter_fqns`` does not match, and the linears that ``linear_fqns`` does.

    Its settings are those of :class:`~titan_fp8moe.config.Fp8FlowMoEConfig`. ``model_compile_enabled`` is not read: the
    job says later what is compiled.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(QuantizationConverter.Config, Fp8FlowMoEConfig):
        pass

    def __init__(self, config: Config):
        self.settings = Fp8FlowMoEConfig(**{f.name: getattr(config, f.name) for f in fields(Fp8FlowMoEConfig)})

    def convert(self, model_config: Any) -> Any:
        """Replaces configs inside of ``model_config``. The result takes its place.

        Raises:
            ValueError: for a model that cannot be converted. It names the setting and the remedy.
        """
        if conversion_of(model_config) is not None:
            raise ValueError("Fp8FlowConverter has converted this model before; name it once among the converters")
        plan = make_plan(
            _candidates(model_config),
            self.settings,
            check_layer=lambda name, place: job_checks.check_classes(name, place.config),
            why_not_ffn=_why_not_fp8,
            check_linear=_check_linear,
        )
        fp8 = {part.name: part for part in plan if part.reason is None}
        for part in fp8.values():
            part.module.replace(_converted(part, self.settings, f"{part.name}.{SHARED}" in fp8))
        return Conversion(self.settings, [part._replace(module=None) for part in plan]).root(model_config)


class _Place:
    """A config and where it hangs in the tree, so that it can be replaced."""

    def __init__(self, config: Any, parent: Any, key: str | int):
        self.config, self.parent, self.key = config, parent, key

    def replace(self, config: Any) -> None:
        if isinstance(self.key, int):
            self.parent[self.key] = config
        else:
            setattr(self.parent, self.key, config)


def _candidates(model: Any) -> Candidates:
    def places(kind: type) -> dict[str, _Place]:
        return {name: _Place(config, parent, key) for name, config, parent, key in model.traverse(kind)}

    layers, ffns = places(MoE.Config), {}
    for name, place in layers.items():
        if place.config.shared_experts is not None:
            ffns[f"{name}.{SHARED}"] = _Place(place.config.shared_experts, place.config, SHARED)
    ffns |= {name: place for name, place in places(FeedForward.Config).items() if name.split(".")[-1] == DENSE}
    return Candidates(layers, ffns, places(Linear.Config))


def _check_linear(name: str, place: _Place) -> None:
    linear = place.config
    if type(linear) is not Linear.Config or linear.bias:
        raise ValueError(
            f"fp8_flow_moe.linear_fqns: {name} is a {type(linear).__qualname__}, bias {linear.bias}, no plain Linear "
            "without a bias; remove it from the list"
        )
    preflight.check_linear(name, linear.out_features, linear.in_features, 1)


def _why_not_fp8(place: _Place) -> str | None:
    ffn = place.config
    linears = ffn.w1, ffn.w2, ffn.w3
    if type(ffn) not in _FFNS or any(type(w) is not Linear.Config or w.bias for w in linears):
        return f"{type(ffn).__qualname__} of {', '.join(type(w).__qualname__ for w in linears)}"
    return preflight.why_not_fp8_dims(ffn.w1.in_features, ffn.w1.out_features, 1)


_FFNS = {
    FeedForward.Config: Fp8FlowFeedForward.Config,
    SigmoidGatedFeedForward.Config: Fp8FlowGatedFeedForward.Config,
}


def _converted(part: Part, config: Fp8FlowMoEConfig, fp8_shared: bool) -> Any:
    """The config that takes a part's place."""
    old = part.module.config
    if part.kind == LINEAR:
        return derive(old, Fp8FlowLinear03.Config, fp8_flow=config)
    if part.kind != MOE:
        return derive(old, _FFNS[type(old)], fp8_flow=config)
    routed, shared = old.routed_experts, old.shared_experts
    is_gpt_oss = type(routed.inner_experts) is GptOssGroupedExperts.Config
    kind = Fp8FlowGptOssExperts.Config if is_gpt_oss else Fp8FlowGroupedExperts.Config
    routed = derive(
        routed,
        Fp8FlowRoutedExperts.Config,
        inner_experts=derive(routed.inner_experts, kind),
        token_dispatcher=Fp8FlowDispatcher.Config(),
        fp8_flow=config,
    )
    if fp8_shared:
        shared = derive(shared, _FFNS[type(shared)], fp8_flow=config)
    return derive(old, Fp8FlowMoE.Config, routed_experts=routed, shared_experts=shared)
