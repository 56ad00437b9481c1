"""Quantization to e4m3 with power-of-two scales: 1x128 tiles of rows, 128x128 blocks of weights.

The device functions here are the only place where a kernel turns an amax into a scale; SwiGLU and the requantizing
transpose use them too. They follow :func:`titan_fp8moe.recipe.scale_byte`: no logarithm, no division.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_fp8moe.recipe import E8M0, FP8, TILE

# Tiles per program: 32 x 128 bf16 are 8 KiB, four 16-byte loads in flight per thread of four warps.
TILES = 32


@triton.jit
def abs_bits(x):
    """Absolute values of fp32 ``x`` as int32 bit patterns, which order like the values; NaN and Inf sort on top."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scale_of_amax(bits):
    """Scale byte (int32) of amax bit patterns, and the fp32 factor ``2**(127 - byte)`` to multiply values with.

    The factor is NaN for a tile that holds a NaN or Inf: the product is NaN then, and the cast to e4m3 makes it 0x7F.
    """
    finite = bits < 0x7F800000
    byte = ((tl.where(finite, bits, 0) + 0x1FFFFF) >> 23) - 8
    byte = tl.minimum(tl.maximum(byte, 1), 254)
    factor = tl.where(finite, (254 - byte) << 23, 0x7FC00000)
    return byte, factor.to(tl.float32, bitcast=True)


@triton.jit
def quantize_tiles(x):
    """fp32 ``x`` (ROWS, 128), one tile a row -> e4m3 (ROWS, 128), uint8 scales (ROWS,)."""
    byte, factor = scale_of_amax(tl.max(abs_bits(x), axis=1))
    return (x * factor[:, None]).to(tl.float8e4nv), byte.to(tl.uint8)


@triton.jit(do_not_specialize=["num_tiles"])
def _quantize_rows_kernel(x, q, scale, num_tiles, TILES: tl.constexpr, TILE: tl.constexpr):
    """x, q: (num_tiles, TILE) contiguous; scale: (num_tiles,) uint8."""
    tile = tl.program_id(0).to(tl.int64) * TILES + tl.arange(0, TILES)
    mask = tile < num_tiles
    at = tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
    values, byte = quantize_tiles(tl.load(x + at, mask=mask[:, None], other=0.0).to(tl.float32))
    tl.store(q + at, values, mask=mask[:, None])
    tl.store(scale + tile, byte, mask=mask)


def quantize_rows(x_TD: Tensor) -> tuple[Tensor, Tensor]:
    """1x128 quantization of bf16 or fp32 (T, D); returns q (T, D) e4m3 and scale (T, D // 128) e8m0, row-major."""
    T, D = x_TD.shape
    q = torch.empty(T, D, dtype=FP8, device=x_TD.device)
    scale = torch.empty(T, D // TILE, dtype=torch.uint8, device=x_TD.device)
    # D is a multiple of 128 and rows are contiguous, so the whole tensor is one list of tiles.
    num_tiles = scale.numel()
    if num_tiles:
        grid = (triton.cdiv(num_tiles, TILES),)
        _quantize_rows_kernel[grid](x_TD.contiguous(), q, scale, num_tiles, TILES=TILES, TILE=TILE, num_warps=4)
    return q, scale.view(E8M0)


@triton.jit
def transposed_words(x):
    """Floats (R, 4, C), row 4 * r + j of a block at [r, j], to the words of the e4m3 transpose: int32 (C, R).

    A word holds one column's codes of four neighbouring rows, so the transpose through shared memory moves words, not
    bytes. Split and join put four rows side by side in a thread's registers, where one conversion instruction takes a
    pair of them. That matters beyond speed: once ptxas 12.8 has merged two conversions into a word, it gets single
    bytes taken out of them wrong. So each layout is converted on its own, and no byte is ever taken out.
    """
    even, odd = tl.split(tl.reshape(tl.trans(x, 0, 2, 1), (x.shape[0], x.shape[2], 2, 2)))
    byte = tl.join(even, odd).to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32)
    shift = 16 * tl.arange(0, 2)[:, None] + 8 * tl.arange(0, 2)[None, :]
    return tl.trans(tl.sum(tl.sum(byte << shift[None, None, :, :], axis=3), axis=2))


