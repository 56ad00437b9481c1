"""The weight gradient's GEMM over expert groups on Hopper, in Gluon: which tiles a program computes, with which scales.

How a tile is computed is the subject of :mod:`titan_fp8moe.kernels.hopper`. Here the groups are runs of the contraction
dim: every expert has the same tiles, and takes as many blocks of 128 for each as it has rows. Operands have a scale per
128x128 block, so that the factor of a product is one number; the tile loop's factor per row is 64 times that number.
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
def _position(index, num_tiles, num_split, offsets_E, N: gl.constexpr, K: gl.constexpr):
    """The index-th piece: expert, first row and column, whether it has 256 columns; group's start and blocks."""
    num_rows: gl.constexpr = N // 128
    num_columns: gl.constexpr = (K + 255) // 256
    tile, half, is_half = hopper.piece_at(index, num_tiles, num_split)
    expert = tile // (num_rows * num_columns)
    row, column = hopper.tile_position(tile - expert * (num_rows * num_columns), num_rows, num_columns)
    k = column * 256 + half * 128
    start = gl.load(offsets_E + expert - 1, mask=expert > 0, other=0)
    steps = (gl.load(offsets_E + expert) - start) // 128
    return expert, row * 128, k, (is_half == 0) & (k + 256 <= K), start, steps


@gluon.jit
def _produce(a_desc, b_desc, ring, offsets_E, N: gl.constexpr, K: gl.constexpr, E: gl.constexpr):
    num_tiles: gl.constexpr = E * (N // 128) * ((K + 255) // 256)
    num_split = hopper.split_tail(num_tiles, K)
    block = 0
    for index in range(gl.program_id(0), num_tiles + num_split, gl.num_programs(0)):
        expert, n, k, wide, start, steps = _position(index, num_tiles, num_split, offsets_E, N, K)
        block = hopper.produce_tile(a_desc, b_desc, ring, block, n, k, start, steps, wide)


@gluon.jit
def _scale_pointers(a_scale, a_strides, b_scale, b_strides, n, k, start, steps):
    a_stride_n, a_stride_m = a_strides
    b_stride_k, b_stride_m = b_strides
    # An expert without rows has no scales: it reads those before its place, since there may be none at it.
    run = gl.where(steps == 0, gl.maximum(start // 128 - 1, 0), start // 128)
    a_pointer = a_scale + n // 128 * a_stride_n + run * a_stride_m
    b_pointer = b_scale + k // 128 * b_stride_k + run * b_stride_m
    same_for_all = gl.zeros([64], gl.int32, gl.SliceLayout(1, PART_LAYOUT))
    return a_pointer + same_for_all, a_stride_m, b_pointer, b_stride_k, b_stride_m


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
    num_tiles: gl.constexpr = E * (N // 128) * ((K + 255) // 256)
    num_split = hopper.split_tail(num_tiles, K)
    num_pieces = num_tiles + num_split
    never = gl.load(offsets_E + E - 1) < 0
    block = 0
    # A program without a piece must not look for an expert past the last one.
    first = gl.minimum(gl.program_id(0), num_pieces - 1)
    expert, next_n, next_k, next_wide, start, next_steps = _position(first, num_tiles, num_split, offsets_E, N, K)
    next_row = expert * N + next_n
    next_pointers = _scale_pointers(a_scale, a_strides, b_scale, b_strides, next_n, next_k, start, next_steps)
    next_scales = hopper.load_scales(next_pointers, next_wide)
    for index in range(gl.program_id(0), num_pieces, gl.num_programs(0)):
        row, k, wide, steps, pointers, scales = next_row, next_k, next_wide, next_steps, next_pointers, next_scales
        # The next piece's first scales are requested now: a tile must not begin with a wait for memory.
        following = gl.minimum(index + gl.num_programs(0), num_pieces - 1)
        expert, next_n, next_k, next_wide, start, next_steps = _position(
            following, num_tiles, num_split, offsets_E, N, K
        )
        next_row = expert * N + next_n
        next_pointers = _scale_pointers(a_scale, a_strides, b_scale, b_strides, next_n, next_k, start, next_steps)
        next_scales = hopper.load_scales(next_pointers, next_wide)
        output = (out_desc, staging, (row + 64 * CONSUMER, k))
        if steps > 0:
            block = hopper.compute_tile(ring, block, scales, pointers, steps, wide, never, output, CONSUMER)
        else:
            hopper.store_zeros(out_desc, staging, (row + 64 * CONSUMER, k), wide, CONSUMER)
    tma.store_wait(0)


# Strides and alignments that follow the number of rows must not compile a kernel anew at every step.
@gluon.jit(
    do_not_specialize=["a_scale_stride_n", "a_scale_stride_m", "b_scale_stride_k", "b_scale_stride_m"],
    do_not_specialize_on_alignment=["a_scale", "b_scale"],
)
def wgrad_hopper_kernel(
    a_desc,  # (N, M) e4m3
    b_desc,  # (K, M) e4m3
    out_desc,  # (E * N, K)
    a_scale,  # (N // 128, M // 128) bytes
    b_scale,  # (K // 128, M // 128) bytes
    offsets_E,
    a_scale_stride_n,
    a_scale_stride_m,
    b_scale_stride_k,
    b_scale_stride_m,
    N: gl.constexpr,
    K: gl.constexpr,
    E: gl.constexpr,
):
    """Each program computes every num_programs-th piece of out[e] = sum of a[:, m] b[:, m]^T over group e's rows m."""
    ring, staging = hopper.allocate(a_desc, b_desc, out_desc)
    a_strides = (a_scale_stride_n, a_scale_stride_m)
    b_strides = (b_scale_stride_k, b_scale_stride_m)
    gl.warp_specialize(
        [
            (_consume, (out_desc, ring, staging, a_scale, a_strides, b_scale, b_strides, offsets_E, 0, N, K, E)),
            (_consume, (out_desc, ring, staging, a_scale, a_strides, b_scale, b_strides, offsets_E, 1, N, K, E)),
            (_produce, (a_desc, b_desc, ring, offsets_E, N, K, E)),
        ],
        WORKER_WARPS,
        WORKER_REGISTERS,
    )


def grouped_mm_wgrad(
    aT_NM: Tensor, aT_scale: Tensor, bT_KM: Tensor, bT_scale: Tensor, offsets_E: Tensor, out_dtype: torch.dtype
) -> Tensor:
    """See :func:`titan_fp8moe.kernels.grouped_mm.grouped_mm_wgrad`; scales are per 128x128 block."""
    N, K, E = aT_NM.shape[0], bT_KM.shape[0], offsets_E.shape[0]
    out = torch.empty(E, N, K, dtype=out_dtype, device=aT_NM.device)
    grid = (hopper.num_programs(E * (N // TILE) * (K // TILE), aT_NM.device),)
    wgrad_hopper_kernel[grid](
        hopper.operand(aT_NM),
        hopper.operand(bT_KM),
        hopper.result(out.view(E * N, K)),
        aT_scale.view(torch.uint8),
        bT_scale.view(torch.uint8),
        offsets_E,
        *aT_scale.stride(),
        *bT_scale.stride(),
        N=N,
        K=K,
        E=E,
        **hopper.LAUNCH_OPTIONS,
    )
    return out
