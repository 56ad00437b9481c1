"""The weight gradient's GEMM over expert groups on Hopper, in Gluon: where its tiles lie, and which scales they have.

The program is that of :mod:`titan_fp8moe.kernels.hopper`. Here the groups are runs of the contraction
dim: every expert has the same tiles, and takes as many blocks of 128 for each as it has rows. Operands have a scale per
128x128 block, so that the factor of a product is one number; the tile loop's factor per row is 64 times that number.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from titan_fp8moe.kernels import hopper
from titan_fp8moe.kernels.hopper import PART_LAYOUT, WORKER_REGISTERS, WORKER_WARPS
from titan_fp8moe.recipe import TILE


@gluon.jit
def _problem(offsets_E, N: gl.constexpr, K: gl.constexpr, E: gl.constexpr, PARTS: gl.constexpr):
    """What :func:`_locate` needs, and the number of pieces.

    Where K is an odd multiple of 128 the last column of tiles is narrow. In a GEMM of few waves these tiles come behind
    the whole ones, with the halves, to fill what the others leave of the last wave, unless one expert has twice its
    share of rows: then its narrow tiles would end long after everything else. Otherwise they lie among the wide ones,
    with which they share operands in L2. An expert with the most rows is first among the whole and among the narrow
    tiles, lest the last of its tiles keep few programs busy after the others have ended. (In the one comparison of both
    orders, 2048x1408 rested, that gave 2 to 3% with 8 experts, where it was needed, and took 4% with 4.)
    """
    num_rows: gl.constexpr = E * (N // 128)
    num_columns = (K + 255) // 256
    num_narrow = 0
    num_split = 0
    first = 0
    if K % 256 == 0:
        num_split = hopper.split_tail(num_rows * num_columns, 0)
    elif _few_waves(N, K, E):
        lane = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
        start = gl.load(offsets_E + lane - 1, mask=(lane > 0) & (lane < E), other=0)
        end = gl.load(offsets_E + lane, mask=lane < E, other=0)
        # One reduction for the most blocks of an expert and for the lane that has them.
        longest = gl.max(gl.where(lane < E, (end - start) // 128 * 32 + lane, 0), 0)
        narrow_last = longest // 32 * 128 * E < 2 * gl.load(offsets_E + E - 1)
        num_columns = gl.where(narrow_last, K // 256, num_columns)
        num_narrow = gl.where(narrow_last, num_rows, 0)
        num_split = gl.where(narrow_last, hopper.split_tail(num_rows * num_columns, num_narrow), 0)
        first = gl.where(narrow_last, longest % 32, 0)
    num_whole = num_rows * num_columns - num_split
    problem = (offsets_E, num_columns, num_whole, num_narrow, num_split, first, N // PARTS)
    return problem, num_whole + num_narrow + 2 * num_split


@gluon.constexpr_function
def _few_waves(N, K, E):
    # Up to 8 on the 132 multiprocessors of a whole GPU, a bound that is not tuned; experts for the lanes of a warp.
    return K > 128 and E <= 32 and E * (N // 128) * (K // 256) < 8 * 132


@gluon.jit
def _locate(index, problem, N: gl.constexpr, K: gl.constexpr, E: gl.constexpr):
    offsets_E, num_columns, num_whole, num_narrow, num_split, first, part_rows = problem
    num_rows: gl.constexpr = N // 128
    past = index - num_whole
    past_narrow = past >= num_narrow
    tile, half, is_half = hopper.piece_at(index - gl.where(past_narrow, num_narrow, 0), num_whole, num_split)
    expert = tile // (num_rows * num_columns)
    row, column = hopper.tile_position(tile - expert * (num_rows * num_columns), num_rows, num_columns)
    k = column * 256 + half * 128
    if K % 256 != 0:
        is_narrow = (past >= 0) & (past_narrow == 0)
        expert = gl.where(is_narrow, past // num_rows, expert)
        row = gl.where(is_narrow, past % num_rows, row)
        k = gl.where(is_narrow, K - 128, k)
        expert = gl.where(expert == 0, first, gl.where(expert == first, 0, expert))
    start = gl.load(offsets_E + expert - 1, mask=expert > 0, other=0)
    steps = (gl.load(offsets_E + expert) - start) // 128
    n = row * 128
    part = n // part_rows
    out_row = (part * E + expert) * part_rows + n - part * part_rows
    return (n, k, start, steps), (is_half == 0) & (k + 256 <= K), (out_row, k), expert


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
def _produce(operands, counter, offsets_E, N: gl.constexpr, K: gl.constexpr, E: gl.constexpr, PARTS: gl.constexpr):
    requested = hopper.request(counter)
    problem, num_pieces = _problem(offsets_E, N, K, E, PARTS)
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
):
    problem, num_pieces = _problem(offsets_E, N, K, E, PARTS)
    never = gl.load(offsets_E + E - 1) < 0
    hopper.consume(results, num_pieces, problem, scales, never, CONSUMER, N, K, E, _locate, _scale_pointers, None)


# Strides and alignments that follow the number of rows must not compile a kernel anew at every step.
@gluon.jit(
    do_not_specialize=["a_scale_stride_n", "a_scale_stride_m", "b_scale_stride_k", "b_scale_stride_m"],
    do_not_specialize_on_alignment=["a_scale", "b_scale", "counter"],
)
def wgrad_hopper_kernel(
    a_desc,  # (N, M) e4m3
    b_desc,  # (K, M) e4m3
    out_desc,  # (E * N, K), of PARTS weights those of all experts one after another
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
):
    """out[e] = sum of a[:, m] b[:, m]^T over group e's rows m"""
    ring, slots, staging = hopper.allocate(a_desc, b_desc, out_desc)
    operands = (a_desc, b_desc, ring, slots)
    results = (out_desc, staging, ring, slots)
    a_strides = (a_scale_stride_n, a_scale_stride_m)
    b_strides = (b_scale_stride_k, b_scale_stride_m)
    scales = (a_scale, a_strides, b_scale, b_strides)
    gl.warp_specialize(
        [
            (_consume, (results, scales, offsets_E, 0, N, K, E, PARTS)),
            (_consume, (results, scales, offsets_E, 1, N, K, E, PARTS)),
            (_produce, (operands, counter, offsets_E, N, K, E, PARTS)),
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
    """See :func:`titan_fp8moe.kernels.grouped_mm.grouped_mm_wgrad`; scales are per 128x128 block."""
    N, K, E = aT_NM.shape[0], bT_KM.shape[0], offsets_E.shape[0]
    out = torch.empty(parts * E, N // parts, K, dtype=out_dtype, device=aT_NM.device)
    grid = (hopper.num_programs(E * (N // TILE) * (K // TILE), aT_NM.device),)
    wgrad_hopper_kernel[grid](
        hopper.operand(aT_NM),
        hopper.operand(bT_KM),
        hopper.result(out.view(E * N, K)),
        aT_scale.view(torch.uint8),
        bT_scale.view(torch.uint8),
        offsets_E,
        hopper.counter(aT_NM.device),
        *aT_scale.stride(),
        *bT_scale.stride(),
        N=N,
        K=K,
        E=E,
        PARTS=parts,
        **hopper.LAUNCH_OPTIONS,
    )
    return out
