"""The routed experts as modules for any model."""

from collections.abc import Callable
from typing import Any, Self, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.hooks import RemovableHandle

from titan_fp8moe import ops
from titan_fp8moe.config import CACHE, RECIPE, TRANSPORT, Fp8FlowMoEConfig, require_config
from titan_fp8moe.layer import operands
from titan_fp8moe.layer.checks import check_padded_apart
from titan_fp8moe.layer.fp8_gather import Fp8AllGather
from titan_fp8moe.layer.host import HostLayer
from titan_fp8moe.layer.operands import WeightCache, own_cache
from titan_fp8moe.layer.run import Experts, run_layer
from titan_fp8moe.layer.weights import Biases, ExpertWeights, SharedExperts, are_frozen
from titan_fp8moe.nn import parallel
from titan_fp8moe.nn.lora import AddsLora
from titan_fp8moe.ops import Fp8Weight
from titan_fp8moe.recipe import FP8, SCALE_BITS
from titan_fp8moe.spec import ExpertSpec


def fp8_parameters(model: nn.Module) -> list[str]:
    """Names of the matrices that a model multiplies in FP8, as its modules name them in ``fp8_matrices()``."""
    return [
        f"{prefix}.{name}".lstrip(".")
        for prefix, module in model.named_modules()
        if hasattr(type(module), "fp8_matrices")  # wrappers have the attributes of the module inside
        for name in cast(Any, module).fp8_matrices()
    ]


class KeepDtype:
    """Holds a tensor that mixed precision must not cast: FSDP casts the floating-point tensors among a module's
    arguments, and looks for them in tuples, dicts and dataclasses only."""

    def __init__(self, tensor: Tensor):
        self.tensor = tensor


def check_dtype(dtype: torch.dtype) -> None:
    if dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"the weights would be {dtype}; make the module with dtype=torch.bfloat16 or torch.float32")


