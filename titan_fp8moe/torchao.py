"""torchao's interface to the recipe: ``quantize_`` with :class:`titan_fp8moe.Fp8FlowMoEConfig`.

    from titan_fp8moe import Fp8FlowMoEConfig
    from titan_fp8moe.torchao import is_moe
    from torchao.quantization import quantize_

    quantize_(model, Fp8FlowMoEConfig(), filter_fn=is_moe)

It converts :class:`titan_fp8moe.RoutedExperts`, the MoE layers of torchtitan 0.2.2 and the experts of Transformers 5.
With :func:`linears` it converts chosen linears of any model, and without a filter all linears of a dense model but its
output. A conversion is for good: ``model.set_experts_implementation`` does not reach such experts. Importing this
module makes the config torchao's.
"""

import copy
import functools
import sys
from collections.abc import Callable
from typing import Any, cast

from torch import nn
from torchao.core.config import AOBaseConfig
from torchao.quantization import quant_api

from titan_fp8moe import patches
from titan_fp8moe.config import CACHE, RECIPE, TRANSPORT, Fp8FlowMoEConfig, require_config
from titan_fp8moe.nn.linear import Fp8FlowLinear
from titan_fp8moe.nn.modules import RoutedExperts
from titan_fp8moe.trainer import preflight
from titan_fp8moe.versions import warn_about_versions

warn_about_versions("torchao")

_OUTPUTS = "output", "lm_head"


def is_moe(module: nn.Module, name: str = "") -> bool:
    """``quantize_``'s ``filter_fn`` that selects MoE layers and experts.

    To leave some layers as they are, combine the two::

        filter_fn=lambda module, name: is_moe(module, name) and "layers.1." not in name

    Raises:
        ValueError: for a whole model (``name`` is empty) without experts. ``quantize_`` would do nothing.
    """
    if not name and not any(_is_moe(m) for m in module.modules()):
        raise ValueError(
            f"{type(module).__name__} has no experts that quantize_ converts: RoutedExperts, torchtitan 0.2.2's MoE, "
            "or Transformers' experts that choose an implementation; torchtitan 0.3 takes --override.imports"
        )
    return _is_moe(module)


def linears(part: str, *others: str) -> Callable[[nn.Module, str], bool]:
    """A ``filter_fn`` for linears that have one of these parts in their fully qualified names, such as
    ``attention.wq_b.``.

    Raises:
        ValueError: from ``quantize_``, for a part that matches no linear of the model.
    """
    parts = part, *others

    def filter_fn(module: nn.Module, name: str) -> bool:
        if not name:  # the model
            names = [n for n, m in module.named_modules() if isinstance(m, nn.Linear)]
            preflight.matching(names, parts, setting="linears")
        return isinstance(module, nn.Linear) and any(part in f"{name}." for part in parts)

    return filter_fn


def _default_filter(model: nn.Module) -> Callable[[nn.Module, str], bool]:
    """The ``filter_fn`` in the place of torchao's default one, which selects all linears and no experts."""
    if any(_is_moe(module) for module in model.modules()):
        raise ValueError(
            f"{type(model).__name__} has MoE layers, and torchao's default filter selects linears alone; call "
            "quantize_ with filter_fn = is_moe, and again with linears(...) for linears, of titan_fp8moe.torchao"
        )

    def filter_fn(module: nn.Module, name: str) -> bool:
        converted = isinstance(module, Fp8FlowLinear)
        return isinstance(module, nn.Linear) and not converted and name.split(".")[-1] not in _OUTPUTS

    selected = [(name, cast(nn.Linear, module)) for name, module in model.named_modules() if filter_fn(module, name)]
    if not selected:
        raise ValueError(f"{type(model).__name__} has no linear, but for its output, that is not FP8 already")
    for name, module in selected:
        if reason := Fp8FlowLinear.why_not(module):
            raise ValueError(  # before any is converted
                f"only {reason} can be FP8, not {name}: {module}; name those to convert by filter_fn = linears(...)"
            )
    return filter_fn


def _with_default_filter(replace: Callable[..., Any]) -> Callable[..., Any]:
    """torchao's recursion over a model, which alone sees the model and the filter."""

    @functools.wraps(replace)
    def wrapper(model: nn.Module, handler: Any, filter_fn: Any, *args: Any, **kwargs: Any) -> Any:
        if handler is _convert and filter_fn is quant_api._is_linear:
            filter_fn = _default_filter(model)
        return replace(model, handler, filter_fn, *args, **kwargs)

    return wrapper


def _convert(module: Any, config: Fp8FlowMoEConfig) -> nn.Module:
    """Converts a module that the filter of ``quantize_`` selects."""
    require_config(config, "modules that filter_fn selects", *RECIPE, *TRANSPORT, *CACHE, "fp8_all_gather")
    preflight.check_hardware()
    if isinstance(module, RoutedExperts):
        module.configure(config)
    elif _is_transformers(module):
        _convert_transformers(module, config)
    elif _is_torchtitan(module):
        _convert_torchtitan(module, config)
    else:
        Fp8FlowLinear.convert(module, config)
    return module


_HANDLERS, _CHECKED_ON = "torchao.quantization.transform_module:_QUANTIZE_CONFIG_HANDLER", "torchao 0.18"
patches.put(_HANDLERS, Fp8FlowMoEConfig, _convert, checked_on=_CHECKED_ON)
patches.wrap(quant_api, "_replace_with_custom_fn_if_matches_filter", _with_default_filter, checked_on=_CHECKED_ON)
# The config stays free of torchao: it becomes an AOBaseConfig here, which quantize_ asks for.
AOBaseConfig.register(Fp8FlowMoEConfig)


def _is_transformers(module: Any) -> bool:
    # Both are from the decorator of experts. PEFT's wrappers forward attributes.
    return "is_concatenated" in vars(module) and "config" in vars(module)


def _is_torchtitan(module: nn.Module) -> bool:
    moe = sys.modules.get("torchtitan.models.moe.moe")
    return moe is not None and isinstance(module, moe.MoE)


def _is_moe(module: nn.Module) -> bool:
    return isinstance(module, RoutedExperts) or _is_transformers(module) or _is_torchtitan(module)


def _convert_transformers(experts: Any, config: Fp8FlowMoEConfig) -> None:
    """Chooses the registered implementation for this layer alone; all layers share the settings of the last call."""
    from titan_fp8moe import transformers

    transformers.register(config)
    experts.config = copy.copy(experts.config)
    experts.config._experts_implementation = transformers.NAME
    transformers.converted(experts)  # raises for experts that it does not serve


def _convert_torchtitan(layer: Any, config: Fp8FlowMoEConfig) -> None:
    """Converts one MoE layer with its shared experts, and prepares torchtitan's parallelization for it. FSDP keeps the
    experts, since nothing here knows the job's degrees."""
    from titan_fp8moe.torchtitan import converter, job_checks, modules

    job_checks.check_layer("the layer", layer, config, preflight.ExpertLayout(1, 1, 1, 0))
    converter.prepare_torchtitan()
    shared = layer.shared_experts
    fp8_shared = shared is not None and modules.why_not_fp8(shared, 1) is None
    modules.Fp8FlowMoE.convert(layer, config, fp8_shared, in_fsdp=True)
