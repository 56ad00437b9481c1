"""The weight gradient's GEMM over expert groups on Hopper, in Gluon: its tile scheduler, kernel and launch.

The main loop is :mod:`.hopper`'s. Here the groups are runs of the contraction dim. Every expert has the same tiles, and
each tile takes as many blocks of 128 as the expert has rows. Operands have one scale per 128x128 block, so the factor
of a product is one number. The main loop's factors per row are 64 times that number.

A weight whose number of columns is an odd multiple of 128 has a last column of narrow tiles. A narrow tile takes more
than half of a wide one's time, presumably since it needs 1.33 times the operands per product. If the weight's rows are
a multiple of 256 (the 16B model's down projection, 2048x1408), the operands therefore swap places. Tiles are then
stored transposed, with 256 rows and 128 columns, and none is narrow.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from titan_fp8moe.kernels.gemm import hopper, launch
from titan_fp8moe.kernels.gemm.compat import aggregate
from titan_fp8moe.kernels.gemm.hopper import SLICE_LAYOUT, WORKER_REGISTERS, WORKER_WARPS, ScalePointers, WorkTile
from titan_fp8moe.kernels.launch import Kernel
from titan_fp8moe.recipe import GEMM_TILE

GROUP_SIZE_M = gl.constexpr(16)  # at most; all groups of a weight are equally high, but for rounding


@aggregate
class Problem:
    """The kernel arguments that its tile scheduler needs. The result is (E, N, K): the contraction runs along M, whose
    blocks ``num_k_blocks`` counts."""

    offsets_E: gl.tensor
    N: gl.constexpr
    K: gl.constexpr
    E: gl.constexpr
    PARTS: gl.constexpr  # None where the result has a dim of its own for the experts
    TRANSPOSED: gl.constexpr


@aggregate
class TileScheduler:
    """Implements the interface in :mod:`.hopper`."""

    problem: Problem
    num_whole: gl.tensor
    num_split: gl.tensor
    num_tiles: gl.tensor
    first_expert: gl.tensor  # of two
    NUM_K_BLOCKS: gl.constexpr
    TRANSPOSED: gl.constexpr
    B_SHIFT: gl.constexpr

    @gluon.jit
    def create(problem):
        """Puts the longer of two experts first. Otherwise the last of its tiles keep few CTAs busy after the others
        have ended. Sorting more experts than two brought nothing.
        """
        offsets_E = problem.offsets_E
        num_tiles: gl.constexpr = problem.E * (problem.N // 128) * ((problem.K + 255) // 256)
        num_split = 0
        if problem.K % 256 == 0:  # else there are narrow tiles among the last
            num_split = hopper.split_tail(num_tiles)
        first = 0
        if problem.E == 2:
            # The first end is the first group's rows, the second end that of both.
            first = gl.where(2 * gl.load(offsets_E) < gl.load(offsets_E + 1), 1, 0)
        num_whole = num_tiles - num_split
        return TileScheduler(problem, num_whole, num_split, num_tiles + num_split, first, None, problem.TRANSPOSED, 23)

    @gluon.jit
    def locate(self, index):
        N: gl.constexpr = self.problem.N
        K: gl.constexpr = self.problem.K
        E: gl.constexpr = self.problem.E
        offsets_E = self.problem.offsets_E
        num_rows: gl.constexpr = N // 128
        num_columns: gl.constexpr = (K + 255) // 256
        num_groups: gl.constexpr = (num_rows + GROUP_SIZE_M - 1) // GROUP_SIZE_M
        # Groups are equally high: with 22 rows of tiles two of 11, not one of 16 and one of 6.
        group_size_m: gl.constexpr = (num_rows + num_groups - 1) // num_groups
        tile, half, is_half = hopper.tile_at(index, self.num_whole, self.num_split)
        expert = tile // (num_rows * num_columns)
        tile -= expert * (num_rows * num_columns)
        row, column = hopper.tile_position(tile, num_rows, num_columns, group_size_m)
        if E == 2:
            # With 1, exchanges experts 0 and 1.
            expert ^= self.first_expert
        n = row * 128
        k = column * 256 + half * 128
        start = gl.load(offsets_E + expert - 1, mask=expert > 0, other=0)
        num_k_blocks = (gl.load(offsets_E + expert) - start) // 128
        out_row = k if self.TRANSPOSED else n
        out_column = n if self.TRANSPOSED else k
        if self.problem.PARTS is not None:
            part_rows: gl.constexpr = (K if self.TRANSPOSED else N) // self.problem.PARTS
            # The result has all experts' first weights before their second: row part * part_rows + r of an expert moves
            # to (part * E + expert) * part_rows + r. part_rows is a multiple of the tile's rows, so a tile is in one
            # part.
            part = out_row // part_rows
            out_row += (part * (E - 1) + expert) * part_rows
        is_wide = (is_half == 0) & (k + 256 <= K)
        return WorkTile(
            is_wide=is_wide,
            row=out_row,
            column=out_column,
            num_k_blocks=num_k_blocks,
            a_row=n,
            b_row=k,
            first_column=start,
            expert=expert,
        )

    @gluon.jit
    def scale_pointers(self, scales, tile, CONSUMER: gl.constexpr):
        a_scale, a_strides, b_scale, b_strides = scales
        a_stride_n, a_stride_m = a_strides
        b_stride_k, b_stride_m = b_strides
        # An expert without rows has no scales, and there may be none at its place. It reads those before its place.
        is_empty = tile.num_k_blocks == 0
        block = tile.first_column // 128
        block = gl.where(is_empty, gl.maximum(block - 1, 0), block)
        a_pointer = a_scale + tile.a_row // 128 * a_stride_n + block * a_stride_m
        b_pointer = b_scale + tile.b_row // 128 * b_stride_k + block * b_stride_m
        # One scale for all rows. The main loop takes one per row, and 64 equal addresses are one access.
        same_for_all = gl.zeros([64], gl.int32, gl.SliceLayout(1, SLICE_LAYOUT))
        return ScalePointers(a_pointer + same_for_all, a_stride_m, b_pointer, b_stride_k, b_stride_m)


@gluon.jit
def _produce(a_desc, b_desc, rings, tile_counter, problem):
    # The counter answers while the scheduler reads the group ends.
    fetched = hopper.fetch_next_tile(tile_counter)
    hopper.produce(a_desc, b_desc, rings, TileScheduler.create(problem), tile_counter, fetched)


@gluon.jit
def _consume(rings, output, scales, problem, CONSUMER: gl.constexpr):
    scheduler = TileScheduler.create(problem)
    # From memory, so the compiler cannot know it. The number of tiles, which the forward uses, is a constant here.
    runtime_false = gl.load(problem.offsets_E + problem.E - 1) < 0
    hopper.consume(rings, output, scheduler, scales, runtime_false, CONSUMER)


# As in the forward, strides and alignments that depend on the number of rows must not recompile the kernel. Here that
# may be any stride, since either dim of the scales can be the contiguous one.
@Kernel
@gluon.jit(
    do_not_specialize=["a_scale_stride_n", "a_scale_stride_m", "b_scale_stride_k", "b_scale_stride_m"],
    do_not_specialize_on_alignment=["a_scale", "b_scale", "tile_counter"],
)
def wgrad_hopper_kernel(
    a_desc,  # (N, M) e4m3
    b_desc,  # (K, M) e4m3
    out_desc,  # (E * N, K), all experts' first weights before their second; if TRANSPOSED, (E * K, N); see PARTS
    a_scale,  # (N // 128, M // 128) bytes
    b_scale,  # (K // 128, M // 128) bytes
    offsets_E,
    tile_counter,
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
    rings, output = hopper.allocate(a_desc, b_desc, out_desc)
    a_strides = (a_scale_stride_n, a_scale_stride_m)
    b_strides = (b_scale_stride_k, b_scale_stride_m)
    scales = (a_scale, a_strides, b_scale, b_strides)
    problem = Problem(offsets_E, N, K, E, PARTS, TRANSPOSED)
    gl.warp_specialize(
        [
            (_consume, (rings, output, scales, problem, 0)),
            (_consume, (rings, output, scales, problem, 1)),
            (_produce, (a_desc, b_desc, rings, tile_counter, problem)),
        ],
        WORKER_WARPS,
        WORKER_REGISTERS,
    )


def launch_wgrad(
    aT_NM: Tensor, aT_scale: Tensor, bT_KM: Tensor, bT_scale: Tensor, offsets_E: Tensor, out: Tensor, parts: int | None
) -> None:
    """Fills ``out`` for :func:`titan_fp8moe.kernels.gemm.grouped_mm.grouped_mm_wgrad`. Its layout is ``apart``; or with
    None for ``parts`` (E, rows, columns) of any strides but 1 along the columns."""
    N, K, E, device = aT_NM.shape[0], bT_KM.shape[0], offsets_E.shape[0], aT_NM.device
    # Narrow tiles cost more than half of wide ones. Exchanging the operands avoids them where N has no odd tile either.
    transposed = K % (2 * GEMM_TILE) != 0 and N // (parts or 1) % (2 * GEMM_TILE) == 0
    a, a_scale, b, b_scale = aT_NM, aT_scale, bT_KM, bT_scale
    if transposed:
        a, a_scale, b, b_scale = b, b_scale, a, a_scale
    grid = (launch.grid_size(E * (N // GEMM_TILE) * (K // GEMM_TILE), device),)
    wgrad_hopper_kernel[grid](
        launch.operand(a), launch.operand(b), launch.padded_result(out) if parts is None else launch.result(out),
        a_scale, b_scale, offsets_E, launch.tile_counter(device), *a_scale.stride(), *b_scale.stride(),
        N=a.shape[0], K=b.shape[0], E=E, PARTS=parts, TRANSPOSED=transposed, **hopper.LAUNCH_OPTIONS,
    )  # fmt: skip
