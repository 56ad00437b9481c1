"""The experts' weights and biases, as records. :mod:`titan_fp8moe.layer.operands` makes GEMM operands of them."""

import contextlib
import copy
from collections.abc import Iterable
from typing import Any, Generic, NamedTuple, TypeVar, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from titan_fp8moe.ops import Fp8Weight
from titan_fp8moe.spec import ExpertSpec

W = TypeVar("W")


class ExpertWeights(NamedTuple, Generic[W]):
    """One value for each weight of this rank's E experts: tensors, all bf16, all fp32 or all quantized; or gradients.

    Attributes:
        w1: the gate projection (E, H, D); with ``w3`` None gate and up in one, (E, 2H, D), gate first. Experts without
            a gate have the up projection (E, H, D) here, and ``w3`` None.
        w2: the down projection (E, D, H).
        w3: the up projection (E, H, D), or None.
    """

    w1: W
    w2: W
    w3: W | None = None

    def on_device(self) -> "contextlib.AbstractContextManager[ExpertWeights[W]]":
        """The context in which a layer reads the weights, which yields them as ops read them."""
        return contextlib.nullcontext(self)

    def for_backward(self) -> "tuple[list[Any], ExpertWeights[W] | None]":
        """The tensors that autograd keeps, for :meth:`unpack`; or empty ones, and weights that a backward reads."""
        return (self.pack() if isinstance(self.w1, Fp8Weight) else [*self]), None

    def pack(self) -> list[Tensor | None]:
        """The tensors of quantized weights: each field's values, then each field's scales."""
        weights: list[Any] = list(self)
        return [w and w.q for w in weights] + [w and w.scale for w in weights]

    @classmethod
    def unpack(cls, tensors: list[Tensor | None]) -> "ExpertWeights":
        """Weights of their tensors, or quantized weights of :meth:`pack`'s."""
        count = len(cls._fields)
        if len(tensors) == count:
            return cls(*tensors)
        pairs = zip(tensors[:count], tensors[count:], strict=True)
        return cls(*(None if q is None else Fp8Weight(q, cast(Tensor, scale)) for q, scale in pairs))


class Biases(NamedTuple, Generic[W]):
    """The biases of both products: tensors, all bf16 or all fp32; or one value for each, such as its gradient.

    Attributes:
        b1: of the gate projection (E, H); with ``b3`` None of all of w1's rows, in their order, (E, 2H) or (E, H).
        b2: of the down projection (E, D).
        b3: of the up projection (E, H), or None.
    """

    b1: W
    b2: W
    b3: W | None = None

    def gate_up(self: "Biases[Tensor]", expert: ExpertSpec) -> tuple[Tensor, Tensor | None]:
        """Gate's and up's (E, H), with equal strides; without a gate b1 and None."""
        if not expert.gated:
            return self.b1, None
        if expert.interleaved:
            return self.b1[:, ::2], self.b1[:, 1::2]
        if self.b3 is None:
            gate, up = self.b1.chunk(2, 1)
            return gate, up
        return self.b1.contiguous(), self.b3.contiguous()

    def gradients(self: "Biases[Tensor]", dbias: Tensor, needed: "Biases") -> "Biases":
        """Splits the gradients of gate, up and down in one (E, 2H + D); None where not needed.

        Each is dense, as fused optimizers read it. For a plain parameter autograd would copy it otherwise.
        """
        sizes = [b.shape[1] for b in (self.b1, self.b3, self.b2) if b is not None]
        b1, *b3, b2 = dbias.split(sizes, 1)
        grads, dense = Biases(b1, b2, *b3), torch.contiguous_format
        pairs = zip(cast(Any, grads), needed, strict=True)
        return Biases(*(grad.clone(memory_format=dense) if need else None for grad, need in pairs))


class SharedExperts(NamedTuple):
    """An FFN that serves every token, in the FP8 data flow of a layer of routed experts, with their activation.

    Attributes:
        w1, w2, w3: gate (H, D), down (D, H) and up (H, D), all bf16 or all fp32, H a multiple of 16. Gate and up in one
            weight, with gate first, and experts without a gate, are as in :func:`titan_fp8moe.routed_experts`.
        scores: (T,) fp32, by which each token's output is multiplied, such as a sigmoid of a product with x; or None.

    Example::

        shared = SharedExperts(w1, w2, w3, torch.sigmoid(x @ gate))  # Qwen3-Next's
        y = routed_experts(x, *weights, ids, scores, shared=shared)
    """

    w1: Tensor
    w2: Tensor
    w3: Tensor | None = None
    scores: Tensor | None = None

    @property
    def weights(self) -> ExpertWeights[Tensor]:
        return ExpertWeights(self.w1, self.w2, self.w3)


NO_WEIGHTS: ExpertWeights = ExpertWeights(None, None, None)


def one_expert(weights: ExpertWeights[Tensor]) -> ExpertWeights[Tensor]:
    """The matrices of an FFN, (H, D), (D, H) and (H, D) or None, as the weights of one expert."""
    return ExpertWeights(*cast(Any, [None if w is None else w.unsqueeze(0) for w in weights]))


def are_frozen(parameters: Iterable[Tensor | None]) -> bool:
    """Whether none of them is trained. Ask it of parameters: without gradients, their local tensors require none."""
    for parameter in parameters:  # noqa: SIM110 # in every forward, and all() takes three times as long
        if parameter is not None and parameter.requires_grad:
            return False
    return True


def place_as(grad: Tensor | None, spec: Any) -> DTensor | None:
    """A gradient of this rank's experts as the gradient of the DTensor that has ``spec``; None for None."""
    if grad is None:
        return None
    meta = spec.tensor_meta
    if grad.stride() == meta.stride and grad.dtype == meta.dtype:  # as for every weight that is stored as rows
        return DTensor(grad, copy.copy(spec), requires_grad=False)
    # With strides of its own: optimizers believe them, and autograd copies what does not lie as the parameter.
    return DTensor.from_local(grad, spec.mesh, spec.placements, run_check=False)
