"""One MoE layer: the autograd functions that cast, dispatch, run the expert FFN and combine.

    forward   x --quantize--> fp8 --send, receive--> expert FFN --send_back, finish, bf16--> sum
    backward  dy --quantize--> fp8 --send, receive--> FFN backward --send_back, finish, bf16--> sum

The two quantizations are the recipe's two casts. A token is quantized once, before it is replicated to its experts. In
the backward its gradient is the same for all its experts, so it is quantized once as well.

**Why one function.** Autograd casts the gradient of an fp8 tensor to fp8, so no fp8 tensor may cross an autograd edge.
And FSDP frees and refills the weights around the module that owns them, so all that reads them happens in its call.

**How PyTorch sees it.** Autograd sees :class:`_RoutedExperts`, and with a dispatch that overlaps also :class:`_Finish`.
FSDP sees the module's call; the parameters are saved, never a quantized copy. Per-op checkpointing sees one op per
function (:data:`SAVED_OPS`), keeps its results, and so repeats no transfer and no GEMM. A compiled graph holds both
directions, unless the dispatch syncs with the host.

**What is saved**, by name (:mod:`titan_fp8moe.layer.saved`)::

    x --quantize--> q, scale --send, receive--> rows --GEMM 1--> h ------activation------> a --GEMM 2--> y --> out
                    |                           |                |                         |
                    |              routing, state, tokens       ffn.h, ffn.h_scale        ffn.a_q, ffn.a_scale
                    +-- shared_rows --GEMM 1--> shared_ffn.h ...

Shared experts, which serve every token, are an FFN with one group of rows. They read the rows that are quantized for
the routed experts, and their results join the same sums.

A dispatch that overlaps ends its forward in a second function, which begins its backward. The shared experts run there,
and ``meanwhile`` runs between the two functions, in both directions. The weight gradients run while the backward's
``send_back`` travels. :class:`InFlight` carries tensors from the second function's backward to the first's.
"""

import functools
import warnings
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
import torch.utils.flop_counter
from torch import Tensor
from torch.distributed.tensor import DTensor

from titan_fp8moe import dispatch, ops
from titan_fp8moe.config import RECIPE, TRANSPORT, Fp8FlowMoEConfig, require_config
from titan_fp8moe.dispatch import Pairs
from titan_fp8moe.dispatch.base import Pending, Returned
from titan_fp8moe.kernels import warm_up
from titan_fp8moe.layer import on_meta
from titan_fp8moe.layer.checks import check_biases, check_inputs, check_shared
from titan_fp8moe.layer.ffn import FFN, HiddenGradients
from titan_fp8moe.layer.group import FORWARD_OPS, group_dgrad, group_ffn, group_of, product_flops
from titan_fp8moe.layer.lora import NO_LORA, Lora, lora_operands, split_lora
from titan_fp8moe.layer.operands import (
    Copies,
    Read,
    WeightCache,
    aliases,
    backward_operands,
    buffers_of,
    forward_operands,
    held,
    held_by,
    pack,
    usable,
)
from titan_fp8moe.layer.saved import FinishInputs, Inputs, LayerSpec, Saved, layout
from titan_fp8moe.layer.weights import (
    NO_BIASES,
    NO_WEIGHTS,
    Biases,
    ExpertWeights,
    SharedExperts,
    are_frozen,
    one_expert,
    place_as,
    without_expert_dim,
)
from titan_fp8moe.ops import Fp8Weight
from titan_fp8moe.ops.backend import custom_op, once_differentiable, refuse_export
from titan_fp8moe.recipe import group_rows, row_capacity
from titan_fp8moe.rows import GroupRows, NanFlags, Rows
from titan_fp8moe.spec import ExpertSpec, decode, encode

_DEFAULTS = Fp8FlowMoEConfig()  # made at import: torch.compile cannot trace its checks


