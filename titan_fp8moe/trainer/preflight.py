"""Checks of a job before its model is converted, for torchtitan 0.2.2 and 0.3.

Each raises ValueError with the setting to change. Nearly all settings have the same names in both releases; the
adapters' ``job_checks`` have the others, and limits of one release.
"""

import logging
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple
from unittest import mock

import torch

from titan_fp8moe.config import Fp8FlowMoEConfig
from titan_fp8moe.ops.backend import emulating, pass_gate
from titan_fp8moe.recipe import BLOCK, STEP

logger = logging.getLogger(__name__)

# Other schedules compute input and weight gradients at different times; a converted layer computes both at once.
_WHOLE_BACKWARD = ("1F1B", "Interleaved1F1B", "GPipe", "LoopedBFS")


class ExpertLayout(NamedTuple):
    """How a layer's experts and their tokens are spread over ranks.

    Attributes:
        expert_shards: ranks that share the experts (expert parallelism).
        hidden_dim_shards: ranks that share the hidden dim of each expert (tensor parallelism).
        fsdp_shards: ranks over which FSDP shards the experts of one expert-parallel rank.
        tokens: tokens of one microbatch on a rank, before dispatch.
    """

    expert_shards: int
    hidden_dim_shards: int
    fsdp_shards: int
    tokens: int


def expert_layout(job: Any, dims: Any, *, token_shards: int = 1) -> ExpertLayout:
    """How the degrees of torchtitan's ``ParallelDims`` spread the experts.

    Args:
        token_shards: ranks that share a sequence's tokens, besides those of context parallelism.
    """
    batch_size = job.parallelism.pipeline_parallel_microbatch_size if dims.pp > 1 else job.training.local_batch_size
    tokens = batch_size * job.training.seq_len // (dims.cp * token_shards)
    if dims.ep == 1:
        return ExpertLayout(1, dims.tp, dims.dp_shard * dims.cp, tokens)
    # Expert parallelism also spans the tensor-parallel ranks. torchtitan 0.3 shards no expert then.
    expert_tensor_parallel = getattr(dims, "etp", 1)
    fsdp_shards = dims.dp_shard * dims.cp * dims.tp // (dims.ep * expert_tensor_parallel)
    return ExpertLayout(dims.ep, expert_tensor_parallel, fsdp_shards, tokens)


def fsdp_has_work(job: Any, layout: ExpertLayout, dims: Any) -> bool:
    """Whether FSDP has anything to do for the routed experts. Else they leave it.

    Over one rank there is nothing to gather or reduce. But FSDP would cast the experts' parameters to bf16 and copy
    them twice a step, and copy the gradients twice. Quantization reads fp32 as well, and weight gradients come in the
    parameters' dtype. Even over one rank FSDP adds up gradients of bf16 parameters in fp32 and moves offloaded ones,
    and TorchFT averages over replicas what FSDP reduces.
    """
    training, fault_tolerance = job.training, getattr(job, "fault_tolerance", None)
    return (
        layout.fsdp_shards * dims.dp_replicate > 1
        or training.enable_cpu_offload
        or training.dtype != "float32"
        or (fault_tolerance is not None and fault_tolerance.enable)
    )


# --- One layer --------------------------------------------------------------------------------------------------------


def matching(names: Sequence[str], parts: Sequence[str], *, setting: str) -> list[str]:
    """The names that have one of ``parts`` in them, followed by a dot. Each part must match a name."""
    for part in parts:
        if not any(part in f"{name}." for name in names):
            raise ValueError(f"{setting} has {part!r}, which matches none of {', '.join(names)}; correct or remove it")
    return [name for name in names if any(part in f"{name}." for part in parts)]


