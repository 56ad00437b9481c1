"""The routed experts of one MoE layer as an autograd function: cast, dispatch, expert FFN, combine.

It is one function because autograd casts the gradient of an fp8 tensor to fp8, so no fp8 tensor may cross an autograd
edge, and because everything that reads the expert weights then happens between FSDP's hooks of the experts module.

    forward   x --quantize--> fp8 --dispatch--> permute --expert FFN--> sum --combine, bf16--> sum
    backward  dy --quantize--> fp8 --dispatch--> permute --FFN backward--> sum --combine, bf16--> sum

The two quantizations are the recipe's two explicit casts. A token is quantized once, before it is replicated to its
experts; in the backward its gradient is the same for all its experts, so it is quantized once as well.

With expert parallelism a token goes once to each rank that holds experts of it, and one row comes back, the fp32 sum of
these experts' outputs. A second autograd function then ends the combine and, in the backward, begins the dispatch; what
the caller computes between the two, the shared experts, runs while tokens are on their way, in both directions. So do
the weight gradients, beside the combine of the backward. Rows and weights are quantized while the host waits for the
sizes of the forward's dispatch.

    forward   dispatch ... start of the combine | shared experts | its end
    backward  start of the dispatch | shared experts' backward | its end ... combine beside the weight gradients
"""

import functools
import itertools
import weakref
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from titan_fp8moe import ops
from titan_fp8moe.config import Fp8FlowMoEConfig
from titan_fp8moe.ffn import ExpertFFNBackward, Layout, Rows, expert_ffn
from titan_fp8moe.kernels.sizes import MAX_ROWS
from titan_fp8moe.ops import QuantizedWeight
from titan_fp8moe.ops.backend import custom_op
from titan_fp8moe.recipe import TILE, row_capacity
from titan_fp8moe.weights import ExpertWeights, Fp8GatheredWeight, WeightCache, quantize_weights


class Route:
    """Where the tokens go, as torchtitan's router says it. A token's k-th expert is its slot k.

    A plain class on purpose: FSDP casts every floating-point tensor it finds in a module's arguments to bf16, and looks
    into tuples, dicts and dataclasses; the scores must stay fp32.

    Attributes:
        score_TK: (T, top_k) fp32 score of each slot.
        expert_TK: (T, top_k) int32 or int64, the expert of each slot. A slot with -1 is served elsewhere (another
            tensor-parallel rank's token) and adds nothing; neither does any other 32-bit number that is no expert's.
        num_experts: experts of all ranks.
        score_before_experts: whether scores multiply the experts' input instead of their output.
    """

    def __init__(self, score_TK: Tensor, expert_TK: Tensor, num_experts: int, score_before_experts: bool = False):
        self.score_TK = score_TK
        self.expert_TK = expert_TK
        self.num_experts = num_experts
        self.score_before_experts = score_before_experts


