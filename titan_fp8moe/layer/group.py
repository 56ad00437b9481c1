"""FFNs and linears that serve every token: their rows are one group, and nothing is routed.

    forward   x --quantize--> fp8 --GEMM--> y          an FFN has the GEMMs of ffn.py
    backward  dy --quantize--> fp8 --GEMMs--> dx, dW

:func:`feed_forward` and :func:`linear` quantize their input and their output's gradient themselves, once each. The
shared experts of a MoE layer read the rows that are quantized for the routed ones: :mod:`titan_fp8moe.layer.experts`
calls :func:`group_forward` and :func:`group_hidden_gradients` with these rows.

A forward is one op, for per-op activation checkpointing. An FFN's backward is two, as a layer's: the second makes the
gradients of GEMM 1's weights.
"""

from typing import Any, cast

import torch
from torch import Tensor

from titan_fp8moe import ops
from titan_fp8moe.config import Fp8FlowMoEConfig
from titan_fp8moe.kernels import warm_up
from titan_fp8moe.kernels.sizes import MAX_ROWS
from titan_fp8moe.layer import statistics
from titan_fp8moe.layer.checks import check_device
from titan_fp8moe.layer.ffn import FFN, HiddenGradients, WeightGrads, weight_grads
from titan_fp8moe.layer.operands import SWIGLU, W2, W13, WeightCache, WeightOperands, aliases, copies_for, pack_weights
from titan_fp8moe.layer.saved import GROUP_HALFWAY, SavedGroup, group_flags, pack, unpack
from titan_fp8moe.layer.weights import ExpertWeights, one_expert
from titan_fp8moe.ops.backend import custom_op, once_differentiable, refuse_export
from titan_fp8moe.recipe import BLOCK, STEP
from titan_fp8moe.rows import DY, GroupRows, Routing, Rows, X
from titan_fp8moe.spec import BackwardSpec, ExpertSpec, decode, encode

# --- one group of rows ------------------------------------------------------------------------------------------------


def ffn_of_group(rows: GroupRows, expert: ExpertSpec, backward: BackwardSpec) -> FFN:
    """The FFN of these rows: one group, no router, no permutation. They may have scores."""
    none: Any = None
    return FFN(expert, backward, Routing(rows.end, none, cast(Any, rows.score), none))


def group_forward(ffn: FFN, rows: GroupRows, operands: WeightOperands) -> tuple[Tensor, SavedGroup]:
    """The FFN's output (R, D) bf16, and what its backward needs."""
    with operands.held:
        (w13, w2), generations = operands.of_forward()
        a, hidden = ffn.activate(ffn.product(rows.quantized, w13))
        return ffn.product(a, w2, None, operands.like.w2.shape[1]), SavedGroup(rows, generations, a, hidden)


def group_hidden_gradients(
    ffn: FFN, saved: SavedGroup, operands: WeightOperands, dy: Rows, with_dx: bool, with_dw2: bool
) -> tuple[HiddenGradients, Tensor | None]:
    """The first half of a backward: with ``with_dx`` the first result holds the gradient of the rows (R, D) bf16, with
    ``with_dw2`` the second is w2's. ``dy``: the output's."""
    x = saved.rows.quantized
    with operands.held:
        hidden = saved.hidden or ffn.hidden(x, operands.plain(W13, saved.generations))
        grads, a = ffn.hidden_gradients(dy, hidden, saved.a, operands.transposed(W2, saved.generations))
        del hidden  # h is freed after its last use
        if statistics.collecting() and ffn.backward.weights == "trained":
            ffn.record(x, grads.dh, a, dy, operands)
        dw2 = ffn.w2_grad(dy, a, operands) if with_dw2 else None
        del a
        if with_dx:
            w13_t, D = operands.transposed(W13, saved.generations), operands.like.w2.shape[1]
            grads = grads._replace(dx=ffn.product(grads.dh, w13_t, None, D))
    return grads, dw2


def matrix_grads(grads: WeightGrads, matrices: ExpertWeights) -> ExpertWeights:
    """Gradients of one expert's weights as those of its matrices."""
    return ExpertWeights(*(None if grad is None else grad.squeeze(0) for grad in grads.apart(matrices)))


