"""One MoE layer: the autograd functions that cast, dispatch, run the expert FFN and combine.

    forward   x --quantize--> fp8 --send, receive--> expert FFN --send_back, finish, bf16--> sum
    backward  dy --quantize--> fp8 --send, receive--> FFN backward --send_back, finish, bf16--> sum

The two quantizations are the recipe's two casts. A token is quantized once, before it is replicated to its experts. In
the backward its gradient is the same for all its experts, so it is quantized once as well.

**Why one function.** Autograd casts the gradient of an fp8 tensor to fp8, so no fp8 tensor may cross an autograd edge.
And FSDP frees and refills the weights around the module that owns them, so all that reads them happens in its call.

**How PyTorch sees it.** Autograd sees :class:`ExpertsFunction`, and with a dispatch that overlaps also
:class:`FinishFunction`. FSDP sees the module's call; the parameters are saved, never a quantized copy. Per-op
checkpointing sees one op per function (:data:`SAVED_OPS`), keeps its results, and so repeats no transfer and no GEMM. A
compiled graph holds both directions, unless the dispatch syncs with the host.

**What is saved**, by name (:mod:`titan_fp8moe.layer.saved`)::

    x --quantize--> q, scale --send, receive--> rows --GEMM 1--> h ------activation------> a --GEMM 2--> y --> out
                    |                           |                |                         |
                    |              routing, state, tokens       ffn.h, ffn.h_scale        ffn.a_q, ffn.a_scale
                    +-- shared_rows --GEMM 1--> shared_ffn.h ...

Shared experts, which serve every token, are an FFN with one group of rows. They read the rows that are quantized for
the routed experts, and their results join the same sums.

A dispatch that overlaps ends its forward in a second function, which begins its backward. The shared experts run there,
and ``meanwhile`` runs between the two functions, in both directions. The weight gradients run while the backward's
``send_back`` travels. :class:`InFlight` carries tensors from the second function's backward to the first's. The second
function frees the forward's payload as soon as it is summed, since checkpointing may keep the tensor. In a backward the
payloads go with their last reference.
"""

import contextlib
import functools
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.utils.flop_counter
from torch import Tensor
from torch.distributed.tensor import DTensor

from titan_fp8moe import dispatch, ops
from titan_fp8moe.dispatch import Pairs
from titan_fp8moe.dispatch.base import GRADIENTS_NEEDED, Pending, Returned
from titan_fp8moe.kernels import warm_up
from titan_fp8moe.layer import on_meta
from titan_fp8moe.layer.ffn import FFN, HiddenGradients
from titan_fp8moe.layer.group import FORWARD_OPS, GroupBackward, group_backward, group_ffn, group_of, product_flops
from titan_fp8moe.layer.host import HostLayer, for_backward
from titan_fp8moe.layer.lora import NO_LORA, lora_operands
from titan_fp8moe.layer.operands import (
    Packed,
    Read,
    WeightCache,
    aliases,
    backward_operands,
    forward_operands,
    held,
    held_by,
    pack,
)
from titan_fp8moe.layer.saved import Inputs, LayerSpec, Saved, layout
from titan_fp8moe.layer.weights import NO_BIASES, NO_WEIGHTS, Biases, ExpertWeights, one_expert, place_as
from titan_fp8moe.ops import Fp8Weight
from titan_fp8moe.ops.backend import custom_op, once_differentiable
from titan_fp8moe.recipe import group_rows, row_capacity
from titan_fp8moe.rows import GroupRows, NanFlags, Rows
from titan_fp8moe.spec import decode, encode

# --- the ops ----------------------------------------------------------------------------------------------------------

# Parts of Saved: results of the forward's op, those that the second function takes from it, and results of its own op.
_EXPERTS = ("state", "routing", "tokens", "ffn", "copies")
_WHOLE = (*_EXPERTS, "shared_rows", "shared_ffn", "shared_copies")
_STARTED = (*_EXPERTS, "shared_rows")
_HANDED = ("state", "shared_rows")
_FINISHED = ("shared_ffn", "shared_copies")


