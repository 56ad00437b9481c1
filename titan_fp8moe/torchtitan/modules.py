"""torchtitan's MoE, GroupedExperts and FeedForward in FP8.

Parameters, buffers, submodules and state-dict keys stay torchtitan's: a module is converted by changing its class, so
that checkpoints, the Hugging Face adapter, pipeline splitting and initialization work as before.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torchtitan.models.gpt_oss.model.moe import GptOssGroupedExperts
from torchtitan.models.llama3.model.model import FeedForward as Llama3FeedForward
from torchtitan.models.llama4.model.model import FeedForward as Llama4FeedForward
from torchtitan.models.moe.moe import FeedForward, GroupedExperts, MoE
from torchtitan.models.qwen3.model.model import FeedForward as Qwen3FeedForward

from titan_fp8moe.config import Fp8FlowMoEConfig
from titan_fp8moe.layer.operands import WeightCache
from titan_fp8moe.layer.run import run_layer
from titan_fp8moe.layer.weights import Biases
from titan_fp8moe.nn.modules import KeepDtype, add_cache
from titan_fp8moe.nn.parallel import local_of
from titan_fp8moe.spec import ExpertSpec
from titan_fp8moe.trainer.experts import Fp8FFN, TitanExperts, gpt_oss_expert, part_of_bias
from titan_fp8moe.trainer.preflight import why_not_fp8_dims


class Fp8FlowExperts(TitanExperts):
    """The routed experts of a layer: dispatch, FFN and combine, all inside this module's call. The subclasses also
    inherit from one of torchtitan's classes each, whose forwards take sorted rows, not routed pairs.

    FSDP gathers the parameters around that call; nothing else may read them.
    """

    config: Fp8FlowMoEConfig
    cache: WeightCache
    ep_mesh: DeviceMesh | None = None  # over which ranks the experts are spread
    tp_mesh: DeviceMesh | None = None  # over which each of them is sharded
    nan_flags: Tensor | None = None

    @staticmethod
    def convert(experts: Any, config: Fp8FlowMoEConfig, in_fsdp: bool, score_before_experts: bool) -> None:
        experts.__class__ = EXPERTS[type(experts)]
        experts.config, experts.in_fsdp, experts.fp8_all_gather = config, in_fsdp, config.fp8_all_gather
        experts.expert = ExpertSpec(score_before_experts=score_before_experts)
        if isinstance(experts, Fp8FlowGptOssExperts):
            experts.expert = gpt_oss_expert(experts.swiglu_limit, score_before_experts)
        add_cache(experts)

    def forward(
        self,
        x_TD: Tensor,
        topk_ids_TK: Tensor,
        topk_scores_TK: KeepDtype,
        *,
        shared: "Fp8FlowFeedForward | None" = None,
    ) -> Tensor:
        """Sums each token's experts with their scores, (T, D) -> (T, D), and adds the result of the ``shared`` experts.
        With ``tp_mesh`` the experts' part is a partial sum over it."""
        if isinstance(self.matrices().w1, DTensor) and self.ep_mesh is None and self.tp_mesh is None:
            raise RuntimeError(
                "these experts have been sharded by a parallel style that fp8_flow_moe does not know; use torchtitan's "
                "TensorParallel, ExpertParallel or ExpertTensorParallel (torchtitan.distributed.expert_parallel)"
            )
        experts, ffn = self.for_layer(self, self.ep_mesh), None if shared is None else shared.shared()
        return run_layer(x_TD, topk_ids_TK, topk_scores_TK.tensor, experts, ffn)

    def extra_repr(self) -> str:
        experts, dim, hidden = self.matrices().w2.shape
        return f"num_experts={experts}, dim={dim}, hidden_dim={hidden}, {self.config.describe()}"


class Fp8FlowGroupedExperts(Fp8FlowExperts, GroupedExperts):  # pyrefly: ignore[inconsistent-inheritance]
    """The experts of most models."""

    matrix_names = "w1", "w2", "w3"


class Fp8FlowGptOssExperts(Fp8FlowExperts, GptOssGroupedExperts):  # pyrefly: ignore[inconsistent-inheritance]
    """gpt_oss's, with biases and with gate and up interleaved in one weight."""

    matrix_names = "mlp1_weight", "mlp2_weight"

    def biases(self) -> Biases[Tensor]:
        b1, b2 = local_of(self.mlp1_bias), local_of(self.mlp2_bias)
        if self.tp_mesh is not None:
            b2 = part_of_bias(b2, self.tp_mesh.size())
        return Biases(b1, b2)


EXPERTS: dict[type[nn.Module], type[Fp8FlowExperts]] = {
    GroupedExperts: Fp8FlowGroupedExperts,
    GptOssGroupedExperts: Fp8FlowGptOssExperts,
}
"""The converted class of each class of experts of torchtitan."""


FEED_FORWARDS = FeedForward, Llama3FeedForward, Llama4FeedForward, Qwen3FeedForward
"""torchtitan's FFN classes. They compute and initialize the same and have the same parameters."""


