"""Checks of a job before its model is converted, for any trainer.

Each function takes plain numbers and names, and raises ValueError with the setting to change. Settings of this package
have the same names everywhere. The caller passes what its trainer calls the others: ``setting`` is the name of one, and
``remedy`` ends the message with what to change.
"""

import logging
from collections.abc import Sequence
from typing import NamedTuple

import torch

from titan_fp8moe.config import Fp8FlowMoEConfig
from titan_fp8moe.kernels.sizes import MAX_ROWS
from titan_fp8moe.ops.backend import pass_gate
from titan_fp8moe.recipe import TILE

logger = logging.getLogger(__name__)

PADDED_FROM = 16
"""A hidden dim on a rank is a multiple of this: TMA needs rows of 16 bytes. Quantized weights pad it to whole tiles."""

# Other schedules may compute input and weight gradients at different times; a converted layer computes both at once.
_SCHEDULES = ("1F1B", "Interleaved1F1B", "GPipe", "LoopedBFS")


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


# --- One layer --------------------------------------------------------------------------------------------------------


def matching(names: Sequence[str], parts: Sequence[str], *, setting: str) -> list[str]:
    """The names that have one of ``parts`` in them, followed by a dot. Each part must match a name."""
    for part in parts:
        if not any(matches(name, [part]) for name in names):
            raise ValueError(
                f"fp8_flow_moe.{setting} has {part!r}, which matches none of {', '.join(names)}; correct or remove it"
            )
    return [name for name in names if matches(name, parts)]


def matches(name: str, parts: Sequence[str]) -> bool:
    """Whether the name, followed by a dot, has one of ``parts`` in it."""
    return any(part in f"{name}." for part in parts)


def check_experts(layer: str, num_experts: int, expert_shards: int, *, remedy: str) -> None:
    """Every expert-parallel rank must hold equally many experts."""
    if num_experts % expert_shards:
        raise ValueError(
            f"{layer}: {num_experts} experts do not divide over {expert_shards} expert-parallel ranks; {remedy}"
        )


def check_fp8_all_gather(
    layer: str, num_experts: int, hidden_dim: int, expert_shards: int, fsdp_shards: int, *, remedy: str
) -> None:
    """With ``fp8_all_gather`` FSDP must shard whole experts, since a 128x128 block has one scale, without padding."""
    if hidden_dim % TILE:
        raise ValueError(
            f"{layer}: fp8_flow_moe.fp8_all_gather needs a hidden dim of multiples of {TILE} on each rank, got "
            f"{hidden_dim}; set it to false"
        )
    if num_experts % (expert_shards * fsdp_shards):
        raise ValueError(
            f"{layer}: fp8_flow_moe.fp8_all_gather needs whole experts on each rank, but {num_experts} experts do not "
            f"divide over {expert_shards} expert-parallel x {fsdp_shards} FSDP ranks; set it to false, or {remedy}"
        )


def check_dims(layer: str, dim: int, hidden_dim: int, hidden_dim_shards: int, *, remedy: str) -> None:
    """The model dim must be whole FP8 tiles. The hidden dim is padded, from a multiple of 16 on every rank.

    ``remedy`` is for a hidden dim that only the sharding breaks.
    """
    if dim % TILE:
        raise ValueError(f"{layer}: model dim {dim} is not a multiple of {TILE}, the width of an FP8 tile; choose one")
    if hidden_dim % PADDED_FROM:
        raise ValueError(
            f"{layer}: expert hidden dim {hidden_dim} is not a multiple of {PADDED_FROM}; choose one, or leave the "
            "layer in bf16 with fp8_flow_moe.filter_fqns"
        )
    if hidden_dim % (PADDED_FROM * hidden_dim_shards):
        raise ValueError(
            f"{layer}: expert hidden dim {hidden_dim} over {hidden_dim_shards} tensor-parallel ranks is "
            f"{hidden_dim / hidden_dim_shards:g} per rank, not a multiple of {PADDED_FROM}; {remedy}"
        )


def why_not_fp8_dims(dim: int, hidden_dim: int, hidden_dim_shards: int) -> str | None:
    """The reason why an FFN of these dims stays as it is on ranks that share its hidden dim, or None."""
    if dim % TILE == 0 and hidden_dim % (PADDED_FROM * hidden_dim_shards) == 0:
        return None
    per_rank = f"hidden dim {hidden_dim} / {hidden_dim_shards} none of {PADDED_FROM}"
    return f"model dim {dim} is no multiple of {TILE}, or {per_rank}"


def check_linear(name: str, out_features: int, in_features: int, shards: int) -> None:
    """A linear's dims must be whole FP8 tiles on each of the ranks that may share one of them."""
    if out_features % (TILE * shards) or in_features % (TILE * shards):
        raise ValueError(
            f"fp8_flow_moe.linear_fqns: {name} is {out_features}x{in_features} over {shards} tensor-parallel ranks, "
            f"not multiples of {TILE} on each; remove it from the list"
        )


