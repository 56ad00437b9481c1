"""Where rows go: index maps between tokens, copies and rows in expert order, from the router's choices.

Nothing here asks the device for a count, and no kernel is specialized on how many tokens there are or have arrived.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_fp8moe.kernels.launch import Kernel
from titan_fp8moe.kernels.sizes import cdiv, next_power_of_2
from titan_fp8moe.recipe import TILE

INDEX_BLOCK = 1024  # entries of a map that a program computes
SLOT_ENTRIES = 2048  # tokens times experts, or ranks, whose slots a program orders at a time, of at most 64 tokens
SLOT_PROGRAMS = 256  # at most: each reads what all have counted
SLOT_WARPS = 4


# --- from experts to slots --------------------------------------------------------------------------------------------
#
# A counting sort of all slots by expert, of two launches: programs count the slots of their tokens, then each sums what
# those before it have counted and places its own. Columns of a table are experts, rows are tokens.


@triton.jit
def _chosen(expert_TK, token, k, T, K: tl.constexpr, EXPERTS: tl.constexpr):
    """The k-th expert of each token, -1 where it is none of the EXPERTS."""
    expert = tl.load(expert_TK + token * K + k, mask=token < T, other=-1).to(tl.int32)
    return tl.where(expert < EXPERTS, expert, -1)


@triton.jit
def _hits(expert_TK, token, T, e, K: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, PAD: tl.constexpr):
    """How often each token chose each expert, (BLOCK, PAD) int32."""
    hits = tl.zeros((BLOCK, PAD), tl.int32)
    for k in tl.static_range(K):
        expert = _chosen(expert_TK, token, k, T, K, EXPERTS)
        hits += (expert[:, None] == e[None, :]).to(tl.int32)
    return hits


@triton.jit
def _goes(
    expert_TK, token, T, n, K: tl.constexpr, E: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr,
    PAD_N: tl.constexpr,
):  # fmt: skip
    """Whether each token goes to each rank, (BLOCK, PAD_N) int32; a rank has E of the experts."""
    goes = tl.zeros((BLOCK, PAD_N), tl.int32)
    for k in tl.static_range(K):
        expert = _chosen(expert_TK, token, k, T, K, EXPERTS)
        goes |= ((expert[:, None] // E == n[None, :]) & (expert >= 0)[:, None]).to(tl.int32)
    return goes


@Kernel
@triton.jit(do_not_specialize=["T", "M", "blocks"])
def _count_slots_kernel(
    expert_TK, slots_PE, copies_PN, token_M, score_M, T, M, blocks, K: tl.constexpr, E: tl.constexpr,
    EXPERTS: tl.constexpr, PAD: tl.constexpr, PAD_N: tl.constexpr, BLOCK: tl.constexpr, INDEX_BLOCK: tl.constexpr,
):  # fmt: skip
    """Slots of each expert and, unless ``copies_PN`` is None, copies to each rank, of ``blocks`` times BLOCK tokens.
    Makes padding of all rows, a part each program, unless ``token_M`` is None."""
    program, e, n = tl.program_id(0), tl.arange(0, PAD), tl.arange(0, PAD_N)
    slots, copies = tl.zeros((PAD,), tl.int32), tl.zeros((PAD_N,), tl.int32)
    for block in range(program * blocks, (program + 1) * blocks):
        token = block * BLOCK + tl.arange(0, BLOCK)
        slots += tl.sum(_hits(expert_TK, token, T, e, K, EXPERTS, BLOCK, PAD), axis=0)
        if copies_PN is not None:
            copies += tl.sum(_goes(expert_TK, token, T, n, K, E, EXPERTS, BLOCK, PAD_N), axis=0)
    tl.store(slots_PE + program * PAD + e, slots)
    if copies_PN is not None:
        tl.store(copies_PN + program * PAD_N + n, copies)
    if token_M is not None:
        for first in range(program * INDEX_BLOCK, M, tl.num_programs(0) * INDEX_BLOCK):
            row = first + tl.arange(0, INDEX_BLOCK)
            tl.store(token_M + row, -1, mask=row < M)
            tl.store(score_M + row, 0.0, mask=row < M)


@triton.jit
def _counted(counts, program, programs, PAD: tl.constexpr, ENTRIES: tl.constexpr):
    """What all programs have counted, and what those before this one have, (PAD,) int32."""
    ROWS: tl.constexpr = ENTRIES // PAD if ENTRIES // PAD < 128 else 128  # few rounds, since each waits for its loads
    total, before = tl.zeros((PAD,), tl.int32), tl.zeros((PAD,), tl.int32)
    for first in range(0, programs, ROWS):
        p = (first + tl.arange(0, ROWS))[:, None]
        n = tl.load(counts + p * PAD + tl.arange(0, PAD)[None, :], mask=p < programs, other=0)
        total += tl.sum(n, axis=0)
        before += tl.sum(tl.where(p < program, n, 0), axis=0)
    return total, before


@Kernel
@triton.jit(do_not_specialize=["T", "blocks", "programs"])
def _place_rows_kernel(
    expert_TK, score_TK, slots_PE, offsets, token_M, score_M, row_TK, T, blocks, programs, K: tl.constexpr,
    EXPERTS: tl.constexpr, PAD: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The rows of ``blocks`` times BLOCK tokens, where the counting kernel has left what padding has."""
    program, e = tl.program_id(0), tl.arange(0, PAD)
    total, before = _counted(slots_PE, program, programs, PAD, 8192)
    padded = (total + TILE - 1) // TILE * TILE
    end = tl.cumsum(padded, axis=0)
    tl.store(offsets + e, end, mask=(e < EXPERTS) & (program == 0))

    next_row = end - padded + before
    for block in range(program * blocks, (program + 1) * blocks):
        token = block * BLOCK + tl.arange(0, BLOCK)
        hits = _hits(expert_TK, token, T, e, K, EXPERTS, BLOCK, PAD)
        row_of = next_row[None, :] + tl.cumsum(hits, axis=0) - hits
        next_row += tl.sum(hits, axis=0)
        for k in tl.static_range(K):
            expert = _chosen(expert_TK, token, k, T, K, EXPERTS)
            here = (expert[:, None] == e[None, :]).to(tl.int32)
            row = tl.sum(row_of * here, axis=1)
            row_of += here  # should the token name this expert again
            served, slot = expert >= 0, token * K + k
            tl.store(row_TK + slot, tl.where(served, row, -1), mask=token < T)
            tl.store(token_M + row, token, mask=served)
            tl.store(score_M + row, tl.load(score_TK + slot, mask=served, other=0.0), mask=served)


