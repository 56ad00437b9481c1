"""Kernels of :mod:`titan_fp8moe.dispatch.symmetric.exchange`: tokens travel through memory that GPUs share, without
the host.

Kernels reach another rank's memory by its address, which they read from ``addresses``. Work is split by source or
destination rank. Ranks take the others in turn, each beginning with its successor, so that no rank serves all others
at once.

An exchange is these launches, on every rank. Only the one warp of ``wait`` or ``plan`` ever waits for another rank::

    publish      own memory: rows, scales and, in a forward, pairs, lists and counts; arrives
    wait         until none of the own arrivals[DISPATCH, :] is less than rounds[DISPATCH] + 1; acquire at system scope
    plan         in a forward, in wait's place: then reads all counts; where tokens come from, and whether all have room
    pull_*       other ranks' memory -> own tensors, rows straight to their places in expert order
    ...          the FFN
    push_sums    own tensors -> other ranks' memory; arrives
    wait         on COMBINE; the sums that have come are then added by :mod:`titan_fp8moe.kernels.permute`

To arrive, a launch's last CTA adds 1 to arrivals[channel, rank] of every rank; release at system scope.

From ``wait`` to the pulls, and from ``push_sums`` to ``wait``, they run on a stream of their own, beside GEMMs, whose
CTAs fill an SM each. So few CTAs move the rows, with as many warps as an SM takes, in one launch: a second one would
find the SMs taken.

A launch sees the writes of the launches before it in its stream, and in one that its stream has waited for. Release and
acquire carry that over ranks. The last CTA's release covers the writes of the others, which have counted themselves
with a release before. The acquire precedes the launches after ``wait``.

No kernel is specialized on the number of tokens.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from titan_fp8moe.dispatch.symmetric.workspace import COMBINE, DISPATCH, LATE, ROWS, TOKENS, UNLIKE, Workspace
from titan_fp8moe.kernels.launch import Kernel
from titan_fp8moe.kernels.permute import load_output_bias
from titan_fp8moe.kernels.routing import FILL_BLOCK, blocks_of_tokens, mark_padding, place_rows
from titan_fp8moe.kernels.sizes import cdiv, empty_rows, next_power_of_2
from titan_fp8moe.recipe import E8M0, FP8, SCALE_TILE

COPY_BYTES, COPY_CTAS = 16384, 256
# A CTA moves COLUMNS columns of TOKENS tokens at a time.
PULL = dict(CTAS=32, TOKENS=64, COLUMNS=1024, num_warps=32)
PUSH = dict(CTAS=32, TOKENS=8, COLUMNS=1024, num_warps=32)
BIASED_PUSH = dict(CTAS=512, TOKENS=4, COLUMNS=1024, num_warps=8)  # needs more registers than so many warps have

INTERPRETED_SPINS = 1000  # the interpreter has no clock


@triton.jit
def _peer(addresses, rank, offset, dtype: tl.constexpr):
    """A pointer to ``offset`` bytes, a multiple of 16, into a rank's memory."""
    return tl.multiple_of((tl.load(addresses + rank) + offset).to(tl.pointer_type(dtype)), 16)


# --- publish ----------------------------------------------------------------------------------------------------------


@triton.jit
def _copy(source, target, count, BLOCK: tl.constexpr):
    """Copies ``count`` elements; the CTAs share the work."""
    for first in range(tl.program_id(0).to(tl.int64) * BLOCK, count, tl.num_programs(0) * BLOCK):
        at = first + tl.arange(0, BLOCK)
        value = tl.load(source + at, mask=at < count)
        tl.store(target + at, value.to(target.dtype.element_ty), mask=at < count)


@triton.jit
def _arrive(addresses, arrivals, done, rank, CHANNEL: tl.constexpr, N: tl.constexpr):
    """Counts this rank's arrival at every rank, once all CTAs of the launch have come here. A rank that acquires the
    count sees all that they have written. ``done``: zero before and after the launch."""
    tl.debug_barrier()
    if tl.atomic_add(done, 1, sem="acq_rel", scope="sys") == tl.num_programs(0) - 1:
        tl.store(done, 0)
        for n in tl.static_range(N):
            # A rank has a counter for each rank that arrives.
            at = _peer(addresses, n, arrivals, tl.int32) + CHANNEL * N + rank
            tl.atomic_add(at, 1, sem="release", scope="sys")


