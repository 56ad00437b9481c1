"""FFNs and linears that serve every token: their rows are one group, and nothing is routed.

    forward   x --quantize--> fp8 --GEMM--> y          an FFN has the GEMMs of ffn.py
    backward  dy --quantize--> fp8 --GEMMs--> dx, dW

:func:`feed_forward` and :func:`linear` quantize their input and their output's gradient themselves, once each. The
shared experts of a MoE layer read what is quantized for the routed ones: :mod:`titan_fp8moe.layer.experts` calls
:func:`group_ffn` and :func:`group_ffn_backward` with these rows.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.utils.flop_counter
from torch import Tensor

from titan_fp8moe import ops
from titan_fp8moe.config import Fp8FlowMoEConfig
from titan_fp8moe.kernels.sizes import MAX_ROWS
from titan_fp8moe.layer import statistics
from titan_fp8moe.layer.ffn import ExpertFFNBackward, SavedFFN, expert_ffn, saved_ffn_fields, weight_grads
from titan_fp8moe.layer.statistics import Operand
from titan_fp8moe.layer.weights import (
    ExpertWeights,
    WeightCache,
    forward_operands,
    one_expert,
    quantize_weights,
    quantize_weights_transposed,
)
from titan_fp8moe.ops import QuantizedWeight
from titan_fp8moe.ops.backend import check_current_device, custom_op, once_differentiable
from titan_fp8moe.recipe import group_rows, padded
from titan_fp8moe.rows import NanFlags, Rows, one_group

# --- one group of rows ------------------------------------------------------------------------------------------------


class GroupRows(NamedTuple):
    """Tokens as one group of rows.

    Attributes:
        q: (R, D) e4m3, R the number of tokens padded to a multiple of 128.
        scale: (R, D // 128) e8m0, column-major.
        end: (1,) int32, R.
    """

    q: Tensor
    scale: Tensor
    end: Tensor


def group_ffn(
    rows: GroupRows,
    weights: list[Tensor],
    weight_scales: list[Tensor],
    recompute: str,
    save_h: str,
    nans: NanFlags,
) -> tuple[Tensor, list[Tensor]]:
    """The FFN's output (R, D) bf16, and of its :class:`SavedFFN` what is not None.

    ``weights`` and ``weight_scales`` are :meth:`titan_fp8moe.layer.weights.ExpertWeights.pack` of one expert.
    """
    w13, w2, _ = quantize_weights(ExpertWeights.unpack(weights, weight_scales))
    y, saved = expert_ffn([Rows(rows.q, rows.scale)], w13, w2, one_group(rows.end), False, recompute, save_h, nans)
    return y, [t for t in saved if t is not None]


def group_ffn_backward(
    rows: GroupRows,
    tensors: list[Tensor],
    weights: ExpertWeights[Tensor],
    cache: WeightCache | None,
    config: Fp8FlowMoEConfig,
    nans: NanFlags,
) -> ExpertFFNBackward:
    """The backward of :func:`group_ffn`, whose ``tensors`` it takes; ``weights`` are those of one expert."""
    fields = saved_ffn_fields(config.recompute, config.save_h)
    saved = SavedFFN(**dict(zip(fields, tensors, strict=True)))
    if cache is not None:
        _, operands = cache.get(weights)
    else:
        operands = quantize_weights_transposed(weights, with_w13=config.recompute == "experts")
    x, routing = Rows(rows.q, rows.scale), one_group(rows.end)
    return ExpertFFNBackward(x, saved, weights, operands, routing, False, config, nans)


def without_expert_dim(grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Gradients (1, N, K) of one expert as those of its matrices (N, K)."""
    return [None if grad is None else grad.squeeze(0) for grad in grads]


# --- FFN --------------------------------------------------------------------------------------------------------------


def _feed_forward(
    x_TD: Tensor,
    weights: list[Tensor],
    weight_scales: list[Tensor],
    recompute: str,
    save_h: str,
    dtype: torch.dtype,
    nan_flags: Tensor | None = None,
) -> list[Tensor]:
    """The output (T, D) in ``dtype``; :class:`GroupRows`; :func:`group_ffn`'s tensors."""
    nans = NanFlags.of(nan_flags)
    q, _, scale, end = ops.quantize_group(x_TD, nans.x)
    y, saved = group_ffn(GroupRows(q, scale, end), weights, weight_scales, recompute, save_h, nans)
    return [y[: x_TD.shape[0]].to(dtype), q, scale, end, *saved]


def _linear(
    x_TK: Tensor, w: Tensor, w_scale: Tensor | None, dtype: torch.dtype, nan_flags: Tensor | None = None
) -> list[Tensor]:
    """The output (T, N) in ``dtype``, and :class:`GroupRows`. ``w`` (1, N, K) has a scale if it is quantized."""
    q, _, scale, end = ops.quantize_group(x_TK, NanFlags.of(nan_flags).x)
    weight = ops.quantize_weight(w) if w_scale is None else QuantizedWeight(w, w_scale)
    return [ops.grouped_mm(q, scale, *weight, end, dtype)[: x_TK.shape[0]], q, scale, end]


# One op holds a whole forward, for per-op activation checkpointing, as in titan_fp8moe.layer.experts.
_feed_forward_op, _linear_op = custom_op(_feed_forward), custom_op(_linear)
_feed_forward_op.register_fake(_feed_forward)
_linear_op.register_fake(_linear)

FORWARD_OPS = (_feed_forward_op.op, _linear_op.op)


@torch.utils.flop_counter.register_flop_formula([op.overloadpacket for op in FORWARD_OPS])
def _flops(x_shape, weights, *_: Any, **__: Any) -> int:
    """Of all GEMMs, padding included."""
    shapes = [weights] if isinstance(weights, torch.Size) else weights
    return sum(2 * group_rows(x_shape[0]) * padded(shape[1]) * padded(shape[2]) for shape in shapes)


class _FeedForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD, w1, w2, w3, config, cache, dtype, nan_flags):
        operands = forward_operands(one_expert(w1, w2, w3), cache)
        y, *tensors = _feed_forward_op(x_TD, *operands, config.recompute, config.save_h, dtype, nan_flags)
        ctx.save_for_backward(w1, w2, w3, *tensors)
        ctx.config, ctx.cache, ctx.nan_flags, ctx.x_dtype = config, cache, nan_flags, x_TD.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor):  # pyrefly: ignore[bad-override] # one gradient per result
        w1, w2, w3, q, scale, end, *tensors = ctx.saved_tensors
        weights, nans = one_expert(w1, w2, w3), NanFlags.of(ctx.nan_flags)
        ffn = group_ffn_backward(GroupRows(q, scale, end), tensors, weights, ctx.cache, ctx.config, nans)
        del tensors  # h is freed after its last use
        dy_q, _, dy_scale, _ = ops.quantize_group(dy, nans.dy)
        dx, _ = ffn.dgrad(Rows(dy_q, dy_scale), ctx.needs_input_grad[0])
        dx = None if dx is None else dx[: dy.shape[0]].to(ctx.x_dtype)
        return dx, *without_expert_dim(ffn.wgrad(w1.dtype, ctx.needs_input_grad[1:4])), *[None] * 4


