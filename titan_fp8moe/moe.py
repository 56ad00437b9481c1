"""The routed experts of one MoE layer as a single autograd function: cast, dispatch, expert FFN, combine.

It is one function because autograd casts the gradient of an fp8 tensor to fp8, so no fp8 tensor may cross an autograd
edge, and because everything that reads the expert weights then happens between FSDP's hooks of the experts module.

    forward   x --quantize--> fp8 --dispatch--> permute --expert FFN--> unpermute --combine, bf16--> sum over k
    backward  dy --quantize--> fp8 --dispatch--> permute --FFN backward--> unpermute --combine, bf16--> sum over k

The two quantizations are the recipe's two explicit casts. A token is quantized once, before it is replicated to its
experts; in the backward its gradient is the same for all its experts, so it is quantized once as well.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from titan_fp8moe import ops
from titan_fp8moe.config import Fp8FlowMoEConfig
from titan_fp8moe.experts import ExpertWeights, Layout, Rows, expert_ffn, expert_ffn_backward
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
    """

    def __init__(self, score_S: Tensor, slot_S: Tensor, counts_E: Tensor, top_k: int, score_before_experts: bool):
        self.score_S = score_S
        self.slot_S = slot_S
        self.counts_E = counts_E
        self.top_k = top_k
        self.score_before_experts = score_before_experts