class RoutedOutput(NamedTuple):
    """The routed experts' output, with expert parallelism still on its way; for :func:`finish_routed_experts`.

    A tuple, so that FSDP finds the tensor through whose gradient it learns that the experts' backward begins.

    Attributes:
        out: (T, D); on its way an empty tensor that only takes the gradient's place.
        exchange: the tensors that :class:`_Exchange` is made of, empty without expert parallelism.
        rest: what else the end of the combine needs.
    """

    out: Tensor
    exchange: list[Tensor]
    rest: tuple


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
        weights: this rank's experts, local tensors: w1 and w3 (E, H, D), w2 (E, D, H), all bf16 or all fp32, H a
            multiple of 128.
        route: where the tokens go; ``route.num_experts`` is E times the ranks of ``ep_group``.
        config: the recipe's settings; those of the model (``filter_fqns``, ``fp8_all_gather``, ...) mean nothing here.
        ep_group: the ranks the experts are spread over, in order; None when all are here.
        cache: of these weights; keeps them quantized for the next call, unless gradients are off.

    Returns:
        (T, D) in the dtype of ``x_TD``.

    Raises:
        ValueError: for shapes, dtypes, a device or a number of rows that the kernels cannot work with.
    """
    return finish_routed_experts(start_routed_experts(x_TD, weights, route, config, ep_group, cache))


def start_routed_experts(
    x_TD: Tensor,
    weights: ExpertWeights,
    route: Route,
    config: Fp8FlowMoEConfig,
    ep_group: dist.ProcessGroup | None = None,
    cache: WeightCache | None = None,
) -> RoutedOutput:
    """:func:`routed_experts`, with its arguments and errors, up to the start of the combine. What is computed between
    this and :func:`finish_routed_experts` runs while tokens are on their way, here and in the backward."""
    num_ranks = 1 if ep_group is None else ep_group.size()
    _check_inputs(x_TD, weights, route)
    if route.num_experts != num_ranks * weights.w1_EHD.shape[0]:
        raise ValueError(
            f"the route is for {route.num_experts} experts, but {num_ranks} rank(s) hold {weights.w1_EHD.shape[0]} each"
        )
    if ep_group is None:
        apply, ep_name, journey = _RoutedExperts.apply, "", None
    else:
        apply, ep_name, journey = _start_eagerly, ep_group.group_name, _begin_journey()
    out, *exchange = apply(
        x_TD,
        route.score_TK,
        *weights,
        route.expert_TK,
        route.score_before_experts,
        config,
        ep_name,
        num_ranks,
        journey,
        cache if torch.is_grad_enabled() else None,
    )
    return RoutedOutput(out, exchange, (ep_name, journey, x_TD.shape[1], x_TD.dtype, config.combine))


def _check_inputs(x_TD: Tensor, weights: ExpertWeights, route: Route) -> None:
    """Raises for what kernels would not notice, but read or write other memory."""
    slots, (w1, w2, w3) = route.expert_TK.shape, weights
    dims = [x_TD.dim(), len(slots), w1.dim()]
    if dims != [2, 2, 3] or x_TD.shape != (slots[0], w1.shape[2]) or route.score_TK.shape != slots:
        raise ValueError(
            f"x is to be (T, D), scores and experts (T, top_k), and w1 (E, H, D); got {tuple(x_TD.shape)}, "
            f"{tuple(route.score_TK.shape)}, {tuple(slots)} and {tuple(w1.shape)}"
        )
    E, H, D = w1.shape
    if x_TD.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"x is to be bf16 or fp32, got {x_TD.dtype}; use x.bfloat16()")
    if len(devices := {t.device for t in (x_TD, route.score_TK, route.expert_TK, *weights)}) > 1:
        raise ValueError(f"x, scores, experts and weights are to be on one device, got {', '.join(map(str, devices))}")
    if w3.shape != w1.shape or w2.shape != (E, D, H) or not w1.dtype == w2.dtype == w3.dtype:
        got = ", ".join(f"{tuple(w.shape)} {w.dtype}" for w in weights)
        raise ValueError(f"w1 and w3 are to be (E, H, D), w2 (E, D, H), all of one dtype; got {got}")
    if route.score_TK.dtype != torch.float32:
        raise ValueError(f"scores are to be fp32, got {route.score_TK.dtype}; use score_TK.float()")
    if route.expert_TK.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"experts are to be int32 or int64, got {route.expert_TK.dtype}; use expert_TK.long()")
    if x_TD.is_cuda and x_TD.device.index != torch.cuda.current_device():
        raise ValueError(
            f"x is on {x_TD.device}, but kernels run on the current device, {torch.cuda.current_device()}; call "
            "torch.cuda.set_device"
        )


def finish_routed_experts(pending: RoutedOutput) -> Tensor:
    """(T, D): waits for what the other ranks return and sums it. With expert parallelism to be called once: a
    RuntimeError if it has been finished before, and in the backward if it has not been finished."""
    if not pending.exchange:
        return pending.out
    return _finish_eagerly(pending.out, *pending.exchange, *pending.rest)


class _Journey:
    """What start and end of an exchange hand over: the payload under way, of the forward's combine or the backward's
    dispatch. Not as a tensor between the functions, since the forward's would be one more result that per-op activation
    checkpointing keeps, and the backward's is fp8 and no gradient.

    Ops, which take no objects, find it by its number. It lives as long as the pending output or the graph, so that
    after an error in between nothing stays here. (PyTorch itself keeps the buffers of a collective that nobody has
    waited for, until the process ends; to wait in a destructor could hang with the rank that failed.)
    """

    _numbers = itertools.count(1)
    _by_number = weakref.WeakValueDictionary()

    def __init__(self):
        self.number, self._payloads = next(self._numbers), {}
        self._by_number[self.number] = self

    @classmethod
    def of(cls, number: int) -> "_Journey":
        return cls._by_number[number]

    def send(self, what: str, payload: Tensor) -> None:
        self._payloads[what] = payload

    def arrive(self, what: str) -> Tensor:
        if (payload := self._payloads.pop(what, None)) is None:
            raise RuntimeError(
                f"no {what} is under way: call finish_routed_experts for an output of start_routed_experts, once, and "
                "before its backward"
            )
        return ops.wait(payload)


class _RoutedExperts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        x_TD,
        score_TK,
        w1,
        w2,
        w3,
        expert_TK,
        score_before_experts,
        config,
        ep_name,
        num_ranks,
        journey,
        cache,
    ):
        weights = _readable(w1, w2, w3)
        if cache is not None:
            weights = [*itertools.chain(*quantize_weights(ExpertWeights(*weights), cache))]
        elif isinstance(w1, Fp8GatheredWeight):
            weights = [*itertools.chain(*weights)]
        out, *saved = _forward_op(
            x_TD,
            score_TK,
            weights,
            expert_TK,
            ep_name,
            num_ranks,
            0 if journey is None else journey.number,
            score_before_experts,
            config.save_h,
            config.recompute,
            config.combine,
        )
        exchange = saved[: _Exchange.NUM_TENSORS] if ep_name else []
        ctx.mark_non_differentiable(*exchange)
        ctx.set_materialize_grads(not exchange)  # no zeros for those
        # Weights are saved as parameters, not quantized: FSDP refills them before the backward, so what the backward
        # quantizes cannot be stale.
        ctx.save_for_backward(w1, w2, w3, *saved)
        ctx.ep_name, ctx.journey, ctx.cache = ep_name, journey, cache
        ctx.x_dtype, ctx.score_before_experts, ctx.config = x_TD.dtype, score_before_experts, config
        return out, *exchange

    @staticmethod
    @once_differentiable
    def backward(ctx, dout_TD, *_):
        w1, w2, w3, *saved = ctx.saved_tensors
        exchange = None
        if ctx.ep_name:
            tensors, saved = saved[: _Exchange.NUM_TENSORS], saved[_Exchange.NUM_TENSORS :]
            exchange = _Exchange(*tensors, ctx.ep_name, ctx.config.combine)
            row_R, *saved = saved
        offsets_E, token_M, score_M, row_TK, *saved = saved
        layout, D = Layout(offsets_E, token_M, score_M, row_TK), w1.shape[2]
        if exchange is not None and ctx.config.recompute != "experts":
            payload, *saved = saved
            x = Rows(*ops.unpack_dispatch(payload, D, row_TK.shape[1])[:2])
        else:
            x, saved = Rows(*saved[:2]), saved[2:]

        if exchange is None:
            q, scale = ops.quantize_rows(dout_TD)
        ffn = ExpertFFNBackward(
            x,
            saved,
            ExpertWeights(*_readable(w1, w2, w3)),
            layout,
            ctx.score_before_experts,
            ctx.config,
            ctx.cache,
        )
        del saved  # h is freed when it has been read last, where activation checkpointing has recomputed or kept it
        if exchange is not None:
            q, scale = ops.unpack_dispatch(ctx.journey.arrive("dispatch"), D, 0)[:2]
        dy = Rows(*ops.permute_rows(q, scale, layout.row_TK, layout.token_M, layout.offsets_E))
        del q, scale  # views of the payload, if there is one
        dx_M, ds_M = ffn.dgrad(dy)
        if exchange is not None:
            payload = exchange.start_combine(dx_M, ds_M, layout.row_TK, row_R)
        else:
            dx_TD, ds_TK = ops.unpermute_gradients(dx_M, ds_M.unsqueeze(1), layout.row_TK, ctx.x_dtype)
        del dx_M
        weight_grads = ffn.wgrad(w1.dtype, ctx.needs_input_grad[2:5])
        if exchange is not None:
            dx_TD, ds_TK = exchange.finish_combine(payload, D, ctx.x_dtype)
        return dx_TD, ds_TK, *weight_grads, *[None] * 7


def _readable(*weights: Tensor) -> list[Tensor | QuantizedWeight]:
    """What to read of parameters: themselves, or what FSDP has gathered in FP8."""
    return [w.quantized if isinstance(w, Fp8GatheredWeight) else w for w in weights]


class _FinishCombine(torch.autograd.Function):
    """The end of the forward's combine; in the backward, the start of the dispatch of the output's gradient."""

    @staticmethod
    def forward(ctx, out, position_TK, copy_TK, token_C, sizes, ep_name, journey, D, dtype, combine):
        ctx.save_for_backward(position_TK, copy_TK, token_C, sizes)
        ctx.out_dtype, ctx.ep_name, ctx.journey, ctx.combine = out.dtype, ep_name, journey, combine
        return _finish_op(position_TK if combine == "rows" else copy_TK, journey.number, D, dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, dout_TD):
        exchange = _Exchange(*ctx.saved_tensors, ctx.ep_name, ctx.combine)
        q, scale = ops.quantize_rows(dout_TD)
        ctx.journey.send("dispatch", exchange.start_dispatch(q, scale))
        return dout_TD.new_empty(0, dtype=ctx.out_dtype), *[None] * 9


# Under torch.compile start and end of an exchange would come to lie in graphs that know nothing of each other, and the
# sizes are data. (torchtitan compiles the modules around the experts, not these.)
_start_eagerly = torch.compiler.disable(_RoutedExperts.apply)
_finish_eagerly = torch.compiler.disable(_FinishCombine.apply)
_begin_journey = torch.compiler.disable(_Journey)


# Checking one takes longer than launching a kernel.
_checked_config = functools.cache(Fp8FlowMoEConfig)


def _routed_experts_forward(
    x_TD: Tensor,
    score_TK: Tensor,
    weights: list[Tensor],
    expert_TK: Tensor,
    ep_name: str,
    num_ranks: int,
    journey: int,
    score_before_experts: bool,
    save_h: str,
    recompute: str,
    combine: str,
) -> list[Tensor]:
    """The layer's output and what its backward needs: the layout's 4 tensors, the rows that arrived, one per token, and
    the tensors of :func:`titan_fp8moe.ffn.expert_ffn`. With expert parallelism the output is an empty tensor, since
    it is under way, and behind it come the tensors of :class:`_Exchange` and row_R (empty unless ``combine = rows``).

    The rows that arrived are values and scales, or with expert parallelism the payload they are views of. With
    ``recompute = experts`` they are left out: ``expert_ffn`` keeps those in expert order, not to be permuted twice.

    ``weights`` are w1, w2, w3; or their values and scales in turn, 6 tensors, where they were gathered in FP8; or the 4
    tensors of :func:`titan_fp8moe.ffn.quantize_weights`.
    """
    config = _checked_config(save_h=save_h, recompute=recompute, combine=combine)
    (_, D), E, top_k = x_TD.shape, weights[0].shape[0], expert_TK.shape[1]
    if ep_name:
        pending = _PendingSizes(expert_TK, num_ranks, E, ep_name)
    q, scale = ops.quantize_rows(x_TD)
    w13, w2 = _operands(weights)
    if ep_name:
        position_TK, copy_TK, token_C = pending.maps
        kept_position_TK = position_TK if combine == "rows" else position_TK.new_empty(0)
        sizes = pending.wait()
        tensors = [kept_position_TK, copy_TK, token_C, sizes]
        exchange = _Exchange(*tensors, ep_name, combine)
        rows, capacity = _arriving_rows(sizes[1])
        _check_rows(rows, capacity, E, sum(exchange.sent_copies))
        arrived = [ops.wait(exchange.start_dispatch(q, scale, position_TK, score_TK))]
        q, scale, position_CK, score_CK = ops.unpack_dispatch(*arrived, D, top_k)
        *layout, row_R = ops.arrival_layout(pending.received_N, position_CK, score_CK, rows, capacity)
        del position_CK, score_CK
    else:
        rows, capacity = expert_TK.numel(), row_capacity(expert_TK.numel(), E)
        _check_rows(rows, capacity, E)
        layout = ops.expert_layout(expert_TK, score_TK, E, capacity)
        arrived = [q, scale]
    layout = Layout(*layout)
    x = [Rows(*ops.permute_rows(q, scale, layout.row_TK, layout.token_M, layout.offsets_E))]
    del q, scale
    if recompute == "experts":
        arrived = []
    y, saved = expert_ffn(x, w13, w2, layout, score_before_experts, config)
    if not ep_name:
        return [ops.unpermute_sum(y, layout.row_TK, x_TD.dtype), *layout, *arrived, *saved]
    _Journey.of(journey).send("combine", exchange.start_combine(y, None, layout.row_TK, row_R))
    kept_row_R = row_R if combine == "rows" else row_R.new_empty(0)
    return [x_TD.new_empty(0), *tensors, kept_row_R, *layout, *arrived, *saved]


def _check_rows(rows: int, capacity: int, num_experts: int, sent: int = 0) -> None:
    """Of ``rows``, ``capacity`` with padding, for the experts of this rank, which sends ``sent`` to all ranks."""
    if max(capacity, sent) > MAX_ROWS:
        raise ValueError(
            f"{rows} rows for the {num_experts} experts of this rank, or {sent} to send, are too many for the kernels' "
            f"grids: {MAX_ROWS} with padding; use fewer tokens per microbatch, or spread the experts over more ranks"
        )


def _arriving_rows(messages_N: Tensor) -> tuple[int, int]:
    """How many rows the messages (N, 2 + E) announce to this rank, and how many with each expert's padded to a multiple
    of 128; of these at least 128, so that no buffer is empty."""
    rows_E = messages_N[:, 2:].numpy().sum(0)  # torch's operators take longer on so few numbers
    return int(rows_E.sum()), max(TILE * int((-(-rows_E // TILE)).sum()), TILE)


def _operands(weights: list[Tensor]) -> tuple[QuantizedWeight, QuantizedWeight]:
    """GEMM 1's and GEMM 2's, of what :func:`_routed_experts_forward` takes."""
    if len(weights) == 3:
        return quantize_weights(ExpertWeights(*weights))
    quantized = [QuantizedWeight(*pair) for pair in zip(weights[::2], weights[1::2], strict=True)]
    return quantize_weights(ExpertWeights(*quantized)) if len(quantized) == 3 else tuple(quantized)


def _routed_experts_finish(returned_TK: Tensor, journey: int, D: int, dtype: torch.dtype) -> Tensor:
    """The layer's output (T, D), once what the ranks return has arrived."""
    rows, _ = ops.unpack_combine(_Journey.of(journey).arrive("combine"), D, 0)
    return ops.unpermute_sum(rows, returned_TK, dtype)


