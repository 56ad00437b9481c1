"""Transformers adapter: an implementation of experts for the registry that Transformers 5 has for them.

    from titan_fp8moe.transformers import register

    register()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, experts_implementation="fp8_flow")
    # or, with a model at hand: model.set_experts_implementation("fp8_flow")

The registry hands a function the module of a layer's experts, its tokens and the router's choice. The functions here
pass them to :func:`titan_fp8moe.layer.run.run_layer`. The fused ``gate_up_proj``, or ``up_proj`` of experts
without a gate, is its ``w1`` as it lies.
"""

import contextlib
import functools
import inspect
import warnings
import weakref
from collections.abc import Callable
from typing import Any, Literal, cast

import torch
import transformers
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from transformers.integrations.finegrained_fp8 import ALL_FP8_EXPERTS_FUNCTIONS
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, use_experts_implementation

from titan_fp8moe import patches, peft, recipe
from titan_fp8moe.activations import ACTIVATIONS
from titan_fp8moe.config import CACHE, RECIPE, Fp8FlowMoEConfig, require_config
from titan_fp8moe.layer.operands import Layouts, add_cache, own_cache, tensor_key
from titan_fp8moe.layer.run import Experts, run_layer
from titan_fp8moe.layer.weights import Biases, ExpertWeights, are_frozen
from titan_fp8moe.ops import Fp8Weight, block_scales
from titan_fp8moe.recipe import BLOCK, FP8, STEP, exp2, exponent
from titan_fp8moe.spec import ExpertSpec
from titan_fp8moe.trainer import compat, preflight
from titan_fp8moe.versions import warn_about_versions

warn_about_versions("transformers")

NAME = "fp8_flow"
_STAY = 'use model.set_experts_implementation("grouped_mm")'
_REGISTRIES = {
    "transformers.integrations.moe:ALL_EXPERTS_FUNCTIONS": ALL_EXPERTS_FUNCTIONS,
    "transformers.integrations.finegrained_fp8:ALL_FP8_EXPERTS_FUNCTIONS": ALL_FP8_EXPERTS_FUNCTIONS,  # stored in FP8
}
# What Transformers 5.17 to 5.24 say of experts. Without a check, what another version adds would be computed wrongly.
_PROPERTIES = {"is_concatenated", "is_transposed", "has_bias", "has_gate", "has_post_expert_norm"}


def register(
    config: Fp8FlowMoEConfig | None = None,
    *,
    unsupported: Literal["error", "keep"] = "error",
    scales: Literal["exact", "round"] = "exact",
) -> None:
    """Adds the experts implementation ``fp8_flow`` to Transformers, or replaces it.

    It serves experts of the :data:`titan_fp8moe.activations.ACTIVATIONS`, with or without a gate and biases, in any
    of Transformers' layouts, with dims that are multiples of 16 and weights in bf16 or fp32. Parameters, their names
    and checkpoints stay as they are. Experts of an FP8 checkpoint in DeepSeek's format stay in FP8, 1 byte per
    parameter; they are frozen, so call ``requires_grad_(False)`` on them before training.

    Args:
        config: the settings of the recipe and of the weight cache; by default ``Fp8FlowMoEConfig()``. With gradient
            checkpointing use ``recompute="none"``. Frozen experts are quantized once for good, in 1 byte per parameter.
        unsupported: what experts do that it does not serve. ``error`` raises ValueError in their forward. ``keep``
            leaves them on Transformers' ``grouped_mm`` and warns once for each reason.
        scales: of experts that a checkpoint stores in FP8: ``exact`` reads weights and scales as they are, ``round``
            replaces them in the model, once; see :meth:`titan_fp8moe.Fp8Weight.of_blocks`.

    Raises:
        ValueError: for a setting that has no effect here, and for a GPU without kernels.
        RuntimeError: for a version of Transformers whose experts have properties that are not known here.
    """
    parameters = inspect.signature(use_experts_implementation).parameters
    if unknown := parameters.keys() - _PROPERTIES - {"experts_class", "experts_interface"}:
        raise RuntimeError(
            f"Transformers {transformers.__version__} describes experts by {', '.join(sorted(unknown))}, which "
            "titan_fp8moe.transformers does not know; install a version from 5.17 to 5.24"
        )
    config = config or Fp8FlowMoEConfig()
    require_config(config, "Transformers models", *RECIPE, *CACHE)
    preflight.check_hardware()
    compat.fix_full_checkpointing()
    forward = functools.partial(_experts_forward, config=config, keep=unsupported == "keep", scales=scales)
    for name, registry in _REGISTRIES.items():
        patches.put(name, NAME, functools.partial(forward, registry=registry), checked_on="Transformers 5.17 to 5.24")
    peft.run_beside(lambda experts: _chooses(experts) and _is_chosen(experts) and _why_not(experts) is None)
    patches.log()


