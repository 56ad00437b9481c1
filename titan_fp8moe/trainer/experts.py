"""Mixins that both torchtitan adapters share: of routed experts and of FFNs, by torchtitan's names of parameters."""

from typing import Any, ClassVar

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from titan_fp8moe.config import Fp8FlowMoEConfig
from titan_fp8moe.layer.fp8_gather import Fp8AllGather
from titan_fp8moe.layer.group import feed_forward
from titan_fp8moe.layer.lora import Lora
from titan_fp8moe.layer.operands import WeightCache
from titan_fp8moe.layer.run import Experts, Shared
from titan_fp8moe.layer.weights import Biases, ExpertWeights, are_frozen
from titan_fp8moe.nn.modules import cache_of
from titan_fp8moe.nn.parallel import local_of
from titan_fp8moe.spec import ExpertSpec

# Mesh dims over which FSDP does not gather, but may shard a parameter too.
_NOT_FSDP = {"ep", "tp", "etp", "pp", "dp_replicate"}


class TitanExperts(Fp8AllGather):
    """Mixin that holds the parameters of routed experts.

    Attributes:
        matrix_names: of the parameters that are w1, w2 and, unless w1 has both, w3.
        expert: the activation, and how the weights are stored.
        in_fsdp: whether FSDP manages them. See :func:`titan_fp8moe.trainer.preflight.fsdp_has_work`.
        fp8_all_gather: whether FSDP gathers the weights in FP8, if it gathers them.
    """

    matrix_names: ClassVar[tuple[str, ...]]
    expert: ExpertSpec = ExpertSpec()
    in_fsdp: bool
    fp8_all_gather: bool = False

    def _apply(self, *args: Any, **kwargs: Any) -> "TitanExperts":
        # torchtitan calls to_empty() after fully_shard(), so the shards are there when this is called.
        self.gathers_fp8 = self.fp8_all_gather and (fsdp_shards(self.matrices().w1) or 1) > 1
        super()._apply(*args, **kwargs)
        return self

    def matrices(self) -> ExpertWeights[nn.Parameter]:
        return ExpertWeights(*(getattr(self, name) for name in self.matrix_names))

    def fp8_matrices(self) -> list[str]:
        return [*self.matrix_names]

    def biases(self) -> Biases[Tensor] | None:
        return None

    def lora(self) -> Lora | None:
        return None

    def for_layer(self, owner: Any, ep_mesh: DeviceMesh | None) -> Experts:
        """The record that a layer takes. ``owner`` is the module that has the settings, the cache and the NaN flags."""
        weights = self.matrices()
        frozen = are_frozen(weights)
        return Experts(
            ExpertWeights(*self.local_weights(*weights)),
            owner.config,
            None if ep_mesh is None else ep_mesh.get_group(),
            self.expert,
            cache_of(owner, frozen),
            frozen,
            self.biases(),
            self.lora(),
            nan_flags=owner.nan_flags,
        )


class Fp8FFN(nn.Module):
    """Mixin of torchtitan's FeedForward: a dense FFN, or the shared experts of a MoE layer, which reads its weights."""

    config: Fp8FlowMoEConfig
    cache: WeightCache
    nan_flags: Tensor | None = None
    w1: nn.Linear
    w2: nn.Linear
    w3: nn.Linear

    @property
    def frozen(self) -> bool:
        """Whether none of the weights is trained."""
        return are_frozen(linear.weight for linear in (self.w1, self.w2, self.w3))

    def matrices(self) -> ExpertWeights[Tensor]:
        """The weights (H, D), (D, H), (H, D); under tensor parallelism this rank's."""
        linears = self.w1, self.w2, self.w3
        for linear in linears:
            if not isinstance(linear, nn.Linear) or linear.bias is not None:
                raise ValueError(f"{type(linear).__name__} adds nothing in an FP8 FFN; leave it in bf16 by filter_fqns")
        return ExpertWeights(*(local_of(linear.weight) for linear in linears))

    def shared(self, scores: Tensor | None = None) -> Shared:
        """As the shared experts of a layer, for :func:`titan_fp8moe.layer.run.run_layer`."""
        return Shared(self.matrices(), cache_of(self, self.frozen), self.frozen, scores)

    def fp8_matrices(self) -> list[str]:
        return ["w1.weight", "w2.weight", "w3.weight"]

    def run(self, x: Tensor) -> Tensor:
        """This rank's part of the FFN, (..., D) -> (..., D)."""
        cache = cache_of(self, self.frozen)
        return feed_forward(x, self.matrices(), self.config, cache, self.nan_flags, self.frozen)

    def extra_repr(self) -> str:
        return self.config.describe()


def fsdp_shards(param: Tensor) -> int | None:
    """Over how many ranks FSDP shards the parameter; None where it leaves it alone."""
    if not isinstance(param, DTensor):
        return None
    mesh = param.device_mesh
    dims = zip(mesh.mesh_dim_names or (), mesh.shape, param.placements, strict=True)
    # FSDP's shards of experts that expert parallelism has sharded are a _StridedShard, which is_shard() denies.
    sizes = [size for name, size, placement in dims if name not in _NOT_FSDP and not placement.is_replicate()]
    return max(sizes, default=None)


def gpt_oss_expert(limit: float, score_before_experts: bool = False) -> ExpertSpec:
    """gpt_oss's, as torchtitan's ``swiglu`` computes them, with gate and up interleaved in one weight."""
    parameters = dict(limit=limit, alpha=1.702, offset=1.0)
    return ExpertSpec.of("clamped_swiglu", parameters, score_before_experts)._replace(interleaved=True)


def part_of_bias(bias: Tensor, ranks: int) -> Tensor:
    """A rank's part of the bias of outputs that ``ranks`` add up. Its gradient is that of the whole bias, which each of
    them has."""
    return bias.detach() / ranks + (bias - bias.detach())