# One op of all of it (two where something is computed in between), for the sake of activation checkpointing by op: it
# keeps the results, so that a recomputed block neither dispatches nor multiplies again. What the backward recomputes
# instead is the configuration's to say.
_forward_op = custom_op(_routed_experts_forward)
_forward_op.register_fake(_routed_experts_forward)
_finish_op = custom_op(_routed_experts_finish)

SAVED_OPS = (_forward_op.op, _finish_op.op)
"""What per-op activation checkpointing must keep: both or neither."""


# --- expert parallelism -----------------------------------------------------------------------------------------------


class _PendingSizes:
    """What the ranks will send each other, on its way from them and to the host."""

    def __init__(self, expert_TK: Tensor, num_ranks: int, num_local: int, ep_name: str):
        N = num_ranks
        *self.maps, message_N = ops.dispatch_layout(expert_TK, num_ranks, num_local)
        received_N = ops.wait(ops.start_all_to_all(message_N.view(torch.uint8), [1] * N, [1] * N, ep_name))
        self.received_N = received_N.view(torch.int32)
        self.host = torch.stack([message_N, self.received_N]).to("cpu", non_blocking=True)
        self.copied = torch.cuda.Event() if message_N.is_cuda else None
        if self.copied is not None:
            self.copied.record()

    def wait(self) -> Tensor:
        """The layer's one wait for the device: the host must know how much it will receive. (2, N, 2 + E) int32 on the
        host, what this rank sends to each and receives from each."""
        if self.copied is not None:
            self.copied.synchronize()
        return self.host


