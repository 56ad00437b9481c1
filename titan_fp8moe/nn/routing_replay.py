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
import functools
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
        """Experts of all ranks. Parameters are DTensors where ranks share them. Of a parameter that ZeRO-3 has
        partitioned only the shape is whole."""
        weight = next(self.experts.parameters())
        return getattr(weight, "ds_shape", weight.shape)[0]

    def run(self, mode: "_Choice", forward: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, Tensor | None]:
        """The block's output, and the ids with which its experts were called; None if they got none."""
        ids: list[Tensor] = []

        def see(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
            ids[:] = [tensor for tensor in tensors if not tensor.is_floating_point()][:1]

        with mode, self.experts.register_forward_pre_hook(see, with_kwargs=True):
            out = forward(*args, **kwargs)
        return out, ids[0] if ids else None

    def require(self, ran_TK: Tensor | None, ids: Tensor | None, always: bool) -> None:
        """Requires that the experts which ran are those of the ids, in any order; a router may drop some. ``always``,
        or of experts that get ids of any router, which may be a user's own."""
        if not always and not any(isinstance(module, _OURS) for module in self.experts.modules()):
            return
        if ran_TK is not None and ids is not None and ran_TK.numel() == ids.numel():
            ids_TK = ids.view(ran_TK.shape)
            chosen = (ran_TK.unsqueeze(-1) == ids_TK.unsqueeze(-2)).any(-1)
            if bool((chosen | (ran_TK < 0) | (ids_TK < 0)).all()):
                return
        raise RuntimeError(
            f"{self.name} ran other experts than routed_experts has, or torch.topk chose; let the router choose by "
            "torch.topk of all experts' scores, with as many per token, and call no other torch.topk after it"
        )


def _layers(model: nn.Module) -> list[_Layer]:
    found = [
        _Layer(f"{name}.{child}".removeprefix("."), block, experts)
        for name, block in model.named_modules()
        for child, experts in block.named_children()
        if isinstance(experts, _OURS) or (child in _NAMES and not isinstance(experts, nn.ModuleList))
    ]
    if not found:
        raise ValueError(f"{type(model).__name__} has no RoutedExperts, and no modules named experts or routed_experts")
    wrappers = {module for layer in found for module in layer.experts.modules()}  # such as torch.compile's
    layers = [layer for layer in found if layer.block not in wrappers]
    for layer in layers:
        inside = set(layer.block.modules())
        if inner := [other.name for other in layers if other is not layer and other.block in inside]:
            raise ValueError(
                f"{layer.name} and {inner[0]} are chosen in one module's forward; give each router a module of its "
                "own, which holds it and its experts"
            )
    return layers


class RecordedRouting:
    """The routing of the forwards inside :func:`record_routing`."""

    def __init__(self, layers: list[_Layer]):
        self._calls: dict[str, list[Tensor]] = {layer.name: [] for layer in layers}

    def routed_experts(self) -> Tensor:
        """Expert ids (B, S, L, K) int32 of L MoE layers. Forwards follow each other along S, as in generation.

        (S, L, K) where the MoE blocks get tokens (S, D) without a batch dim.

        Raises:
            RuntimeError: if a layer has recorded nothing, or other tokens than the first, as in models that loop.
        """
        return torch.stack([torch.cat(calls, -2) for calls in self._calls.values()], -2)


class _Choice(TorchFunctionMode):
    """Keeps the ids of the last ``topk``, which is the choice of experts: before it, routers may choose groups.

    With ``ids_TK`` of T tokens it replaces the choice by these, and the choice of groups by the groups of these.
    """

    ids: Tensor | None = None

    def __init__(self, ids_TK: Tensor | None = None, num_experts: int = 0):
        super().__init__()
        self.ids_TK, self.num_experts, self.replayed = ids_TK, num_experts, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func not in _TOPK:
            return out
        self.ids = out.indices
        scores = args[0] if args else kwargs["input"]
        if self.ids_TK is None or scores.shape[:-1].numel() != len(self.ids_TK):
            return out
        K, columns = self.ids_TK.shape[1], scores.shape[-1]
        ids = self.ids_TK.view(*scores.shape[:-1], K)
        live = (ids < 0).any(-1, keepdim=True)
        if columns >= self.num_experts and out.indices.shape[-1] == K:
            self.replayed = True
            # In place: a record around this replay has kept the tensor.
            ids = out.indices.copy_(torch.where(live, out.indices, ids))
        elif columns < self.num_experts and self.num_experts % columns == 0:
            # A mask of groups is made of these. Without it, scores read from masked ones would be zeros.
            groups = ids // (self.num_experts // columns)
            ids = torch.cat([out.indices, torch.where(live, out.indices[..., :1], groups)], -1)
        else:
            return out
        return torch.return_types.topk((scores.gather(-1, ids), ids))


@contextlib.contextmanager
def record_routing(model: nn.Module) -> Iterator[RecordedRouting]:
    """Records which experts each MoE layer of ``model`` chooses in the forwards inside the context.

    A backward belongs outside, since gradient checkpointing repeats forwards in it. Beam search moves sequences between
    rows and assisted decoding drops tokens, which a record does not follow.

    Yields:
        The record; read :meth:`RecordedRouting.routed_experts` when the forwards are done.

    Raises:
        ValueError: for a model without experts.
        RuntimeError: if :class:`titan_fp8moe.RoutedExperts` run other experts than their module's last ``torch.topk``
            has chosen, such as those of another router in the same module.
    """
    layers = _layers(model)
    routing = RecordedRouting(layers)

    def record(layer: _Layer, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        mode, tokens = _Choice(), _tokens(args, kwargs)
        out, ran = layer.run(mode, forward, args, kwargs)
        ids = ran if mode.ids is None else mode.ids  # some look experts up, such as DeepSeek-V4's first layers
        layer.require(ran, ids, always=mode.ids is None)
        routing._calls[layer.name].append(cast(Tensor, ids).detach().int().reshape(*tokens.shape[:-1], -1))
        return out

    with _forwards_replaced(layers, record):
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
            them: for each token of this rank's forward, in order, the experts of L MoE layers. A token with a negative
            id, such as the last sampled one or padding, is routed by the router.

    Raises:
        ValueError: for models that :func:`record_routing` refuses, and for ids or shapes that do not fit the model or
            the forward.
        RuntimeError: for a router that does not choose by ``torch.topk``, or a layer without a forward inside the
            context. Also for a backward outside, and a replay inside another.
    """
    layers = _layers(model)
    if any(getattr(layer.block.forward, "replays", False) for layer in layers):
        raise RuntimeError("a routing is replayed already; leave the other replay_routing first")
    by_layer = zip(layers, _by_layer(routed_experts, len(layers)), strict=True)
    routed = {layer.name: (ids_TK, layer.num_experts) for layer, ids_TK in by_layer}
    missing, inside = set(routed), True

    def check_backward(_: Tensor) -> None:
        if not inside:
            raise RuntimeError("call backward() inside replay_routing; outside gradient checkpointing routes anew")

    def replay(layer: _Layer, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        (ids_TK, num_experts), tokens = routed[layer.name], _tokens(args, kwargs)
        if (T := tokens.shape[:-1].numel()) != len(ids_TK):
            raise ValueError(f"{layer.name} got {T} tokens, but routed_experts has {len(ids_TK)}")
        mode = _Choice(ids_TK := ids_TK.to(tokens.device), num_experts)
        out, ran = layer.run(mode, forward, args, kwargs)
        layer.require(ran, ids_TK, always=not mode.replayed)
        first = out[0] if isinstance(out, tuple) else out
        if first.requires_grad:
            first.register_hook(check_backward)
        missing.discard(layer.name)
        return out

    with _forwards_replaced(layers, replay, replays=True):
        try:
            yield
        finally:
            inside = False
    if missing:
        raise RuntimeError(f"no routing was replayed in {', '.join(missing)}; run a forward inside the context")


def _by_layer(routed_experts: Any, num_layers: int) -> Tensor:
    """The ids (L, T, K) int64, if they fit the layers."""
    ids = torch.as_tensor(routed_experts, device=None if isinstance(routed_experts, Tensor) else "cpu")  # or NumPy's
    not_ids = ids.is_floating_point() or ids.dtype == torch.bool
    if ids.dim() < 3 or not_ids or ids.shape[-2] != num_layers:
        raise ValueError(
            f"routed_experts must be ids (..., L, K) of the model's {num_layers} MoE layers, without dense layers; got "
            f"{tuple(ids.shape)} {ids.dtype}"
        )
    # int64, since unsigned ints know few operations.
    return ids.long().flatten(0, -3).transpose(0, 1).contiguous()


@contextlib.contextmanager
def _forwards_replaced(layers: list[_Layer], run: Callable[..., Any], replays: bool = False) -> Iterator[None]:
    """Runs the blocks' forwards by ``run``. Libraries may have replaced them already."""
    with contextlib.ExitStack() as stack:
        for layer in layers:
            replaced: Any = torch.compiler.disable(functools.partial(run, layer, layer.block.forward))
            replaced.replays = replays
            stack.enter_context(mock.patch.object(layer.block, "forward", replaced))
        yield


def _tokens(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The block's first tensor, (..., D)."""
    return next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