class Experts(NamedTuple):
    """The experts of one MoE layer, as the modules of all adapters hand them over.

    Attributes:
        weights: this rank's, tensors, DTensors over ``ep_group`` or :class:`titan_fp8moe.Fp8Weight`.
        ep_group: the ranks over which the experts are spread, in order; None where all experts are here.
        cache: keeps quantized copies of the weights; None where nothing is kept.
        frozen: none of the weights is trained.
        check_ids: refuse ids that are no expert's; else they count as -1.
        nan_flags: the tensor of :meth:`titan_fp8moe.rows.NanFlags.of`; 1 is stored where an operand holds a NaN or Inf.
    """

    weights: ExpertWeights[Any]
    config: Fp8FlowMoEConfig
    ep_group: dist.ProcessGroup | None = None
    expert: ExpertSpec = ExpertSpec()
    cache: WeightCache | None = None
    frozen: bool = False
    biases: Biases[Tensor] | None = None
    lora: Lora | None = None
    check_ids: bool = True
    nan_flags: Tensor | None = None


class Shared(NamedTuple):
    """An FFN that serves every token, with the routed experts' activation. It reads the rows that are quantized for
    them, in both directions, and adds to their sums.

    Attributes:
        weights: w1 and w3 (H, D), w2 (D, H), without a gate w3 None.
        cache, frozen: as of :class:`Experts`.
        scores: (T,) fp32, by which its output is multiplied; or None.
    """

    weights: ExpertWeights[Tensor]
    cache: WeightCache | None = None
    frozen: bool = False
    scores: Tensor | None = None


def routed_experts(
    x: Tensor,
    w1: Tensor | Fp8Weight,
    w2: Tensor | Fp8Weight,
    w3: Tensor | Fp8Weight | None,
    topk_ids: Tensor,
    topk_scores: Tensor,
    *,
    config: Fp8FlowMoEConfig | None = None,
    ep_group: dist.ProcessGroup | None = None,
    score_before_experts: bool = False,
    meanwhile: Callable[[], Tensor] | None = None,
    activation: str = "swiglu",
    activation_parameters: dict[str, float] | None = None,
    b1: Tensor | None = None,
    b2: Tensor | None = None,
    b3: Tensor | None = None,
    interleaved: bool = False,
    lora: Lora | None = None,
    shared: SharedExperts | None = None,
) -> Tensor:
    """Sum over a token's experts of score * (W2 activation(W1 x + b1, W3 x + b3) + b2), in FP8; by default
    silu(W1 x) * (W3 x) without biases. Experts without a gate compute W2 activation(W1 x + b1) + b2.

    Differentiable once in ``x``, ``topk_scores``, the weights, biases and adapters, and whatever ``meanwhile`` reads.

    Args:
        x: (T, D) bf16 or fp32.
        w1, w2, w3: gate (E, H, D), down (E, D, H) and up (E, H, D) of this rank's E experts, all bf16 or all fp32.
            D and H are multiples of 16; quantized rows and weights pad both to multiples of 128.

            * Gate and up may be one ``w1`` (E, 2H, D), gate first, with ``w3`` None.
            * An activation without a gate, such as ``"relu2"``, has one projection ``w1`` (E, H, D), and ``w3`` None.
            * A ``w1`` with ``w3`` None and w2 may be transposes of contiguous (E, D, 2H) and (E, H, D). They are read
              where they lie, and so lie their gradients.
            * All may be :class:`titan_fp8moe.Fp8Weight`, frozen, which are padded themselves. A forward copies ``w1``
              and ``w3`` into one, unless ``w1`` is fused.
        topk_ids: (T, K) int32 or int64, the experts of each token among the experts of all ranks; -1 for none. Another
            id raises ValueError on a CPU, and ends in a device-side assertion on a GPU.
        topk_scores: (T, K) fp32, the router's score of each. bf16 is accepted with a warning.
        config: the recipe's settings and the transport's, :data:`titan_fp8moe.config.RECIPE` and ``TRANSPORT``; by
            default ``Fp8FlowMoEConfig()``.
        ep_group: the ranks over which the experts are spread, in order; None where all experts are here.
        score_before_experts: multiply the experts' input, not their output, by the score.
        meanwhile: computes a tensor (T, D) that is added to the result. It runs while tokens travel between ranks, and
            so does its backward: the place for shared experts. With ``dispatch = "symmetric"`` it runs afterwards.
        activation, activation_parameters: a key of :data:`titan_fp8moe.activations.ACTIVATIONS`, and its parameters by
            name, such as ``"clamped_swiglu"`` with ``dict(limit=7, alpha=1.702, offset=1)``.
        b1, b2, b3: biases of gate (E, H), down (E, D) and up (E, H), all bf16 or all fp32. With ``w3`` None one ``b1``
            has all rows of w1, in their order. All or none. Beside :class:`titan_fp8moe.Fp8Weight`, which pads H to a
            multiple of 128, b1 and b3 are padded with zeros to that H; b2 keeps D.
        interleaved: a ``w1`` (E, 2H, D) holds gate and up of a hidden unit side by side, as gpt-oss does.
        lora: low-rank adapters, which run in bf16 beside the weights. Freeze the weights by ``requires_grad_(False)``.
        shared: shared experts, which read the rows that are quantized for the routed ones, in both directions, and add
            to their sums: no cast and no addition of their own.

    Returns:
        (T, D) in the dtype of ``x``.

    Raises:
        ValueError: for shapes, dtypes, devices or numbers of rows that the kernels cannot take.
        RuntimeError: in torch.func's transforms and torch.jit.trace. With ``dispatch = "symmetric"``, if a rank is
            later than the timeout of ``ep_group``, or if two layers are in flight. Too little room shows later:
            :func:`titan_fp8moe.check_room`.

    Example::

        scores, ids = router(x).softmax(-1).topk(2)
        y = routed_experts(x, w1, w2, w3, ids, scores, meanwhile=lambda: shared_expert(x))
    """
    expert = ExpertSpec.of(activation, activation_parameters, score_before_experts)
    if config is not None:
        require_config(config, "routed_experts", *RECIPE, *TRANSPORT)
    if interleaved:
        expert = expert._replace(interleaved=True)
    biases = None if b1 is b2 is b3 is None else Biases(b1, b2, b3)
    frozen = isinstance(w1, Fp8Weight) or are_frozen(cast(Any, (w1, w2, w3)))
    weights: ExpertWeights[Any] = ExpertWeights(w1, w2, w3)
    experts = Experts(
        weights, config or _DEFAULTS, ep_group, expert, frozen=frozen, biases=cast(Any, biases), lora=lora
    )
    return run_layer(x, topk_ids, topk_scores, experts, shared, meanwhile)


