"""Routing replay: a forward that takes its routers' choice of experts from another one.

RL trains on tokens that another forward sampled. If the two choose other experts, log-probabilities jump. R2 replays
the choice of the trainer's own scoring forward, R3 the rollout engine's::

    with record_routing(model) as routing:
        model(tokens)  # or generation: docs/rl.md
    with replay_routing(model, routing.routed_experts()):
        loss(model(tokens)).backward()

Only ids are replayed, as in Megatron and verl. Scores are computed anew, so the router gets gradients: those of the
scores of the replayed experts. Normalization, bias and scaling remain the model's.

**Where.** The routers of Transformers, but Phimoe's, and of torchtitan choose by ``torch.topk``. While a module that
holds router and experts runs its forward, a mode intercepts these calls. So no family needs a router of its own here.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast
from unittest import mock

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from titan_fp8moe.nn.modules import Fp8RoutedExperts, RoutedExperts

_NAMES = "experts", "routed_experts"  # of experts in Transformers and torchtitan 0.2, and in torchtitan 0.3
_OURS = RoutedExperts, Fp8RoutedExperts
_TOPK = torch.topk, Tensor.topk


class _Layer(NamedTuple):
    """A module that holds a router and experts, and the experts."""

    name: str
    block: nn.Module
    experts: nn.Module

    @property
    def num_experts(self) -> int:
        """Experts of all ranks. Parameters are DTensors where ranks share them, but not those stored in FP8. Of a
        parameter that ZeRO-3 has partitioned only the shape is whole."""
        weight = next(self.experts.parameters(), None)
        if weight is None:
            raise ValueError(f"{self.name} has no parameters, so the number of its experts is unknown")
        group = self.experts.ep_group if isinstance(self.experts, Fp8RoutedExperts) else None
        return getattr(weight, "ds_shape", weight.shape)[0] * (1 if group is None else group.size())

    @property
    def of_any_router(self) -> bool:
        """Whether the router may be a user's own; then its experts get ids that say which of them run."""
        return any(isinstance(module, _OURS) for module in self.experts.modules())


def _layers(model: nn.Module) -> list[_Layer]:
    found = [
        _Layer(f"{name}.{child}".removeprefix("."), block, experts)
        for name, block in model.named_modules()
        for child, experts in block.named_children()
        if isinstance(experts, _OURS) or (child in _NAMES and not isinstance(experts, nn.ModuleList))
    ]
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no experts whose routing could be replayed: modules named experts or "
            "routed_experts, or titan_fp8moe.RoutedExperts"
        )
    wrappers = {module for layer in found for module in layer.experts.modules()}  # such as torch.compile's
    layers = [layer for layer in found if layer.block not in wrappers]
    for layer in layers:
        inside = set(layer.block.modules())
        if inner := [other.name for other in layers if other is not layer and other.block in inside]:
            raise ValueError(
                f"{layer.name} and {inner[0]} are chosen in one module's forward, so which torch.topk is whose cannot "
                "be told; give each router a module of its own, which holds it and its experts"
            )
    return layers


class RecordedRouting:
    """The routing of the forwards inside :func:`record_routing`."""

    def __init__(self, layers: list[_Layer]):
        self._calls: dict[str, list[Tensor]] = {layer.name: [] for layer in layers}
        self._ran: dict[str, list[Tensor]] = {layer.name: [] for layer in layers if layer.of_any_router}

    def routed_experts(self) -> Tensor:
        """Expert ids (B, S, L, K) int32 of L MoE layers. Forwards follow each other along S, as in generation.

        (S, L, K) where the MoE blocks get tokens (S, D) without a batch dim.

        Raises:
            RuntimeError: if a layer has recorded nothing, or other tokens than the first, as in models that loop. Also
                if :class:`titan_fp8moe.RoutedExperts` ran other experts than their module's last ``torch.topk`` chose.
        """
        _require_all([name for name, calls in self._calls.items() if not calls], "recorded")
        for name, calls in self._ran.items():
            for ran, ids in zip(calls, self._calls[name], strict=True):
                _require_ran(name, ran, ids.flatten(0, -2))
        recorded = {name: torch.cat(calls, -2) for name, calls in self._calls.items()}
        tokens = next(iter(recorded.values())).shape[:-1]
        for name, ids in recorded.items():
            if ids.shape[:-1] != tokens:
                raise RuntimeError(
                    f"{name} recorded tokens {tuple(ids.shape[:-1])}, but the first layer {tuple(tokens)}; replay "
                    "serves models that run each layer once per forward, not loops over layers"
                )
        return torch.stack(list(recorded.values()), -2)


class _Record(TorchFunctionMode):
    """Keeps the ids of the last ``topk``, which is the choice of experts: before it, routers may choose groups."""

    ids: Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in _TOPK:
            self.ids = out.indices
        return out