class _RunsLayer(AddsLora):
    """Mixin of experts whose call is a layer without its router. Parameters of an ``ep_group`` are DTensors.

    Attributes:
        for_layer: returns the record that a layer takes.
    """

    for_layer: Callable[[], Experts]

    def register(self, weights: dict[str, Tensor | None], ep_group: dist.ProcessGroup | DeviceMesh | None) -> None:
        """Registers this rank's weights as parameters, and the checks of a state dict."""
        first = cast(Tensor, next(iter(weights.values())))
        mesh = None if ep_group is None else parallel.mesh_of(ep_group, first.device)
        for name, weight in weights.items():
            if weight is not None:
                weight = nn.Parameter(parallel.spread(weight, mesh) if mesh else weight, weight.is_floating_point())
            self.register_parameter(name, weight)
        self.ep_group = None if mesh is None else mesh.get_group()
        self.register_load_state_dict_pre_hook(_prepare_state)

    def _apply(self, *args: Any, **kwargs: Any) -> Self:
        super()._apply(*args, **kwargs)
        for weight in self.parameters():
            if self.ep_group is not None and isinstance(weight, DTensor):
                parallel.follow_device(weight, self.ep_group)
        return self

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"ep_group": self.ep_group is not None}  # the weights' mesh knows it

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.ep_group = parallel.group_of(cast(DTensor, next(self.parameters()))) if state["ep_group"] else None

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Wraps the scores in :class:`KeepDtype` under FSDP, whose mixed precision would cast them. After FSDP's hook
        :func:`_unwrap_scores` takes them out."""
        inputs = [*args]
        for name in ("x", "topk_ids", "topk_scores")[len(args) :]:
            if name in kwargs:
                inputs.append(kwargs.pop(name))
        if isinstance(self, FSDPModule):
            if len(inputs) > 2:
                inputs[2] = KeepDtype(inputs[2])
            shared = kwargs.get("shared")
            if isinstance(shared, SharedExperts) and shared.scores is not None:
                scores: Any = KeepDtype(shared.scores)
                kwargs["shared"] = shared._replace(scores=scores)
        return super().__call__(*inputs, **kwargs)

    def register_forward_pre_hook(self, hook: Callable[..., Any], **options: Any) -> RemovableHandle:
        """See ``nn.Module``. The first call registers a hook that unwraps the scores: after FSDP's, which FSDP
        prepends, and before the others."""
        if not self._forward_pre_hooks:
            super().register_forward_pre_hook(_unwrap_scores)
        return super().register_forward_pre_hook(hook, **options)

    def forward(
        self,
        x: Tensor,
        topk_ids: Tensor,
        topk_scores: Tensor,
        *,
        meanwhile: Callable[[], Tensor] | None = None,
        shared: SharedExperts | None = None,
    ) -> Tensor:
        """See :func:`titan_fp8moe.routed_experts` for arguments, result and errors: x (T, D), topk_ids (T, K),
        topk_scores (T, K)."""
        if isinstance(shared, SharedExperts) and isinstance(shared.scores, KeepDtype):
            shared = shared._replace(scores=shared.scores.tensor)
        return run_layer(x, topk_ids, topk_scores, self.for_layer(), shared, meanwhile)


class RoutedExperts(Fp8AllGather, _RunsLayer):
    """The experts of one MoE layer in FP8; the router and shared experts are the caller's. :meth:`add_lora` freezes
    them and trains adapters.

    With ``ep_group`` the weights are DTensors, ``Shard(0)`` over its ranks, so that PyTorch's tools do not take them
    for replicas: :mod:`titan_fp8moe.nn.parallel`, and docs/parallel.md for a training loop. A copy of the module shares
    the group. ``torch.save(module)`` keeps this rank's experts; loading it needs an equal group of the same name.

    Args:
        num_experts: experts of all ranks.
        dim, hidden_dim: D and H, multiples of 16; quantized rows and weights pad them to multiples of 128.
        config: the settings of the recipe and the transport, and ``cache_weights``; by default ``Fp8FlowMoEConfig()``.
        ep_group: the ranks over which the experts are spread, in order; their number must divide ``num_experts``. If
            FSDP shards the experts further, it is the mesh dim of those ranks, such as ``mesh["ep"]``.
        score_before_experts: multiply the experts' input, not their output, by the score.
        activation, activation_parameters: as in :func:`titan_fp8moe.routed_experts`.
        bias: whether the projections have biases.

    Attributes:
        w1, w2, w3: gate (num_experts, H, D), down (num_experts, D, H) and up (num_experts, H, D), initialized like
            ``nn.Linear``. ``w1.to_local()`` are this rank's experts. With an activation without a gate ``w1`` is up,
            and ``w3`` and ``b3`` are None.
        b1, b2, b3: the biases (num_experts, H), (num_experts, D) and (num_experts, H), or None.
        ep_group: the process group, or None.

    Raises:
        ValueError: for experts that do not divide over the ranks, a dtype that is not bf16 or fp32, a setting without
            effect here, or a group that this rank is not in.

    Example::

        experts = RoutedExperts(num_experts=64, dim=2048, hidden_dim=1408, device="cuda", dtype=torch.bfloat16)
        scores, ids = router(x).softmax(-1).topk(6)  # x (T, D), scores fp32
        y = experts(x, ids, scores)
    """

    w1: nn.Parameter
    w2: nn.Parameter
    w3: nn.Parameter | None
    cache: WeightCache
    ep_group: dist.ProcessGroup | None
    b1: nn.Parameter | None
    b2: nn.Parameter | None
    b3: nn.Parameter | None

    def __init__(
        self,
        num_experts: int,
        dim: int,
        hidden_dim: int,
        *,
        config: Fp8FlowMoEConfig | None = None,
        ep_group: dist.ProcessGroup | DeviceMesh | None = None,
        score_before_experts: bool = False,
        activation: str = "swiglu",
        activation_parameters: dict[str, float] | None = None,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        check_dtype(dtype or torch.get_default_dtype())
        num_ranks = 1 if ep_group is None else ep_group.size()
        if num_experts % num_ranks:
            raise ValueError(f"num_experts = {num_experts} do not divide over the {num_ranks} ranks of ep_group")
        self.expert = ExpertSpec.of(activation, activation_parameters, score_before_experts)
        shapes = dict(w1=(hidden_dim, dim), w2=(dim, hidden_dim), w3=(hidden_dim, dim))
        shapes |= dict(b1=(hidden_dim,), b2=(dim,), b3=(hidden_dim,))
        weights: dict[str, Tensor | None] = {}
        for name, shape in shapes.items():
            absent = (name[0] == "b" and not bias) or (name[1] == "3" and not self.expert.gated)
            size = num_experts // num_ranks, *shape
            weights[name] = None if absent else torch.empty(size, device=device, dtype=dtype)
        self.register(weights, ep_group)
        self.configure(Fp8FlowMoEConfig() if config is None else config)
        self.reset_parameters()

    @staticmethod
    def from_fp8(
        w1: Fp8Weight,
        w2: Fp8Weight,
        w3: Fp8Weight | None = None,
        *,
        config: Fp8FlowMoEConfig | None = None,
        ep_group: dist.ProcessGroup | None = None,
        score_before_experts: bool = False,
        activation: str = "swiglu",
        activation_parameters: dict[str, float] | None = None,
    ) -> "Fp8RoutedExperts":
        """Frozen experts that are stored in FP8, 1 byte per parameter; see :class:`Fp8RoutedExperts`.

        Args:
            w1, w2, w3: gate (E, H, D), down (E, D, H) and up (E, H, D) of this rank's experts, H and D multiples of 16
                which :class:`titan_fp8moe.Fp8Weight` pads to multiples of 128. Gate and up in one ``w1`` (E, 2H, D)
                with ``w3`` None are not copied; their H is a multiple of 128. Without a gate up is ``w1`` (E, H, D),
                and ``w3`` None.
            config, ep_group, score_before_experts, activation, activation_parameters: as of :class:`RoutedExperts`.

        Raises:
            ValueError: for shapes or scales' dtypes that do not fit, or gate and up that were padded as one.
        """
        expert = ExpertSpec.of(activation, activation_parameters, score_before_experts)
        if w3 is None and expert.gated:
            check_padded_apart(w1, w2)
        w13 = w1 if w3 is None else ops.quantize_weight(w1, w3)
        return Fp8RoutedExperts(w13, w2, expert, Fp8FlowMoEConfig() if config is None else config, ep_group)

    def configure(self, config: Fp8FlowMoEConfig) -> None:
        """Replaces the settings."""
        require_config(config, "RoutedExperts", *RECIPE, *TRANSPORT, *CACHE)
        self.config = config
        add_cache(self)

    def reset_parameters(self) -> None:
        """Uniform in ±1/sqrt(fan_in), as ``nn.Linear``. One seed draws the same experts with or without ``ep_group``,
        for any number of ranks."""
        if not self.w1.is_meta:
            names = "w1", "w2", "w3", "b1", "b2", "b3"  # a subclass may have others
            weights = {name: p for name, p in self.named_parameters(recurse=False) if name in names}
            _, hidden_dim, dim = self.w1.shape
            bounds = [(hidden_dim if name in ("w2", "b2") else dim) ** -0.5 for name in weights]
            parallel.uniform_by_expert_(list(weights.values()), bounds, spread=self.ep_group is not None)
        if self.lora_scale is not None:
            self.reset_lora_parameters()

    def for_layer(self) -> Experts:
        weights: Any = ExpertWeights(self.w1, self.w2, self.w3)
        biases: Any = None if (b1 := self.b1) is None else Biases(b1, self.b2, self.b3)
        frozen, are_dtensors = are_frozen(weights), isinstance(self.w1, DTensor)
        if are_dtensors:
            _require_gathered(cast(DTensor, self.w1), self.ep_group)
        # Elsewhere the layer reads DTensors, faster than to_local() does.
        if self.gathers_fp8 or (are_dtensors and (self.ep_group is None or torch.compiler.is_compiling())):
            weights = ExpertWeights(*self.local_weights(*weights))
            biases = biases and Biases(*map(parallel.local_of, biases))
        cache = cache_of(self, frozen)
        return Experts(weights, self.config, self.ep_group, self.expert, cache, frozen, biases, self.lora())

    def fp8_matrices(self) -> list[str]:
        return [name for name in ("w1", "w2", "w3") if getattr(self, name) is not None]

    def extra_repr(self) -> str:
        experts, hidden_dim, dim = self.w1.shape
        ranks = "" if self.ep_group is None else f" over {self.ep_group.size()} ranks"
        bias = "" if self.b1 is None else "bias=True, "
        return f"num_experts={experts}{ranks}, dim={dim}, hidden_dim={hidden_dim}, {bias}{self.config.describe()}"


_SCALES = {bits: dtype for dtype, (bits, _) in SCALE_BITS.items()}


class Fp8RoutedExperts(_RunsLayer):
    """The experts of one MoE layer, frozen and stored in FP8. Made by :meth:`RoutedExperts.from_fp8`. :meth:`add_lora`
    takes w1, gate and up in one, and w2.

    With scales that are powers of two, output and gradients of x and the scores equal those of experts with the
    dequantized weights; other weights bf16 would round. The parameters hold integers, so that casts such as
    ``.bfloat16()`` and mixed precision leave them alone, and PyTorch refuses a gradient of them. An average of
    such codes means nothing: average only parameters that require gradients. With ``ep_group`` they are DTensors, as in
    :class:`RoutedExperts`.

    Attributes:
        w13, w13_scale: gate and up (E, 2H, D) uint8 and (E, 2H // 128, D // 128), or up alone without a gate. Scales
            are integers with the bits of their dtype: uint8 of e8m0, int16 of bf16, int32 of fp32.
        w2, w2_scale: down.
        fp8_host: set by :func:`titan_fp8moe.offload_experts`.
    """

    fp8_host: HostLayer | None = None

    w13: nn.Parameter
    w13_scale: nn.Parameter
    w2: nn.Parameter
    w2_scale: nn.Parameter

    def __init__(
        self,
        w13: Fp8Weight,
        w2: Fp8Weight,
        expert: ExpertSpec,
        config: Fp8FlowMoEConfig,
        ep_group: dist.ProcessGroup | None,
    ):
        super().__init__()
        require_config(config, "experts stored in FP8", "recompute", "save_h", *TRANSPORT)
        self.expert, self.config = expert, config
        weights: dict[str, Tensor | None] = {}
        for name, weight in (("w13", w13), ("w2", w2)):
            bits, _ = SCALE_BITS[weight.scale.dtype]
            weights |= {name: weight.q.detach().view(torch.uint8), f"{name}_scale": weight.scale.detach().view(bits)}
        self.register(weights, ep_group)

    def fp8_matrices(self) -> list[str]:
        return ["w13", "w2"]

    def adaptable(self) -> dict[str, Fp8Weight]:
        return dict(zip(("w1", "w2"), self.weights(), strict=True))

    @torch.no_grad()
    def weights(self) -> tuple[Fp8Weight, Fp8Weight]:
        """This rank's gate and up in one, and down."""
        w13, w13_scale, w2, w2_scale = map(parallel.local_of, (self.w13, self.w13_scale, self.w2, self.w2_scale))
        w13_scale, w2_scale = (scale.view(_SCALES[scale.dtype]) for scale in (w13_scale, w2_scale))
        return Fp8Weight(w13.view(FP8), w13_scale), Fp8Weight(w2.view(FP8), w2_scale)

    def for_layer(self) -> Experts:
        if isinstance(self.w13, DTensor):
            _require_gathered(self.w13, self.ep_group)
        weights: ExpertWeights[Any] = ExpertWeights(*self.weights())
        lora, host = self.lora(), self.fp8_host
        return Experts(weights, self.config, self.ep_group, self.expert, frozen=True, lora=lora, host=host)

    def extra_repr(self) -> str:
        experts, dim, hidden_dim = self.w2.shape
        return f"num_experts={experts}, dim={dim}, hidden_dim={hidden_dim}, stored in FP8, {self.config.describe()}"


GATHER = "call the module that FSDP wraps, or register_fsdp_forward_method(module, name) for another of its methods"


def is_replicated(tensor: DTensor) -> bool:
    return all(placement.is_replicate() for placement in tensor.placements)


def _require_gathered(weight: DTensor, ep_group: dist.ProcessGroup | None) -> None:
    if parallel.sharded_by_fsdp(weight, ep_group) and not is_replicated(weight):
        raise RuntimeError(f"these experts are one rank's shard; {GATHER}")


def _unwrap_scores(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(arg.tensor if isinstance(arg, KeepDtype) else arg for arg in args)


def add_cache(module: Any) -> None:
    """Gives a module, whose ``config`` and parameters are set, a weight cache for :func:`cache_of`."""
    operands.add_cache(module, module.config.kept_layouts)


def cache_of(module: Any, frozen: bool) -> WeightCache | None:
    """The cache of a module's weights, or None if they are quantized each time. So are trained weights without
    ``cache_weights``, and weights that FSDP gathers in FP8."""
    config = module.config
    if not (frozen or config.cache_weights) or config.fp8_all_gather or getattr(module, "gathers_fp8", False):
        return None
    return own_cache(module)


def _prepare_state(
    module: "_RunsLayer", state: dict[str, Any], prefix: str, _metadata: Any, _strict: bool, *lists: list[str]
) -> None:
    """Refuses bytes of stored weights as values, and values as bytes, which PyTorch would convert as numbers. Both
    kinds of experts have a ``w2``, and ``strict=False`` passes over the names that differ.

    Lets experts of an ``ep_group`` load plain tensors of all experts, each rank its own."""
    for name, param in module.named_parameters():
        value = state.get(prefix + name)
        if not isinstance(value, Tensor):
            continue
        are_numbers = value.is_floating_point() and param.is_floating_point() and value.dtype != FP8
        if not are_numbers and value.dtype != param.dtype:
            lists[-1].append(  # the errors
                f"{prefix}{name} is {value.dtype}, and {type(module).__name__} keeps it as {param.dtype}; load weights "
                "that are stored in FP8 by RoutedExperts.from_fp8, and others into RoutedExperts"
            )
        if module.ep_group is None or not isinstance(param, DTensor) or isinstance(value, DTensor):
            continue
        if value.shape == param.shape:  # PyTorch refuses others
            spread_over = param.device_mesh, param.placements
            state[prefix + name] = distribute_tensor(value, *spread_over, src_data_rank=None)
