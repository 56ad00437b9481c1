"""Kernels of :func:`titan_fp8moe.recipe.transpose_pair`: both operands of a weight gradient, fp8 to fp8.

One launch transposes both operands. The mode ``balanced`` launches a small kernel before it, for the balance exponents.

x may come in token order, as it was dispatched; each block then gathers its rows. The backward therefore neither keeps
nor permutes a row for each of a token's experts.
"""

import torch
import triton
import triton.language as tl

from titan_fp8moe.kernels.launch import Kernel
from titan_fp8moe.kernels.quantize import TILE, join_four, load_four, store_words, transposed_words
from titan_fp8moe.kernels.sizes import next_power_of_2
from titan_fp8moe.recipe import BLOCK, SCALE_TILE, check_mode

WARPS = 4  # per 128x128 block; chosen by a sweep on an H200


@triton.jit
def _row_exponent(scale, stride_m, stride_g, row, TILES: tl.constexpr, PAD: tl.constexpr):
    """Largest scale byte (int32) of each row, 1 for padding (row -1).

    scale: (M, TILES) uint8; PAD: the next power of two of TILES.
    """
    # A single load, as wide as possible: latency bounds this kernel.
    g = tl.arange(0, PAD)
    at = row[None, :] * stride_m + g[:, None] * stride_g
    byte = tl.load(scale + at, mask=(g < TILES)[:, None] & (row >= 0)[None, :], other=1)
    return tl.max(byte, axis=0).to(tl.int32)


