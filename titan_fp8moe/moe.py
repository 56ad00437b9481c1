"""The routed experts of one MoE layer as a single autograd function: cast, dispatch, expert FFN, combine.

It is one function because autograd casts the gradient of an fp8 tensor to fp8, so no fp8 tensor may cross an autograd
edge, and because everything that reads the expert weights then happens between FSDP's hooks of the experts module.

    forward   x --quantize--> fp8 --dispatch--> permute --expert FFN--> sum --combine, bf16--> sum
    backward  dy --quantize--> fp8 --dispatch--> permute --FFN backward--> sum --combine, bf16--> sum

The two quantizations are the recipe's two explicit casts. A token is quantized once, before it is replicated to its
experts; in the backward its gradient is the same for all its experts, so it is quantized once as well.

With expert parallelism a token goes once to each rank that holds experts of it, and one row comes back, the fp32 sum of
these experts' outputs. What does not depend on the rows is computed while they are on their way: the weights are
quantized beside the dispatch, and the weight gradients computed beside the combine of the backward.
"""

import itertools
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from titan_fp8moe import ops
from titan_fp8moe.config import Fp8FlowMoEConfig
from titan_fp8moe.experts import (
    ExpertFFNBackward,
    ExpertWeights,
    Layout,
    Rows,
    WeightCache,
    expert_ffn,
    quantize_weights,
)
from titan_fp8moe.ops.backend import custom_op
from titan_fp8moe.recipe import row_capacity


class Route:
    """Where the tokens go, as torchtitan's token reorderer gives it: slots ``token * top_k + k`` sorted by expert.

    A plain class on purpose: FSDP casts every floating-point tensor it finds in a module's arguments to bf16, and looks
    into tuples, dicts and dataclasses; the scores must stay fp32.

    Attributes:
        score_S: (S,) fp32 score of each slot, in the order of ``slot_S``.
        slot_S: (S,) integer slots, sorted by expert. May cover only a part of all T * top_k slots (this
            tensor-parallel rank's tokens); the layer's output is then zero for the other tokens.
        counts_E: (E_total,) slots per expert, over all ranks' experts.
        top_k: experts per token.
        score_before_experts: whether scores multiply the experts' input instead of their output.
        exchange: with expert parallelism, once :func:`start_exchange` has been called.
    """

    def __init__(self, score_S: Tensor, slot_S: Tensor, counts_E: Tensor, top_k: int, score_before_experts: bool):
        self.score_S = score_S
        self.slot_S = slot_S
        self.counts_E = counts_E
        self.top_k = top_k
        self.score_before_experts = score_before_experts
        self.exchange: PendingExchange | None = None


def routed_experts(
    x_TD: Tensor,
    weights: ExpertWeights,
    route: Route,
    config: Fp8FlowMoEConfig,
    ep_group: dist.ProcessGroup | None = None,
    cache: WeightCache | None = None,
) -> Tensor:
    """Sum over a token's experts of score * FFN_e(token), differentiable in ``x_TD``, the scores and the weights.

    Args:
        x_TD: (T, D) bf16 or fp32, D a multiple of 128.
        weights: this rank's experts, local tensors.
        ep_group: the ranks the experts are spread over, in order; None when all are here.
        cache: keeps the quantized weights for the next call, unless gradients are off.

    Returns:
        (T, D) in the dtype of ``x_TD``.
    """
    num_ranks = 1 if ep_group is None else ep_group.size()
    if route.counts_E.numel() != num_ranks * weights.w1_EHD.shape[0]:
        raise ValueError(
            f"the route counts {route.counts_E.numel()} experts, but {num_ranks} rank(s) hold "
            f"{weights.w1_EHD.shape[0]} each"
        )
    exchange = None
    if ep_group is not None:
        if route.exchange is None:
            start_exchange(route, x_TD.shape[0], ep_group)
        exchange = route.exchange.wait()
    return _RoutedExperts.apply(
        x_TD,
        route.score_S,
        *weights,
        route.slot_S,
        route.counts_E,
        route.top_k,
        route.score_before_experts,
        config,
        exchange,
        cache if torch.is_grad_enabled() else None,
    )


