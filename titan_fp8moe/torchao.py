"""torchao's interface to the recipe: ``quantize_`` with :class:`titan_fp8moe.Fp8FlowMoEConfig`.

    from titan_fp8moe import Fp8FlowMoEConfig
    from titan_fp8moe.torchao import is_moe
    from torchao.quantization import quantize_

    quantize_(model, Fp8FlowMoEConfig(), filter_fn=is_moe)

It converts the experts of Transformers 5, and with :func:`linears` chosen linears of any model. It converts for good:
``model.set_experts_implementation`` does not reach such experts.
:class:`titan_fp8moe.RoutedExperts` get the settings. torchtitan's modules have a model converter of their own,
``fp8_flow_moe``. Importing this module makes the config torchao's.
"""

import copy
import weakref
from collections.abc import Callable
from typing import Any, cast

from torch import nn
from torchao.core.config import AOBaseConfig

from titan_fp8moe import patches
from titan_fp8moe.config import CACHE, RECIPE, TRANSPORT, Fp8FlowMoEConfig, require_config
from titan_fp8moe.nn.modules import Fp8FlowLinear, RoutedExperts
from titan_fp8moe.trainer import preflight
from titan_fp8moe.versions import warn_about_versions

warn_about_versions("torchao")

_chosen: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()  # the linears that a filter of linears() has selected


def is_moe(module: nn.Module, name: str = "") -> bool:
    """``quantize_``'s ``filter_fn`` that selects experts.

    torchao's own default filter matches linear layers only. To leave some layers as they are, combine the two::

        filter_fn=lambda module, name: is_moe(module, name) and "layers.1." not in name

    Raises:
        ValueError: for a whole model (``name`` is empty) without experts. ``quantize_`` would do nothing.
    """
    if not name and not any(_is_experts(m) for m in module.modules()):
        raise ValueError(
            f"{type(module).__name__} has no experts that quantize_ converts: RoutedExperts, or Transformers' that "
            'choose an implementation; torchtitan\'s take model.converters = ["fp8_flow_moe"]'
        )
    return _is_experts(module)


def linears(*parts: str) -> Callable[[nn.Module, str], bool]:
    """A ``filter_fn`` for linears that have one of ``parts`` in their fully qualified names, such as
    ``attention.wq_b.``.

    Raises:
        ValueError: from ``quantize_``, for a part that matches no linear of the model.
    """

    def matches(name: str, module: nn.Module, part: str) -> bool:
        return isinstance(module, nn.Linear) and part in f"{name}."

    def filter_fn(module: nn.Module, name: str) -> bool:
        for part in () if name else parts:
            if not any(matches(n, m, part) for n, m in module.named_modules()):
                raise ValueError(f"linears has {part!r}, which matches no linear of the model; correct or remove it")
        if selected := any(matches(name, module, part) for part in parts):
            _chosen.add(module)
        return selected

    return filter_fn


def _convert(module: nn.Module, config: Fp8FlowMoEConfig) -> nn.Module:
    """Converts a module that the filter of ``quantize_`` selects."""
    for name in (*config.filter_fqns, *config.linear_fqns):
        raise ValueError(f"the config names {name!r}, but quantize_ shows it no names; select modules with filter_fn")
    require_config(config, "modules of quantize_", *RECIPE, *TRANSPORT, *CACHE, "fp8_all_gather")
    preflight.check_hardware()
    if isinstance(module, RoutedExperts):
        module.configure(config)
    elif _is_transformers(module):
        _convert_transformers(module, config)
    elif module in _chosen:
        Fp8FlowLinear.convert(cast(nn.Linear, module), config)
    else:
        raise ValueError(
            f"Fp8FlowMoEConfig cannot convert {type(module).__name__}; call quantize_ with filter_fn = is_moe, or "
            "linears(...) for linear layers, of titan_fp8moe.torchao"
        )
    return module


_HANDLERS = "torchao.quantization.transform_module:_QUANTIZE_CONFIG_HANDLER"
patches.put(_HANDLERS, Fp8FlowMoEConfig, _convert, checked_on="torchao 0.18")
# The config stays free of torchao: it becomes an AOBaseConfig here, which quantize_ asks for.
AOBaseConfig.register(Fp8FlowMoEConfig)


def _is_transformers(module: Any) -> bool:
    # Both are from the decorator of experts. PEFT's wrappers forward attributes.
    return "is_concatenated" in vars(module) and "config" in vars(module)


def _is_experts(module: nn.Module) -> bool:
    return isinstance(module, RoutedExperts) or _is_transformers(module)


def _convert_transformers(experts: Any, config: Fp8FlowMoEConfig) -> None:
    """Chooses the registered implementation for this layer alone; all layers share the settings of the last call."""
    from titan_fp8moe import transformers

    transformers.register(config)
    experts.config = copy.copy(experts.config)
    experts.config._experts_implementation = transformers.NAME
    transformers.converted(experts)  # raises for experts that it does not serve
