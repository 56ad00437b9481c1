"""The experts of one MoE layer as an autograd function: cast, dispatch, expert FFN, combine.

    forward   x --quantize--> fp8 --dispatch--> permute --expert FFN--> sum --combine, bf16--> sum
    backward  dy --quantize--> fp8 --dispatch--> permute --FFN backward--> sum --combine, bf16--> sum

The two quantizations are the recipe's two explicit casts. A token is quantized once, before it is replicated to its
experts. In the backward its gradient is the same for all its experts, so it is quantized once as well.

It is one function for two reasons. Autograd casts the gradient of an fp8 tensor to fp8, so no fp8 tensor may cross an
autograd edge. And everything that reads the expert weights then happens between FSDP's hooks of the experts module.

Shared experts, which serve every token, are an FFN with one group of rows. They read the rows that are quantized for
the routed experts, and their results join the same sums.

With an asynchronous dispatch (:mod:`titan_fp8moe.dispatch`) a second autograd function ends the combine and, in the
backward, begins the dispatch. The shared experts run in it, and ``meanwhile`` runs between the two, in both directions.
The weight gradients run while the backward's combine travels.
"""

import functools
import warnings
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.utils.flop_counter
from torch import Tensor

from titan_fp8moe import dispatch, ops
from titan_fp8moe.config import Fp8FlowMoEConfig
from titan_fp8moe.dispatch import Dispatch, InFlight
from titan_fp8moe.dispatch.all_to_all import AllToAllDispatch
from titan_fp8moe.layer.ffn import ExpertFFNBackward, SavedFFN, expert_ffn, saved_ffn_fields
from titan_fp8moe.layer.group import FORWARD_OPS, GroupRows, group_ffn, group_ffn_backward, without_expert_dim
from titan_fp8moe.layer.weights import (
    ExpertWeights,
    WeightCache,
    forward_operands,
    one_expert,
    quantize_weights,
    quantize_weights_transposed,
    readable,
)
from titan_fp8moe.ops.backend import check_current_device, custom_op, once_differentiable
from titan_fp8moe.recipe import group_rows, padded, row_capacity
from titan_fp8moe.rows import NanFlags, Routing, Rows

_DEFAULTS = Fp8FlowMoEConfig()  # made here: torch.compile cannot trace its checks


def routed_experts(
    x: Tensor,
    w1: Tensor,
    w2: Tensor,
    w3: Tensor | None,
    topk_ids: Tensor,
    topk_scores: Tensor,
    *,
    config: Fp8FlowMoEConfig | None = None,
    ep_group: dist.ProcessGroup | None = None,
    score_before_experts: bool = False,
    meanwhile: Callable[[], Tensor] | None = None,
) -> Tensor:
    """Sum over a token's experts of score * W2 (silu(W1 x) * (W3 x)), in FP8.

    Differentiable once in ``x``, ``topk_scores``, the weights, and whatever ``meanwhile`` reads.

    Args:
        x: (T, D) bf16 or fp32, D a multiple of 128.
        w1, w2, w3: gate (E, H, D), down (E, D, H) and up (E, H, D) of this rank's E experts, all bf16 or all fp32, H a
            multiple of 16. The quantized weights pad H to a multiple of 128. Or gate and up in one ``w1`` (E, 2H, D),
            gate first, with ``w3`` None and H a multiple of 128.
        topk_ids: (T, K) int32 or int64, the experts of each token among the experts of all ranks; -1 for none. Another
            id raises ValueError on a CPU, and ends in a device-side assertion on a GPU.
        topk_scores: (T, K) fp32, the router's score of each. bf16 is accepted with a warning.
        config: the recipe's settings; by default ``Fp8FlowMoEConfig()``. A function has no use for ``filter_fqns``,
            ``fp8_all_gather``, ``cache_weights``, ``statistics_every`` and ``emulate``.
        ep_group: the ranks over which the experts are spread, in order; None where all experts are here.
        score_before_experts: multiply the experts' input, not their output, by the score.
        meanwhile: computes a tensor (T, D) that is added to the result. It runs while tokens travel between ranks, and
            so does its backward: the place for shared experts. With ``dispatch = "symmetric"`` it runs afterwards.

    Returns:
        (T, D) in the dtype of ``x``.

    Raises:
        ValueError: for shapes, dtypes, devices or numbers of rows that the kernels cannot take.
        RuntimeError: with ``dispatch = "symmetric"``, if a rank is later than the timeout of ``ep_group``, or if two
            layers are in flight. Too little room shows later:
            :func:`titan_fp8moe.check_room`.

    Example::

        scores, ids = router(x).softmax(-1).topk(2)
        y = routed_experts(x, w1, w2, w3, ids, scores, meanwhile=lambda: shared_expert(x))
    """
    return apply_experts(
        x,
        ExpertWeights(w1, w2, w3),
        topk_ids,
        topk_scores,
        config=config or _DEFAULTS,
        ep_group=ep_group,
        score_before_experts=score_before_experts,
        meanwhile=meanwhile,
        check_ids=True,
    )