@triton.jit
def store_words(q_t, words, row, stride, block, TILE: tl.constexpr):
    """Writes ``transposed_words`` of one block to columns block * 128..(block + 1) * 128 of ``row`` (128, 1) of q_t."""
    column = block * (TILE // 4) + tl.arange(0, TILE // 4)
    tl.store(q_t.to(tl.pointer_type(tl.int32)) + row * (stride // 4) + column[None, :], words)


@triton.jit
def _quantize_weight_kernel(w, q, q_t, scale, stride_e, stride_n, first_block, N, K, TILE: tl.constexpr):
    """One 128x128 block, read once and written in one or both layouts.

    w: (E, N_i, K), unit stride along K; q: (E, N, K) or None; q_t: (E, K, N) or None; scale: (E, N // 128, K // 128)
    uint8. ``first_block`` is where this weight's blocks begin along N.
    """
    k_block, n_block, e = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    # Row 4 * r + j at [r, j], for transposed_words.
    n = 4 * tl.arange(0, TILE // 4)[:, None] + tl.arange(0, 4)[None, :]
    k = k_block * TILE + tl.arange(0, TILE)
    row = (n_block * TILE + n).to(tl.int64)
    x = tl.load(w + e * stride_e + row[:, :, None] * stride_n + k[None, None, :])
    if x.dtype == tl.bfloat16:
        # On the 16-bit patterns: the block widened to fp32 for the amax would stay in registers and halve occupancy.
        bits = tl.max(x.to(tl.int16, bitcast=True) & 0x7FFF).to(tl.int32) << 16
    else:
        bits = tl.max(abs_bits(x))
    byte, factor = scale_of_amax(bits)
    x = x.to(tl.float32) * factor

    n_block += first_block
    if q is not None:
        row = (e * N + n_block * TILE + n)[:, :, None]
        tl.store(q + row * K + k[None, None, :], x.to(tl.float8e4nv))
    if q_t is not None:
        store_words(q_t, transposed_words(x), e * K + k[:, None], N, n_block, TILE)
    tl.store(scale + (e * (N // TILE) + n_block) * (K // TILE) + k_block, byte.to(tl.uint8))


def quantize_weight(weights: list[Tensor], plain: bool, transposed: bool) -> tuple[Tensor, Tensor, Tensor]:
    """128x128 quantization of weights (E, N_i, K), bf16 or fp32, as if concatenated along N.

    The weights may be views with any strides along E and N. Each launch writes its part of the result, so nothing is
    concatenated.

    Returns:
        q (E, N, K) e4m3 if ``plain``; q_t (E, K, N) e4m3 if ``transposed``; scale (E, N // 128, K // 128) e8m0. What is
        not asked for is empty.
    """
    E, _, K = weights[0].shape
    N = sum(w.shape[1] for w in weights)
    device = weights[0].device
    q = torch.empty((E, N, K) if plain else 0, dtype=FP8, device=device)
    q_t = torch.empty((E, K, N) if transposed else 0, dtype=FP8, device=device)
    scale = torch.empty(E, N // TILE, K // TILE, dtype=torch.uint8, device=device)
    first_block = 0
    for w in weights:
        w = w if w.stride(2) == 1 else w.contiguous()
        blocks = w.shape[1] // TILE
        _quantize_weight_kernel[(K // TILE, blocks, E)](
            w, q if plain else None, q_t if transposed else None, scale, w.stride(0), w.stride(1), first_block, N, K,
            TILE=TILE, num_warps=4,
        )  # fmt: skip
        first_block += blocks
    return q, q_t, scale.view(E8M0)
