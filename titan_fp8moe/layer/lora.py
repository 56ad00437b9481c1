"""Low-rank adapters (LoRA) beside the FP8 weights of experts.

    h = x W13^T + x A13^T B13^T        y = a W2^T + a A2^T B2^T        the first product in FP8, the second in bf16

Quantizing W + B A would round most of an adapter away: a step of e4m3 is 6 to 12% of a value. So the adapters multiply
the same quantized rows and add to the GEMMs' results, before the activation and before tokens are summed. Gate's and
up's adapters become one, whose B is block diagonal. :mod:`titan_fp8moe.recipe` has the numbers.

:class:`Lora` is the caller's record. Autograd and ops take flat lists of its tensors, which :class:`LoraSpec`
describes. :class:`LoraOperands` is what the FFN multiplies by.
"""

from collections.abc import Sequence
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


class LoraTensors(NamedTuple):
    """The tensors of a :class:`Lora`, as autograd saves them; None for those that there are not."""

    w1_A: Any = None
    w1_B: Any = None
    w2_A: Any = None
    w2_B: Any = None
    w3_A: Any = None
    w3_B: Any = None


class LoraSpec(NamedTuple):
    """A :class:`Lora` apart from its tensors.

    Attributes:
        w1, w2, w3: the adapters' scales; None for a weight without one.
        fused: whether w1 is all of GEMM 1's weight.
    """

    w1: float | None
    w2: float | None
    w3: float | None
    fused: bool

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields of :class:`LoraTensors` that there are, in the order of flat lists."""
        names = [name for name, scale in zip(Lora._fields, self[:3], strict=True) if scale is not None]
        return tuple(f"{name}_{factor}" for name in names for factor in "AB")

    def adapters(self, tensors: Sequence[Tensor]) -> Lora:
        """The inverse of :func:`split_lora`."""
        pairs = zip(tensors[::2], tensors[1::2], strict=True)
        return Lora(*(None if scale is None else Adapter(*next(pairs), scale) for scale in self[:3]))


def split_lora(lora: Lora, weights: Sequence[Tensor | None]) -> tuple[LoraSpec, list[Tensor]]:
    """The specification of adapters of these w1, w2 and w3, and the list of their tensors.

    Raises:
        ValueError: for adapters that do not fit the weights.
    """
    present = {name: adapter for name, adapter in zip(Lora._fields, lora, strict=True) if adapter is not None}
    for name, adapter in present.items():
        _check_adapter(name, adapter, weights[Lora._fields.index(name)])
    scales = [None if adapter is None else float(constant(adapter.scale)) for adapter in lora]
    return LoraSpec(*scales, fused=weights[2] is None), [t for a in present.values() for t in (a.A, a.B)]


def _check_adapter(name: str, adapter: Adapter, weight: Any) -> None:
    A, B, _ = adapter
    E, N, K = weight.shape if not isinstance(weight, DTensor) else weight._local_tensor.shape
    rank = A.shape[1]
    fits = rank > 0 and A.shape == (E, rank, K) and B.shape == (E, N, rank)
    if not fits or not A.device == B.device == weight.device:
        raise ValueError(
            f"lora.{name} must have A ({E}, r, {K}) and B ({E}, {N}, r) on {weight.device} for its weight "
            f"({E}, {N}, {K}), r at least 1; got {tuple(A.shape)} on {A.device} and {tuple(B.shape)} on {B.device}"
        )


# --- operands ---------------------------------------------------------------------------------------------------------


class _Part(NamedTuple):
    """A weight's adapter, and where it lies in the operands of its GEMM: the matrices along B's rows, and the ranks."""

    name: str
    adapter: Adapter
    matrices: slice
    ranks: slice

    def of(self, b_ENR: Tensor) -> Tensor:
        """The adapter's part of B, (E, matrices, rows of each, r)."""
        first, end, rows = self.matrices.start, self.matrices.stop, self.adapter.B.shape[1]
        rows //= end - first
        return b_ENR.unflatten(1, (-1, padded(rows)))[:, first:end, :rows, self.ranks]


class GemmLora(NamedTuple):
    """The adapters of one GEMM as products read them, in bf16: A (E, R, K), and B (E, N, R) times the scales. N and K
    are padded as the quantized weight's, R to a multiple of :data:`titan_fp8moe.ops.lora.RANK_STEP`."""

    A: Tensor
    B: Tensor
    parts: list[_Part]

    @property
    def transposed(self) -> "GemmLora":
        """For the gradient of the GEMM's input."""
        return GemmLora(self.B.transpose(1, 2), self.A.transpose(1, 2), self.parts)

    def grads(self, x: Rows, dy: Rows, offsets_E: Tensor) -> dict[str, Tensor]:
        """Gradients by the fields of :class:`LoraTensors`, each in its tensor's dtype.

        Args:
            x: the GEMM's input; dy: the gradient of its output; both in expert order.
        """
        da, db = ops.low_rank_grads(*x, *dy, self.A, self.B, offsets_E)
        grads = {}
        for part in self.parts:
            name, (A, B, scale), _, ranks = part
            part_of_da = da[:, ranks, : A.shape[2]].to(A.dtype)  # without the padding
            grads[f"{name}_A"] = part_of_da.clone(memory_format=torch.contiguous_format)
            grads[f"{name}_B"] = part.of(db).flatten(1, 2).to(B.dtype) * scale
        return grads


class LoraOperands(NamedTuple):
    """The adapters of an FFN's GEMMs, under the names of the weights' operands; None for a GEMM without one."""

    w13: GemmLora | None = None
    w2: GemmLora | None = None
    w13_t: GemmLora | None = None
    w2_t: GemmLora | None = None


NO_LORA = LoraOperands()


def lora_operands(spec: LoraSpec, tensors: Sequence[Tensor | None], expert: ExpertSpec) -> LoraOperands:
    """The operands of adapters that :func:`split_lora` took apart. ``tensors`` may be a :class:`LoraTensors`."""
    adapters = spec.adapters([t for t in tensors if t is not None])
    gate_up = [(name, a) for name, a in (("w1", adapters.w1), ("w3", adapters.w3)) if a is not None]
    matrices = 1 if not expert.gated or (spec.fused and expert.interleaved) else 2
    w13 = _join(gate_up, matrices, matrices if spec.fused else 1) if gate_up else None
    w2 = None if adapters.w2 is None else _join([("w2", adapters.w2)], 1, 1)
    return LoraOperands(w13, w2, w13 and w13.transposed, w2 and w2.transposed)


def _join(adapters: list[tuple[str, Adapter]], matrices: int, each: int) -> GemmLora:
    """The adapters of a GEMM whose operand holds so many ``matrices``, which are padded; a weight holds ``each``."""
    _, (A, B, _) = adapters[0]
    (E, _, K), rows, rank, parts = A.shape, padded(B.shape[1] // each), 0, []
    for name, adapter in adapters:
        first, r = 1 if name == "w3" else 0, adapter.A.shape[1]
        parts.append(_Part(name, adapter, slice(first, first + each), slice(rank, rank + r)))
        rank += r
    R = rank + -rank % RANK_STEP
    joined_A = A.new_zeros(E, R, padded(K), dtype=torch.bfloat16)
    joined_B = B.new_zeros(E, matrices * rows, R, dtype=torch.bfloat16)
    for part in parts:
        A, B, scale = part.adapter
        joined_A[:, part.ranks, :K] = A
        part.of(joined_B).copy_((B * scale).unflatten(1, (each, -1)))
    return GemmLora(joined_A, joined_B, parts)