def apply_experts(
    x_TD: Tensor,
    weights: ExpertWeights[Tensor],
    topk_ids_TK: Tensor,
    topk_scores_TK: Tensor,
    *,
    config: Fp8FlowMoEConfig,
    ep_group: dist.ProcessGroup | None = None,
    score_before_experts: bool = False,
    meanwhile: Callable[[], Tensor] | None = None,
    cache: WeightCache | None = None,
    shared: ExpertWeights[Tensor] | None = None,
    shared_cache: WeightCache | None = None,
    check_ids: bool = False,
    nan_flags: Tensor | None = None,
) -> Tensor:
    """:func:`routed_experts` for modules: takes their weight caches, which it uses unless gradients are off, and shared
    experts. Ids that are no expert's count as -1 unless ``check_ids``.

    ``shared`` are the weights of one FFN that serves every token: w1 and w3 (H, D), w2 (D, H). It reads the rows that
    are quantized for the routed experts, in both directions, and adds to their sums. ``nan_flags``: the tensor of
    :meth:`titan_fp8moe.rows.NanFlags.of`; 1 is stored where an operand holds a NaN or Inf.
    """
    if topk_scores_TK.dtype == torch.bfloat16:
        _warn_of_bf16_scores()
        topk_scores_TK = topk_scores_TK.float()
    num_ranks = 1 if ep_group is None else ep_group.size()
    _check_inputs(x_TD, weights, topk_ids_TK, topk_scores_TK)
    topk_ids_TK, topk_scores_TK = topk_ids_TK.contiguous(), topk_scores_TK.contiguous()
    layer = _Layer(
        route=dispatch.route(config, ep_group),
        num_ranks=num_ranks,
        score_before_experts=score_before_experts,
        config=config,
        cache=cache if torch.is_grad_enabled() else None,
        shared_cache=shared_cache if torch.is_grad_enabled() else None,
        check_ids=check_ids,
    )
    has_shared, none = shared is not None, (None,) * 3
    if not dispatch.kind(layer.route).asynchronous:
        args = *weights, *(shared or none), topk_ids_TK, nan_flags, layer, has_shared, None
        out = _RoutedExperts.apply(x_TD, topk_scores_TK, *args)
        return out if meanwhile is None else out + meanwhile()
    in_flight = _in_flight(x_TD.device)
    args = *weights, *none, topk_ids_TK, nan_flags, layer, has_shared, in_flight
    placeholder, payload, *tensors = _start_eagerly(x_TD, topk_scores_TK, *args)
    extra = None if meanwhile is None else meanwhile()
    args = *(shared or none), payload, nan_flags, layer, in_flight, x_TD.shape[1], x_TD.dtype
    out = _finish_eagerly(placeholder, *args, *tensors)
    return out if extra is None else out + extra


