"""Describes an expert and its backward as frozen values, which go from the settings through the ops to the kernels.

An op of PyTorch takes tensors, numbers and strings, so a specification crosses an op as a string: :func:`encode`.
"""

import functools
import json
import math
from typing import Any, NamedTuple, TypeVar, get_args, get_type_hints

import torch

from titan_fp8moe.activations import ACTIVATIONS

SpecT = TypeVar("SpecT")


def encode(spec: tuple) -> str:
    """A specification as JSON. Its fields are strings, numbers, flags, tuples of numbers, specifications and None."""
    # torch.compile traces this: it would warn of a cache, and calls _to_json, which takes no NamedTuples then.
    return _to_json(_lists(spec)) if torch.compiler.is_compiling() else _cached_json(spec)


def _lists(value: Any) -> Any:
    return [_lists(v) for v in value] if isinstance(value, tuple) else constant(value)


def constant(value: Any) -> Any:
    """A setting as a constant of the graph that torch.compile traces: with ``dynamic=True`` numbers are symbols."""
    from torch.fx.experimental.symbolic_shapes import guard_scalar  # 0.3 s, which only a trace needs

    return guard_scalar(value) if isinstance(value, int | float) else value


@torch.compiler.assume_constant_result
def _to_json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


_cached_json = functools.cache(_to_json)


@functools.cache
def decode(kind: type[SpecT], text: str) -> SpecT:
    """The inverse of :func:`encode` for a specification of that class."""
    return _of_json(kind, json.loads(text))


def _of_json(hint: Any, value: Any) -> Any:
    """A field's value by its annotation, which is a class or a union of one with None."""
    if not isinstance(value, list):
        return value
    for kind in (hint, *get_args(hint)):
        if hasattr(kind, "_fields"):
            return kind(*map(_of_json, get_type_hints(kind).values(), value))
    return tuple(value)


class ExpertSpec(NamedTuple):
    """An expert: W2 (activation(W1 x, W3 x)), times the router's score; without a gate W2 (activation(W1 x)). Made by
    :meth:`of`, which checks it.

    Attributes:
        activation: a key of :data:`titan_fp8moe.activations.ACTIVATIONS`.
        score_before_experts: multiply the experts' input, not their output, by the score.
        parameters: of the activation, in the order of its entry.
        biased: both products have biases, as :func:`titan_fp8moe.layer.run.run_layer` notes.
        interleaved: h holds gate and up of a hidden unit side by side, as the rows of W1, not all gates first.
    """

    activation: str = "swiglu"
    score_before_experts: bool = False
    parameters: tuple[float, ...] = ()
    biased: bool = False
    interleaved: bool = False

    @property
    def gated(self) -> bool:
        return ACTIVATIONS[self.activation].gated

    @property
    def rows_per_unit(self) -> int:
        """Rows of GEMM 1's weights, and so columns of h, for each hidden unit: gate and up, or one."""
        return 2 if self.gated else 1

    @classmethod
    def of(
        cls, activation: str = "swiglu", parameters: dict[str, float] | None = None, score_before_experts: bool = False
    ) -> "ExpertSpec":
        """An expert with the activation's ``parameters`` by name; what is left out has its default.

        Raises:
            ValueError: for an unknown activation or parameter, or a value that it does not take.
        """
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation is {activation!r}; set it to one of {', '.join(map(repr, ACTIVATIONS))}")
        entry, given = ACTIVATIONS[activation], {name: constant(value) for name, value in (parameters or {}).items()}
        for name, value in given.items():
            if name not in entry.parameters:
                known = ", ".join(entry.parameters) or "none"
                raise ValueError(f"activation {activation!r} has no parameter {name!r}; it has {known}")
            if not isinstance(value, int | float) or math.isnan(value) or (name in entry.positive and value <= 0):
                kind = "a positive number" if name in entry.positive else "a number"
                raise ValueError(f"{name} of activation {activation!r} is {value!r}; set it to {kind}")
        values = tuple(float(given.get(name, default)) for name, default in entry.parameters.items())
        return cls(activation, score_before_experts, values)


class BackwardSpec(NamedTuple):
    """How a layer keeps tensors for its backward and computes weight gradients: the settings of the same names in
    :class:`titan_fp8moe.config.Fp8FlowMoEConfig`.

    Attributes:
        weights: ``trained``, ``frozen`` or ``adapted``. Frozen ones get no gradient, and no operand is kept that only
            it reads. Adapted ones are frozen too, but their adapters' gradients read the operands.
    """

    recompute: str = "activation"
    save_h: str = "bf16"
    wgrad: str = "balanced"
    weights: str = "trained"

    @property
    def keeps_x(self) -> bool:
        """Whether the backward reads GEMM 1's input."""
        return self.weights != "frozen" or self.recompute == "experts"

    @property
    def keeps_h(self) -> bool:
        """Whether the forward saves GEMM 1's output for the backward."""
        return self.recompute != "experts"

    @property
    def keeps_a(self) -> bool:
        """Whether the forward saves GEMM 2's input for the backward."""
        return self.weights != "frozen" and self.recompute == "none"

    @property
    def num_saved_of_gemm_2(self) -> int:
        """How many tensors the forward of an FFN saves that the backward of GEMM 2 alone reads: h and GEMM 2's input,
        with scales, as the flags of :mod:`titan_fp8moe.layer.saved` say."""
        hidden = 0 if self.recompute == "experts" else 2 if self.save_h == "fp8" else 1
        return hidden + (2 if self.keeps_a else 0)