def feed_forward(
    x: Tensor,
    weights: ExpertWeights[Tensor],
    config: Fp8FlowMoEConfig,
    cache: WeightCache | None = None,
    nan_flags: Tensor | None = None,
) -> Tensor:
    """W2 (silu(W1 x) * (W3 x)) in FP8, with two casts: of x, and of the output's gradient.

    Differentiable once in x and the weights. The quantized weights pad the hidden dim to a multiple of 128.

    Args:
        x: (..., D) bf16 or fp32, D a multiple of 128.
        weights: w1 and w3 (H, D), w2 (D, H), all bf16 or all fp32, H a multiple of 16.
        cache: of the weights; not used where gradients are off.
        nan_flags: the tensor of :meth:`titan_fp8moe.rows.NanFlags.of`.

    Returns:
        (..., D) in the dtype of ``x``, or in autocast's.

    Raises:
        ValueError: for other shapes and dtypes, or more rows than the kernels take.
    """
    H, D = weights.w1.shape
    if weights.w3 is None or weights.w3.shape != (H, D) or weights.w2.shape != (D, H) or H % 16:
        shapes = ", ".join("None" if w is None else str(tuple(w.shape)) for w in weights)
        raise ValueError(f"w1 and w3 must be (H, D) and w2 (D, H), H a multiple of 16; got {shapes}")
    _check_input(x, D)
    cache = cache if torch.is_grad_enabled() else None
    out = _FeedForward.apply(x.reshape(-1, D), *weights, config, cache, _result_dtype(x), nan_flags)
    return out.view(x.shape)