@torch.compiler.assume_constant_result  # torch.compile calls it when it traces, where it could not trace the warning
def _warn_of_bf16_scores() -> None:
    _warn_once(
        "topk_scores are bf16, which rounds the router's scores and their gradients; compute them in fp32, as in "
        "router(x).float().softmax(-1). FSDP2's MixedPrecisionPolicy casts the arguments of modules that it wraps: "
        "compute the scores in the module that calls titan_fp8moe.RoutedExperts or routed_experts"
    )


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, stacklevel=5)


def _check_inputs(x_TD: Tensor, weights: ExpertWeights[Tensor], topk_ids_TK: Tensor, topk_scores_TK: Tensor) -> None:
    """Rejects inputs that would make a kernel access invalid memory."""
    pairs, (w1, w2, w3) = topk_ids_TK.shape, weights
    dims = [x_TD.dim(), len(pairs), w1.dim()]
    if dims != [2, 2, 3] or x_TD.shape != (pairs[0], w1.shape[2]) or topk_scores_TK.shape != pairs:
        raise ValueError(
            f"x must be (T, D), topk_ids and topk_scores (T, K), and w1 (E, H, D); got {tuple(x_TD.shape)}, "
            f"{tuple(pairs)}, {tuple(topk_scores_TK.shape)} and {tuple(w1.shape)}"
        )
    E, H, D = w1.shape
    if x_TD.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"x must be bf16 or fp32, got {x_TD.dtype}; use x.bfloat16()")
    tensors = [x_TD, topk_ids_TK, topk_scores_TK, *weights.gate_up, w2]
    if len(devices := {t.device for t in tensors}) > 1:
        raise ValueError(f"x, ids, scores and weights must be on one device, got {', '.join(map(str, devices))}")
    if w3 is None:
        H //= 2
    if (
        any(w.shape != w1.shape for w in weights.gate_up)
        or w2.shape != (E, D, H)
        or len({w.dtype for w in (*weights.gate_up, w2)}) > 1
        or (w3 is None and w1.shape[1] % 2)
    ):
        got = ", ".join("None" if w is None else f"{tuple(w.shape)} {w.dtype}" for w in weights)
        raise ValueError(
            "w1 and w3 must be (E, H, D), or w1 (E, 2H, D) with w3 None, and w2 (E, D, H), all of one dtype; got " + got
        )
    if D % 128 or H % (128 if w3 is None else 16):
        raise ValueError(
            "D must be a multiple of 128, the width of an FP8 tile, and H a multiple of 16, or of 128 where w1 holds "
            f"gate and up; got D {D} and H {H}"
        )
    if topk_scores_TK.dtype != torch.float32:
        raise ValueError(f"topk_scores must be fp32, got {topk_scores_TK.dtype}; use topk_scores.float()")
    if topk_ids_TK.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"topk_ids must be int32 or int64, got {topk_ids_TK.dtype}; use topk_ids.long()")
    check_current_device(x_TD)


# --- the op -----------------------------------------------------------------------------------------------------------


class _Layer(NamedTuple):
    """What an application of the layer is besides its tensors. ``route`` is of :func:`titan_fp8moe.dispatch.route`; the
    caches are of the routed and the shared experts."""

    route: str
    num_ranks: int
    score_before_experts: bool
    config: Fp8FlowMoEConfig
    cache: WeightCache | None
    shared_cache: WeightCache | None
    check_ids: bool


