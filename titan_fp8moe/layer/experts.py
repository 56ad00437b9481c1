"""One MoE layer: an autograd function whose forward is one op, and whose backward is two.

    forward   x --quantize--> fp8 --send, receive--> expert FFN --send_back, finish, bf16--> sum
    backward  dy --quantize--> fp8 --send, receive--> gradients of the hidden rows, and of w2
              --GEMM 1 dgrad--> --send_back, finish, bf16--> sum; gradients of w1 and w3 meanwhile

The two quantizations are the recipe's two casts. A token is quantized once, before it is replicated to its experts. In
the backward its gradient is the same for all its experts, so it is quantized once as well.

**Why one function.** Autograd casts the gradient of an fp8 tensor to fp8, so no fp8 tensor may cross an autograd edge.
And FSDP frees and refills the weights around the module that owns them, so all that reads them happens in its call.

**How PyTorch sees it.** Autograd sees :class:`ExpertsFunction`. FSDP sees the module's call; the parameters are saved,
never a quantized copy. Per-op checkpointing sees the forward's op (:data:`SAVED_OPS`), keeps its results, and so
repeats no transfer and no GEMM. A compiled graph holds all three ops, unless the dispatch syncs with the host. The
backward is two, so that a graph frees h, and a if it is saved, before the larger weight gradients are made. The first
makes dh and w2's gradient, the second those of x, w1 and w3; shared experts' input gradient is in the first.

**What is saved** (:mod:`titan_fp8moe.layer.saved`)::

    x --quantize--> q, scale --send, receive--> rows --GEMM 1--> h ---activation---> a --GEMM 2--> y --> out
                    |                           |                |                   |
                    |              routing, state, arrived     hidden                a
                    +-- shared.rows --GEMM 1--> shared.hidden ...      where weights are kept, generations

Shared experts, which serve every token, are an FFN with one group of rows. They read the rows that are quantized for
the routed experts, and their results join the same sums. They run while sums travel in a forward, and while the
output's gradient travels in a backward.
"""

import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from titan_fp8moe import dispatch, ops
from titan_fp8moe.dispatch import BACKENDS, Pairs
from titan_fp8moe.dispatch.base import GRADIENTS_NEEDED, Returned
from titan_fp8moe.layer import group, statistics
from titan_fp8moe.layer.ffn import FFN, WeightGrads
from titan_fp8moe.layer.lora import NO_LORA, GemmLora, lora_operands
from titan_fp8moe.layer.operands import W2, W13, WeightCache, WeightOperands, aliases, copies_for, pack_weights
from titan_fp8moe.layer.saved import (
    Inputs,
    LayerSpec,
    Saved,
    gradients_flags,
    halfway_flags,
    join_gradients,
    pack,
    saved_flags,
    unpack,
)
from titan_fp8moe.layer.weights import NO_WEIGHTS, Biases, ExpertWeights, one_expert, place_as
from titan_fp8moe.ops import Fp8Weight
from titan_fp8moe.ops.backend import custom_op, once_differentiable
from titan_fp8moe.rows import DY, GroupRows, Routing, Rows, X
from titan_fp8moe.spec import decode, encode

# --- the ops ----------------------------------------------------------------------------------------------------------

# Each takes, last, the layer's parameters and its specification:
#   weights, shared_weights: of pack_weights; the second empty without shared experts
#   biases: b1, b2, b3, or empty; adapters: the tensors of split_lora, or empty
#   nan_flags: see titan_fp8moe.rows.X, or None; layer: an encoded LayerSpec


def _ffn(spec: LayerSpec, routing: Routing, biases: list[Tensor | None], adapters: list[Tensor]) -> FFN:
    """The routed experts' FFN."""
    lora = NO_LORA if spec.lora is None else lora_operands(spec.lora, adapters, spec.expert)
    return FFN(spec.expert, spec.backward, routing, Biases(*cast(Any, biases)) if biases else None, lora)