def run_layer(
    x_TD: Tensor,
    topk_ids_TK: Tensor,
    topk_scores_TK: Tensor,
    experts: Experts,
    shared: Shared | SharedExperts | None = None,
    meanwhile: Callable[[], Tensor] | None = None,
) -> Tensor:
    """Runs one MoE layer: the entry of :func:`routed_experts` and of every module. ``shared``: a module's, or as a
    caller gives it, which is checked."""
    if topk_scores_TK.dtype == torch.bfloat16:
        _warn_of_bf16_scores()
        topk_scores_TK = topk_scores_TK.float()
    weights, config, ep_group, expert, cache, frozen, biases, lora, check_ids, nan_flags = experts
    check_inputs(x_TD, weights, topk_ids_TK, topk_scores_TK, expert)
    if biases is not None:
        check_biases(biases, weights, x_TD.shape[1])
        expert = expert._replace(biased=True)
    if shared is not None and not isinstance(shared, Shared):
        check_shared(shared, x_TD, expert)
        shared = Shared(shared.weights, None, are_frozen(shared.weights), shared.scores)
    factors, adapters, backward = None, (), config.backward
    if lora is not None:
        factors, adapters = split_lora(lora, cast(Any, weights))
    if frozen:
        backward = backward._replace(weights="frozen" if lora is None else "adapted")
    of_shared = "" if shared is None else "frozen" if shared.frozen else "trained"
    ffn = shared or _NO_SHARED
    cache, shared_cache = usable(cache, weights.w1), usable(ffn.cache, weights.w1)
    kept = ffn.scores is not None, cache is not None, shared_cache is not None
    spec = LayerSpec(config.route(ep_group), expert, backward, of_shared, check_ids, factors, *kept)
    stored = weights if isinstance(weights.w1, Fp8Weight) else None
    call = _Call(spec, cache, shared_cache, stored)
    given = weights if stored is None else NO_WEIGHTS
    pairs = topk_scores_TK.contiguous(), topk_ids_TK.contiguous()
    inputs = Inputs(x_TD, *pairs, nan_flags, ffn.scores, given, ffn.weights, biases, adapters)
    refuse_export(inputs.flatten())
    if not spec.dispatch.overlaps:
        out = _RoutedExperts.apply(*inputs.flatten(), call, None)
        return out if meanwhile is None else _add(out, meanwhile())
    in_flight = _in_flight(x_TD.device)
    start = inputs._replace(shared=NO_WEIGHTS).flatten()
    placeholder, payload, *handed = _start_eagerly(*start, call, in_flight)
    extra = None if meanwhile is None else meanwhile()
    end = FinishInputs(placeholder, payload, nan_flags, inputs.shared)
    out = _finish_eagerly(*end.flatten(), *handed, call, in_flight, x_TD.shape[1], x_TD.dtype)
    return out if meanwhile is None else _add(out, extra)


