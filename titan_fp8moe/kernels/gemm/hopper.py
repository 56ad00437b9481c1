"""The program of both grouped GEMMs on Hopper, in Gluon: all but where a tile lies and which scales it has.

A result is cut into *pieces*: tiles of 128x256, and narrow ones of 128x128. There is a program for each
multiprocessor, and it takes one piece after another from a counter that all share. Dealing them out beforehand would
cost nothing, and do as well if programs had the GPU to themselves. But communication holds some of the multiprocessors,
and programs meant for those come late, with all of their pieces: with 16 of an H200's 132 held, a GEMM took 1.8 times
as long. And programs with pieces of their own seem to drift apart over a long GEMM, and to lose what they share in L2:
weight gradients of very long groups took up to 11% longer.

A program is three partitions that meet at mbarriers only:

* the *producer*, one warp, takes pieces and asks TMA for the operands of block after block, a block being 128 of the
  contraction dim;
* two *consumers*, a warpgroup each, multiply the upper and the lower 64 rows of a 128x256 tile. (A tile's rows are A's
  and its columns B's. If ``TRANSPOSED`` they are the result's columns and rows: 256 rows and 128 columns are stored.)

Operands wait in a ring of ``STAGES`` stages. ``full[stage]`` completes when TMA has delivered its bytes and
``empty[stage]`` when both consumers have read them. The producer runs ahead over tile boundaries, so that a tile's
first operands are there while the tile before it is being stored. Pieces' numbers go to the consumers in the same way,
through ``SLOTS`` slots with the barriers ``told`` and ``heard``.

Scales make an FP8 GEMM hard to feed: every product of a block has to leave the tensor cores, be multiplied by its
factor and be added to the accumulator by ordinary instructions, which take a quarter of the time that the product
took. A consumer therefore works on four *parts* of 64 columns, with two partial products in registers: while one is
promoted, the tensor cores compute the other. The next block's part 0 is started before this block's part 3 is promoted,
also where the next block is another piece's. A piece without blocks (an expert without rows) and the end therefore get
one whose product nobody uses: consumers would have to know what comes before they start it.
Per thread that is 128 accumulator and 64 partial registers, which is why a consumer gets 240 registers and the producer
24. (Partials of 128 columns, one per consumer, each consumer covering for the other's promotion, need as many registers
and read less shared memory, but were 10 to 20% slower on an H200.)

Narrow tiles run the same code with two parts. They are the last column of tiles where the number of columns is an odd
multiple of 128, and halves of wide ones, which shorten the last wave: see :func:`split_tail`.

A kernel gives two functions:

* ``LOCATE(index, problem, N, K, E)`` finds a piece. It returns the operands' ``(a_row, b_row, first_column, steps)``,
  ``steps`` being its number of blocks; whether it is wide; its ``(row, column)`` in the result; and its expert, for
* ``SCALES(scales, place, position, expert, CONSUMER)``: pointers to the scales of the piece's first block, with their
  steps from block to block and from B's half to half, ``(a_pointers, a_step, b_pointer, b_half, b_step)``.

What ptxas needs in order to leave WGMMA asynchronous is noted where it matters. ``tests/test_gemm_compile.py`` checks
that it does: a WGMMA that is waited for on the spot still gives correct results, at half the speed.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

STAGES = gl.constexpr(4)  # a power of two; 48 KiB each; 35 KiB are left for staging and barriers
SLOTS = gl.constexpr(2)  # a program's piece and the one after it
# Accumulators and partials of a consumer: 64x64 as one warpgroup's WGMMA lays them out.
PART_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 32]))
# A launch has 3 warpgroups (the producer's warp takes one up) of 168 registers a thread = 240 + 240 + 24.
LAUNCH_OPTIONS = {"num_warps": 4, "maxnreg": 168}
WORKER_WARPS = gl.constexpr([4, 1])
WORKER_REGISTERS = gl.constexpr([240, 24])

_meet = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # Triton 3.6's name

# --- order of the tiles -----------------------------------------------------------------------------------------------


@gluon.jit
def split_tail(num_tiles):
    """How many of the last tiles, all wide, to compute as two halves each, so that the last wave takes less time.

    The wave has to have room for them, or some program would get two, which take longer than a wide one.
    """
    rest = num_tiles % gl.num_programs(0)
    return gl.where(2 * rest <= gl.num_programs(0), rest, 0)


@gluon.jit
def piece_at(index, num_whole, num_split):
    """Of the index-th piece, where halves of ``num_split`` tiles follow ``num_whole`` whole ones: its tile, which half
    of it, and whether it is a half at all."""
    past = index - num_whole
    is_half = (past >= 0) & (past < 2 * num_split)
    half = gl.where(is_half, past, 0)
    return index - half + half // 2, half & 1, is_half


@gluon.jit
def tile_position(tile, num_rows, num_columns, super_row):
    """Row and column of a tile: super-rows, of ``super_row`` rows, top to bottom, columns in one, rows in a column.

    Tiles that are computed at a time should form a square, so that programs find each other's operands in L2.
    """
    first_row = tile // (super_row * num_columns) * super_row
    height = gl.minimum(num_rows - first_row, super_row)
    tile -= first_row * num_columns
    return first_row + tile % height, tile // height


# --- shared memory ----------------------------------------------------------------------------------------------------


@gluon.jit
def allocate(a_desc, b_desc, out_desc):
    """The ring of operands with its barriers, slots for the numbers of pieces with theirs, and the staging buffers that
    TMA stores results from.

    A stage holds a 128x128 tile of A and two of B. Each consumer has 16 KiB of staging: two parts in bf16, one in fp32.
    """
    a_ring = gl.allocate_shared_memory(a_desc.dtype, [STAGES, 128, 128], a_desc.layout)
    b_ring = gl.allocate_shared_memory(b_desc.dtype, [2 * STAGES, 128, 128], b_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), 1)
        mbarrier.init(empty.index(stage), 2)
    numbers = gl.allocate_shared_memory(gl.int32, [SLOTS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    told = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    heard = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(told.index(slot), 1)
        mbarrier.init(heard.index(slot), 2)
    fence_async_shared()
    buffers: gl.constexpr = 32 // out_desc.dtype.primitive_bitwidth
    staging = gl.allocate_shared_memory(out_desc.dtype, [2 * buffers, 64, 64], out_desc.layout)
    return (a_ring, b_ring, full, empty), (numbers, told, heard), staging


@gluon.jit
def _stage(block):
    return block & (STAGES - 1)  # with %, of a signed number, a block takes ten instructions more


@gluon.jit
def _phase(block):
    """Parity of the ring's round: what a barrier's wait asks for."""
    return (block & STAGES) // STAGES


# --- producer ---------------------------------------------------------------------------------------------------------


@gluon.jit
def _lanes():
    return gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))


@gluon.jit
def request(counter):
    """Asks for the number of the next piece. That takes a way to L2 and back, and only :func:`_tell` waits for it."""
    lanes = _lanes()
    ones = gl.full([32], 1, gl.int32, lanes.type.layout)
    return gl.atomic_add(counter + gl.zeros_like(lanes), ones, mask=lanes == 0, sem="relaxed")


@gluon.jit
def _tell(counter, slots, turn, requested, num_pieces):
    """Tells the consumers the number that came, and returns it; ``num_pieces`` or more: none is left.

    Every program gets one such number. Who gets the last of them sets the counter back.
    """
    numbers, told, heard = slots
    index = gl.sum(gl.where(_lanes() == 0, requested, 0), 0)
    if index == num_pieces + gl.num_programs(0) - 1:
        gl.store(counter, 0)
    slot = turn % SLOTS
    mbarrier.wait(heard.index(slot), (turn // SLOTS & 1) ^ 1)
    numbers.index(slot).store(gl.full([1], index, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))
    mbarrier.arrive(told.index(slot))
    return index


@gluon.jit
def produce(
    operands,
    counter,
    requested,
    num_pieces,
    problem,
    N: gl.constexpr,
    K: gl.constexpr,
    E: gl.constexpr,
    LOCATE: gl.constexpr,
):
    """The producer's work, from the answer to its first :func:`request`.

    It asks for the next piece when a few blocks of a tile are left, so that it has the answer at the tile's end, but no
    program holds a piece long before it can begin it. Of a short tile it brings a few blocks first, a time in which
    others get their first piece: else those that start first would take two, and where there are few others none.
    """
    a_desc, b_desc, ring, slots = operands
    block = 0
    turn = 0
    index = _tell(counter, slots, turn, requested, num_pieces)
    while index < num_pieces:
        place, wide, position, expert = LOCATE(index, problem, N, K, E)
        a_row, b_row, column, steps = place
        if steps == 0:
            block = _produce_nothing(ring, block)
        head = gl.maximum(gl.minimum(steps, STAGES + 1), steps - 2 * STAGES)
        block = _produce_blocks(a_desc, b_desc, ring, block, a_row, b_row, column, head, wide)
        requested = request(counter)
        block = _produce_blocks(a_desc, b_desc, ring, block, a_row, b_row, column + head * 128, steps - head, wide)
        turn += 1
        index = _tell(counter, slots, turn, requested, num_pieces)
    _produce_nothing(ring, block)


@gluon.jit
def _produce_blocks(a_desc, b_desc, ring, block, a_row, b_row, first_column, steps, wide):
    """Brings ``steps`` blocks of a piece into the ring. Returns ``block``, the program's number of blocks so far."""
    a_ring, b_ring, full, empty = ring
    for step in range(steps):
        stage = _stage(block)
        # In the first round all stages are empty: the phase before a barrier's first counts as complete.
        mbarrier.wait(empty.index(stage), _phase(block) ^ 1)
        ready = full.index(stage)
        mbarrier.expect(ready, 3 * 128 * 128, pred=wide)
        mbarrier.expect(ready, 2 * 128 * 128, pred=wide == 0)
        column = first_column + step * 128
        tma.async_copy_global_to_shared(a_desc, [a_row, column], ready, a_ring.index(stage))
        tma.async_copy_global_to_shared(b_desc, [b_row, column], ready, b_ring.index(2 * stage))
        tma.async_copy_global_to_shared(b_desc, [b_row + 128, column], ready, b_ring.index(2 * stage + 1), pred=wide)
        block += 1
    return block