def _routed_experts_forward(
    x_TD: Tensor,
    topk_scores_TK: Tensor,
    topk_ids_TK: Tensor,
    weights: list[Tensor | None],
    shared_weights: list[Tensor | None],
    adapters: list[Tensor],
    nan_flags: Tensor | None,
    layer: str,
    signature: int,
    b1: Tensor | None = None,
    b2: Tensor | None = None,
    b3: Tensor | None = None,
    shared_scores_T: Tensor | None = None,
) -> list[Tensor]:
    """The forward of a layer; with a dispatch that overlaps, up to ``send_back``.

    Args:
        weights, shared_weights: packed. Where the dispatch overlaps, the kernels of the second compile here, but
            :func:`_routed_experts_finish` reads them.
        adapters: the tensors of :func:`titan_fp8moe.layer.lora.split_lora`; empty without adapters.
        b1, b2, b3: the fields of :class:`Biases`, for experts that have them.
        shared_scores_T: see :class:`Shared`.
        layer: an encoded :class:`LayerSpec`.
        signature: see :func:`_signature`.

    Returns:
        The output and :data:`_WHOLE`. With a dispatch that overlaps instead: a placeholder of the output's gradient,
        the payload in flight, and :data:`_STARTED`.
    """
    spec, nans = decode(LayerSpec, layer), NanFlags.of(nan_flags)
    shapes = [cast(Tensor, w).shape for w in (weights[0], *shared_weights[:1])]
    if warm_up.is_due(kind := (layer, *shapes), x_TD):
        tensors = x_TD, topk_ids_TK, nan_flags, weights, shared_weights
        run = functools.partial(on_meta.experts, _on_meta, *tensors, spec)
        warm_up.compile_ahead(kind, [x_TD, topk_ids_TK, *weights, *shared_weights], run)
    T, E = x_TD.shape[0], shapes[0][0]
    pairs = Pairs(topk_ids_TK, topk_scores_TK, E)
    tokens = dispatch.begin(pairs, spec.route, signature, spec.check_ids)
    group = None
    if spec.shared:
        q, scale, scale_t, end = ops.quantize_group(x_TD, nans.x)
        group, sent = GroupRows(q, scale_t, end), Rows(q[:T], scale[:T])
        if shared_scores_T is not None:
            group = group._replace(score=torch.nn.functional.pad(shared_scores_T, (0, q.shape[0] - T)))
    else:
        q, scale = sent = Rows(*ops.quantize_rows(x_TD, nans.x))
    with held(weights):
        # The operands are made while the counts travel to the host, or the tokens to other ranks.
        pending = None if tokens.syncs_host else tokens.send(sent)
        (w13, w2), copies = forward_operands(weights)
        rows = tokens.receive(pending or tokens.send(sent), [])
        # Shared experts read the same rows, of which there are R, if tokens stay.
        kept = Rows(q, scale) if spec.shared and not tokens.travels else tokens.kept
        del q, scale, sent, pending
        biases = Biases(b1, b2, b3) if spec.expert.biased else None
        lora = NO_LORA if spec.lora is None else lora_operands(spec.lora, adapters, spec.expert)
        ffn = FFN(spec.expert, spec.backward, tokens.routing, nans, cast(Any, biases), lora, x_TD.shape[1])
        h = ffn.product(rows, w13, ffn.lora.w13)
        del rows
        a, saved_ffn = ffn.activate(h)
        del h
        y = ffn.product(a, w2, ffn.lora.w2, ffn.dim)
    pending = tokens.send_back(y, None, ffn.row_bias())
    del y
    saved = Saved(state=tokens.state, routing=tokens.routing, tokens=kept, ffn=saved_ffn, copies=copies)
    if group is not None:
        saved = saved._replace(shared_rows=group)
    if tokens.overlaps:
        return [x_TD.new_empty(0), cast(Tensor, pending.rows), *saved.pack(layout(spec.handing, *_STARTED))]
    shared_y = None
    if group is not None:
        of_shared = group_of(group, spec.expert, spec.shared_backward, nans, x_TD.shape[1])
        shared_y, shared_ffn, shared_copies = group_ffn(of_shared, group, shared_weights)
        saved = saved._replace(shared_ffn=shared_ffn, shared_copies=shared_copies)
    out = cast(Tensor, tokens.finish(pending, x_TD.dtype, shared_y, []).rows_TD)
    return [out, *saved.pack(layout(spec, *_WHOLE))]


