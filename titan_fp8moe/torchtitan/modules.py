"""torchtitan's MoE and GroupedExperts with the routed experts in FP8.

Parameters, buffers, submodules and state-dict keys stay torchtitan's: a layer is converted by changing its class, so
that checkpoints, the Hugging Face adapter, pipeline splitting and initialization work as before.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torchtitan.models.moe.moe import GroupedExperts, MoE

from titan_fp8moe.config import Fp8FlowMoEConfig
from titan_fp8moe.moe import Route, RoutedOutput, finish_routed_experts, start_routed_experts
from titan_fp8moe.weights import ExpertWeights, Fp8GatheredWeight, WeightCache, gather_in_fp8


class Fp8FlowGroupedExperts(GroupedExperts):
    """The routed experts of a layer: dispatch, FFN and the start of the combine, all inside this module's call.

    FSDP gathers w1, w2, w3 around that call; nothing else may read them.
    """

    config: Fp8FlowMoEConfig
    cache: WeightCache | None = None
    ep_mesh: DeviceMesh | None = None
    tp_mesh: DeviceMesh | None = None
    gathers_fp8: bool = False
    keep_fsdp: bool = False  # also where it has one rank, see parallel.fully_shard

    @staticmethod
    def convert(experts: GroupedExperts, config: Fp8FlowMoEConfig) -> None:
        experts.__class__ = Fp8FlowGroupedExperts
        experts.config = config
        if config.cache_weights:
            experts.cache = WeightCache()
            experts.register_load_state_dict_post_hook(_clear_cache)

    def set_meshes(self, ep_mesh: DeviceMesh | None, tp_mesh: DeviceMesh | None) -> None:
        """Records over which ranks the experts are spread (``ep_mesh``) and each expert is sharded (``tp_mesh``)."""
        self.ep_mesh, self.tp_mesh = ep_mesh, tp_mesh

    def gather_in_fp8(self) -> None:
        """Lets FSDP, to which the parameters have been given, gather them in FP8."""
        self.gathers_fp8 = True
        for param in self.parameters():
            gather_in_fp8(param)

    def _apply(self, *args: Any, **kwargs: Any) -> "Fp8FlowGroupedExperts":
        super()._apply(*args, **kwargs)
        if self.gathers_fp8:  # the parameters' local tensors are others now, as when they leave the meta device
            self.gather_in_fp8()
        return self

    def forward(self, x_TD: Tensor, route: Route) -> RoutedOutput:
        """(T, D) -> (T, D), to be finished: each token's experts summed with their scores. With ``tp_mesh`` a partial
        sum over it."""
        if isinstance(self.w1, DTensor) and self.ep_mesh is None and self.tp_mesh is None:
            raise RuntimeError(
                "these experts have been sharded by a parallel style that fp8_flow_moe does not know; use torchtitan's "
                "TensorParallel, ExpertParallel or ExpertTensorParallel (torchtitan.distributed.expert_parallel)"
            )
        weights = [w.to_local() if isinstance(w, DTensor) else w for w in (self.w1, self.w2, self.w3)]
        if self.gathers_fp8 and not isinstance(weights[0], Fp8GatheredWeight):
            raise RuntimeError(
                "FSDP has not gathered the experts' weights in FP8: their tensors were replaced after fully_shard; "
                "load into the parameters as they are (no assign=True), or set fp8_flow_moe.fp8_all_gather = false"
            )
        ep_group = None if self.ep_mesh is None else self.ep_mesh.get_group()
        return start_routed_experts(x_TD, ExpertWeights(*weights), route, self.config, ep_group, self.cache)

    def extra_repr(self) -> str:
        experts, hidden, dim = self.w1.shape
        return f"num_experts={experts}, dim={dim}, hidden_dim={hidden}, {self.config.describe()}"


def _clear_cache(experts: Fp8FlowGroupedExperts, _: Any) -> None:
    experts.cache.clear()


class Fp8FlowMoE(MoE):
    """torchtitan's MoE layer around :class:`Fp8FlowGroupedExperts`: same router, load balancing and shared experts."""

    @staticmethod
    def convert(moe: MoE, config: Fp8FlowMoEConfig) -> None:
        moe.__class__ = Fp8FlowMoE
        Fp8FlowGroupedExperts.convert(moe.experts, config)

    def forward(self, x: Tensor) -> Tensor:
        """(B, S, D) -> (B, S, D)."""
        shape, x_TD = x.shape, x.view(-1, x.shape[-1])
        top_scores, expert_TK, num_tokens_per_expert = self.router(x_TD, self.expert_bias)
        if torch.is_grad_enabled():
            # Neither validation nor the forward by which a pipeline stage finds its shapes may move the expert bias.
            with torch.no_grad():
                self.tokens_per_expert.add_(num_tokens_per_expert)

        # Under tensor parallelism a rank's experts see part of the tokens or part of each expert's hidden dim, so the
        # gradients they send back are partial sums; torchtitan declares x and the scores replicated.
        tp_mesh = self.experts.tp_mesh or getattr(self.reorderer, "tp_mesh", None)
        routed_TD = x_TD
        if tp_mesh is not None:
            top_scores, routed_TD = _sum_gradients(top_scores, tp_mesh), _sum_gradients(x_TD, tp_mesh)

        # torchtitan's reorderer is not called: slots are sorted where they are packed. What its hooks would do under
        # expert parallelism that borrows from tensor parallelism is done here.
        if (mesh := getattr(self.reorderer, "tp_mesh", None)) is not None:
            expert_TK = _of_this_rank(expert_TK, mesh)
        route = Route(top_scores, expert_TK, self.experts.num_experts, self.score_before_experts)
        pending = self.experts(routed_TD, route)
        # With expert parallelism the shared experts run while the routed experts' output comes back from the other
        # ranks, and their backward while the gradients go there.
        shared_TD = None if self.shared_experts is None else self.shared_experts(x_TD)
        out = finish_routed_experts(pending)
        return (out if shared_TD is None else shared_TD + out).view(shape)


def _of_this_rank(expert_TK: Tensor, mesh: DeviceMesh) -> Tensor:
    """Experts of the tokens that are this rank's to send, an equal part of all of them; -1 for the others."""
    T = expert_TK.shape[0]
    part = max(-(-T // mesh.size()), 1)
    token_T = torch.arange(T, device=expert_TK.device)
    return expert_TK.masked_fill((token_T // part != mesh.get_local_rank()).unsqueeze(1), -1)


def _sum_gradients(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Identity whose gradient is summed over ``mesh``."""
    return DTensor.from_local(x, mesh, (Replicate(),), run_check=False).to_local(grad_placements=(Partial(),))
