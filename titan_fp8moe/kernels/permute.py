"""Moving rows: into the dispatch payload, into expert order, and back. Pure copies, except the sum of a token's rows.

Nothing here asks the device for a count: launches are sized by shapes, and programs past ``offsets_E[-1]`` return.
Numbers of tokens and of arrived rows change from step to step, so no kernel is specialized on them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_fp8moe.recipe import E8M0, TILE

ROWS = 32  # rows a copying program moves: 32 column-major scale bytes are one sector, and 32 divides 128
COLUMNS = 1024  # bytes of each row it moves, so 32 KiB in flight
WARPS = 8
LAYOUT_ROWS = 1024
SUM_COLUMNS = 1024
SUM_WARPS = 4


# --- expert order -----------------------------------------------------------------------------------------------------


@triton.jit
def _runs_kernel(
    counts, offsets, start, shift, count, S: tl.constexpr, E: tl.constexpr, PAD_S: tl.constexpr, PAD_E: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """A table of the S * E runs, and each expert's end, in one program.

    counts: (S, E) int32; offsets: (E,) int32. start, shift, count: (E, S) int32, so that starts ascend: where a run
    begins in expert order, arrival position minus expert position of its rows, and their number.
    """
    s, e = tl.arange(0, PAD_S), tl.arange(0, PAD_E)
    mask = (s < S)[:, None] & (e < E)[None, :]
    n = tl.load(counts + s[:, None] * E + e[None, :], mask=mask, other=0)
    group = tl.sum(n, axis=0)
    padded = (group + TILE - 1) // TILE * TILE
    end = tl.cumsum(padded, axis=0)
    tl.store(offsets + e, end, mask=e < E)
    begin = (end - padded)[None, :] + tl.cumsum(n, axis=0) - n
    source = tl.sum(n, axis=1)
    arrival = (tl.cumsum(source, axis=0) - source)[:, None] + tl.cumsum(n, axis=1) - n
    at = e[None, :] * S + s[:, None]
    tl.store(start + at, begin, mask=mask)
    tl.store(shift + at, arrival - begin, mask=mask)
    tl.store(count + at, n, mask=mask)


@triton.jit
def _layout_kernel(
    start, shift, count, score, score_stride, slot, token_M, score_M, row_S, M, top_k: tl.constexpr, RUNS: tl.constexpr,
    STEPS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """token_M, score_M and row_S for ROWS rows in expert order. ``slot`` is None where row r arrives from slot r."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    # The last run that starts at or before the row: of runs with equal starts all but the last are empty. A row past
    # the run's end is padding.
    low = tl.zeros((ROWS,), tl.int32)
    high = tl.full((ROWS,), RUNS, tl.int32)
    for _ in range(STEPS):
        middle = (low + high) // 2
        before = tl.load(start + middle) <= row
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle)
    real = row - tl.load(start + low) < tl.load(count + low)
    arrived = (row + tl.load(shift + low)).to(tl.int64)
    s = arrived if slot is None else tl.load(slot + arrived, mask=real, other=0)
    tl.store(token_M + row, tl.where(real, s // top_k, -1), mask=row < M)
    tl.store(score_M + row, tl.load(score + arrived * score_stride, mask=real, other=0.0), mask=row < M)
    tl.store(row_S + s, row, mask=real)


def expert_layout(
    counts_SE: Tensor, score_R: Tensor, slot_R: Tensor | None, num_slots: int, top_k: int, capacity: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Index maps between arrival and expert order; see :func:`titan_fp8moe.recipe.expert_layout`.

    Args:
        counts_SE: (S, E) int32, rows that arrived from each source for each expert.
        score_R: (R,) fp32, any stride (a view of a payload); slot_R: (R,) int32 or None.

    Returns:
        offsets_E (E,) int32, token_M (capacity,) int32, score_M (capacity,) fp32, row_S (num_slots,) int32.
    """
    (S, E), device = counts_SE.shape, counts_SE.device
    offsets_E = torch.empty(E, dtype=torch.int32, device=device)
    start, shift, count = torch.empty(3, E * S, dtype=torch.int32, device=device).unbind()
    _runs_kernel[(1,)](
        counts_SE.contiguous(), offsets_E, start, shift, count, S=S, E=E,
        PAD_S=triton.next_power_of_2(S), PAD_E=triton.next_power_of_2(E), TILE=TILE, num_warps=8,
    )  # fmt: skip
    token_M = torch.empty(capacity, dtype=torch.int32, device=device)
    score_M = torch.empty(capacity, dtype=torch.float32, device=device)
    row_S = torch.full((num_slots,), -1, dtype=torch.int32, device=device)
    _layout_kernel[(triton.cdiv(capacity, LAYOUT_ROWS),)](
        start, shift, count, score_R, score_R.stride(0), slot_R, token_M, score_M, row_S, capacity, top_k=top_k,
        RUNS=E * S, STEPS=(E * S).bit_length(), ROWS=LAYOUT_ROWS, num_warps=4,
    )  # fmt: skip
    return offsets_E, token_M, score_M, row_S


# --- copies of rows ---------------------------------------------------------------------------------------------------


@triton.jit
def _copy_rows(source, source_row, source_stride, real, out, out_row, out_stride, inside, first, WIDTH: tl.constexpr,
               COLUMNS: tl.constexpr):  # fmt: skip
    """Bytes first..first + COLUMNS of rows ``source_row`` to rows ``out_row``; zeros where not ``real``.

    Rows are int64: their byte offsets pass 2**31. A token's row is read once for each of its experts, so the cache is
    told to keep what is read and let go of what is written.
    """
    column = first + tl.arange(0, COLUMNS)
    in_row = (column < WIDTH)[None, :]
    at = source_row[:, None] * source_stride + column[None, :]
    values = tl.load(source + at, mask=real[:, None] & in_row, other=0, eviction_policy="evict_last")
    to = out + out_row[:, None] * out_stride + column[None, :]
    tl.store(to, values, mask=inside[:, None] & in_row, eviction_policy="evict_first")


@triton.jit
def _permute_kernel(
    q, q_stride, scale, scale_stride, token_M, last_offset, out, out_scale, M, D: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Program (column block, row block). out: (M, D) bytes; out_scale: (D // 128, M) bytes; padding gets 0 and 1."""
    first_row, first = tl.program_id(1) * ROWS, tl.program_id(0) * COLUMNS
    if first_row >= tl.load(last_offset):
        return
    row = first_row + tl.arange(0, ROWS)
    token = tl.load(token_M + row).to(tl.int64)
    real = token >= 0
    _copy_rows(q, token, q_stride, real, out, row.to(tl.int64), D, row < M, first, D, COLUMNS)

    tile = first // TILE + tl.arange(0, COLUMNS // TILE)
    in_row = (tile < D // TILE)[None, :]
    at = token[:, None] * scale_stride + tile[None, :]
    byte = tl.load(scale + at, mask=real[:, None] & in_row, other=1)
    tl.store(out_scale + tile[None, :] * M + row[:, None], byte, mask=in_row)


def permute_rows(q_TD: Tensor, scale: Tensor, token_M: Tensor, offsets_E: Tensor) -> tuple[Tensor, Tensor]:
    """Rows and scales in expert order; see :func:`titan_fp8moe.recipe.permute_rows`.

    Args:
        q_TD: (T, D) e4m3 and scale (T, D // 128) e8m0, unit stride along rows, any stride between them.
        token_M: (M,) int32, -1 for padding; offsets_E: (E,) int32.

    Returns:
        (M, D) e4m3, (M, D // 128) e8m0 column-major; rows at and past ``offsets_E[-1]`` are left unwritten.
    """
    M, D = token_M.shape[0], q_TD.shape[1]
    out = torch.empty(M, D, dtype=torch.uint8, device=q_TD.device)
    out_scale = torch.empty(D // TILE, M, dtype=torch.uint8, device=q_TD.device)
    _permute_kernel[(triton.cdiv(D, COLUMNS), M // ROWS)](
        q_TD.view(torch.uint8), q_TD.stride(0), scale.view(torch.uint8), scale.stride(0), token_M, offsets_E[-1:],
        out, out_scale, M, D=D, ROWS=ROWS, COLUMNS=COLUMNS, TILE=TILE, num_warps=WARPS,
    )  # fmt: skip
    return out.view(q_TD.dtype), out_scale.t().view(E8M0)


@triton.jit
def _fp32_byte(value, column):
    """Byte ``column`` (0..3, little-endian) of fp32 ``value``; zero for other columns."""
    byte = value.to(tl.int32, bitcast=True) >> (8 * (column & 3))
    return tl.where(column < 4, byte & 0xFF, 0)


@triton.jit(do_not_specialize=["R"])
def _pack_dispatch_kernel(
    q, scale, score, slot_R, payload, R, top_k: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    TAIL: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Program (column block, row block); the first column block also writes what follows the D values of a row:
    4 bytes of score, D // 128 of scales, zeros. ``score`` is None for gradients."""
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < R
    token = (tl.load(slot_R + row, mask=inside, other=0) // top_k).to(tl.int64)
    _copy_rows(q, token, D, inside, payload, row, WIDTH, inside, tl.program_id(0) * COLUMNS, D, COLUMNS)

    if tl.program_id(0) == 0:
        tail = tl.arange(0, TAIL)[None, :]
        tile = tail - 4
        in_row = (tile >= 0) & (tile < D // TILE)
        at = token[:, None] * (D // TILE) + tile
        byte = tl.load(scale + at, mask=inside[:, None] & in_row, other=0).to(tl.int32)
        if score is not None:
            byte += _fp32_byte(tl.load(score + row, mask=inside, other=0.0)[:, None], tail)
        in_tail = inside[:, None] & (tail < WIDTH - D)
        tl.store(payload + row[:, None] * WIDTH + D + tail, byte.to(tl.uint8), mask=in_tail)


def pack_dispatch(
    q_TD: Tensor, scale: Tensor, score_R: Tensor | None, slot_R: Tensor, top_k: int, width: int
) -> Tensor:
    """The dispatch payload (R, width) uint8: row r is token ``slot_R[r] // top_k`` with ``score_R[r]``.

    Args:
        q_TD: (T, D) e4m3 and scale (T, D // 128) e8m0, both contiguous.
        score_R: (R,) fp32 or None; slot_R: (R,) int32.
    """
    assert q_TD.is_contiguous() and scale.is_contiguous() and (score_R is None or score_R.is_contiguous())
    R, D = slot_R.shape[0], q_TD.shape[1]
    payload = torch.empty(R, width, dtype=torch.uint8, device=q_TD.device)
    if R:
        _pack_dispatch_kernel[(triton.cdiv(D, COLUMNS), triton.cdiv(R, ROWS))](
            q_TD.view(torch.uint8), scale.view(torch.uint8), score_R, slot_R, payload, R, top_k=top_k, D=D, WIDTH=width,
            TAIL=triton.next_power_of_2(width - D), ROWS=ROWS, COLUMNS=COLUMNS, TILE=TILE, num_warps=WARPS,
        )  # fmt: skip
    return payload


@triton.jit(do_not_specialize=["R"])
def _pack_combine_kernel(
    y, ds, row_R, payload, R, Y_BYTES: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Program (column block, row block); with ``ds`` the first column block also writes the 16 bytes after a row."""
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = row < R
    source = tl.load(row_R + row, mask=inside, other=0).to(tl.int64)
    _copy_rows(y, source, Y_BYTES, inside, payload, row, WIDTH, inside, tl.program_id(0) * COLUMNS, Y_BYTES, COLUMNS)

    if ds is not None:
        if tl.program_id(0) == 0:
            tail = tl.arange(0, WIDTH - Y_BYTES)[None, :]
            byte = _fp32_byte(tl.load(ds + source, mask=inside, other=0.0)[:, None], tail)
            tl.store(payload + row[:, None] * WIDTH + Y_BYTES + tail, byte.to(tl.uint8), mask=inside[:, None])


def pack_combine(y_MD: Tensor, ds_M: Tensor | None, row_R: Tensor) -> Tensor:
    """The combine payload: rows ``y_MD[row_R]`` of (M, D) bf16, followed by ``ds_M[row_R]`` (fp32) and 12 zero bytes.

    Returns:
        (R, 2 * D) uint8, or (R, 2 * D + 16) with ``ds_M``.
    """
    assert y_MD.is_contiguous() and (ds_M is None or ds_M.is_contiguous())
    R, y_bytes = row_R.shape[0], 2 * y_MD.shape[1]
    width = y_bytes if ds_M is None else y_bytes + 16
    payload = torch.empty(R, width, dtype=torch.uint8, device=y_MD.device)
    if R:
        _pack_combine_kernel[(triton.cdiv(y_bytes, COLUMNS), triton.cdiv(R, ROWS))](
            y_MD.view(torch.uint8), ds_M, row_R, payload, R, Y_BYTES=y_bytes, WIDTH=width, ROWS=ROWS, COLUMNS=COLUMNS,
            num_warps=WARPS,
        )  # fmt: skip
    return payload


# --- back to token order ----------------------------------------------------------------------------------------------


@triton.jit
def _unpermute_sum_kernel(
    y, row_TK, out, STRIDE: tl.constexpr, D: tl.constexpr, K: tl.constexpr, COLUMNS: tl.constexpr
):
    """One column block of one token: all K loads are independent, the additions in the order of k.

    The row stride of y is a constant because a payload's, D + 8, is no multiple of 16: as an argument it would hide
    from the compiler that rows are 16-byte aligned. The grid is flat because its second dim ends at 65535.
    """
    blocks: tl.constexpr = (D + COLUMNS - 1) // COLUMNS
    token = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0) % blocks * COLUMNS + tl.arange(0, COLUMNS)
    in_row = column < D
    total = tl.zeros((COLUMNS,), tl.float32)
    for k in tl.static_range(K):
        row = tl.load(row_TK + token * K + k).to(tl.int64)
        total += tl.load(y + row * STRIDE + column, mask=in_row & (row >= 0), other=0.0).to(tl.float32)
    tl.store(out + token * D + column, total, mask=in_row)


def unpermute_sum(y_MD: Tensor, row_TK: Tensor, out_dtype: torch.dtype) -> Tensor:
    """(T, D) sums of each token's rows; see :func:`titan_fp8moe.recipe.unpermute_sum`.

    Args:
        y_MD: (M, D) bf16, unit stride along rows, any stride between them.
        row_TK: (T, K) int32; -1 adds nothing.
    """
    (T, K), D = row_TK.shape, y_MD.shape[1]
    out = torch.empty(T, D, dtype=out_dtype, device=y_MD.device)
    if T:
        _unpermute_sum_kernel[(triton.cdiv(D, SUM_COLUMNS) * T,)](
            y_MD, row_TK.contiguous(), out, STRIDE=y_MD.stride(0), D=D, K=K, COLUMNS=SUM_COLUMNS, num_warps=SUM_WARPS
        )
    return out
