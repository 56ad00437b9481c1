"""The all-to-all of payload rows between expert-parallel ranks."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group


@torch.library.custom_op("titan_fp8moe::all_to_all_rows", mutates_args=())
def all_to_all_rows(rows: Tensor, output_splits: list[int], input_splits: list[int], group_name: str) -> Tensor:
    """Sends ``input_splits[i]`` consecutive rows to rank i, receives ``output_splits[i]`` from it.

    Args:
        rows: (sum(input_splits), P) uint8, contiguous. Bytes, because gloo moves no float8.

    Returns:
        (sum(output_splits), P) uint8.

    One op with the collective and its wait inside, so that activation checkpointing sees one result it can keep and no
    asynchronous tensor reaches a kernel.
    """
    out = rows.new_empty(sum(output_splits), rows.shape[1])
    dist.all_to_all_single(out, rows, output_splits, input_splits, group=_resolve_process_group(group_name))
    return out


@all_to_all_rows.register_fake
def _(rows, output_splits, input_splits, group_name):
    return rows.new_empty(sum(output_splits), rows.shape[1])
