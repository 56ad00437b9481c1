"""The FP8 FFN: forward and backward on quantized rows that are grouped by expert.

    x fp8 --GEMM 1--> h bf16 --SwiGLU, score, quantize--> a fp8 --GEMM 2--> y bf16
    dy fp8 --GEMM 2 dgrad--> bf16 --SwiGLU backward, quantize--> dh fp8 --GEMM 1 dgrad--> dx bf16
    dW1, dW3 = dh^T x and dW2 = dy^T a, from transposes that stay in FP8; the transpose of x gathers its rows

Rows arrive quantized, and the only quantization here is fused into SwiGLU. Nothing here knows of autograd or of ranks:
:mod:`titan_fp8moe.layer.experts` makes one autograd function of this file and of the dispatch. What does not depend on
the rows comes in calls of its own, so that it can run while tokens travel.
"""

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from titan_fp8moe import ops, recipe
from titan_fp8moe.config import Fp8FlowMoEConfig
from titan_fp8moe.layer import statistics
from titan_fp8moe.layer.statistics import Operand
from titan_fp8moe.layer.weights import BackwardOperands, ExpertWeights, Weight
from titan_fp8moe.ops import QuantizedWeight
from titan_fp8moe.rows import NO_FLAGS, NanFlags, Routing, Rows
from titan_fp8moe.spec import ExpertSpec


class SavedFFN(NamedTuple):
    """What the backward needs of the forward; None for what the settings leave out (:func:`saved_ffn_fields`).

    Attributes:
        h, h_scale: GEMM 1's output (M, 2H), bf16, or e4m3 with scales.
        a_q, a_scale: GEMM 2's operand.
    """

    h: Tensor | None = None
    h_scale: Tensor | None = None
    a_q: Tensor | None = None
    a_scale: Tensor | None = None


def saved_ffn_fields(recompute: str, save_h: str) -> tuple[str, ...]:
    """The fields of :class:`SavedFFN` that a layer with these settings saves."""
    if recompute == "experts":
        return ()
    fields = ("h", "h_scale") if save_h == "fp8" else ("h",)
    return (*fields, "a_q", "a_scale") if recompute == "none" else fields


def expert_ffn(
    x: list[Rows],
    w13: QuantizedWeight,
    w2: QuantizedWeight,
    routing: Routing,
    score_before_experts: bool,
    recompute: str,
    save_h: str,
    nans: NanFlags = NO_FLAGS,
) -> tuple[Tensor, SavedFFN]:
    """y = (silu(x W1^T) * (x W3^T) * score) W2^T per expert.

    Args:
        x: the rows in expert order, a list of one. It is emptied, and the rows are freed after GEMM 1: an argument may
            live as long as the call, and does where torch.compile evaluates Python's frames.
        w13, w2: the operands (E, 2H, D) and (E, D, H).
        recompute, save_h: see :class:`titan_fp8moe.config.Fp8FlowMoEConfig`.
        nans: the layer's.

    Returns:
        y (M, D) bf16, and what the backward needs.
    """
    rows = x.pop()
    h = ops.grouped_mm(*rows, *w13, routing.offsets_E, torch.bfloat16)
    del rows
    fields = saved_ffn_fields(recompute, save_h)
    keep_fp8_h = "h_scale" in fields
    saved = dict(h=h) if "h" in fields else {}
    a, a_scale, h_q, h_scale = ops.swiglu_quantize(
        h,
        routing.score_M,
        routing.offsets_E,
        ExpertSpec(score_before_experts=score_before_experts).encode(),
        keep_fp8_h,
        nans.a,
    )
    del h
    if keep_fp8_h:
        saved |= dict(h=h_q, h_scale=h_scale)
    if "a_q" in fields:
        saved |= dict(a_q=a, a_scale=a_scale)
    return ops.grouped_mm(a, a_scale, *w2, routing.offsets_E, torch.bfloat16), SavedFFN(**saved)