def _row_counts(messages_N: Tensor) -> list[int]:
    """Rows of each message (N, 2 + E): one for each slot, where copies are one for each token."""
    # In Python: operators on so few numbers would take longer.
    return [sum(message[2:]) for message in messages_N.tolist()]


class _Exchange:
    """Movement of tokens between the ranks of a group and back.

    Args:
        position_TK: of :func:`titan_fp8moe.recipe.dispatch_layout`; read only with ``combine = rows``.
        copy_TK, token_C: of the same.
        sizes: of :class:`_PendingSizes`.
        combine: see :class:`titan_fp8moe.config.Fp8FlowMoEConfig`.
    """

    NUM_TENSORS = 4

    def __init__(
        self, position_TK: Tensor, copy_TK: Tensor, token_C: Tensor, sizes: Tensor, ep_name: str, combine: str
    ):
        self.sent_copies, self.received_copies = sizes[:, :, 0].tolist()
        self.copy_TK, self.token_C, self.ep_name = copy_TK, token_C[: sum(self.sent_copies)], ep_name
        self.by_row = combine == "rows"
        # The row that comes back for each slot, and how many rows come and go.
        if self.by_row:
            self.returned_TK, self.combine_splits = position_TK, [_row_counts(messages) for messages in sizes]
        else:
            self.returned_TK, self.combine_splits = copy_TK, (self.sent_copies, self.received_copies)

    def start_dispatch(
        self, q: Tensor, scale: Tensor, position_TK: Tensor | None = None, score_TK: Tensor | None = None
    ) -> Tensor:
        """Sends quantized tokens (T, D), in a forward with their slots and scores; the payload needs ``ops.wait``."""
        payload = ops.pack_dispatch(q, scale, self.token_C, self.copy_TK, position_TK, score_TK)
        return ops.start_all_to_all(payload, self.received_copies, self.sent_copies, self.ep_name)

    def start_combine(self, y_MD: Tensor, ds_M: Tensor | None, row_CK: Tensor, row_R: Tensor) -> Tensor:
        """Sends rows (M, D) back in bf16, score gradients (M,) in fp32 beside them; the payload needs ``ops.wait``."""
        payload = ops.pack_combine(y_MD, ds_M, row_R.unsqueeze(1) if self.by_row else row_CK)
        returned, received = self.combine_splits
        return ops.start_all_to_all(payload, returned, received, self.ep_name)

    def finish_combine(self, payload: Tensor, D: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The tokens' gradients (T, D), summed of what came back for each, and the scores' (T, K)."""
        rows, ds = ops.unpack_combine(ops.wait(payload), D, 1 if self.by_row else self.copy_TK.shape[1])
        return ops.unpermute_gradients(rows, ds, self.returned_TK, dtype)
