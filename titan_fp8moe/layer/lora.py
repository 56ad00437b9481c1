"""Low-rank adapters (LoRA) beside the FP8 weights of experts.

    h = x W13^T + x A13^T B13^T        y = a W2^T + a A2^T B2^T        the first product in FP8, the second in bf16

Quantizing W + B A would round most of an adapter away: a step of e4m3 is 6 to 12% of a value. So the adapters multiply
the same quantized rows and add to the GEMMs' results, before the activation and before tokens are summed. Gate's and
up's adapters become one, whose B is block diagonal. :mod:`titan_fp8moe.recipe` has the numbers.

:class:`Lora` is the caller's record. Autograd and ops take flat lists of its tensors, which :class:`LoraSpec`
describes. :class:`LoraOperands` is what the FFN multiplies by.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from titan_fp8moe import ops
from titan_fp8moe.ops.lora import RANK_STEP
from titan_fp8moe.recipe import padded
from titan_fp8moe.rows import Rows
from titan_fp8moe.spec import ExpertSpec, constant


class Adapter(NamedTuple):
    """A low-rank adapter of a weight (E, N, K) of this rank's experts, which become W + scale * B A.

    Attributes:
        A: (E, r, K), bf16 or fp32; gradients come in its dtype, and so for B.
        B: (E, N, r), bf16 or fp32.
        scale: alpha / r.

    N and K of a weight that is stored in FP8 are its padded sizes. Pad A and B with zeros to them.
    """

    A: Tensor
    B: Tensor
    scale: float = 1.0


class Lora(NamedTuple):
    """The adapters of a layer's experts; None for a weight without one.

    Attributes:
        w1: of the gate projection; where ``w3`` of the layer is None, of all of ``w1``, such as gate and up in one.
        w2: of the down projection.
        w3: of the up projection.

    Example::

        lora = Lora(w1=Adapter(a1, b1, alpha / r), w2=Adapter(a2, b2, alpha / r), w3=Adapter(a3, b3, alpha / r))
        y = routed_experts(x, w1, w2, w3, ids, scores, lora=lora)
    """

    w1: Adapter | None = None
    w2: Adapter | None = None
    w3: Adapter | None = None


class LoraSpec(NamedTuple):
    """A :class:`Lora` apart from its tensors.

    Attributes:
        scales: of the adapters of w1, w3 and w2, the order of the tensors; None for a weight without one.
        fused: whether w1 is all of GEMM 1's weight.
    """

    scales: tuple[float | None, ...]
    fused: bool

    @property
    def num_of_gemm_1(self) -> int:
        """How many of the tensors are of w1 and w3; these come first."""
        return 2 * sum(scale is not None for scale in self.scales[:2])

    def adapters(self, tensors: Sequence[Tensor]) -> Lora:
        """The inverse of :func:`split_lora`."""
        pairs = zip(tensors[::2], tensors[1::2], strict=True)
        w1, w3, w2 = (None if scale is None else Adapter(*next(pairs), scale) for scale in self.scales)
        return Lora(w1, w2, w3)


def split_lora(lora: Lora, weights: Sequence[Tensor | None]) -> tuple[LoraSpec, list[Tensor]]:
    """The specification of adapters of these w1, w2 and w3, and the list of their tensors.

    Raises:
        ValueError: for adapters that do not fit the weights.
    """
    for name, adapter, weight in zip(Lora._fields, lora, weights, strict=True):
        if adapter is not None:
            _check_adapter(name, adapter, weight)
    by_gemm = lora.w1, lora.w3, lora.w2
    scales = tuple(None if adapter is None else float(constant(adapter.scale)) for adapter in by_gemm)
    tensors = [t for adapter in by_gemm if adapter is not None for t in (adapter.A, adapter.B)]
    return LoraSpec(scales, weights[2] is None), tensors


def _check_adapter(name: str, adapter: Adapter, weight: Any) -> None:
    A, B, scale = adapter
    E, N, K = weight.shape if not isinstance(weight, DTensor) else weight._local_tensor.shape
    rank = A.shape[1]
    fits = rank > 0 and A.shape == (E, rank, K) and B.shape == (E, N, rank)
    kinds = {A.dtype, B.dtype} <= {torch.bfloat16, torch.float32} and math.isfinite(constant(scale))
    if not fits or not kinds or not A.device == B.device == weight.device:
        raise ValueError(
            f"lora.{name} must have A ({E}, r, {K}) and B ({E}, {N}, r), bf16 or fp32 on {weight.device}, for its "
            f"weight ({E}, {N}, {K}), r at least 1, and a finite scale; got {tuple(A.shape)} on {A.device} and "
            f"{tuple(B.shape)} on {B.device}, {A.dtype} and {B.dtype}, scale {scale}"
        )


# --- operands ---------------------------------------------------------------------------------------------------------


class GemmLora(NamedTuple):
    """The adapters of one GEMM as products read them, in bf16, side by side along the ranks.

    Attributes:
        A: (E, R, K), K padded as the quantized weight's, R to a multiple of :data:`titan_fp8moe.ops.lora.RANK_STEP`.
        B: (E, N, R), times the scales. N holds ``each`` matrices of every weight, which are padded.
        adapters: of each weight, in the order in which the operand holds them; None for one without.
    """

    A: Tensor
    B: Tensor
    adapters: list[Adapter | None]
    each: int

    @property
    def transposed(self) -> "GemmLora":
        """For the gradient of the GEMM's input."""
        return self._replace(A=self.B.transpose(1, 2), B=self.A.transpose(1, 2))

    def parts(self, a_ERK: Tensor, b_ENR: Tensor) -> Iterator[tuple[Adapter, Tensor, Tensor]]:
        """Each adapter, and what is its own of A (E, r, K) and of B (E, each, rows, r)."""
        first, b = 0, b_ENR.unflatten(1, (len(self.adapters), self.each, -1))
        for at, adapter in enumerate(self.adapters):
            if adapter is not None:
                _, r, K = adapter.A.shape
                ranks, rows = slice(first, first + r), adapter.B.shape[1] // self.each
                yield adapter, a_ERK[:, ranks, :K], b[:, at, :, :rows, ranks]
                first += r

    def grads(self, x: Rows, dy: Rows, offsets_E: Tensor) -> list[Tensor]:
        """Gradients of A and B of each weight, in their dtypes.

        Args:
            x: the GEMM's input; dy: the gradient of its output; both in expert order.
        """
        grads = []
        for (A, B, scale), a, b in self.parts(*ops.low_rank_grads(*x, *dy, self.A, self.B, offsets_E)):
            a = a.to(A.dtype).clone(memory_format=torch.contiguous_format)
            grads += [a, b.flatten(1, 2).to(B.dtype) * scale]
        return grads


