"""Describes one rank's share of a job: the part of a dry run that no release of torchtitan changes."""

from collections.abc import Sequence
from typing import Any, cast

from torch import nn
from torch.distributed.tensor import DTensor

# Parameter, gradient and Adam's two moments, all in the parameter's dtype.
_TENSORS_PER_PARAMETER = 4


def describe_layout(dims: Any, etp: int, expert_fsdp: int) -> list[str]:
    """The degrees of torchtitan's ``ParallelDims``, and over how many ranks ETP and FSDP shard an expert."""
    return [
        f"layout    {dims.world_size} ranks = pp {dims.pp} x dp_replicate {dims.dp_replicate} x "
        f"dp_shard {dims.dp_shard} x cp {dims.cp} x tp {dims.tp}",
        f"          experts: ep {dims.ep} x etp {etp} x fsdp {expert_fsdp}",
    ]


def describe_batch(sequences: int, seq_len: int, accumulation: int) -> str:
    """Describes the batch of all ranks, and how often a step takes one."""
    return f"batch     {sequences} sequences of {seq_len} tokens, {accumulation} times per step"


def describe_parameters(rank: int, parts: Sequence[nn.Module]) -> str:
    """Describes the memory of the rank's shards with gradients and Adam's states."""
    shards = [_local(param) for part in parts for param in part.parameters()]
    held = sum(shard.numel() for shard in shards)
    gib = _TENSORS_PER_PARAMETER * sum(shard.nbytes for shard in shards) / 2**30
    return f"rank {rank:<4} {held:,} parameters, {gib:.1f} GiB with gradients and Adam states"


def describe_parts(parts: Sequence[nn.Module], ends: Sequence[str]) -> list[str]:
    """The layers of each model part, and which of the modules named ``ends`` it has."""
    lines = []
    for part in parts:
        there = [name for name in ends if getattr(part, name) is not None]
        layers = ", ".join(cast(nn.ModuleDict, part.layers))
        lines.append(f"          layers {layers}{' with ' if there else ''}{', '.join(there)}")
    return lines


def describe_experts(layer: str, experts: nn.Module) -> list[str]:
    """The shapes of a layer's expert weights, whole and on this rank."""
    lines = [f"experts   of layer {layer}, {type(experts).__name__}:"]
    for key, param in experts.named_parameters():
        lines.append(f"          {key} {tuple(param.shape)}, on this rank {tuple(_local(param).shape)}")
    return lines


def _local(param: nn.Parameter) -> Any:
    return param.to_local() if isinstance(param, DTensor) else param