class _Saved(NamedTuple):
    """What a forward saves for the routed experts' backward, with the number of tensors of each part.

    Attributes:
        state: of the dispatch, :attr:`titan_fp8moe.dispatch.Dispatch.STATE`.
        routing: of this rank's experts.
        kept: the rows that arrived, :attr:`titan_fp8moe.dispatch.Dispatch.ROWS`. Without expert parallelism they are
            the shared experts' too.
        ffn: of the FFN.
    """

    state: list[Tensor]
    routing: Routing
    kept: list[Tensor]
    ffn: SavedFFN

    def pack(self) -> list[Tensor]:
        return [*self.state, *self.routing, *self.kept, *(t for t in self.ffn if t is not None)]

    @classmethod
    def unpack(cls, tensors: list[Tensor], route: str, recompute: str, save_h: str) -> "_Saved":
        kind, remaining = dispatch.kind(route), list(tensors)

        def take(count: int) -> list[Tensor]:
            taken = remaining[:count]
            del remaining[:count]
            return taken

        state, routing = take(len(kind.STATE)), Routing(*take(len(Routing._fields)))
        kept = take(len(kind.ROWS))
        fields = saved_ffn_fields(recompute, save_h)
        return cls(state, routing, kept, SavedFFN(**dict(zip(fields, remaining, strict=True))))


def _in_expert_order(tokens: Dispatch, rows: Rows, routing: Routing) -> Rows:
    if tokens.permutes:
        return rows
    return Rows(*ops.permute_rows(*rows, routing.row_TK, routing.token_M, routing.offsets_E))


def _routed_experts_forward(
    x_TD: Tensor,
    topk_scores_TK: Tensor,
    weights: list[Tensor],
    weight_scales: list[Tensor],
    topk_ids_TK: Tensor,
    route: str,
    num_ranks: int,
    signature: int,
    check_ids: bool,
    score_before_experts: bool,
    recompute: str,
    save_h: str,
    nan_flags: Tensor | None,
    has_shared: bool,
    shared_weights: list[Tensor],
    shared_scales: list[Tensor],
) -> list[Tensor]:
    """The forward of a layer, up to the start of the combine.

    ``weights`` and ``weight_scales`` are :meth:`titan_fp8moe.layer.weights.ExpertWeights.pack`, and so are the shared
    experts', which are only read where the dispatch is not asynchronous.

    Returns:
        The output; :meth:`_Saved.pack`; with shared experts the scale and end of :class:`GroupRows` and
        :func:`group_ffn`'s tensors. With an asynchronous dispatch instead: a placeholder of the output's
        gradient; the payload in flight; with shared experts their rows; :meth:`_Saved.pack`.
    """
    tokens = dispatch.begin(topk_ids_TK, topk_scores_TK, weights[0].shape[0], route, num_ranks, signature, check_ids)
    nans, group = NanFlags.of(nan_flags), []
    if has_shared:
        q, scale, *group = ops.quantize_group(x_TD, nans.x)
    else:
        q, scale = ops.quantize_rows(x_TD, nans.x)
    w13, w2, _ = quantize_weights(ExpertWeights.unpack(weights, weight_scales))
    T = x_TD.shape[0]
    rows, routing, kept = tokens.dispatch(q[:T], scale[:T])
    x = [_in_expert_order(tokens, rows, routing)]
    if has_shared and tokens.local:
        kept = [q, scale]
    elif has_shared:
        group.insert(0, q)
    del q, scale, rows
    y, ffn = expert_ffn(x, w13, w2, routing, score_before_experts, recompute, save_h, nans)
    if tokens.asynchronous:
        payload = tokens.start_combine(y, routing, x_TD.dtype, None)
        return [x_TD.new_empty(0), payload, *group, *_Saved(tokens.state(), routing, kept, ffn).pack()]
    tokens.before_combine(y, routing)
    shared_y, shared = None, []
    if has_shared:
        shared_rows = GroupRows(*(kept[:1] if tokens.local else []), *group)
        shared_y, shared = group_ffn(shared_rows, shared_weights, shared_scales, recompute, save_h, nans)
    out = tokens.start_combine(y, routing, x_TD.dtype, shared_y)
    return [out, *_Saved(tokens.state(), routing, kept, ffn).pack(), *group, *shared]