_NO_SHARED = Shared(NO_WEIGHTS)


def _add(out_TD: Tensor, extra_TD: Any) -> Tensor:
    """The sum with the result of ``meanwhile``, which must not broadcast."""
    if not isinstance(extra_TD, Tensor) or extra_TD.shape != out_TD.shape:
        got = tuple(extra_TD.shape) if isinstance(extra_TD, Tensor) else extra_TD
        raise ValueError(f"meanwhile must return a tensor of x's shape, {tuple(out_TD.shape)}, got {got}")
    return out_TD + extra_TD


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
        weights, shared_weights: packed; the second are read only where the dispatch does not overlap.
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
    if warm_up.is_due(kind := (layer, cast(Tensor, weights[0]).shape), x_TD):
        tensors = x_TD, topk_ids_TK, nan_flags, weights, shared_weights
        run = functools.partial(on_meta.experts, run_layer, Experts, Shared, *tensors, spec)
        warm_up.compile_ahead(kind, [x_TD, topk_ids_TK, *weights, *shared_weights], run)
    T, E = x_TD.shape[0], cast(Tensor, weights[0]).shape[0]
    pairs = Pairs(topk_ids_TK, topk_scores_TK, E)
    tokens = dispatch.begin(pairs, spec.route, signature, spec.check_ids)
    group = None
    if spec.shared:
        q, scale, scale_t, end = ops.quantize_group(x_TD, nans.x)
        group = GroupRows(q, scale_t, end)
        if shared_scores_T is not None:
            group = group._replace(score=torch.nn.functional.pad(shared_scores_T, (0, q.shape[0] - T)))
    else:
        q, scale = ops.quantize_rows(x_TD, nans.x)
    with held(weights):
        (w13, w2), copies = forward_operands(weights)
        rows = tokens.receive(tokens.send(Rows(q[:T], scale[:T])))
        # Shared experts read the same rows, of which there are R, if tokens stay.
        kept = Rows(q, scale) if spec.shared and not tokens.travels else tokens.kept
        del q, scale
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
    saved = Saved(state=tokens.state, routing=tokens.routing, tokens=kept, ffn=saved_ffn, copies=cast(Any, copies))
    if group is not None:
        saved = saved._replace(shared_rows=group)
    if tokens.overlaps:
        return [x_TD.new_empty(0), cast(Tensor, pending.rows), *saved.pack(layout(spec.handing, *_STARTED))]
    shared_y = None
    if group is not None:
        of_shared = group_of(group, spec.expert, spec.shared_backward, nans, x_TD.shape[1])
        shared_y, shared_ffn, shared_copies = group_ffn(of_shared, group, shared_weights)
        saved = saved._replace(shared_ffn=shared_ffn, shared_copies=cast(Any, shared_copies))
    out = cast(Tensor, tokens.finish(pending, x_TD.dtype, shared_y).rows_TD)
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
    if payload.numel() and not payload.untyped_storage().size():  # _Finish has freed it
        raise RuntimeError(
            "activation checkpointing kept the result of routed_experts_forward, but not of routed_experts_finish; let "
            "the policy save all of titan_fp8moe.SAVED_OPS, or neither of the two"
        )
    spec = decode(LayerSpec, layer)
    saved, shared_y = Saved.unpack(layout(spec.handing, *_HANDED), handed), None
    if spec.shared:
        rows = saved.rows_of_shared
        if warm_up.is_due(kind := (layer, "shared", cast(Tensor, shared_weights[0]).shape), payload):
            run = functools.partial(on_meta.shared, _run_shared, rows, shared_weights, nan_flags, spec, dim)
            warm_up.compile_ahead(kind, [payload, *rows, *shared_weights], run)
        ffn = group_of(rows, spec.expert, spec.shared_backward, NanFlags.of(nan_flags), dim)
        shared_y, shared_ffn, shared_copies = group_ffn(ffn, rows, shared_weights)
        saved = saved._replace(shared_ffn=shared_ffn, shared_copies=cast(Any, shared_copies))
    tokens = spec.dispatch.resume(saved.state, None, spec.route, dim)
    out = cast(Tensor, tokens.finish(Pending(payload), dtype, shared_y).rows_TD)
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
    """FLOPs of all GEMMs, for the rows that buffers hold without expert parallelism, padding included."""
    (T, K), E = topk_ids, weights[0][0]
    rows = row_capacity(T * K, E)
    of_lora = sum(2 * rows * N * K for _, N, K in adapters)
    return product_flops(rows, weights) + product_flops(group_rows(T), shared_weights) + of_lora


