"""The settings of the recipe: one dataclass for plain PyTorch and for torchtitan's ``[fp8_flow_moe]`` table."""

import math
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args, get_type_hints

import torch
import torch.distributed as dist

from titan_fp8moe.dispatch import BACKENDS, Dispatch, Route, auto
from titan_fp8moe.spec import BackwardSpec

_STAYS = Route()


@dataclass(kw_only=True)
class Fp8FlowMoEConfig:
    """Settings of the FP8 experts: how they compute, what they keep and log. The defaults suit most runs.

    Raises:
        ValueError: for an invalid value, or two settings that exclude each other. It names the setting and the fix.
    """

    wgrad: Literal["balanced", "scaling_aware", "bf16"] = "balanced"
    """How the two FP8 operands of a weight gradient are transposed. ``balanced`` first moves a power of two from a
    token's row in one operand to its row in the other. This keeps small tokens from underflow. ``scaling_aware`` is
    the FP8-Flow-MoE paper's transpose, without that step. ``bf16`` multiplies dequantized rows: slow, for debugging."""

    save_h: Literal["bf16", "fp8"] = "bf16"
    """Precision in which GEMM 1's output is kept for the backward. ``fp8`` halves its memory. It adds a rounding that
    affects the gradients but not the output."""

    recompute: Literal["none", "activation", "experts"] = "activation"
    """How much the backward recomputes. ``none`` keeps the outputs of GEMM 1 and SwiGLU; use it with full activation
    checkpointing, which recomputes the whole layer. ``activation`` recomputes the SwiGLU output, in a kernel that the
    backward runs anyway. ``experts`` keeps the quantized tokens only and repeats GEMM 1; ``save_h`` has no effect."""

    dispatch: Literal["auto", "all_to_all", "symmetric"] = "auto"
    """How tokens reach experts on other ranks. ``all_to_all`` works everywhere and syncs each layer once with the host.
    ``symmetric`` needs the expert-parallel ranks on one node with peer access. It never syncs, so a layer can be part
    of a compiled graph and of a CUDA graph; its buffers have a fixed size. ``auto`` is ``all_to_all``, and in
    torchtitan's jobs on one node ``symmetric`` as soon and as long as buffers of 1.25 to 2.5 times uniform
    routing's rows suffice, which it sizes itself; a step that they do not suffice for runs again."""

    dispatch_capacity: float = 1.5
    """Size of the buffers of ``dispatch = "symmetric"``: how many times the tokens of uniform routing a rank has room
    for. More make the outputs NaN, and the optimizer's step raises. The number of expert-parallel ranks always
    suffices."""

    cache_weights: bool = False
    """Quantize the experts' weights once per optimizer step, not in the forward and backward of each microbatch. This
    pays with gradient accumulation, pipeline parallelism and generation. ``cache_layouts`` says what it takes. Steps of
    ``torch.optim`` optimizers, other weights in their place and changes of whole weights are noticed, in compiled and
    CUDA graphs too. After changing few values through ``.data`` call ``titan_fp8moe.WeightCache.clear_all()``. Frozen
    weights are always quantized once for good, in 1 byte per parameter."""

    cache_layouts: Literal["both", "forward"] = "both"
    """The form in which ``cache_weights`` keeps weights; FSDP does not shard it. ``both`` takes 2 bytes per expert
    parameter. ``forward`` takes 1: each backward transposes the forward's FP8 values, which changes no bit."""

    fp8_all_gather: bool = False
    """Let FSDP gather the experts' weights in FP8, where each rank quantizes only its shard. This halves the bytes sent
    and the memory of the gathered weights. The number of experts must be a multiple of the expert-parallel degree times
    the ranks over which FSDP shards them. It excludes ``cache_weights``, and ``statistics_every`` counts no weights."""

    statistics_every: int = 0
    """Log underflow, scales and transpose shifts every N steps to TensorBoard or W&B; 0 never does. A counted step is
    slower. The first step of a run is not counted."""

    filter_fqns: list[str] = field(default_factory=list)
    """Leave in bf16 what has one of these strings in its fully qualified name: MoE layers, their shared experts alone
    (``shared_experts``), dense FFNs (``feed_forward``). ``layers.1.`` is one layer; ``layers.1`` also matches layers 10
    to 19."""

    linear_fqns: list[str] = field(default_factory=list)
    """Run in FP8 the linears that have one of these strings in their fully qualified names, such as
    ``attention.wq_b.``. Large projections gain, small ones lose. Their dims must be multiples of 128 on every rank."""

    @property
    def backward(self) -> BackwardSpec:
        """The settings of a layer's backward."""
        return BackwardSpec(self.recompute, self.save_h, self.wgrad)

    @property
    def backend(self) -> type[Dispatch]:
        """The dispatch of a layer whose experts are spread over ranks, in a forward that begins now."""
        return BACKENDS[self._backend_name()]

    @property
    def kept_layouts(self) -> Literal["both", "forward"]:
        """The layouts of a module's cache: frozen weights without ``cache_weights`` take the smaller form."""
        return self.cache_layouts if self.cache_weights else "forward"

    def route(self, ep_group: dist.ProcessGroup | None) -> Route:
        """The route of a layer whose experts are spread over the group, or are all here."""
        if ep_group is None:
            return _STAYS
        capacity = auto.room() if self.dispatch == "auto" else self.dispatch_capacity
        return Route(self._backend_name(), ep_group.size(), capacity, ep_group.group_name)

    def _backend_name(self) -> str:
        if self.dispatch != "auto":
            return self.dispatch
        return "symmetric" if auto.is_fast() and torch.is_grad_enabled() else "all_to_all"

    def describe(self) -> str:
        """The settings of a converted module in one line, for logs: all that do not select modules."""
        names = [f.name for f in fields(Fp8FlowMoEConfig) if not f.name.endswith("_fqns")]
        return ", ".join(f"{name}={getattr(self, name)}" for name in names)

    def __post_init__(self) -> None:
        for name, hint in _HINTS.items():
            value = getattr(self, name)
            ok, expected = _check_value(value, hint)
            if not ok:
                raise ValueError(f"fp8_flow_moe.{name} is {value!r}; set it to {expected}")
        if self.fp8_all_gather and self.cache_weights:
            raise ValueError("fp8_flow_moe.fp8_all_gather leaves cache_weights nothing to keep; set one to false")