def _routed_experts_finish(
    payload: Tensor,
    sent_TK: Tensor,
    shared_rows: list[Tensor],
    shared_weights: list[Tensor],
    shared_scales: list[Tensor],
    D: int,
    dtype: torch.dtype,
    recompute: str,
    save_h: str,
    nan_flags: Tensor | None,
) -> list[Tensor]:
    """The layer's output (T, D), once the payload in flight has arrived. Any shared experts run meanwhile; what their
    backward needs follows the output."""
    shared_y, shared = None, []
    if shared_rows:
        nans = NanFlags.of(nan_flags)
        shared_y, shared = group_ffn(GroupRows(*shared_rows), shared_weights, shared_scales, recompute, save_h, nans)
    return [dispatch.finish_combine(payload, sent_TK, D, dtype, shared_y), *shared]


# One op holds the whole forward (two with an asynchronous dispatch), for per-op activation checkpointing: it keeps the
# results, and a recomputed block neither dispatches nor multiplies again. `recompute` decides what the backward
# recomputes.
_forward_op = custom_op(_routed_experts_forward)
_forward_op.register_fake(_routed_experts_forward)
_finish_op = custom_op(_routed_experts_finish)
_finish_op.register_fake(_routed_experts_finish)

SAVED_OPS = (_forward_op.op, _finish_op.op, *FORWARD_OPS)
"""The ops that per-op activation checkpointing must keep; of the first two, both or neither."""


@torch.utils.flop_counter.register_flop_formula(torch.ops.titan_fp8moe.routed_experts_forward)
def _forward_flops(x, scores, weights, weight_scales, topk_ids, *rest: Any, **_: Any) -> int:
    """Of all GEMMs, for as many rows as the buffers hold without expert parallelism, padding included."""
    (T, K), E, shared = topk_ids, weights[0][0], rest[-2]
    rows = row_capacity(T * K, E), group_rows(T)
    return sum(_flops(m, shapes) for m, shapes in zip(rows, (weights, shared), strict=True))


def _flops(rows: int, shapes: list[torch.Size]) -> int:
    """Of one product with each weight (E, N, K), whose padding counts."""
    return sum(2 * rows * padded(shape[1]) * padded(shape[2]) for shape in shapes)


@torch.utils.flop_counter.register_flop_formula(torch.ops.titan_fp8moe.routed_experts_finish)
def _finish_flops(payload, sent_TK, shared_rows, shared_weights, *_: Any, **__: Any) -> int:
    """Of the shared experts' GEMMs, padding included."""
    return _flops(shared_rows[0][0], shared_weights) if shared_weights else 0


def _signature(layer: _Layer, x_TD: Tensor, top_k: int, has_shared: bool, needs_grad: Sequence[bool]) -> int:
    """31 bits: what all ranks of an expert-parallel group must have in common, and whether this one needs gradients."""
    config = layer.config
    settings = config.wgrad, config.save_h, config.recompute, layer.score_before_experts, has_shared
    common = _checksum(x_TD.shape[1], x_TD.dtype, top_k, *settings) >> 2
    return common << 1 | any(needs_grad[:2])  # GRADIENTS_NEEDED


@torch.compiler.assume_constant_result
def _checksum(*values: Any) -> int:
    return zlib.crc32(repr(values).encode())


# --- autograd ---------------------------------------------------------------------------------------------------------


def _ffn_backward(
    tokens: Rows,
    saved: SavedFFN,
    weights: ExpertWeights[Tensor],
    routing: Routing,
    layer: _Layer,
    nans: NanFlags,
) -> ExpertFFNBackward:
    readable_weights = readable(weights)
    if layer.cache is not None:
        _, operands = layer.cache.get(weights)
    else:
        operands = quantize_weights_transposed(readable_weights, with_w13=layer.config.recompute == "experts")
    return ExpertFFNBackward(
        tokens, saved, readable_weights, operands, routing, layer.score_before_experts, layer.config, nans
    )


