"""FFNs and linears that serve every token: their rows are one group, and nothing is routed.

    forward   x --quantize--> fp8 --GEMM--> y          an FFN has the GEMMs of ffn.py
    backward  dy --quantize--> fp8 --GEMMs--> dx, dW

:func:`feed_forward` and :func:`linear` quantize their input and their output's gradient themselves, once each. The
shared experts of a MoE layer read the rows that are quantized for the routed ones: :mod:`titan_fp8moe.layer.experts`
calls :func:`group_ffn` and :func:`group_backward` with these rows.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.utils.flop_counter
from torch import Tensor

from titan_fp8moe import ops
from titan_fp8moe.config import Fp8FlowMoEConfig
from titan_fp8moe.kernels import warm_up
from titan_fp8moe.kernels.sizes import MAX_ROWS
from titan_fp8moe.layer import on_meta, operands, statistics
from titan_fp8moe.layer.ffn import FFN, HiddenGradients, Operands, SavedFFN, saved_fields, weight_grads
from titan_fp8moe.layer.operands import Generations, Read, WeightCache
from titan_fp8moe.layer.statistics import Operand
from titan_fp8moe.layer.weights import ExpertWeights, one_expert, without_expert_dim
from titan_fp8moe.ops.backend import check_caller, custom_op, once_differentiable, refuse_export
from titan_fp8moe.recipe import BLOCK, STEP, group_rows, padded
from titan_fp8moe.rows import GroupRows, NanFlags, Rows, one_group
from titan_fp8moe.spec import BackwardSpec, ExpertSpec, decode, encode

# --- one group of rows ------------------------------------------------------------------------------------------------


def group_of(rows: GroupRows, expert: ExpertSpec, backward: BackwardSpec, nans: NanFlags, dim: int) -> FFN:
    """The FFN of these rows, which have no router, but may have scores. ``dim``: D, which the rows pad to a multiple of
    128."""
    plain = expert._replace(score_before_experts=False, biased=False, interleaved=False)
    return FFN(plain, backward, one_group(rows.end, rows.score), nans, dim=dim)


def group_ffn(ffn: FFN, rows: GroupRows, weights: list[Tensor | None]) -> tuple[Tensor, SavedFFN, Generations]:
    """The FFN's output (R, D) bf16, and what its backward needs. ``weights``: packed, of one expert."""
    with operands.held(weights):
        (w13, w2), copies = operands.forward_operands(weights)
        a, saved = ffn.activate(ffn.product(Rows(rows.q, rows.scale), w13))
        return ffn.product(a, w2, None, ffn.dim), saved, copies


class GroupBackward(NamedTuple):
    """The rest of an FFN's backward: the gradients of its weights, which can wait."""

    ffn: FFN
    x: Rows
    weights: ExpertWeights[Tensor]
    grads: HiddenGradients

    def weight_grads(self, needed: ExpertWeights[Any]) -> ExpertWeights[Any]:
        return without_expert_dim(self.ffn.weight_grads(self.x, self.grads, self.weights, needed))


def group_backward(
    ffn: FFN,
    rows: GroupRows,
    matrices: ExpertWeights[Tensor],
    read: Read | None,
    copies: Generations,
    saved: SavedFFN,
    dy: Rows,
    with_dx: bool,
) -> tuple[Tensor | None, GroupBackward]:
    """The gradient of the rows (R, D) bf16, None unless ``with_dx``, and the rest. ``dy``: of the output."""
    weights, x = one_expert(matrices), Rows(rows.q, rows.scale)
    with operands.held_by(read):
        w13, w13_t, w2_t = operands.backward_operands(weights, read, copies, ffn.backward, dy.q)
        saved = ffn.with_hidden(saved, x, w13)
        grads = ffn.hidden_gradients(dy, saved, w2_t)
        del saved, w2_t  # h is freed after its last use
        dx_RD = ffn.product(grads.dh, w13_t, None, ffn.dim) if with_dx else None
    return dx_RD, GroupBackward(ffn, x, weights, grads)


# --- FFN --------------------------------------------------------------------------------------------------------------