class LoraOperands(NamedTuple):
    """The adapters of an FFN's GEMMs, under the names of the weights' operands; None for a GEMM without one."""

    w13: GemmLora | None = None
    w2: GemmLora | None = None
    w13_t: GemmLora | None = None
    w2_t: GemmLora | None = None


NO_LORA = LoraOperands()


def lora_operands(spec: LoraSpec, tensors: Sequence[Tensor], expert: ExpertSpec) -> LoraOperands:
    """The operands of adapters that :func:`split_lora` took apart."""
    adapters = spec.adapters(tensors)
    gate_up = [adapters.w1] if spec.fused else [adapters.w1, adapters.w3]
    w13 = _join(gate_up, each=2 if spec.fused and expert.gated and not expert.interleaved else 1)
    w2 = _join([adapters.w2], each=1)
    return LoraOperands(w13, w2, w13 and w13.transposed, w2 and w2.transposed)


def _join(adapters: list[Adapter | None], each: int) -> GemmLora | None:
    """The adapters of a GEMM, unless it has none."""
    present = [adapter for adapter in adapters if adapter is not None]
    if not present:
        return None
    A, B, _ = present[0]
    (E, _, K), rank = A.shape, sum(adapter.A.shape[1] for adapter in present)
    rows, R = padded(B.shape[1] // each), rank + -rank % RANK_STEP
    joined_A = A.new_zeros(E, R, padded(K), dtype=torch.bfloat16)
    joined_B = B.new_zeros(E, len(adapters) * each * rows, R, dtype=torch.bfloat16)
    joined = GemmLora(joined_A, joined_B, adapters, each)
    for adapter, a, b in joined.parts(joined_A, joined_B):
        a.copy_(adapter.A)
        b.copy_((adapter.B * adapter.scale).unflatten(1, (each, -1)))
    return joined
