"""Transposes of the weight gradient's two operands, fp8 to fp8, so that tokens become the contraction dim.

The forward's operand may come in token order, as it was dispatched: a block then gathers its rows. So the backward
needs no token once for each of its experts, neither kept nor permuted again.

Scales are powers of two, so a value moves to its block's scale by a change of exponent: exact unless the result is
subnormal, and then rounded to nearest even by the cast. See :func:`titan_fp8moe.recipe.transpose_pair`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_fp8moe.kernels.launch import Kernel
from titan_fp8moe.kernels.quantize import (
    abs_bits,
    join_four,
    load_four,
    scale_of_amax,
    store_words,
    transposed_words,
)
from titan_fp8moe.kernels.sizes import next_power_of_2
from titan_fp8moe.recipe import TILE

WARPS = 4  # per 128x128 block; from experiments/kernels/sweep.py on an H200


@triton.jit
def _row_exponent(scale, stride_m, stride_g, row, TILES: tl.constexpr, PAD: tl.constexpr):
    """Largest scale byte (int32) of each row, 1 for row -1, which is padding; scale: (M, TILES) uint8, PAD the next
    power of two."""
    # One load, as wide as it may be: the kernel is as long as its chain of latencies.
    g = tl.arange(0, PAD)
    at = row[None, :] * stride_m + g[:, None] * stride_g
    byte = tl.load(scale + at, mask=(g < TILES)[:, None] & (row >= 0)[None, :], other=1)
    return tl.max(byte, axis=0).to(tl.int32)


@Kernel
@triton.jit
def _row_gauge_kernel(
    x_scale, token_M, dy_scale, gauge, offsets_E, x_stride_g, dy_stride_m, dy_stride_g, X_STRIDE_M: tl.constexpr,
    X_TILES: tl.constexpr, X_PAD: tl.constexpr, DY_TILES: tl.constexpr, DY_PAD: tl.constexpr, E: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """gauge (M,) int32: half the difference of the two operands' largest exponents, see recipe.row_gauge. Byte 1 is the
    smallest, that of a row of zeros. (X_STRIDE_M is a constant for the sake of tokens with 56 scales: as an argument it
    would hide that these are 8-byte aligned.)"""
    first = tl.program_id(0) * TILE
    if first >= tl.load(offsets_E + E - 1):
        return
    row = first + tl.arange(0, TILE)
    x_row = row if token_M is None else tl.load(token_M + row).to(tl.int64)
    e_x = _row_exponent(x_scale, X_STRIDE_M, x_stride_g, x_row, X_TILES, X_PAD)
    e_dy = _row_exponent(dy_scale, dy_stride_m, dy_stride_g, row, DY_TILES, DY_PAD)
    difference = e_x - e_dy
    parity = tl.max(tl.where((e_x > 1) & (e_dy > 1), difference, -1024), axis=0) & 1
    tl.store(gauge + row, (difference - parity) >> 1)


@triton.jit
def _gather(x, stride, row, padding):
    return tl.load(x + row.to(tl.int64) * stride, mask=row >= 0, other=padding)


@triton.jit
def _gather_four(x, stride, row, padding):
    """As load_four, of four tensors of rows; ``padding`` for row -1."""
    return (
        _gather(x, stride, row[0], padding), _gather(x, stride, row[1], padding),
        _gather(x, stride, row[2], padding), _gather(x, stride, row[3], padding),
    )  # fmt: skip


@triton.jit
def _load_block(q, stride, scale, stride_m, stride_g, token_M, m_block, g, TILE: tl.constexpr):
    """Block (m_block, g) of (M, D) for transposed_words: e4m3 values (32, 128, 2, 2), their scale bytes (32, 2, 2), and
    rows 0, 4, 8, ... of the block (32,). Row m is token_M[m] of q and scale, unless ``token_M`` is None; padding, -1,
    is zeros with byte 1."""
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
def _shift_block(q, stride, scale, stride_m, stride_g, token_M, gauge, SIGN: tl.constexpr, qT, scaleT, m_block, g, M,
                 TILE: tl.constexpr):  # fmt: skip
    """One 128x128 block brought to one scale, the largest of its rows; row exponents move by SIGN * gauge first."""
    values, byte, row = _load_block(q, stride, scale, stride_m, stride_g, token_M, m_block, g, TILE)
    if gauge is not None:
        byte += SIGN * join_four(load_four(gauge + row, 1))
    block_byte = tl.maximum(tl.max(byte), 1)
    # fp16 is enough: it holds e4m3 times 2**shift exactly down to 2**-24, and what lies below e4m3's rounding point to
    # zero, 2**-10, stays there. 2**-20 sends all values to zero.
    factor = ((tl.maximum(byte - block_byte, -20) + 127) << 23).to(tl.float32, bitcast=True).to(tl.float16)
    words = transposed_words(values.to(tl.float16) * factor[:, None, :, :])
    d = (g * TILE + tl.arange(0, TILE)).to(tl.int64)
    store_words(qT, words, d[:, None], M, m_block, TILE)
    tl.store(scaleT + g * (M // TILE) + m_block, block_byte.to(tl.uint8))


@Kernel
@triton.jit
def _shift_pair_kernel(
    x, x_stride, x_scale, x_stride_m, x_stride_g, token_M, dy, dy_scale, dy_stride_m, dy_stride_g, gauge, offsets_E,
    xT, xT_scale, dyT, dyT_scale, M, D, N, E: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Program (m_block, g): block column g < D // 128 of x, the others of dy. ``gauge`` is None for scaling_aware.

    Programs that run together are neighbours along m: they write long pieces of the same rows of the result.
    """
    m_block, g = tl.program_id(0), tl.program_id(1)
    if m_block * TILE >= tl.load(offsets_E + E - 1):
        return
    if g < D // TILE:
        _shift_block(
            x, x_stride, x_scale, x_stride_m, x_stride_g, token_M, gauge, -1, xT, xT_scale, m_block, g, M, TILE
        )
    else:
        g -= D // TILE
        _shift_block(dy, N, dy_scale, dy_stride_m, dy_stride_g, None, gauge, 1, dyT, dyT_scale, m_block, g, M, TILE)