def _routed_experts_finish(
    payload: Tensor,
    handed: list[Tensor],
    shared_weights: list[Tensor | None],
    nan_flags: Tensor | None,
    layer: str,
    dim: int,
    dtype: torch.dtype,
) -> list[Tensor]:
    """The layer's output (T, D), once the payload in flight has arrived, and :data:`_FINISHED`. Any shared experts run
    meanwhile. ``handed``: :data:`_HANDED` of the forward."""
    if payload.numel() and not payload.untyped_storage().size():  # it was freed
        raise RuntimeError(
            "activation checkpointing kept the result of routed_experts_forward, but not of routed_experts_finish; let "
            "the policy save all of titan_fp8moe.SAVED_OPS, or neither of the two"
        )
    spec = decode(LayerSpec, layer)
    saved, shared_y = Saved.unpack(layout(spec.handing, *_HANDED), handed), None
    if spec.shared:
        rows = saved.rows_of_shared
        ffn = group_of(rows, spec.expert, spec.shared_backward, NanFlags.of(nan_flags), dim)
        shared_y, shared_ffn, shared_copies = group_ffn(ffn, rows, shared_weights)
        saved = saved._replace(shared_ffn=shared_ffn, shared_copies=shared_copies)
    tokens = spec.dispatch.resume(saved.state, None, spec.route, dim)
    out = cast(Tensor, tokens.finish(Pending(payload), dtype, shared_y, []).rows_TD)
    return [out, *saved.pack(layout(spec, *_FINISHED))]


# One op holds the whole forward (two with a dispatch that overlaps), for per-op activation checkpointing. It keeps the
# results, so a recomputed block neither dispatches nor multiplies again. `recompute` decides what the backward
# recomputes.
_forward_op = custom_op(_routed_experts_forward)
_finish_op = custom_op(_routed_experts_finish)

SAVED_OPS = (_forward_op.op, _finish_op.op, *FORWARD_OPS)
"""The ops that per-op activation checkpointing must keep; of the first two, both or neither."""


@torch.utils.flop_counter.register_flop_formula(torch.ops.titan_fp8moe.routed_experts_forward)
def _forward_flops(x, scores, topk_ids, weights, shared_weights, adapters, *_: Any, **__: Any) -> int:
    """FLOPs of the layer's GEMMs, for the rows that buffers hold without expert parallelism, padding included."""
    (T, K), E = topk_ids, weights[0][0]
    rows = row_capacity(T * K, E)
    of_lora = sum(2 * rows * N * K for _, N, K in adapters)
    return product_flops(rows, weights) + product_flops(group_rows(T), shared_weights) + of_lora


def _signature(spec: LayerSpec, inputs: Inputs, needs: Inputs) -> int:
    """31 bits: a checksum of the settings that a group's ranks must have in common, and whether this one needs
    gradients. Signatures travel with the dispatch counts, which already need one backend and equally many experts."""
    x, top_k, shared = inputs.x, inputs.topk_ids.shape[1], spec.shared
    common = _checksum(x.shape[1], x.dtype, top_k, *spec.backward, *spec.expert, shared) >> 2
    return common << 1 | (GRADIENTS_NEEDED if needs.x or needs.topk_scores else 0)


@torch.compiler.assume_constant_result
def _checksum(*values: Any) -> int:
    return zlib.crc32(repr(values).encode())


# --- autograd ---------------------------------------------------------------------------------------------------------


class Call(NamedTuple):
    """The arguments of both autograd functions that autograd does not see. A cache is None where nothing is kept;
    ``stored`` are weights that are stored in FP8, else None. ``host`` copies them from host memory, else None."""

    spec: LayerSpec
    cache: WeightCache | None
    shared_cache: WeightCache | None
    stored: ExpertWeights[Fp8Weight] | None
    host: HostLayer | None = None