class _Replay(TorchFunctionMode):
    """Replaces the choice of experts of T tokens by ``ids_TK``, and the choice of groups by the groups of these."""

    def __init__(self, layer: _Layer, ids_TK: Tensor, num_experts: int):
        super().__init__()
        self.layer, self.ids_TK, self.num_experts, self.replayed = layer, ids_TK, num_experts, False
        self.largest, self.mixed = -1, False
        if ids_TK.numel():
            negative = ids_TK < 0
            mixed = negative.any(1) & ~negative.all(1)
            self.largest, self.mixed = (int(value) for value in (ids_TK.max(), mixed.any()))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func not in _TOPK:
            return out
        scores = args[0] if args else kwargs["input"]
        (T, K), columns = self.ids_TK.shape, scores.shape[-1]
        if scores.shape[:-1].numel() != T:
            return out
        chooses = columns >= self.num_experts and out.indices.shape[-1] == K
        if not chooses and (columns >= self.num_experts or self.num_experts % columns):
            return out
        self._check(max(columns, self.num_experts))
        ids = self.ids_TK.view(*scores.shape[:-1], K)
        live = (ids < 0).any(-1, keepdim=True)
        if chooses:
            self.replayed = True
            # In place: a record around this replay has kept the tensor.
            ids = out.indices.copy_(torch.where(live, out.indices, ids))
        else:
            # A mask of groups is made of these. Without it, scores read from masked ones would be zeros.
            groups = ids // (self.num_experts // columns)
            ids = torch.cat([out.indices, torch.where(live, out.indices[..., :1], groups)], -1)
        return torch.return_types.topk((scores.gather(-1, ids), ids))

    def _check(self, columns: int) -> None:
        if self.largest >= columns:
            raise ValueError(
                f"routed_experts has the id {self.largest}, but the router of {self.layer.name} chooses among {columns}"
            )
        if self.mixed:
            raise ValueError(
                f"routed_experts has a token with negative and other ids in {self.layer.name}; make all of them "
                "negative where the router decides"
            )


@contextlib.contextmanager
def record_routing(model: nn.Module) -> Iterator[RecordedRouting]:
    """Records which experts each MoE layer of ``model`` chooses in the forwards inside the context.

    A backward belongs outside, since gradient checkpointing repeats forwards in it. Beam search moves sequences between
    rows and assisted decoding drops tokens, which a record does not follow.

    Yields:
        The record; read :meth:`RecordedRouting.routed_experts` when the forwards are done.

    Raises:
        ValueError: for a model without experts, and for two routers in the forward of one module that holds experts.
    """
    layers = _layers(model)
    routing = RecordedRouting(layers)

    def recorder(layer: _Layer) -> Callable[..., Any]:
        forward, calls = layer.block.forward, routing._calls[layer.name]

        def record(*args: Any, **kwargs: Any) -> Any:
            tokens = _tokens(args, kwargs)
            with _Record() as mode, _seen(layer.experts) as arguments:
                out = forward(*args, **kwargs)
            ids = mode.ids if mode.ids is not None else _ids_of(layer, arguments)
            calls.append(ids.detach().int().reshape(*tokens.shape[:-1], -1))
            if layer.of_any_router:
                routing._ran[layer.name].append(_ids_of(layer, arguments).detach().clone())
            return out

        return record

    with _forwards_replaced(layers, recorder):
        yield routing


@contextlib.contextmanager
def replay_routing(model: nn.Module, routed_experts: Tensor) -> Iterator[None]:
    """Lets each MoE layer of ``model`` use these experts in the forwards and backwards inside the context.

    The backward belongs inside, since gradient checkpointing repeats forwards in it; outside it raises, but not if
    checkpointing has ``use_reentrant=True``. An auxiliary loss on router logits sees the router's own choice, load
    balancing by counts the replayed one. In a compiled model the replayed blocks run eagerly.

    Args:
        model: the model, or the part of it whose routing is meant, such as the language model beside a vision tower.
        routed_experts: (..., L, K) ids of any int dtype, as :meth:`RecordedRouting.routed_experts` or vLLM return
            them: for each token of this rank's forward, in order, the experts of L MoE layers. A token with negative
            ids, such as the last sampled one or padding, is routed by the router.

    Raises:
        ValueError: for models that :func:`record_routing` refuses, and for ids or shapes that do not fit the model or
            the forward.
        RuntimeError: for a router that does not choose by ``torch.topk``, or a layer without a forward inside the
            context. Also for a backward outside, and a replay inside another.
    """
    layers = _layers(model)
    if inner := [layer.name for layer in layers if hasattr(layer.block.forward, "replays")]:
        raise RuntimeError(f"{inner[0]} replays a routing already; leave the other replay_routing first")
    routed = dict(zip((layer.name for layer in layers), _by_layer(routed_experts, layers), strict=True))
    done, inside = set[str](), True

    def check_backward(_: Tensor) -> None:
        if not inside:
            raise RuntimeError(
                "the backward runs outside of replay_routing, where gradient checkpointing would route anew; call "
                "backward() inside"
            )

    def replayer(layer: _Layer) -> Callable[..., Any]:
        forward, ids_TK, num_experts = layer.block.forward, routed[layer.name], layer.num_experts

        def replay(*args: Any, **kwargs: Any) -> Any:
            tokens = _tokens(args, kwargs)
            if (T := tokens.shape[:-1].numel()) != len(ids_TK):
                raise ValueError(f"{layer.name} got {T} tokens, but routed_experts has {len(ids_TK)}")
            with _Replay(layer, ids_TK.to(tokens.device), num_experts) as mode, _seen(layer.experts) as arguments:
                out = forward(*args, **kwargs)
            if not mode.replayed:
                _require_equal(layer, _ids_of(layer, arguments), mode.ids_TK)
            elif layer.of_any_router:
                _require_ran(layer.name, _ids_of(layer, arguments), mode.ids_TK)
            first = out[0] if isinstance(out, tuple) else out
            if first.requires_grad:
                first.register_hook(check_backward)
            done.add(layer.name)
            return out

        cast(Any, replay).replays = True
        return replay

    with _forwards_replaced(layers, replayer):
        try:
            yield
        finally:
            inside = False
    _require_all([layer.name for layer in layers if layer.name not in done], "replayed")