def _feed_forward(
    x_TD: Tensor,
    weights: list[Tensor | None],
    expert: str,
    backward: str,
    dtype: torch.dtype,
    nan_flags: Tensor | None = None,
) -> list[Tensor]:
    """The output (T, D) in ``dtype``; :class:`Generations` of any copies; :class:`GroupRows`, of frozen weights only
    its end; the fields of :class:`SavedFFN` that there are."""
    spec, nans = decode(BackwardSpec, backward), NanFlags.of(nan_flags)
    if warm_up.is_due(kind := (backward, cast(Tensor, weights[0]).shape), x_TD):
        run = functools.partial(on_meta.ffn, _FeedForward.apply, x_TD, weights, nan_flags, spec, dtype)
        warm_up.compile_ahead(kind, [x_TD, *weights], run)
    q, _, scale, end = ops.quantize_group(x_TD, nans.x)
    rows = GroupRows(q, scale, end)
    y, saved, copies = group_ffn(group_of(rows, decode(ExpertSpec, expert), spec, nans, x_TD.shape[1]), rows, weights)
    kept = rows[:3] if spec.keeps_rows else (end,)
    fields = (getattr(saved, name) for name in saved_fields(spec))
    return [y[: x_TD.shape[0]].to(dtype), *copies.there, *kept, *fields]


def _linear(
    x_TK: Tensor, weights: list[Tensor | None], dtype: torch.dtype, nan_flags: Tensor | None = None
) -> list[Tensor]:
    """The output (T, N) in ``dtype``, and :class:`GroupRows`; the generation of copies. ``weights``: packed, of which
    w1 is the linear's (1, N, K)."""
    q, _, scale, end = ops.quantize_group(x_TK, NanFlags.of(nan_flags).x)
    with operands.held(weights):
        (weight,), copies = operands.forward_operands(weights)
        y = ops.grouped_mm(q, scale, *weight, end, dtype)[: x_TK.shape[0]]
    return [y, q, scale, end, *copies.there]


# One op holds a whole forward, for per-op activation checkpointing, as in titan_fp8moe.layer.experts.
_feed_forward_op, _linear_op = custom_op(_feed_forward), custom_op(_linear)

FORWARD_OPS = (_feed_forward_op.op, _linear_op.op)


def product_flops(rows: int, weights: Sequence[torch.Size | None]) -> int:
    """FLOPs of the product of ``rows`` rows with each of the packed weights (E, N, K), whose padding counts."""
    shapes = [shape for shape in weights[: len(ExpertWeights._fields)] if shape is not None]
    return sum(2 * rows * padded(shape[1]) * padded(shape[2]) for shape in shapes)


@torch.utils.flop_counter.register_flop_formula([torch.ops.titan_fp8moe.feed_forward, torch.ops.titan_fp8moe.linear])
def _flops(x_shape, weights, *_: Any, **__: Any) -> int:
    """FLOPs of all GEMMs, padding included."""
    return product_flops(group_rows(x_shape[0]), weights)


class _FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD, w1, w2, w3, nan_flags, backward, cache, dtype):
        packed = operands.pack(one_expert(ExpertWeights(w1, w2, w3)), cache, backward.weights == "frozen")
        specs = encode(ExpertSpec()), encode(backward)
        y, *tensors = _feed_forward_op(x_TD, packed.tensors, *specs, dtype, nan_flags)
        ctx.save_for_backward(*operands.aliases((w1, w2, w3)), *tensors)
        ctx.spec, ctx.read, ctx.nan_flags, ctx.x_dtype = backward, packed.read(), nan_flags, x_TD.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor):  # pyrefly: ignore[bad-override] # one gradient per result
        backward, nans = ctx.spec, NanFlags.of(ctx.nan_flags)
        w1, w2, w3, *tensors = ctx.saved_tensors
        copies = Generations()
        if ctx.read is not None:
            copies, tensors = Generations(*tensors[:2]), tensors[2:]
        q, scale, end, *tensors = tensors if backward.keeps_rows else [None, None, *tensors]
        tensors = list(tensors)  # for Dynamo of torch 2.11, which takes a starred name for a tuple
        rows = GroupRows(q, scale, end)
        ffn = group_of(rows, ExpertSpec(), backward, nans, w2.shape[0])
        needs_dx, *needs_dw = ctx.needs_input_grad[:4]
        dy_q, _, dy_scale, _ = ops.quantize_group(dy, nans.dy)
        dx, of_weights = group_backward(
            ffn,
            rows,
            ExpertWeights(w1, w2, w3),
            ctx.read,
            copies,
            SavedFFN(**{name: tensors.pop() for name in reversed(saved_fields(backward))}),  # held by the callee alone
            Rows(dy_q, dy_scale),
            needs_dx,
        )
        dx = None if dx is None else dx[: dy.shape[0]].to(ctx.x_dtype)
        return dx, *of_weights.weight_grads(ExpertWeights(*needs_dw)), None, None, None, None


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
        nan_flags: the tensor of :meth:`titan_fp8moe.rows.NanFlags.of`.
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
    _check_input(x, D)
    backward = config.backward._replace(weights="frozen") if frozen else config.backward
    refuse_export((x, *weights))
    cache = operands.usable(cache, weights.w1)
    out = _FeedForward.apply(x.reshape(-1, D), *weights, nan_flags, backward, cache, _result_dtype(x))
    return out.view(x.shape)