@Kernel
@triton.jit(do_not_specialize=["T", "P", "M", "C", "arrivals", "rank"])
def _publish_kernel(
    q, scale, ids, scores, token_C, counts_N, to_q, to_scale, to_ids, to_scores, to_token, to_counts, to_capacity, T,
    P, M, C, addresses, arrivals, done, rank, D: tl.constexpr, K: tl.constexpr, COUNTS: tl.constexpr,
    BYTES: tl.constexpr, CHANNEL: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """q: (T, D) e4m3, scale: (T, D // 128) uint8, ids: (T, K) int32 or int64, scores: (T, K) fp32, token_C: (P,) int32,
    counts_N: (N, 3 + E) int32, COUNTS elements. ``Sizes.sections`` describes the targets ``to_*``."""
    count = tl.full((), T, tl.int64)
    _copy(q.to(tl.pointer_type(tl.uint8)), to_q.to(tl.pointer_type(tl.uint8)), count * D, BYTES)
    _copy(scale, to_scale, count * (D // 128), BYTES // 4)
    if ids is not None:
        _copy(ids, to_ids, count * K, BYTES // 8)
        _copy(scores, to_scores, count * K, BYTES // 8)
        _copy(token_C, to_token, tl.full((), P, tl.int64), BYTES // 8)
        _copy(counts_N, to_counts, tl.full((), COUNTS, tl.int64), 128)
        if tl.program_id(0) == 0:
            tl.store(to_capacity, M)
            tl.store(to_capacity + 1, C)
    _arrive(addresses, arrivals, done, rank, CHANNEL, N)


def publish(workspace, q_TD, scale, sent):
    """See :func:`titan_fp8moe.dispatch.symmetric.exchange.publish`. All tensors are contiguous."""
    (T, D), K = q_TD.shape, workspace.sizes.top_k
    ids, scores, token_C, counts_N, M, C = sent or (None, None, None, None, 0, 0)
    assert all(t.is_contiguous() for t in (q_TD, scale, ids, scores, token_C, counts_N) if t is not None)
    names = ("q", "scale", "ids", "scores", "token", "counts", "capacity")
    _publish_kernel[(max(min(cdiv(T * D, COPY_BYTES), COPY_CTAS), 1),)](
        q_TD, scale, ids, scores, token_C, counts_N, *(workspace.view(name) for name in names), T,
        0 if token_C is None else token_C.shape[0], M, C, workspace.addresses, workspace.offset("arrivals"),
        workspace.done, workspace.rank, D=D, K=K, COUNTS=0 if counts_N is None else counts_N.numel(), BYTES=COPY_BYTES,
        CHANNEL=DISPATCH, N=workspace.sizes.num_ranks, num_warps=8,
    )  # fmt: skip


# --- wait -------------------------------------------------------------------------------------------------------------


@triton.jit
def _arrivals(at, wanted, in_group):
    # Adds 0: Triton has acquire for atomics only. It pairs with _arrive's release. The stream's next kernels
    # start after this one, so they read what the other ranks had written before they arrived.
    seen = tl.atomic_add(at, 0, mask=in_group, sem="acquire", scope="sys")
    # Negative while a rank is missing; 0 in the lanes past the last rank.
    return tl.where(in_group, seen - wanted, 0)


@triton.jit
def _wait_for_ranks(
    arrivals, rounds, addresses, channel, timeout, N: tl.constexpr, PAD_N: tl.constexpr, LATE: tl.constexpr,
    SPINS: tl.constexpr,
):  # fmt: skip
    """Spins until all ranks have arrived, or for ``timeout`` ns; then reports the late ranks to the host and traps.

    With SPINS, for the interpreter, it spins that often instead, and does not trap. For a CTA of one warp.
    """
    n, wanted = tl.arange(0, PAD_N), tl.load(rounds + channel) + 1
    at = arrivals + channel * N + n
    missing = _arrivals(at, wanted, n < N)
    if SPINS:
        spins = 0
        while (tl.min(missing) < 0) & (spins < SPINS):
            missing = _arrivals(at, wanted, n < N)
            spins += 1
    else:
        began = globaltimer()
        while (tl.min(missing) < 0) & (globaltimer() - began < timeout):
            missing = _arrivals(at, wanted, n < N)
    if tl.min(missing) < 0:
        report = tl.load(addresses + N).to(tl.pointer_type(tl.int32))
        tl.store(report + LATE * N + n, 1, mask=missing < 0)
        if not SPINS:
            # The report lies in the host's memory. It has to arrive there before the trap ends the context.
            tl.inline_asm_elementwise(
                "membar.sys; trap; mov.b32 $0, $1;", "=r,r", [channel], dtype=tl.int32, is_pure=False, pack=1
            )
    tl.store(rounds + channel, wanted)  # on the device, so that a captured graph counts its replays


@Kernel
@triton.jit(do_not_specialize=["channel", "timeout"])
def _wait_kernel(
    arrivals, rounds, addresses, channel, timeout, N: tl.constexpr, PAD_N: tl.constexpr, LATE: tl.constexpr,
    SPINS: tl.constexpr,
):  # fmt: skip
    _wait_for_ranks(arrivals, rounds, addresses, channel, timeout, N, PAD_N, LATE, SPINS)


def _waiting(workspace: Workspace, channel: int) -> tuple[tuple[Any, ...], dict[str, int]]:
    """The first arguments and constants of a kernel that waits."""
    N, interpreted = workspace.sizes.num_ranks, not workspace.memory.is_cuda and not workspace.memory.is_meta
    tensors = workspace.view("arrivals"), workspace.rounds, workspace.addresses
    constants = dict(N=N, PAD_N=next_power_of_2(N), LATE=LATE, SPINS=INTERPRETED_SPINS if interpreted else 0)
    return (*tensors, channel, int(workspace.timeout_s() * 1e9)), constants


def wait(workspace, channel):
    """See :func:`titan_fp8moe.dispatch.symmetric.exchange.wait`. After the timeout the kernel traps: the next CUDA
    call raises."""
    args, constants = _waiting(workspace, channel)
    _wait_kernel[(1,)](*args, **constants, num_warps=1)


# --- plan -------------------------------------------------------------------------------------------------------------


@triton.jit
def _check_rank(
    addresses, counts, capacity, plan, overflow, r, rank, N: tl.constexpr, E: tl.constexpr, PAD_N: tl.constexpr,
    PAD_E: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, UNLIKE: tl.constexpr,
):  # fmt: skip
    """Whether rank r has room, and all ranks have the same settings. This rank's plan, if it is r."""
    n, e = tl.arange(0, PAD_N), tl.arange(0, PAD_E)
    WIDTH: tl.constexpr = 3 + E
    table = (tl.load(addresses + n, mask=n < N, other=0) + counts).to(tl.pointer_type(tl.int32))
    pairs = tl.load(table[:, None] + r * WIDTH + 1 + e[None, :], mask=(n < N)[:, None] & (e < E)[None, :], other=0)
    tokens = tl.load(table + r * WIDTH, mask=n < N, other=0)
    rows = tl.sum((tl.sum(pairs, axis=0) + 127) // 128 * 128)
    arriving = tl.sum(tokens)
    room = _peer(addresses, r, capacity, tl.int32)
    report = tl.load(addresses + N).to(tl.pointer_type(tl.int32))
    # Every rank computes all ranks' rows from the same counts. So all find the same overflow without another exchange.
    if (rows > tl.load(room)) | (arriving > tl.load(room + 1)):
        tl.store(overflow, 1)
        tl.store(report + ROWS * N + r, rows)
        tl.store(report + TOKENS * N + r, arriving)
    signature = tl.load(table + WIDTH - 1, mask=n < N, other=0) >> 1  # in the last bit ranks may differ
    first_signature = tl.load(_peer(addresses, 0, counts, tl.int32) + WIDTH - 1) >> 1
    if tl.max(((signature != first_signature) & (n < N)).to(tl.int32)) > 0:
        tl.store(overflow, 1)
        tl.store(report + UNLIKE * N + r, 1)
    if r == rank:
        # Arrived tokens are sorted by source. A source lists its tokens by destination rank, so this rank's begin after
        # those for the ranks before it.
        first = tl.cumsum(tokens, axis=0) - tokens
        tl.store(plan + n, first, mask=n < N)
        tl.store(plan + N, arriving)
        before = tl.load(table[:, None] + n[None, :] * WIDTH, mask=(n < N)[:, None] & (n < rank)[None, :], other=0)
        tl.store(plan + N + 1 + n, tl.sum(before, axis=1), mask=n < N)
        tl.store(plan + 2 * N + 1, 0)  # the second row's last entry, which nobody reads


@Kernel
@triton.jit(do_not_specialize=["channel", "timeout", "counts", "capacity", "rank"])
def _plan_kernel(
    arrivals, rounds, addresses, channel, timeout, counts, capacity, plan, overflow, rank, N: tl.constexpr,
    PAD_N: tl.constexpr, LATE: tl.constexpr, SPINS: tl.constexpr, E: tl.constexpr, PAD_E: tl.constexpr,
    ROWS: tl.constexpr, TOKENS: tl.constexpr, UNLIKE: tl.constexpr,
):  # fmt: skip
    """Waits, and checks all ranks."""
    _wait_for_ranks(arrivals, rounds, addresses, channel, timeout, N, PAD_N, LATE, SPINS)
    tl.debug_barrier()  # lanes of the warp read what another has acquired
    for r in range(N):
        _check_rank(
            addresses, counts, capacity, plan, overflow, r, rank, N, E, PAD_N, PAD_E, ROWS, TOKENS, UNLIKE
        )  # fmt: skip


def plan(workspace):
    """See :func:`titan_fp8moe.dispatch.symmetric.exchange.plan`."""
    N, E = workspace.sizes.num_ranks, workspace.sizes.num_local
    out = torch.empty(2, N + 1, dtype=torch.int32, device=workspace.memory.device)
    args, constants = _waiting(workspace, DISPATCH)
    _plan_kernel[(1,)](
        *args, workspace.offset("counts"), workspace.offset("capacity"), out, workspace.overflow, workspace.rank,
        **constants, E=E, PAD_E=next_power_of_2(E), ROWS=ROWS, TOKENS=TOKENS, UNLIKE=UNLIKE, num_warps=1,
    )  # fmt: skip
    return out


@triton.jit
def _arriving(plan, overflow, peer, N: tl.constexpr):
    """The first token that comes from ``peer``, as numbered here and in the source's list, and how many come."""
    # None after an overflow: nothing is then read from others or written to them.
    first, end = tl.load(plan + peer), tl.load(plan + peer + 1)
    return first, tl.load(plan + N + 1 + peer), tl.where(tl.load(overflow) > 0, 0, end - first)


# --- pull -------------------------------------------------------------------------------------------------------------


@triton.jit
def _source_of(plan, c, N: tl.constexpr):
    """The rank that each arriving token comes from, and the token's place in that rank's list."""
    peer = c * 0
    for n in tl.static_range(1, N):
        peer += (c >= tl.load(plan + n)).to(tl.int32)
    return peer, c - tl.load(plan + peer) + tl.load(plan + N + 1 + peer)


@Kernel
@triton.jit(do_not_specialize=["list_at", "ids_at", "scores_at", "rank", "C", "M", "blocks"])
def _pull_pairs_kernel(
    addresses, list_at, ids_at, scores_at, plan, overflow, ids_CK, scores_CK, pair_CK, token_C, pair_counts, token_M,
    score_M, rank, C, M, blocks, N: tl.constexpr, E: tl.constexpr, K: tl.constexpr, PAD_K: tl.constexpr,
    PAD: tl.constexpr, BLOCK: tl.constexpr, FILL_BLOCK: tl.constexpr,
):  # fmt: skip
    """Pulls the routed pairs of ``blocks * BLOCK`` arriving tokens, counts those of each expert, and marks all rows as
    padding, as the first launch of :mod:`titan_fp8moe.kernels.routing` does. plan: (2, N + 1) int32. Results: ids_CK
    int32, scores_CK fp32 and pair_CK uint8, all (C, K), token_C (C,) int32."""
    cta, e, k = tl.program_id(0), tl.arange(0, PAD), tl.arange(0, PAD_K)[None, :]
    arriving = tl.where(tl.load(overflow) > 0, 0, tl.load(plan + N))
    counts = tl.zeros((PAD,), tl.int32)
    for block in range(cta * blocks, (cta + 1) * blocks):
        c = block * BLOCK + tl.arange(0, BLOCK)
        inside = c < arriving
        peer, place = _source_of(plan, c, N)
        memory = tl.load(addresses + peer)
        token = tl.load((memory + list_at).to(tl.pointer_type(tl.int32)) + place, mask=inside, other=0)
        tl.store(token_C + c, token, mask=inside)
        ids = (memory + ids_at).to(tl.pointer_type(tl.int32))[:, None]
        scores = (memory + scores_at).to(tl.pointer_type(tl.float32))[:, None]
        pair, mask = token.to(tl.int64)[:, None] * K + k, inside[:, None] & (k < K)
        local = tl.load(ids + pair, mask=mask, other=-1) - rank * E
        score = tl.load(scores + pair, mask=mask, other=0.0)
        # Pairs of other ranks' experts are left out. A cumulative sum moves the others to the front, in the order of k.
        served = mask & (local >= 0) & (local < E)
        first = c.to(tl.int64)[:, None] * K
        to = first + tl.cumsum(served.to(tl.int32), axis=1) - 1
        tl.store(ids_CK + to, local, mask=served)
        tl.store(scores_CK + to, score, mask=served)
        tl.store(pair_CK + to, (k + tl.zeros_like(local)).to(tl.uint8), mask=served)
        absent = (k >= tl.sum(served.to(tl.int32), axis=1)[:, None]) & (k < K) & (c < C)[:, None]
        tl.store(ids_CK + first + k, -1, mask=absent)
        for j in tl.static_range(K):
            expert = tl.sum(tl.where((k == j) & served, local + 1, 0), axis=1) - 1
            counts += tl.sum((expert[:, None] == e[None, :]).to(tl.int32), axis=0)
    tl.store(pair_counts + cta * PAD + e, counts)
    mark_padding(token_M, score_M, M, FILL_BLOCK)


def pull_routing(workspace, plan, M, C):
    """See :func:`titan_fp8moe.dispatch.symmetric.exchange.pull_routing`."""
    (N, _, _, K, E), device = workspace.sizes, plan.device
    blocks, ctas, constants = spread = blocks_of_tokens(C, K, E)
    ids_CK, pair_counts, token_C, token_M = scratch = [
        torch.empty(shape, dtype=torch.int32, device=device) for shape in ((C, K), (ctas, constants["PAD"]), (C,), (M,))
    ]
    scores_CK, score_M = (torch.empty(shape, dtype=torch.float32, device=device) for shape in ((C, K), (M,)))
    pair_CK = torch.empty(C, K, dtype=torch.uint8, device=device)
    workspace.scratch = [*scratch, scores_CK]
    at = (workspace.offset(name) for name in ("token", "ids", "scores"))
    _pull_pairs_kernel[(ctas,)](
        workspace.addresses, *at, plan, workspace.overflow, ids_CK, scores_CK, pair_CK, token_C, pair_counts, token_M,
        score_M, workspace.rank, C, M, blocks, N=N, E=E, K=K, PAD_K=next_power_of_2(K), PAD=constants["PAD"],
        BLOCK=constants["BLOCK"], FILL_BLOCK=FILL_BLOCK, num_warps=4,
    )  # fmt: skip
    offsets_E, row_CK = place_rows(ids_CK, scores_CK, pair_counts, token_M, score_M, spread)
    return offsets_E, token_M, score_M, row_CK, token_C, pair_CK


# --- rows -------------------------------------------------------------------------------------------------------------


def _work(workspace: Workspace, shape: dict[str, int], dim: int) -> tuple[int, dict[str, int]]:
    """CTAs and constants of a launch. A CTA serves one other rank, and moves some of ``dim`` columns of some of its
    tokens at a time."""
    sizes = workspace.sizes
    parts = max(cdiv(sizes.tokens, shape["TOKENS"]) * cdiv(dim, shape["COLUMNS"]), 1)
    constants = dict(N=sizes.num_ranks, K=sizes.top_k, D=dim) | shape
    return sizes.num_ranks * max(min(parts, constants.pop("CTAS") // sizes.num_ranks), 1), constants


@triton.jit
def _my_share(count, N: tl.constexpr, D: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr):
    """This CTA's first item of ``count`` tokens' work, the end, and the step from one to the next."""
    PARTS: tl.constexpr = (D + COLUMNS - 1) // COLUMNS
    return tl.program_id(0) // N, tl.cdiv(count, TOKENS) * PARTS, tl.num_programs(0) // N


@triton.jit
def _item(item, count, D: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr):
    """The tokens of an item, which of them there are, and its columns."""
    PARTS: tl.constexpr = (D + COLUMNS - 1) // COLUMNS
    i = item // PARTS * TOKENS + tl.arange(0, TOKENS)
    return i, i < count, item % PARTS * COLUMNS + tl.arange(0, COLUMNS)


@triton.jit
def _row(row_CK, c, inside, j, K: tl.constexpr):
    return tl.load(row_CK + c * K + j, mask=inside & (j < K), other=-1).to(tl.int64)


@triton.jit
def _pull_scales(
    addresses, scale_at, plan, token_C, token_M, end, out_scale, M, N: tl.constexpr, D: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    """The scales of all rows, (D // 128, M) bytes. The CTAs share the rows."""
    ROWS: tl.constexpr = 8192 // TILES
    tile = tl.arange(0, TILES)[None, :]
    for first in range(tl.program_id(0) * ROWS, end, tl.num_programs(0) * ROWS):
        row = first + tl.arange(0, ROWS)
        c = tl.load(token_M + row, mask=row < end, other=-1)
        peer, _ = _source_of(plan, tl.maximum(c, 0), N)
        token = tl.load(token_C + c, mask=c >= 0, other=0).to(tl.int64)[:, None]
        source = (tl.load(addresses + peer) + scale_at).to(tl.pointer_type(tl.uint8))[:, None]
        byte = tl.load(source + token * (D // 128) + tile, mask=(c >= 0)[:, None] & (tile < D // 128), other=1)
        tl.store(out_scale + tile * M + row[:, None], byte, mask=(row < end)[:, None] & (tile < D // 128))


@triton.jit
def _clear_padding(token_M, offsets_E, out, D: tl.constexpr, E: tl.constexpr, COLUMNS: tl.constexpr):
    """Zeros for the rows that pad a group: they are among its last 128. The CTAs share the experts."""
    zero = tl.zeros((128, COLUMNS), tl.uint8)
    for e in range(tl.program_id(0), E, tl.num_programs(0)):
        end = tl.load(offsets_E + e)
        row = end - 128 + tl.arange(0, 128)
        is_padding = tl.load(token_M + row, mask=row >= tl.load(offsets_E + e - 1, mask=e > 0, other=0), other=0) < 0
        for first in range(0, D, COLUMNS):
            column = (first + tl.arange(0, COLUMNS))[None, :]
            tl.store(out + row.to(tl.int64)[:, None] * D + column, zero, mask=is_padding[:, None] & (column < D))


@Kernel
@triton.jit(do_not_specialize=["q_at", "scale_at", "M", "rank"])
def _pull_rows_kernel(
    addresses, q_at, scale_at, plan, overflow, token_C, row_CK, token_M, offsets_E, out, out_scale, kept, kept_scale, M,
    rank, N: tl.constexpr, E: tl.constexpr, K: tl.constexpr, D: tl.constexpr, TILES: tl.constexpr, TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """Dispatch and permutation: tokens are read where they are, and written to all their rows and, unless it is None,
    to ``kept``, (C, D) e4m3, with their scales."""
    out, peer = out.to(tl.pointer_type(tl.uint8)), (tl.program_id(0) + rank + 1) % N
    _pull_scales(addresses, scale_at, plan, token_C, token_M, tl.load(offsets_E + E - 1), out_scale, M, N, D, TILES)
    _clear_padding(token_M, offsets_E, out, D, E, 128)
    first, _, count = _arriving(plan, overflow, peer, N)
    source, scales = _peer(addresses, peer, q_at, tl.uint8), _peer(addresses, peer, scale_at, tl.uint8)
    begin, end, step = _my_share(count, N, D, TOKENS, COLUMNS)
    for item in range(begin, end, step):
        i, inside, column = _item(item, count, D, TOKENS, COLUMNS)
        c, in_row = (first + i).to(tl.int64), (column < D)[None, :]
        token = tl.load(token_C + c, mask=inside, other=0).to(tl.int64)[:, None]
        mask = inside[:, None] & in_row
        values = tl.load(source + token * D + column[None, :], mask=mask, eviction_policy="evict_first")
        if kept is not None:
            tl.store(kept.to(tl.pointer_type(tl.uint8)) + c[:, None] * D + column[None, :], values, mask=mask)
            tile = tl.arange(0, TILES)[None, :]
            once = inside[:, None] & (tile < D // 128) & (item % ((D + COLUMNS - 1) // COLUMNS) == 0)
            byte = tl.load(scales + token * (D // 128) + tile, mask=once)
            tl.store(kept_scale + c[:, None] * (D // 128) + tile, byte, mask=once)
        for j in tl.static_range(K):
            row = _row(row_CK, c, inside, j, K)[:, None]
            tl.store(out + row * D + column[None, :], values, mask=(row >= 0) & in_row)


def pull_rows(workspace, plan, token_C, row_CK, token_M, offsets_E, keep):
    """See :func:`titan_fp8moe.dispatch.symmetric.exchange.pull_rows`; leaves rows from ``offsets_E[-1]`` on
    unwritten."""
    sizes, M, C, device = workspace.sizes, token_M.shape[0], token_C.shape[0], plan.device
    D, tiles = sizes.dim, sizes.dim // SCALE_TILE
    out, out_scale = empty_rows(plan, M, D)
    kept = torch.empty((C, D) if keep else 0, dtype=FP8, device=device)
    kept_scale = torch.empty((C, tiles) if keep else 0, dtype=E8M0, device=device)
    ctas, constants = _work(workspace, PULL, D)
    _pull_rows_kernel[(ctas,)](
        workspace.addresses, workspace.offset("q"), workspace.offset("scale"), plan, workspace.overflow, token_C,
        row_CK, token_M, offsets_E, out, out_scale, *((kept, kept_scale) if keep else (None, None)), M, workspace.rank,
        E=sizes.num_local, TILES=next_power_of_2(tiles), **constants,
    )  # fmt: skip
    return out, out_scale, kept, kept_scale


@triton.jit
def _fill_with_nan(to, count, COLUMNS: tl.constexpr):
    """The CTAs share the work."""
    for begin in range(tl.program_id(0).to(tl.int64) * COLUMNS, count, tl.num_programs(0) * COLUMNS):
        at = begin + tl.arange(0, COLUMNS)
        tl.store(to + at, tl.full((COLUMNS,), float("nan"), tl.float32).to(to.dtype.element_ty), mask=at < count)


@triton.jit
def _load_row(y, row, b2, score, offsets_E, column, D: tl.constexpr, E: tl.constexpr):
    """A row of each token, zeros for -1."""
    row, in_row = row[:, None], (column < D)[None, :]
    value = tl.load(y + row * D + column[None, :], mask=(row >= 0) & in_row, other=0.0)
    if b2 is not None:
        value = value.to(tl.float32) + load_output_bias(b2, score, offsets_E, row, column[None, :], in_row, D, E)
    return value.to(tl.float32)


@triton.jit
def _first_rows(row_CK, first, item, count, K: tl.constexpr, D: tl.constexpr, TOKENS: tl.constexpr,
                COLUMNS: tl.constexpr):  # fmt: skip
    """The first four rows of each token of an item, -1 where there are fewer."""
    i, inside, _ = _item(item, count, D, TOKENS, COLUMNS)
    c = (first + i).to(tl.int64)
    return (
        _row(row_CK, c, inside, 0, K), _row(row_CK, c, inside, 1, K), _row(row_CK, c, inside, 2, K),
        _row(row_CK, c, inside, 3, K),
    )  # fmt: skip


@triton.jit
def _push_score_gradients(
    to_ds, ds, row_CK, pair_CK, first, start, count, N: tl.constexpr, K: tl.constexpr, PAD_K: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The CTAs of a rank share its tokens."""
    for block in range(tl.program_id(0) // N * BLOCK, count, tl.num_programs(0) // N * BLOCK):
        i, j = block + tl.arange(0, BLOCK), tl.arange(0, PAD_K)[None, :]
        at, mask = (first + i).to(tl.int64)[:, None] * K + j, (i < count)[:, None] & (j < K)
        row = tl.load(row_CK + at, mask=mask, other=-1).to(tl.int64)
        k = tl.load(pair_CK + at, mask=row >= 0, other=0)
        to = (start + i).to(tl.int64)[:, None] * K + k
        tl.store(to_ds + to, tl.load(ds + row, mask=row >= 0), mask=row >= 0)


@triton.jit(do_not_specialize=["sums_at", "ds_at", "P", "arrivals", "rank"])
def _push_sums_kernel(
    addresses, sums_at, ds_at, plan, overflow, y, ds, row_CK, pair_CK, P, arrivals, done, rank, b2, score, offsets_E,
    E: tl.constexpr, N: tl.constexpr, K: tl.constexpr, PAD_K: tl.constexpr, D: tl.constexpr, CHANNEL: tl.constexpr,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sums tokens' rows, in fp32 and in the order of k, and writes them to the tokens' ranks. After an overflow it
    fills this rank's own sums, and with ``ds`` its score gradients, with NaN instead. b2: (E, D) or None; see
    ``load_output_bias``."""
    if tl.load(overflow) > 0:
        size = tl.full((), P, tl.int64)
        _fill_with_nan(_peer(addresses, rank, sums_at, tl.bfloat16), size * D, COLUMNS)
        if ds is not None:
            _fill_with_nan(_peer(addresses, rank, ds_at, tl.float32), size * K, COLUMNS)
    peer = (tl.program_id(0) + rank + 1) % N
    first, start, count = _arriving(plan, overflow, peer, N)
    sums = _peer(addresses, peer, sums_at, tl.bfloat16)
    begin, end, step = _my_share(count, N, D, TOKENS, COLUMNS)
    row0, row1, row2, row3 = _first_rows(row_CK, first, begin, count, K, D, TOKENS, COLUMNS)
    for item in range(begin, end, step):
        i, inside, column = _item(item, count, D, TOKENS, COLUMNS)
        # The next item's rows are looked up while this one's are read.
        next_rows = _first_rows(row_CK, first, item + step, count, K, D, TOKENS, COLUMNS)
        value0 = _load_row(y, row0, b2, score, offsets_E, column, D, E)
        value1 = _load_row(y, row1, b2, score, offsets_E, column, D, E)
        value2 = _load_row(y, row2, b2, score, offsets_E, column, D, E)
        value3 = _load_row(y, row3, b2, score, offsets_E, column, D, E)
        total = 0.0 + value0 + value1 + value2 + value3
        for j in tl.static_range(4, K):
            row = _row(row_CK, (first + i).to(tl.int64), inside, j, K)
            total += _load_row(y, row, b2, score, offsets_E, column, D, E)
        to = sums + (start + i).to(tl.int64)[:, None] * D + column[None, :]
        # Plain stores to another rank's memory, which the arrival publishes.
        tl.store(to, total.to(tl.bfloat16), mask=inside[:, None] & (column < D)[None, :])
        row0, row1, row2, row3 = next_rows
    if ds is not None:
        to_ds = _peer(addresses, peer, ds_at, tl.float32)
        _push_score_gradients(to_ds, ds, row_CK, pair_CK, first, start, count, N, K, PAD_K, 128)
    _arrive(addresses, arrivals, done, rank, CHANNEL, N)


_push = Kernel(_push_sums_kernel, b2=None, score=None, offsets_E=None, E=None)
_biased_push = Kernel(_push_sums_kernel, enable_fp_fusion=False)


def push_sums(workspace, plan, y_MD, ds_M, row_CK, pair_CK, bias=None):
    """See :func:`titan_fp8moe.dispatch.symmetric.exchange.push_sums`. Score gradients of pairs that this rank does not
    serve are not written, and not read by the token's rank."""
    kernel, shape, biases, more = _push, PUSH, (), {}
    if bias is not None:
        kernel, shape, biases, more = _biased_push, BIASED_PUSH, bias, dict(E=bias.b2_ED.shape[0])
    ctas, constants = _work(workspace, shape, y_MD.shape[1])
    kernel[(ctas,)](
        workspace.addresses, workspace.offset("sums"), workspace.offset("score_gradients"), plan, workspace.overflow,
        y_MD, ds_M, row_CK, pair_CK, workspace.sizes.sent, workspace.offset("arrivals"), workspace.done, workspace.rank,
        *biases, PAD_K=next_power_of_2(workspace.sizes.top_k), CHANNEL=COMBINE, **more, **constants,
    )  # fmt: skip
