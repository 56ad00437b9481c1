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
def _a_operand(a_smem, stage, CONSUMER: gl.constexpr, PART_N: gl.constexpr, A_REGS: gl.constexpr):
    a = a_smem.index(stage).slice(64 * CONSUMER, 64)
    if A_REGS:
        layout: gl.constexpr = gl.DotOperandLayout(
            0, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART_N, 32]), k_width=4
        )
        return a.load(layout)
    else:
        return a


@gluon.jit
def _b_operand(b_smem, stage, PART: gl.constexpr, PART_N: gl.constexpr):
    per_half: gl.constexpr = 128 // PART_N
    half = b_smem.index(stage * 2 + PART // per_half)
    if per_half == 1:
        return half.permute((1, 0))
    else:
        return half.slice(PART % per_half * PART_N, PART_N).permute((1, 0))


@gluon.jit
def _promote(acc, partial, factor, PIN: gl.constexpr, PENDING: gl.constexpr):
    acc += partial * factor[:, None]
    if PIN % 4 == 1:
        acc, partial = warpgroup_mma_wait(PENDING, deps=[acc, partial])
    if PIN % 4 == 2:
        acc = warpgroup_mma_wait(PENDING, deps=[acc])
    if PIN % 4 == 3:
        acc = gl.inline_asm_elementwise("", "=f,0", [acc], gl.float32, is_pure=False, pack=1)
    return acc, partial


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
def multiply_tile_64(
    a_smem,
    b_smem,
    full,
    empty,
    block,
    a_scale_ptrs,
    a_scale_step,
    b_scale_ptr,
    b_scale_half,
    b_scale_step,
    steps,
    never,
    CONSUMER: gl.constexpr,
    PARTS: gl.constexpr,
    STAGES: gl.constexpr,
    A_REGS: gl.constexpr,
    PIN: gl.constexpr,
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
    a_byte = gl.load(a_scale_ptrs)
    b0_byte = gl.load(b_scale_ptr)
    b1_byte = b0_byte
    if PARTS == 4:
        b1_byte = gl.load(b_scale_ptr + b_scale_half)
    stage = block % STAGES
    mbarrier.wait(full.index(stage), block // STAGES & 1)
    a = _a_operand(a_smem, stage, CONSUMER, 64, A_REGS)
    p0 = warpgroup_mma(a, _b_operand(b_smem, stage, 0, 64), p0, use_acc=never, is_async=True)
    for _k in range(steps - 1):
        a_scale_ptrs += a_scale_step
        b_scale_ptr += b_scale_step
        next_a_byte = gl.load(a_scale_ptrs)
        next_b0_byte = gl.load(b_scale_ptr)
        next_b1_byte = next_b0_byte
        if PARTS == 4:
            next_b1_byte = gl.load(b_scale_ptr + b_scale_half)
        factor0 = power_of_two(a_byte) * power_of_two(b0_byte)
        factor1 = power_of_two(a_byte) * power_of_two(b1_byte)
        block += 1
        next_stage = block % STAGES

        if PIN // 8 == 2:
            p0 = warpgroup_mma_wait(0, deps=[p0])
        p1 = warpgroup_mma(a, _b_operand(b_smem, stage, 1, 64), p1, use_acc=never, is_async=True)
        if PIN // 8 != 2:
            p0 = warpgroup_mma_wait(1, deps=[p0])
        acc0, p0 = _promote(acc0, p0, factor0, PIN, 1)
        if PARTS == 4:
            p0 = warpgroup_mma(a, _b_operand(b_smem, stage, 2, 64), p0, use_acc=never, is_async=True)
            p1 = warpgroup_mma_wait(1, deps=[p1])
            acc1, p1 = _promote(acc1, p1, factor0, PIN, 1)
            p1 = warpgroup_mma(a, _b_operand(b_smem, stage, 3, 64), p1, use_acc=never, is_async=True)
            p0 = warpgroup_mma_wait(1, deps=[p0])
            acc2, p0 = _promote(acc2, p0, factor1, PIN, 1)
        if A_REGS or PIN % 8 >= 4:
            # One set of registers holds A: the last product must have read it before the next block's A arrives.
            p1 = warpgroup_mma_wait(0, deps=[p1])
            mbarrier.arrive(empty.index(stage))
        mbarrier.wait(full.index(next_stage), block // STAGES & 1)
        a = _a_operand(a_smem, next_stage, CONSUMER, 64, A_REGS)
        p0 = warpgroup_mma(a, _b_operand(b_smem, next_stage, 0, 64), p0, use_acc=never, is_async=True)
        if not (A_REGS or PIN % 8 >= 4):
            p1 = warpgroup_mma_wait(1, deps=[p1])
            mbarrier.arrive(empty.index(stage))
        if PIN // 8 == 1:
            p0 = warpgroup_mma_wait(0, deps=[p0])
        if PARTS == 4:
            acc3, p1 = _promote(acc3, p1, factor1, PIN, 1)
        else:
            acc1, p1 = _promote(acc1, p1, factor0, PIN, 1)
        a_byte = next_a_byte
        b0_byte = next_b0_byte
        b1_byte = next_b1_byte
        stage = next_stage

    factor0 = power_of_two(a_byte) * power_of_two(b0_byte)
    factor1 = power_of_two(a_byte) * power_of_two(b1_byte)
    p1 = warpgroup_mma(a, _b_operand(b_smem, stage, 1, 64), p1, use_acc=never, is_async=True)
    p0 = warpgroup_mma_wait(1, deps=[p0])
    acc0, p0 = _promote(acc0, p0, factor0, PIN, 1)
    if PARTS == 4:
        p0 = warpgroup_mma(a, _b_operand(b_smem, stage, 2, 64), p0, use_acc=never, is_async=True)
        p1 = warpgroup_mma_wait(1, deps=[p1])
        acc1, p1 = _promote(acc1, p1, factor0, PIN, 1)
        p1 = warpgroup_mma(a, _b_operand(b_smem, stage, 3, 64), p1, use_acc=never, is_async=True)
        p0 = warpgroup_mma_wait(1, deps=[p0])
        acc2, p0 = _promote(acc2, p0, factor1, PIN, 1)
    p1 = warpgroup_mma_wait(0, deps=[p1])
    mbarrier.arrive(empty.index(stage))
    if PARTS == 4:
        acc3, p1 = _promote(acc3, p1, factor1, False, 0)
    else:
        acc1, p1 = _promote(acc1, p1, factor0, False, 0)
    return acc0, acc1, acc2, acc3, block + 1


@gluon.jit
def multiply_tile_128(
    a_smem,
    b_smem,
    full,
    empty,
    block,
    a_scale_ptrs,
    a_scale_step,
    b_scale_ptr,
    b_scale_half,
    b_scale_step,
    steps,
    never,
    CONSUMER: gl.constexpr,
    PARTS: gl.constexpr,
    STAGES: gl.constexpr,
    A_REGS: gl.constexpr,
    PIN: gl.constexpr,
):
    """One n128 partial at a time; the other consumer keeps the tensor cores busy during promotion."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    zero = gl.zeros([64, 128], gl.float32, layout)
    acc0 = zero
    acc1 = zero
    p = zero
    a_byte = gl.load(a_scale_ptrs)
    b0_byte = gl.load(b_scale_ptr)
    b1_byte = b0_byte
    if PARTS == 2:
        b1_byte = gl.load(b_scale_ptr + b_scale_half)
    for k in range(steps):
        stage = block % STAGES
        mbarrier.wait(full.index(stage), block // STAGES & 1)
        a = _a_operand(a_smem, stage, CONSUMER, 128, A_REGS)
        p = warpgroup_mma(a, _b_operand(b_smem, stage, 0, 128), p, use_acc=never, is_async=True)
        advance = (k + 1 < steps).to(gl.int32)
        a_scale_ptrs += a_scale_step * advance
        b_scale_ptr += b_scale_step * advance
        next_a_byte = gl.load(a_scale_ptrs)
        next_b0_byte = gl.load(b_scale_ptr)
        next_b1_byte = next_b0_byte
        if PARTS == 2:
            next_b1_byte = gl.load(b_scale_ptr + b_scale_half)
        factor0 = power_of_two(a_byte) * power_of_two(b0_byte)
        factor1 = power_of_two(a_byte) * power_of_two(b1_byte)
        p = warpgroup_mma_wait(0, deps=[p])
        acc0, p = _promote(acc0, p, factor0, PIN, 0)
        if PARTS == 2:
            p = warpgroup_mma(a, _b_operand(b_smem, stage, 1, 128), p, use_acc=never, is_async=True)
            p = warpgroup_mma_wait(0, deps=[p])
        mbarrier.arrive(empty.index(stage))
        if PARTS == 2:
            acc1, p = _promote(acc1, p, factor1, PIN, 0)
        a_byte = next_a_byte
        b0_byte = next_b0_byte
        b1_byte = next_b1_byte
        block += 1
    return acc0, acc1, block


@gluon.jit
def _store(
    out_desc, staging, out_row, out_column, acc, CONSUMER: gl.constexpr, CHUNK: gl.constexpr, BUFFERS: gl.constexpr
):
    buffer = staging.index(CONSUMER * BUFFERS + CHUNK % BUFFERS)
    tma.store_wait(BUFFERS - 1)
    buffer.store(acc.to(out_desc.dtype))
    fence_async_shared()
    width: gl.constexpr = out_desc.block_shape[1]
    tma.async_copy_shared_to_global(out_desc, [out_row, out_column + CHUNK * width], buffer)


@gluon.jit
def compute_tile(
    out_desc,
    staging,
    out_row,
    out_column,
    a_smem,
    b_smem,
    full,
    empty,
    block,
    a_scale_ptrs,
    a_scale_step,
    b_scale_ptr,
    b_scale_half,
    b_scale_step,
    steps,
    never,
    CONSUMER: gl.constexpr,
    WIDTH: gl.constexpr,
    PART_N: gl.constexpr,
    BUFFERS: gl.constexpr,
    STAGES: gl.constexpr,
    A_REGS: gl.constexpr,
    PIN: gl.constexpr,
):
    if PART_N == 64:
        acc0, acc1, acc2, acc3, block = multiply_tile_64(
            a_smem,
            b_smem,
            full,
            empty,
            block,
            a_scale_ptrs,
            a_scale_step,
            b_scale_ptr,
            b_scale_half,
            b_scale_step,
            steps,
            never,
            CONSUMER,
            WIDTH // 64,
            STAGES,
            A_REGS,
            PIN,
        )
        _store(out_desc, staging, out_row, out_column, acc0, CONSUMER, 0, BUFFERS)
        _store(out_desc, staging, out_row, out_column, acc1, CONSUMER, 1, BUFFERS)
        if WIDTH == 256:
            _store(out_desc, staging, out_row, out_column, acc2, CONSUMER, 2, BUFFERS)
            _store(out_desc, staging, out_row, out_column, acc3, CONSUMER, 3, BUFFERS)
    else:
        acc0, acc1, block = multiply_tile_128(
            a_smem,
            b_smem,
            full,
            empty,
            block,
            a_scale_ptrs,
            a_scale_step,
            b_scale_ptr,
            b_scale_half,
            b_scale_step,
            steps,
            never,
            CONSUMER,
            WIDTH // 128,
            STAGES,
            A_REGS,
            PIN,
        )
        _store(out_desc, staging, out_row, out_column, acc0, CONSUMER, 0, BUFFERS)
        if WIDTH == 256:
            _store(out_desc, staging, out_row, out_column, acc1, CONSUMER, 1, BUFFERS)
    return block


@gluon.jit
def zero_tile(
    out_desc,
    staging,
    out_row,
    out_column,
    wide,
    CONSUMER: gl.constexpr,
    PART_N: gl.constexpr,
    BUFFERS: gl.constexpr,
):
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PART_N, 32])
    zero = gl.zeros([64, PART_N], gl.float32, layout)
    for chunk in gl.static_range(128 // PART_N):
        _store(out_desc, staging, out_row, out_column, zero, CONSUMER, chunk, BUFFERS)
    if wide:
        for chunk in gl.static_range(128 // PART_N):
            _store(out_desc, staging, out_row, out_column + 128, zero, CONSUMER, chunk, BUFFERS)


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
