"""The expert FFN in FP8: forward and backward on rows in expert order.

    x fp8 --GEMM 1--> h bf16 --SwiGLU, score, quantize--> a fp8 --GEMM 2--> y bf16
    dy fp8 --GEMM 2 dgrad--> bf16 --SwiGLU backward, quantize--> dh fp8 --GEMM 1 dgrad--> dx bf16
    dW1, dW3 = dh^T x and dW2 = dy^T a, from transposes that stay in fp8; that of x gathers its rows

Neither direction casts anything by itself: rows arrive quantized, and the only quantization here is fused into SwiGLU.
Nothing here knows of autograd; :mod:`titan_fp8moe.moe` makes one autograd function of it and of the token movement.
What does not depend on the rows comes in calls of its own, so that it can run while they are on their way.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from titan_fp8moe import ops, recipe, statistics
from titan_fp8moe.config import Fp8FlowMoEConfig
from titan_fp8moe.ops import QuantizedWeight
from titan_fp8moe.weights import ExpertWeights, WeightCache, quantize_weights_transposed


class Rows(NamedTuple):
    """Quantized rows: q (M, D) e4m3, scale (M, D // 128) e8m0."""

    q: Tensor
    scale: Tensor


class Layout(NamedTuple):
    """The rows' expert order; see :func:`titan_fp8moe.recipe.expert_layout`. With expert parallelism the tokens are the
    copies that arrived, and ``row_TK`` is (C, top_k)."""

    offsets_E: Tensor
    token_M: Tensor
    score_M: Tensor
    row_TK: Tensor


def expert_ffn(
    given: list[Rows],
    w13: QuantizedWeight,
    w2: QuantizedWeight,
    layout: Layout,
    score_before_experts: bool,
    config: Fp8FlowMoEConfig,
) -> tuple[Tensor, list[Tensor]]:
    """y = (silu(x W1^T) * (x W3^T) * score) W2^T per expert.

    Args:
        given: x alone. It is taken out of the list, to be freed after GEMM 1: an argument may live as long as the call,
            and does where torch.compile evaluates Python's frames.
        w13, w2, layout, score_before_experts, config: the operands, where rows lie, and the settings.

    Returns:
        y (M, D) bf16, and what the backward needs: x (``recompute = experts``); or, beside the rows that x was permuted
        from, GEMM 1's output (``activation``; two tensors with ``save_h = fp8``), or that and GEMM 2's operand
        (``none``).
    """
    x = given.pop()
    saved = [*x] if config.recompute == "experts" else []
    h = ops.grouped_mm(*x, *w13, layout.offsets_E, torch.bfloat16)
    del x
    keep_fp8_h = config.save_h == "fp8" and config.recompute != "experts"
    a, a_scale, h_q, h_scale = ops.swiglu_quantize(
        h, layout.score_M, layout.offsets_E, score_before_experts, keep_fp8_h
    )
    if config.recompute != "experts":
        saved += [h_q, h_scale] if keep_fp8_h else [h]
    if config.recompute == "none":
        saved += [a, a_scale]
    del h
    return ops.grouped_mm(a, a_scale, *w2, layout.offsets_E, torch.bfloat16), saved


class ExpertFFNBackward:
    """The gradients of :func:`expert_ffn`, in three steps: what needs no gradient, the rows', the weights'.

    Args:
        x: as in the forward with ``recompute = experts``; else the rows that it was permuted from, one per token. Of
            these the weight gradient's transpose gathers, so that no token is kept once per expert.
        saved: as returned by the forward.
        weights: as in the forward, not yet quantized.
        layout, score_before_experts, config: as in the forward.
        cache: of the layer's quantized weights, if they are to be kept.
    """

    def __init__(
        self,
        x: Rows,
        saved: list[Tensor],
        weights: ExpertWeights,
        layout: Layout,
        score_before_experts: bool,
        config: Fp8FlowMoEConfig,
        cache: WeightCache | None = None,
    ):
        self.x, self.layout, self.score_before_experts, self.config = x, layout, score_before_experts, config
        self.weights = weights
        recompute_h = config.recompute == "experts"
        self.token_M = None if recompute_h else layout.token_M
        w13, self.w13_t, self.w2_t = quantize_weights_transposed(weights, cache, recompute_h)
        self.h_scale = self.a = None
        if recompute_h:
            self.h = ops.grouped_mm(*x, *w13, layout.offsets_E, torch.bfloat16)
        else:
            self.h, *rest = saved
            if config.save_h == "fp8":
                self.h_scale, *rest = rest
            if config.recompute == "none":
                self.a = Rows(*rest)

    def dgrad(self, dy: Rows) -> tuple[Tensor, Tensor]:
        """dx (M, D) bf16 and the score's gradient (M,) fp32, from the quantized gradient of y in expert order."""
        self.dy, offsets_E = dy, self.layout.offsets_E
        d = ops.grouped_mm(*dy, *self.w2_t, offsets_E, torch.bfloat16)
        dh, dh_scale, a, a_scale, ds_M = ops.swiglu_quantize_backward(
            d, self.h, self.h_scale, self.layout.score_M, offsets_E, self.score_before_experts, self.a is None
        )
        self.dh, self.a = Rows(dh, dh_scale), self.a or Rows(a, a_scale)
        del d, self.h, self.h_scale, self.w2_t
        dx = ops.grouped_mm(*self.dh, *self.w13_t, offsets_E, torch.bfloat16)
        del self.w13_t
        return dx, ds_M

    def wgrad(self, dtype: torch.dtype, needed: tuple[bool, bool, bool] = (True, True, True)) -> list[Tensor | None]:
        """Gradients of w1, w2, w3 in ``dtype``, bf16 or fp32, None where not needed (w1's and w3's: where neither is);
        after :meth:`dgrad`."""
        offsets_E, mode = self.layout.offsets_E, self.config.wgrad
        dw1 = dw2 = dw3 = None
        if needed[0] or needed[2]:
            x, token_M = (self._x_in_expert_order(), None) if mode == "bf16" else (self.x, self.token_M)
            dw1, dw3 = _weight_grads(self.dh, x, token_M, offsets_E, mode, dtype, parts=2)
        if needed[1]:
            (dw2,) = _weight_grads(self.dy, self.a, None, offsets_E, mode, dtype, parts=1)
        if statistics.collecting():
            x = self._x_in_expert_order()
            statistics.record(x, self.a, self.dy, self.dh, self.weights, offsets_E, self.layout.token_M, mode)
        return [dw1, dw2, dw3]

    def _x_in_expert_order(self) -> Rows:
        if self.token_M is None:
            return self.x
        return Rows(*ops.permute_rows(*self.x, self.layout.row_TK, self.token_M, self.layout.offsets_E))


def _weight_grads(
    dy: Rows, x: Rows, token_M: Tensor | None, offsets_E: Tensor, mode: str, dtype: torch.dtype, parts: int
) -> Sequence[Tensor]:
    """dW = dy^T x per expert, (E, N // parts, K) for each of ``parts`` weights that N is made of, contiguous. With
    ``token_M`` x is in token order."""
    if mode == "bf16":
        x_MK = recipe.dequantize(*x, torch.bfloat16)
        dy_NM = recipe.dequantize(*dy, torch.bfloat16).t()
        return [torch._grouped_mm(part, x_MK, offs=offsets_E).to(dtype) for part in dy_NM.chunk(parts)]
    x_t, x_t_scale, dy_t, dy_t_scale = ops.transpose_pair(*x, *dy, offsets_E, mode, token_M)
    grads = ops.grouped_mm_wgrad(dy_t, dy_t_scale, x_t, x_t_scale, offsets_E, dtype, parts)
    return grads.chunk(parts) if parts > 1 else [grads]