def _check_input(x: Tensor, D: int) -> None:
    if x.shape[-1] != D or D % 128:
        raise ValueError(f"x is {tuple(x.shape)} and the weights take {D}; both must be one multiple of 128")
    if x.numel() // D > MAX_ROWS:
        raise ValueError(f"x is {tuple(x.shape)}; kernels take at most {MAX_ROWS} rows: use smaller microbatches")
    check_current_device(x)


def _result_dtype(x: Tensor) -> torch.dtype:
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    if dtype not in (torch.bfloat16, torch.float32):  # nor could the backward quantize such a gradient
        raise ValueError(f"the result would be {dtype}, of x or of autocast; use bf16 or fp32")
    return dtype


# --- linear -----------------------------------------------------------------------------------------------------------


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TK, w, config, cache, dtype, nan_flags):
        operand, scale = w.unsqueeze(0), None
        if cache is not None:
            (operand, scale), _ = cache.get((operand,), ops.quantize_weight_both)
        y, *rows = _linear_op(x_TK, operand, scale, dtype, nan_flags)
        ctx.save_for_backward(w, *rows)
        ctx.config, ctx.cache, ctx.nan_flags, ctx.x_dtype = config, cache, nan_flags, x_TK.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor):  # pyrefly: ignore[bad-override] # one gradient per result
        w, q, scale, end = ctx.saved_tensors
        dy_q, _, dy_scale, _ = ops.quantize_group(dy, NanFlags.of(ctx.nan_flags).dy)
        dx = dw = None
        if ctx.needs_input_grad[0]:
            if ctx.cache is not None:
                _, (w_t, w_t_scale) = ctx.cache.get((w.unsqueeze(0),), ops.quantize_weight_both)
            else:
                w_t, w_t_scale = ops.quantize_weight_transposed(w.unsqueeze(0))
            dx = ops.grouped_mm(dy_q, dy_scale, w_t, w_t_scale, end, ctx.x_dtype)[: dy.shape[0]]
        if ctx.needs_input_grad[1]:
            rows, shape = (Rows(dy_q, dy_scale), Rows(q, scale)), torch.Size((1, *w.shape))
            (dw,) = weight_grads(*rows, None, end, ctx.config.wgrad, w.dtype, [shape])
            dw = dw.squeeze(0)
        if statistics.collecting():
            operands = Operand("x", Rows(q, scale), 1, w.shape[1]), Operand("dy", Rows(dy_q, dy_scale), 1, w.shape[0])
            statistics.record([operands], [(w.unsqueeze(0),)], end, None, ctx.config.wgrad)
        return dx, dw, *[None] * 4


def linear(
    x: Tensor,
    w: Tensor,
    config: Fp8FlowMoEConfig,
    cache: WeightCache | None = None,
    nan_flags: Tensor | None = None,
) -> Tensor:
    """x W^T in FP8, with two casts: of x, and of the output's gradient. Differentiable once in both.

    Args:
        x: (..., K) bf16 or fp32.
        w: (N, K) bf16 or fp32, N and K multiples of 128.
        cache: of the weight; not used where gradients are off.
        nan_flags: the tensor of :meth:`titan_fp8moe.rows.NanFlags.of`; only x and dy are noted.

    Returns:
        (..., N) in the dtype of ``x``, or in autocast's.

    Raises:
        ValueError: for other shapes and dtypes, or more rows than the kernels take.
    """
    N, K = w.shape
    if N % 128:
        raise ValueError(f"the weight is {tuple(w.shape)}; both dims must be multiples of 128")
    _check_input(x, K)
    cache = cache if torch.is_grad_enabled() else None
    return _Linear.apply(x.reshape(-1, K), w, config, cache, _result_dtype(x), nan_flags).view(*x.shape[:-1], N)