def check_layer(name: str, sizes: Sequence[int], config: Fp8FlowMoEConfig, layout: ExpertLayout) -> None:
    """The sizes of one MoE layer, E, D and H of all ranks, on ranks of this layout."""
    num_experts, dim, hidden_dim = sizes
    if (reason := why_not_fp8_dims(dim, hidden_dim, layout.hidden_dim_shards)) is not None:
        setting = "tensor_parallel_degree" if layout.expert_shards == 1 else "expert_tensor_parallel_degree"
        lower = f", or lower parallelism.{setting}" if layout.hidden_dim_shards > 1 else ""
        raise ValueError(f"{name}: {reason}; leave the layer in bf16 with fp8_flow_moe.filter_fqns{lower}")
    shards, over = layout.expert_shards, f"{layout.expert_shards} expert-parallel"
    remedy = "choose a parallelism.expert_parallel_degree that divides them"
    if config.fp8_all_gather:  # FSDP must shard whole experts, since a 128x128 block has one scale
        shards, over = shards * layout.fsdp_shards, f"{over} x {layout.fsdp_shards} FSDP"
        remedy += ", set fp8_flow_moe.fp8_all_gather = false, or raise parallelism.data_parallel_replicate_degree"
    if num_experts % shards:
        raise ValueError(f"{name}: {num_experts} experts do not divide over {over} ranks; {remedy}")


def why_not_fp8_dims(dim: int, hidden_dim: int, hidden_dim_shards: int) -> str | None:
    """The reason why an FFN, or experts, of these dims cannot run in FP8 on ranks that share the hidden dim, or None.
    Both dims are padded, the hidden dim on every rank."""
    if dim % STEP:
        return f"model dim {dim} is no multiple of {STEP}"
    if hidden_dim % (STEP * hidden_dim_shards):
        over = f" over {hidden_dim_shards} tensor-parallel ranks" if hidden_dim_shards > 1 else ""
        return f"hidden dim {hidden_dim}{over} is no multiple of {STEP}"
    return None


def check_linear(name: str, out_features: int, in_features: int, shards: int) -> None:
    """A linear's dims must be whole FP8 tiles on each of the ranks that may share one of them."""
    if out_features % (BLOCK * shards) or in_features % (BLOCK * shards):
        raise ValueError(
            f"fp8_flow_moe.linear_fqns: {name} is {out_features}x{in_features} over {shards} tensor-parallel ranks, "
            f"not multiples of {BLOCK} on each; remove it from the list"
        )


# --- The job ----------------------------------------------------------------------------------------------------------


def compiles_model(job: Any) -> bool:
    return job.compile.enable and "model" in job.compile.components


def check_job(job: Any, config: Fp8FlowMoEConfig, *, validation: str) -> None:
    """The settings that both releases have, without the parallel degrees and the model. ``validation`` is the name of
    the table that turns validation on."""
    training, parallelism = job.training, job.parallelism
    if config.statistics_every and not (job.metrics.enable_tensorboard or job.metrics.enable_wandb):
        raise ValueError(
            f"fp8_flow_moe.statistics_every = {config.statistics_every}, but nothing logs the statistics; set "
            "metrics.enable_tensorboard or metrics.enable_wandb, or set it to 0"
        )
    if config.fp8_all_gather and training.enable_cpu_offload:
        raise ValueError(
            "fp8_flow_moe.fp8_all_gather quantizes shards where they are stored, but training.enable_cpu_offload "
            "stores them on the CPU; set one of the two to false"
        )
    if parallelism.pipeline_parallel_degree > 1:
        _check_pipeline_schedule(parallelism)
    if getattr(job, validation).enable and parallelism.context_parallel_degree > 1:
        raise ValueError(
            f"fp8_flow_moe with validation under context parallelism is untested; set {validation}.enable = false or "
            "parallelism.context_parallel_degree = 1"
        )


