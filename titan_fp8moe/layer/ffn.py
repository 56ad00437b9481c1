"""The FP8 FFN: forward and backward on quantized rows that are grouped by expert.

    x fp8 --GEMM 1--> h bf16 --activation, score, quantize--> a fp8 --GEMM 2--> y bf16
    dy fp8 --GEMM 2 dgrad--> bf16 --activation backward, quantize--> dh fp8 --GEMM 1 dgrad--> dx bf16
    dW1, dW3 = dh^T x and dW2 = dy^T a, from transposes that stay in FP8; the transpose of x gathers its rows

h has 2H columns, gate and up, or H where experts have no gate; then there is no W3.

Rows arrive quantized, and the only quantization here is fused into the activation. Nothing here knows of autograd or of
ranks: :mod:`titan_fp8moe.layer.experts` and :mod:`titan_fp8moe.layer.group` call the steps in their order::

    h = ffn.product(x, w13)                        hidden = ffn.hidden(x, w13), unless it was saved
    a, hidden = ffn.activate(h)                    grads, a = ffn.hidden_gradients(dy, hidden, a, w2_t)
    y = ffn.product(a, w2)                         dw2 = ffn.w2_grad(dy, a, operands)
                                                   dx = ffn.product(grads.dh, w13_t)
                                                   dw13 = ffn.w13_grad(x, grads.dh, operands)

The steps are calls of their own for two reasons. Steps that need no row in flight run while tokens travel. And the
caller drops each tensor after its last use, which no callee could do: an argument lives as long as the call.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from titan_fp8moe import ops
from titan_fp8moe.dispatch.base import in_expert_order
from titan_fp8moe.layer import statistics
from titan_fp8moe.layer.lora import NO_LORA, GemmLora, LoraOperands
from titan_fp8moe.layer.operands import WeightOperands
from titan_fp8moe.layer.weights import Biases, ExpertWeights
from titan_fp8moe.ops import Fp8Weight
from titan_fp8moe.rows import Routing, RowBias, Rows
from titan_fp8moe.spec import BackwardSpec, ExpertSpec


class Hidden(NamedTuple):
    """GEMM 1's output ``h`` (M, 2H), bf16, or e4m3 with ``scale``."""

    h: Tensor
    scale: Tensor | None = None


class HiddenGradients(NamedTuple):
    """Tensors that the first half of a backward leaves to the second.

    Attributes:
        dh: (M, 2H), the gradient of GEMM 1's output, rows in expert order.
        ds_M: (M,) fp32, of the rows' scores, if they have any.
        dbias: the biases' gradients in one, (E, 2H + D), or None.
        dx: (M, D) bf16, the input's gradient of shared experts, or None.
    """

    dh: Rows
    ds_M: Tensor | None = None
    dbias: Tensor | None = None
    dx: Tensor | None = None


class WeightGrads(NamedTuple):
    """Gradients of GEMM 1's weights in one, as :func:`weight_grads` returns them, and of ``w2``; or None."""

    w13: Tensor | None = None
    w2: Tensor | None = None

    def apart(self, weights: ExpertWeights) -> ExpertWeights:
        """One for each of the weights."""
        if self.w13 is None or weights.w3 is None:
            return ExpertWeights(cast(Any, self.w13), cast(Any, self.w2))
        w1, w3 = self.w13.chunk(2)
        return ExpertWeights(w1, cast(Any, self.w2), w3)