def _check_input(x: Tensor, D: int) -> None:
    if x.shape[-1] != D:
        raise ValueError(f"x is {tuple(x.shape)} and the weights take {D}; the last dim must be that")
    if x.numel() // D > MAX_ROWS:
        raise ValueError(f"x is {tuple(x.shape)}; kernels take at most {MAX_ROWS} rows: use smaller microbatches")
    check_caller(x)


def _result_dtype(x: Tensor) -> torch.dtype:
    device = "cpu" if x.is_meta else x.device.type  # autocast knows no meta
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    if dtype not in (torch.bfloat16, torch.float32):  # nor could the backward quantize such a gradient
        raise ValueError(f"the result would be {dtype}, of x or of autocast; use bf16 or fp32")
    return dtype


# --- linear -----------------------------------------------------------------------------------------------------------


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TK, w, config, cache, dtype, nan_flags, frozen):
        packed = operands.pack(ExpertWeights(w.unsqueeze(0), None), cache, frozen)
        y, q, x_scale, end, *generations = _linear_op(x_TK, packed.tensors, dtype, nan_flags)
        kept = (None, None) if frozen else (q, x_scale)
        ctx.save_for_backward(*operands.aliases([w]), *kept, end, *generations)
        ctx.config, ctx.read, ctx.nan_flags, ctx.x_dtype = config, packed.read(), nan_flags, x_TK.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor):  # pyrefly: ignore[bad-override] # one gradient per result
        w, q, scale, end, *generations = ctx.saved_tensors
        dy_q, _, dy_scale, _ = ops.quantize_group(dy, NanFlags.of(ctx.nan_flags).dy)
        needs_dx, needs_dw, *_ = ctx.needs_input_grad
        dx = dw = None
        if needs_dx:
            weight: ExpertWeights[Any] = ExpertWeights(w.unsqueeze(0), None)
            with operands.held_by(ctx.read):
                _, w_t, _ = operands.backward_operands(weight, ctx.read, generations, BackwardSpec(), dy)
                dx = ops.grouped_mm(dy_q, dy_scale, w_t.q, w_t.scale, end, ctx.x_dtype)[: dy.shape[0]]
        if needs_dw:
            of_weight = Operands(Rows(dy_q, dy_scale), Rows(q, scale), None, end)
            (dw,) = weight_grads(of_weight, ctx.config.wgrad, w.dtype, (w.unsqueeze(0),))
            dw = dw.squeeze(0)
        if statistics.collecting() and q is not None:
            pair = Operand("x", Rows(q, scale), 1, w.shape[1]), Operand("dy", Rows(dy_q, dy_scale), 1, w.shape[0])
            statistics.record([pair], [(w.unsqueeze(0),)], end, None, ctx.config.wgrad)
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
        cache, nan_flags, frozen: as of :func:`feed_forward`, whose errors this raises too. Only x and dy are noted.

    Returns:
        (..., N) in the dtype of ``x``, or in autocast's.
    """
    N, K = w.shape
    if N % BLOCK or K % BLOCK:
        raise ValueError(f"the weight is {tuple(w.shape)}; both dims must be multiples of 128")
    _check_input(x, K)
    refuse_export((x, w))
    cache = operands.usable(cache, w)
    out = _Linear.apply(x.reshape(-1, K), w, config, cache, _result_dtype(x), nan_flags, frozen)
    return out.view(*x.shape[:-1], N)