def _pack_shared(matrices: ExpertWeights[Tensor], call: Call) -> Packed:
    if not call.spec.shared:
        return Packed([])
    return pack(one_expert(matrices), call.shared_cache, call.spec.shared == "frozen")


class Started(NamedTuple):
    """The start of a layer's backward: the output's gradient in flight, and what its shared experts' backward has made:
    gradients of the input and of the scores, where they are needed."""

    pending: Pending
    shared_dx_RD: Tensor | None = None
    shared_ds_T: Tensor | None = None


class InFlight:
    """Carries :class:`Started` from the autograd node that begins the backward to the node that ends it, which needs
    the input's gradient or not (``needs_dx``). As a gradient, the payload would be checked and cast by autograd, and
    the input's gradient joins a sum. ``shared`` are the weights of the shared experts."""

    stream: "torch.cuda.Stream | None"
    needs_dx: bool = True
    started: Started | None = None

    def __init__(self, device: torch.device, shared: ExpertWeights[Tensor]):
        self.shared = shared
        self.stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def check_stream(self) -> None:
        """Raises RuntimeError if the current stream is not the one of the layer's begin. Autograd does not see the
        payloads, so it would not order two streams, in either direction."""
        if self.stream is not None and self.stream != torch.cuda.current_stream(self.stream.device):
            raise RuntimeError(
                "the CUDA stream has changed while tokens travelled; let meanwhile() restore the current stream "
                "(with torch.cuda.stream(...)) before it returns"
            )

    def take(self) -> Started:
        started, self.started = self.started, None  # the node lives as long as the loss
        if started is None:
            raise RuntimeError("the experts' backward ran without the dispatch of its gradients; was it run twice?")
        return started


_ON_DEVICE = contextlib.nullcontext()


class ExpertsFunction(torch.autograd.Function):
    """A layer; with a dispatch that overlaps, up to ``send_back`` and from there."""

    @staticmethod
    def forward(ctx: Any, *args: Any):
        *tensors, call, in_flight = args
        spec, signature = call.spec, 0
        inputs, ctx.placements = _local(Inputs.of(tensors, spec.expert.biased))
        if spec.dispatch.travels:
            signature = _signature(spec, inputs, Inputs.of(ctx.needs_input_grad, False))
        shared = _pack_shared(inputs.shared if in_flight is None else in_flight.shared, call)
        with call.host or _ON_DEVICE:
            weights = call.stored or inputs.weights.apart(spec.expert)
            if call.host is not None:
                weights = call.host.take(weights)
            routed = pack(weights, call.cache, spec.backward.weights != "trained")
            out, *results = _forward_op(
                inputs.x,
                inputs.topk_scores,
                inputs.topk_ids,
                routed.tensors,
                shared.tensors,
                inputs.adapters,
                inputs.nan_flags,
                encode(spec),
                signature,
                *(inputs.biases or NO_BIASES),
                inputs.shared_scores,
            )
        handed, parts = [], _WHOLE
        if spec.dispatch.overlaps:
            payload, *results = results
            saved, parts = Saved.unpack(layout(spec.handing, *_STARTED), results), _EXPERTS
            handed = [payload, *saved.pack(layout(spec.handing, *_HANDED))]
            results = saved.pack(layout(spec, *_EXPERTS))
            ctx.mark_non_differentiable(*handed)
            ctx.set_materialize_grads(False)  # no zeros for those
            in_flight.needs_dx = Inputs.of(ctx.needs_input_grad, False).x
        stored: Any = call.stored if call.host is None else None  # the buffer will hold other layers
        parameters = *(stored or inputs.weights).pack(), *inputs.shared, *(inputs.biases or ()), *inputs.adapters
        # FSDP refills the aliases' memory before the backward, so that it cannot quantize stale values.
        ctx.save_for_backward(*aliases(parameters), *results)
        # The flags are not saved: hooks of saved tensors may return copies.
        ctx.parts = *(("weights", "scales") if stored else ("weights",)), "shared_weights", "biases", "lora", *parts
        ctx.spec, ctx.nan_flags, ctx.in_flight = spec, inputs.nan_flags, in_flight
        ctx.read, ctx.shared_read = routed.read(), shared.read()
        ctx.x_dtype, ctx.dim = inputs.x.dtype, inputs.x.shape[1]
        ctx.host, ctx.in_host = call.host, call.host and for_backward(call.stored)
        return (out, *handed) if handed else out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor, *_: Any):  # pyrefly: ignore[bad-override] # one gradient per result
        spec = ctx.spec
        needs = Inputs.of(ctx.needs_input_grad[:-2], spec.expert.biased)
        saved = Saved.unpack(layout(spec, *ctx.parts), ctx.saved_tensors)
        with ctx.host or _ON_DEVICE:
            if ctx.host is not None:
                saved = saved._replace(weights=ctx.host.take(*ctx.in_host))
            backward = _Backward(spec, needs, NanFlags.of(ctx.nan_flags), saved, ctx.dim)
            del saved
            if ctx.in_flight is None:
                backward.start(dout, ctx.shared_read)
            else:
                backward.started = ctx.in_flight.take()
            backward.hidden(ctx.read, dout)
        grads = backward.finish(ctx.x_dtype)
        if ctx.placements is not None:
            of_weights, of_biases = ctx.placements
            grads = grads._replace(weights=ExpertWeights(*map(place_as, grads.weights, of_weights)))
            if grads.biases is not None:
                grads = grads._replace(biases=Biases(*map(place_as, grads.biases, of_biases)))
        return *grads.flatten(), None, None


