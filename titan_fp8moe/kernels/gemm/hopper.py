"""Main loop of both grouped GEMMs on Hopper, in Gluon.

The kernels in :mod:`.forward` and :mod:`.wgrad` run this loop. Each gives it a tile scheduler, which knows where a work
tile's operands, scales and result lie. :mod:`.launch` makes TMA descriptors, tile counters and grids.

**Work tiles.** The result is cut into tiles of 128x256. The last column of tiles is 128 wide where the number of
columns is an odd multiple of 128. A work tile is one of these tiles, or half of a wide one (see :func:`split_tail`). A
tile's rows come from A and its columns from B. If ``TRANSPOSED``, they are stored as 256 rows and 128 columns.

**Tile counter.** Each SM runs one CTA. All CTAs take work tiles from one counter in global memory. A static assignment
would cost nothing and do as well on an idle GPU. But communication kernels hold some of the SMs. CTAs that wait for
those SMs start late, with all of their tiles. CTAs with static tiles also seem to drift apart in a long GEMM, so that
they share less in L2.

**Partitions.** A CTA has three, which synchronize through mbarriers only. A *block* is 128 of the contraction dim::

                       tile counter, in global memory
                                    | fetch_next_tile (atomic add)
    +-------------------------------v--------------------------------+
    | producer: worker partition 1, 1 warp, 24 registers a thread    |
    +---------+------------------------------------------+-----------+
              | TMA loads                                | publish_tile
    +---------v---------------------------+  +-----------v-----------+
    | operands, STAGES = 4 x 48 KiB       |  | TILE_STAGES = 2       |
    | a: 128x128, b: 2 x 128x128          |  | indices of work tiles |
    | barriers full[4], empty[4]          |  | tile_full, tile_empty |
    +---------+----------------+----------+  +-----+-----------+-----+
              | a's 0..63, b   | a's 64..127, b    |           | _look_up
    +---------v----------------v-------------------v-----------v-----+
    | consumer 0: default partition  | consumer 1: worker partition 0|
    | 4 warps, 240 registers         | 4 warps, 240 registers        |
    +---------+----------------------+---------------+---------------+
              | 16 KiB of staging                    | 16 KiB of staging
              +------ TMA stores of 64x64 slices ----+----> result

**Barriers.** A consumer's four warps meet before one of its threads arrives, so a consumer counts once::

    barrier       count  arrivals                               who waits, for which parity in round r of the ring
    full[s]         1    producer's expect, and the TMA bytes   consumers, r % 2, before the stage's first WGMMA
    empty[s]        2    each consumer, its WGMMAs have read    producer, (r + 1) % 2, before it loads the stage
    tile_full[s]    1    producer, the index is stored          consumers, r % 2, in _look_up
    tile_empty[s]   2    each consumer, it has read the index   producer, (r + 1) % 2, in publish_tile

Block b of a CTA, counted over all of its tiles, uses stage b % STAGES in round b // STAGES. An mbarrier's phase before
the first counts as complete with parity 1, so the producer's first round does not wait.

**Life of a work tile.**

1. The producer fetches its index while the last blocks of the tile before are loading, and publishes it.
2. The producer loads its blocks as stages become empty. It runs ahead over tile boundaries.
3. A consumer looks it up, with the scales of its first block, before the last block of the tile before.
4. Its first product, slice 0 of its first block, starts in that last block.
5. Each further block starts its products, promotes them, and starts the next block's slice 0.
6. Its last block stores each slice once it is complete. TMA empties the staging while the next tile is computed.

**Promotion.** Scales make an FP8 GEMM hard to feed. Each block's product has to leave the tensor cores, be multiplied
by its factor and be added to the accumulator. The ordinary instructions for that take a quarter of the product's time.
A consumer therefore works on *slices* of 64 columns, four in a wide tile, with two partial products in registers. It
promotes one while the tensor cores compute the other::

    tensor cores   ..0 |  | 1 ..... 2 ..... 3 ..... 0 of the next block
    partial             p0  p1      p0      p1      p0
    promotion             acc0 += p0  acc1 += p1  acc2 += p0  acc3 += p1

The gap after slice 0 is ptxas's condition in :func:`_compute_block`; the other consumer's products fill it. A consumer
starts the next block's slice 0 before it knows what the next tile is. A tile without blocks (an expert without rows)
and the end therefore get a block whose product is not used.

**Registers.** A 64x64 slice of fp32 takes 32 registers of each of 128 threads. Four accumulators take 128 and two
partials 64. That leaves 48 of a consumer's 240 for scales and addresses, and no room to copy a partial. With one
partial of 128 columns each, the consumers would cover for each other's promotion. It takes as many registers and reads
less shared memory, but was slower on an H200.

Narrow tiles run the same code with two slices.

**Tile schedulers.** A scheduler is an aggregate with these fields and methods:

* ``num_tiles``: the number of work tiles.
* ``TRANSPOSED``: whether the result is stored transposed.
* ``B_SHIFT``: how far the bits of B's scales are shifted to be fp32 numbers; A's are exponents.
* ``NUM_K_BLOCKS``: every tile's number of blocks; None where tiles differ or have none.
* ``locate(index)``: the :class:`WorkTile` at an index.
* ``scale_pointers(scales, tile, CONSUMER)``: the :class:`ScalePointers` of a tile's first block.

**ptxas** leaves WGMMA asynchronous only under conditions that are noted where they matter. A WGMMA that is waited for
at once still gives correct results, at half the speed. ``tests/test_gemm_compile.py`` checks for it.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from titan_fp8moe.kernels.gemm.compat import aggregate, partition_barrier, tma_load, tma_store

STAGES = gl.constexpr(4)  # a power of two; 48 KiB each; 35 KiB remain for staging and barriers
TILE_STAGES = gl.constexpr(2)  # the current tile and the next one
# Accumulators and partials of a consumer: 64x64 in one warpgroup's WGMMA layout.
SLICE_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 32]))
# The launch has 3 warpgroups, since the producer's warp takes one up, and 128 * 3 * 168 of the SM's 65,536 registers.
# The partitions then share these anew: 240 + 240 + 24 = 3 * 168. The default partition gets what the workers leave.
LAUNCH_OPTIONS = {"num_warps": 4, "maxnreg": 168}
WORKER_WARPS = gl.constexpr([4, 1])
WORKER_REGISTERS = gl.constexpr([240, 24])


class WorkTile(NamedTuple):
    """A work tile: the origins of its operands, its blocks, and the origin of its result."""

    is_wide: gl.tensor  # 256 columns, else 128
    row: gl.tensor  # of the result
    column: gl.tensor
    num_k_blocks: gl.tensor
    a_row: gl.tensor
    b_row: gl.tensor
    first_column: gl.tensor  # of both operands
    expert: gl.tensor


class ScalePointers(NamedTuple):
    """Pointers to the scales of a block."""

    a: gl.tensor  # (64,), one per row of the consumer
    a_step: gl.tensor  # to the next block
    b: gl.tensor  # one, for the tile's first 128 columns
    b_half: gl.tensor  # from there to the second 128 columns
    b_step: gl.tensor  # to the next block


class ScaleBits(NamedTuple):
    """Bits of the scales of a block, int32: the consumer's 64 rows, and the tile's first and second 128 columns."""

    a: gl.tensor
    b0: gl.tensor
    b1: gl.tensor


class Rings(NamedTuple):
    """Shared memory between the partitions. A stage of operands is a 128x128 tile of A and two of B."""

    a: gl.shared_memory_descriptor
    b: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    tile_indices: gl.shared_memory_descriptor
    tile_full: gl.shared_memory_descriptor
    tile_empty: gl.shared_memory_descriptor


class Output(NamedTuple):
    """The result, and the shared memory that TMA stores it from."""

    desc: tma.tensor_descriptor
    staging: gl.shared_memory_descriptor


# --- order of the tiles -----------------------------------------------------------------------------------------------


@gluon.jit
def split_tail(num_tiles):
    """How many of the last tiles, all wide, to compute as two halves each, so that the last wave takes less time.

    The wave must have room for all halves. Otherwise some CTA gets two, which take longer than a wide tile.
    """
    last_wave = num_tiles % gl.num_programs(0)
    return gl.where(2 * last_wave <= gl.num_programs(0), last_wave, 0)


@gluon.jit
def tile_at(index, num_whole, num_split):
    """The tile of a work tile, where the halves of ``num_split`` tiles follow ``num_whole`` whole ones.

    Returns:
        The tile's index, which half of the tile it is, and whether it is a half at all.
    """
    past = index - num_whole
    is_half = (past >= 0) & (past < 2 * num_split)
    half = gl.where(is_half, past, 0)
    return index - half + half // 2, half & 1, is_half


@gluon.jit
def tile_position(tile, num_rows, num_columns, group_size_m):
    """Row and column of a tile, in tiles. Swizzle groups of ``group_size_m`` rows follow each other from top to bottom,
    each walked column by column.

    Tiles that are computed at the same time should form a square, so that CTAs find each other's operands in L2.
    """
    first_row = tile // (group_size_m * num_columns) * group_size_m
    height = gl.minimum(num_rows - first_row, group_size_m)  # the last group may be lower
    # Down a column of the group first: its CTAs share a strip of B, and the next column reads the same strips of A.
    tile -= first_row * num_columns
    return first_row + tile % height, tile // height


# --- shared memory ----------------------------------------------------------------------------------------------------


@gluon.jit
def allocate(a_desc, b_desc, out_desc):
    """The :class:`Rings`, and the :class:`Output` with 16 KiB per consumer: two slices in bf16, one in fp32."""
    a = gl.allocate_shared_memory(a_desc.dtype, [STAGES, 128, 128], a_desc.layout)
    b = gl.allocate_shared_memory(b_desc.dtype, [2 * STAGES, 128, 128], b_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    # The producer arrives once per use. A consumer arrives once for its 128 threads, so "empty" counts consumers.
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), 1)
        mbarrier.init(empty.index(stage), 2)
    tile_indices = gl.allocate_shared_memory(gl.int32, [TILE_STAGES, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    tile_full = gl.allocate_shared_memory(gl.int64, [TILE_STAGES, 1], mbarrier.MBarrierLayout())
    tile_empty = gl.allocate_shared_memory(gl.int64, [TILE_STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(TILE_STAGES):
        mbarrier.init(tile_full.index(stage), 1)
        mbarrier.init(tile_empty.index(stage), 2)
    # TMA completes barriers through the async proxy, which sees their initialization only after this fence.
    fence_async_shared()
    # Four stages of operands leave no room to stage a whole tile: a consumer stores it slice by slice.
    buffers: gl.constexpr = 32 // out_desc.dtype.primitive_bitwidth
    if len(out_desc.block_shape) == 3:
        staging = gl.allocate_shared_memory(out_desc.dtype, [2 * buffers, 1, 64, 64], out_desc.layout)
    else:
        staging = gl.allocate_shared_memory(out_desc.dtype, [2 * buffers, 64, 64], out_desc.layout)
    return Rings(a, b, full, empty, tile_indices, tile_full, tile_empty), Output(out_desc, staging)


@gluon.jit
def _stage(block):
    return block & (STAGES - 1)  # %, of a signed number, takes ten instructions more per block


@gluon.jit
def _phase(block):
    """Parity of the ring's round, which a wait for a barrier takes."""
    return (block & STAGES) // STAGES


