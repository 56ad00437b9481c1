"""The GEMM over expert groups along M on Hopper, in Gluon: its tile scheduler, kernel and launch.

The main loop is :mod:`.hopper`'s. It serves the forward and the input gradients. A group is a multiple of 128 rows and
a tile has 128, so a tile belongs to one expert. The scheduler reads which one from the group ends in device memory.

The ends alone determine the order of the tiles, and every sum is formed in the same order whichever CTA computes it.
Results are therefore deterministic, and a row's result does not depend on the other rows.
"""

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from titan_fp8moe.kernels.gemm import hopper, launch
from titan_fp8moe.kernels.gemm.compat import aggregate
from titan_fp8moe.kernels.gemm.hopper import SLICE_LAYOUT, WORKER_REGISTERS, WORKER_WARPS, ScalePointers, WorkTile
from titan_fp8moe.kernels.launch import Kernel
from titan_fp8moe.recipe import GEMM_TILE, SCALE_BITS

GROUP_SIZE_M = gl.constexpr(12)  # 132 CTAs on 12 x 11 tiles share both operands


@gluon.jit
def _expert_of(offsets_E, m, E: gl.constexpr):
    """The number of groups that end at or before row m. Every warp reads 32 ends at a time, one per lane."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    lane = gl.arange(0, 32, layout=layout)
    count = gl.zeros([32], gl.int32, layout)
    for first in range(0, E, 32):
        # Lanes past the last group read an end that no row reaches. Groups without rows end where the one before does.
        end = gl.load(offsets_E + first + lane, mask=first + lane < E, other=2**31 - 1)
        count += (end <= m).to(gl.int32)
    return gl.sum(count, 0)


@aggregate
class Problem:
    """The kernel arguments that its tile scheduler needs."""

    offsets_E: gl.tensor
    N: gl.constexpr
    K: gl.constexpr
    E: gl.constexpr
    B_SHIFT: gl.constexpr


@aggregate
class TileScheduler:
    """Implements the interface in :mod:`.hopper`."""

    problem: Problem
    num_rows: gl.tensor
    num_whole: gl.tensor
    num_split: gl.tensor
    num_tiles: gl.tensor
    NUM_K_BLOCKS: gl.constexpr
    TRANSPOSED: gl.constexpr
    B_SHIFT: gl.constexpr

    @gluon.jit
    def create(problem):
        # Rows in use, which only the device knows. The tensors have more.
        num_rows = gl.load(problem.offsets_E + problem.E - 1) // 128
        num_tiles = num_rows * ((problem.N + 255) // 256)
        num_split = 0
        if problem.N % 256 == 0:  # else there are narrow tiles among the last
            num_split = hopper.split_tail(num_tiles)
        num_whole = num_tiles - num_split
        blocks: gl.constexpr = problem.K // 128
        last = num_tiles + num_split
        return TileScheduler(problem, num_rows, num_whole, num_split, last, blocks, False, problem.B_SHIFT)

    @gluon.jit
    def locate(self, index):
        N: gl.constexpr = self.problem.N
        tile, half, is_half = hopper.tile_at(index, self.num_whole, self.num_split)
        row, column = hopper.tile_position(tile, self.num_rows, (N + 255) // 256, GROUP_SIZE_M)
        m = row * 128
        n = column * 256 + half * 128
        expert = _expert_of(self.problem.offsets_E, m, self.problem.E)
        b_row = expert * N + n  # b's descriptor sees all experts as one matrix
        # A half is a tile of 128 columns, and so is a whole tile in the last column of an odd number.
        is_wide = (is_half == 0) & (n + 256 <= N)
        return WorkTile(
            is_wide=is_wide,
            row=m,
            column=n,
            num_k_blocks=self.NUM_K_BLOCKS,
            a_row=m,
            b_row=b_row,
            first_column=0,
            expert=expert,
        )

    @gluon.jit
    def scale_pointers(self, scales, tile, CONSUMER: gl.constexpr):
        a_scale, a_strides, b_scale, b_strides = scales
        a_stride_m, a_stride_k = a_strides
        b_stride_e, b_stride_n, b_stride_k = b_strides
        # A consumer's thread holds two rows of a slice, and loads the scales of those only: the slice's own layout.
        a_pointer = a_scale + (tile.row + 64 * CONSUMER) * a_stride_m
        rows = gl.arange(0, 64, layout=gl.SliceLayout(1, SLICE_LAYOUT))
        b_pointer = b_scale + tile.expert * b_stride_e + tile.column // 128 * b_stride_n
        return ScalePointers(a_pointer + rows * a_stride_m, a_stride_k, b_pointer, b_stride_n, b_stride_k)


@gluon.jit
def _produce(a_desc, b_desc, rings, tile_counter, problem):
    # The counter answers while the scheduler reads the group ends.
    fetched = hopper.fetch_next_tile(tile_counter)
    hopper.produce(a_desc, b_desc, rings, TileScheduler.create(problem), tile_counter, fetched)


@gluon.jit
def _consume(rings, output, scales, problem, CONSUMER: gl.constexpr):
    scheduler = TileScheduler.create(problem)
    runtime_false = scheduler.num_tiles < 0  # comes from memory, so the compiler cannot know it
    # Without rows there is no tile to look up. The producer still fetches, so that the counter is reset.
    if scheduler.num_tiles > 0:
        hopper.consume(rings, output, scheduler, scales, runtime_false, CONSUMER)


# Triton compiles a kernel anew for an integer that is 1 or a multiple of 16, and for a pointer that is aligned. Strides
# and alignments that depend on the number of rows must not do that from step to step. (A tile counter is any element
# of an int32 array.) The other strides are compile-time constants, which saves instructions in every block.
@Kernel
@gluon.jit(
    do_not_specialize=["a_scale_stride_k"], do_not_specialize_on_alignment=["a_scale", "b_scale", "tile_counter"]
)
def grouped_mm_hopper_kernel(
    a_desc,  # (M, K) e4m3
    b_desc,  # (E * N, K) e4m3
    out_desc,  # (M, N)
    a_scale,  # (M, K // 128) bytes, fast when column-major
    b_scale,  # (E, N // 128, K // 128) integers, of B_SHIFT
    offsets_E,
    tile_counter,
    a_scale_stride_m,
    a_scale_stride_k,
    N: gl.constexpr,
    K: gl.constexpr,
    E: gl.constexpr,
    b_scale_stride_e: gl.constexpr,
    b_scale_stride_n: gl.constexpr,
    b_scale_stride_k: gl.constexpr,
    B_SHIFT: gl.constexpr,
):
    """out[m] = a[m] @ b[expert of m]^T"""
    rings, output = hopper.allocate(a_desc, b_desc, out_desc)
    a_strides = (a_scale_stride_m, a_scale_stride_k)
    b_strides = (b_scale_stride_e, b_scale_stride_n, b_scale_stride_k)
    scales = (a_scale, a_strides, b_scale, b_strides)
    problem = Problem(offsets_E, N, K, E, B_SHIFT)
    gl.warp_specialize(
        [
            (_consume, (rings, output, scales, problem, 0)),
            (_consume, (rings, output, scales, problem, 1)),
            (_produce, (a_desc, b_desc, rings, tile_counter, problem)),
        ],
        WORKER_WARPS,
        WORKER_REGISTERS,
    )


def launch_forward(
    a_MK: Tensor, a_scale: Tensor, b_ENK: Tensor, b_scale: Tensor, offsets_E: Tensor, out: Tensor
) -> None:
    """Fills ``out`` (M, N or fewer columns); see :func:`titan_fp8moe.kernels.gemm.grouped_mm.grouped_mm`."""
    (M, K), (E, N, _) = a_MK.shape, b_ENK.shape
    # The grid covers the whole buffer. Only the device knows how many of its rows are in use.
    grid = (launch.grid_size(M // GEMM_TILE * (N // GEMM_TILE), a_MK.device),)
    b_stride_e, b_stride_n, b_stride_k = b_scale.stride()
    bits, b_shift = SCALE_BITS[b_scale.dtype]
    b_bits = b_scale if bits is torch.uint8 else b_scale.view(bits)  # of e8m0 Kernel does it, for less host time
    grouped_mm_hopper_kernel[grid](
        launch.operand(a_MK), launch.operand(b_ENK), launch.result(out), a_scale, b_bits,
        offsets_E, launch.tile_counter(a_MK.device), *a_scale.stride(), N=N, K=K, E=E, b_scale_stride_e=b_stride_e,
        b_scale_stride_n=b_stride_n, b_scale_stride_k=b_stride_k, B_SHIFT=b_shift, **hopper.LAUNCH_OPTIONS,
    )  # fmt: skip