class _RoutedExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TD, topk_scores_TK, w1, w2, w3, s1, s2, s3, topk_ids_TK, nan_flags, layer, has_shared, in_flight
    ):
        route, num_ranks, score_before_experts, config, cache, shared_cache, check_ids = layer
        kind, num_rows = dispatch.kind(route), len(GroupRows._fields)
        shared = ([], []) if s1 is None else forward_operands(one_expert(s1, s2, s3), shared_cache)
        out, *tensors = _forward_op(
            x_TD,
            topk_scores_TK,
            *forward_operands(ExpertWeights(w1, w2, w3), cache),
            topk_ids_TK,
            route,
            num_ranks,
            _signature(layer, x_TD, topk_scores_TK.shape[1], has_shared, ctx.needs_input_grad) if route else 0,
            check_ids,
            score_before_experts,
            config.recompute,
            config.save_h,
            nan_flags,
            has_shared,
            *shared,
        )
        results = []  # of an asynchronous dispatch: what the node that ends the combine needs
        if kind.asynchronous:
            count = 1 + (num_rows if has_shared else 0)
            results, tensors = tensors[:count], tensors[count:]
            results += tensors[: len(kind.STATE)]
            ctx.mark_non_differentiable(*results)
            ctx.set_materialize_grads(False)  # no zeros for those
            in_flight.needs_dx = ctx.needs_input_grad[0]
        # Weights are saved as parameters, not quantized: FSDP refills them before the backward, which so cannot
        # quantize stale values.
        ctx.save_for_backward(w1, w2, w3, s1, s2, s3, *tensors)
        # The flags are not saved: hooks of saved tensors may return copies.
        ctx.layer, ctx.nan_flags, ctx.in_flight, ctx.x_dtype = layer, nan_flags, in_flight, x_TD.dtype
        return (out, *results) if results else out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor, *_: Any):  # pyrefly: ignore[bad-override] # one gradient per result
        layer, config, route = ctx.layer, ctx.layer.config, ctx.layer.route
        w1, w2, w3, s1, s2, s3, *tensors = ctx.saved_tensors
        nans = NanFlags.of(ctx.nan_flags)
        D, shared_tensors, local = w1.shape[2], [], dispatch.kind(route).local
        if s1 is not None:
            count = len(GroupRows._fields) - local + len(saved_ffn_fields(config.recompute, config.save_h))
            tensors, shared_tensors = tensors[:-count], tensors[-count:]
        state, routing, kept, saved = _Saved.unpack(tensors, route, config.recompute, config.save_h)
        tokens = dispatch.resume(state, route)
        needs_dx, needs_ds = ctx.needs_input_grad[:2]
        rows = tokens.arrived_rows(kept, D, routing.row_TK.shape[1])
        ffn = _ffn_backward(rows, saved, ExpertWeights(w1, w2, w3), routing, layer, nans)
        shared = None
        if s1 is not None:
            q, scale, end, *shared_tensors = (kept[:1] if local else []) + shared_tensors
            shared_rows, weights = GroupRows(q, scale, end), one_expert(s1, s2, s3)
            shared = group_ffn_backward(shared_rows, shared_tensors, weights, layer.shared_cache, config, nans)
        del tensors, saved, shared_tensors  # h is freed after its last use, also where checkpointing has kept it
        cast_rows, shared_dx = None, None
        if shared is not None:
            q, scale, scale_t, _end = ops.quantize_group(dout, nans.dy)
            shared_dx, _ds = shared.dgrad(Rows(q, scale_t), needs_dx)
            cast_rows = Rows(q[: dout.shape[0]], scale[: dout.shape[0]])
            del q, scale, scale_t
        elif tokens.asynchronous:
            # This node lives as long as the loss; what it holds would add up over the layers.
            shared_dx, ctx.in_flight.shared_dx_RD = ctx.in_flight.shared_dx_RD, None
        else:
            cast_rows = Rows(*ops.quantize_rows(dout, nans.dy))
        dout_rows = tokens.receive_gradients(cast_rows, ctx.in_flight, routing, D)
        dy = _in_expert_order(tokens, dout_rows, routing)
        del cast_rows, dout_rows
        # Ranks that exchange gradients do so all or none.
        with_dx = needs_dx if local else tokens.gradients_needed
        dx_M, ds_M = ffn.dgrad(dy, with_dx)
        pending = None
        if with_dx or needs_ds:
            pending = tokens.start_return(dx_M, ds_M, routing, ctx.x_dtype, shared_dx)
        del dx_M
        weight_grads = ffn.wgrad(w1.dtype, ctx.needs_input_grad[2:5])
        shared_grads = [None] * 3
        if shared is not None:
            shared_grads = without_expert_dim(shared.wgrad(s1.dtype, ctx.needs_input_grad[5:8]))
        dx_TD = ds_TK = None
        if pending is not None:
            dx_TD, ds_TK = tokens.finish_return(pending, D, ctx.x_dtype, shared_dx)
        return dx_TD, ds_TK, *weight_grads, *shared_grads, *[None] * 5


