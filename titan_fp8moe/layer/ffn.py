"""The FP8 FFN: forward and backward on quantized rows that are grouped by expert.

    x fp8 --GEMM 1--> h bf16 --activation, score, quantize--> a fp8 --GEMM 2--> y bf16
    dy fp8 --GEMM 2 dgrad--> bf16 --activation backward, quantize--> dh fp8 --GEMM 1 dgrad--> dx bf16
    dW1, dW3 = dh^T x and dW2 = dy^T a, from transposes that stay in FP8; the transpose of x gathers its rows

h has 2H columns, gate and up, or H where experts have no gate; then there is no W3.

Rows arrive quantized, and the only quantization here is fused into the activation. Nothing here knows of autograd or of
ranks: :mod:`titan_fp8moe.layer.experts` and :mod:`titan_fp8moe.layer.group` call the steps in their order::

    h = ffn.product(x, w13)                        saved = ffn.with_hidden(saved, x, w13)   needs no gradient
    a, saved = ffn.activate(h)                     grads = ffn.hidden_gradients(dy, saved, w2_t)
    y = ffn.product(a, w2)                         dx = ffn.product(grads.dh, w13_t)
                                                   dw = ffn.weight_grads(x, grads, weights, needed)

The steps are calls of their own for two reasons. Steps that need no row in flight run while tokens travel. And the
caller drops each tensor after its last use, which no callee could do: an argument lives as long as the call.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from titan_fp8moe import ops
from titan_fp8moe.layer import statistics
from titan_fp8moe.layer.lora import NO_LORA, GemmLora, LoraOperands
from titan_fp8moe.layer.statistics import Operand
from titan_fp8moe.layer.weights import NO_WEIGHTS, Biases, ExpertWeights, readable
from titan_fp8moe.ops import Fp8Weight
from titan_fp8moe.rows import NO_FLAGS, NanFlags, Routing, RowBias, Rows
from titan_fp8moe.spec import BackwardSpec, ExpertSpec, encode


class SavedFFN(NamedTuple):
    """Tensors that a backward needs of its forward; None for those that the settings leave out.

    Attributes:
        h, h_scale: GEMM 1's output (M, 2H), bf16, or e4m3 with scales.
        a_q, a_scale: GEMM 2's operand.
    """

    h: Tensor | None = None
    h_scale: Tensor | None = None
    a_q: Tensor | None = None
    a_scale: Tensor | None = None


def saved_fields(backward: BackwardSpec) -> tuple[str, ...]:
    """The fields of :class:`SavedFFN` that an FFN with these settings saves."""
    if backward.recompute == "experts":
        return ()
    fields = ("h", "h_scale") if backward.save_h == "fp8" else ("h",)
    return (*fields, "a_q", "a_scale") if backward.keeps_operand else fields


class HiddenGradients(NamedTuple):
    """The operands of the weight gradients, rows in expert order, and the scores' gradient.

    Attributes:
        dy: (M, D), the gradient of the output; dh: (M, 2H), of GEMM 1's output.
        a: (M, H), GEMM 2's operand, empty where weights are frozen.
        ds_M: (M,) fp32.
        dbias: the biases' gradients in one, (E, 2H + D), or None.
    """

    dy: Rows
    dh: Rows
    a: Rows
    ds_M: Tensor
    dbias: Tensor | None = None


class FFN(NamedTuple):
    """An FFN apart from its rows and weights.

    Attributes:
        biases: if its expert has any.
        dim: D, the columns of its results; None for those of the operands, which are padded to a multiple of 128.
    """

    expert: ExpertSpec
    backward: BackwardSpec
    routing: Routing
    nans: NanFlags = NO_FLAGS
    biases: Biases[Tensor] | None = None
    lora: LoraOperands = NO_LORA
    dim: int | None = None

    def product(
        self, rows: Rows, weight: Fp8Weight, lora: GemmLora | None = None, columns: int | None = None
    ) -> Tensor:
        """Each expert's rows (M, K) times its weight (N, K) and its adapter: (M, N) bf16, or the first ``columns``."""
        out = ops.grouped_mm(*rows, *weight, self.routing.offsets_E, torch.bfloat16, columns)
        if lora is None:
            return out
        return out.add_(ops.low_rank(*rows, lora.A, lora.B, self.routing.offsets_E)[:, :columns])

    def activate(self, h_M2H: Tensor) -> tuple[Rows, SavedFFN]:
        """GEMM 2's operand (M, H), and tensors for the backward: those of :func:`saved_fields`, and if there are any,
        the operand."""
        fields, spec = saved_fields(self.backward), encode(self.expert)
        keep_h = "h_scale" in fields
        biases = () if self.biases is None else self.biases.gate_up(self.expert)
        a_q, a_scale, h_q, h_scale = ops.swiglu_quantize(
            h_M2H, self.routing.score_M, self.routing.offsets_E, spec, keep_h, self.nans.a, *biases
        )
        if not fields:
            return Rows(a_q, a_scale), SavedFFN()
        hidden = (h_q, h_scale) if keep_h else (h_M2H, None)
        return Rows(a_q, a_scale), SavedFFN(*hidden, a_q, a_scale)

    def row_bias(self) -> RowBias | None:
        """The bias that :meth:`product` of GEMM 2 leaves out."""
        if self.biases is None:
            return None
        score_M = None if self.expert.score_before_experts else self.routing.score_M
        return RowBias(self.biases.b2, score_M, self.routing.offsets_E)

    def with_hidden(self, saved: SavedFFN, x: Rows | None, w13: Fp8Weight | None) -> SavedFFN:
        """``saved`` with h, which is computed again if the settings kept none. ``x``: as in :meth:`weight_grads`."""
        if saved.h is not None:
            return saved
        h = self.product(self.in_expert_order(cast(Rows, x)), cast(Fp8Weight, w13), self.lora.w13)
        return saved._replace(h=h)

    def hidden_gradients(self, dy: Rows, saved: SavedFFN, w2_t: Fp8Weight, of_biases: bool = False) -> HiddenGradients:
        """From the quantized gradient of y in expert order; with ``of_biases`` also the biases' gradients."""
        d_MH = self.product(dy, w2_t, self.lora.w2_t)
        h, offsets_E, score_M = cast(Tensor, saved.h), self.routing.offsets_E, self.routing.score_M
        recompute_a = saved.a_q is None and self.backward.weights != "frozen"
        biases: list[Any] = []
        if self.biases is not None:
            biases += [*self.biases.gate_up(self.expert), self.biases.b2, *dy, of_biases]
        dh, dh_scale, a_q, a_scale, ds_M, *dbias = ops.swiglu_quantize_backward(
            d_MH, h, saved.h_scale, score_M, offsets_E, encode(self.expert), recompute_a, self.nans.dh, *biases
        )
        a = Rows(a_q, a_scale) if saved.a_q is None or saved.a_scale is None else Rows(saved.a_q, saved.a_scale)
        return HiddenGradients(dy, Rows(dh, dh_scale), a, ds_M, *dbias)

    def weight_grads(
        self, x: Rows | None, grads: HiddenGradients, weights: ExpertWeights[Tensor], needed: ExpertWeights[Any]
    ) -> ExpertWeights[Any]:
        """Gradients of the weights, in their dtype, bf16 or fp32.

        Args:
            x: the rows that GEMM 1's were permuted from, one per token. The transpose gathers from them, so that no
                token is kept once per expert. None where the layer keeps none.
            weights: the parameters.
            needed: which of the gradients to compute. w1's and w3's come together.

        Returns:
            None where not needed, and for a w3 that is None.
        """
        if x is None or self.backward.weights != "trained":
            return NO_WEIGHTS
        mode, offsets_E = self.backward.wgrad, self.routing.offsets_E
        dtype, dw13, dw2 = weights.w2.dtype, [None], None
        if needed.w1 or needed.w3:
            rows, token_M = (self.in_expert_order(x), None) if mode == "bf16" else (x, self.routing.token_M)
            matrices = 1 if weights.apart(self.expert) is weights else 2
            dw13 = weight_grads(Operands(grads.dh, rows, token_M, offsets_E), mode, dtype, weights.gate_up, matrices)
        if needed.w2:
            operands = Operands(grads.dy, grads.a, None, offsets_E)
            (dw2,) = weight_grads(operands, mode, dtype, (weights.w2,))
        if statistics.collecting():
            self._record(x, grads, weights)
        return ExpertWeights(dw13[0], dw2, *dw13[1:])

    def lora_grads(self, x: Rows, grads: HiddenGradients) -> dict[str, Tensor]:
        """Gradients of the adapters by the fields of :class:`titan_fp8moe.layer.lora.LoraTensors`. ``x``: as in
        :meth:`weight_grads`."""
        (w13, w2), offsets_E, result = self.lora, self.routing.offsets_E, {}
        if w13 is not None:
            result = w13.grads(self.in_expert_order(x), grads.dh, offsets_E)
        if w2 is not None:
            result |= w2.grads(grads.a, grads.dy, offsets_E)
        return result

    def in_expert_order(self, x: Rows) -> Rows:
        offsets_E, token_M, _, row_TK = self.routing
        if token_M is None:  # one group
            return x
        T = row_TK.shape[0]  # where shared experts read the same rows, others follow that pad their group
        return Rows(*ops.permute_rows(x.q[:T], x.scale[:T], row_TK, token_M, offsets_E))

    def _record(self, x: Rows, grads: HiddenGradients, weights: ExpertWeights[Tensor]) -> None:
        _, D, H = weights.w2.shape
        x_operand, dy = Operand("x", self.in_expert_order(x), 1, D), Operand("dy", grads.dy, 1, D)
        columns = self.expert.rows_per_unit * H
        parts = 1 if self.expert.interleaved else self.expert.rows_per_unit
        pairs = [
            (x_operand, Operand("dh", grads.dh, parts, columns // parts)),
            (Operand("a", grads.a, 1, H), dy),
        ]
        values = readable(weights).apart(self.expert)
        gemms = values.gate_up, (values.w2,)
        statistics.record(pairs, gemms, self.routing.offsets_E, self.routing.token_M, self.backward.wgrad)


class Operands(NamedTuple):
    """Operands of a weight gradient dW = dy^T x.

    Attributes:
        dy: (M, N), N the rows of the weights of one expert, of which each matrix is padded.
        x: (M, K), K their padded columns; with ``token_M`` in token order.
        token_M: (M,) int32 or None.
        offsets_E: (E,) int32, the end of each expert's group.
    """

    dy: Rows
    x: Rows
    token_M: Tensor | None
    offsets_E: Tensor


def weight_grads(
    operands: Operands, mode: str, dtype: torch.dtype, weights: Sequence[Tensor], matrices: int = 1
) -> list[Tensor]:
    """dW per expert, for each of the weights that dy's columns belong to.

    Args:
        mode: ``wgrad`` of the settings; dtype: bf16 or fp32, of the result.
        weights: (E, N_i, K_i), all of the same shape.
        matrices: how many matrices, each of which the operands pad, a single weight holds along N_i.

    Returns:
        A contiguous gradient (E, N_i, K_i) for each weight. A single weight may lie in memory as (E, K, N); its
        gradient then lies so too.
    """
    first, count, layout = weights[0], len(weights), "apart" if matrices == 1 else "joined"
    if count == 1 and first.stride()[1] == 1 != first.stride()[2]:
        layout = "transposed"
    _, rows, columns = first.shape
    result = dtype, count * matrices, rows // matrices, columns, layout
    if mode == "bf16":
        grads = _bf16_product(operands, *result)
    else:
        dy, x, token_M, offsets_E = operands
        x_t, x_t_scale, dy_t, dy_t_scale = ops.transpose_pair(*x, *dy, offsets_E, mode, token_M)
        grads = ops.grouped_mm_wgrad(dy_t, dy_t_scale, x_t, x_t_scale, offsets_E, *result)
    if layout == "transposed":
        return [grads.transpose(1, 2)]
    return list(grads.chunk(count)) if count > 1 else [grads]


def _bf16_product(operands: Operands, dtype: torch.dtype, parts: int, rows: int, columns: int, layout: str) -> Tensor:
    """dy^T x in bf16; arguments and result as of :func:`titan_fp8moe.ops.grouped_mm_wgrad`."""
    dy, x, _token_M, offsets_E = operands
    dy_MN, x_MK = ops.dequantize_rows(*dy, offsets_E), ops.dequantize_rows(*x, offsets_E)
    grads = []
    for part in dy_MN.chunk(parts, 1):
        left, right = (x_MK, part) if layout == "transposed" else (part, x_MK)
        grad = torch._grouped_mm(left.t(), right, offs=offsets_E).to(dtype)
        grads.append(grad[:, :columns, :rows] if layout == "transposed" else grad[:, :rows, :columns])
    return torch.cat(grads, {"apart": 0, "joined": 1, "transposed": 2}[layout]).contiguous()
