"""Weight gradient GEMM on Hopper, in Gluon."""

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor  # noqa

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
def _position(
    index, num_tiles, num_split, offsets_E, N: gl.constexpr, K: gl.constexpr, SUPER_ROW: gl.constexpr
):
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
def _consume(
    out_desc, a_smem, b_smem, staging, full, empty, a_scale, a_scale_stride_n, a_scale_stride_m,
    b_scale, b_scale_stride_k, b_scale_stride_m, offsets_E,
    CONSUMER: gl.constexpr, N: gl.constexpr, K: gl.constexpr, E: gl.constexpr, SUPER_ROW: gl.constexpr,
    STAGES: gl.constexpr, PART_N: gl.constexpr, BUFFERS: gl.constexpr, A_REGS: gl.constexpr, PIN: gl.constexpr
):
    num_tiles, num_split = _schedule(N, K, E)
    layout: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART_N, 32]))
    never = gl.load(offsets_E + E - 1) < 0
    block = 0
    for index in range(gl.program_id(0), num_tiles + num_split, gl.num_programs(0)):
        expert, row, column, wide, start, steps = _position(index, num_tiles, num_split, offsets_E, N, K, SUPER_ROW)
        a_scale_ptr = a_scale + row * a_scale_stride_n + start * a_scale_stride_m
        a_scale_ptrs = a_scale_ptr + gl.zeros([64], gl.int32, layout)
        b_scale_ptr = b_scale + column * b_scale_stride_k + start * b_scale_stride_m
        out_row = expert * N + row * 128 + 64 * CONSUMER
        if steps == 0:
            hopper.zero_tile(out_desc, staging, out_row, column * 128, wide, CONSUMER, PART_N, BUFFERS)
        elif wide:
            block = hopper.compute_tile(
                out_desc, staging, out_row, column * 128, a_smem, b_smem, full, empty, block,
                a_scale_ptrs, a_scale_stride_m, b_scale_ptr, b_scale_stride_k, b_scale_stride_m,
                steps, never, CONSUMER, 256, PART_N, BUFFERS, STAGES, A_REGS, PIN
            )
        else:
            block = hopper.compute_tile(
                out_desc, staging, out_row, column * 128, a_smem, b_smem, full, empty, block,
                a_scale_ptrs, a_scale_stride_m, b_scale_ptr, b_scale_stride_k, b_scale_stride_m,
                steps, never, CONSUMER, 128, PART_N, BUFFERS, STAGES, A_REGS, PIN
            )
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=[
        "a_scale_stride_n",
        "a_scale_stride_m",
        "b_scale_stride_k",
        "b_scale_stride_m",
    ],
    do_not_specialize_on_alignment=["a_scale", "b_scale"],
)
def wgrad_hopper_kernel(
    a_desc,
    b_desc,
    out_desc,
    a_scale,
    b_scale,
    offsets_E,
    a_scale_stride_n,
    a_scale_stride_m,
    b_scale_stride_k,
    b_scale_stride_m,
    N: gl.constexpr,
    K: gl.constexpr,
    E: gl.constexpr,
    SUPER_ROW: gl.constexpr,
    STAGES: gl.constexpr,
    PART_N: gl.constexpr,
    BUFFERS: gl.constexpr,
    A_REGS: gl.constexpr,
    PIN: gl.constexpr,
    CONSUMER_REGS: gl.constexpr,
    PRODUCER_REGS: gl.constexpr,
):
    a_smem = gl.allocate_shared_memory(a_desc.dtype, [STAGES, 128, 128], a_desc.layout)
    b_smem = gl.allocate_shared_memory(b_desc.dtype, [STAGES * 2, 128, 128], b_desc.layout)
    staging = gl.allocate_shared_memory(out_desc.dtype, [2 * BUFFERS, 64, PART_N], out_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), 1)
        mbarrier.init(empty.index(stage), 2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    out_desc,
                    a_smem,
                    b_smem,
                    staging,
                    full,
                    empty,
                    a_scale,
                    a_scale_stride_n,
                    a_scale_stride_m,
                    b_scale,
                    b_scale_stride_k,
                    b_scale_stride_m,
                    offsets_E,
                    0,
                    N,
                    K,
                    E,
                    SUPER_ROW,
                    STAGES,
                    PART_N,
                    BUFFERS,
                    A_REGS,
                    PIN,
                ),
            ),
            (
                _consume,
                (
                    out_desc,
                    a_smem,
                    b_smem,
                    staging,
                    full,
                    empty,
                    a_scale,
                    a_scale_stride_n,
                    a_scale_stride_m,
                    b_scale,
                    b_scale_stride_k,
                    b_scale_stride_m,
                    offsets_E,
                    1,
                    N,
                    K,
                    E,
                    SUPER_ROW,
                    STAGES,
                    PART_N,
                    BUFFERS,
                    A_REGS,
                    PIN,
                ),
            ),
            (_produce, (a_desc, b_desc, a_smem, b_smem, full, empty, offsets_E, N, K, E, SUPER_ROW, STAGES)),
        ],
        [4, 1],
        [CONSUMER_REGS, PRODUCER_REGS],
    )


def grouped_mm_wgrad(aT_NM, aT_scale, bT_KM, bT_scale, offsets_E, out_dtype, part_n=64, a_regs=False, pin=19, super_row=8,
               regs=(240, 24), stages=4):
    N, K, E = aT_NM.shape[0], bT_KM.shape[0], offsets_E.shape[0]
    out = torch.empty(E, N, K, dtype=out_dtype, device=aT_NM.device)
    buffers = 16384 // (64 * part_n * out_dtype.itemsize)
    limit = torch.cuda.get_device_properties(aT_NM.device).multi_processor_count if aT_NM.is_cuda else 132
    grid = (min(limit, E * (N // TILE) * (K // TILE)),)
    wgrad_hopper_kernel[grid](
        descriptor(aT_NM, [TILE, TILE]),
        descriptor(bT_KM, [TILE, TILE]),
        descriptor(out.view(E * N, K), [64, part_n]),
        aT_scale.view(torch.uint8), bT_scale.view(torch.uint8), offsets_E, *aT_scale.stride(), *bT_scale.stride(),
        N=N, K=K, E=E, SUPER_ROW=super_row, STAGES=stages, PART_N=part_n, BUFFERS=buffers, A_REGS=a_regs, PIN=pin,
        CONSUMER_REGS=regs[0], PRODUCER_REGS=regs[1], num_warps=4, maxnreg=168,
    )
    return out
