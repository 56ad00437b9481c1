"""torchao's interface to the recipe: ``quantize_`` with :class:`titan_fp8moe.Fp8FlowMoEConfig`.

    from titan_fp8moe import Fp8FlowMoEConfig
    from titan_fp8moe.torchao import is_moe
    from torchao.quantization import quantize_

    quantize_(model, Fp8FlowMoEConfig(), filter_fn=is_moe)

It converts the experts of torchtitan 0.2.2 and of Transformers 5, and gives :class:`titan_fp8moe.RoutedExperts` the
settings. Importing this module makes the config one of torchao's.
"""

import copy
import sys
from collections.abc import Callable
from typing import Any

from torch import nn
from torchao.core.config import AOBaseConfig
from torchao.quantization.transform_module import register_quantize_module_handler

from titan_fp8moe import checks, ops
from titan_fp8moe.checks import ExpertLayout
from titan_fp8moe.config import Fp8FlowMoEConfig
from titan_fp8moe.modules import RoutedExperts

_SHARED = "shared_experts"


def is_moe(module: nn.Module, name: str = "") -> bool:
    """``quantize_``'s ``filter_fn``: whether the recipe has a conversion for this module.

    torchao's own default filter matches linear layers only. To leave some layers as they are, combine the two::

        filter_fn=lambda module, name: is_moe(module, name) and "layers.1." not in name

    Raises:
        ValueError: for a whole model (``name`` is empty) that has no such module. ``quantize_`` would do nothing.
    """
    if not name and all(_conversion(m) is None for m in module.modules()):
        raise ValueError(
            f"{type(module).__name__} has no experts that titan_fp8moe converts: torchtitan's MoE, RoutedExperts, or "
            "the experts of Transformers 5 that choose an implementation"
        )
    return _conversion(module) is not None


@register_quantize_module_handler(Fp8FlowMoEConfig)
def _convert(module: nn.Module, config: Fp8FlowMoEConfig) -> nn.Module:
    """What ``quantize_`` calls for a module that its filter selects."""
    if (convert := _conversion(module)) is None:
        raise ValueError(
            f"Fp8FlowMoEConfig cannot convert {type(module).__name__}; call quantize_ with "
            "filter_fn=titan_fp8moe.torchao.is_moe"
        )
    if others := [part for part in config.filter_fqns if part != _SHARED]:
        raise ValueError(
            f"filter_fqns has {others[0]!r}, but quantize_ shows a config no names; select layers with filter_fn. "
            f"Only {_SHARED!r} works here"
        )
    if config.statistics_every:
        raise ValueError("statistics_every has no effect with quantize_, as nothing logs the statistics; set it to 0")
    checks.check_hardware(config.emulate, remedy="leave out quantize_ to train in bf16")
    ops.emulate(config.emulate)
    convert(module, config)
    return module


# The config stays free of torchao: it becomes an AOBaseConfig here, which quantize_ asks for.
AOBaseConfig.register(Fp8FlowMoEConfig)


def _conversion(module: Any) -> Callable[[Any, Fp8FlowMoEConfig], None] | None:
    """How to convert a module, in place; None for a module without experts. No framework is imported in vain."""
    if isinstance(module, RoutedExperts):
        return RoutedExperts.configure
    titan = sys.modules.get("torchtitan.models.moe.moe")
    if titan is not None and isinstance(module, titan.MoE):
        return _convert_torchtitan
    # Transformers' decorator of experts leaves this attribute.
    return _convert_transformers if hasattr(module, "is_concatenated") and hasattr(module, "config") else None


def _convert_torchtitan(layer: Any, config: Fp8FlowMoEConfig) -> None:
    """As torchtitan's model converter does, but for checks of a job's settings, which are not known here."""
    from titan_fp8moe.torchtitan import converter, job_checks, modules

    job_checks.check_layer("the layer", layer, config, ExpertLayout(1, 1, 1, 0))
    converter.prepare_torchtitan(config)
    has_shared = layer.shared_experts is not None and _SHARED not in config.filter_fqns
    modules.Fp8FlowMoE.convert(layer, config, has_shared and modules.why_not_fp8(layer.shared_experts, 1) is None)
    layer.experts.keep_fsdp = True  # other layers may stay in bf16


def _convert_transformers(experts: Any, config: Fp8FlowMoEConfig) -> None:
    """Chooses the registered implementation for this layer alone; all layers share the settings of the last call."""
    from titan_fp8moe import transformers

    transformers.register(config)
    experts.config = copy.copy(experts.config)
    experts.config._experts_implementation = transformers.NAME
    transformers.converted(experts)  # raises for experts that it does not serve
