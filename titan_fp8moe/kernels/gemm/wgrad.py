"""The weight gradient's GEMM over expert groups on Hopper, in Gluon: where its tiles lie, and which scales they have.

The program is that of :mod:`titan_fp8moe.kernels.gemm.hopper`. Here the groups are runs of the contraction
dim: every expert has the same tiles, and takes as many blocks of 128 for each as it has rows. Operands have a scale per
128x128 block, so that the factor of a product is one number; the tile loop's factor per row is 64 times that number.

Where a weight's columns are an odd multiple of 128 the last column of tiles is narrow, and a narrow tile takes more
than half of a wide one's time, presumably since it needs 1.33 times the operands for a product. If its rows are a
multiple of 256 (the 16B model's down projection, 2048x1408), the operands change places and tiles are stored
transposed, with 256 rows and 128 columns, which leaves no narrow row or column. With 4 and 8 experts that was up to 6%
faster, 10 to 15% where one had half of the rows.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from titan_fp8moe.kernels.gemm import hopper, launch
from titan_fp8moe.kernels.gemm.hopper import PART_LAYOUT, WORKER_REGISTERS, WORKER_WARPS
from titan_fp8moe.kernels.launch import Kernel
from titan_fp8moe.recipe import TILE

SUPER_ROW = gl.constexpr(16)  # at most; all of a weight are equal, but for rounding


@gluon.jit
def _problem(
    offsets_E, N: gl.constexpr, K: gl.constexpr, E: gl.constexpr, PARTS: gl.constexpr, TRANSPOSED: gl.constexpr
):
    """What :func:`_locate` needs, and the number of pieces.

    Of two experts the one with more rows is first, lest the last of its tiles keep few programs busy after the others
    have ended: up to 23% for groups of 0.7 and 1.3 times the average. (With 4 and 8 experts that gave -6 to +5%.)
    """
    num_tiles: gl.constexpr = E * (N // 128) * ((K + 255) // 256)
    num_split = 0
    if K % 256 == 0:
        num_split = hopper.split_tail(num_tiles)
    first = 0
    if E == 2:
        first = gl.where(2 * gl.load(offsets_E) < gl.load(offsets_E + 1), 1, 0)
    part_rows: gl.constexpr = (K if TRANSPOSED else N) // PARTS
    return (offsets_E, num_tiles - num_split, num_split, first, part_rows, TRANSPOSED), num_tiles + num_split


@gluon.jit
def _locate(index, problem, N: gl.constexpr, K: gl.constexpr, E: gl.constexpr):
    offsets_E, num_whole, num_split, first, part_rows, transposed = problem
    num_rows: gl.constexpr = N // 128
    num_columns: gl.constexpr = (K + 255) // 256
    tile, half, is_half = hopper.piece_at(index, num_whole, num_split)
    expert = tile // (num_rows * num_columns)
    num_super_rows: gl.constexpr = (num_rows + SUPER_ROW - 1) // SUPER_ROW
    super_row: gl.constexpr = (num_rows + num_super_rows - 1) // num_super_rows
    row, column = hopper.tile_position(tile - expert * (num_rows * num_columns), num_rows, num_columns, super_row)
    if E == 2:
        expert ^= first
    n = row * 128
    k = column * 256 + half * 128
    start = gl.load(offsets_E + expert - 1, mask=expert > 0, other=0)
    steps = (gl.load(offsets_E + expert) - start) // 128
    out_row = gl.where(transposed, k, n)
    out_column = gl.where(transposed, n, k)
    part = out_row // part_rows
    out_row += (part * (E - 1) + expert) * part_rows
    return (n, k, start, steps), (is_half == 0) & (k + 256 <= K), (out_row, out_column), expert


@gluon.jit
def _scale_pointers(scales, place, position, expert, CONSUMER: gl.constexpr):
    a_scale, a_strides, b_scale, b_strides = scales
    a_stride_n, a_stride_m = a_strides
    b_stride_k, b_stride_m = b_strides
    n, k, start, steps = place
    # An expert without rows has no scales: it reads those before its place, since there may be none at it.
    run = gl.where(steps == 0, gl.maximum(start // 128 - 1, 0), start // 128)
    a_pointer = a_scale + n // 128 * a_stride_n + run * a_stride_m
    b_pointer = b_scale + k // 128 * b_stride_k + run * b_stride_m
    same_for_all = gl.zeros([64], gl.int32, gl.SliceLayout(1, PART_LAYOUT))
    return a_pointer + same_for_all, a_stride_m, b_pointer, b_stride_k, b_stride_m


@gluon.jit
def _produce(
    operands,
    counter,
    offsets_E,
    N: gl.constexpr,
    K: gl.constexpr,
    E: gl.constexpr,
    PARTS: gl.constexpr,
    TRANSPOSED: gl.constexpr,
):
    requested = hopper.request(counter)
    problem, num_pieces = _problem(offsets_E, N, K, E, PARTS, TRANSPOSED)
    hopper.produce(operands, counter, requested, num_pieces, problem, N, K, E, _locate)


@gluon.jit
def _consume(
    results,
    scales,
    offsets_E,
    CONSUMER: gl.constexpr,
    N: gl.constexpr,
    K: gl.constexpr,
    E: gl.constexpr,
    PARTS: gl.constexpr,
    TRANSPOSED: gl.constexpr,
):
    problem, num_pieces = _problem(offsets_E, N, K, E, PARTS, TRANSPOSED)
    never = gl.load(offsets_E + E - 1) < 0
    hopper.consume(
        results, num_pieces, problem, scales, never, CONSUMER, N, K, E, _locate, _scale_pointers, TRANSPOSED, None
    )


# Strides and alignments that follow the number of rows must not compile a kernel anew at every step.
@Kernel
@gluon.jit(
    do_not_specialize=["a_scale_stride_n", "a_scale_stride_m", "b_scale_stride_k", "b_scale_stride_m"],
    do_not_specialize_on_alignment=["a_scale", "b_scale", "counter"],
)
def wgrad_hopper_kernel(
    a_desc,  # (N, M) e4m3
    b_desc,  # (K, M) e4m3
    out_desc,  # (E * N, K), of PARTS weights those of all experts one after another; TRANSPOSED, (E * K, N)
    a_scale,  # (N // 128, M // 128) bytes
    b_scale,  # (K // 128, M // 128) bytes
    offsets_E,
    counter,
    a_scale_stride_n,
    a_scale_stride_m,
    b_scale_stride_k,
    b_scale_stride_m,
    N: gl.constexpr,
    K: gl.constexpr,
    E: gl.constexpr,
    PARTS: gl.constexpr,
    TRANSPOSED: gl.constexpr,
):
    """out[e] = sum of a[:, m] b[:, m]^T over group e's rows m, or its transpose"""
    ring, slots, staging = hopper.allocate(a_desc, b_desc, out_desc)
    operands = (a_desc, b_desc, ring, slots)
    results = (out_desc, staging, ring, slots)
    a_strides = (a_scale_stride_n, a_scale_stride_m)
    b_strides = (b_scale_stride_k, b_scale_stride_m)
    scales = (a_scale, a_strides, b_scale, b_strides)
    gl.warp_specialize(
        [
            (_consume, (results, scales, offsets_E, 0, N, K, E, PARTS, TRANSPOSED)),
            (_consume, (results, scales, offsets_E, 1, N, K, E, PARTS, TRANSPOSED)),
            (_produce, (operands, counter, offsets_E, N, K, E, PARTS, TRANSPOSED)),
        ],
        WORKER_WARPS,
        WORKER_REGISTERS,
    )