@gluon.jit
def _produce_nothing(ring, block):
    """A block of which no product is used: a stage with whatever is in it."""
    a_ring, b_ring, full, empty = ring
    mbarrier.wait(empty.index(_stage(block)), _phase(block) ^ 1)
    mbarrier.arrive(full.index(_stage(block)))
    return block + 1


# --- consumer ---------------------------------------------------------------------------------------------------------


@gluon.jit
def _look_up(
    where,
    CONSUMER: gl.constexpr,
    N: gl.constexpr,
    K: gl.constexpr,
    E: gl.constexpr,
    LOCATE: gl.constexpr,
    SCALES: gl.constexpr,
):
    """Waits for the number of the turn's piece. Returns it, whether the piece is wide, its result's position, how many
    blocks it has, the pointers to its scales, and those of the first block."""
    slots, turn, num_pieces, problem, scales = where
    numbers, told, heard = slots
    slot = turn % SLOTS
    mbarrier.wait(told.index(slot), turn // SLOTS & 1)
    index = gl.sum(numbers.index(slot).load(gl.BlockedLayout([1], [32], [4], [0])), 0)
    mbarrier.arrive(heard.index(slot))
    # Past the last piece there is nothing to look up, but something must be read.
    place, wide, position, expert = LOCATE(gl.minimum(index, num_pieces - 1), problem, N, K, E)
    a_row, b_row, column, steps = place
    pointers = SCALES(scales, place, position, expert, CONSUMER)
    return index, wide, position, steps, pointers, _load_scales(pointers, wide)


@gluon.jit
def _load_byte(pointer):
    """In a register of its own: kept as a byte, it is packed beside others, and costs instructions in every block."""
    return gl.load(pointer).to(gl.int32)


@gluon.jit
def _load_scales(pointers, wide):
    """A block's scale bytes: of the consumer's 64 rows, and of the tile's first and second 128 columns."""
    a_pointers, a_step, b_pointer, b_half, b_step = pointers
    return _load_byte(a_pointers), _load_byte(b_pointer), _load_byte(b_pointer + b_half * wide.to(gl.int32))


@gluon.jit
def _power_of_two(byte):
    """fp32 2**(byte - 127): a scale byte is an fp32 exponent field."""
    return (byte << 23).to(gl.float32, bitcast=True)


@gluon.jit
def _start(ring, stage, partial, never, CONSUMER: gl.constexpr, PART: gl.constexpr):
    """Starts partial = a b^T of the consumer's 64 rows and the part's 64 columns.

    ``never`` is false, but only at run time. With a constant, the WGMMA's result would be a new value beside the old
    one, and partials would take twice the registers.
    """
    a_ring, b_ring, full, empty = ring
    a = a_ring.index(stage).slice(64 * CONSUMER, 64)
    b = b_ring.index(2 * stage + PART // 2).slice(PART % 2 * 64, 64)
    return warpgroup_mma(a, b.permute((1, 0)), partial, use_acc=never, is_async=True)


@gluon.jit
def _start_next(ring, block, partial, never, CONSUMER: gl.constexpr):
    """Starts part 0 of the block after ``block``, when its operands are there."""
    a_ring, b_ring, full, empty = ring
    mbarrier.wait(full.index(_stage(block + 1)), _phase(block + 1))
    return _start(ring, _stage(block + 1), partial, never, CONSUMER, 0)


@gluon.jit
def _promote(acc, partial, factor):
    acc += partial * factor[:, None]
    # No instruction at all, but LLVM does not move what is volatile: without it, these sums sink below the WGMMA that
    # overwrites ``partial``, for which it then makes copies: more registers than there are.
    return gl.inline_asm_elementwise("", "=f,0", [acc], gl.float32, is_pure=False, pack=1)


@gluon.jit
def _store(output, acc, CONSUMER: gl.constexpr, TRANSPOSED: gl.constexpr, PART: gl.constexpr):
    out_desc, staging, row, column = output
    buffers: gl.constexpr = 32 // out_desc.dtype.primitive_bitwidth
    buffer = staging.index(CONSUMER * buffers + PART % buffers)
    tma.store_wait(buffers - 1)  # until the store that used this buffer last has read it
    if TRANSPOSED:
        buffer.permute((1, 0)).store(acc.to(out_desc.dtype))
        row += 64 * PART
        column += 64 * CONSUMER
    else:
        buffer.store(acc.to(out_desc.dtype))
        row += 64 * CONSUMER
        column += 64 * PART
    fence_async_shared()
    tma.async_copy_shared_to_global(out_desc, [row, column], buffer)


@gluon.jit
def _store_zeros(output, wide, CONSUMER: gl.constexpr, TRANSPOSED: gl.constexpr):
    zero = gl.zeros([64, 64], gl.float32, PART_LAYOUT)
    _store(output, zero, CONSUMER, TRANSPOSED, 0)
    _store(output, zero, CONSUMER, TRANSPOSED, 1)
    if wide:
        _store(output, zero, CONSUMER, TRANSPOSED, 2)
        _store(output, zero, CONSUMER, TRANSPOSED, 3)


@gluon.jit
def _block(
    ring,
    block,
    scales,
    partials,
    accs,
    never,
    output,
    CONSUMER: gl.constexpr,
    TRANSPOSED: gl.constexpr,
    PARTS: gl.constexpr,
    LAST: gl.constexpr,
):
    """Multiplies and promotes one block, whose part 0 is under way, and starts the next one's.

    In the last block of a piece it stores a part as soon as it is complete, beside the WGMMAs of the others.
    """
    a_ring, b_ring, full, empty = ring
    p0, p1 = partials
    acc0, acc1, acc2, acc3 = accs
    a_byte, b0_byte, b1_byte = scales
    factor0 = _power_of_two(a_byte) * _power_of_two(b0_byte)
    factor1 = _power_of_two(a_byte) * _power_of_two(b1_byte)
    stage = _stage(block)

    # ptxas follows one WGMMA over the loop's back edge, not two: part 0 has to be complete before part 1 is started, or
    # every WGMMA is serialized (C7514). The other consumer's WGMMAs fill the gap.
    p0 = warpgroup_mma_wait(0, deps=[p0])
    p1 = _start(ring, stage, p1, never, CONSUMER, 1)
    acc0 = _promote(acc0, p0, factor0)
    if PARTS == 4:
        p0 = _start(ring, stage, p0, never, CONSUMER, 2)
    if LAST:
        _store(output, acc0, CONSUMER, TRANSPOSED, 0)
    if PARTS == 4:
        p1 = warpgroup_mma_wait(1, deps=[p1])
        acc1 = _promote(acc1, p1, factor0)
        out_desc, staging, row, column = output
        if out_desc.dtype.primitive_bitwidth == 32:
            # Weight gradients gain up to 1%, presumably since warps that meet share operands; in bf16 they lose it.
            _meet()
        p1 = _start(ring, stage, p1, never, CONSUMER, 3)
        if LAST:
            _store(output, acc1, CONSUMER, TRANSPOSED, 1)
        p0 = warpgroup_mma_wait(1, deps=[p0])
        acc2 = _promote(acc2, p0, factor1)
    p0 = _start_next(ring, block, p0, never, CONSUMER)
    p1 = warpgroup_mma_wait(1, deps=[p1])
    mbarrier.arrive(empty.index(stage))
    if PARTS == 4:
        if LAST:
            _store(output, acc2, CONSUMER, TRANSPOSED, 2)
        acc3 = _promote(acc3, p1, factor1)
        if LAST:
            _store(output, acc3, CONSUMER, TRANSPOSED, 3)
    else:
        acc1 = _promote(acc1, p1, factor0)
        if LAST:
            _store(output, acc1, CONSUMER, TRANSPOSED, 1)
    return (p0, p1), (acc0, acc1, acc2, acc3)


@gluon.jit
def _compute_piece(
    ring,
    block,
    partial,
    piece,
    output,
    where,
    never,
    CONSUMER: gl.constexpr,
    N: gl.constexpr,
    K: gl.constexpr,
    E: gl.constexpr,
    LOCATE: gl.constexpr,
    SCALES: gl.constexpr,
    TRANSPOSED: gl.constexpr,
    PARTS: gl.constexpr,
):
    """The consumer's 64 rows of a piece, from the ring to memory, whose first ``partial`` is under way.

    Returns the program's number of blocks so far, the next block's partial, and the next piece: looked up beside the
    last block's products, so that no piece begins with waiting for memory.
    """
    steps, pointers, scales = piece
    a_pointers, a_step, b_pointer, b_half, b_step = pointers
    a_byte, b0_byte, b1_byte = scales
    a_ring, b_ring, full, empty = ring
    zero = gl.zeros([64, 64], gl.float32, PART_LAYOUT)
    accs = (zero, zero, zero, zero)
    partials = (partial, zero)
    # Nothing here needs it. But Triton puts a barrier between two waits for mbarriers, the last piece's and the loop's.
    # In the loop every block would pass it, where the loop's other barriers make it superfluous.
    _meet()
    for _ in range(steps - 1):
        a_pointers += a_step
        b_pointer += b_step
        # Requested a block ahead: a scale takes as long from memory as the block's product.
        next_a_byte = _load_byte(a_pointers)
        next_b0_byte = _load_byte(b_pointer)
        next_b1_byte = next_b0_byte
        if PARTS == 4:
            next_b1_byte = _load_byte(b_pointer + b_half)
        partials, accs = _block(
            ring, block, (a_byte, b0_byte, b1_byte), partials, accs, never, output, CONSUMER, TRANSPOSED, PARTS, False
        )
        a_byte = next_a_byte
        b0_byte = next_b0_byte
        b1_byte = next_b1_byte
        block += 1
    following = _look_up(where, CONSUMER, N, K, E, LOCATE, SCALES)
    partials, accs = _block(
        ring, block, (a_byte, b0_byte, b1_byte), partials, accs, never, output, CONSUMER, TRANSPOSED, PARTS, True
    )
    partial, other = partials
    return block + 1, partial, following


@gluon.jit
def _skip_piece(ring, block, partial, wide, output, never, CONSUMER: gl.constexpr, TRANSPOSED: gl.constexpr):
    """The consumer's zeros of a piece without blocks, whose ``partial`` is the product of a block that is not its own.
    Returns the next block's."""
    a_ring, b_ring, full, empty = ring
    partial = warpgroup_mma_wait(0, deps=[partial])
    mbarrier.arrive(empty.index(_stage(block)))
    partial = _start_next(ring, block, partial, never, CONSUMER)
    _store_zeros(output, wide, CONSUMER, TRANSPOSED)
    return partial


@gluon.jit
def consume(
    results,
    num_pieces,
    problem,
    scales,
    never,
    CONSUMER: gl.constexpr,
    N: gl.constexpr,
    K: gl.constexpr,
    E: gl.constexpr,
    LOCATE: gl.constexpr,
    SCALES: gl.constexpr,
    TRANSPOSED: gl.constexpr,
    STEPS: gl.constexpr,
):
    """A consumer's work, of at least one piece.

    Args:
        never: false, in a way that the compiler cannot know.
        TRANSPOSED: whether a tile's rows are columns of the result.
        STEPS: every piece's number of blocks, None where pieces differ and may have none.
    """
    out_desc, staging, ring, slots = results
    block = 0
    turn = 0
    first = (slots, turn, num_pieces, problem, scales)
    index, wide, position, steps, pointers, scale_bytes = _look_up(first, CONSUMER, N, K, E, LOCATE, SCALES)
    partial = _start_next(ring, -1, gl.zeros([64, 64], gl.float32, PART_LAYOUT), never, CONSUMER)
    while index < num_pieces:
        turn += 1
        row, column = position
        output = (out_desc, staging, row, column)
        where = (slots, turn, num_pieces, problem, scales)
        if STEPS is None:
            is_empty = steps == 0
            piece = (steps, pointers, scale_bytes)
        else:
            is_empty: gl.constexpr = False
            piece = (STEPS, pointers, scale_bytes)
        if is_empty:
            following = _look_up(where, CONSUMER, N, K, E, LOCATE, SCALES)
            partial = _skip_piece(ring, block, partial, wide, output, never, CONSUMER, TRANSPOSED)
            block += 1
        # Two loops, rather than conditions in one: ptxas gives up on WGMMAs that may or may not be under way.
        elif wide:
            block, partial, following = _compute_piece(
                ring, block, partial, piece, output, where, never, CONSUMER, N, K, E, LOCATE, SCALES, TRANSPOSED, 4
            )
        else:
            block, partial, following = _compute_piece(
                ring, block, partial, piece, output, where, never, CONSUMER, N, K, E, LOCATE, SCALES, TRANSPOSED, 2
            )
        index, wide, position, steps, pointers, scale_bytes = following
    warpgroup_mma_wait(0, deps=[partial])
    tma.store_wait(0)