# --- FFN --------------------------------------------------------------------------------------------------------------


def _feed_forward(
    x_TD: Tensor, weights: list[Tensor | None], nan_flags: Tensor | None, backward: str, dtype: torch.dtype
) -> list[Tensor]:
    """The output (T, D) in ``dtype``, and :class:`SavedGroup`. ``weights``: packed, of one expert."""
    spec = decode(BackwardSpec, backward)
    q, _, scale, end = ops.quantize_group(x_TD, None if nan_flags is None else nan_flags[X])
    rows = GroupRows(q, scale, end)
    operands = WeightOperands(weights)
    y, saved = group_forward(ffn_of_group(rows, SWIGLU, spec), rows, operands)
    return [_first_rows(y, x_TD).to(dtype), *pack(group_flags(spec, bool(operands.kept)), saved)]


def _feed_forward_hidden_gradients(
    dy_TD: Tensor,
    saved: list[Tensor],
    needs: list[bool],
    dtype: torch.dtype,
    weights: list[Tensor | None],
    nan_flags: Tensor | None,
    backward: str,
) -> list[Tensor]:
    """The first half of a backward: the gradients of the input (T, D) in ``dtype`` and of w2, which ``needs`` asks for,
    and :class:`titan_fp8moe.layer.ffn.HiddenGradients`. ``saved``: of the forward."""
    spec, (needs_dx, needs_dw2) = decode(BackwardSpec, backward), needs
    q, _, scale, _ = ops.quantize_group(dy_TD, None if nan_flags is None else nan_flags[DY])
    operands = WeightOperands(weights)
    of_forward = unpack(group_flags(spec, bool(operands.kept)), iter(saved))
    ffn = ffn_of_group(of_forward.rows, SWIGLU, spec)
    grads, dw2 = group_hidden_gradients(ffn, of_forward, operands, Rows(q, scale), needs_dx, needs_dw2)
    dx = cast(Tensor, grads.dx)[: dy_TD.shape[0]].to(dtype) if needs_dx else None
    return [*pack((needs_dx, needs_dw2), (dx, dw2)), *pack(GROUP_HALFWAY, grads)]


def _feed_forward_w13_grad(
    halfway: list[Tensor], saved: list[Tensor], weights: list[Tensor | None], backward: str
) -> list[Tensor]:
    """The second half: the gradients of w1 and w3 in one. ``saved``: of the forward, without what is of GEMM 2."""
    spec, operands = decode(BackwardSpec, backward), WeightOperands(weights)
    of_forward = unpack(group_flags(spec, bool(operands.kept), of_gemm_2=False), iter(saved))
    grads = unpack(GROUP_HALFWAY, iter(halfway))
    ffn = ffn_of_group(of_forward.rows, SWIGLU, spec)
    return [ffn.w13_grad(of_forward.rows.quantized, grads.dh, operands)]


_feed_forward_op = custom_op(_feed_forward)
_hidden_gradients_op = custom_op(_feed_forward_hidden_gradients, of_backward=True)
_w13_grad_op = custom_op(_feed_forward_w13_grad, of_backward=True)


class _FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD, w1, w2, w3, nan_flags, backward, cache, dtype):
        weights = one_expert(ExpertWeights(w1, w2, w3))
        ctx.copies = copies_for(cache, weights, SWIGLU)
        ctx.spec, ctx.nan_flags, ctx.x_dtype = backward, nan_flags, x_TD.dtype
        packed = pack_weights(weights, ctx.copies, backward.weights == "frozen")
        y, *saved = _feed_forward_op(x_TD, packed, nan_flags, encode(backward), dtype)
        ctx.save_for_backward(*aliases((w1, w2, w3)), *saved)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor):  # pyrefly: ignore[bad-override] # one gradient per result
        spec, (needs_dx, needs_dw1, needs_dw2, needs_dw3, *_) = ctx.spec, ctx.needs_input_grad
        w1, w2, w3, *saved = ctx.saved_tensors
        matrices, saved = ExpertWeights(w1, w2, w3), list(saved)  # torch 2.11's Dynamo takes a starred name for a tuple
        packed = pack_weights(one_expert(matrices), ctx.copies, spec.weights == "frozen")
        first = [needs_dx, needs_dw2]
        flat = iter(_hidden_gradients_op(dy, saved, first, ctx.x_dtype, packed, ctx.nan_flags, encode(spec)))
        (dx, dw2), halfway, dw13 = unpack(first, flat), list(flat), None
        if needs_dw1 or needs_dw3:
            del saved[len(saved) - spec.num_saved_of_gemm_2 :]
            [dw13] = _w13_grad_op(halfway, saved, packed, encode(spec))
        return dx, *matrix_grads(WeightGrads(dw13, dw2), matrices), None, None, None, None