def fp8_matrices(model: nn.Module) -> list[str]:
    """Names of the matrices that a model of Transformers multiplies in FP8, of experts that layers share under each
    name. Warns of experts for which ``fp8_flow`` is chosen, but which run otherwise."""
    names = []
    for name, experts in _all_experts(model, remove_duplicate=False).items():
        if not _is_chosen(experts):
            continue
        if (why_not := _why_not(experts) or _why_not_called(model, name)) is not None:
            _warn(f"{type(experts).__name__} does not run in FP8: {why_not}")
            continue
        names += [f"{name}.{matrix}".lstrip(".") for matrix in (_first(experts), "down_proj")]
    return names


def is_chosen(model: nn.Module) -> bool:
    """Whether ``fp8_flow`` is chosen for any experts of a model, whether or not they run in FP8."""
    return any(map(_is_chosen, _all_experts(model).values()))


def _is_chosen(experts: Any) -> bool:
    return experts.config._experts_implementation == NAME


def _all_experts(model: nn.Module, remove_duplicate: bool = True) -> dict[str, Any]:
    """Those that choose an implementation. PEFT's wrappers forward attributes, so a module's own count."""
    named = model.named_modules(remove_duplicate=remove_duplicate)
    return {name: module for name, module in named if _chooses(module)}


def _chooses(module: nn.Module) -> bool:
    """Whether the module is of experts that choose an implementation."""
    return "is_concatenated" in vars(module)


def converted(model: nn.Module) -> list[str]:
    """Names of the experts that run in FP8. Transformers ignores the implementation where a model's code has none.
    Those of which PEFT trains a copy, by ``modules_to_save``, do not count.

    Raises:
        ValueError: if there are none. It says why.
    """
    found = {name: module for name, module in _all_experts(model).items() if not name.endswith(".original_module")}
    selected = {name: module for name, module in found.items() if _is_chosen(module)}
    reasons = {name: _why_not(module) or _why_not_called(model, name) for name, module in selected.items()}
    names = [name for name, reason in reasons.items() if reason is None]
    if names:
        return names
    if not found:
        why = "the model's code has no experts that choose an implementation"
    elif not selected:
        why = f'call titan_fp8moe.transformers.register() and model.set_experts_implementation("{NAME}")'
        why += ", and before PEFT copies modules_to_save; a saved model does not keep the choice"
    else:
        why = "; ".join(sorted({f"{type(found[name]).__name__}: {reason}" for name, reason in reasons.items()}))
        why = f"{why}; {_STAY}"
    raise ValueError(f"no experts of {type(model).__name__} run in FP8: {why}")


_reached: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # experts that have got a token which no expert serves


def _why_not_called(model: nn.Module, name: str) -> str | None:
    """Why a call of these experts in training does not come to :func:`_experts_forward`, or None.

    Other packages replace the forward of experts (Liger) or of the layer around them (MegaBlocks, by Transformers'
    ``use_kernels``), or wrap it (accelerate). Only a call tells where the forward of the experts ends.
    """
    experts: Any = model.get_submodule(name)
    layer = model.get_submodule(name.rpartition(".")[0]) if name else experts
    _reached.discard(experts)
    with torch.inference_mode(False), torch.compiler.set_stance("force_eager"), contextlib.suppress(Exception):
        token = torch.zeros(1, _dims(experts)[0], dtype=torch.bfloat16, device="cpu", requires_grad=True)
        experts.forward(
            token,
            torch.empty(1, 0, dtype=torch.long, device="cpu"),
            torch.empty(1, 0, dtype=torch.float32, device="cpu"),
        )
    replaced = layer if experts in _reached else experts
    packages = {"transformers", *(kind.__module__.partition(".")[0] for kind in type(layer).__mro__)}
    if replaced is layer and _source(layer).partition(".")[0] in packages:
        return None
    return f"{_source(replaced)} has replaced the forward of {type(replaced).__name__}; switch that off"


def _source(module: nn.Module) -> str:
    """The name of the Python module that has a module's forward, below accelerate's hooks."""
    forward = vars(module).get("forward", type(module).forward)
    if isinstance(forward, functools.partial):
        forward = vars(module).get("_old_forward", forward)
    function = getattr(forward, "__func__", forward)  # functools.wraps changes __module__
    return getattr(function, "__globals__", {}).get("__name__", type(function).__module__)