def check_rows(layer: str, tokens: int, top_k: int, *, remedy: str) -> None:
    """A rank's routed pairs of one microbatch must fit, if every rank gets as many. The kernels check what arrives."""
    if tokens * top_k > MAX_ROWS:
        raise ValueError(
            f"{layer}: {tokens} tokens of a microbatch have {tokens * top_k} rows for their top-{top_k} experts, but a "
            f"rank can have {MAX_ROWS}; {remedy}"
        )


# --- The job ----------------------------------------------------------------------------------------------------------


def check_dtype(dtype: str, *, setting: str) -> None:
    """Weights and activations reach the quantization in bf16 or fp32."""
    if dtype not in ("bfloat16", "float32"):
        raise ValueError(f"fp8_flow_moe quantizes bf16 or fp32, but {setting} = {dtype!r}; set it to one of them")


def check_optimizer(config: Fp8FlowMoEConfig, steps_in_backward: bool, *, setting: str) -> None:
    """Weights that change within a step cannot be cached for the step."""
    if config.cache_weights and steps_in_backward:
        raise ValueError(
            "fp8_flow_moe.cache_weights keeps quantized weights for a whole step, but with "
            f"{setting} each microbatch changes the weights; set one of the two to false"
        )


def check_offload(config: Fp8FlowMoEConfig, offloads: bool, *, setting: str) -> None:
    """Shards are quantized where they are stored, and the kernels need them on the GPU."""
    if config.fp8_all_gather and offloads:
        raise ValueError(
            f"fp8_flow_moe.fp8_all_gather quantizes shards where they are stored, but {setting} stores them on the "
            "CPU; set one of the two to false"
        )


def check_logging(config: Fp8FlowMoEConfig, logs: bool, *, remedy: str) -> None:
    """Statistics that nothing logs would cost time for nothing."""
    if config.statistics_every and not logs:
        raise ValueError(
            f"fp8_flow_moe.statistics_every = {config.statistics_every}, but nothing logs the statistics; {remedy}, or "
            "set it to 0"
        )


def check_pipeline_schedule(schedule: str, *, setting: str) -> None:
    """The schedule must not split the backward. Upper and lower case are the same, as in PyTorch."""
    if schedule.lower() not in [name.lower() for name in _SCHEDULES]:
        raise ValueError(
            f"{setting} = {schedule!r} may split the backward, but fp8_flow_moe computes input and weight gradients "
            f"together; use {', '.join(_SCHEDULES[:-1])} or {_SCHEDULES[-1]} instead"
        )


def check_hardware(emulate: bool) -> str:
    """Names the implementation that the ops run, for logs. The machine must have kernels that work or no GPU, unless
    ``emulate`` is set.

    Raises:
        ValueError, RuntimeError: of :func:`titan_fp8moe.ops.self_check.require_checked`.
    """
    if not torch.cuda.is_available():
        if torch.version.cuda:
            logger.warning("PyTorch is built for CUDA but finds no GPU: this process trains on the CPU")
        return "plain PyTorch reference on the CPU"
    name = torch.cuda.get_device_name()
    if emulate:
        return f"plain PyTorch reference on {name} (emulate)"
    pass_gate()
    return f"Triton kernels on {name}"


def check_dispatch(config: Fp8FlowMoEConfig, layout: ExpertLayout, local_ranks: int | None, *, remedy: str) -> None:
    """A backend may need all ranks of a group on one node, which has ``local_ranks`` unless None."""
    if not config.backend.single_node:
        return
    ranks = layout.expert_shards * layout.hidden_dim_shards
    if layout.expert_shards == 1:
        logger.warning(f'fp8_flow_moe.dispatch = "{config.dispatch}" has no effect without expert parallelism')
    elif local_ranks is not None and ranks > local_ranks:
        raise ValueError(
            f'fp8_flow_moe.dispatch = "{config.dispatch}" needs all expert-parallel ranks on one node, but {ranks} '
            f"ranks share the experts and a node has {local_ranks}; {remedy}, or set "
            'fp8_flow_moe.dispatch = "all_to_all"'
        )


def warn_about_settings(config: Fp8FlowMoEConfig, fsdp_shards: int) -> None:
    """Logs warnings about settings that have no effect, or cost more than they seem to."""
    both = config.cache_layouts == "both"
    if not both and not config.cache_weights:
        logger.warning("fp8_flow_moe.cache_layouts has no effect without fp8_flow_moe.cache_weights; set that to true")
    if config.cache_weights and fsdp_shards > 1:
        size, less = ("2 bytes", 'fp8_flow_moe.cache_layouts = "forward" or ') if both else ("1 byte", "")
        logger.warning(
            f"fp8_flow_moe.cache_weights keeps quantized weights unsharded, {size} per parameter, although FSDP shards "
            f"the experts over {fsdp_shards} ranks; set {less}it to false if memory runs out"
        )
    if config.recompute == "experts" and config.save_h == "fp8":
        logger.warning('fp8_flow_moe.save_h has no effect with fp8_flow_moe.recompute = "experts", which keeps no h')
    if config.fp8_all_gather and fsdp_shards == 1:
        logger.warning(
            "fp8_flow_moe.fp8_all_gather has no effect: FSDP shards the experts over one rank and gathers nothing; set "
            "it to false"
        )