def grouped_mm_wgrad(
    aT_NM: Tensor,
    aT_scale: Tensor,
    bT_KM: Tensor,
    bT_scale: Tensor,
    offsets_E: Tensor,
    out_dtype: torch.dtype,
    parts: int = 1,
) -> Tensor:
    """See :func:`titan_fp8moe.kernels.gemm.grouped_mm_wgrad`; scales are per 128x128 block."""
    N, K, E, device = aT_NM.shape[0], bT_KM.shape[0], offsets_E.shape[0], aT_NM.device
    out = torch.empty(parts * E, N // parts, K, dtype=out_dtype, device=device)
    transposed = K % (2 * TILE) != 0 and N // parts % (2 * TILE) == 0
    a, a_scale, b, b_scale = aT_NM, aT_scale, bT_KM, bT_scale
    if transposed:
        a, a_scale, b, b_scale = b, b_scale, a, a_scale
    grid = (launch.num_programs(E * (N // TILE) * (K // TILE), device),)
    wgrad_hopper_kernel[grid](
        launch.operand(a),
        launch.operand(b),
        launch.result(out),
        a_scale,
        b_scale,
        offsets_E,
        launch.counter(device),
        *a_scale.stride(),
        *b_scale.stride(),
        N=a.shape[0],
        K=b.shape[0],
        E=E,
        PARTS=parts,
        TRANSPOSED=transposed,
        **hopper.LAUNCH_OPTIONS,
    )
    return out