# --- producer ---------------------------------------------------------------------------------------------------------


@gluon.jit
def _lanes():
    return gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [1], [0]))


@gluon.jit
def fetch_next_tile(tile_counter):
    """Starts fetching the index of the CTA's next work tile. Only :func:`publish_tile` waits for the answer from L2."""
    # A tensor of which one lane counts, not a scalar: Triton would pass a scalar's result to the other lanes at once,
    # and so wait for it here. Relaxed, since CTAs exchange nothing but the count.
    lanes = _lanes()
    ones = gl.full([32], 1, gl.int32, lanes.type.layout)
    return gl.atomic_add(tile_counter + gl.zeros_like(lanes), ones, mask=lanes == 0, sem="relaxed")


@gluon.jit
def publish_tile(rings, iteration, tile_counter, fetched, num_tiles):
    """Hands the fetched index to the consumers and returns it. ``num_tiles`` or more means that no tile is left.

    Every CTA fetches one such index. The CTA that fetches the last of them resets the counter.
    """
    index = gl.sum(gl.where(_lanes() == 0, fetched, 0), 0)
    if index == num_tiles + gl.num_programs(0) - 1:
        gl.store(tile_counter, 0)  # no CTA adds to it any more; the launch's end makes it visible to the next launch
    stage = iteration % TILE_STAGES
    # Until both consumers have read the index that lies there, of two tiles ago.
    mbarrier.wait(rings.tile_empty.index(stage), (iteration // TILE_STAGES & 1) ^ 1)
    rings.tile_indices.index(stage).store(gl.full([1], index, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))
    mbarrier.arrive(rings.tile_full.index(stage))  # releases the store: consumers acquire it by their wait
    return index


@gluon.jit
def produce(a_desc, b_desc, rings, scheduler, tile_counter, fetched):
    """The producer's work, from the answer to its first :func:`fetch_next_tile`.

    The producer fetches the next tile when a few blocks of this one are left. It then has the answer at the tile's end,
    but no CTA holds a tile long before it can begin it. For a short tile it loads a few blocks first, so that the other
    CTAs can take their first tile. Otherwise early CTAs take two tiles and late ones, where there are few, none.
    """
    block = 0
    iteration = 0
    index = publish_tile(rings, iteration, tile_counter, fetched, scheduler.num_tiles)
    while index < scheduler.num_tiles:
        tile = scheduler.locate(index)
        if tile.num_k_blocks == 0:
            block = _produce_unused_block(rings, block)
        # The index is fetched 8 blocks before the tile's end, but after its first 5. The first tile's fifth block waits
        # for a stage that the consumers release.
        head = gl.maximum(gl.minimum(tile.num_k_blocks, STAGES + 1), tile.num_k_blocks - 2 * STAGES)
        block = _produce_blocks(a_desc, b_desc, rings, block, tile, 0, head)
        fetched = fetch_next_tile(tile_counter)
        block = _produce_blocks(a_desc, b_desc, rings, block, tile, head, tile.num_k_blocks - head)
        iteration += 1
        index = publish_tile(rings, iteration, tile_counter, fetched, scheduler.num_tiles)
    # The consumers have started, or will start, a product after their last tile. They wait for this block.
    _produce_unused_block(rings, block)


@gluon.jit
def _produce_blocks(a_desc, b_desc, rings, block, tile, first, num_blocks):
    """Loads ``num_blocks`` of a tile's blocks into the ring. Returns ``block``, the CTA's number of blocks so far."""
    first_column = tile.first_column + first * 128
    for k in range(num_blocks):
        stage = _stage(block)
        # In the first round all stages are empty: the phase before a barrier's first counts as complete. No fence is
        # needed before the loads, as WGMMA reads and TMA writes use the same proxy, and the consumers' reads are over.
        mbarrier.wait(rings.empty.index(stage), _phase(block) ^ 1)
        full = rings.full.index(stage)
        # Bytes are expected before a load can deliver any. Their number has to be a constant, hence two calls, of which
        # one arrives.
        mbarrier.expect(full, 3 * 128 * 128, pred=tile.is_wide)
        mbarrier.expect(full, 2 * 128 * 128, pred=tile.is_wide == 0)
        column = first_column + k * 128
        b_row = tile.b_row
        # B comes in two boxes of 128 rows, of which a narrow tile loads one: no descriptor of another size is needed.
        tma_load(a_desc, [tile.a_row, column], full, rings.a.index(stage))
        tma_load(b_desc, [b_row, column], full, rings.b.index(2 * stage))
        tma_load(b_desc, [b_row + 128, column], full, rings.b.index(2 * stage + 1), pred=tile.is_wide)
        block += 1
    return block


@gluon.jit
def _produce_unused_block(rings, block):
    """Hands over a stage with arbitrary content, for a block whose product is not used."""
    mbarrier.wait(rings.empty.index(_stage(block)), _phase(block) ^ 1)
    mbarrier.arrive(rings.full.index(_stage(block)))  # without expected bytes, this completes the phase
    return block + 1


# --- consumer ---------------------------------------------------------------------------------------------------------


@aggregate
class Consumer:
    """Values that a consumer uses for all tiles."""

    rings: gl.tuple
    output: gl.tuple
    scheduler: object
    scales: gl.tuple  # argument of the scheduler's scale_pointers
    runtime_false: gl.tensor  # false, but the compiler cannot know it; see _start
    NUMBER: gl.constexpr  # 0 for the upper 64 rows, 1 for the lower


class CurrentTile(NamedTuple):
    """A work tile that a consumer has looked up."""

    tile_index: gl.tensor  # num_tiles or more: there is no such tile
    tile: WorkTile
    pointers: ScalePointers
    scale_bits: ScaleBits  # of its first block


@gluon.jit
def _look_up(consumer, iteration):
    """Waits for the index of the iteration's work tile and returns the :class:`CurrentTile`."""
    rings = consumer.rings
    stage = iteration % TILE_STAGES
    mbarrier.wait(rings.tile_full.index(stage), iteration // TILE_STAGES & 1)
    index = gl.sum(rings.tile_indices.index(stage).load(gl.BlockedLayout([1], [32], [4], [0])), 0)
    # Triton lets the consumer's warps meet before the arrival, so all of them have read the index.
    mbarrier.arrive(rings.tile_empty.index(stage))
    # Past the last tile there is nothing to look up, but the loads need a valid address.
    tile = consumer.scheduler.locate(gl.minimum(index, consumer.scheduler.num_tiles - 1))
    pointers = consumer.scheduler.scale_pointers(consumer.scales, tile, consumer.NUMBER)
    return CurrentTile(index, tile, pointers, _load_scales(pointers, tile.is_wide))


@gluon.jit
def _load_bits(pointer):
    """Loads into an int32 register of its own. Bytes would be packed together: more instructions in every block."""
    return gl.load(pointer).to(gl.int32)


@gluon.jit
def _load_scales(pointers, is_wide):
    a = _load_bits(pointers.a)
    b0 = _load_bits(pointers.b)
    # A narrow tile may have no second 128 columns. It loads the first one's scale again.
    return ScaleBits(a, b0, _load_bits(pointers.b + pointers.b_half * is_wide.to(gl.int32)))


@gluon.jit
def _factor(scale_bits, b, B_SHIFT: gl.constexpr):
    """fp32 products of the rows' powers of two and a scale of B. A scale byte is an fp32 exponent field."""
    return (scale_bits.a << 23).to(gl.float32, bitcast=True) * (b << B_SHIFT).to(gl.float32, bitcast=True)


@gluon.jit
def _start(consumer, stage, partial, SLICE: gl.constexpr):
    """Starts partial = a b^T for the consumer's 64 rows and the slice's 64 columns.

    ``use_acc`` is false, but only at run time. With a constant the WGMMA's result would be a new value next to the old
    one, and partials would take twice the registers.
    """
    # FP8 WGMMAs take both operands with the contraction dim fastest, as TMA has stored them. Slices are views.
    a = consumer.rings.a.index(stage).slice(64 * consumer.NUMBER, 64)
    b = consumer.rings.b.index(2 * stage + SLICE // 2).slice(SLICE % 2 * 64, 64)
    return warpgroup_mma(a, b.permute((1, 0)), partial, use_acc=consumer.runtime_false, is_async=True)


@gluon.jit
def _start_next(consumer, block, partial):
    """Starts slice 0 of the block after ``block``, once its operands have arrived."""
    # TMA's writes are visible to WGMMA once the barrier completes: both use the async proxy, so there is no fence.
    mbarrier.wait(consumer.rings.full.index(_stage(block + 1)), _phase(block + 1))
    return _start(consumer, _stage(block + 1), partial, 0)


@gluon.jit
def _promote(acc, partial, factor):
    # Fused: only the sum rounds.
    acc += partial * factor[:, None]
    # This emits no instruction, but LLVM does not move volatile code. Without it these sums sink below the WGMMA that
    # overwrites ``partial``. LLVM then copies ``partial``, which takes more registers than there are.
    return gl.inline_asm_elementwise("", "=f,0", [acc], gl.float32, is_pure=False, pack=1)


@gluon.jit
def _store(consumer, tile, acc, SLICE: gl.constexpr):
    """Starts storing a slice of a tile."""
    out_desc = consumer.output.desc
    row = tile.row
    column = tile.column
    buffers: gl.constexpr = 32 // out_desc.dtype.primitive_bitwidth
    # A tile has an even number of slices, so two buffers alternate over tile boundaries too. The only store that may
    # still read then is the other buffer's.
    buffer = consumer.output.staging.index(consumer.NUMBER * buffers + SLICE % buffers)
    matrix = buffer
    if len(out_desc.block_shape) == 3:
        matrix = buffer.reshape([64, 64])
    tma.store_wait(buffers - 1)  # until the last store from this buffer has read it
    # bf16 goes to shared memory by STSM, fp32 by plain stores with twice the bytes.
    if consumer.scheduler.TRANSPOSED:
        matrix.permute((1, 0)).store(acc.to(out_desc.dtype))
        row += 64 * SLICE
        column += 64 * consumer.NUMBER
    else:
        matrix.store(acc.to(out_desc.dtype))
        row += 64 * consumer.NUMBER
        column += 64 * SLICE
    fence_async_shared()  # ordinary stores have filled the buffer, and TMA reads it through the async proxy
    # TMA drops what lies past the result's last column, and with three dims past an expert's last row.
    if len(out_desc.block_shape) == 3:
        tma_store(out_desc, [tile.expert, row, column], buffer)
    else:
        tma_store(out_desc, [row, column], buffer)


@gluon.jit
def _store_zeros(consumer, tile):
    zero = gl.zeros([64, 64], gl.float32, SLICE_LAYOUT)
    _store(consumer, tile, zero, 0)
    _store(consumer, tile, zero, 1)
    if tile.is_wide:
        _store(consumer, tile, zero, 2)
        _store(consumer, tile, zero, 3)


@gluon.jit
def _compute_block(consumer, tile, block, scale_bits, partials, accs, NUM_SLICES: gl.constexpr, IS_LAST: gl.constexpr):
    """Multiplies and promotes one block, whose slice 0 is in flight, and starts the next block's slice 0.

    In the last block of a tile it stores each slice as soon as it is complete, while the WGMMAs of the others run.
    """
    p0, p1 = partials
    acc0, acc1, acc2, acc3 = accs
    # Rows of A have a scale each, 128 columns share one of B. So two slices share a factor.
    factor0 = _factor(scale_bits, scale_bits.b0, consumer.scheduler.B_SHIFT)
    factor1 = _factor(scale_bits, scale_bits.b1, consumer.scheduler.B_SHIFT)
    stage = _stage(block)

    # ptxas follows one WGMMA over the loop's back edge, not two. Slice 0 must be complete before slice 1 is started, or
    # ptxas serializes every WGMMA (C7514). The other consumer's WGMMAs fill the gap.
    #
    # A wait takes a partial and returns it (deps). Sums that read the returned one cannot move above the wait, and its
    # registers stay the WGMMA's until then. wait(1) leaves the later of two WGMMAs in flight: they complete in order.
    p0 = warpgroup_mma_wait(0, deps=[p0])
    p1 = _start(consumer, stage, p1, 1)
    acc0 = _promote(acc0, p0, factor0)
    if NUM_SLICES == 4:
        # p0 is free only now. Its old value goes in and is ignored (see _start), so the new one has its registers.
        p0 = _start(consumer, stage, p0, 2)
    if IS_LAST:
        # Always after the next WGMMA has started, so that the tensor cores work while registers go to staging.
        _store(consumer, tile, acc0, 0)
    if NUM_SLICES == 4:
        p1 = warpgroup_mma_wait(1, deps=[p1])
        acc1 = _promote(acc1, p1, factor0)
        if consumer.output.desc.dtype.primitive_bitwidth == 32:
            # Speeds fp32 weight gradients up by as much as 1%, presumably since warps in step share operands. In bf16
            # it slows them down by as much.
            partition_barrier()
        p1 = _start(consumer, stage, p1, 3)
        if IS_LAST:
            _store(consumer, tile, acc1, 1)
        p0 = warpgroup_mma_wait(1, deps=[p0])
        acc2 = _promote(acc2, p0, factor1)
    p0 = _start_next(consumer, block, p0)
    p1 = warpgroup_mma_wait(1, deps=[p1])
    # The block's last WGMMA has read its operands: TMA may refill the stage during the promotion. Only p0 remains in
    # flight, over the back edge or into the next tile.
    mbarrier.arrive(consumer.rings.empty.index(stage))
    if NUM_SLICES == 4:
        if IS_LAST:
            _store(consumer, tile, acc2, 2)
        acc3 = _promote(acc3, p1, factor1)
        if IS_LAST:
            _store(consumer, tile, acc3, 3)
    else:
        acc1 = _promote(acc1, p1, factor0)
        if IS_LAST:
            _store(consumer, tile, acc1, 1)
    return (p0, p1), (acc0, acc1, acc2, acc3)


@gluon.jit
def _compute_tile(consumer, current, num_k_blocks, iteration, block, partial, NUM_SLICES: gl.constexpr):
    """Computes and stores the consumer's 64 rows of a tile, whose first ``partial`` is in flight.

    Returns:
        The CTA's number of blocks so far, the next block's partial, and the next :class:`CurrentTile`. It is looked up
        during the last block's products, so that no tile begins with a wait for memory.
    """
    pointers = current.pointers
    a_pointers = pointers.a
    b_pointer = pointers.b
    scale_bits = current.scale_bits
    # Accumulators are registers of their own, never a WGMMA's: the tensor cores would add up without scales, and with
    # about 14 bits.
    zero = gl.zeros([64, 64], gl.float32, SLICE_LAYOUT)
    accs = (zero, zero, zero, zero)
    partials = (partial, zero)
    # Nothing here needs this barrier. But Triton puts one between two waits for mbarriers: the last tile's and the
    # loop's. It would put it into the loop, where every block would pass it although the loop's other barriers suffice.
    partition_barrier()
    for _ in range(num_k_blocks - 1):
        a_pointers += pointers.a_step
        b_pointer += pointers.b_step
        # Loaded a block ahead: a scale takes as long from memory as the block's product. Loads after the first WGMMA
        # were up to 4% slower. The last block has no next one, which would lie past the end of the scales.
        next_a = _load_bits(a_pointers)
        next_b0 = _load_bits(b_pointer)
        next_b1 = next_b0
        if NUM_SLICES == 4:
            next_b1 = _load_bits(b_pointer + pointers.b_half)
        partials, accs = _compute_block(consumer, current.tile, block, scale_bits, partials, accs, NUM_SLICES, False)
        scale_bits = ScaleBits(next_a, next_b0, next_b1)
        block += 1
    # The next tile's index and scales come from memory during this tile's last products, not between the tiles.
    following = _look_up(consumer, iteration)
    partials, accs = _compute_block(consumer, current.tile, block, scale_bits, partials, accs, NUM_SLICES, True)
    return block + 1, partials[0], following  # partials[1] is promoted


@gluon.jit
def _skip_tile(consumer, tile, block, partial):
    """Stores the consumer's zeros of a tile without blocks, whose ``partial`` is the product of an unused block.

    Returns:
        The next block's partial.
    """
    partial = warpgroup_mma_wait(0, deps=[partial])
    mbarrier.arrive(consumer.rings.empty.index(_stage(block)))
    partial = _start_next(consumer, block, partial)
    _store_zeros(consumer, tile)
    return partial


@gluon.jit
def consume(rings, output, scheduler, scales, runtime_false, CONSUMER: gl.constexpr):
    """A consumer's work, of at least one tile."""
    consumer = Consumer(rings, output, scheduler, scales, runtime_false, CONSUMER)
    block = 0
    iteration = 0
    current = _look_up(consumer, iteration)
    # Every tile, the first too, begins with its slice 0 in flight.
    partial = _start_next(consumer, -1, gl.zeros([64, 64], gl.float32, SLICE_LAYOUT))
    while current.tile_index < scheduler.num_tiles:
        iteration += 1
        # The forward's number of blocks is a constant. Its loops then need no case of a tile without blocks.
        if scheduler.NUM_K_BLOCKS is None:
            num_k_blocks = current.tile.num_k_blocks
            is_empty = num_k_blocks == 0
        else:
            num_k_blocks: gl.constexpr = scheduler.NUM_K_BLOCKS
            is_empty: gl.constexpr = False
        if is_empty:
            following = _look_up(consumer, iteration)
            partial = _skip_tile(consumer, current.tile, block, partial)
            block += 1
        # Two loops, rather than conditions in one: ptxas gives up on WGMMAs that may or may not be in flight.
        elif current.tile.is_wide:
            block, partial, following = _compute_tile(consumer, current, num_k_blocks, iteration, block, partial, 4)
        else:
            block, partial, following = _compute_tile(consumer, current, num_k_blocks, iteration, block, partial, 2)
        current = following
    # The unused block's product still reads shared memory, and so do the last stores. The CTA must not end before them.
    warpgroup_mma_wait(0, deps=[partial])
    tma.store_wait(0)