@torch.utils.flop_counter.register_flop_formula(torch.ops.titan_fp8moe.routed_experts_finish)
def _finish_flops(payload, handed, shared_weights, *_: Any, **__: Any) -> int:
    """FLOPs of the shared experts' GEMMs, padding included. The last three tensors handed are their rows, q first."""
    return product_flops(handed[-3][0], shared_weights) if shared_weights else 0


def _signature(spec: LayerSpec, inputs: Inputs, needs: Inputs) -> int:
    """31 bits: a checksum of all that a group's ranks must have in common, and whether this one needs gradients."""
    x, top_k, shared = inputs.x, inputs.topk_ids.shape[1], spec.shared
    common = _checksum(x.shape[1], x.dtype, top_k, *spec.backward, *spec.expert, shared) >> 2
    return common << 1 | bool(needs.x or needs.topk_scores)  # GRADIENTS_NEEDED


@torch.compiler.assume_constant_result
def _checksum(*values: Any) -> int:
    return zlib.crc32(repr(values).encode())


# --- autograd ---------------------------------------------------------------------------------------------------------


class _Call(NamedTuple):
    """The arguments of both autograd functions that autograd does not see. A cache is None where nothing is kept;
    ``stored`` are weights that are stored in FP8, else None."""

    spec: LayerSpec
    cache: WeightCache | None
    shared_cache: WeightCache | None
    stored: ExpertWeights[Fp8Weight] | None


class _Shared(NamedTuple):
    """The shared experts' weights as the ops take them, and the copies among them."""

    packed: list[Tensor | None]
    copies: Copies | None

    @classmethod
    def of(cls, matrices: ExpertWeights[Tensor], call: _Call) -> "_Shared":
        if not call.spec.shared or matrices.w1 is None:
            return cls([], None)
        weights = one_expert(matrices)
        copies = buffers_of(call.shared_cache, weights)
        return cls(pack(weights, copies, call.spec.shared == "frozen"), copies)


class InFlight:
    """Carries tensors from the autograd node that begins the backward to the node that ends it.

    They are the transfer in flight, and the shared experts' gradients: of the input if that node needs it
    (``needs_dx``), and of the scores. As a gradient, the payload would be checked and cast by autograd. The input
    gradient joins a sum.
    """

    stream: "torch.cuda.Stream | None"
    needs_dx: bool = True
    pending: Pending | None = None
    shared_dx_RD: Tensor | None = None
    shared_ds_T: Tensor | None = None

    def __init__(self, device: torch.device):
        self.stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def check_stream(self) -> None:
        """Raises RuntimeError if the current stream is not the one of the layer's begin. Autograd does not see the
        payloads, so it would not order two streams, in either direction."""
        if self.stream is not None and self.stream != torch.cuda.current_stream(self.stream.device):
            raise RuntimeError(
                "the CUDA stream has changed while tokens travelled; let meanwhile() restore the current stream "
                "(with torch.cuda.stream(...)) before it returns"
            )

    def take(self) -> Pending:
        pending, self.pending = self.pending, None
        if pending is None:
            raise RuntimeError("the experts' backward ran without the dispatch of its gradients; was it run twice?")
        return pending


