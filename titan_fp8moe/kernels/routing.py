"""Routing: which row each routed pair gets, and which tokens go to which rank, from the router's choices.

Both are stable counting sorts in two launches. In the first, each CTA counts the pairs (or dispatched tokens) of its
tokens. In the second, each CTA sums the counts of the CTAs before it and places its own.

There is no host-device sync, and no kernel is specialized on the number of tokens.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_fp8moe.kernels.launch import Kernel
from titan_fp8moe.kernels.sizes import cdiv, next_power_of_2
from titan_fp8moe.recipe import ROW_ALIGN, larger

MAX_CTAS = 256  # each CTA reads the counts of all
MAX_BLOCK = 64  # tokens that a CTA handles at a time
BLOCK_ENTRIES = 2048  # at most, of such a block's (tokens, experts) table
FILL_BLOCK = 1024  # rows that a CTA marks as padding at a time
COUNT_BLOCK = 8  # experts whose pairs a CTA adds up at a time
NUM_WARPS = 4


@triton.jit
def expert_of(offsets_E, row, E: tl.constexpr):
    """The expert whose group holds each row: how many groups end at or before it. Binary search; ``row``: of any shape,
    before the last end."""
    expert = row * 0
    for i in tl.static_range(16):
        if (1 << (15 - i)) < E:
            last = expert + (1 << (15 - i)) - 1
            end = tl.load(offsets_E + last, mask=last < E, other=2147483647)
            expert += tl.where(end <= row, 1 << (15 - i), 0)
    return expert


# --- tables of a block of tokens --------------------------------------------------------------------------------------


@triton.jit
def _load_ids(ids, ids_stride, token, k, T, EXPERTS: tl.constexpr):
    """Each token's k-th expert, int32; -1 past the last token and for an id that is no expert's."""
    expert = tl.load(ids + token.to(tl.int64) * ids_stride + k, mask=token < T, other=-1).to(tl.int32)
    return tl.where((expert >= 0) & (expert < EXPERTS), expert, -1)


@triton.jit
def _assert_experts(ids, ids_stride, token, T, K: tl.constexpr, EXPERTS: tl.constexpr):
    valid = token >= 0
    for k in tl.static_range(K):
        expert = tl.load(ids + token.to(tl.int64) * ids_stride + k, mask=token < T, other=-1)
        valid &= (expert >= -1) & (expert < EXPERTS)
    tl.device_assert(valid, "topk_ids: an id is neither -1 nor one of the experts'")


@triton.jit
def _expert_hits(
    ids, ids_stride, token, T, e, K: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, PAD: tl.constexpr
):
    """How many pairs each token has with each expert, (BLOCK, PAD) int32."""
    hits = tl.zeros((BLOCK, PAD), tl.int32)
    for k in tl.static_range(K):
        expert = _load_ids(ids, ids_stride, token, k, T, EXPERTS)
        hits += (expert[:, None] == e[None, :]).to(tl.int32)
    return hits


@triton.jit
def _rank_mask(expert, n, E: tl.constexpr):
    """Which rank holds each expert, (BLOCK, PAD_N) int32; a rank holds E of them, and none holds -1."""
    return ((expert[:, None] // E == n[None, :]) & (expert >= 0)[:, None]).to(tl.int32)


@triton.jit
def _is_sent(
    ids, ids_stride, token, T, n, K: tl.constexpr, E: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr,
    PAD_N: tl.constexpr,
):  # fmt: skip
    """Whether each token goes to each rank, (BLOCK, PAD_N) int32."""
    sent = tl.zeros((BLOCK, PAD_N), tl.int32)
    for k in tl.static_range(K):
        sent |= _rank_mask(_load_ids(ids, ids_stride, token, k, T, EXPERTS), n, E)
    return sent


# --- first launch: count ----------------------------------------------------------------------------------------------


@triton.jit
def mark_padding(token_M, score_M, M, FILL_BLOCK: tl.constexpr):
    """The CTAs together mark all rows as padding. The second launch writes the pairs' rows over these: kernels of a
    stream run one after the other."""
    for first in range(tl.program_id(0) * FILL_BLOCK, M, tl.num_programs(0) * FILL_BLOCK):
        row = first + tl.arange(0, FILL_BLOCK)
        tl.store(token_M + row, -1, mask=row < M)
        tl.store(score_M + row, 0.0, mask=row < M)


@Kernel
@triton.jit(do_not_specialize=["ids_stride", "T", "M", "blocks"])
def _count_kernel(
    ids, ids_stride, pair_counts, token_counts, token_M, score_M, T, M, blocks, K: tl.constexpr, E: tl.constexpr,
    EXPERTS: tl.constexpr, PAD: tl.constexpr, PAD_N: tl.constexpr, BLOCK: tl.constexpr, FILL_BLOCK: tl.constexpr,
    CHECK: tl.constexpr,
):  # fmt: skip
    """Counts the pairs of each expert and the tokens dispatched to each rank, among ``blocks * BLOCK`` tokens.

    Without ``token_counts`` it counts pairs only. With ``token_M`` the CTAs together mark all rows as padding. With
    ``CHECK`` it asserts that each id is an expert's or -1.
    """
    cta, e, n = tl.program_id(0), tl.arange(0, PAD), tl.arange(0, PAD_N)
    pairs, dispatched = tl.zeros((PAD,), tl.int32), tl.zeros((PAD_N,), tl.int32)
    for block in range(cta * blocks, (cta + 1) * blocks):
        token = block * BLOCK + tl.arange(0, BLOCK)
        if CHECK:
            _assert_experts(ids, ids_stride, token, T, K, EXPERTS)
        pairs += tl.sum(_expert_hits(ids, ids_stride, token, T, e, K, EXPERTS, BLOCK, PAD), axis=0)
        if token_counts is not None:
            dispatched += tl.sum(_is_sent(ids, ids_stride, token, T, n, K, E, EXPERTS, BLOCK, PAD_N), axis=0)
    tl.store(pair_counts + cta * PAD + e, pairs)
    if token_counts is not None:
        tl.store(token_counts + cta * PAD_N + n, dispatched)
    if token_M is not None:
        mark_padding(token_M, score_M, M, FILL_BLOCK)


@triton.jit
def _sum_counts(counts, cta, ctas, PAD: tl.constexpr):
    """Sums (ctas, PAD) counts over all CTAs, and over those before this one; (PAD,) int32 each."""
    ROWS: tl.constexpr = 8192 // PAD if PAD > 64 else 128  # few iterations, since each waits for its loads
    total, before = tl.zeros((PAD,), tl.int32), tl.zeros((PAD,), tl.int32)
    for first in range(0, ctas, ROWS):
        row = (first + tl.arange(0, ROWS))[:, None]
        count = tl.load(counts + row * PAD + tl.arange(0, PAD)[None, :], mask=row < ctas, other=0)
        total += tl.sum(count, axis=0)
        before += tl.sum(tl.where(row < cta, count, 0), axis=0)
    return total, before


def blocks_of_tokens(T: int, K: int, num_experts: int) -> tuple[int, int, dict[str, int]]:
    """How T tokens are spread: blocks for each CTA, CTAs, and the constants that both launches must share."""
    pad = next_power_of_2(num_experts)
    block = max(min(BLOCK_ENTRIES // pad, MAX_BLOCK), 1)
    all_blocks = larger(cdiv(T, block), 1)
    blocks = cdiv(all_blocks, MAX_CTAS)
    return blocks, cdiv(all_blocks, blocks), dict(K=K, EXPERTS=num_experts, PAD=pad, BLOCK=block, num_warps=NUM_WARPS)


def _counting(check_ids: bool) -> dict[str, int]:
    """Constants of the first launch only. Triton compiles assertions with ``debug``; the other checks that this option
    turns on, of integers that overflow, stay off."""
    return dict(FILL_BLOCK=FILL_BLOCK, CHECK=check_ids, debug=check_ids, sanitize_overflow=False)


def row_stride(name: str, x_TK: Tensor) -> int:
    """Elements between rows of a (T, K) tensor whose rows may be strided.

    Raises:
        ValueError: unless the elements of a row are contiguous.
    """
    strides = x_TK.stride()
    if strides[1] != 1 and x_TK.shape[1] > 1:
        raise ValueError(f"{name} needs unit stride along its rows, got strides {strides}; use {name}.contiguous()")
    return strides[0]


# --- expert order -----------------------------------------------------------------------------------------------------


@Kernel
@triton.jit(do_not_specialize=["ids_stride", "scores_stride", "T", "blocks", "ctas"])
def _place_rows_kernel(
    ids, ids_stride, scores, scores_stride, pair_counts, offsets_E, token_M, score_M, row_TK, T, blocks, ctas,
    K: tl.constexpr, EXPERTS: tl.constexpr, PAD: tl.constexpr, BLOCK: tl.constexpr, ROW_ALIGN: tl.constexpr,
):  # fmt: skip
    """Writes the row of each pair of ``blocks * BLOCK`` tokens over the padding that the first launch left there."""
    cta, e = tl.program_id(0), tl.arange(0, PAD)
    total, before = _sum_counts(pair_counts, cta, ctas, PAD)
    # Every CTA computes all groups' ends from the same counts, so none waits for another.
    padded = tl.cdiv(total, ROW_ALIGN) * ROW_ALIGN
    end = tl.cumsum(padded, axis=0)
    tl.store(offsets_E + e, end, mask=(e < EXPERTS) & (cta == 0))

    # The group's first row, plus the expert's pairs in the CTAs before this one.
    next_row = end - padded + before
    for block in range(cta * blocks, (cta + 1) * blocks):
        token = block * BLOCK + tl.arange(0, BLOCK)
        hits = _expert_hits(ids, ids_stride, token, T, e, K, EXPERTS, BLOCK, PAD)
        # An exclusive sum: the row of each token's first pair with each expert, in the order of tokens.
        row_of = next_row[None, :] + tl.cumsum(hits, axis=0) - hits
        next_row += tl.sum(hits, axis=0)
        for k in tl.static_range(K):
            expert = _load_ids(ids, ids_stride, token, k, T, EXPERTS)
            here = (expert[:, None] == e[None, :]).to(tl.int32)
            row = tl.sum(row_of * here, axis=1)  # picks one entry; 0 without an expert, which `served` masks
            row_of += here  # for a token that chose this expert again
            served = expert >= 0
            score = tl.load(scores + token.to(tl.int64) * scores_stride + k, mask=served, other=0.0)
            tl.store(row_TK + token * K + k, tl.where(served, row, -1), mask=token < T)
            tl.store(token_M + row, token, mask=served)
            tl.store(score_M + row, score, mask=served)


def expert_routing(topk_ids_TK, topk_scores_TK, num_experts, capacity, check_ids=False):
    """Kernels of :func:`titan_fp8moe.ops.expert_routing`."""
    (T, K), device = topk_ids_TK.shape, topk_ids_TK.device
    ids_stride = row_stride("topk_ids_TK", topk_ids_TK)
    blocks, ctas, constants = spread = blocks_of_tokens(T, K, num_experts)
    pair_counts = torch.empty(ctas, constants["PAD"], dtype=torch.int32, device=device)
    token_M = torch.empty(capacity, dtype=torch.int32, device=device)
    score_M = torch.empty(capacity, dtype=torch.float32, device=device)
    _count_kernel[(ctas,)](
        topk_ids_TK, ids_stride, pair_counts, None, token_M, score_M, T, capacity, blocks, E=num_experts, PAD_N=1,
        **_counting(check_ids), **constants,
    )  # fmt: skip
    offsets_E, row_TK = place_rows(topk_ids_TK, topk_scores_TK, pair_counts, token_M, score_M, spread)
    return offsets_E, token_M, score_M, row_TK


def place_rows(
    topk_ids_TK: Tensor, topk_scores_TK: Tensor, pair_counts: Tensor, token_M: Tensor, score_M: Tensor, spread: tuple
) -> tuple[Tensor, Tensor]:
    """The second launch of :func:`expert_routing`; offsets_E and row_TK.

    Args:
        pair_counts: (CTAs, E rounded up to a power of two) int32, how many pairs of each CTA's tokens each expert has.
        token_M, score_M: marked as padding; written here.
        spread: of :func:`blocks_of_tokens`, as in the first launch.
    """
    (T, K), device = topk_ids_TK.shape, topk_ids_TK.device
    strides = row_stride("topk_ids_TK", topk_ids_TK), row_stride("topk_scores_TK", topk_scores_TK)
    blocks, ctas, constants = spread
    offsets_E = torch.empty(constants["EXPERTS"], dtype=torch.int32, device=device)
    row_TK = torch.empty(T, K, dtype=torch.int32, device=device)
    _place_rows_kernel[(ctas,)](
        topk_ids_TK, strides[0], topk_scores_TK, strides[1], pair_counts, offsets_E, token_M, score_M, row_TK, T,
        blocks, ctas, ROW_ALIGN=ROW_ALIGN, **constants,
    )  # fmt: skip
    return offsets_E, row_TK


# --- token exchange ---------------------------------------------------------------------------------------------------


@Kernel
@triton.jit(do_not_specialize=["ids_stride", "T", "blocks", "ctas", "signature"])
def _place_dispatched_kernel(
    ids, ids_stride, pair_counts, token_counts, sent_TK, token_C, counts_N, T, blocks, ctas, signature,
    K: tl.constexpr, N: tl.constexpr, E: tl.constexpr, EXPERTS: tl.constexpr, PAD: tl.constexpr, PAD_N: tl.constexpr,
    BLOCK: tl.constexpr, MAX_CTAS: tl.constexpr, COUNT_BLOCK: tl.constexpr,
):  # fmt: skip
    """Numbers the dispatched tokens of ``blocks * BLOCK`` tokens. The CTAs together write counts_N (N, 3 + E)."""
    cta, n = tl.program_id(0), tl.arange(0, PAD_N)
    total, before = _sum_counts(token_counts, cta, ctas, PAD_N)
    first_cta = (n < N) & (cta == 0)
    tl.store(counts_N + n * (3 + E), total, mask=first_cta)
    tl.store(counts_N + n * (3 + E) + E + 1, T * K, mask=first_cta)
    tl.store(counts_N + n * (3 + E) + E + 2, signature, mask=first_cta)
    for first in range(cta * COUNT_BLOCK, EXPERTS, ctas * COUNT_BLOCK):
        row, e = tl.arange(0, MAX_CTAS)[:, None], first + tl.arange(0, COUNT_BLOCK)
        pairs = tl.load(pair_counts + row * PAD + e[None, :], mask=(row < ctas) & (e < EXPERTS)[None, :], other=0)
        # Entry (e // E, 1 + e % E) of a matrix of 3 + E columns.
        tl.store(counts_N + e + 3 * (e // E) + 1, tl.sum(pairs, axis=0), mask=e < EXPERTS)

    # Dispatched tokens are numbered by rank, then by token.
    next_c = tl.cumsum(total, axis=0) - total + before
    for block in range(cta * blocks, (cta + 1) * blocks):
        token = block * BLOCK + tl.arange(0, BLOCK)
        is_sent = _is_sent(ids, ids_stride, token, T, n, K, E, EXPERTS, BLOCK, PAD_N)
        sent_to = next_c[None, :] + tl.cumsum(is_sent, axis=0) - is_sent
        next_c += tl.sum(is_sent, axis=0)
        for k in tl.static_range(K):
            expert = _load_ids(ids, ids_stride, token, k, T, EXPERTS)
            to = _rank_mask(expert, n, E)
            served, sent = expert >= 0, tl.sum(sent_to * to, axis=1)
            sent_to = tl.where((to > 0) & (sent_to >= 0), -2 - sent_to, sent_to)  # for further pairs on that rank
            tl.store(sent_TK + token * K + k, tl.where(served, sent, -1), mask=token < T)
            tl.store(token_C + sent, token, mask=served & (sent >= 0))  # once, by the first pair on that rank


def dispatch_routing(topk_ids_TK, num_ranks, num_local, signature=0, check_ids=False):
    """Kernels of :func:`titan_fp8moe.ops.dispatch_routing`."""
    (T, K), device = topk_ids_TK.shape, topk_ids_TK.device
    ids_stride = row_stride("topk_ids_TK", topk_ids_TK)
    blocks, ctas, constants = blocks_of_tokens(T, K, num_ranks * num_local)
    ranks = dict(E=num_local, PAD_N=next_power_of_2(num_ranks))
    pair_counts = torch.empty(ctas, constants["PAD"], dtype=torch.int32, device=device)
    token_counts = torch.empty(ctas, ranks["PAD_N"], dtype=torch.int32, device=device)
    sent_TK = torch.empty(T, K, dtype=torch.int32, device=device)
    token_C = torch.empty(T * min(K, num_ranks), dtype=torch.int32, device=device)
    counts_N = torch.empty(num_ranks, 3 + num_local, dtype=torch.int32, device=device)
    _count_kernel[(ctas,)](
        topk_ids_TK, ids_stride, pair_counts, token_counts, None, None, T, 0, blocks, **_counting(check_ids),
        **ranks, **constants,
    )  # fmt: skip
    _place_dispatched_kernel[(ctas,)](
        topk_ids_TK, ids_stride, pair_counts, token_counts, sent_TK, token_C, counts_N, T, blocks, ctas, signature,
        N=num_ranks, MAX_CTAS=MAX_CTAS, COUNT_BLOCK=COUNT_BLOCK, **ranks, **constants,
    )  # fmt: skip
    return sent_TK, token_C, counts_N