def _routed_experts_forward(
    x_TD: Tensor,
    topk_scores_TK: Tensor,
    topk_ids_TK: Tensor,
    shared_scores_T: Tensor | None,
    needs_grad: bool,
    weights: list[Tensor | None],
    shared_weights: list[Tensor | None],
    biases: list[Tensor | None],
    adapters: list[Tensor],
    nan_flags: Tensor | None,
    layer: str,
) -> list[Tensor]:
    """The output (T, D), and :class:`Saved`. ``needs_grad``: whether x or the scores need gradients."""
    spec, nan_flag = decode(LayerSpec, layer), None if nan_flags is None else nan_flags[X]
    (T, D), E, shared_rows, saved_shared = x_TD.shape, cast(Tensor, weights[0]).shape[0], None, None
    signature = _signature(spec, x_TD, topk_ids_TK.shape[1], needs_grad) if BACKENDS[spec.route.backend].travels else 0
    tokens = dispatch.begin(Pairs(topk_ids_TK, topk_scores_TK, E), spec.route, signature, spec.check_ids)
    operands = WeightOperands(weights, spec.expert)
    if spec.shared:
        q, scale, column_scale, end = ops.quantize_group(x_TD, nan_flag)
        shared_rows, sent = GroupRows(q, column_scale, end), Rows(q[:T], scale[:T])
        if shared_scores_T is not None:
            shared_rows = shared_rows._replace(score=torch.nn.functional.pad(shared_scores_T, (0, q.shape[0] - T)))
    else:
        q, scale = sent = Rows(*ops.quantize_rows(x_TD, nan_flag))
    with tokens.guard():
        with operands.held:
            # The operands are made while the counts travel to the host, or else while the tokens travel.
            pending = None if tokens.syncs_host else tokens.send(sent)
            (w13, w2), generations = operands.of_forward()
            rows = tokens.receive(pending or tokens.send(sent))
            # On one rank the shared experts' q, of R rows, is the routed experts' x too, and is kept once.
            arrived = Rows(q, scale) if spec.shared and not tokens.travels else tokens.arrived
            del q, scale, sent, pending
            ffn = _ffn(spec, tokens.routing, biases, adapters)
            h = ffn.product(rows, w13, ffn.lora.w13)
            del rows, w13
            a, hidden = ffn.activate(h)
            del h
            y = ffn.product(a, w2, ffn.lora.w2, D)
            del w2
        pending, shared_y = tokens.send_back(y, None, ffn.row_bias()), None
        del y
        if shared_rows is not None:
            shared_ffn = group.ffn_of_group(shared_rows, spec.shared_expert, spec.shared_backward)
            shared_operands = WeightOperands(shared_weights, spec.shared_expert)
            shared_y, saved_shared = group.group_forward(shared_ffn, shared_rows, shared_operands)
        out = cast(Tensor, tokens.finish(pending, x_TD.dtype, shared_y).rows_TD)
    saved = Saved(tokens.state, tokens.routing, arrived, generations, saved_shared, a, hidden)
    return [out, *pack(saved_flags(spec), saved)]