class _RoutedExperts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any):
        *tensors, call, in_flight = args
        spec, signature = call.spec, 0
        inputs, ctx.placements = _local(Inputs.of(tensors, spec.expert.biased))
        if spec.dispatch.travels:
            signature = _signature(spec, inputs, Inputs.of(ctx.needs_input_grad, False))
        weights, frozen = call.stored or inputs.weights.apart(spec.expert), spec.backward.weights != "trained"
        copies, shared = buffers_of(call.cache, weights), _Shared.of(inputs.shared, call)
        out, *results = _forward_op(
            inputs.x,
            inputs.topk_scores,
            inputs.topk_ids,
            pack(weights, copies, frozen),
            shared.packed,
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
        stored: Any = call.stored
        parameters = *(stored or inputs.weights).pack(), *inputs.shared, *(inputs.biases or ()), *inputs.adapters
        # FSDP refills the aliases' memory before the backward, so that it cannot quantize stale values.
        ctx.save_for_backward(*aliases(parameters), *results)
        # The flags are not saved: hooks of saved tensors may return copies.
        ctx.parts = *(("weights", "scales") if stored else ("weights",)), "shared_weights", "biases", "lora", *parts
        ctx.spec, ctx.nan_flags, ctx.in_flight = spec, inputs.nan_flags, in_flight
        ctx.read, ctx.shared_read = Read.of(copies, frozen), Read.of(shared.copies, spec.shared == "frozen")
        ctx.x_dtype, ctx.dim = inputs.x.dtype, inputs.x.shape[1]
        return (out, *handed) if handed else out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor, *_: Any):  # pyrefly: ignore[bad-override] # one gradient per result
        spec, nans, in_flight = ctx.spec, NanFlags.of(ctx.nan_flags), ctx.in_flight
        needs, dim = Inputs.of(ctx.needs_input_grad[:-2], spec.expert.biased), ctx.dim
        saved = Saved.unpack(layout(spec, *ctx.parts), ctx.saved_tensors)
        weights, routing = cast(Any, saved.stored_weights or saved.weights), saved.routing
        biases = saved.biases if spec.expert.biased else None
        tokens = spec.dispatch.resume(saved.state, routing, spec.route, dim)
        x = None
        if spec.backward.keeps_rows:
            x = tokens.kept_rows(saved.tokens, dim, routing.row_TK.shape[1])
        lora = NO_LORA if spec.lora is None else lora_operands(spec.lora, saved.lora, spec.expert)
        ffn, saved_ffn = FFN(spec.expert, spec.backward, routing, nans, biases, lora, dim), saved.ffn
        with held_by(ctx.read):
            weights_apart = weights.apart(spec.expert)
            w13, w13_t, w2_t = backward_operands(weights_apart, ctx.read, saved.copies, spec.backward, dout)
            saved_ffn = ffn.with_hidden(saved_ffn, x, w13)
            del w13
            shared = None
            if spec.dispatch.overlaps:
                # This node lives as long as the loss; what it holds would add up over the layers.
                shared_dx, in_flight.shared_dx_RD = in_flight.shared_dx_RD, None
                shared_ds, in_flight.shared_ds_T = in_flight.shared_ds_T, None
                pending = in_flight.take()
            else:
                dout_rows, group_dy = _cast_gradient(dout, spec.shared, nans)
                if group_dy is not None:
                    shared = _shared_backward(saved, spec, ctx.shared_read, group_dy, needs.x, nans, dout.shape[0])
                shared_dx, shared_ds = (None, None) if shared is None else (shared.dx_RD, shared.ds_T)
                pending = tokens.send(dout_rows)
                del dout_rows, group_dy
            del saved
            dy = tokens.receive(pending)
            del pending
            grads = ffn.hidden_gradients(dy, saved_ffn, w2_t, any(needs.biases or ()))
            del dy, saved_ffn, w2_t  # h is freed after its last use, also where checkpointing has kept it
            with_dx = tokens.returns_gradients(needs.x)
            dx_M = ffn.product(grads.dh, w13_t, ffn.lora.w13_t, dim) if with_dx else None
            del w13_t
        pending, returned = None, Returned(None)
        if with_dx or needs.topk_scores:
            pending = tokens.send_back(dx_M, grads.ds_M)
        del dx_M
        if pending is not None and not tokens.travels:  # the rows are freed before weight gradients are made
            returned, pending = tokens.finish(pending, ctx.x_dtype, shared_dx), None
        dw = ffn.weight_grads(x, grads, weights, needs.weights)
        dbiases = None if biases is None else biases.gradients(grads.dbias, cast(Any, needs.biases))
        dlora: Sequence[Tensor | None] = ()
        if spec.lora is not None:
            found = ffn.lora_grads(cast(Rows, x), grads) if any(needs.adapters) else {}
            dlora = [found[name] if need else None for name, need in zip(spec.lora.fields, needs.adapters, strict=True)]
        if ctx.placements is not None:
            of_weights, of_biases = ctx.placements
            dw = ExpertWeights(*map(place_as, dw, of_weights))
            dbiases = dbiases and Biases(*map(place_as, dbiases, of_biases))
        shared_dw = NO_WEIGHTS if shared is None else shared.weight_grads(needs.shared)
        if pending is not None:
            returned = tokens.finish(pending, ctx.x_dtype, shared_dx)
        inputs = Inputs(returned.rows_TD, returned.ds_TK, None, None, shared_ds, dw, shared_dw, dbiases, dlora)
        return *inputs.flatten(), None, None


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


