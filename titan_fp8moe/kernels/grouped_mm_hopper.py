"""The GEMM over expert groups along M on Hopper, in Gluon: which tiles a program computes, and with which scales.

How a tile is computed is the subject of :mod:`titan_fp8moe.kernels.hopper`. A group is a multiple of 128 rows and a
tile has 128, so that a tile belongs to one expert; which one is read off the group ends in device memory. The order of
the tiles follows from the ends alone, and every sum is formed in the same order whoever computes it: results are
deterministic, and a row's result does not depend on the other rows.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from titan_fp8moe.kernels import hopper
from titan_fp8moe.kernels.hopper import PART_LAYOUT, WORKER_REGISTERS, WORKER_WARPS
from titan_fp8moe.recipe import TILE


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
def _schedule(offsets_E, N: gl.constexpr, E: gl.constexpr):
    """Rows of tiles, tiles, and tiles that are computed in two pieces."""
    num_rows = gl.load(offsets_E + E - 1) // 128
    num_tiles = num_rows * ((N + 255) // 256)
    return num_rows, num_tiles, hopper.split_tail(num_tiles, N)


@gluon.jit
def _position(index, schedule, offsets_E, N: gl.constexpr, E: gl.constexpr):
    """First row and column of the index-th piece, whether it is 256 columns wide, and its expert."""
    num_rows, num_tiles, num_split = schedule
    tile, half, is_half = hopper.piece_at(index, num_tiles, num_split)
    row, column = hopper.tile_position(tile, num_rows, (N + 255) // 256)
    m = row * 128
    n = column * 256 + half * 128
    return m, n, (is_half == 0) & (n + 256 <= N), _expert_of(offsets_E, m, E)


@gluon.jit
def _produce(a_desc, b_desc, ring, offsets_E, N: gl.constexpr, K: gl.constexpr, E: gl.constexpr):
    schedule = _schedule(offsets_E, N, E)
    num_rows, num_tiles, num_split = schedule
    block = 0
    for index in range(gl.program_id(0), num_tiles + num_split, gl.num_programs(0)):
        m, n, wide, expert = _position(index, schedule, offsets_E, N, E)
        block = hopper.produce_tile(a_desc, b_desc, ring, block, m, expert * N + n, 0, K // 128, wide)


@gluon.jit
def _scale_pointers(a_scale, a_strides, b_scale, b_strides, m, n, expert, CONSUMER: gl.constexpr):
    a_stride_m, a_stride_k = a_strides
    b_stride_e, b_stride_n, b_stride_k = b_strides
    rows = m + 64 * CONSUMER + gl.arange(0, 64, layout=gl.SliceLayout(1, PART_LAYOUT))
    b_pointer = b_scale + expert * b_stride_e + n // 128 * b_stride_n
    return a_scale + rows * a_stride_m, a_stride_k, b_pointer, b_stride_n, b_stride_k


@gluon.jit
def _consume(
    out_desc,
    ring,
    staging,
    a_scale,
    a_strides,
    b_scale,
    b_strides,
    offsets_E,
    CONSUMER: gl.constexpr,
    N: gl.constexpr,
    K: gl.constexpr,
    E: gl.constexpr,
):
    schedule = _schedule(offsets_E, N, E)
    num_rows, num_tiles, num_split = schedule
    num_pieces = num_tiles + num_split
    never = num_tiles < 0
    block = 0
    first = gl.program_id(0)
    if first < num_pieces:
        next_m, next_n, next_wide, expert = _position(first, schedule, offsets_E, N, E)
        next_pointers = _scale_pointers(a_scale, a_strides, b_scale, b_strides, next_m, next_n, expert, CONSUMER)
        next_scales = hopper.load_scales(next_pointers, next_wide)
        for index in range(first, num_pieces, gl.num_programs(0)):
            m, n, wide, pointers, scales = next_m, next_n, next_wide, next_pointers, next_scales
            # The next piece's first scales are requested now: a tile must not begin with a wait for memory.
            following = gl.minimum(index + gl.num_programs(0), num_pieces - 1)
            next_m, next_n, next_wide, expert = _position(following, schedule, offsets_E, N, E)
            next_pointers = _scale_pointers(a_scale, a_strides, b_scale, b_strides, next_m, next_n, expert, CONSUMER)
            next_scales = hopper.load_scales(next_pointers, next_wide)
            output = (out_desc, staging, (m + 64 * CONSUMER, n))
            block = hopper.compute_tile(ring, block, scales, pointers, K // 128, wide, never, output, CONSUMER)
        tma.store_wait(0)


# Strides and alignments that follow the number of rows must not compile a kernel anew at every step.
@gluon.jit(
    do_not_specialize=[
        "a_scale_stride_m",
        "a_scale_stride_k",
        "b_scale_stride_e",
        "b_scale_stride_n",
        "b_scale_stride_k",
    ],
    do_not_specialize_on_alignment=["a_scale", "b_scale"],
)
def grouped_mm_hopper_kernel(
    a_desc,  # (M, K) e4m3
    b_desc,  # (E * N, K) e4m3
    out_desc,  # (M, N)
    a_scale,  # (M, K // 128) bytes, fast when column-major
    b_scale,  # (E, N // 128, K // 128) bytes
    offsets_E,
    a_scale_stride_m,
    a_scale_stride_k,
    b_scale_stride_e,
    b_scale_stride_n,
    b_scale_stride_k,
    N: gl.constexpr,
    K: gl.constexpr,
    E: gl.constexpr,
):
    """Each program computes every num_programs-th piece of out[m] = a[m] @ b[expert of m]^T."""
    ring, staging = hopper.allocate(a_desc, b_desc, out_desc)
    a_strides = (a_scale_stride_m, a_scale_stride_k)
    b_strides = (b_scale_stride_e, b_scale_stride_n, b_scale_stride_k)
    gl.warp_specialize(
        [
            (_consume, (out_desc, ring, staging, a_scale, a_strides, b_scale, b_strides, offsets_E, 0, N, K, E)),
            (_consume, (out_desc, ring, staging, a_scale, a_strides, b_scale, b_strides, offsets_E, 1, N, K, E)),
            (_produce, (a_desc, b_desc, ring, offsets_E, N, K, E)),
        ],
        WORKER_WARPS,
        WORKER_REGISTERS,
    )


def grouped_mm(
    a_MK: Tensor, a_scale: Tensor, b_ENK: Tensor, b_scale: Tensor, offsets_E: Tensor, out_dtype: torch.dtype
) -> Tensor:
    """See :func:`titan_fp8moe.kernels.grouped_mm.grouped_mm`."""
    (M, K), (E, N, _) = a_MK.shape, b_ENK.shape
    out = torch.empty(M, N, dtype=out_dtype, device=a_MK.device)
    # The grid is for all of the buffer; how many of its rows are in use, only the device knows.
    grid = (hopper.num_programs(M // TILE * (N // TILE), a_MK.device),)
    grouped_mm_hopper_kernel[grid](
        hopper.operand(a_MK),
        hopper.operand(b_ENK.view(E * N, K)),
        hopper.result(out),
        a_scale.view(torch.uint8),
        b_scale.view(torch.uint8),
        offsets_E,
        *a_scale.stride(),
        *b_scale.stride(),
        N=N,
        K=K,
        E=E,
        **hopper.LAUNCH_OPTIONS,
    )
    return out