def _check_pipeline_schedule(parallelism: Any) -> None:
    """A schedule that may split the backward runs a layer's backward for each half. Upper and lower case are the same,
    as in PyTorch."""
    setting = "pipeline_parallel_schedule" + "_csv" * bool(parallelism.pipeline_parallel_schedule_csv)
    schedule = str(getattr(parallelism, setting))
    if schedule.lower() in [name.lower() for name in _WHOLE_BACKWARD]:
        return
    overlap = "pipeline_parallel_expert_parallel_overlap"  # only torchtitan 0.2.2 has this setting
    if not hasattr(parallelism, overlap):
        fault = "torchtitan 0.3 then trains no last norm, in bf16 too; "
    elif schedule.lower() == "dualpipev" and getattr(parallelism, overlap):
        fault = f"overlaps it in hooks that converted layers do not call; set parallelism.{overlap} = false, or "
    else:
        return
    raise ValueError(
        f"parallelism.{setting} = {schedule!r} may split the backward, and {fault}use one of "
        f"{', '.join(_WHOLE_BACKWARD)}"
    )


_elsewhere = False


def for_other_machines() -> AbstractContextManager[Any]:
    """Within it nothing trains: a job is checked, or a checkpoint exported, without regard for this machine."""
    return mock.patch(f"{__name__}._elsewhere", True)


def trains_here() -> bool:
    """Whether this machine trains the model, and so needs the hardware."""
    return not _elsewhere


def check_hardware() -> str:
    """Names the implementation that the ops run, for logs. The machine must have kernels that work or no GPU, unless
    the reference is switched on, or the job is for other machines.

    Raises:
        ValueError, RuntimeError: of :func:`titan_fp8moe.ops.self_check.require_checked`.
    """
    if _elsewhere:
        return "dry run"
    if not torch.cuda.is_available():
        return "plain PyTorch reference on the CPU"
    name = torch.cuda.get_device_name()
    if emulating():
        return f"plain PyTorch reference on {name} (TITAN_FP8MOE_EMULATE)"
    pass_gate()
    return f"Triton kernels on {name}"


def ranks_of_a_node() -> int | None:
    """As torchrun tells. None if nobody does: to other launchers, or for other machines."""
    return None if _elsewhere else int(os.environ.get("LOCAL_WORLD_SIZE", 0)) or None


def check_dispatch(config: Fp8FlowMoEConfig, layout: ExpertLayout) -> None:
    """Symmetric memory needs all ranks of each group on one node."""
    local_ranks, ranks = ranks_of_a_node(), layout.expert_shards * layout.hidden_dim_shards
    if config.dispatch == "symmetric" and local_ranks is not None and local_ranks % ranks:
        raise ValueError(
            f'fp8_flow_moe.dispatch = "{config.dispatch}" needs all expert-parallel ranks on one node, but {ranks} '
            f"ranks share the experts and a node has {local_ranks}; choose a "
            'parallelism.expert_parallel_degree that divides these, or set fp8_flow_moe.dispatch = "all_to_all"'
        )


def warn_of_settings_without_effect(config: Fp8FlowMoEConfig, layout: ExpertLayout) -> None:
    """Logs a warning for each setting that the others, or the layout, make void."""
    capacity = config.dispatch_capacity != Fp8FlowMoEConfig.dispatch_capacity
    void = {
        "save_h": (config.recompute == "experts" and config.save_h == "fp8", 'recompute = "experts" keeps no h'),
        "dispatch": (config.dispatch == "symmetric" and layout.expert_shards == 1, "no ranks share the experts"),
        "dispatch_capacity": (config.dispatch != "symmetric" and capacity, 'dispatch is not "symmetric"'),
        "cache_layouts": (config.cache_layouts == "forward" and not config.cache_weights, "cache_weights is off"),
        "fp8_all_gather": (config.fp8_all_gather and layout.fsdp_shards == 1, "FSDP does not shard the experts"),
    }
    for name, reason in ((name, reason) for name, (is_void, reason) in void.items() if is_void):
        setting = f"fp8_flow_moe.{name} = {getattr(config, name)!r}"
        logger.warning(f"{setting} has no effect in this job, because {reason}; leave it out")