def _routed_experts_hidden_gradients(
    dout_TD: Tensor,
    saved: list[Tensor],
    needs: list[bool],
    weights: list[Tensor | None],
    shared_weights: list[Tensor | None],
    biases: list[Tensor | None],
    adapters: list[Tensor],
    nan_flags: Tensor | None,
    layer: str,
) -> list[Tensor]:
    """The first half of a backward: the layer's second cast, and the gradients of GEMM 2.

    Args:
        saved: of the forward.
        needs: which of :class:`Inputs` need gradients.

    Returns:
        The first gradients of :func:`titan_fp8moe.layer.saved.gradients_flags`, and
        :class:`titan_fp8moe.layer.ffn.HiddenGradients` of the routed and of any shared experts.
    """
    spec, nan_flag = decode(LayerSpec, layer), None if nan_flags is None else nan_flags[DY]
    needed, of_forward = Inputs.of(needs, spec.expert.biased), unpack(saved_flags(spec), iter(saved))
    flags, _ = gradients_flags(needed, spec.lora)
    (T, D), routing, generations = dout_TD.shape, of_forward.routing, of_forward.generations
    needs_dbias = any(needed.biases or ())
    shared = dw2 = dw2_shared = None
    adapter_grads: Any = flags.adapters  # pack() reads no value whose flag is false
    tokens = BACKENDS[spec.route.backend].resume(of_forward.state, routing, spec.route, D)
    ffn, operands = _ffn(spec, routing, biases, adapters), WeightOperands(weights, spec.expert)
    with tokens.guard():
        if spec.shared:
            q, scale, column_scale, _ = ops.quantize_group(dout_TD, nan_flag)
            pending, saved_shared = tokens.send(Rows(q[:T], scale[:T])), of_forward.shared_with_q
            shared_ffn = group.ffn_of_group(saved_shared.rows, spec.shared_expert, spec.shared_backward)
            shared, dw2_shared = group.group_hidden_gradients(
                shared_ffn, saved_shared, WeightOperands(shared_weights, spec.shared_expert), Rows(q, column_scale),
                needed.x, flags.shared.w2,
            )  # fmt: skip
            if spec.shared_scored:
                shared = shared._replace(ds_M=cast(Tensor, shared.ds_M)[:T])
            del q, scale, column_scale
        else:
            pending = tokens.send(Rows(*ops.quantize_rows(dout_TD, nan_flag)))
        with operands.held:
            w2_t, hidden = operands.transposed(W2, generations), of_forward.hidden
            if hidden is None:
                hidden = ffn.hidden(tokens.arrived_rows(of_forward.arrived), operands.plain(W13, generations))
            dy = tokens.receive(pending)
            del pending
            routed, a = ffn.hidden_gradients(dy, hidden, of_forward.a, w2_t, needs_dbias)
        del w2_t, hidden  # h is freed if it was computed again
        if statistics.collecting() and spec.backward.weights == "trained":
            x = tokens.arrived_rows(of_forward.arrived)
            ffn.record(x, routed.dh, a, dy, operands)
        if flags.weights.w2:
            dw2 = ffn.w2_grad(dy, a, operands)
        if any(flags.adapters):
            adapter_grads = cast(GemmLora, ffn.lora.w2).grads(cast(Rows, a), dy, routing.offsets_E)
    grads = Inputs(weights=WeightGrads(w2=dw2), shared=WeightGrads(w2=dw2_shared), adapters=adapter_grads)
    return [*pack(flags, grads), *pack(halfway_flags(spec, needed.x, needs_dbias), (routed, shared))]


def _routed_experts_gradients(
    halfway: list[Tensor],
    saved: list[Tensor],
    needs: list[bool],
    dim: int,
    dtype: torch.dtype,
    weights: list[Tensor | None],
    shared_weights: list[Tensor | None],
    biases: list[Tensor | None],
    adapters: list[Tensor],
    layer: str,
) -> list[Tensor]:
    """The second half of a backward: the last gradients of :func:`titan_fp8moe.layer.saved.gradients_flags`.
    They are those of x, scores and biases, and of GEMM 1's weights and adapters.

    Args:
        halfway: what the first half has left to this one.
        saved: of the forward, without what is of GEMM 2.
        needs: which of :class:`Inputs` need gradients.
        dim, dtype: D, and the dtype of x.
    """
    spec = decode(LayerSpec, layer)
    needed = Inputs.of(needs, spec.expert.biased)
    _, flags = gradients_flags(needed, spec.lora)
    of_forward: Saved = unpack(saved_flags(spec, of_gemm_2=False), iter(saved))
    routed, shared = unpack(halfway_flags(spec, needed.x, any(needed.biases or ())), iter(halfway))
    routing, addend = of_forward.routing, shared and shared.dx
    tokens = BACKENDS[spec.route.backend].resume(of_forward.state, routing, spec.route, dim)
    with_dx = tokens.returns_gradients(needed.x)
    ffn, operands = _ffn(spec, routing, biases, adapters), WeightOperands(weights, spec.expert)
    pending, returned, dx_MD = None, Returned(None), None
    dw13 = dw13_shared = None
    adapter_grads: Any = flags.adapters  # pack() reads no value whose flag is false
    with tokens.guard():
        if with_dx:
            with operands.held:
                dx_MD = ffn.product(routed.dh, operands.transposed(W13, of_forward.generations), ffn.lora.w13_t, dim)
        if with_dx or needed.topk_scores:
            pending = tokens.send_back(dx_MD, routed.ds_M)
            dx_MD = None
            if not tokens.travels:  # the rows are freed before w1's and w3's gradients are made
                returned, pending = tokens.finish(pending, dtype, addend), None
        if flags.weights.w13 or any(flags.adapters):
            x = tokens.arrived_rows(of_forward.arrived)
            if flags.weights.w13:
                dw13 = ffn.w13_grad(x, routed.dh, operands)
            if any(flags.adapters):
                of_w13 = cast(GemmLora, ffn.lora.w13)
                adapter_grads = of_w13.grads(ffn.in_expert_order(x), routed.dh, routing.offsets_E)
        if flags.shared.w13:
            saved_shared = of_forward.shared_with_q
            shared_ffn = group.ffn_of_group(saved_shared.rows, spec.shared_expert, spec.shared_backward)
            shared_operands = WeightOperands(shared_weights, spec.shared_expert)
            dw13_shared = shared_ffn.w13_grad(saved_shared.rows.quantized, shared.dh, shared_operands)
        if pending is not None:
            returned = tokens.finish(pending, dtype, addend)
    ds_T = shared.ds_M.clone() if needed.shared_scores else None  # an op returns no memory of its arguments
    dbiases: Any = needed.biases
    if ffn.biases and routed.dbias is not None:
        dbiases = ffn.biases.gradients(routed.dbias, dbiases)
    of_weights = WeightGrads(dw13), WeightGrads(dw13_shared)
    return pack(flags, Inputs(returned.rows_TD, returned.ds_TK, None, None, ds_T, *of_weights, dbiases, adapter_grads))


