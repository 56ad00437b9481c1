"""Launch arguments of the Hopper GEMMs: TMA descriptors, tile counters and grid sizes; and which GPU is a Hopper.

:mod:`.forward` and :mod:`.wgrad` take them from here at every launch, so their CPU time counts.
"""

import functools
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from titan_fp8moe.recipe import FP8, GEMM_TILE

GLUON_DTYPE = {FP8: gl.float8e4nv, torch.bfloat16: gl.bfloat16, torch.float32: gl.float32}


@functools.cache
def _num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def operand(x: Tensor) -> TensorDescriptor:
    """TMA descriptor of an fp8 operand, loaded in 128x128 tiles.

    Args:
        x: (rows, columns), whose rows may be strided, or contiguous (E, rows, columns), seen as (E * rows, columns).
    """
    return _descriptor(x, GEMM_TILE)


def result(x: Tensor) -> TensorDescriptor:
    """TMA descriptor of a result, stored in slices of 64x64; shapes as for :func:`operand`."""
    return _descriptor(x, 64)


def padded_result(x: Tensor) -> TensorDescriptor:
    """As :func:`result` for (E, rows, columns) with unit stride along the columns, of which a kernel computes padded
    ones: TMA drops the rows and columns past an expert's last."""
    block = [1, 64, 64]
    layout = gl.NVMMASharedLayout.get_default_for(block, GLUON_DTYPE[x.dtype])
    return TensorDescriptor(x, list(x.shape), list(x.stride()), block, layout)


def _descriptor(x: Tensor, block: int) -> TensorDescriptor:
    shape, strides = x.shape, x.stride()
    if len(shape) == 3:
        assert x.is_contiguous()
        shape, strides = (shape[0] * shape[1], shape[2]), strides[1:]
    fields = _descriptor_fields(x.dtype, block)
    if fields is None:
        return TensorDescriptor(x, list(shape), list(strides), [block, block], _layout(x.dtype, block))
    # Bypasses the constructor, whose checks take time three times per GEMM.
    descriptor = object.__new__(TensorDescriptor)
    descriptor.__dict__.update(fields)
    descriptor.base, descriptor.shape, descriptor.strides = x, shape, strides
    return descriptor


def _layout(dtype: torch.dtype, block: int) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for([block, block], GLUON_DTYPE[dtype])


@functools.cache
def _descriptor_fields(dtype: torch.dtype, block: int) -> dict[str, Any] | None:
    """Fields that descriptors of this kind have in common. None, with a warning, if more than base, shape and strides
    depends on the tensor: Triton's constructor then makes them all."""
    examples = [torch.empty(rows, 2 * block, dtype=dtype, device="cpu") for rows in (block, 3 * block)]
    made = [vars(TensorDescriptor.from_tensor(x, [block, block], _layout(dtype, block))) for x in examples]
    common = [{k: v for k, v in fields.items() if k not in ("base", "shape", "strides")} for fields in made]
    whole = all({"base", "shape", "strides"} <= fields.keys() for fields in made)
    if whole and common[0] == common[1]:
        return common[0]
    warnings.warn(
        f"TMA descriptors of Triton {triton.__version__} have fields that titan_fp8moe does not know: Triton's "
        "constructor makes them, which takes more CPU time",
        stacklevel=2,
    )
    return None


NUM_COUNTERS = 4096  # per device, for streams and for launches in CUDA graphs
_free_counters: dict[int, Iterator[Tensor]] = {}
_stream_counters: dict[tuple[int, int], Tensor] = {}


def tile_counter(device: torch.device) -> Tensor:
    """The counter that CTAs take work tiles from, (1,) int32. It is zero before a launch, and the launch resets it.

    Launches on the same stream follow each other and share a counter. A captured launch may later run at the same time
    as any other, so it gets a counter of its own.
    """
    if device.type != "cuda":
        return torch.zeros(1, dtype=torch.int32, device=device)
    if torch.cuda.is_current_stream_capturing():
        return _free_counter(device)
    key = (index := device.index), torch._C._cuda_getCurrentRawStream(index)
    if (counter := _stream_counters.get(key)) is None:
        if index not in _free_counters:
            zeros = torch.zeros(NUM_COUNTERS, dtype=torch.int32, device=device)
            torch.cuda.synchronize(device)  # any stream may use them
            _free_counters[index] = (zeros[i : i + 1] for i in range(NUM_COUNTERS))
        counter = _stream_counters[key] = _free_counter(device)
    return counter


def _free_counter(device: torch.device) -> Tensor:
    free = next(_free_counters.get(device.index, iter(())), None)
    # When none is left, the graph allocates and zeroes one: an additional kernel in each replay.
    return torch.zeros(1, dtype=torch.int32, device=device) if free is None else free


def grid_size(num_tiles: int, device: torch.device) -> int:
    """The number of CTAs: one per SM, or one per tile where there are fewer tiles."""
    return min(_num_sms(device), num_tiles)
