"""The all-to-all of payload rows between expert-parallel ranks.

PyTorch's functional collective, which tracing and activation checkpointing know, called below the Python wrapper that
would return an asynchronous tensor subclass: the caller waits, when it needs the rows.
"""

import torch
from torch import Tensor


def start_all_to_all(rows: Tensor, output_splits: list[int], input_splits: list[int], group_name: str) -> Tensor:
    """Sends ``input_splits[i]`` consecutive rows to rank i, receives ``output_splits[i]`` from it.

    Args:
        rows: (sum(input_splits), P) uint8, contiguous. Bytes, because gloo moves no float8.

    Returns:
        (sum(output_splits), P) uint8, to be read after :func:`wait` only.
    """
    return torch.ops._c10d_functional.all_to_all_single(rows, output_splits, input_splits, group_name)


def wait(rows: Tensor) -> Tensor:
    """Lets the current stream (on a CPU, the caller) wait until ``rows`` have arrived."""
    return torch.ops._c10d_functional.wait_tensor(rows)