_forward_op = custom_op(_routed_experts_forward)
_hidden_gradients_op = custom_op(_routed_experts_hidden_gradients, of_backward=True)
_gradients_op = custom_op(_routed_experts_gradients, of_backward=True)

SAVED_OPS = (_forward_op, *group.FORWARD_OPS)
"""The ops that per-op activation checkpointing must keep."""


def _signature(spec: LayerSpec, x_TD: Tensor, top_k: int, needs_grad: bool) -> int:
    """31 bits: a checksum of the settings that a group's ranks must have in common, and whether this one needs
    gradients. Signatures travel with the dispatch counts, which already need one backend and equally many experts."""
    common = x_TD.shape[1], x_TD.dtype, top_k, *spec.backward, *spec.expert, spec.shared
    return zlib.crc32(repr(common).encode()) >> 2 << 1 | (GRADIENTS_NEEDED if needs_grad else 0)


# --- autograd ---------------------------------------------------------------------------------------------------------


class Call(NamedTuple):
    """The arguments of the autograd function that autograd does not see. A cache is None where nothing is kept;
    ``stored`` are weights that are stored in FP8, else None."""

    spec: LayerSpec
    cache: WeightCache | None
    shared_cache: WeightCache | None
    stored: ExpertWeights[Fp8Weight] | None