@triton.jit
def _requantize_block(q, stride, scale, stride_m, stride_g, token_M, qT, scaleT, m_block, g, M, TILE: tl.constexpr):
    """One 128x128 block with a new scale, from a new amax, for each of its columns; scaleT: (D, M // 128)."""
    values, byte, _ = _load_block(q, stride, scale, stride_m, stride_g, token_M, m_block, g, TILE)
    values = values.to(tl.float32) * (byte << 23).to(tl.float32, bitcast=True)[:, None, :, :]
    byte, factor = scale_of_amax(tl.max(tl.max(tl.max(abs_bits(values), axis=3), axis=2), axis=0))
    d = (g * TILE + tl.arange(0, TILE)).to(tl.int64)
    store_words(qT, transposed_words(values * factor[None, :, None, None]), d[:, None], M, m_block, TILE)
    tl.store(scaleT + d * (M // TILE) + m_block, byte.to(tl.uint8))


@Kernel
@triton.jit
def _requantize_pair_kernel(
    x, x_stride, x_scale, x_stride_m, x_stride_g, token_M, dy, dy_scale, dy_stride_m, dy_stride_g, offsets_E,
    xT, xT_scale, dyT, dyT_scale, M, D, N, E: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """As _shift_pair_kernel, for the mode requantize."""
    m_block, g = tl.program_id(0), tl.program_id(1)
    if m_block * TILE >= tl.load(offsets_E + E - 1):
        return
    if g < D // TILE:
        _requantize_block(x, x_stride, x_scale, x_stride_m, x_stride_g, token_M, xT, xT_scale, m_block, g, M, TILE)
    else:
        g -= D // TILE
        _requantize_block(dy, N, dy_scale, dy_stride_m, dy_stride_g, None, dyT, dyT_scale, m_block, g, M, TILE)


def transpose_pair(
    x_MD: Tensor,
    x_scale: Tensor,
    dy_MN: Tensor,
    dy_scale: Tensor,
    offsets_E: Tensor,
    mode: str,
    token_M: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Both operands of dW = dy^T x in one launch, after a small one for the rows' gauge in the mode ``balanced``.

    Args:
        x_MD, dy_MN: (M, D) and (M, N) e4m3, row-major.
        x_scale, dy_scale: (M, D // 128) and (M, N // 128) e8m0, column-major.
        offsets_E: (E,) int32; columns of the results at and past its last entry are left unwritten.
        token_M: (M,) int32 or None. If given, x is (T, D) with unit stride along rows, its scale (T, D // 128), and row
            m is row ``token_M[m]``; -1 is padding. What is read for all of a token's experts is then in L2.

    Returns:
        xT (D, M), xT_scale (D // 128, M // 128) or, for ``requantize``, (D, M // 128); dyT and dyT_scale likewise.
    """
    assert x_MD.stride(1) == 1 and dy_MN.is_contiguous()
    D, (M, N) = x_MD.shape[1], dy_MN.shape
    assert M == (x_MD if token_M is None else token_M).shape[0]
    scale_rows = 1 if mode == "requantize" else TILE
    xT, dyT = x_MD.new_empty(D, M), dy_MN.new_empty(N, M)
    xT_scale = x_scale.new_empty(D // scale_rows, M // TILE)
    dyT_scale = dy_scale.new_empty(N // scale_rows, M // TILE)

    sources = (x_MD, x_MD.stride(0), x_scale, *x_scale.stride(), token_M, dy_MN, dy_scale, *dy_scale.stride())
    results = (xT, xT_scale, dyT, dyT_scale, M, D, N)
    grid, E = (M // TILE, (D + N) // TILE), offsets_E.shape[0]
    if mode == "requantize":
        _requantize_pair_kernel[grid](*sources, offsets_E, *results, E=E, TILE=TILE, num_warps=WARPS)
    else:
        gauge = None
        if mode == "balanced":
            gauge = torch.empty(M, dtype=torch.int32, device=x_MD.device)
            # Of gathered rows with 56 scales registers spill in Triton 3.6 with 4 warps.
            gauge_warps = 4 if token_M is None else 8
            _row_gauge_kernel[(M // TILE,)](
                x_scale, token_M, dy_scale, gauge, offsets_E, x_scale.stride(1), *dy_scale.stride(),
                X_STRIDE_M=x_scale.stride(0), X_TILES=D // TILE, X_PAD=next_power_of_2(D // TILE),
                DY_TILES=N // TILE, DY_PAD=next_power_of_2(N // TILE), E=E, TILE=TILE, num_warps=gauge_warps,
            )  # fmt: skip
        _shift_pair_kernel[grid](*sources, gauge, offsets_E, *results, E=E, TILE=TILE, num_warps=WARPS)
    return xT, xT_scale, dyT, dyT_scale