def _experts_forward(
    experts: Any,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    *,
    registry: Any,
    config: Fp8FlowMoEConfig,
    keep: bool,
    scales: Literal["exact", "round"],
) -> Tensor:
    """Runs experts for the registry: hidden_states (T, D), top_k_index and top_k_weights (T, K).

    Expert parallelism of Transformers marks experts of other ranks by the id ``num_experts``. Ids past the last expert
    get no row from the routing kernels.
    """
    if top_k_index.shape[1] == 0:  # _why_not_called
        _reached.add(experts)
        return hidden_states
    if (why_not := _why_not(experts)) is not None:
        message = f"{type(experts).__name__} cannot run as {NAME}: {why_not}"
        if not keep:
            raise ValueError(
                f"{message}; {_STAY}, or leave such layers on grouped_mm "
                'with titan_fp8moe.transformers.register(unsupported="keep")'
            )
        _warn(f"{message}; it stays on grouped_mm")
        return registry["grouped_mm"](experts, hidden_states, top_k_index, top_k_weights)
    first = _first(experts)
    w1, down, biases = getattr(experts, first), experts.down_proj, None
    stored = w1.dtype == FP8
    frozen, cache = stored or are_frozen((w1, down)), None  # without gradients, transposes require none
    if experts.is_transposed:  # (E, D, 2H) and (E, H, D), read where they lie
        w1, down = w1.transpose(1, 2), down.transpose(1, 2)
    if experts.has_bias:
        biases = Biases(getattr(experts, f"{first}_bias"), experts.down_proj_bias)
    weights: ExpertWeights[Any] = ExpertWeights(w1, down)
    if stored:
        if scales == "round":
            _round_scales(experts)
        weights = ExpertWeights(
            Fp8Weight(w1, block_scales(getattr(experts, f"{first}_scale_inv"))),
            Fp8Weight(experts.down_proj, block_scales(experts.down_proj_scale_inv)),
        )
    elif frozen or config.cache_weights:
        layouts = config.kept_layouts
        if "fp8_flow_cache" not in vars(experts) or experts.fp8_flow_cache.layouts != layouts:
            _add_cache(experts, layouts)
        cache = own_cache(experts, "fp8_flow_cache")
    spec, lora = cast(ExpertSpec, _expert(experts)), peft.take_over(experts)
    host = vars(experts).get("fp8_host")
    given = Experts(weights, config, None, spec, cache, frozen, biases, lora, check_ids=False, host=host)
    scores, device = top_k_weights.float(), hidden_states.device  # routers of bf16 models give bf16 scores
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return run_layer(hidden_states, top_k_index, scores, given)
    with torch.cuda.device(device):  # device_map spreads layers over GPUs; autograd switches to them by itself
        return run_layer(hidden_states, top_k_index, scores, given)


def _first(experts: Any) -> str:
    """The name of GEMM 1's weight."""
    return "gate_up_proj" if experts.has_gate else "up_proj"


def _outside_of_graphs(function: Callable[..., None]) -> Callable[..., None]:
    """In a graph's trace the function runs once. Torch before 2.13 passes it no modules: there it breaks the graph."""
    if torch.__version__ >= "2.13":
        return torch.compiler.assume_constant_result(function)
    return torch.compiler.disable(function, reason="run the model once before torch.compile(fullgraph=True)")


@_outside_of_graphs
def _add_cache(experts: Any, layouts: Layouts) -> None:
    add_cache(experts, layouts, "fp8_flow_cache")


_rounded: "weakref.WeakKeyDictionary[nn.Module, list[tuple]]" = weakref.WeakKeyDictionary()
"""The tensors that experts had after rounding. No attribute: keys hold weak references, which cannot be copied."""


@_outside_of_graphs  # it reads values on the host
def _round_scales(experts: Any) -> None:
    """Replaces weights and scales by those with powers of two, once."""
    pairs = [(getattr(experts, name), getattr(experts, f"{name}_scale_inv")) for name in (_first(experts), "down_proj")]
    if _rounded.get(experts) == [tensor_key(t) for pair in pairs for t in pair]:
        return
    for q, scale in pairs:
        weight = Fp8Weight.of_blocks(q, scale.to(q.device), scales="round")
        if weight.q.data_ptr() != q.data_ptr():
            q.detach().view(torch.uint8).copy_(weight.q.view(torch.uint8))
            scale.data.copy_(exp2(exponent(weight.scale)))
    _rounded[experts] = [tensor_key(t) for pair in pairs for t in pair]