class ExpertsFunction(torch.autograd.Function):
    """A layer. Its arguments are those of :class:`Inputs`, and a :class:`Call`."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        *tensors, call = args
        spec = call.spec
        inputs, ctx.placements = _local(Inputs.of(tensors, spec.expert.biased))
        weights, biases, adapters = call.stored or inputs.weights, list(inputs.biases or ()), list(inputs.adapters)
        ctx.copies = call.cache and copies_for(call.cache, weights, spec.expert)
        ctx.shared_copies = call.shared_cache and copies_for(
            call.shared_cache, one_expert(inputs.shared), spec.shared_expert
        )
        spec = spec._replace(kept=ctx.copies is not None, shared_kept=ctx.shared_copies is not None)
        layer = encode(spec)
        needs_x, needs_scores, *_ = ctx.needs_input_grad
        with weights.on_device() as on_device:
            packed = _packed(ctx, spec, on_device, inputs.shared)
            out, *saved = _forward_op(
                inputs.x, inputs.topk_scores, inputs.topk_ids, inputs.shared_scores, needs_x or needs_scores, *packed,
                biases, adapters, inputs.nan_flags, layer,
            )  # fmt: skip
        saved_weights, ctx.weights = weights.for_backward()
        # FSDP refills the aliases' memory before the backward, so that it cannot quantize stale values.
        ctx.save_for_backward(*aliases((*saved_weights, *inputs.shared, *biases, *adapters)), *saved)
        ctx.sizes = len(saved_weights), len(inputs.shared), len(biases), len(adapters)
        ctx.dim, ctx.x_dtype = inputs.x.shape[1], inputs.x.dtype
        # The flags are not saved: hooks of saved tensors may return copies.
        ctx.nan_flags, ctx.spec, ctx.layer = inputs.nan_flags, spec, layer
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor):  # pyrefly: ignore[bad-override] # one gradient per argument
        spec, layer, needs = ctx.spec, ctx.layer, list(ctx.needs_input_grad[:-1])
        needed = Inputs.of(needs, spec.expert.biased)
        saved, parts = list(ctx.saved_tensors), []
        for size in ctx.sizes:
            parts.append(saved[:size])
            saved = saved[size:]
        values, shared, biases, adapters = parts
        weights, shared = ctx.weights or ExpertWeights.unpack(values), ExpertWeights(*shared)
        with weights.on_device() as on_device:
            packed = _packed(ctx, spec, on_device, shared)
            parameters = *packed, biases, adapters
            flat = iter(_hidden_gradients_op(dout, saved, needs, *parameters, ctx.nan_flags, layer))
            first_flags, last_flags = gradients_flags(needed, spec.lora)
            first, halfway = unpack(first_flags, flat), list(flat)
            of_gemm_2 = spec.backward.num_saved_of_gemm_2
            of_gemm_2 += spec.shared_backward.num_saved_of_gemm_2 if spec.shared else 0
            del saved[len(saved) - of_gemm_2 :]  # frees h and a, but not in a plain eager step, where autograd has them
            last = _gradients_op(halfway, saved, needs, ctx.dim, ctx.x_dtype, *parameters, layer)
        grads = join_gradients(first, unpack(last_flags, iter(last)))
        dw, dbiases = grads.weights.apart(weights), grads.biases
        dw_shared = group.matrix_grads(grads.shared, shared) if spec.shared else NO_WEIGHTS
        if ctx.placements is not None:
            of_weights, of_biases = ctx.placements
            dw = ExpertWeights(*map(place_as, dw, of_weights))
            dbiases = dbiases and Biases(*map(place_as, dbiases, of_biases))
        return *grads._replace(weights=dw, shared=dw_shared, biases=dbiases).flatten(), None


def _packed(
    ctx: Any, spec: LayerSpec, weights: ExpertWeights, shared: ExpertWeights
) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """The weights of routed and of shared experts as an op takes them."""
    routed = pack_weights(weights, ctx.copies, spec.backward.weights != "trained")
    if not spec.shared:
        return routed, []
    return routed, pack_weights(one_expert(shared), ctx.shared_copies, spec.shared == "frozen")


def _local(inputs: Inputs) -> tuple[Inputs, tuple[Any, Any] | None]:
    """The inputs with this rank's part of weights and biases that are DTensors, and the specs of the two for
    :func:`place_as`. Not by to_local(), whose autograd nodes take longer than this one."""
    if not isinstance(inputs.weights.w1, DTensor):
        return inputs, None
    weights, of_weights = _local_parts(inputs.weights)
    biases, of_biases = _local_parts(inputs.biases or ())
    local = inputs._replace(weights=ExpertWeights(*weights), biases=Biases(*biases) if biases else None)
    return local, (of_weights, of_biases)


def _local_parts(parameters: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """The local tensors of DTensors, and their specs; None for None."""
    local = [None if p is None else p._local_tensor for p in parameters]
    return local, [None if p is None else p._spec for p in parameters]


_WHY_EAGERLY = 'the all-to-all reads split sizes on the host; only dispatch = "symmetric" can be part of a graph'
_eagerly = torch.compiler.disable(ExpertsFunction.apply, reason=_WHY_EAGERLY)


def run_experts(inputs: Sequence[Any], call: Call) -> Tensor:
    """A layer's output. ``inputs``: of :class:`Inputs`, flattened."""
    apply = _eagerly if BACKENDS[call.spec.route.backend].syncs_host else ExpertsFunction.apply
    return cast(Tensor, apply(*inputs, call))