class _Backward:
    """A layer's backward in three steps. Between them rows travel, beside what does not need them::

        start     the output's gradient is cast and sent ── shared experts' backward, weights' operands
        hidden    it is received; gradients of the hidden rows, then of the experts' input, which is sent back
        finish    weight gradients ── each token's gradients arrive and are summed

    Attributes are dropped after their last use, so that their memory serves what follows.
    """

    started: Started
    shared: GroupBackward | None = None
    grads: HiddenGradients
    pending: Pending | None = None

    def __init__(self, spec: LayerSpec, needs: Inputs, nans: NanFlags, saved: Saved, dim: int):
        self.spec, self.needs, self.nans, self.dim = spec, needs, nans, dim
        self.saved: Saved = saved
        self.weights: Any = saved.stored_weights or saved.weights
        self.biases = saved.biases if spec.expert.biased else None
        routing = saved.routing
        self.tokens = spec.dispatch.resume(saved.state, routing, spec.route, dim)
        self.x = None
        if spec.backward.keeps_rows:
            self.x = self.tokens.kept_rows(saved.tokens, dim, routing.row_TK.shape[1])
        lora = NO_LORA if spec.lora is None else lora_operands(spec.lora, saved.lora, spec.expert)
        self.ffn = FFN(spec.expert, spec.backward, routing, nans, self.biases, lora, dim)

    def start(self, dout_TD: Tensor, shared_read: Read | None) -> None:
        self.started, self.shared = _start(
            self.tokens, dout_TD, self.spec, self.saved, shared_read, self.needs.x, self.nans
        )

    def hidden(self, read: Read | None, dout: Tensor) -> None:
        spec, ffn, tokens = self.spec, self.ffn, self.tokens
        saved, copies = self.saved.ffn, self.saved.copies
        del self.saved
        with held_by(read):
            operands = backward_operands(self.weights.apart(spec.expert), read, copies, spec.backward, dout)
            w13, w13_t, w2_t = operands
            saved = ffn.with_hidden(saved, self.x, w13)
            pending, dx_RD, ds_T = self.started
            dy = tokens.receive(pending, [t for t in (dx_RD, ds_T, saved.h, w13_t.q, w2_t.q) if t is not None])
            self.started = Started(Pending(None), dx_RD, ds_T)
            del pending, operands, w13
            self.grads = grads = ffn.hidden_gradients(dy, saved, w2_t, any(self.needs.biases or ()))
            del dy, saved, w2_t  # h is freed after its last use, also where checkpointing has kept it
            with_dx = tokens.returns_gradients(self.needs.x)
            dx_MD = ffn.product(grads.dh, w13_t, ffn.lora.w13_t, self.dim) if with_dx else None
        if with_dx or self.needs.topk_scores:
            self.pending = tokens.send_back(dx_MD, grads.ds_M)

    def finish(self, dtype: torch.dtype) -> Inputs:
        """The inputs' gradients."""
        spec, needs, ffn, grads, tokens = self.spec, self.needs, self.ffn, self.grads, self.tokens
        _, shared_dx_RD, shared_ds_T = self.started
        returned = Returned(None)
        if self.pending is not None and not tokens.travels:  # the rows are freed before weight gradients are made
            returned, self.pending = tokens.finish(self.pending, dtype, shared_dx_RD, []), None
        dw = ffn.weight_grads(self.x, grads, self.weights, needs.weights)
        dbiases = None if self.biases is None else self.biases.gradients(grads.dbias, cast(Any, needs.biases))
        dlora: Sequence[Tensor | None] = ()
        if spec.lora is not None:
            found = ffn.lora_grads(cast(Rows, self.x), grads) if any(needs.adapters) else {}
            dlora = [found[name] if need else None for name, need in zip(spec.lora.fields, needs.adapters, strict=True)]
        shared_dw = NO_WEIGHTS if self.shared is None else self.shared.weight_grads(needs.shared)
        if self.pending is not None:
            beside = [t for t in (*dw, *dlora, *shared_dw) if t is not None]
            returned = tokens.finish(self.pending, dtype, shared_dx_RD, beside)
        return Inputs(returned.rows_TD, returned.ds_TK, None, None, shared_ds_T, dw, shared_dw, dbiases, dlora)


