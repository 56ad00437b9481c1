"""Weight gradient GEMM on Hopper, in Gluon."""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from titan_fp8moe.kernels import hopper
from titan_fp8moe.kernels.grouped_mm_hopper import descriptor
from titan_fp8moe.recipe import TILE


@gluon.jit
def _schedule(N: gl.constexpr, K: gl.constexpr, E: gl.constexpr):
    num_rows: gl.constexpr = N // 128
    num_columns: gl.constexpr = (K + 255) // 256
    num_tiles: gl.constexpr = E * num_rows * num_columns
    rest = num_tiles % gl.num_programs(0)
    num_split = gl.where((2 * rest <= gl.num_programs(0)) & (K % 256 == 0), rest, 0)
    return num_tiles, num_split


@gluon.jit
def _position(index, num_tiles, num_split, offsets_E, N: gl.constexpr, K: gl.constexpr, SUPER_ROW: gl.constexpr):
    num_rows: gl.constexpr = N // 128
    num_columns: gl.constexpr = (K + 255) // 256
    tile, second, is_half = hopper.piece_at(index, num_tiles, num_split)
    expert = tile // (num_rows * num_columns)
    row, column = hopper.tile_position(tile - expert * num_rows * num_columns, num_rows, num_columns, SUPER_ROW)
    column = column * 2 + second
    wide = (is_half == 0) & (column * 128 + 256 <= K)
    start = gl.load(offsets_E + expert - 1, mask=expert > 0, other=0) // 128
    steps = gl.load(offsets_E + expert) // 128 - start
    return expert, row, column, wide, start, steps


@gluon.jit
def _produce(
    a_desc, b_desc, a_smem, b_smem, full, empty, offsets_E,
    N: gl.constexpr, K: gl.constexpr, E: gl.constexpr, SUPER_ROW: gl.constexpr, STAGES: gl.constexpr
):
    num_tiles, num_split = _schedule(N, K, E)
    block = 0
    for index in range(gl.program_id(0), num_tiles + num_split, gl.num_programs(0)):
        expert, row, column, wide, start, steps = _position(index, num_tiles, num_split, offsets_E, N, K, SUPER_ROW)
        block = hopper.produce_tile(
            a_desc, b_desc, a_smem, b_smem, full, empty, block, row * 128, column * 128, start, steps, wide, STAGES
        )


@gluon.jit
def _scale_pointers(
    a_scale, a_scale_stride_n, a_scale_stride_m, b_scale, b_scale_stride_k, b_scale_stride_m, row, column, start, steps
):
    # An expert without rows has no scales; it reads its neighbour's.
    step = gl.where(steps == 0, gl.maximum(start - 1, 0), start)
    layout: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 32]))
    a_scale_ptr = a_scale + row * a_scale_stride_n + step * a_scale_stride_m
    return a_scale_ptr + gl.zeros([64], gl.int32, layout), b_scale + column * b_scale_stride_k + step * b_scale_stride_m