def routed_experts(
    x_TD: Tensor,
    weights: ExpertWeights,
    route: Route,
    config: Fp8FlowMoEConfig,
    ep_group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Sum over a token's experts of score * FFN_e(token), differentiable in ``x_TD``, the scores and the weights.

    Args:
        x_TD: (T, D) bf16 or fp32, D a multiple of 128.
        weights: this rank's experts, local tensors.
        ep_group: the ranks the experts are spread over, in order; None when all are here.

    Returns:
        (T, D) in the dtype of ``x_TD``.
    """
    ep_name = None if ep_group is None else ep_group.group_name
    num_ranks = 1 if ep_group is None else ep_group.size()
    if route.counts_E.numel() != num_ranks * weights.w1_EHD.shape[0]:
        raise ValueError(
            f"the route counts {route.counts_E.numel()} experts, but {num_ranks} rank(s) hold "
            f"{weights.w1_EHD.shape[0]} each"
        )
    return _RoutedExperts.apply(
        x_TD,
        route.score_S,
        *weights,
        route.slot_S.to(torch.int32),
        route.counts_E.to(torch.int32).view(num_ranks, -1),
        route.top_k,
        route.score_before_experts,
        config,
        ep_name,
    )


class _RoutedExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TD, score_S, w1, w2, w3, slot_S, counts_SE, top_k, score_before_experts, config, ep_name):
        weights = ExpertWeights(w1, w2, w3)
        q, scale = ops.quantize_rows(x_TD)
        num_slots = x_TD.shape[0] * top_k
        if ep_name is None:
            mover = LocalTokens(slot_S, top_k, num_slots)
        else:
            counts_SE, splits = exchange_counts(counts_SE, ep_name)
            mover = ExchangedTokens(slot_S, top_k, num_slots, *splits, ep_name)
        x, layout = mover.arrive(q, scale, score_S, counts_SE)
        y, saved = expert_ffn(x, weights, layout, score_before_experts, config)
        out, _ = mover.leave(y, None, layout, x_TD.dtype)

        # Weights are saved as parameters, never quantized: FSDP refills them before the backward, so what the backward
        # quantizes cannot be stale.
        ctx.save_for_backward(*weights, slot_S, *layout, *x, *saved)
        ctx.mover = mover.without_tensors()
        ctx.x_dtype, ctx.score_before_experts, ctx.config = x_TD.dtype, score_before_experts, config
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout_TD):
        w1, w2, w3, slot_S, offsets_E, token_M, score_M, row_S, x_q, x_scale, *saved = ctx.saved_tensors
        layout = Layout(offsets_E, token_M, score_M, row_S)
        mover = ctx.mover.with_slots(slot_S)
        dy = mover.permute(*ops.quantize_rows(dout_TD.contiguous()), layout)
        dx_M, ds_M, weight_grads = expert_ffn_backward(
            dy,
            Rows(x_q, x_scale),
            saved,
            ExpertWeights(w1, w2, w3),
            layout,
            ctx.score_before_experts,
            ctx.config,
            ctx.needs_input_grad[2:5],
        )
        dx_TD, ds_S = mover.leave(dx_M, ds_M, layout, ctx.x_dtype)
        return dx_TD, ds_S, *weight_grads, *[None] * 6


class LocalTokens:
    """Token movement when all experts are on this rank: slots go straight to expert order and back."""

    def __init__(self, slot_S: Tensor | None, top_k: int, num_slots: int):
        self.slot_S, self.top_k, self.num_slots = slot_S, top_k, num_slots

    def without_tensors(self) -> "LocalTokens":
        """What may stay on the autograd context: tensors must go through save_for_backward, or activation checkpointing
        could not drop them."""
        return LocalTokens(None, self.top_k, self.num_slots)

    def with_slots(self, slot_S: Tensor) -> "LocalTokens":
        return LocalTokens(slot_S, self.top_k, self.num_slots)

    def arrive(self, q: Tensor, scale: Tensor, score_S: Tensor, counts_SE: Tensor) -> tuple[Rows, Layout]:
        """Brings quantized tokens (T, D) to expert order."""
        capacity = row_capacity(score_S.shape[0], counts_SE.shape[1])
        layout = Layout(*ops.expert_layout(counts_SE, score_S, self.slot_S, self.num_slots, self.top_k, capacity))
        return self.permute(q, scale, layout), layout

    def permute(self, q: Tensor, scale: Tensor, layout: Layout) -> Rows:
        """Brings quantized tokens (T, D) to a known expert order."""
        return Rows(*ops.permute_rows(q, scale, layout.token_M, layout.offsets_E))

    def leave(
        self, y_MD: Tensor, ds_M: Tensor | None, layout: Layout, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor | None]:
        """Sums each token's rows, (T, D); with ``ds_M`` also the score gradients in the order of the slots, (S,)."""
        out = ops.unpermute_sum(y_MD, layout.row_S.view(-1, self.top_k), dtype)
        return out, None if ds_M is None else ds_M[layout.row_S[self.slot_S]]


class ExchangedTokens:
    """Token movement over an expert-parallel group.

    Slots are sorted by expert and so by rank: they are packed in that order (values, scale bytes and score in one
    payload), exchanged, brought to expert order, and return the same way in bf16. A row arrives with exactly one
    expert, so on this side ``row_S`` of the layout maps received rows.
    """

    def __init__(
        self,
        slot_S: Tensor | None,
        top_k: int,
        num_slots: int,
        send_splits: list[int],
        recv_splits: list[int],
        ep_name: str,
    ):
        self.slot_S, self.top_k, self.num_slots = slot_S, top_k, num_slots
        self.send_splits, self.recv_splits, self.ep_name = send_splits, recv_splits, ep_name

    def without_tensors(self) -> "ExchangedTokens":
        """See :meth:`LocalTokens.without_tensors`."""
        return self.with_slots(None)

    def with_slots(self, slot_S: Tensor | None) -> "ExchangedTokens":
        return ExchangedTokens(slot_S, self.top_k, self.num_slots, self.send_splits, self.recv_splits, self.ep_name)

    def arrive(self, q: Tensor, scale: Tensor, score_S: Tensor, counts_SE: Tensor) -> tuple[Rows, Layout]:
        """Dispatches quantized tokens (T, D) and brings what arrives to expert order."""
        q_R, scale_R, score_R = self._dispatch(q, scale, score_S)
        num_rows = q_R.shape[0]
        capacity = row_capacity(num_rows, counts_SE.shape[1])
        layout = Layout(*ops.expert_layout(counts_SE, score_R, None, num_rows, 1, capacity))
        return Rows(*ops.permute_rows(q_R, scale_R, layout.token_M, layout.offsets_E)), layout

    def permute(self, q: Tensor, scale: Tensor, layout: Layout) -> Rows:
        """Dispatches quantized tokens (T, D) and brings what arrives to a known expert order."""
        q_R, scale_R, _ = self._dispatch(q, scale, None)
        return Rows(*ops.permute_rows(q_R, scale_R, layout.token_M, layout.offsets_E))

    def _dispatch(self, q: Tensor, scale: Tensor, score_S: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        payload = ops.pack_dispatch(q, scale, score_S, self.slot_S, self.top_k)
        payload = ops.all_to_all_rows(payload, self.recv_splits, self.send_splits, self.ep_name)
        return ops.unpack_dispatch(payload, q.shape[1])

    def leave(
        self, y_MD: Tensor, ds_M: Tensor | None, layout: Layout, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor | None]:
        """Combines: rows return to their ranks in bf16, score gradients in fp32 beside them; sums each token's rows."""
        payload = ops.pack_combine(y_MD, ds_M, layout.row_S)
        payload = ops.all_to_all_rows(payload, self.send_splits, self.recv_splits, self.ep_name)
        rows, ds_S = ops.unpack_combine(payload, y_MD.shape[1])
        sent = torch.full((self.num_slots,), -1, dtype=torch.int32, device=rows.device)
        sent[self.slot_S] = torch.arange(rows.shape[0], dtype=torch.int32, device=rows.device)
        return ops.unpermute_sum(rows, sent.view(-1, self.top_k), dtype), ds_S


def exchange_counts(counts_SE: Tensor, ep_name: str) -> tuple[Tensor, tuple[list[int], list[int]]]:
    """Tells every rank how many rows it gets for each of its experts.

    Args:
        counts_SE: (ranks, E) int32, rows this rank sends to each expert of each rank.

    Returns:
        (ranks, E) int32, rows each rank sends to each local expert; and the all-to-all's send and receive splits. They
        are host integers: this is the layer's one wait for the device.
    """
    received_SE = ops.all_to_all_rows(
        counts_SE.contiguous().view(torch.uint8), [1] * counts_SE.shape[0], [1] * counts_SE.shape[0], ep_name
    ).view(torch.int32)
    splits = torch.stack([counts_SE.sum(1), received_SE.sum(1)]).to("cpu")
    send, recv = splits.tolist()
    return received_SE, (send, recv)
