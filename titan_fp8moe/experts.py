"""The expert FFN in FP8: forward and backward on rows in expert order.

    x fp8 --GEMM 1--> h bf16 --SwiGLU, score, quantize--> a fp8 --GEMM 2--> y bf16
    dy fp8 --GEMM 2 dgrad--> bf16 --SwiGLU backward, quantize--> dh fp8 --GEMM 1 dgrad--> dx bf16
    dW1, dW3 = dh^T x and dW2 = dy^T a, from transposes that stay in fp8

Neither direction casts anything by itself: rows arrive quantized, and the only quantization here is fused into SwiGLU.
Both are plain functions; :mod:`titan_fp8moe.moe` makes one autograd function of them and of the token movement.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from titan_fp8moe import ops, recipe
from titan_fp8moe.config import Fp8FlowMoEConfig


class Rows(NamedTuple):
    """Quantized rows: q (M, D) e4m3, scale (M, D // 128) e8m0."""

    q: Tensor
    scale: Tensor


class Layout(NamedTuple):
    """The rows' expert order; see :func:`titan_fp8moe.recipe.expert_layout`."""

    offsets_E: Tensor
    token_M: Tensor
    score_M: Tensor
    row_S: Tensor


class ExpertWeights(NamedTuple):
    """gate (E, H, D), down (E, D, H), up (E, H, D), bf16 or fp32, under torchtitan's names."""

    w1_EHD: Tensor
    w2_EDH: Tensor
    w3_EHD: Tensor


def expert_ffn(
    x: Rows, weights: ExpertWeights, layout: Layout, score_before_experts: bool, config: Fp8FlowMoEConfig
) -> tuple[Tensor, list[Tensor]]:
    """y = (silu(x W1^T) * (x W3^T) * score) W2^T per expert.

    Returns:
        y (M, D) bf16, and what the backward needs beside x: nothing (``recompute = experts``), GEMM 1's output
        (``activation``; two tensors with ``save_h = fp8``), or that and GEMM 2's operand (``none``).
    """
    w1, w2, w3 = weights
    w13 = ops.quantize_weight(w1, w3)
    h = ops.grouped_mm(*x, *w13, layout.offsets_E, torch.bfloat16)
    keep_fp8_h = config.save_h == "fp8" and config.recompute != "experts"
    a, a_scale, h_q, h_scale = ops.swiglu_quantize(
        h, layout.score_M, layout.offsets_E, score_before_experts, keep_fp8_h
    )
    y = ops.grouped_mm(a, a_scale, *ops.quantize_weight(w2), layout.offsets_E, torch.bfloat16)
    saved = []
    if config.recompute != "experts":
        saved += [h_q, h_scale] if keep_fp8_h else [h]
    if config.recompute == "none":
        saved += [a, a_scale]
    return y, saved


def expert_ffn_backward(
    dy: Rows,
    x: Rows,
    saved: list[Tensor],
    weights: ExpertWeights,
    layout: Layout,
    score_before_experts: bool,
    config: Fp8FlowMoEConfig,
    weight_grads: tuple[bool, bool, bool] = (True, True, True),
) -> tuple[Tensor, Tensor, list[Tensor | None]]:
    """Gradients of :func:`expert_ffn`.

    Args:
        dy: the quantized gradient of y, in expert order.
        saved: as returned by the forward.
        weight_grads: which of w1, w2, w3 need one.

    Returns:
        dx (M, D) bf16, the score's gradient (M,) fp32, and the weights' gradients in the weights' dtype.
    """
    w1, w2, w3 = weights
    offsets_E = layout.offsets_E
    h_scale = operand = None
    if config.recompute == "experts":
        w13, w13_t = ops.quantize_weight_both(w1, w3)
        h = ops.grouped_mm(*x, *w13, offsets_E, torch.bfloat16)
        del w13
    else:
        w13_t = ops.quantize_weight_transposed(w1, w3)
        h, *rest = saved
        if config.save_h == "fp8":
            h_scale, *rest = rest
        if config.recompute == "none":
            operand = Rows(*rest)

    d = ops.grouped_mm(*dy, *ops.quantize_weight_transposed(w2), offsets_E, torch.bfloat16)
    dh, dh_scale, a, a_scale, ds_M = ops.swiglu_quantize_backward(
        d, h, h_scale, layout.score_M, offsets_E, score_before_experts
    )
    del d, h
    dh, operand = Rows(dh, dh_scale), operand or Rows(a, a_scale)
    dx = ops.grouped_mm(*dh, *w13_t, offsets_E, torch.bfloat16)
    del w13_t

    dw1 = dw2 = dw3 = None
    if weight_grads[0] or weight_grads[2]:
        # Gate and up separately, so that each gradient is contiguous as its parameter is.
        dw1, dw3 = _weight_grads(dh, x, offsets_E, config.wgrad, w1.dtype, parts=2)
    if weight_grads[1]:
        (dw2,) = _weight_grads(dy, operand, offsets_E, config.wgrad, w2.dtype, parts=1)
    return dx, ds_M, [dw1, dw2, dw3]


def _weight_grads(dy: Rows, x: Rows, offsets_E: Tensor, mode: str, dtype: torch.dtype, parts: int) -> list[Tensor]:
    """dW = dy^T x per expert, (E, N, K), split into ``parts`` along N."""
    if mode == "bf16":
        x_MK = recipe.dequantize(*x, torch.bfloat16)
        dy_NM = recipe.dequantize(*dy, torch.bfloat16).t()
        return [torch._grouped_mm(part, x_MK, offs=offsets_E).to(dtype) for part in dy_NM.chunk(parts)]
    x_t, x_t_scale, dy_t, dy_t_scale = ops.transpose_pair(*x, *dy, offsets_E, mode)
    return [
        ops.grouped_mm_wgrad(part, part_scale, x_t, x_t_scale, offsets_E, dtype)
        for part, part_scale in zip(dy_t.chunk(parts), dy_t_scale.chunk(parts), strict=True)
    ]