def feed_forward(
    x: Tensor,
    weights: ExpertWeights[Tensor],
    config: Fp8FlowMoEConfig,
    cache: WeightCache | None = None,
    nan_flags: Tensor | None = None,
    frozen: bool = False,
) -> Tensor:
    """W2 (silu(W1 x) * (W3 x)) in FP8, with two casts: of x, and of the output's gradient.

    Differentiable once in x and the weights. Quantized rows and weights pad both dims to multiples of 128.

    Args:
        x: (..., D) bf16 or fp32.
        weights: w1 and w3 (H, D), w2 (D, H), all bf16 or all fp32, D and H multiples of 16.
        cache: of the weights.
        nan_flags: see :data:`titan_fp8moe.rows.X`.
        frozen: whether none of the weights is trained.

    Returns:
        (..., D) in the dtype of ``x``, or in autocast's.

    Raises:
        ValueError: for other shapes and dtypes, or more rows than the kernels take.
    """
    H, D = weights.w1.shape
    if weights.w3 is None or weights.w3.shape != (H, D) or weights.w2.shape != (D, H) or H % STEP or D % STEP:
        shapes = ", ".join("None" if w is None else str(tuple(w.shape)) for w in weights)
        raise ValueError(f"w1 and w3 must be (H, D) and w2 (D, H), D and H multiples of {STEP}; got {shapes}")
    dtype = _check_input(x, D)
    backward = config.backward._replace(weights="frozen") if frozen else config.backward
    refuse_export((x, *weights))
    args, x_TD = (*weights, nan_flags, backward), x.reshape(-1, D)
    if warm_up.is_due(kind := (backward, weights.w1.shape), x):
        warm_up.compile_ahead(kind, _FeedForward.apply, x_TD, *args, None, dtype)
    return _FeedForward.apply(x_TD, *args, cache, dtype).view(x.shape)


def _first_rows(y: Tensor, x: Tensor) -> Tensor:
    """As many rows of ``y`` as ``x`` has, in what autograd takes for no view: users may change it in place."""
    return torch.ops.aten._unsafe_view(y[: x.shape[0]], [x.shape[0], y.shape[1]])


def _check_input(x: Tensor, D: int) -> torch.dtype:
    """The result's dtype, for x that fits the weights and the kernels."""
    if x.shape[-1] != D or x.numel() // D > MAX_ROWS:
        raise ValueError(
            f"x is {tuple(x.shape)} and the weights take {D}; kernels take at most {MAX_ROWS} rows: use smaller batches"
        )
    check_device(x)
    device = "cpu" if x.is_meta else x.device.type  # autocast knows no meta
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    if dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"the result would be {dtype}; x must be bf16 or fp32, and so must autocast's dtype")
    return dtype


# --- linear -----------------------------------------------------------------------------------------------------------


def _linear(x_TK: Tensor, weights: list[Tensor | None], nan_flags: Tensor | None, dtype: torch.dtype) -> list[Tensor]:
    """The output (T, N) in ``dtype``; q, scale and end of :class:`titan_fp8moe.rows.GroupRows`; the generation of
    copies. ``weights``: packed, of which w1 is the linear's (1, N, K)."""
    q, _, scale, end = ops.quantize_group(x_TK, None if nan_flags is None else nan_flags[X])
    operands = WeightOperands(weights)
    with operands.held:
        (weight,), generations = operands.of_forward()
        y = _first_rows(ops.grouped_mm(q, scale, *weight, end, dtype), x_TK)
    return [y, q, scale, end, *(generations or ())]