class _FinishCombine(torch.autograd.Function):
    """The end of the forward's combine; in the backward, the start of the dispatch of the output's gradient. The shared
    experts run here in both directions, while tokens travel."""

    @staticmethod
    def forward(ctx: Any, placeholder, s1, s2, s3, payload, nan_flags, layer, in_flight, D, dtype, *tensors):
        in_flight.check_stream()
        has_shared, config = s1 is not None, layer.config
        rows = list(tensors[: len(GroupRows._fields)]) if has_shared else []
        state = tensors[len(rows) :]
        weights = ([], [])
        if has_shared:
            weights = forward_operands(one_expert(s1, s2, s3), layer.shared_cache)
        out, *saved = _finish_op(
            payload, state[0], rows, *weights, D, dtype, config.recompute, config.save_h, nan_flags
        )
        # Per-op checkpointing keeps every result of the forward op, this one too, but nobody reads it again.
        payload.untyped_storage().resize_(0)
        ctx.save_for_backward(s1, s2, s3, *rows, *state, *saved)
        ctx.layer, ctx.nan_flags, ctx.in_flight = layer, nan_flags, in_flight
        ctx.placeholder_dtype = placeholder.dtype
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_TD: Tensor):  # pyrefly: ignore[bad-override] # one gradient per result
        s1, s2, s3, *tensors = ctx.saved_tensors
        nans = NanFlags.of(ctx.nan_flags)
        layer, num_state = ctx.layer, len(AllToAllDispatch.STATE)
        rows = None
        if s1 is not None:
            count = len(GroupRows._fields)
            rows, tensors = GroupRows(*tensors[:count]), tensors[count:]
        tokens = AllToAllDispatch.resume(tensors[:num_state], layer.route)
        if rows is None:
            tokens.send_gradients(*ops.quantize_rows(dout_TD, nans.dy), ctx.in_flight)
            shared_grads = [None] * 3
        else:
            q, scale, scale_t, _ = ops.quantize_group(dout_TD, nans.dy)
            T = dout_TD.shape[0]
            tokens.send_gradients(q[:T], scale[:T], ctx.in_flight)
            weights, cache = one_expert(s1, s2, s3), layer.shared_cache
            ffn = group_ffn_backward(rows, tensors[num_state:], weights, cache, layer.config, nans)
            del tensors, rows
            ctx.in_flight.shared_dx_RD, _ = ffn.dgrad(Rows(q, scale_t), ctx.in_flight.needs_dx)
            shared_grads = without_expert_dim(ffn.wgrad(s1.dtype, ctx.needs_input_grad[1:4]))
        if not ctx.needs_input_grad[0]:  # no other node will take the payload
            ops.wait(ctx.in_flight.take())
        placeholder = dout_TD.new_empty(0, dtype=ctx.placeholder_dtype)
        return placeholder, *shared_grads, *[None] * (len(ctx.needs_input_grad) - 4)


# Under torch.compile the two would lie in graphs that know nothing of each other, and the split sizes are data.
_start_eagerly = torch.compiler.disable(_RoutedExperts.apply)
_finish_eagerly = torch.compiler.disable(_FinishCombine.apply)
_in_flight = torch.compiler.disable(InFlight)
