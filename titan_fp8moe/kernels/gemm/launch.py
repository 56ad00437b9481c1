"""What a launch of the Hopper GEMMs (:mod:`titan_fp8moe.kernels.gemm.hopper`) needs: the right GPU, TMA descriptors, a
counter of work tiles, and a number of CTAs."""

import functools
from collections.abc import Iterator
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from titan_fp8moe.recipe import FP8, TILE

GLUON_DTYPE = {FP8: gl.float8e4nv, torch.bfloat16: gl.bfloat16, torch.float32: gl.float32}


def is_hopper(x: Tensor) -> bool:
    """Whether these kernels are for the GPU that holds ``x``. Gluon has no interpreter: not where that is on."""
    return x.is_cuda and _is_hopper(x.get_device())


# Every GEMM asks, and torch looks the device up anew each time.
@functools.cache
def _is_hopper(device: int) -> bool:
    return not triton.knobs.runtime.interpret and torch.cuda.get_device_capability(device) == (9, 0)


@functools.cache
def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def operand(x: Tensor) -> TensorDescriptor:
    """TMA descriptor of an fp8 matrix, or of several below each other, read in 128x128 tiles; rows may be strided."""
    return _descriptor(x, TILE)


def result(x: Tensor) -> TensorDescriptor:
    """TMA descriptor of a result, a matrix or several below each other, written in parts of 64x64."""
    return _descriptor(x, 64)


def _descriptor(x: Tensor, block: int) -> TensorDescriptor:
    # A GEMM needs three. The constructor, with its checks, took 7% of the time of a layer's Python.
    descriptor = object.__new__(TensorDescriptor)
    shape, strides = x.shape, x.stride()
    if len(shape) == 3:
        assert x.is_contiguous()
        shape, strides = (shape[0] * shape[1], shape[2]), strides[1:]
    descriptor.__dict__.update(_descriptor_fields(x.dtype, block), base=x, shape=shape, strides=strides)
    return descriptor


@functools.cache
def _descriptor_fields(dtype: torch.dtype, block: int) -> dict[str, Any]:
    layout = gl.NVMMASharedLayout.get_default_for([block, block], GLUON_DTYPE[dtype])
    example = torch.empty(block, block, dtype=dtype, device="cpu")
    return vars(TensorDescriptor.from_tensor(example, [block, block], layout))


NUM_COUNTERS = 4096  # for streams and for launches in graphs
_free_counters: dict[int, Iterator[Tensor]] = {}
_stream_counters: dict[tuple[int, int], Tensor] = {}


def counter(device: torch.device) -> Tensor:
    """The number of pieces taken, (1,) int32: zero before a launch, and set back to zero by the launch.

    Launches on a stream follow each other and share one. A captured launch may later run beside any other, and gets one
    that nobody else has.
    """
    if device.type != "cuda":
        return torch.zeros(1, dtype=torch.int32, device=device)
    if torch.cuda.is_current_stream_capturing():
        return _free_counter(device)
    key = device.index, torch._C._cuda_getCurrentRawStream(device.index)
    if key not in _stream_counters:
        if device.index not in _free_counters:
            zeros = torch.zeros(NUM_COUNTERS, dtype=torch.int32, device=device)
            torch.cuda.synchronize(device)  # they are for any stream
            _free_counters[device.index] = (zeros[i : i + 1] for i in range(NUM_COUNTERS))
        _stream_counters[key] = _free_counter(device)
    return _stream_counters[key]


def _free_counter(device: torch.device) -> Tensor:
    free = next(_free_counters.get(device.index, iter(())), None)
    # When none is left a graph sets its own to zero, one more thing to do in each replay.
    return torch.zeros(1, dtype=torch.int32, device=device) if free is None else free


def num_programs(num_pieces: int, device: torch.device) -> int:
    """One program per multiprocessor, or fewer where there is less to do."""
    return min(_num_processors(device), num_pieces)
