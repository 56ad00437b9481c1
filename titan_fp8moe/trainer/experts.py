"""What the routed experts of both torchtitan adapters have in common: parameters by torchtitan's names, and a place."""

from typing import ClassVar, NamedTuple

from torch import Tensor, nn

from titan_fp8moe.layer.fp8_gather import Fp8AllGather
from titan_fp8moe.layer.weights import Biases, ExpertWeights
from titan_fp8moe.spec import ExpertSpec


class Placement(NamedTuple):
    """The part of FSDP in a layer's routed experts, as the job decides when it is converted.

    Attributes:
        in_fsdp: it manages them, or has hooks on them at least.
        keep_fsdp: it manages them even over one rank, where it gathers and reduces nothing.
    """

    in_fsdp: bool = True
    keep_fsdp: bool = False


class TitanExperts(Fp8AllGather):
    """Mixin that holds the parameters of routed experts.

    Attributes:
        matrix_names: of the parameters that are w1, w2 and, unless w1 has both, w3.
    """

    matrix_names: ClassVar[tuple[str, ...]]
    placement: Placement = Placement()

    def matrices(self) -> ExpertWeights[nn.Parameter]:
        return ExpertWeights(*(getattr(self, name) for name in self.matrix_names))

    def fp8_matrices(self) -> list[str]:
        return [*self.matrix_names]

    def biases(self) -> Biases[Tensor] | None:
        return None


def gpt_oss_expert(limit: float, score_before_experts: bool = False) -> ExpertSpec:
    """gpt_oss's, as torchtitan's ``swiglu`` computes them, with gate and up interleaved in one weight."""
    parameters = dict(limit=limit, alpha=1.702, offset=1.0)
    return ExpertSpec.of("clamped_swiglu", parameters, score_before_experts)._replace(interleaved=True)