@Kernel
@triton.jit(do_not_specialize=["T", "blocks", "programs"])
def _place_copies_kernel(
    expert_TK, slots_PE, copies_PN, position_TK, copy_TK, token_C, message, T, blocks, programs, K: tl.constexpr,
    N: tl.constexpr, E: tl.constexpr, EXPERTS: tl.constexpr, PAD: tl.constexpr, PAD_N: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Positions and copies of ``blocks`` times BLOCK tokens; the first program also writes the messages, (N, 2 + E)
    int32."""
    program, e, n = tl.program_id(0), tl.arange(0, PAD), tl.arange(0, PAD_N)
    slots, next_position = _counted(slots_PE, program, programs, PAD, 8192)
    start = tl.cumsum(slots, axis=0) - slots
    next_position += start
    copies, next_copy = _counted(copies_PN, program, programs, PAD_N, 4096)  # with 8192 registers spill in Triton 3.7
    next_copy += tl.cumsum(copies, axis=0) - copies

    of_rank, writes = message + e // E * (2 + E), (e < EXPERTS) & (program == 0)
    tl.store(of_rank + 2 + e % E, slots, mask=writes)
    tl.store(of_rank + 1, start, mask=writes & (e % E == 0))
    tl.store(message + n * (2 + E), copies, mask=(n < N) & (program == 0))

    for block in range(program * blocks, (program + 1) * blocks):
        token = block * BLOCK + tl.arange(0, BLOCK)
        hits = _hits(expert_TK, token, T, e, K, EXPERTS, BLOCK, PAD)
        position_of = next_position[None, :] + tl.cumsum(hits, axis=0) - hits
        next_position += tl.sum(hits, axis=0)
        goes = _goes(expert_TK, token, T, n, K, E, EXPERTS, BLOCK, PAD_N)
        copy_of = next_copy[None, :] + tl.cumsum(goes, axis=0) - goes
        next_copy += tl.sum(goes, axis=0)
        seen = tl.zeros((BLOCK, PAD_N), tl.int32)
        for k in tl.static_range(K):
            expert = _chosen(expert_TK, token, k, T, K, EXPERTS)
            served, slot = expert >= 0, token * K + k
            here = (expert[:, None] == e[None, :]).to(tl.int32)
            position = tl.sum(position_of * here, axis=1)
            position_of += here  # should the token name this expert again
            to = ((expert[:, None] // E == n[None, :]) & served[:, None]).to(tl.int32)
            copy = tl.sum(copy_of * to, axis=1)
            repeated = tl.sum(seen * to, axis=1) > 0
            seen |= to
            tl.store(position_TK + slot, tl.where(served, position, -1), mask=token < T)
            tl.store(copy_TK + slot, tl.where(served, tl.where(repeated, -2 - copy, copy), -1), mask=token < T)
            tl.store(token_C + copy, token, mask=served & (repeated == 0))


def _count_slots(
    expert_TK: Tensor,
    num_experts: int,
    copies: int | None = None,
    rows: tuple[Tensor | None, Tensor | None] = (None, None),
) -> tuple[Tensor, Tensor | None, tuple[int, int], dict[str, int]]:
    """Launches the counting kernel: of copies, if a number of ranks is given; ``rows`` are token_M and score_M.

    Returns:
        What programs have counted, slots (P, PAD) and copies (P, PAD_N); how many blocks of tokens each has, and P; the
        constants that the kernel which places the slots must share.
    """
    T, K = expert_TK.shape
    pad, pad_n = next_power_of_2(num_experts), next_power_of_2(copies or 1)
    block = max(min(SLOT_ENTRIES // max(pad, pad_n), 64), 1)
    all_blocks = max(cdiv(T, block), 1)
    blocks = cdiv(all_blocks, SLOT_PROGRAMS)
    programs = cdiv(all_blocks, blocks)
    slots_PE = torch.empty(programs, pad, dtype=torch.int32, device=expert_TK.device)
    copies_PN = None
    if copies is not None:
        copies_PN = torch.empty(programs, pad_n, dtype=torch.int32, device=expert_TK.device)
    constants = dict(K=K, EXPERTS=num_experts, PAD=pad, BLOCK=block, num_warps=SLOT_WARPS)
    _count_slots_kernel[(programs,)](
        expert_TK, slots_PE, copies_PN, *rows, T, 0 if rows[0] is None else rows[0].shape[0], blocks,
        E=num_experts // (copies or 1), PAD_N=pad_n, INDEX_BLOCK=INDEX_BLOCK, **constants,
    )  # fmt: skip
    return slots_PE, copies_PN, (blocks, programs), constants


def expert_layout(
    expert_TK: Tensor, score_TK: Tensor, num_experts: int, capacity: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Index maps between tokens and expert order; see :func:`titan_fp8moe.recipe.expert_layout`.

    Args:
        expert_TK: (T, K) int32 or int64; score_TK: (T, K) fp32.

    Returns:
        offsets_E (num_experts,) int32, token_M (capacity,) int32, score_M (capacity,) fp32, row_TK (T, K) int32.
    """
    (T, K), device = expert_TK.shape, expert_TK.device
    expert_TK = expert_TK.contiguous()
    offsets_E = torch.empty(num_experts, dtype=torch.int32, device=device)
    token_M = torch.empty(capacity, dtype=torch.int32, device=device)
    score_M = torch.empty(capacity, dtype=torch.float32, device=device)
    row_TK = torch.empty(T, K, dtype=torch.int32, device=device)
    slots_PE, _, (blocks, programs), constants = _count_slots(expert_TK, num_experts, rows=(token_M, score_M))
    _place_rows_kernel[(programs,)](
        expert_TK, score_TK.contiguous(), slots_PE, offsets_E, token_M, score_M, row_TK, T, blocks, programs, TILE=TILE,
        **constants,
    )  # fmt: skip
    return offsets_E, token_M, score_M, row_TK


# --- token exchange ---------------------------------------------------------------------------------------------------


def dispatch_layout(expert_TK: Tensor, num_ranks: int, num_local: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What this rank sends to which; see :func:`titan_fp8moe.recipe.dispatch_layout`.

    Args:
        expert_TK: (T, K) int32 or int64.

    Returns:
        position_TK, copy_TK (T, K) int32; token_C (T * min(K, num_ranks),) int32, unwritten past the last copy;
        message_N (num_ranks, 2 + num_local) int32.
    """
    (T, K), device = expert_TK.shape, expert_TK.device
    expert_TK = expert_TK.contiguous()
    slots_PE, copies_PN, (blocks, programs), constants = _count_slots(expert_TK, num_ranks * num_local, num_ranks)
    position_TK, copy_TK = (torch.empty(T, K, dtype=torch.int32, device=device) for _ in range(2))
    token_C = torch.empty(T * min(K, num_ranks), dtype=torch.int32, device=device)
    message_N = torch.empty(num_ranks, 2 + num_local, dtype=torch.int32, device=device)
    _place_copies_kernel[(programs,)](
        expert_TK, slots_PE, copies_PN, position_TK, copy_TK, token_C, message_N, T, blocks, programs, N=num_ranks,
        E=num_local, PAD_N=next_power_of_2(num_ranks), **constants,
    )  # fmt: skip
    return position_TK, copy_TK, token_C, message_N


@Kernel
@triton.jit
def _runs_kernel(
    received, offsets, start, shift, count, N: tl.constexpr, E: tl.constexpr, PAD_N: tl.constexpr,
    PAD_E: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """A table of the N * E runs, a rank's rows for an expert being one, and each expert's end, in one program.

    received: (N, 2 + E) int32, the messages; offsets: (E,) int32. start, shift, count: (E, N) int32, so that starts
    ascend: where a run begins in expert order, arrival position minus expert position of its rows, and their number.
    """
    s, e = tl.arange(0, PAD_N), tl.arange(0, PAD_E)
    mask = (s < N)[:, None] & (e < E)[None, :]
    n = tl.load(received + s[:, None] * (2 + E) + 2 + e[None, :], mask=mask, other=0)
    group = tl.sum(n, axis=0)
    padded = (group + TILE - 1) // TILE * TILE
    end = tl.cumsum(padded, axis=0)
    tl.store(offsets + e, end, mask=e < E)
    begin = (end - padded)[None, :] + tl.cumsum(n, axis=0) - n
    source = tl.sum(n, axis=1)
    arrival = (tl.cumsum(source, axis=0) - source)[:, None] + tl.cumsum(n, axis=1) - n
    at = e[None, :] * N + s[:, None]
    tl.store(start + at, begin, mask=mask)
    tl.store(shift + at, arrival - begin, mask=mask)
    tl.store(count + at, n, mask=mask)


@Kernel
@triton.jit
def _layout_kernel(
    start, shift, count, score, slot, token_M, score_M, row_TK, row_R, M, top_k: tl.constexpr, RUNS: tl.constexpr,
    STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """token_M, score_M, row_TK and row_R for BLOCK rows in expert order."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    # The last run that starts at or before the row: of runs with equal starts all but the last are empty. A row past
    # the run's end is padding.
    low = tl.zeros((BLOCK,), tl.int32)
    high = tl.full((BLOCK,), RUNS, tl.int32)
    for _ in range(STEPS):
        middle = (low + high) // 2
        before = tl.load(start + middle) <= row
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    real = row - tl.load(start + low) < tl.load(count + low)
    arrived = (row + tl.load(shift + low)).to(tl.int64)
    s = tl.load(slot + arrived, mask=real, other=0)
    tl.store(token_M + row, tl.where(real, s // top_k, -1), mask=row < M)
    tl.store(score_M + row, tl.load(score + arrived, mask=real, other=0.0), mask=row < M)
    tl.store(row_TK + s, row, mask=real)
    tl.store(row_R + arrived, row, mask=real)


@Kernel
@triton.jit(do_not_specialize=["C"])
def _arrivals_kernel(
    received, position_CK, score_CK, stride, slot_R, score_R, row_CK, C, K: tl.constexpr, N: tl.constexpr,
    E: tl.constexpr, PAD_N: tl.constexpr, PAD_E: tl.constexpr, PAD_K: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Slots and scores by arrival, for BLOCK copies; row_CK gets -1 for slots that are not served here."""
    n, e = tl.arange(0, PAD_N), tl.arange(0, PAD_E)
    mask = (n < N)[:, None] & (e < E)[None, :]
    slots = tl.sum(tl.load(received + n[:, None] * (2 + E) + 2 + e[None, :], mask=mask, other=0), axis=1)
    copies_end = tl.cumsum(tl.load(received + n * (2 + E), mask=n < N, other=0), axis=0)
    shift = tl.cumsum(slots, axis=0) - slots - tl.load(received + n * (2 + E) + 1, mask=n < N, other=0)

    copy = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    source = tl.sum((copies_end[None, :] <= copy[:, None]).to(tl.int32), axis=1)
    copy_shift = tl.sum(tl.where(source[:, None] == n[None, :], shift[None, :], 0), axis=1)
    k = tl.arange(0, PAD_K)
    inside = (copy < C)[:, None] & (k < K)[None, :]
    at = copy.to(tl.int64)[:, None] * stride + k[None, :]
    position = tl.load(position_CK + at, mask=inside, other=-1)
    served = position >= 0
    arrived = position + copy_shift[:, None]
    slot = copy[:, None] * K + k[None, :]
    tl.store(slot_R + arrived, slot, mask=served)
    tl.store(score_R + arrived, tl.load(score_CK + at, mask=served, other=0.0), mask=served)
    tl.store(row_CK + slot, -1, mask=inside & (served == 0))


def arrival_layout(
    received_N: Tensor, position_CK: Tensor, score_CK: Tensor, num_rows: int, capacity: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """:func:`expert_layout` of the copies that arrived; see :func:`titan_fp8moe.recipe.arrival_layout`.

    Args:
        received_N: (N, 2 + E) int32; position_CK: (C, top_k) int32 and score_CK: (C, top_k) fp32, unit stride along
            top_k and the same stride between rows (views of a payload).

    Returns:
        offsets_E (E,) int32, token_M (capacity,) int32, score_M (capacity,) fp32, row_CK (C, top_k) int32, row_R
        (num_rows,) int32.
    """
    assert received_N.is_contiguous() and position_CK.stride() == score_CK.stride()
    (C, K), N, E, device = position_CK.shape, received_N.shape[0], received_N.shape[1] - 2, received_N.device
    pads = dict(PAD_N=next_power_of_2(N), PAD_E=next_power_of_2(E))
    # Not two parts of one tensor: how the second is aligned would depend on the number of rows, and compile anew.
    slot_R, row_R = (torch.empty(num_rows, dtype=torch.int32, device=device) for _ in range(2))
    score_R = torch.empty(num_rows, dtype=torch.float32, device=device)
    row_CK = torch.empty(C, K, dtype=torch.int32, device=device)
    if C:
        block = INDEX_BLOCK // 8
        _arrivals_kernel[(cdiv(C, block),)](
            received_N, position_CK, score_CK, position_CK.stride(0), slot_R, score_R, row_CK, C, K=K, N=N, E=E, **pads,
            PAD_K=next_power_of_2(K), BLOCK=block,
        )  # fmt: skip
    offsets_E = torch.empty(E, dtype=torch.int32, device=device)
    start, shift, count = torch.empty(3, E * N, dtype=torch.int32, device=device).unbind()
    _runs_kernel[(1,)](received_N, offsets_E, start, shift, count, N=N, E=E, **pads, TILE=TILE, num_warps=8)
    token_M = torch.empty(capacity, dtype=torch.int32, device=device)
    score_M = torch.empty(capacity, dtype=torch.float32, device=device)
    _layout_kernel[(cdiv(capacity, INDEX_BLOCK),)](
        start, shift, count, score_R, slot_R, token_M, score_M, row_CK, row_R, capacity, top_k=K, RUNS=E * N,
        STEPS=(E * N).bit_length(), BLOCK=INDEX_BLOCK, num_warps=4,
    )  # fmt: skip
    return offsets_E, token_M, score_M, row_CK, row_R
