"""m-grouped GEMM on Hopper, in Gluon."""

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from titan_fp8moe.kernels import hopper
from titan_fp8moe.recipe import TILE


@gluon.jit
def _expert_of(offsets_E, m, E: gl.constexpr):
    """The number of groups that end at or before row m."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    lane = gl.arange(0, 32, layout=layout)
    count = gl.zeros([32], gl.int32, layout)
    for start in range(0, E, 32):
        expert = start + lane
        end = gl.load(offsets_E + expert, mask=expert < E, other=2**31 - 1)
        count += (end <= m).to(gl.int32)
    return gl.sum(count, 0)


@gluon.jit
def _schedule(offsets_E, N: gl.constexpr, E: gl.constexpr):
    num_rows = gl.load(offsets_E + E - 1) // 128
    num_columns: gl.constexpr = (N + 255) // 256
    num_tiles = num_rows * num_columns
    rest = num_tiles % gl.num_programs(0)
    num_split = gl.where((2 * rest <= gl.num_programs(0)) & (N % 256 == 0), rest, 0)
    return num_rows, num_columns, num_tiles, num_split


@gluon.jit
def _position(index, num_rows, num_columns, num_tiles, num_split, offsets_E, N: gl.constexpr, E: gl.constexpr, SUPER_ROW: gl.constexpr):
    tile, second, is_half = hopper.piece_at(index, num_tiles, num_split)
    row, column = hopper.tile_position(tile, num_rows, num_columns, SUPER_ROW)
    column = column * 2 + second
    wide = (is_half == 0) & (column * 128 + 256 <= N)
    return row, column, wide, _expert_of(offsets_E, row * 128, E)


@gluon.jit
def _produce(
    a_desc, b_desc, a_smem, b_smem, full, empty, offsets_E,
    N: gl.constexpr, K: gl.constexpr, E: gl.constexpr, SUPER_ROW: gl.constexpr, STAGES: gl.constexpr
):
    num_rows, num_columns, num_tiles, num_split = _schedule(offsets_E, N, E)
    block = 0
    for index in range(gl.program_id(0), num_tiles + num_split, gl.num_programs(0)):
        row, column, wide, expert = _position(index, num_rows, num_columns, num_tiles, num_split, offsets_E, N, E, SUPER_ROW)
        block = hopper.produce_tile(
            a_desc, b_desc, a_smem, b_smem, full, empty, block,
            row * 128, expert * N + column * 128, 0, K // 128, wide, STAGES
        )


@gluon.jit
def _consume(
    out_desc, a_smem, b_smem, staging, full, empty, a_scale, a_scale_stride_m, a_scale_stride_k,
    b_scale, b_scale_stride_e, b_scale_stride_n, b_scale_stride_k, offsets_E,
    CONSUMER: gl.constexpr, N: gl.constexpr, K: gl.constexpr, E: gl.constexpr, SUPER_ROW: gl.constexpr,
    STAGES: gl.constexpr, BUFFERS: gl.constexpr, A_REGS: gl.constexpr, UNROLL: gl.constexpr, EARLY: gl.constexpr
):
    num_rows, num_columns, num_tiles, num_split = _schedule(offsets_E, N, E)
    num_pieces = num_tiles + num_split
    layout: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 32]))
    m_in_tile = 64 * CONSUMER + gl.arange(0, 64, layout=layout)
    never = num_tiles < 0
    block = 0
    first = gl.program_id(0)
    if first < num_pieces:
        row, column, wide, expert = _position(first, num_rows, num_columns, num_tiles, num_split, offsets_E, N, E, SUPER_ROW)
        a_scale_ptrs = a_scale + (row * 128 + m_in_tile) * a_scale_stride_m
        b_scale_ptr = b_scale + expert * b_scale_stride_e + column * b_scale_stride_n
        a_byte, b0_byte, b1_byte = hopper.load_scales(a_scale_ptrs, b_scale_ptr, b_scale_stride_n, wide)
        for index in range(first, num_pieces, gl.num_programs(0)):
            if wide:
                acc0, acc1, acc2, acc3, block = hopper.multiply_tile(
                    a_smem, b_smem, full, empty, block, a_byte, b0_byte, b1_byte,
                    a_scale_ptrs, a_scale_stride_k, b_scale_ptr, b_scale_stride_n, b_scale_stride_k,
                    K // 128, never, CONSUMER, 4, STAGES, A_REGS, UNROLL, EARLY
                )
            else:
                acc0, acc1, acc2, acc3, block = hopper.multiply_tile(
                    a_smem, b_smem, full, empty, block, a_byte, b0_byte, b1_byte,
                    a_scale_ptrs, a_scale_stride_k, b_scale_ptr, b_scale_stride_n, b_scale_stride_k,
                    K // 128, never, CONSUMER, 2, STAGES, A_REGS, UNROLL, EARLY
                )
            out_row = row * 128 + 64 * CONSUMER
            out_column = column * 128
            store_wide = wide
            # The next tile's first scales arrive while this tile is stored.
            following = gl.minimum(index + gl.num_programs(0), num_pieces - 1)
            row, column, wide, expert = _position(following, num_rows, num_columns, num_tiles, num_split, offsets_E, N, E, SUPER_ROW)
            a_scale_ptrs = a_scale + (row * 128 + m_in_tile) * a_scale_stride_m
            b_scale_ptr = b_scale + expert * b_scale_stride_e + column * b_scale_stride_n
            a_byte, b0_byte, b1_byte = hopper.load_scales(a_scale_ptrs, b_scale_ptr, b_scale_stride_n, wide)
            hopper.store_tile(out_desc, staging, out_row, out_column, acc0, acc1, acc2, acc3, store_wide, CONSUMER, BUFFERS)
        tma.store_wait(0)


@gluon.jit(
    do_not_specialize=[
        "a_scale_stride_m", "a_scale_stride_k", "b_scale_stride_e", "b_scale_stride_n", "b_scale_stride_k"
    ],
    do_not_specialize_on_alignment=["a_scale", "b_scale"],
)
def grouped_mm_hopper_kernel(
    a_desc, b_desc, out_desc, a_scale, b_scale, offsets_E, a_scale_stride_m, a_scale_stride_k,
    b_scale_stride_e, b_scale_stride_n, b_scale_stride_k,
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
                out_desc, a_smem, b_smem, staging, full, empty, a_scale, a_scale_stride_m, a_scale_stride_k,
                b_scale, b_scale_stride_e, b_scale_stride_n, b_scale_stride_k, offsets_E,
                0, N, K, E, SUPER_ROW, STAGES, BUFFERS, A_REGS, UNROLL, EARLY)),
            (_consume, (
                out_desc, a_smem, b_smem, staging, full, empty, a_scale, a_scale_stride_m, a_scale_stride_k,
                b_scale, b_scale_stride_e, b_scale_stride_n, b_scale_stride_k, offsets_E,
                1, N, K, E, SUPER_ROW, STAGES, BUFFERS, A_REGS, UNROLL, EARLY)),
            (_produce, (a_desc, b_desc, a_smem, b_smem, full, empty, offsets_E, N, K, E, SUPER_ROW, STAGES)),
        ],
        [4, 1],
        [CONSUMER_REGS, PRODUCER_REGS],
    )


TORCH_TO_GLUON = {torch.float8_e4m3fn: gl.float8e4nv, torch.bfloat16: gl.bfloat16, torch.float32: gl.float32}


def descriptor(x: Tensor, block: list[int]) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout.get_default_for(block, TORCH_TO_GLUON[x.dtype])
    return TensorDescriptor.from_tensor(x, block, layout)


def grouped_mm(a_MK, a_scale, b_ENK, b_scale, offsets_E, out_dtype, a_regs=False, unroll=1, early=False, super_row=8,
               regs=(240, 24), stages=4):
    (M, K), (E, N, _) = a_MK.shape, b_ENK.shape
    out = torch.empty(M, N, dtype=out_dtype, device=a_MK.device)
    limit = torch.cuda.get_device_properties(a_MK.device).multi_processor_count if a_MK.is_cuda else 132
    grid = (min(limit, (M // TILE) * (N // TILE)),)
    grouped_mm_hopper_kernel[grid](
        descriptor(a_MK, [TILE, TILE]),
        descriptor(b_ENK.view(E * N, K), [TILE, TILE]),
        descriptor(out, [64, 64]),
        a_scale.view(torch.uint8), b_scale.view(torch.uint8), offsets_E, *a_scale.stride(), *b_scale.stride(),
        N=N, K=K, E=E, SUPER_ROW=super_row, STAGES=stages, BUFFERS=4 // out_dtype.itemsize,
        A_REGS=a_regs, UNROLL=unroll, EARLY=early,
        CONSUMER_REGS=regs[0], PRODUCER_REGS=regs[1], num_warps=4, maxnreg=168,
    )
    return out