class _RoutedExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TD, score_S, w1, w2, w3, slot_S, counts_E, top_k, score_before_experts, config, exchange, cache):
        maps, splits, ep_name = ([], [], "") if exchange is None else exchange
        # position_TK, the first of the maps, is needed later only where it tells which row returns for a slot.
        kept_maps = [maps[0] if config.combine == "rows" else maps[1], *maps[1:3]] if maps else []
        weights = [w1, w2, w3]
        if cache is not None:
            weights = [*itertools.chain(*quantize_weights(ExpertWeights(*weights), cache))]
        out, *saved = _forward_op(
            x_TD,
            score_S,
            weights,
            slot_S,
            counts_E,
            maps,
            splits,
            ep_name,
            top_k,
            score_before_experts,
            config.save_h,
            config.recompute,
            config.combine,
        )
        # Weights are saved as parameters, not quantized: FSDP refills them before the backward, so what the backward
        # quantizes cannot be stale.
        ctx.save_for_backward(w1, w2, w3, slot_S, *kept_maps, *saved)
        ctx.splits, ctx.ep_name, ctx.top_k, ctx.cache = splits, ep_name, top_k, cache
        ctx.x_dtype, ctx.score_before_experts, ctx.config = x_TD.dtype, score_before_experts, config
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout_TD):
        w1, w2, w3, slot_S, *saved = ctx.saved_tensors
        exchange = None
        if ctx.ep_name:
            returned_TK, copy_TK, token_C, row_R, *saved = saved
            exchange = _Exchange(returned_TK, copy_TK, token_C, ctx.splits, ctx.ep_name, ctx.config.combine)
        offsets_E, token_M, score_M, row_TK, x_q, x_scale, *saved = saved
        layout = Layout(offsets_E, token_M, score_M, row_TK)

        q, scale = ops.quantize_rows(dout_TD.contiguous())
        if exchange is not None:
            payload = exchange.start_dispatch(q, scale)
        ffn = ExpertFFNBackward(
            Rows(x_q, x_scale),
            saved,
            ExpertWeights(w1, w2, w3),
            layout,
            ctx.score_before_experts,
            ctx.config,
            ctx.cache,
        )
        if exchange is not None:
            q, scale, _, _ = ops.unpack_dispatch(ops.wait(payload), dout_TD.shape[1], 0)
        dy = Rows(*ops.permute_rows(q, scale, layout.row_TK, layout.token_M, layout.offsets_E))
        dx_M, ds_M = ffn.dgrad(dy)
        if exchange is not None:
            payload = exchange.start_combine(dx_M, ds_M, layout.row_TK, row_R)
        else:
            dx_TD = ops.unpermute_sum(dx_M, layout.row_TK, ctx.x_dtype)
            ds_S = ops.slot_gradients(ds_M.unsqueeze(1), layout.row_TK, slot_S)
        del dx_M
        weight_grads = ffn.wgrad(ctx.needs_input_grad[2:5])
        if exchange is not None:
            dx_TD, ds = exchange.finish_combine(payload, dout_TD.shape[1], ctx.top_k, ctx.x_dtype)
            ds_S = ops.slot_gradients(ds, exchange.returned_TK, slot_S)
        return dx_TD, ds_S, *weight_grads, *[None] * 7


def _routed_experts_forward(
    x_TD: Tensor,
    score_S: Tensor,
    weights: list[Tensor],
    slot_S: Tensor,
    counts_E: Tensor,
    maps: list[Tensor],
    splits: list[int],
    ep_name: str,
    top_k: int,
    score_before_experts: bool,
    save_h: str,
    recompute: str,
    combine: str,
) -> list[Tensor]:
    """The layer's output and what its backward needs: with expert parallelism row_R (empty unless ``combine = rows``),
    the layout's 4 tensors, x's 2, and those of :func:`titan_fp8moe.experts.expert_ffn`.

    ``weights`` are w1, w2, w3; or already quantized the 4 tensors of :func:`titan_fp8moe.experts.quantize_weights`.
    """
    config = Fp8FlowMoEConfig(save_h=save_h, recompute=recompute, combine=combine)
    (T, D), E = x_TD.shape, weights[0].shape[0]
    q, scale = ops.quantize_rows(x_TD)
    moved = []
    if ep_name:
        position_TK, copy_TK, token_C, received_N = maps
        returned_TK = position_TK if combine == "rows" else copy_TK
        exchange = _Exchange(returned_TK, copy_TK, token_C, splits, ep_name, combine)
        payload = exchange.start_dispatch(q, scale, position_TK, score_S)
    w13, w2 = quantize_weights(ExpertWeights(*weights)) if len(weights) == 3 else (weights[:2], weights[2:])
    if ep_name:
        q, scale, position_CK, score_CK = ops.unpack_dispatch(ops.wait(payload), D, top_k)
        rows = exchange.num_received_rows
        *layout, row_R = ops.arrival_layout(received_N, position_CK, score_CK, rows, row_capacity(rows, E))
        moved = [row_R if combine == "rows" else row_R.new_empty(0)]
    else:
        layout = ops.expert_layout(counts_E.view(1, -1), score_S, slot_S, T, top_k, row_capacity(slot_S.shape[0], E))
    layout = Layout(*layout)
    x = Rows(*ops.permute_rows(q, scale, layout.row_TK, layout.token_M, layout.offsets_E))
    y, saved = expert_ffn(x, w13, w2, layout, score_before_experts, config)
    if ep_name:
        payload = exchange.start_combine(y, None, layout.row_TK, row_R)
        out, _ = exchange.finish_combine(payload, D, top_k, x_TD.dtype)
    else:
        out = ops.unpermute_sum(y, layout.row_TK, x_TD.dtype)
    return [out, *moved, *layout, *x, *saved]