class FFN(NamedTuple):
    """An FFN's settings, row map, biases and adapters. Its steps take rows and operands of weights."""

    expert: ExpertSpec
    backward: BackwardSpec
    routing: Routing
    biases: Biases[Tensor] | None = None
    lora: LoraOperands = NO_LORA

    def product(
        self, rows: Rows, weight: Fp8Weight, lora: GemmLora | None = None, columns: int | None = None
    ) -> Tensor:
        """Each expert's rows (M, K) times its weight (N, K): (M, N) bf16.

        Args:
            lora: this FFN's adapter of the weight.
            columns: N without padding, for results that leave the FFN.
        """
        out = ops.grouped_mm(*rows, *weight, self.routing.offsets_E, torch.bfloat16, columns)
        if lora is None:
            return out
        return out.add_(ops.low_rank(*rows, lora.A, lora.B, self.routing.offsets_E)[:, :columns])

    def activate(self, h_M2H: Tensor) -> tuple[Rows, Hidden | None]:
        """GEMM 2's operand (M, H), and h if the backward reads it."""
        keep_h = self.backward.save_h == "fp8" and self.backward.keeps_h
        biases = () if self.biases is None else self.biases.gate_up(self.expert)
        a_q, a_scale, h_q, h_scale = ops.swiglu_quantize(
            h_M2H, self.routing.score_M, self.routing.offsets_E, self.expert, keep_h, *biases
        )
        hidden = Hidden(h_q, h_scale) if keep_h else Hidden(h_M2H) if self.backward.keeps_h else None
        return Rows(a_q, a_scale), hidden

    def row_bias(self) -> RowBias | None:
        """The bias that :meth:`product` of GEMM 2 leaves out."""
        if self.biases is None:
            return None
        score_M = None if self.expert.score_before_experts else self.routing.score_M
        return RowBias(self.biases.b2, score_M, self.routing.offsets_E)

    def hidden(self, x: Rows, w13: Fp8Weight) -> Hidden:
        """h, computed again. ``x``: as in :meth:`w13_grad`."""
        return Hidden(self.product(self.in_expert_order(x), w13, self.lora.w13))

    def hidden_gradients(
        self, dy: Rows, hidden: Hidden, a: Rows | None, w2_t: Fp8Weight, of_biases: bool = False
    ) -> tuple[HiddenGradients, Rows | None]:
        """The gradients of the hidden rows, and ``a``, GEMM 2's operand.

        From dy, the quantized gradient of y in expert order; with ``of_biases`` also the biases' gradients. ``a`` is
        computed again unless the forward saved it; None where weights are frozen.
        """
        d_MH = self.product(dy, w2_t, self.lora.w2_t)
        offsets_E, score_M = self.routing.offsets_E, self.routing.score_M
        recompute_a = a is None and self.backward.weights != "frozen"
        biases: list[Any] = []
        if self.biases is not None:
            # b2 is no part of GEMM 2: its gradient, and its share of the scores', come from dy.
            biases += [*self.biases.gate_up(self.expert), self.biases.b2, *dy, of_biases]
        dh, dh_scale, a_q, a_scale, ds_M, *dbias = ops.swiglu_quantize_backward(
            d_MH, *hidden, score_M, offsets_E, self.expert, recompute_a, *biases
        )
        grads = HiddenGradients(Rows(dh, dh_scale), None if score_M is None else ds_M, dbias[0] if dbias else None)
        return grads, Rows(a_q, a_scale) if recompute_a else a

    def w2_grad(self, dy: Rows, a: Rows | None, operands: WeightOperands) -> Tensor:
        """The gradient of w2. ``dy``, ``a``: rows in expert order; ``operands``: of the weights."""
        weights, offsets_E = (operands.like.w2,), self.routing.offsets_E
        return weight_grads(dy, cast(Rows, a), None, offsets_E, self.backward.wgrad, weights)

    def w13_grad(self, x: Rows, dh: Rows, operands: WeightOperands) -> Tensor:
        """The gradients of GEMM 1's weights in one.

        Args:
            x: the rows that GEMM 1's were permuted from, one per token. The transpose gathers from them, so that no
                token is kept once per expert.
            operands: of the weights.
        """
        mode, (w1, _, w3) = self.backward.wgrad, operands.like
        rows, token_M = (self.in_expert_order(x), None) if mode == "bf16" else (x, self.routing.token_M)
        gate_up, parts = (w1,) if w3 is None else (w1, w3), len(operands.groups[0])
        return weight_grads(dh, rows, token_M, self.routing.offsets_E, mode, gate_up, parts)

    def in_expert_order(self, x: Rows) -> Rows:
        return x if self.routing.token_M is None else in_expert_order(x, self.routing)  # else they are one group

    def record(self, x: Rows, dh: Rows, a: Rows | None, dy: Rows, operands: WeightOperands) -> None:
        """Counts operands of weight gradients for :mod:`titan_fp8moe.layer.statistics`. ``x``: as of
        :meth:`w13_grad`."""
        _, D, H = operands.like.w2.shape
        columns = self.expert.rows_per_unit * H
        parts = 1 if self.expert.interleaved else self.expert.rows_per_unit
        pairs = [
            (("x", self.in_expert_order(x), 1, D), ("dh", dh, parts, columns // parts)),
            (("a", cast(Rows, a), 1, H), ("dy", dy, 1, D)),
        ]
        offsets_E, token_M = self.routing.offsets_E, self.routing.token_M
        statistics.record(pairs, operands.groups, offsets_E, token_M, self.backward.wgrad)


def weight_grads(
    dy: Rows,
    x: Rows,
    token_M: Tensor | None,
    offsets_E: Tensor,
    mode: str,
    weights: Sequence[Tensor],
    parts: int = 1,
) -> Tensor:
    """dW = dy^T x per expert, of all weights that dy's columns belong to.

    Args:
        dy: (M, N), N the rows of the weights of one expert, of which each matrix is padded.
        x: (M, K), K their padded columns; with ``token_M``, (M,) int32, in token order.
        offsets_E: (E,) int32, the end of each expert's group.
        mode: ``wgrad`` of the settings.
        weights: one or two (E, N_i, K_i), alike in shape and dtype.
        parts: the matrices along N, each of which the operands pad.

    Returns:
        The gradient (E, N_i, K_i) of a single weight, or those of two in one (2E, N_i, K_i), in the weights' dtype. A
        single weight may lie in memory as (E, K, N); its gradient then lies so too.
    """
    first, layout = weights[0], "apart" if len(weights) == parts else "joined"
    if len(weights) == 1 and first.stride()[1] == 1 != first.stride()[2]:
        layout = "transposed"
    rows, columns = first.shape[1] * len(weights) // parts, first.shape[2]
    result = first.dtype, parts, rows, columns, layout
    if mode == "bf16":
        grads = _bf16_product(dy, x, offsets_E, *result)
    else:
        x_t, x_t_scale, dy_t, dy_t_scale = ops.transpose_pair(*x, *dy, offsets_E, mode, token_M)
        grads = ops.grouped_mm_wgrad(dy_t, dy_t_scale, x_t, x_t_scale, offsets_E, *result)
    return grads.transpose(1, 2) if layout == "transposed" else grads


def _bf16_product(
    dy: Rows, x: Rows, offsets_E: Tensor, dtype: torch.dtype, parts: int, rows: int, columns: int, layout: str
) -> Tensor:
    """dy^T x in bf16; arguments and result as of :func:`titan_fp8moe.ops.grouped_mm_wgrad`."""
    dy_MN, x_MK = ops.dequantize_rows(*dy, offsets_E), ops.dequantize_rows(*x, offsets_E)
    grads = []
    for part in dy_MN.chunk(parts, 1):
        left, right = (x_MK, part) if layout == "transposed" else (part, x_MK)
        grad = torch._grouped_mm(left.t(), right, offs=offsets_E).to(dtype)
        grads.append(grad[:, :columns, :rows] if layout == "transposed" else grad[:, :rows, :columns])
    return torch.cat(grads, {"apart": 0, "joined": 1, "transposed": 2}[layout]).contiguous()