def _local(inputs: Inputs) -> tuple[Inputs, tuple[Any, Any] | None]:
    """The inputs with this rank's part of weights and biases that are DTensors, and the specs of the two for
    :func:`place_as`. Not by to_local(), whose autograd nodes take longer than this one."""
    if not isinstance(inputs.weights.w1, DTensor):
        return inputs, None
    w1, w2, w3 = cast(Any, inputs.weights)
    w3_spec, w3_local = (None, None) if w3 is None else (w3._spec, w3._local_tensor)
    local = inputs._replace(weights=ExpertWeights(w1._local_tensor, w2._local_tensor, w3_local))
    biases, of_biases = cast(Any, inputs.biases), None
    if biases is not None:
        of_biases = [None if b is None else b._spec for b in biases]
        local = local._replace(biases=Biases(*(None if b is None else b._local_tensor for b in biases)))
    return local, ((w1._spec, w2._spec, w3_spec), of_biases)


def _start(
    tokens: dispatch.Dispatch,
    dout_TD: Tensor,
    spec: LayerSpec,
    saved: Saved,
    read: Read | None,
    with_dx: bool,
    nans: NanFlags,
) -> tuple[Started, GroupBackward | None]:
    """The layer's second cast; sends the rows, beside which the shared experts' backward runs."""
    if not spec.shared:
        return Started(tokens.send(Rows(*ops.quantize_rows(dout_TD, nans.dy)))), None
    T = dout_TD.shape[0]
    q, scale, scale_t, _ = ops.quantize_group(dout_TD, nans.dy)
    pending = tokens.send(Rows(q[:T], scale[:T]))
    if torch.compiler.is_compiling() and pending.extra is not None:
        scale_t = ops.after(scale_t, [pending.extra])
    rows, matrices = saved.rows_of_shared, saved.shared_weights
    ffn = group_of(rows, spec.expert, spec.shared_backward, nans, dout_TD.shape[1])
    dx_RD, shared = group_backward(
        ffn, rows, matrices, read, saved.shared_copies, saved.shared_ffn, Rows(q, scale_t), with_dx
    )
    return Started(pending, dx_RD, shared.grads.ds_M[:T] if spec.shared_scored else None), shared