@gluon.jit
def _consume(
    out_desc, a_smem, b_smem, staging, full, empty, a_scale, a_scale_stride_n, a_scale_stride_m,
    b_scale, b_scale_stride_k, b_scale_stride_m, offsets_E,
    CONSUMER: gl.constexpr, N: gl.constexpr, K: gl.constexpr, E: gl.constexpr, SUPER_ROW: gl.constexpr,
    STAGES: gl.constexpr, BUFFERS: gl.constexpr, A_REGS: gl.constexpr, UNROLL: gl.constexpr, EARLY: gl.constexpr
):
    num_tiles, num_split = _schedule(N, K, E)
    num_pieces = num_tiles + num_split
    never = gl.load(offsets_E + E - 1) < 0
    zero = gl.zeros([64, 64], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 32]))
    block = 0
    first = gl.program_id(0)
    # A program without a piece must not look beyond the last expert.
    expert, row, column, wide, start, steps = _position(gl.minimum(first, num_pieces - 1), num_tiles, num_split, offsets_E, N, K, SUPER_ROW)
    a_scale_ptrs, b_scale_ptr = _scale_pointers(
        a_scale, a_scale_stride_n, a_scale_stride_m, b_scale, b_scale_stride_k, b_scale_stride_m, row, column, start, steps
    )
    a_byte, b0_byte, b1_byte = hopper.load_scales(a_scale_ptrs, b_scale_ptr, b_scale_stride_k, wide)
    for index in range(first, num_pieces, gl.num_programs(0)):
        acc0 = zero
        acc1 = zero
        acc2 = zero
        acc3 = zero
        if steps > 0:
            if wide:
                acc0, acc1, acc2, acc3, block = hopper.multiply_tile(
                    a_smem, b_smem, full, empty, block, a_byte, b0_byte, b1_byte,
                    a_scale_ptrs, a_scale_stride_m, b_scale_ptr, b_scale_stride_k, b_scale_stride_m,
                    steps, never, CONSUMER, 4, STAGES, A_REGS, UNROLL, EARLY
                )
            else:
                acc0, acc1, acc2, acc3, block = hopper.multiply_tile(
                    a_smem, b_smem, full, empty, block, a_byte, b0_byte, b1_byte,
                    a_scale_ptrs, a_scale_stride_m, b_scale_ptr, b_scale_stride_k, b_scale_stride_m,
                    steps, never, CONSUMER, 2, STAGES, A_REGS, UNROLL, EARLY
                )
        out_row = expert * N + row * 128 + 64 * CONSUMER
        out_column = column * 128
        store_wide = wide
        following = gl.minimum(index + gl.num_programs(0), num_pieces - 1)
        expert, row, column, wide, start, steps = _position(following, num_tiles, num_split, offsets_E, N, K, SUPER_ROW)
        a_scale_ptrs, b_scale_ptr = _scale_pointers(
            a_scale, a_scale_stride_n, a_scale_stride_m, b_scale, b_scale_stride_k, b_scale_stride_m, row, column, start, steps
        )
        a_byte, b0_byte, b1_byte = hopper.load_scales(a_scale_ptrs, b_scale_ptr, b_scale_stride_k, wide)
        hopper.store_tile(out_desc, staging, out_row, out_column, acc0, acc1, acc2, acc3, store_wide, CONSUMER, BUFFERS)
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=[
        "a_scale_stride_n", "a_scale_stride_m", "b_scale_stride_k", "b_scale_stride_m"
    ],
    do_not_specialize_on_alignment=["a_scale", "b_scale"],
)
def wgrad_hopper_kernel(
    a_desc, b_desc, out_desc, a_scale, b_scale, offsets_E, a_scale_stride_n, a_scale_stride_m,
    b_scale_stride_k, b_scale_stride_m,
    N: gl.constexpr, K: gl.constexpr, E: gl.constexpr, SUPER_ROW: gl.constexpr, STAGES: gl.constexpr,
    BUFFERS: gl.constexpr, A_REGS: gl.constexpr, UNROLL: gl.constexpr, EARLY: gl.constexpr,
    CONSUMER_REGS: gl.constexpr, PRODUCER_REGS: gl.constexpr
):
    a_smem = gl.allocate_shared_memory(a_desc.dtype, [STAGES, 128, 128], a_desc.layout)
    b_smem = gl.allocate_shared_memory(b_desc.dtype, [STAGES * 2, 128, 128], b_desc.layout)
    staging = gl.allocate_shared_memory(out_desc.dtype, [2 * BUFFERS, 64, 64], out_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), 1)
        mbarrier.init(empty.index(stage), 2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume, (
                out_desc, a_smem, b_smem, staging, full, empty, a_scale, a_scale_stride_n, a_scale_stride_m,
                b_scale, b_scale_stride_k, b_scale_stride_m, offsets_E,
                0, N, K, E, SUPER_ROW, STAGES, BUFFERS, A_REGS, UNROLL, EARLY)),
            (_consume, (
                out_desc, a_smem, b_smem, staging, full, empty, a_scale, a_scale_stride_n, a_scale_stride_m,
                b_scale, b_scale_stride_k, b_scale_stride_m, offsets_E,
                1, N, K, E, SUPER_ROW, STAGES, BUFFERS, A_REGS, UNROLL, EARLY)),
            (_produce, (a_desc, b_desc, a_smem, b_smem, full, empty, offsets_E, N, K, E, SUPER_ROW, STAGES)),
        ],
        [4, 1],
        [CONSUMER_REGS, PRODUCER_REGS],
    )


def grouped_mm_wgrad(aT_NM, aT_scale, bT_KM, bT_scale, offsets_E, out_dtype, a_regs=False, unroll=1, early=False,
                     super_row=8, regs=(240, 24), stages=4):
    N, K, E = aT_NM.shape[0], bT_KM.shape[0], offsets_E.shape[0]
    out = torch.empty(E, N, K, dtype=out_dtype, device=aT_NM.device)
    limit = torch.cuda.get_device_properties(aT_NM.device).multi_processor_count if aT_NM.is_cuda else 132
    grid = (min(limit, E * (N // TILE) * (K // TILE)),)
    wgrad_hopper_kernel[grid](
        descriptor(aT_NM, [TILE, TILE]),
        descriptor(bT_KM, [TILE, TILE]),
        descriptor(out.view(E * N, K), [64, 64]),
        aT_scale.view(torch.uint8), bT_scale.view(torch.uint8), offsets_E, *aT_scale.stride(), *bT_scale.stride(),
        N=N, K=K, E=E, SUPER_ROW=super_row, STAGES=stages, BUFFERS=4 // out_dtype.itemsize,
        A_REGS=a_regs, UNROLL=unroll, EARLY=early,
        CONSUMER_REGS=regs[0], PRODUCER_REGS=regs[1], num_warps=4, maxnreg=168,
    )
    return out