@Kernel
@triton.jit
def _balance_exponent_kernel(
    x_scale, token_M, dy_scale, balance, offsets_E, x_stride_g, dy_stride_m, dy_stride_g, X_STRIDE_M: tl.constexpr,
    X_TILES: tl.constexpr, X_PAD: tl.constexpr, DY_TILES: tl.constexpr, DY_PAD: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    """Writes :func:`titan_fp8moe.recipe.balance_exponent` to balance (M,) int32; a row of zeros has scale byte 1.

    X_STRIDE_M is a constexpr because of tokens with 56 scales: as an argument it would hide their 8-byte alignment.
    """
    first = tl.program_id(0) * TILE
    if first >= tl.load(offsets_E + E - 1):
        return
    row = first + tl.arange(0, TILE)
    x_row = row if token_M is None else tl.load(token_M + row).to(tl.int64)
    e_x = _row_exponent(x_scale, X_STRIDE_M, x_stride_g, x_row, X_TILES, X_PAD)
    e_dy = _row_exponent(dy_scale, dy_stride_m, dy_stride_g, row, DY_TILES, DY_PAD)
    # Both bytes have the same bias, so their difference is the exponents'. -1024 is even and below every difference: a
    # block without a row that counts has parity 0. In two's complement & 1 and >> 1 hold for negative numbers too.
    difference = e_x - e_dy
    parity = tl.max(tl.where((e_x > 1) & (e_dy > 1), difference, -1024), axis=0) & 1
    tl.store(balance + row, (difference - parity) >> 1)


@triton.jit
def _gather(x, stride, row, padding):
    return tl.load(x + row.to(tl.int64) * stride, mask=row >= 0, other=padding)


@triton.jit
def _gather_four(x, stride, row, padding):
    """``load_four`` for row indices in four tensors; row -1 reads as ``padding``."""
    return (
        _gather(x, stride, row[0], padding), _gather(x, stride, row[1], padding),
        _gather(x, stride, row[2], padding), _gather(x, stride, row[3], padding),
    )  # fmt: skip


@triton.jit
def _load_block(q, stride, scale, stride_m, stride_g, token_M, m_block, g):
    """Loads block (m_block, g) of (M, D) in the form that ``transposed_words`` takes.

    Row m is row token_M[m] of q and scale, or row m if token_M is None. Padding (-1) reads as zeros with scale byte 1.

    Returns e4m3 values (32, 128, 2, 2), int32 scale bytes (32, 2, 2), and the block's rows 0, 4, 8, ... (32,).
    """
    # Rows 4r .. 4r + 3 are loaded as four tensors. A thread then holds four rows of a column, which make a word.
    row = m_block * TILE + 4 * tl.arange(0, TILE // 4)
    column = g * TILE + tl.arange(0, TILE)
    if token_M is None:
        values = join_four(load_four(q + row.to(tl.int64)[:, None] * stride + column[None, :], stride))
        byte = join_four(load_four(scale + row * stride_m + g * stride_g, stride_m))
    else:
        token = load_four(token_M + row, 1)
        byte = join_four(_gather_four(scale + g * stride_g, stride_m, token, 1))
        token = token[0][:, None], token[1][:, None], token[2][:, None], token[3][:, None]
        values = join_four(_gather_four(q + column[None, :], stride, token, 0.0))
    return values, byte.to(tl.int32), row


@triton.jit
def _shift_block(q, stride, scale, stride_m, stride_g, token_M, balance, SIGN: tl.constexpr, qT, scaleT, m_block, g, M):
    """Transposes one 128x128 block to the largest scale of its rows, after adding SIGN * balance to their exponents."""
    values, byte, row = _load_block(q, stride, scale, stride_m, stride_g, token_M, m_block, g)
    if balance is not None:
        # x loses what dy gains, so their product keeps its scale. The sum may be less than 1, hence int32.
        byte += SIGN * join_four(load_four(balance + row, 1))
    block_byte = tl.maximum(tl.max(byte), 1)
    # No byte exceeds the block's, so no shift is positive. fp16 suffices. It holds e4m3 times 2**shift exactly down to
    # 2**-24. Values up to 2**-10, which e4m3 rounds to zero, do not rise above it. 2**-20 sends every value to zero.
    factor = ((tl.maximum(byte - block_byte, -20) + 127) << 23).to(tl.float32, bitcast=True).to(tl.float16)
    words = transposed_words(values.to(tl.float16) * factor[:, None, :, :])
    # Row d of the result begins at d * M, which may exceed 31 bits.
    d = (g * TILE + tl.arange(0, TILE)).to(tl.int64)
    store_words(qT, words, d[:, None], M, m_block)
    tl.store(scaleT + g * (M // TILE) + m_block, block_byte.to(tl.uint8))


@Kernel
@triton.jit
def _shift_pair_kernel(
    x, x_stride, x_scale, x_stride_m, x_stride_g, token_M, dy, dy_scale, dy_stride_m, dy_stride_g, balance, offsets_E,
    xT, xT_scale, dyT, dyT_scale, M, D, N, E: tl.constexpr,
):  # fmt: skip
    """CTA (m_block, g) transposes one block: of x for g < D // 128, else of dy. balance is None for scaling_aware.

    CTAs that run at the same time are neighbours along m, so together they write long runs of the result's rows.
    """
    m_block, g = tl.program_id(0), tl.program_id(1)
    # The grid covers the whole buffer. Only the device knows how many of its rows are in use.
    if m_block * TILE >= tl.load(offsets_E + E - 1):
        return
    if g < D // TILE:
        _shift_block(x, x_stride, x_scale, x_stride_m, x_stride_g, token_M, balance, -1, xT, xT_scale, m_block, g, M)
    else:
        g -= D // TILE
        _shift_block(dy, N, dy_scale, dy_stride_m, dy_stride_g, None, balance, 1, dyT, dyT_scale, m_block, g, M)


def transpose_pair(x_MD, x_scale, dy_MN, dy_scale, offsets_E, mode="balanced", token_M=None):
    """Kernels of :func:`titan_fp8moe.recipe.transpose_pair`; columns at and past ``offsets_E[-1]`` stay unwritten.

    Values have unit stride along their rows, and dy is contiguous. Scales may have any strides; column-major is fast.
    With ``token_M`` a token's row is read once for each of its experts.
    """
    (x_stride, unit), (x_stride_m, x_stride_g) = x_MD.stride(), x_scale.stride()
    assert unit == 1 and dy_MN.is_contiguous()
    D, (M, N), dy_strides = x_MD.shape[1], dy_MN.shape, dy_scale.stride()
    xT, xT_scale = x_MD.new_empty(D, M), x_scale.new_empty(D // BLOCK, M // BLOCK)
    dyT, dyT_scale = dy_MN.new_empty(N, M), dy_scale.new_empty(N // BLOCK, M // BLOCK)
    E, balance = offsets_E.shape[0], None
    if mode == "balanced":
        balance = torch.empty(M, dtype=torch.int32, device=x_MD.device)
        _balance_exponent_kernel[(M // BLOCK,)](
            x_scale, token_M, dy_scale, balance, offsets_E, x_stride_g, *dy_strides,
            X_STRIDE_M=x_stride_m, X_TILES=D // SCALE_TILE, X_PAD=next_power_of_2(D // SCALE_TILE),
            DY_TILES=N // SCALE_TILE, DY_PAD=next_power_of_2(N // SCALE_TILE), E=E,
            # With 4 warps, gathered rows of 56 scales spill registers in Triton 3.6.
            num_warps=4 if token_M is None else 8,
        )  # fmt: skip
    else:
        check_mode(mode)
    _shift_pair_kernel[(M // BLOCK, (D + N) // BLOCK)](
        x_MD, x_stride, x_scale, x_stride_m, x_stride_g, token_M, dy_MN, dy_scale, *dy_strides, balance,
        offsets_E, xT, xT_scale, dyT, dyT_scale, M, D, N, E=E, num_warps=WARPS,
    )  # fmt: skip
    return xT, xT_scale, dyT, dyT_scale