def _why_not(experts: Any) -> str | None:
    """Why the recipe does not serve these experts, or None."""
    first = _first(experts)
    dtype = getattr(experts, first).dtype
    if dtype.is_floating_point and dtype != FP8 and hasattr(experts, f"{first}_scale_inv"):
        return f"its FP8 weights were cast to {dtype} without their scales; load it again, and cast no stored experts"
    if dtype not in (torch.bfloat16, torch.float32, FP8):
        return f"its weights are {dtype}; load them in bfloat16, quantized ones dequantized"
    if dtype == FP8 and tuple(experts.block_size or ()) != (BLOCK, BLOCK):
        return f"its FP8 weights have scales per block {experts.block_size}, not per {BLOCK}x{BLOCK}"
    if dtype == FP8 and (experts.is_transposed or experts.has_bias or not experts.is_concatenated):
        return "its FP8 weights are transposed, interleaved or beside biases; load them dequantized"
    if getattr(experts, "has_post_expert_norm", False):  # since 5.23
        return "its experts' outputs are normalized"
    if _expert(experts) is None:
        of_kind = (name for name, entry in ACTIVATIONS.items() if entry.gated == experts.has_gate)
        return f"its {'gate' if experts.has_gate else 'activation'} is none of {', '.join(of_kind)}"
    if len(shape := _down_shape(experts)) != 3:
        return f"its down_proj has the shape {tuple(shape)}; ask before FSDP1 or another wrapper flattens parameters"
    D, H = _dims(experts)
    if dtype == FP8 and (D % BLOCK or H % BLOCK):
        return f"its FP8 weights have dims {D} and {H} that are not both multiples of {BLOCK}; load them dequantized"
    if D % STEP or H % STEP:
        return f"its dims {D} and {H} are not both multiples of {STEP}"
    return None


def _down_shape(experts: Any) -> torch.Size:
    # Between forwards DeepSpeed's ZeRO-3 leaves an empty tensor, and the whole weight's ds_shape.
    return getattr(experts.down_proj, "ds_shape", experts.down_proj.shape)


def _dims(experts: Any) -> tuple[int, int]:
    """D and H."""
    _, D, H = _down_shape(experts)
    return (H, D) if experts.is_transposed else (D, H)


_PROBED = 41  # values of gate, and of up, from minus to plus twice the limit


def _expert(experts: Any) -> ExpertSpec | None:
    """The expert of the table that computes what these experts do between their products, by its values; None if there
    is none. It is found once."""
    if "fp8_flow_expert" not in vars(experts):
        _find_expert(experts)
    return experts.fp8_flow_expert


@_outside_of_graphs
def _find_expert(experts: Any) -> None:
    # The gate is read from numbers, whatever the caller's default device, and in torch.export's fake mode too.
    outside = torch._C.DisableTorchFunction(), _disable_current_modes()
    with outside[0], outside[1], torch.no_grad(), torch.autocast("cpu", enabled=False):
        experts.fp8_flow_expert = _compare(experts)


def _compare(experts: Any) -> ExpertSpec | None:
    limit, alpha = (getattr(experts, name, getattr(experts, f"swiglu_{name}", None)) for name in ("limit", "alpha"))
    act, config = getattr(experts, "act_fn", None), getattr(experts, "config", None)
    caps: list[Any] = [getattr(config, f"mlp_{name}_softcap", None) for name in ("gate", "up")]
    if isinstance(act, nn.Module) and any(True for _ in act.parameters()):  # it may be trained
        return None
    if any(isinstance(value, Tensor) for value in (limit, alpha, *caps)):  # it may change
        return None
    limit, alpha, interleaved = limit or 10.0, 1.0 if alpha is None else alpha, not experts.is_concatenated
    specs = [ExpertSpec.of(name) for name, entry in ACTIVATIONS.items() if not entry.parameters]
    specs += [ExpertSpec.of("clamped_swiglu", dict(limit=limit, alpha=alpha, offset=offset)) for offset in (0, 1)]
    if all(caps):  # Inkling 2's
        specs.append(ExpertSpec.of("softcapped_swiglu", dict(zip(("gate_cap", "up_cap"), caps, strict=True))))
    values = torch.linspace(-2 * limit, 2 * limit, _PROBED, dtype=torch.float32, device="cpu")
    gate, up = (grid.reshape(-1, 1) for grid in torch.meshgrid(values, values, indexing="ij"))
    if experts.has_gate:
        got = experts._apply_gate(recipe.join_gate_up(gate, up, ExpertSpec(interleaved=interleaved)))
    else:
        got = experts.act_fn(gate)
    for spec in specs:
        want = ACTIVATIONS[spec.activation].forward(gate, up, *spec.parameters)
        if spec.gated == experts.has_gate and torch.allclose(got, want, rtol=1e-5, atol=1e-4):
            return spec._replace(interleaved=interleaved and spec.gated)  # the two forms of GELU are 0.01 apart here
    return None


@torch.compiler.assume_constant_result  # torch.compile calls it when it traces, where it could not trace the warning
def _warn(message: str) -> None:
    _warn_once(message)


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=3)
