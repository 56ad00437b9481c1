"""Kernels of :mod:`titan_fp8moe.dispatch.symmetric.exchange`: tokens travel through memory that GPUs share, without
the host.

Kernels reach another rank's memory by its address, which they read from ``addresses``. Work is split by source or
destination rank. Ranks take the others in turn, each beginning with its successor, so that no rank serves all others
at once.

An exchange is these launches on one stream, on every rank. Only the one warp of ``wait`` ever waits for another rank::

    publish      own memory: rows, scales and, in a forward, pairs, lists and counts
    arrive       + 1 to arrivals[DISPATCH, rank] of every rank; release at system scope
    wait         until none of the own arrivals[DISPATCH, :] is less than rounds[DISPATCH] + 1; acquire at system scope
    plan         forward only: reads all counts; where tokens come from, and whether every rank has room
    pull_*       other ranks' memory -> own tensors, rows straight to their places in expert order
    ...          the FFN
    push_sums    own tensors -> other ranks' memory
    arrive, wait on COMBINE; the sums that have come are then added by :mod:`titan_fp8moe.kernels.permute`

A launch sees the writes of the launches before it in its stream. Release and acquire carry that over ranks. The release
covers all writes of the stream's earlier kernels, since they have ended. The acquire precedes the launches after
``wait``. So no other kernel needs a fence or an atomic.

No kernel is specialized on the number of tokens.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer

from titan_fp8moe.dispatch.symmetric.workspace import LATE, ROWS, TOKENS, UNLIKE, Workspace
from titan_fp8moe.kernels.launch import Kernel
from titan_fp8moe.kernels.permute import _place_scales, load_output_bias
from titan_fp8moe.kernels.sizes import cdiv, next_power_of_2
from titan_fp8moe.recipe import E8M0, FP8, ROW_ALIGN, SCALE_TILE

COPY_BYTES, COPY_CTAS = 16384, 256
PAIR_BLOCK = 64  # tokens whose pairs or scales a CTA pulls
# A CTA moves COLUMNS columns of TOKENS tokens.
PULL = dict(TOKENS=16, COLUMNS=1024, num_warps=8)
PUSH = dict(TOKENS=4, COLUMNS=1024, num_warps=8)

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


@Kernel
@triton.jit(do_not_specialize=["T", "P", "M", "C"])
def _publish_kernel(
    q, scale, ids, scores, token_C, counts_N, to_q, to_scale, to_ids, to_scores, to_token, to_counts, to_capacity, T,
    P, M, C, D: tl.constexpr, K: tl.constexpr, COUNTS: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    """q: (T, D) e4m3, scale: (T, D // 128) uint8, ids: (T, K) int32 or int64, scores: (T, K) fp32, token_C: (P,) int32,
    counts_N: (N, 3 + E) int32, COUNTS elements. ``Sizes.sections`` describes the targets ``to_*``."""
    count = tl.full((), T, tl.int64)
    _copy(q.to(tl.pointer_type(tl.uint8)), to_q.to(tl.pointer_type(tl.uint8)), count * D, BYTES)
    _copy(scale, to_scale, count * (D // 128), BYTES // 4)
    if ids is not None:
        _copy(ids, to_ids, count * K, BYTES // 8)
        _copy(scores, to_scores, count * K, BYTES // 8)
    if counts_N is not None:
        _copy(token_C, to_token, tl.full((), P, tl.int64), BYTES // 8)
        _copy(counts_N, to_counts, tl.full((), COUNTS, tl.int64), 128)
        if tl.program_id(0) == 0:
            tl.store(to_capacity, M)
            tl.store(to_capacity + 1, C)


def publish(
    workspace: Workspace,
    q_TD: Tensor,
    scale: Tensor,
    pairs: tuple[Tensor, Tensor] | None,
    sent: tuple[Tensor, Tensor, tuple[int, int]] | None,
) -> None:
    """See :func:`titan_fp8moe.dispatch.symmetric.exchange.publish`. All tensors are contiguous."""
    (T, D), K = q_TD.shape, workspace.sizes.top_k
    ids, scores = (None, None) if pairs is None else pairs
    token_C, counts_N, (M, C) = (None, None, (0, 0)) if sent is None else sent
    assert all(t.is_contiguous() for t in (q_TD, scale, ids, scores, token_C, counts_N) if t is not None)
    names = ("q", "scale", "ids", "scores", "token", "counts", "capacity")
    _publish_kernel[(max(min(cdiv(T * D, COPY_BYTES), COPY_CTAS), 1),)](
        q_TD, scale, ids, scores, token_C, counts_N, *(workspace.view(name) for name in names), T,
        0 if token_C is None else token_C.shape[0], M, C, D=D, K=K, COUNTS=0 if counts_N is None else counts_N.numel(),
        BYTES=COPY_BYTES, num_warps=8,
    )  # fmt: skip


# --- arrive, wait -----------------------------------------------------------------------------------------------------


@Kernel
@triton.jit(do_not_specialize=["arrivals", "channel", "rank"])
def _arrive_kernel(addresses, arrivals, channel, rank, N: tl.constexpr, PAD_N: tl.constexpr):
    """Counts this rank's arrival at every rank. A rank that acquires the count sees all writes of earlier kernels."""
    n = tl.arange(0, PAD_N)
    # This kernel starts after the stream's earlier ones, so it has observed their writes. A release at system scope
    # publishes those too, not only its own. A rank has a counter for each rank that arrives.
    address = tl.load(addresses + n, mask=n < N, other=0) + arrivals + (channel * N + rank) * 4
    tl.atomic_add(address.to(tl.pointer_type(tl.int32)), 1, mask=n < N, sem="release", scope="sys")


def arrive(workspace: Workspace, channel: int) -> None:
    """See :func:`titan_fp8moe.dispatch.symmetric.exchange.arrive`."""
    N = workspace.sizes.num_ranks
    _arrive_kernel[(1,)](
        workspace.addresses, workspace.offset("arrivals"), channel, workspace.rank, N=N, PAD_N=next_power_of_2(N),
        num_warps=1,
    )  # fmt: skip


@triton.jit
def _arrivals(at, wanted, in_group):
    # Adds 0: Triton has acquire for atomics only. It pairs with _arrive_kernel's release. The stream's next kernels
    # start after this one, so they read what the other ranks had written before they arrived.
    seen = tl.atomic_add(at, 0, mask=in_group, sem="acquire", scope="sys")
    # Negative while a rank is missing; 0 in the lanes past the last rank.
    return tl.where(in_group, seen - wanted, 0)


@Kernel
@triton.jit(do_not_specialize=["channel", "timeout"])
def _wait_kernel(
    arrivals, rounds, addresses, channel, timeout, N: tl.constexpr, PAD_N: tl.constexpr, LATE: tl.constexpr,
    SPINS: tl.constexpr,
):  # fmt: skip
    """Spins until all ranks have arrived, or for ``timeout`` ns; then reports the late ranks to the host and traps.

    With SPINS, for the interpreter, it spins that often instead, and does not trap.
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


def wait(workspace: Workspace, channel: int) -> None:
    """See :func:`titan_fp8moe.dispatch.symmetric.exchange.wait`. After the timeout the kernel traps: the next CUDA
    call raises."""
    N, interpreted = workspace.sizes.num_ranks, not workspace.memory.is_cuda and not workspace.memory.is_meta
    _wait_kernel[(1,)](
        workspace.view("arrivals"), workspace.rounds, workspace.addresses, channel, int(workspace.timeout_s() * 1e9),
        N=N, PAD_N=next_power_of_2(N), LATE=LATE, SPINS=INTERPRETED_SPINS if interpreted else 0, num_warps=1,
    )  # fmt: skip


# --- plan -------------------------------------------------------------------------------------------------------------


@Kernel
@triton.jit(do_not_specialize=["counts", "capacity", "rank"])
def _plan_kernel(
    addresses, counts, capacity, plan, overflow, rank, N: tl.constexpr, E: tl.constexpr, PAD_N: tl.constexpr,
    PAD_E: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, UNLIKE: tl.constexpr,
):  # fmt: skip
    """CTA r checks that rank r has room, and that all ranks have the same settings. This rank's CTA writes the plan."""
    n, e, r = tl.arange(0, PAD_N), tl.arange(0, PAD_E), tl.program_id(0)
    WIDTH: tl.constexpr = 3 + E
    table = (tl.load(addresses + n, mask=n < N, other=0) + counts).to(tl.pointer_type(tl.int32))
    pairs = tl.load(table[:, None] + r * WIDTH + 1 + e[None, :], mask=(n < N)[:, None] & (e < E)[None, :], other=0)
    tokens = tl.load(table + r * WIDTH, mask=n < N, other=0)
    rows = tl.sum((tl.sum(pairs, axis=0) + 127) // 128 * 128)
    arriving = tl.sum(tokens)
    room = _peer(addresses, r, capacity, tl.int32)
    report = tl.load(addresses + N).to(tl.pointer_type(tl.int32))
    # Every rank computes all ranks' rows from the same counts. So all find the same overflow without another exchange.
    # CTAs may store to `overflow` at once, but all store 1.
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


def plan(workspace: Workspace) -> Tensor:
    """See :func:`titan_fp8moe.dispatch.symmetric.exchange.plan`."""
    N, E = workspace.sizes.num_ranks, workspace.sizes.num_local
    out = torch.empty(2, N + 1, dtype=torch.int32, device=workspace.memory.device)
    _plan_kernel[(N,)](
        workspace.addresses, workspace.offset("counts"), workspace.offset("capacity"), out, workspace.overflow,
        workspace.rank, N=N, E=E, PAD_N=next_power_of_2(N), PAD_E=next_power_of_2(E), ROWS=ROWS, TOKENS=TOKENS,
        UNLIKE=UNLIKE, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit
def _arriving(plan, overflow, peer, N: tl.constexpr):
    """The first token that comes from ``peer``, as numbered here and in the source's list, and how many come."""
    # None after an overflow: nothing is then read from others or written to them.
    first, end = tl.load(plan + peer), tl.load(plan + peer + 1)
    return first, tl.load(plan + N + 1 + peer), tl.where(tl.load(overflow) > 0, 0, end - first)


# --- pull -------------------------------------------------------------------------------------------------------------


@Kernel
@triton.jit(do_not_specialize=["list_at", "ids_at", "scores_at", "rank"])
def _pull_pairs_kernel(
    addresses, list_at, ids_at, scores_at, plan, overflow, ids_CK, scores_CK, pair_CK, token_C, rank, N: tl.constexpr,
    E: tl.constexpr, K: tl.constexpr, PAD_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A CTA pulls the routed pairs of BLOCK tokens from one rank. plan: (2, N + 1) int32. Results: ids_CK int32,
    scores_CK fp32 and pair_CK uint8, all (C, K), and token_C (C,) int32."""
    peer = (tl.program_id(0) + rank + 1) % N
    first, start, count = _arriving(plan, overflow, peer, N)
    i = tl.program_id(0) // N * BLOCK + tl.arange(0, BLOCK)
    inside, k = i < count, tl.arange(0, PAD_K)[None, :]
    token = tl.load(_peer(addresses, peer, list_at, tl.int32) + start + i, mask=inside, other=0)
    tl.store(token_C + first + i, token, mask=inside)
    pair, mask = token.to(tl.int64)[:, None] * K + k, inside[:, None] & (k < K)
    local = tl.load(_peer(addresses, peer, ids_at, tl.int32) + pair, mask=mask, other=-1) - rank * E
    score = tl.load(_peer(addresses, peer, scores_at, tl.float32) + pair, mask=mask, other=0.0)
    # Pairs of other ranks' experts are left out. A cumulative sum moves the others to the front, in the order of k.
    served = mask & (local >= 0) & (local < E)
    to = (first + i).to(tl.int64)[:, None] * K + tl.cumsum(served.to(tl.int32), axis=1) - 1
    tl.store(ids_CK + to, local, mask=served)
    tl.store(scores_CK + to, score, mask=served)
    tl.store(pair_CK + to, (k + tl.zeros_like(local)).to(tl.uint8), mask=served)


def pull_pairs(workspace: Workspace, plan: Tensor, C: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See :func:`titan_fp8moe.dispatch.symmetric.exchange.pull_pairs`."""
    sizes, device = workspace.sizes, plan.device
    ids_CK = torch.full((C, sizes.top_k), -1, dtype=torch.int32, device=device)
    scores_CK = torch.empty(C, sizes.top_k, dtype=torch.float32, device=device)
    pair_CK = torch.empty(C, sizes.top_k, dtype=torch.uint8, device=device)
    token_C = torch.empty(C, dtype=torch.int32, device=device)
    _pull_pairs_kernel[(sizes.num_ranks * cdiv(sizes.tokens, PAIR_BLOCK),)](
        workspace.addresses, *(workspace.offset(name) for name in ("token", "ids", "scores")), plan,
        workspace.overflow, ids_CK, scores_CK, pair_CK, token_C, workspace.rank, N=sizes.num_ranks, E=sizes.num_local,
        K=sizes.top_k, PAD_K=next_power_of_2(sizes.top_k), BLOCK=PAIR_BLOCK, num_warps=4,
    )  # fmt: skip
    return ids_CK, scores_CK, pair_CK, token_C


@Kernel
@triton.jit(do_not_specialize=["scale_at", "rank"])
def _pull_scales_kernel(
    addresses, scale_at, plan, overflow, token_C, out, rank, N: tl.constexpr, TILES: tl.constexpr, PAD: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A CTA pulls the scales of BLOCK tokens from one rank. plan: (2, N + 1) int32, token_C: (C,) int32. Result: out
    (C, TILES) uint8, the bytes of e8m0."""
    peer = (tl.program_id(0) + rank + 1) % N
    first, _, count = _arriving(plan, overflow, peer, N)
    i = tl.program_id(0) // N * BLOCK + tl.arange(0, BLOCK)
    inside, tile = i < count, tl.arange(0, PAD)[None, :]
    token, mask = tl.load(token_C + first + i, mask=inside, other=0), inside[:, None] & (tile < TILES)
    source = _peer(addresses, peer, scale_at, tl.uint8)
    byte = tl.load(source + token.to(tl.int64)[:, None] * TILES + tile, mask=mask)
    tl.store(out + (first + i).to(tl.int64)[:, None] * TILES + tile, byte, mask=mask)


def pull_scales(workspace: Workspace, plan: Tensor, token_C: Tensor) -> Tensor:
    """See :func:`titan_fp8moe.dispatch.symmetric.exchange.pull_scales`."""
    sizes, tiles = workspace.sizes, workspace.sizes.dim // SCALE_TILE
    out = torch.empty(token_C.shape[0], tiles, dtype=E8M0, device=plan.device)
    _pull_scales_kernel[(sizes.num_ranks * cdiv(sizes.tokens, PAIR_BLOCK),)](
        workspace.addresses, workspace.offset("scale"), plan, workspace.overflow, token_C, out, workspace.rank,
        N=sizes.num_ranks, TILES=tiles, PAD=next_power_of_2(tiles), BLOCK=PAIR_BLOCK, num_warps=4,
    )  # fmt: skip
    return out


@Kernel
@triton.jit(do_not_specialize=["M"])
def _place_scales_kernel(
    scale, token_M, offsets_E, out, out_scale, M, D: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, PAD_TILES: tl.constexpr,
):  # fmt: skip
    """A CTA writes the scales of ROWS rows, and zeros to those that are padding. scale: (C, D // 128) uint8, token_M:
    (M,) and offsets_E: (E,) int32. Results: out (M, D) e4m3, out_scale (D // 128, M) uint8."""
    out, first = out.to(tl.pointer_type(tl.uint8)), tl.program_id(0) * ROWS
    if first < tl.load(offsets_E + E - 1):
        row = first + tl.arange(0, ROWS)
        token = tl.load(token_M + row).to(tl.int64)
        _place_scales(scale, D // 128, row, token, out, out_scale, M, D, ROWS, COLUMNS, PAD_TILES)


# --- rows -------------------------------------------------------------------------------------------------------------


def _work(workspace: Workspace, shape: dict[str, int], dim: int) -> tuple[int, dict[str, int]]:
    """CTAs and constants of a launch whose CTAs each move some of ``dim`` columns of some tokens of one rank."""
    sizes = workspace.sizes
    ctas = sizes.num_ranks * cdiv(sizes.tokens, shape["TOKENS"]) * cdiv(dim, shape["COLUMNS"])
    return ctas, dict(N=sizes.num_ranks, K=sizes.top_k, PAD_K=next_power_of_2(sizes.top_k), D=dim) | shape


@triton.jit
def _item(rank, N: tl.constexpr, D: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr):
    """The other rank, the first token and the first column of this CTA."""
    PARTS: tl.constexpr = (D + COLUMNS - 1) // COLUMNS
    item = tl.program_id(0)
    return (item + rank + 1) % N, item // N // PARTS * TOKENS, item // N % PARTS * COLUMNS


@triton.jit
def _most_rows(row_CK, c, inside, K: tl.constexpr, PAD_K: tl.constexpr):
    """How many rows a token has at most; a token's rows come before its -1."""
    j = tl.arange(0, PAD_K)[None, :]
    row = tl.load(row_CK + c[:, None] * K + j, mask=inside[:, None] & (j < K), other=-1)
    return tl.max(tl.max(tl.where(row >= 0, j + 1, 0), axis=1), axis=0)


@triton.jit
def _row(row_CK, c, inside, j, K: tl.constexpr):
    return tl.load(row_CK + c * K + j, mask=inside & (j < K), other=-1).to(tl.int64)


@Kernel
@triton.jit(do_not_specialize=["q_at", "rank"])
def _pull_rows_kernel(
    addresses, q_at, plan, overflow, token_C, row_CK, out, kept, rank, N: tl.constexpr, K: tl.constexpr,
    PAD_K: tl.constexpr, D: tl.constexpr, TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Dispatch and permutation: tokens are read where they are, and written to all their rows and, unless it is None,
    to ``kept``."""
    out = out.to(tl.pointer_type(tl.uint8))
    peer, begin, first_column = _item(rank, N, D, TOKENS, COLUMNS)
    first, _, count = _arriving(plan, overflow, peer, N)
    if begin < count:
        i = begin + tl.arange(0, TOKENS)
        inside, c = i < count, (first + i).to(tl.int64)
        token = tl.load(token_C + c, mask=inside, other=0).to(tl.int64)
        source, column = _peer(addresses, peer, q_at, tl.uint8), first_column + tl.arange(0, COLUMNS)
        in_row = (column < D)[None, :]
        at = source + token[:, None] * D + column[None, :]
        values = tl.load(at, mask=inside[:, None] & in_row, eviction_policy="evict_first")
        most = _most_rows(row_CK, c, inside, K, PAD_K)
        if kept is not None:
            to = kept.to(tl.pointer_type(tl.uint8)) + c[:, None] * D + column[None, :]
            tl.store(to, values, mask=inside[:, None] & in_row)
        for j in range(0, most):
            row = _row(row_CK, c, inside, j, K)[:, None]
            tl.store(out + row * D + column[None, :], values, mask=(row >= 0) & in_row)


def pull_rows(
    workspace: Workspace, plan: Tensor, token_C: Tensor, row_CK: Tensor, token_M: Tensor, scale: Tensor,
    offsets_E: Tensor, keep: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """See :func:`titan_fp8moe.dispatch.symmetric.exchange.pull_rows`; leaves rows from ``offsets_E[-1]`` on
    unwritten."""
    sizes, M, C, device = workspace.sizes, token_M.shape[0], token_C.shape[0], plan.device
    D = sizes.dim
    out = torch.empty(M, D, dtype=FP8, device=device)
    out_scale = torch.empty(D // SCALE_TILE, M, dtype=E8M0, device=device)
    kept = torch.empty(C, D, dtype=FP8, device=device) if keep else out.new_empty(0)
    _place_scales_kernel[(M // ROW_ALIGN,)](
        scale, token_M, offsets_E, out, out_scale, M, D=D, E=sizes.num_local, ROWS=ROW_ALIGN, COLUMNS=256,
        PAD_TILES=next_power_of_2(D // SCALE_TILE), num_warps=8,
    )  # fmt: skip
    ctas, constants = _work(workspace, PULL, D)
    _pull_rows_kernel[(ctas,)](
        workspace.addresses, workspace.offset("q"), plan, workspace.overflow, token_C, row_CK, out,
        kept if keep else None, workspace.rank, **constants,
    )  # fmt: skip
    return out, out_scale.t(), kept


@triton.jit
def _fill_with_nan(to, count, COLUMNS: tl.constexpr):
    """The CTAs share the work."""
    for begin in range(tl.program_id(0).to(tl.int64) * COLUMNS, count, tl.num_programs(0) * COLUMNS):
        at = begin + tl.arange(0, COLUMNS)
        tl.store(to + at, tl.full((COLUMNS,), float("nan"), tl.float32).to(to.dtype.element_ty), mask=at < count)


@triton.jit
def _load_row(y, row_CK, b2, score, offsets_E, c, inside, j, column, K: tl.constexpr, D: tl.constexpr,
              E: tl.constexpr):  # fmt: skip
    """The j-th row of each token, zeros for a token that has fewer."""
    row = _row(row_CK, c, inside, j, K)[:, None]
    value = tl.load(y + row * D + column[None, :], mask=(row >= 0) & (column < D)[None, :], other=0.0)
    if b2 is not None:
        in_row = (column < D)[None, :]
        value = value.to(tl.float32) + load_output_bias(b2, score, offsets_E, row, column[None, :], in_row, D, E)
    return value


@triton.jit
def _sum_of_rows(
    y, row_CK, b2, score, offsets_E, c, inside, most, column, K: tl.constexpr, D: tl.constexpr, TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """fp32 sums of the tokens' rows in the order of k. Four loads, independent of each other, precede their sum."""
    total = tl.zeros((TOKENS, COLUMNS), tl.float32)
    for j in range(0, most, 4):
        first = _load_row(y, row_CK, b2, score, offsets_E, c, inside, j, column, K, D, E)
        second = _load_row(y, row_CK, b2, score, offsets_E, c, inside, j + 1, column, K, D, E)
        third = _load_row(y, row_CK, b2, score, offsets_E, c, inside, j + 2, column, K, D, E)
        fourth = _load_row(y, row_CK, b2, score, offsets_E, c, inside, j + 3, column, K, D, E)
        total = total + first.to(tl.float32) + second.to(tl.float32) + third.to(tl.float32) + fourth.to(tl.float32)
    return total


@triton.jit(do_not_specialize=["sums_at", "ds_at", "P", "rank"])
def _push_sums_kernel(
    addresses, sums_at, ds_at, plan, overflow, y, ds, row_CK, pair_CK, P, rank, b2, score, offsets_E,
    E: tl.constexpr, N: tl.constexpr, K: tl.constexpr, PAD_K: tl.constexpr, D: tl.constexpr,
    TOKENS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sums tokens' rows and writes them to the tokens' ranks. After an overflow it fills this rank's own sums, and with
    ``ds`` its score gradients, with NaN instead. b2: (E, D) or None; see ``load_output_bias``."""
    if tl.load(overflow) > 0:
        count = tl.full((), P, tl.int64)
        _fill_with_nan(_peer(addresses, rank, sums_at, tl.bfloat16), count * D, COLUMNS)
        if ds is not None:
            _fill_with_nan(_peer(addresses, rank, ds_at, tl.float32), count * K, COLUMNS)
    peer, begin, first_column = _item(rank, N, D, TOKENS, COLUMNS)
    first, start, count = _arriving(plan, overflow, peer, N)
    if begin < count:
        i = begin + tl.arange(0, TOKENS)
        inside, c, there = i < count, (first + i).to(tl.int64), (start + i).to(tl.int64)
        most, column = _most_rows(row_CK, c, inside, K, PAD_K), first_column + tl.arange(0, COLUMNS)
        total = _sum_of_rows(y, row_CK, b2, score, offsets_E, c, inside, most, column, K, D, TOKENS, COLUMNS, E)
        to = _peer(addresses, peer, sums_at, tl.bfloat16) + there[:, None] * D + column[None, :]
        # Plain stores to another rank's memory. The arrive that follows in this stream publishes them.
        tl.store(to, total.to(tl.bfloat16), mask=inside[:, None] & (column < D)[None, :])
        if ds is not None:  # noqa: SIM102  decided when the kernel is compiled
            if first_column == 0:
                j = tl.arange(0, PAD_K)[None, :]
                at, mask = c[:, None] * K + j, inside[:, None] & (j < K)
                row = tl.load(row_CK + at, mask=mask, other=-1).to(tl.int64)
                k = tl.load(pair_CK + at, mask=row >= 0, other=0)
                to_ds = _peer(addresses, peer, ds_at, tl.float32) + there[:, None] * K + k
                tl.store(to_ds, tl.load(ds + row, mask=row >= 0), mask=row >= 0)


_push = Kernel(_push_sums_kernel, b2=None, score=None, offsets_E=None, E=None)
_biased_push = Kernel(_push_sums_kernel, enable_fp_fusion=False)


def push_sums(
    workspace: Workspace,
    plan: Tensor,
    y_MD: Tensor,
    ds_M: Tensor | None,
    row_CK: Tensor,
    pair_CK: Tensor,
    b2: Tensor | None = None,
    score_M: Tensor | None = None,
    offsets_E: Tensor | None = None,
) -> None:
    """See :func:`titan_fp8moe.dispatch.symmetric.exchange.push_sums`. Score gradients of pairs that this rank does not
    serve are not written, and not read by the token's rank."""
    ctas, constants = _work(workspace, PUSH, y_MD.shape[1])
    kernel, biases = _push, ()
    if b2 is not None:
        kernel, biases, constants = _biased_push, (b2.contiguous(), score_M, offsets_E), constants | dict(E=b2.shape[0])
    kernel[(ctas,)](
        workspace.addresses, workspace.offset("sums"), workspace.offset("score_gradients"), plan, workspace.overflow,
        y_MD, ds_M, row_CK, pair_CK, workspace.sizes.sent, workspace.rank, *biases, **constants,
    )  # fmt: skip