def _cast_gradient(dout_TD: Tensor, shared: str, nans: NanFlags) -> tuple[Rows, Rows | None]:
    """The layer's second cast: the rows to send, and for shared experts the same as one group."""
    if not shared:
        return Rows(*ops.quantize_rows(dout_TD, nans.dy)), None
    q, scale, scale_t, _ = ops.quantize_group(dout_TD, nans.dy)
    T = dout_TD.shape[0]
    return Rows(q[:T], scale[:T]), Rows(q, scale_t)


class _SharedBackward(NamedTuple):
    """The shared experts' backward up to the gradients of their weights, which can wait."""

    ffn: FFN
    x: Rows
    weights: ExpertWeights[Tensor]
    dx_RD: Tensor | None
    ds_T: Tensor | None
    grads: HiddenGradients

    def weight_grads(self, needed: ExpertWeights[Any]) -> ExpertWeights[Any]:
        return without_expert_dim(self.ffn.weight_grads(self.x, self.grads, self.weights, needed))


def _shared_backward(
    saved: Saved, spec: LayerSpec, read: Read | None, dy: Rows, with_dx: bool, nans: NanFlags, T: int
) -> _SharedBackward:
    """``T``: tokens, without the rows that pad their group."""
    rows, backward, weights = saved.rows_of_shared, spec.shared_backward, one_expert(saved.shared_weights)
    ffn = group_of(rows, spec.expert, backward, nans, weights.w2.shape[1])
    with held_by(read):
        operands = backward_operands(weights, read, saved.shared_copies, backward, dy.q)
        dx_RD, grads = group_dgrad(ffn, rows, saved.shared_ffn, dy, operands, with_dx)
    ds_T = grads.ds_M[:T] if spec.shared_scored else None
    return _SharedBackward(ffn, Rows(rows.q, rows.scale), weights, dx_RD, ds_T, grads)