# One op of all of it, for the sake of activation checkpointing by op: it keeps the results, so that a recomputed block
# neither dispatches nor multiplies again. What the backward recomputes instead is the configuration's to say.
_forward_op = custom_op(_routed_experts_forward)
torch.library.register_fake(_forward_op, _routed_experts_forward)


# --- expert parallelism -----------------------------------------------------------------------------------------------


class _Exchange:
    """Movement of tokens between the ranks of a group and back.

    Args:
        returned_TK: (T, K) int32, the row that comes back for each slot: position_TK of
            :func:`titan_fp8moe.recipe.dispatch_layout` with ``combine = rows``, otherwise copy_TK.
        copy_TK, token_C: of the same.
        splits: copies sent to each rank, copies received from each, slots sent to each, slots received from each.
        combine: see :class:`titan_fp8moe.config.Fp8FlowMoEConfig`.
    """

    def __init__(
        self, returned_TK: Tensor, copy_TK: Tensor, token_C: Tensor, splits: list[int], ep_name: str, combine: str
    ):
        self.returned_TK, self.copy_TK, self.token_C, self.ep_name = returned_TK, copy_TK, token_C, ep_name
        N = len(splits) // 4
        self.sent_copies, self.received_copies, sent_rows, received_rows = (
            splits[i : i + N] for i in range(0, 4 * N, N)
        )
        self.num_received_rows = sum(received_rows)
        self.by_row = combine == "rows"
        self.combine_splits = (sent_rows, received_rows) if self.by_row else (self.sent_copies, self.received_copies)

    def start_dispatch(
        self, q: Tensor, scale: Tensor, position_TK: Tensor | None = None, score_S: Tensor | None = None
    ) -> Tensor:
        """Sends quantized tokens (T, D), in a forward with their slots and scores; the payload needs ``ops.wait``."""
        payload = ops.pack_dispatch(q, scale, self.token_C, self.copy_TK, position_TK, score_S)
        return ops.start_all_to_all(payload, self.received_copies, self.sent_copies, self.ep_name)

    def start_combine(self, y_MD: Tensor, ds_M: Tensor | None, row_CK: Tensor, row_R: Tensor) -> Tensor:
        """Sends rows (M, D) back in bf16, score gradients (M,) in fp32 beside them; the payload needs ``ops.wait``."""
        payload = ops.pack_combine(y_MD, ds_M, row_R.unsqueeze(1) if self.by_row else row_CK)
        returned, received = self.combine_splits
        return ops.start_all_to_all(payload, returned, received, self.ep_name)

    def finish_combine(self, payload: Tensor, D: int, top_k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Sums what came back for each token, (T, D); and the score gradients as they came."""
        rows, ds = ops.unpack_combine(ops.wait(payload), D, 1 if self.by_row else top_k)
        return ops.unpermute_sum(rows, self.returned_TK, dtype), ds


class PreparedExchange(NamedTuple):
    """Arguments of the forward: position_TK, copy_TK, token_C, received_N; splits of :class:`_Exchange`; the group."""

    maps: list[Tensor]
    splits: list[int]
    ep_name: str


class PendingExchange:
    """Counts on their way from the other ranks and to the host."""

    def __init__(self, route: Route, num_tokens: int, ep_group: dist.ProcessGroup):
        self.ep_name, N = ep_group.group_name, ep_group.size()
        *self.maps, message_N = ops.dispatch_layout(route.slot_S, route.counts_E.view(N, -1), num_tokens, route.top_k)
        received_N = ops.wait(ops.start_all_to_all(message_N.view(torch.uint8), [1] * N, [1] * N, self.ep_name))
        received_N = received_N.view(torch.int32)
        self.maps.append(received_N)
        self.host = torch.stack([message_N, received_N]).to("cpu", non_blocking=True)
        self.copied = torch.cuda.Event() if message_N.is_cuda else None
        if self.copied is not None:
            self.copied.record()

    def wait(self) -> PreparedExchange:
        """The layer's one wait for the device: the host must know how much it will receive."""
        if self.copied is not None:
            self.copied.synchronize()
        sent, received = self.host.tolist()
        copies = [m[0] for m in sent + received]
        slots = [sum(m[2:]) for m in sent + received]
        position_TK, copy_TK, token_C, received_N = self.maps
        token_C = token_C[: sum(copies[: len(sent)])]
        return PreparedExchange([position_TK, copy_TK, token_C, received_N], copies + slots, self.ep_name)


@torch.no_grad()
def start_exchange(route: Route, num_tokens: int, ep_group: dist.ProcessGroup) -> None:
    """Asks the other ranks what they will send. What is launched between this and :func:`routed_experts` runs while the
    host waits for the answer."""
    route.exchange = PendingExchange(route, num_tokens, ep_group)