class FinishFunction(torch.autograd.Function):
    """The end of a forward whose dispatch overlaps; in the backward, the start of the dispatch of the output's
    gradient. The shared experts run here in both directions, while tokens travel."""

    @staticmethod
    def forward(ctx: Any, placeholder, payload, nan_flags, w1, w2, w3, call, in_flight, dim, dtype, *handed):
        in_flight.check_stream()
        spec, matrices = call.spec, ExpertWeights(w1, w2, w3)  # of the shared experts
        shared = _pack_shared(matrices, call)
        out, *results = _finish_op(payload, [*handed], shared.tensors, nan_flags, encode(spec), dim, dtype)
        if torch._C._len_torch_dispatch_stack():
            # Per-op checkpointing that keeps this op alone has repeated the forward's, and not run this one.
            ops.wait(payload)
        # Per-op checkpointing keeps every result of the forward op, this one too, but nobody reads it again.
        payload.untyped_storage().resize_(0)
        if spec.handing is not spec:
            handed = Saved.unpack(layout(spec.handing, *_HANDED), handed).pack(layout(spec, *_HANDED))
        ctx.save_for_backward(*aliases(matrices), *handed, *results)
        ctx.spec, ctx.in_flight, ctx.nan_flags = spec, in_flight, nan_flags
        ctx.read = shared.read()
        ctx.placeholder_dtype, ctx.dim = placeholder.dtype, dim
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_TD: Tensor):  # pyrefly: ignore[bad-override] # one gradient per result
        spec, in_flight = ctx.spec, ctx.in_flight
        needs, nans = ctx.needs_input_grad, NanFlags.of(ctx.nan_flags)
        experts_node, _ = ctx.next_functions[0]
        saved = Saved.unpack(layout(spec, "shared_weights", *_HANDED, *_FINISHED), ctx.saved_tensors)
        tokens = spec.dispatch.resume(saved.state, None, spec.route, ctx.dim)
        in_flight.started, shared = _start(tokens, dout_TD, spec, saved, ctx.read, in_flight.needs_dx, nans)
        del saved
        shared_dw = NO_WEIGHTS if shared is None else shared.weight_grads(ExpertWeights(*needs[3:6]))
        # needs_input_grad is no answer: torch.autograd.grad may ask for the shared experts' gradients only.
        if experts_node is None or not torch._C._will_engine_execute_node(experts_node):
            ops.wait(cast(Tensor, in_flight.take().pending.rows))  # other ranks may need the gradients
        placeholder = dout_TD.new_empty(0, dtype=ctx.placeholder_dtype)
        return placeholder, None, None, *shared_dw, *(None for _ in needs[6:])


# Under torch.compile the two would lie in graphs that know nothing of each other, and the split sizes are data.
_WHY_EAGERLY = 'the all-to-all reads split sizes on the host; only dispatch = "symmetric" can be part of a graph'
start_eagerly = torch.compiler.disable(ExpertsFunction.apply, reason=_WHY_EAGERLY)
finish_eagerly = torch.compiler.disable(FinishFunction.apply, reason=_WHY_EAGERLY)
in_flight_eagerly = torch.compiler.disable(InFlight, reason=_WHY_EAGERLY)


def run_overlapped(
    inputs: Inputs, call: Call, meanwhile: Callable[[], Tensor] | None = None
) -> tuple[Tensor, Tensor | None]:
    """A layer's output with a dispatch that overlaps, and the result of ``meanwhile``."""
    x, in_flight = inputs.x, in_flight_eagerly(inputs.x.device, inputs.shared)
    start = inputs._replace(shared=NO_WEIGHTS).flatten()
    placeholder, payload, *handed = start_eagerly(*start, call, in_flight)
    extra = None if meanwhile is None else meanwhile()
    tensors = placeholder, payload, inputs.nan_flags, *inputs.shared
    return finish_eagerly(*tensors, call, in_flight, x.shape[1], x.dtype, *handed), extra


def _on_meta(inputs: Inputs, spec: LayerSpec) -> Tensor:
    """A layer's output, as :func:`titan_fp8moe.layer.run.run_layer` computes it, for its kernels alone."""
    call = Call(spec, None, None, None)
    if spec.dispatch.overlaps:
        return run_overlapped(inputs, call)[0]
    return cast(Tensor, ExpertsFunction.apply(*inputs.flatten(), call, None))
