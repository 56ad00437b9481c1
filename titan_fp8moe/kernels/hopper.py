"""The engine of the grouped GEMMs on Hopper, in Gluon."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)


@gluon.jit
def power_of_two(byte):
    """fp32 2**(byte - 127): a scale byte is an fp32 exponent field."""
    return (byte.to(gl.int32) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def produce_tile(
    a_desc, b_desc, a_smem, b_smem, full, empty, block, a_row, b_row, first, steps, wide, STAGES: gl.constexpr
):
    for k in range(steps):
        stage = block % STAGES
        phase = block // STAGES & 1
        mbarrier.wait(empty.index(stage), phase ^ 1)
        ready = full.index(stage)
        mbarrier.expect(ready, 3 * 128 * 128, pred=wide)
        mbarrier.expect(ready, 2 * 128 * 128, pred=wide == 0)
        column = (first + k) * 128
        tma.async_copy_global_to_shared(a_desc, [a_row, column], ready, a_smem.index(stage))
        tma.async_copy_global_to_shared(b_desc, [b_row, column], ready, b_smem.index(stage * 2))
        tma.async_copy_global_to_shared(b_desc, [b_row + 128, column], ready, b_smem.index(stage * 2 + 1), pred=wide)
        block += 1
    return block


@gluon.jit
def _a_operand(a_smem, stage, CONSUMER: gl.constexpr, A_REGS: gl.constexpr):
    a = a_smem.index(stage).slice(64 * CONSUMER, 64)
    if A_REGS:
        return a.load(gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 32]), k_width=4))
    else:
        return a


@gluon.jit
def _start(a, b_smem, stage, partial, never, PART: gl.constexpr):
    """Starts partial = a b^T on 64 columns."""
    b = b_smem.index(stage * 2 + PART // 2).slice(PART % 2 * 64, 64).permute((1, 0))
    return warpgroup_mma(a, b, partial, use_acc=never, is_async=True)


@gluon.jit
def _promote(acc, partial, factor):
    acc += partial * factor[:, None]
    return gl.inline_asm_elementwise("", "=f,0", [acc], gl.float32, is_pure=False, pack=1)


@gluon.jit
def _block(
    a_smem, b_smem, full, empty, block, factor0, factor1, p0, p1, acc0, acc1, acc2, acc3, never,
    CONSUMER: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr, A_REGS: gl.constexpr,
    WAIT_FIRST: gl.constexpr, LAST: gl.constexpr, EARLY: gl.constexpr
):
    stage = block % STAGES
    a = _a_operand(a_smem, stage, CONSUMER, A_REGS)
    if WAIT_FIRST:
        p0 = warpgroup_mma_wait(0, deps=[p0])
    p1 = _start(a, b_smem, stage, p1, never, 1)
    if not WAIT_FIRST:
        p0 = warpgroup_mma_wait(1, deps=[p0])
    acc0 = _promote(acc0, p0, factor0)
    if PARTS == 4:
        p0 = _start(a, b_smem, stage, p0, never, 2)
        p1 = warpgroup_mma_wait(1, deps=[p1])
        acc1 = _promote(acc1, p1, factor0)
        p1 = _start(a, b_smem, stage, p1, never, 3)
        p0 = warpgroup_mma_wait(1, deps=[p0])
        acc2 = _promote(acc2, p0, factor1)
    if LAST:
        p1 = warpgroup_mma_wait(0, deps=[p1])
        mbarrier.arrive(empty.index(stage))
    elif EARLY:
        p1 = warpgroup_mma_wait(0, deps=[p1])
        mbarrier.arrive(empty.index(stage))
        next_stage = (block + 1) % STAGES
        mbarrier.wait(full.index(next_stage), (block + 1) // STAGES & 1)
        next_a = _a_operand(a_smem, next_stage, CONSUMER, A_REGS)
        p0 = _start(next_a, b_smem, next_stage, p0, never, 0)
    else:
        next_stage = (block + 1) % STAGES
        mbarrier.wait(full.index(next_stage), (block + 1) // STAGES & 1)
        next_a = _a_operand(a_smem, next_stage, CONSUMER, A_REGS)
        p0 = _start(next_a, b_smem, next_stage, p0, never, 0)
        p1 = warpgroup_mma_wait(1, deps=[p1])
        mbarrier.arrive(empty.index(stage))
    if PARTS == 4:
        acc3 = _promote(acc3, p1, factor1)
    else:
        acc1 = _promote(acc1, p1, factor0)
    return p0, p1, acc0, acc1, acc2, acc3


@gluon.jit
def load_scales(a_scale_ptrs, b_scale_ptr, b_scale_half, wide):
    return gl.load(a_scale_ptrs), gl.load(b_scale_ptr), gl.load(b_scale_ptr + b_scale_half * wide.to(gl.int32))


@gluon.jit
def multiply_tile(
    a_smem, b_smem, full, empty, block, a_byte, b0_byte, b1_byte,
    a_scale_ptrs, a_scale_step, b_scale_ptr, b_scale_half, b_scale_step, steps, never,
    CONSUMER: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr, A_REGS: gl.constexpr,
    UNROLL: gl.constexpr, EARLY: gl.constexpr
):
    """Two n64 partials in flight."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 32])
    zero = gl.zeros([64, 64], gl.float32, layout)
    acc0 = zero
    acc1 = zero
    acc2 = zero
    acc3 = zero
    p0 = zero
    p1 = zero
    stage = block % STAGES
    mbarrier.wait(full.index(stage), block // STAGES & 1)
    p0 = _start(_a_operand(a_smem, stage, CONSUMER, A_REGS), b_smem, stage, p0, never, 0)
    for _ in range((steps - 1) // UNROLL):
        for u in gl.static_range(UNROLL):
            factor0 = power_of_two(a_byte) * power_of_two(b0_byte)
            factor1 = power_of_two(a_byte) * power_of_two(b1_byte)
            a_scale_ptrs += a_scale_step
            b_scale_ptr += b_scale_step
            a_byte = gl.load(a_scale_ptrs)
            b0_byte = gl.load(b_scale_ptr)
            if PARTS == 4:
                b1_byte = gl.load(b_scale_ptr + b_scale_half)
            p0, p1, acc0, acc1, acc2, acc3 = _block(
                a_smem, b_smem, full, empty, block, factor0, factor1, p0, p1, acc0, acc1, acc2, acc3, never,
                CONSUMER, PARTS, STAGES, A_REGS, u == 0, False, EARLY
            )
            block += 1
    if UNROLL == 2:
        if (steps - 1) % 2 == 1:
            factor0 = power_of_two(a_byte) * power_of_two(b0_byte)
            factor1 = power_of_two(a_byte) * power_of_two(b1_byte)
            a_scale_ptrs += a_scale_step
            b_scale_ptr += b_scale_step
            a_byte = gl.load(a_scale_ptrs)
            b0_byte = gl.load(b_scale_ptr)
            if PARTS == 4:
                b1_byte = gl.load(b_scale_ptr + b_scale_half)
            p0, p1, acc0, acc1, acc2, acc3 = _block(
                a_smem, b_smem, full, empty, block, factor0, factor1, p0, p1, acc0, acc1, acc2, acc3, never,
                CONSUMER, PARTS, STAGES, A_REGS, True, False, EARLY
            )
            block += 1
    factor0 = power_of_two(a_byte) * power_of_two(b0_byte)
    factor1 = power_of_two(a_byte) * power_of_two(b1_byte)
    p0, p1, acc0, acc1, acc2, acc3 = _block(
        a_smem, b_smem, full, empty, block, factor0, factor1, p0, p1, acc0, acc1, acc2, acc3, never,
        CONSUMER, PARTS, STAGES, A_REGS, True, True, EARLY
    )
    return acc0, acc1, acc2, acc3, block + 1


@gluon.jit
def _store(out_desc, staging, out_row, out_column, acc, CONSUMER: gl.constexpr, CHUNK: gl.constexpr, BUFFERS: gl.constexpr):
    buffer = staging.index(CONSUMER * BUFFERS + CHUNK % BUFFERS)
    tma.store_wait(BUFFERS - 1)
    buffer.store(acc.to(out_desc.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(out_desc, [out_row, out_column + CHUNK * 64], buffer)


@gluon.jit
def store_tile(out_desc, staging, out_row, out_column, acc0, acc1, acc2, acc3, wide, CONSUMER: gl.constexpr, BUFFERS: gl.constexpr):
    _store(out_desc, staging, out_row, out_column, acc0, CONSUMER, 0, BUFFERS)
    _store(out_desc, staging, out_row, out_column, acc1, CONSUMER, 1, BUFFERS)
    if wide:
        _store(out_desc, staging, out_row, out_column, acc2, CONSUMER, 2, BUFFERS)
        _store(out_desc, staging, out_row, out_column, acc3, CONSUMER, 3, BUFFERS)


@gluon.jit
def piece_at(index, num_tiles, num_split):
    """Tile of the index-th piece, which half of it, whether it is a half: whole tiles, then halves of the last num_split."""
    whole = num_tiles - num_split
    is_half = (index >= whole).to(gl.int32)
    beyond = (index - whole) * is_half
    return index - beyond + beyond // 2, beyond & 1, is_half


@gluon.jit
def tile_position(tile, num_rows, num_columns, SUPER_ROW: gl.constexpr):
    first_row = tile // (SUPER_ROW * num_columns) * SUPER_ROW
    height = gl.minimum(num_rows - first_row, SUPER_ROW)
    tile -= first_row * num_columns
    return first_row + tile % height, tile // height
