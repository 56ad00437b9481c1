"""Checks of a torchtitan 0.3.0 job: :mod:`titan_fp8moe.trainer.preflight` under torchtitan's names, and limits of its
own.

All of them run before anything is converted or allocated. Each raises ValueError with the setting to change.
"""

from typing import Any

from titan_fp8moe.config import Fp8FlowMoEConfig
from titan_fp8moe.torchtitan03 import names as tt
from titan_fp8moe.torchtitan03.lora import AdaptedExperts
from titan_fp8moe.trainer import preflight
from titan_fp8moe.trainer.preflight import ExpertLayout

# The classes of a MoE layer's parts that conversion replaces, or knows. Subclasses may compute something else, and
# other dispatchers send bf16. A config that LoRAConverter has frozen is another, of the same owner.
_KNOWN = (
    (tt.MoE, tt.GptOssMoE),
    (tt.TokenChoiceTopKRouter,),
    (tt.RoutedExperts,),
    (tt.GroupedExperts, AdaptedExperts, tt.GptOssGroupedExperts),
    (tt.AllToAllTokenDispatcher, tt.LocalTokenDispatcher),
)


def check_job(job: Any, config: Fp8FlowMoEConfig) -> None:
    """The settings of a trainer's config, without its model."""
    preflight.check_job(job, config, validation="validator")
    if job.parallelism.spmd_backend == "full_dtensor":
        raise ValueError(
            "fp8_flow_moe computes on plain tensors, but parallelism.spmd_backend = 'full_dtensor' passes DTensors; "
            "use 'spmd_types' or 'partial_dtensor'"
        )
    # No compiled graph and no CUDA graph can have decisions of each call on the host.
    cuda_graphs = not job.training.disable_cuda_graphs
    if cuda_graphs and job.parallelism.expert_parallel_degree > 1 and config.backend.syncs_host:
        raise ValueError(
            f'CUDA graphs exclude fp8_flow_moe.dispatch = "{config.dispatch}", which reads split sizes on the host; '
            'set training.disable_cuda_graphs = true, or fp8_flow_moe.dispatch = "symmetric" if the ranks share a node'
        )
    whole_steps = type(job.compile) is not tt.CompileConfig and preflight.compiles_model(job)
    if config.statistics_every and (cuda_graphs or whole_steps):
        raise ValueError(
            "fp8_flow_moe.statistics_every works outside of CUDA graphs, and of the graphs of trainers that compile "
            "whole steps; set training.disable_cuda_graphs = true, or leave statistics_every out"
        )
    if config.fp8_all_gather and preflight.compiles_model(job):
        raise ValueError(
            "fp8_flow_moe.fp8_all_gather works outside of graphs, but torchtitan 0.3 compiles whole blocks; leave it "
            'out, or set compile.components = ["loss"]'
        )


def expert_layout(job: Any, dims: tt.ParallelDims) -> ExpertLayout:
    """See :func:`titan_fp8moe.trainer.preflight.expert_layout`. Expert parallelism splits sequences."""
    return preflight.expert_layout(job, dims, token_shards=1 if dims.ep == 1 else dims.tp)


def why_all_to_all(job: Any) -> str | None:
    """Why no step of this job can be run again, as ``dispatch = "auto"`` needs it over symmetric memory."""
    return None if type(job.compile) is tt.CompileConfig else "its trainer compiles whole steps"


def check_classes(name: str, layer: Any) -> None:
    """The classes of one MoE layer's parts, before it is converted."""
    routed = layer.routed_experts
    parts = layer, layer.router, routed, routed.inner_experts, routed.token_dispatcher
    for part, known in zip(parts, _KNOWN, strict=True):
        if part._owner not in known:
            raise ValueError(
                f"fp8_flow_moe converts torchtitan's {known[0].__qualname__}, but {name} has a "
                f"{part._owner.__qualname__}; leave it in bf16 with fp8_flow_moe.filter_fqns, or remove what "
                "changed it: another converter, override or moe_comm_backend"
            )


def check_layer(name: str, layer: tt.MoE.Config, config: Fp8FlowMoEConfig, layout: ExpertLayout) -> None:
    """The dims of one MoE layer, on ranks of this layout."""
    experts = layer.routed_experts.inner_experts
    if getattr(experts, "lora_rank", 0) and layout.hidden_dim_shards > 1:
        raise ValueError(
            f"{name} has adapters of routed experts, whose hidden dim tensor parallelism would split; set "
            "parallelism.expert_parallel_degree > 1, or leave inner_experts out of LoRAConverter's target_modules"
        )
    preflight.check_layer(name, (experts.num_experts, experts.dim, experts.hidden_dim), config, layout)
