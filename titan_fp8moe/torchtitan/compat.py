"""Corrections to PyTorch that torchtitan 0.2.2 needs on every device."""

import torch
import torch.distributed.fsdp  # noqa: F401  registers the torch.ops.fsdp ops named below
from torch.utils.checkpoint import SAC_IGNORED_OPS

# FSDP issues these around a block's computation. Their number differs between the forward and the recomputation (an
# all-gather that was prefetched is not repeated, a profiler range is not closed by an early stop), while selective
# checkpointing matches the two passes call by call. None of them produces an activation.
_OPS_AROUND_A_BLOCK = (
    "profiler::_record_function_enter",
    "profiler::_record_function_enter_new",
    "profiler::_record_function_exit",
    "fsdp::all_gather_copy_in",
    "fsdp::split_with_sizes_copy",
    "fsdp::chunk_cat",
    "c10d::_allgather_base_",
)


def fix_selective_checkpointing() -> None:
    """Let per-op selective activation checkpointing ignore FSDP's own ops.

    Without this ``activation_checkpoint.selective_ac_option = "op"`` with expert parallelism fails in the backward
    ("encountered during backward but not found in storage"), because torchtitan shards the experts as an FSDP module
    inside the checkpointed block. Ops that this version of PyTorch (2.11 to 2.13) lacks are skipped.
    """
    for name in _OPS_AROUND_A_BLOCK:
        namespace, op = name.split("::")
        packet = getattr(getattr(torch.ops, namespace), op, None)
        if packet is not None:
            SAC_IGNORED_OPS.update(getattr(packet, overload) for overload in packet.overloads())