def _by_layer(routed_experts: Tensor, layers: list[_Layer]) -> Tensor:
    """The ids (L, T, K) int64, if they fit the layers."""
    if not isinstance(routed_experts, Tensor):
        routed_experts = torch.as_tensor(routed_experts, device="cpu")  # vLLM returns NumPy's
    not_ids = routed_experts.is_floating_point() or routed_experts.is_complex() or routed_experts.dtype == torch.bool
    if routed_experts.dim() < 3 or not_ids:
        raise ValueError(
            f"routed_experts must be ids (..., L, K), got {tuple(routed_experts.shape)} {routed_experts.dtype}"
        )
    if routed_experts.shape[-2] != len(layers):
        raise ValueError(
            f"routed_experts has {routed_experts.shape[-2]} layers, but the model {len(layers)} MoE layers; leave out "
            "dense layers"
        )
    # int64, since unsigned ints know few operations.
    return routed_experts.long().flatten(0, -3).transpose(0, 1).contiguous()


@contextlib.contextmanager
def _forwards_replaced(layers: list[_Layer], make: Callable[[_Layer], Callable[..., Any]]) -> Iterator[None]:
    """Runs the blocks' forwards by what ``make`` returns. Libraries may have replaced them already."""
    with contextlib.ExitStack() as stack:
        for layer in layers:
            stack.enter_context(mock.patch.object(layer.block, "forward", torch.compiler.disable(make(layer))))
        yield


def _tokens(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The block's first tensor, (..., D)."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            return value
    raise RuntimeError("a block of experts was called without tokens: a tensor (..., D) among its arguments")


@contextlib.contextmanager
def _seen(module: nn.Module) -> Iterator[list[Any]]:
    """Yields the arguments with which the module is called, once it is."""
    arguments: list[Any] = []

    def see(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        arguments[:] = [*args, *kwargs.values()]

    with module.register_forward_pre_hook(see, with_kwargs=True):
        yield arguments


def _ids_of(layer: _Layer, arguments: list[Any]) -> Tensor:
    """The ids with which experts were called: of routers that look them up, such as DeepSeek-V4's first ones."""
    for value in arguments:
        if isinstance(value, Tensor) and not value.is_floating_point():
            return value
    raise RuntimeError(
        f"the router of {layer.name} does not choose by torch.topk, and its experts get no ids, so its choice can be "
        "neither recorded nor replayed"
    )


def _require_equal(layer: _Layer, chosen_TK: Tensor, ids_TK: Tensor) -> None:
    if chosen_TK.numel() != ids_TK.numel():
        K = ids_TK.shape[1]
        raise ValueError(f"routed_experts has {K} experts per token, but {layer.name} takes another number")
    chosen_TK = chosen_TK.view(ids_TK.shape)
    if not torch.equal(torch.where(ids_TK < 0, chosen_TK, ids_TK), chosen_TK):
        raise RuntimeError(
            f"the router of {layer.name} does not choose by torch.topk, so its choice cannot be replayed, and it "
            "differs from routed_experts"
        )


def _require_ran(name: str, ran_TK: Tensor, ids_TK: Tensor) -> None:
    """Requires that the experts which ran are those of the ids, in any order. A router may drop some of them."""
    if ran_TK.shape == ids_TK.shape:
        chosen = (ran_TK.unsqueeze(-1) == ids_TK.unsqueeze(-2)).any(-1)
        if bool((chosen | (ran_TK < 0) | (ids_TK < 0)).all()):
            return
    raise RuntimeError(
        f"{name} ran other experts than a torch.topk of its router's module chose; let the router choose by torch.topk "
        "of all experts' scores, after which the module calls no other"
    )


def _require_all(missing: list[str], done: str) -> None:
    if missing:
        raise RuntimeError(f"no routing was {done} in {', '.join(missing)}; run a forward inside the context")