class ExpertFFNBackward:
    """The gradients of :func:`expert_ffn` in three steps: what needs no gradient, the rows', the weights'.

    Args:
        tokens: the rows that ``x`` was permuted from, one per token, from which the weight gradient's transpose
            gathers: no token is kept once per expert. With ``recompute = experts`` they are permuted again.
        saved: as returned by the forward. The caller drops its own reference, so that h is freed after its last use.
        weights: as in the forward, not quantized; for the statistics.
        operands: of :func:`titan_fp8moe.layer.weights.quantize_weights_transposed`.
        routing, score_before_experts, config, nans: as in the forward.
    """

    def __init__(
        self,
        tokens: Rows,
        saved: SavedFFN,
        weights: ExpertWeights[Weight],
        operands: BackwardOperands,
        routing: Routing,
        score_before_experts: bool,
        config: Fp8FlowMoEConfig,
        nans: NanFlags = NO_FLAGS,
    ):
        self.weights, self.routing, self.config, self.nans = weights, routing, config, nans
        self.score_before_experts = score_before_experts
        self.w13_t, self.w2_t = operands.w13_t, operands.w2_t
        self.h_scale = saved.h_scale
        self.saved_a = None if saved.a_q is None or saved.a_scale is None else Rows(saved.a_q, saved.a_scale)
        self.x = tokens
        if saved.h is not None:
            self.h = saved.h
        else:
            w13 = cast(QuantizedWeight, operands.w13)
            self.h = ops.grouped_mm(*self._x_in_expert_order(), *w13, routing.offsets_E, torch.bfloat16)

    def dgrad(self, dy: Rows, with_dx: bool = True) -> tuple[Tensor | None, Tensor]:
        """dx (M, D) bf16, None unless ``with_dx``, and the scores' gradient (M,) fp32, from the quantized gradient of y
        in expert order."""
        self.dy, offsets_E = dy, self.routing.offsets_E
        d = ops.grouped_mm(*dy, *self.w2_t, offsets_E, torch.bfloat16)
        dh, dh_scale, a, a_scale, ds_M = ops.swiglu_quantize_backward(
            d,
            self.h,
            self.h_scale,
            self.routing.score_M,
            offsets_E,
            ExpertSpec(score_before_experts=self.score_before_experts).encode(),
            self.saved_a is None,
            self.nans.dh,
        )
        self.dh, self.a = Rows(dh, dh_scale), self.saved_a or Rows(a, a_scale)
        del d, self.h, self.h_scale, self.w2_t
        dx = ops.grouped_mm(*self.dh, *self.w13_t, offsets_E, torch.bfloat16) if with_dx else None
        del self.w13_t
        return dx, ds_M

    def wgrad(self, dtype: torch.dtype, needed: Sequence[bool] = (True, True, True)) -> list[Tensor | None]:
        """Gradients of w1, w2, w3 in ``dtype``, bf16 or fp32; after :meth:`dgrad`.

        None where not ``needed`` (w1's and w3's: where neither is), and for a w3 that is None.
        """
        offsets_E, mode = self.routing.offsets_E, self.config.wgrad
        dw1 = dw2 = dw3 = None
        if needed[0] or needed[2]:
            x, token_M = (self._x_in_expert_order(), None) if mode == "bf16" else (self.x, self.routing.token_M)
            shapes = [_shape(w) for w in self.weights.gate_up]
            dw1, *rest = weight_grads(self.dh, x, token_M, offsets_E, mode, dtype, shapes)
            dw3 = rest[0] if rest else None
        if needed[1]:
            (dw2,) = weight_grads(self.dy, self.a, None, offsets_E, mode, dtype, [_shape(self.weights.w2)])
        if statistics.collecting():
            self._record()
        return [dw1, dw2, dw3]

    def _record(self) -> None:
        _, D, H = _shape(self.weights.w2)
        x, dy = (Operand(kind, rows, 1, D) for kind, rows in (("x", self._x_in_expert_order()), ("dy", self.dy)))
        a, dh = Operand("a", self.a, 1, H), Operand("dh", self.dh, 2, H)
        weights = self.weights.gate_up, (self.weights.w2,)
        statistics.record([(x, dh), (a, dy)], weights, self.routing.offsets_E, self.routing.token_M, self.config.wgrad)

    def _x_in_expert_order(self) -> Rows:
        offsets_E, token_M, _, row_TK = self.routing
        if token_M is None:  # one group
            return self.x
        return Rows(*ops.permute_rows(*self.x, row_TK, token_M, offsets_E))


def _shape(weight: Weight) -> torch.Size:
    return (weight.q if isinstance(weight, QuantizedWeight) else weight).shape


def weight_grads(
    dy: Rows,
    x: Rows,
    token_M: Tensor | None,
    offsets_E: Tensor,
    mode: str,
    dtype: torch.dtype,
    shapes: Sequence[torch.Size],
) -> list[Tensor]:
    """dW = dy^T x per expert, for each of the weights that dy's columns belong to.

    Args:
        dy: (M, N), N the padded rows of the weights of one expert.
        x: (M, K), K their padded columns; with ``token_M`` in token order.
        mode: ``wgrad`` of the settings; dtype: bf16 or fp32, of the result.
        shapes: (E, N_i, K_i) of the weights, all the same.

    Returns:
        A gradient (E, N_i, K_i) for each weight; contiguous if E is 1 or N_i a multiple of 128.
    """
    _, rows, columns = shapes[0]
    parts = len(shapes)
    if mode == "bf16":
        x_MK = recipe.dequantize(*x, torch.bfloat16)
        dy_NM = recipe.dequantize(*dy, torch.bfloat16).t()
        grads = [torch._grouped_mm(part, x_MK, offs=offsets_E).to(dtype) for part in dy_NM.chunk(parts)]
        return [grad[:, :rows, :columns].contiguous() for grad in grads]
    x_t, x_t_scale, dy_t, dy_t_scale = ops.transpose_pair(*x, *dy, offsets_E, mode, token_M)
    kept = None if columns == x_t.shape[0] else columns
    grads = ops.grouped_mm_wgrad(dy_t, dy_t_scale, x_t, x_t_scale, offsets_E, dtype, parts, kept)
    each = grads.chunk(parts) if parts > 1 else [grads]
    return [grad if grad.shape[1] == rows else grad[:, :rows] for grad in each]