def _linear_backward(
    dy_TN: Tensor,
    saved: list[Tensor | None],
    needs: list[bool],
    dtype: torch.dtype,
    weights: list[Tensor | None],
    nan_flags: Tensor | None,
    wgrad: str,
) -> list[Tensor]:
    """Gradients of x (T, K) in ``dtype`` and of the weight (1, N, K), if they are needed. ``saved``: of the forward; q
    and scale are None where the weight is frozen."""
    q, scale, end, *generations = cast(list[Any], saved)
    dy_q, _, dy_scale, _ = ops.quantize_group(dy_TN, None if nan_flags is None else nan_flags[DY])
    x, dy, operands, grads = Rows(q, scale), Rows(dy_q, dy_scale), WeightOperands(weights), []
    w, (needs_dx, needs_dw) = operands.like.w1, needs
    if needs_dx:
        with operands.held:
            w_t = operands.transposed(0, generations or None)
            grads.append(ops.grouped_mm(*dy, *w_t, end, dtype)[: dy_TN.shape[0]])
    if needs_dw:
        grads.append(weight_grads(dy, x, None, end, wgrad, (w,)))
    if statistics.collecting() and q is not None:
        _, N, K = w.shape
        statistics.record([(("x", x, 1, K), ("dy", dy, 1, N))], operands.groups, end, None, wgrad)
    return grads


_linear_op, _linear_backward_op = custom_op(_linear), custom_op(_linear_backward, of_backward=True)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TK, w, config, cache, dtype, nan_flags, frozen):
        weight: ExpertWeights = ExpertWeights(w.unsqueeze(0), None)
        ctx.copies, ctx.frozen, ctx.wgrad = copies_for(cache, weight, SWIGLU), frozen, config.wgrad
        ctx.nan_flags, ctx.x_dtype = nan_flags, x_TK.dtype
        y, q, scale, *saved = _linear_op(x_TK, pack_weights(weight, ctx.copies, frozen), nan_flags, dtype)
        rows = (None, None) if frozen else (q, scale)
        ctx.save_for_backward(*aliases([w]), *rows, *saved)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor):  # pyrefly: ignore[bad-override] # one gradient per result
        w, *saved = ctx.saved_tensors
        packed = pack_weights(ExpertWeights(w.unsqueeze(0), cast(Any, None)), ctx.copies, ctx.frozen)
        needs_dx, needs_dw = needs = list(ctx.needs_input_grad[:2])
        grads = _linear_backward_op(dy, list(saved), needs, ctx.x_dtype, packed, ctx.nan_flags, ctx.wgrad)
        dx, dw = grads[0] if needs_dx else None, grads[-1].squeeze(0) if needs_dw else None
        return dx, dw, None, None, None, None, None


def linear(
    x: Tensor,
    w: Tensor,
    config: Fp8FlowMoEConfig,
    cache: WeightCache | None = None,
    nan_flags: Tensor | None = None,
    frozen: bool = False,
) -> Tensor:
    """x W^T in FP8, with two casts: of x, and of the output's gradient. Differentiable once in both.

    Args:
        x: (..., K) bf16 or fp32.
        w: (N, K) bf16 or fp32, N and K multiples of 128.
        cache, nan_flags, frozen: as of :func:`feed_forward`, whose errors this raises too.

    Returns:
        (..., N) in the dtype of ``x``, or in autocast's.
    """
    N, K = w.shape
    if N % BLOCK or K % BLOCK:
        raise ValueError(f"the weight is {tuple(w.shape)}; both dims must be multiples of 128")
    dtype = _check_input(x, K)
    refuse_export((x, w))
    x_TK = x.reshape(-1, K)
    if warm_up.is_due(kind := (config.wgrad, frozen, w.shape), x):
        warm_up.compile_ahead(kind, _Linear.apply, x_TK, w, config, None, dtype, nan_flags, frozen)
    out = _Linear.apply(x_TK, w, config, cache, dtype, nan_flags, frozen)
    return out.view(*x.shape[:-1], N)


FORWARD_OPS = (_feed_forward_op, _linear_op)