def _run_shared(
    rows: GroupRows, weights: ExpertWeights[Tensor], nan_flags: Tensor | None, spec: LayerSpec, dim: int
) -> None:
    """The forward and backward of shared experts apart from the routed ones, for their kernels alone."""
    spec, nans = spec._replace(shared_kept=False), NanFlags.of(nan_flags)
    ffn = group_of(rows, spec.expert, spec.shared_backward, nans, dim)
    _, saved_ffn, _ = group_ffn(ffn, rows, pack(one_expert(weights), None, False))
    kept = layout(spec, *_FINISHED)
    saved = Saved.unpack(kept, Saved(shared_ffn=saved_ffn).pack(kept))
    saved = saved._replace(shared_weights=weights, shared_rows=rows)
    backward = _shared_backward(saved, spec, None, Rows(rows.q, rows.scale), True, nans, rows.q.shape[0])
    if spec.shared == "trained":
        backward.weight_grads(ExpertWeights(True, True, True))


class _Finish(torch.autograd.Function):
    """The end of a forward whose dispatch overlaps; in the backward, the start of the dispatch of the output's
    gradient. The shared experts run here in both directions, while tokens travel."""

    @staticmethod
    def forward(ctx: Any, *args: Any):
        *tensors, call, in_flight, dim, dtype = args
        in_flight.check_stream()
        inputs, spec = FinishInputs.of(tensors), call.spec
        handed = tensors[len(inputs.flatten()) :]
        shared = _Shared.of(inputs.shared, call)
        out, *results = _finish_op(inputs.payload, handed, shared.packed, inputs.nan_flags, encode(spec), dim, dtype)
        if torch._C._len_torch_dispatch_stack():
            # Per-op checkpointing that keeps this op alone has repeated the forward's, and not run this one.
            ops.wait(inputs.payload)
        # Per-op checkpointing keeps every result of the forward op, this one too, but nobody reads it again.
        inputs.payload.untyped_storage().resize_(0)
        if spec.handing is not spec:
            handed = Saved.unpack(layout(spec.handing, *_HANDED), handed).pack(layout(spec, *_HANDED))
        ctx.save_for_backward(*aliases(inputs.shared), *handed, *results)
        ctx.spec, ctx.in_flight, ctx.nan_flags = spec, in_flight, inputs.nan_flags
        ctx.read = Read.of(shared.copies, spec.shared == "frozen")
        ctx.placeholder_dtype, ctx.dim = inputs.placeholder.dtype, dim
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_TD: Tensor):  # pyrefly: ignore[bad-override] # one gradient per result
        spec, in_flight = ctx.spec, ctx.in_flight
        needs, nans = FinishInputs.of(ctx.needs_input_grad), NanFlags.of(ctx.nan_flags)
        experts_node, _ = ctx.next_functions[0]
        saved = Saved.unpack(layout(spec, "shared_weights", *_HANDED, *_FINISHED), ctx.saved_tensors)
        tokens = spec.dispatch.resume(saved.state, None, spec.route, ctx.dim)
        dout_rows, group_dy = _cast_gradient(dout_TD, spec.shared, nans)
        in_flight.pending = tokens.send(dout_rows)
        shared_dw = NO_WEIGHTS
        if group_dy is not None:
            shared = _shared_backward(saved, spec, ctx.read, group_dy, in_flight.needs_dx, nans, dout_TD.shape[0])
            del saved
            in_flight.shared_dx_RD, in_flight.shared_ds_T = shared.dx_RD, shared.ds_T
            shared_dw = shared.weight_grads(needs.shared)
        # needs_input_grad is no answer: torch.autograd.grad may ask for the shared experts' gradients only.
        if experts_node is None or not torch._C._will_engine_execute_node(experts_node):
            ops.wait(cast(Tensor, in_flight.take().rows))  # other ranks may need the gradients
            in_flight.shared_dx_RD = in_flight.shared_ds_T = None
        placeholder = dout_TD.new_empty(0, dtype=ctx.placeholder_dtype)
        grads = FinishInputs(placeholder, shared=shared_dw).flatten()
        return *grads, *(None for _ in ctx.needs_input_grad[len(grads) :])


# Under torch.compile the two would lie in graphs that know nothing of each other, and the split sizes are data.
_start_eagerly = torch.compiler.disable(_RoutedExperts.apply)
_finish_eagerly = torch.compiler.disable(_Finish.apply)
_in_flight = torch.compiler.disable(InFlight)