def _check_value(value: Any, hint: Any) -> tuple[bool, str]:
    """Whether ``value`` is valid for a setting of type ``hint``, and what is."""
    if hint is bool:
        return isinstance(value, bool), "true or false"
    if hint is int:
        return type(value) is int and value >= 0, "a number of steps, or 0 for never"
    if hint is float:
        return type(value) in (int, float) and 1 <= value < math.inf, "a number of at least 1"
    if hint == list[str]:
        # An empty string, which an empty command-line value gives, would match every layer.
        ok = isinstance(value, list) and all(isinstance(v, str) and v for v in value)
        return ok, "a list of non-empty strings"
    return value in get_args(hint), "one of " + ", ".join(repr(choice) for choice in get_args(hint))


RECIPE = "wgrad", "save_h", "recompute"
TRANSPORT = "dispatch", "dispatch_capacity"
CACHE = "cache_weights", "cache_layouts"
_HINTS = get_type_hints(Fp8FlowMoEConfig)
DEFAULTS = Fp8FlowMoEConfig()  # made at import: torch.compile cannot trace its checks
_DEFAULT_VALUES = tuple(vars(DEFAULTS).items())  # PyTorch 2.11 traces no items() of an instance's dict


def require_config(config: Fp8FlowMoEConfig, owner: str, *settings: str) -> None:
    """Refuses what the owner of ``config`` would ignore.

    Args:
        owner: in words, for the message.
        settings: those that have an effect.

    Raises:
        ValueError: for another setting that is not its default.
    """
    if config == DEFAULTS:  # the most frequent case first: routed_experts asks in every forward
        return
    for name, default in _DEFAULT_VALUES:
        if name not in settings and getattr(config, name) != default:
            raise ValueError(f"{name} has no effect on {owner}; leave it out of the config")
    if not torch.compiler.is_compiling():
        config.__post_init__()  # what was assigned since