class Fp8FlowFeedForward(Fp8FFN, FeedForward):
    """torchtitan's FeedForward in FP8, of any model."""

    @staticmethod
    def convert(ffn: Any, config: Fp8FlowMoEConfig) -> None:
        ffn.__class__ = Fp8FlowFeedForward
        ffn.config = config
        add_cache(ffn)

    def forward(self, x: Tensor) -> Tensor:
        """(B, S, D) -> (B, S, D). Under tensor parallelism torchtitan passes a replicated DTensor and expects this
        rank's part of the sequence."""
        mesh = self.w2.weight.device_mesh if isinstance(self.w2.weight, DTensor) else None
        if mesh is None:
            return self.run(x)
        x = x.to_local(grad_placements=(Partial(),)) if isinstance(x, DTensor) else _sum_gradients(x, mesh)
        out = DTensor.from_local(self.run(x), mesh, (Partial(),), run_check=False)
        return out.redistribute(placements=(Shard(1),)).to_local()


class Fp8FlowMoE(MoE):
    """torchtitan's MoE layer around :class:`Fp8FlowExperts`: same router, load balancing and parameters.

    Attributes:
        fp8_shared: whether the shared experts join the FP8 data flow; else they run as torchtitan's module.
    """

    fp8_shared: bool = False

    experts: Fp8FlowExperts  # pyrefly: ignore[bad-override-mutable-attribute] # converted with the layer

    @staticmethod
    def convert(moe: Any, config: Fp8FlowMoEConfig, fp8_shared: bool = False, in_fsdp: bool = True) -> None:
        moe.__class__ = Fp8FlowMoE
        moe.fp8_shared = fp8_shared
        if fp8_shared:
            Fp8FlowFeedForward.convert(moe.shared_experts, config)
        Fp8FlowExperts.convert(moe.experts, config, in_fsdp, moe.score_before_experts)

    def forward(self, x: Tensor) -> Tensor:
        """(B, S, D) -> (B, S, D)."""
        return self.run_experts(*self.route(x)).view(x.shape)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The tokens (T, D), and the router's choice for each, ids and scores (T, K)."""
        x_TD = x.view(-1, x.shape[-1])
        top_scores, topk_ids_TK, num_tokens_per_expert = self.router(x_TD, self.expert_bias)
        if torch.is_grad_enabled():
            # Neither validation nor the forward by which a pipeline stage finds its shapes may move the expert bias.
            with torch.no_grad():
                self.tokens_per_expert.add_(num_tokens_per_expert)
        return x_TD, topk_ids_TK, top_scores

    def run_experts(self, x_TD: Tensor, topk_ids_TK: Tensor, top_scores: Tensor) -> Tensor:
        """The sum of routed and shared experts, (T, D), from :meth:`route`'s results."""
        # Under tensor parallelism a rank's experts see part of the tokens or part of each expert's hidden dim, so the
        # gradients they send back are partial sums; torchtitan declares x and the scores replicated.
        reorderer_mesh = getattr(self.reorderer, "tp_mesh", None)
        tp_mesh, routed_TD = self.experts.tp_mesh or reorderer_mesh, x_TD
        if tp_mesh is not None:
            top_scores, routed_TD = _sum_gradients(top_scores, tp_mesh), _sum_gradients(x_TD, tp_mesh)

        # The experts sort routed pairs themselves: torchtitan's reorderer is not called. What its hooks would do under
        # expert parallelism that borrows from tensor parallelism is done here.
        if reorderer_mesh is not None:
            topk_ids_TK = _of_this_rank(topk_ids_TK, reorderer_mesh)
        # The routed tokens' gradients are summed over the tensor-parallel ranks, and so must be the shared ones'.
        shared = self.shared_experts if self.fp8_shared else None
        out_TD = self.experts(routed_TD, topk_ids_TK, KeepDtype(top_scores), shared=shared)
        if self.fp8_shared or self.shared_experts is None:
            return out_TD
        return out_TD + self.shared_experts(x_TD)


def why_not_fp8(ffn: nn.Module, hidden_dim_shards: int) -> str | None:
    """The reason why this FFN cannot run in FP8 on ranks that share its hidden dim, or None if it can."""
    linears: list[Any] = [getattr(ffn, name, None) for name in ("w1", "w2", "w3")]
    plain = all(type(linear) is nn.Linear and linear.bias is None for linear in linears)
    if type(ffn) not in FEED_FORWARDS or not plain:
        return f"{type(ffn).__name__} of {', '.join(type(linear).__name__ for linear in linears)}"
    hidden_dim, dim = linears[0].weight.shape
    return why_not_fp8_dims(dim, hidden_dim, hidden_dim_shards)


def _of_this_rank(topk_ids_TK: Tensor, mesh: DeviceMesh) -> Tensor:
    """Experts of the tokens that are this rank's to send, an equal part of all of them; -1 for the others."""
    T = topk_ids_TK.shape[0]
    part = max(-(-T // mesh.size()), 1)
    token_T = torch.arange(T, device=topk_ids_TK.device)
    return topk_ids_TK.masked_fill((token_T // part != mesh.get_local_rank()).unsqueeze(1), -1)


def _sum_gradients(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Identity whose gradient is summed over ``mesh``."""
    return DTensor.from_local(x, mesh, (Replicate(),), run_check=False).to_local(grad_placements=(Partial(),))
