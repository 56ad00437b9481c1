"""Describes an expert and its backward as frozen values, which go from the settings through the ops to the kernels.

An op of PyTorch takes tensors, numbers and strings, so a value crosses an op as the string of ``encode``.
"""

import functools
from typing import NamedTuple

from titan_fp8moe.activations import ACTIVATIONS


class ExpertSpec(NamedTuple):
    """The function of an expert: W2 (activation(W1 x, W3 x)), times the router's score.

    Attributes:
        activation: a key of :data:`titan_fp8moe.activations.ACTIVATIONS`.
        score_before_experts: multiply the experts' input, not their output, by the score.
    """

    activation: str = "swiglu"
    score_before_experts: bool = False

    def encode(self) -> str:
        return f"{self.activation}:{int(self.score_before_experts)}"

    @classmethod
    @functools.cache
    def decode(cls, text: str) -> "ExpertSpec":
        """Inverts :meth:`encode`; raises ValueError for an unknown activation."""
        activation, score_before_experts = text.split(":")
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation is {activation!r}; set it to one of {', '.join(map(repr, ACTIVATIONS))}")
        return cls(activation, score_before_experts == "1")


class BackwardSpec(NamedTuple):
    """How a layer keeps tensors for its backward and computes weight gradients: the settings of the same names in
    :class:`titan_fp8moe.config.Fp8FlowMoEConfig`."""

    recompute: str = "activation"
    save_h: str = "bf16"
    wgrad: str = "balanced"

    def encode(self) -> str:
        return ":".join(self)

    @classmethod
    @functools.cache
    def decode(cls, text: str) -> "BackwardSpec":
        return cls(*text.split(":"))
