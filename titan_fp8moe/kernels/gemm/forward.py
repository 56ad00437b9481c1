"""The GEMM over expert groups along M on Hopper, in Gluon: where its tiles lie, and which scales they have.

The program is that of :mod:`titan_fp8moe.kernels.gemm.hopper`. A group is a multiple of 128 rows and a
tile has 128, so that a tile belongs to one expert; which one is read off the group ends in device memory. The order of
the tiles follows from the ends alone, and every sum is formed in the same order whoever computes it: results are
deterministic, and a row's result does not depend on the other rows.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from titan_fp8moe.kernels.gemm import hopper, launch
from titan_fp8moe.kernels.gemm.hopper import PART_LAYOUT, WORKER_REGISTERS, WORKER_WARPS
from titan_fp8moe.kernels.launch import Kernel
from titan_fp8moe.recipe import TILE

SUPER_ROW = gl.constexpr(12)  # 132 programs on 12 x 11 tiles share both operands


@gluon.jit
def _expert_of(offsets_E, m, E: gl.constexpr):
    """The number of groups that end at or before row m: 32 ends at a time, one per lane, in every warp alike."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    lane = gl.arange(0, 32, layout=layout)
    count = gl.zeros([32], gl.int32, layout)
    for first in range(0, E, 32):
        end = gl.load(offsets_E + first + lane, mask=first + lane < E, other=2**31 - 1)
        count += (end <= m).to(gl.int32)
    return gl.sum(count, 0)


@gluon.jit
def _problem(offsets_E, N: gl.constexpr, E: gl.constexpr):
    """What :func:`_locate` needs, and the number of pieces."""
    num_rows = gl.load(offsets_E + E - 1) // 128
    num_tiles = num_rows * ((N + 255) // 256)
    num_split = 0
    if N % 256 == 0:  # else there are narrow tiles among the last
        num_split = hopper.split_tail(num_tiles)
    return (offsets_E, num_rows, num_tiles - num_split, num_split), num_tiles + num_split


@gluon.jit
def _locate(index, problem, N: gl.constexpr, K: gl.constexpr, E: gl.constexpr):
    offsets_E, num_rows, num_whole, num_split = problem
    tile, half, is_half = hopper.piece_at(index, num_whole, num_split)
    row, column = hopper.tile_position(tile, num_rows, (N + 255) // 256, SUPER_ROW)
    m = row * 128
    n = column * 256 + half * 128
    expert = _expert_of(offsets_E, m, E)
    return (m, expert * N + n, 0, K // 128), (is_half == 0) & (n + 256 <= N), (m, n), expert


@gluon.jit
def _scale_pointers(scales, place, position, expert, CONSUMER: gl.constexpr):
    a_scale, a_strides, b_scale, b_strides = scales
    a_stride_m, a_stride_k = a_strides
    b_stride_e, b_stride_n, b_stride_k = b_strides
    m, n = position
    a_pointer = a_scale + (m + 64 * CONSUMER) * a_stride_m
    rows = gl.arange(0, 64, layout=gl.SliceLayout(1, PART_LAYOUT))
    b_pointer = b_scale + expert * b_stride_e + n // 128 * b_stride_n
    return a_pointer + rows * a_stride_m, a_stride_k, b_pointer, b_stride_n, b_stride_k


@gluon.jit
def _produce(operands, counter, offsets_E, N: gl.constexpr, K: gl.constexpr, E: gl.constexpr):
    requested = hopper.request(counter)
    problem, num_pieces = _problem(offsets_E, N, E)
    hopper.produce(operands, counter, requested, num_pieces, problem, N, K, E, _locate)


@gluon.jit
def _consume(results, scales, offsets_E, CONSUMER: gl.constexpr, N: gl.constexpr, K: gl.constexpr, E: gl.constexpr):
    problem, num_pieces = _problem(offsets_E, N, E)
    never = num_pieces < 0
    if num_pieces > 0:
        hopper.consume(
            results, num_pieces, problem, scales, never, CONSUMER, N, K, E, _locate, _scale_pointers, False, K // 128
        )


# Strides and alignments that follow the number of rows must not compile a kernel anew at every step. The other strides
# are known when it is compiled, which saves instructions in every block.
@Kernel
@gluon.jit(do_not_specialize=["a_scale_stride_k"], do_not_specialize_on_alignment=["a_scale", "b_scale", "counter"])
def grouped_mm_hopper_kernel(
    a_desc,  # (M, K) e4m3
    b_desc,  # (E * N, K) e4m3
    out_desc,  # (M, N)
    a_scale,  # (M, K // 128) bytes, fast when column-major
    b_scale,  # (E, N // 128, K // 128) bytes
    offsets_E,
    counter,
    a_scale_stride_m,
    a_scale_stride_k,
    N: gl.constexpr,
    K: gl.constexpr,
    E: gl.constexpr,
    b_scale_stride_e: gl.constexpr,
    b_scale_stride_n: gl.constexpr,
    b_scale_stride_k: gl.constexpr,
):
    """out[m] = a[m] @ b[expert of m]^T"""
    ring, slots, staging = hopper.allocate(a_desc, b_desc, out_desc)
    operands = (a_desc, b_desc, ring, slots)
    results = (out_desc, staging, ring, slots)
    a_strides = (a_scale_stride_m, a_scale_stride_k)
    b_strides = (b_scale_stride_e, b_scale_stride_n, b_scale_stride_k)
    scales = (a_scale, a_strides, b_scale, b_strides)
    gl.warp_specialize(
        [
            (_consume, (results, scales, offsets_E, 0, N, K, E)),
            (_consume, (results, scales, offsets_E, 1, N, K, E)),
            (_produce, (operands, counter, offsets_E, N, K, E)),
        ],
        WORKER_WARPS,
        WORKER_REGISTERS,
    )


def grouped_mm(
    a_MK: Tensor, a_scale: Tensor, b_ENK: Tensor, b_scale: Tensor, offsets_E: Tensor, out_dtype: torch.dtype
) -> Tensor:
    """See :func:`titan_fp8moe.kernels.gemm.grouped_mm`."""
    (M, K), (E, N, _) = a_MK.shape, b_ENK.shape
    out = torch.empty(M, N, dtype=out_dtype, device=a_MK.device)
    # The grid is for all of the buffer; how many of its rows are in use, only the device knows.
    grid = (launch.num_programs(M // TILE * (N // TILE), a_MK.device),)
    b_stride_e, b_stride_n, b_stride_k = b_scale.stride()
    grouped_mm_hopper_kernel[grid](
        launch.operand(a_MK),
        launch.operand(b_ENK),
        launch.result(out),
        a_scale,
        b_scale,
        offsets_E,
        launch.counter(a_MK.device),
        *a_scale.stride(),
        N=N,
        K=K,
        E=E,
        b_scale_stride_e=b_stride_e,
        b_scale_stride_n=b_stride_n,
        b_scale_stride_k=b_stride_k,
        **hopper.LAUNCH_OPTIONS,
    )
    return out
