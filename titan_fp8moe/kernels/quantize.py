"""Quantization to e4m3 with power-of-two scales: 1x128 tiles of rows, 128x128 blocks of weights.

The device functions here are the only place where a kernel turns an amax into a scale; SwiGLU and the requantizing
transpose use them too. They follow :func:`titan_fp8moe.recipe.scale_byte`: no logarithm, no division.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_fp8moe.kernels.launch import Kernel
from titan_fp8moe.kernels.sizes import cdiv
from titan_fp8moe.recipe import E8M0, FP8, TILE

# Configurations from experiments/kernels/sweep.py on an H200; one serves all shapes.
TILES = 32  # per program: 32 x 128 bf16 are 8 KiB, four 16-byte loads in flight per thread
WARPS = 4
WEIGHT_WARPS = 4


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


@Kernel
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
    scale = torch.empty(T, D // TILE, dtype=E8M0, device=x_TD.device)
    # D is a multiple of 128 and rows are contiguous, so the whole tensor is one list of tiles.
    num_tiles = scale.numel()
    if num_tiles:
        grid = (cdiv(num_tiles, TILES),)
        _quantize_rows_kernel[grid](x_TD.contiguous(), q, scale, num_tiles, TILES=TILES, TILE=TILE, num_warps=WARPS)
    return q, scale


@triton.jit
def load_four(x, stride):
    """A block's rows 4 * r + j, j = 0..3, as four tensors; ``x`` points to the rows 4 * r."""
    return tl.load(x), tl.load(x + stride), tl.load(x + 2 * stride), tl.load(x + 3 * stride)


@triton.jit
def join_four(x):
    """One tensor of four, row 4 * r + 2 * a + b at [r, ..., a, b]: neighbouring rows lie side by side in registers."""
    return tl.join(tl.join(x[0], x[2]), tl.join(x[1], x[3]))


@triton.jit
def transposed_words(x):
    """Floats (R, C, 2, 2) of ``join_four`` to the words of their e4m3 transpose, int32 (C, R).

    A word holds one column's codes of four neighbouring rows, so the transpose through shared memory moves words, not
    bytes, and an instruction converts a pair of rows. That matters beyond speed: once ptxas 12.8 has merged two
    converted pairs into a word, it gets single bytes taken out of them wrong. So each layout is converted on its own,
    in the order of its words, and no byte is ever taken out.
    """
    return _words_of_bytes(x.to(tl.float8e4nv).to(tl.uint8, bitcast=True))


@triton.jit
def _words_of_bytes(byte):
    shift = 16 * tl.arange(0, 2)[:, None] + 8 * tl.arange(0, 2)[None, :]
    return tl.trans(tl.sum(tl.sum(byte.to(tl.int32) << shift[None, None, :, :], axis=3), axis=2))


@triton.jit
def store_words(q_t, words, row, stride, block, TILE: tl.constexpr):
    """Writes ``transposed_words`` of one block to columns block * 128..(block + 1) * 128 of ``row`` (128, 1) of q_t."""
    column = block * (TILE // 4) + tl.arange(0, TILE // 4)
    tl.store(q_t.to(tl.pointer_type(tl.int32)) + row * (stride // 4) + column[None, :], words)


@Kernel
@triton.jit
def _quantize_weight_kernel(
    w, stride_e, stride_n, last_w, last_stride_e, last_stride_n, last_block, q, q_t, scale, N, K,
    TILE: tl.constexpr,
):  # fmt: skip
    """One 128x128 block, read once and written in one or both layouts.

    w, last_w: (E, N_i, K), unit stride along K, joined along N; last_w starts at block ``last_block``. q: (E, N, K) or
    None; q_t: (E, K, N) or None; scale: (E, N // 128, K // 128) uint8.
    """
    k_block, out_block, e = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    n_block = out_block
    if n_block >= last_block:
        n_block -= last_block
        w, stride_e, stride_n = last_w, last_stride_e, last_stride_n
    n = 4 * tl.arange(0, TILE // 4)
    k = k_block * TILE + tl.arange(0, TILE)
    row = (n_block * TILE + n).to(tl.int64)[:, None]
    rows = load_four(w + e * stride_e + row * stride_n + k[None, :], stride_n)
    x = join_four(rows)
    if x.dtype == tl.bfloat16:
        # On the 16-bit patterns: the block widened to fp32 for the amax would stay in registers and halve occupancy.
        bits = tl.max(x.to(tl.int16, bitcast=True) & 0x7FFF).to(tl.int32) << 16
    else:
        bits = tl.max(abs_bits(x))
    byte, factor = scale_of_amax(bits)

    if q is not None:
        row = (out_block * TILE + n).to(tl.int64)[:, None]
        for j in tl.static_range(4):
            tl.store(q + e * N * K + (row + j) * K + k[None, :], (rows[j].to(tl.float32) * factor).to(tl.float8e4nv))
    if q_t is not None:
        store_words(q_t, transposed_words(x.to(tl.float32) * factor), e * K + k[:, None], N, out_block, TILE)
    tl.store(scale + (e * (N // TILE) + out_block) * (K // TILE) + k_block, byte.to(tl.uint8))


def quantize_weight(weights: list[Tensor], plain: bool, transposed: bool) -> tuple[Tensor, Tensor, Tensor]:
    """128x128 quantization of one or two weights (E, N_i, K), bf16 or fp32, as if concatenated along N.

    The weights may be views with any strides along E and N.

    Returns:
        q (E, N, K) e4m3 if ``plain``; q_t (E, K, N) e4m3 if ``transposed``; scale (E, N // 128, K // 128) e8m0. What is
        not asked for is empty.
    """
    E, _, K = weights[0].shape
    N = sum(w.shape[1] for w in weights)
    device = weights[0].device
    q = torch.empty((E, N, K) if plain else 0, dtype=FP8, device=device)
    q_t = torch.empty((E, K, N) if transposed else 0, dtype=FP8, device=device)
    scale = torch.empty(E, N // TILE, K // TILE, dtype=E8M0, device=device)
    weights = [w if w.stride(2) == 1 else w.contiguous() for w in weights]
    w, last_w = weights[0], weights[-1]
    _quantize_weight_kernel[(K // TILE, N // TILE, E)](
        w, w.stride(0), w.stride(1), last_w, last_w.stride(0), last_w.stride(1), w.shape[1] // TILE,
        q if plain else None, q_t if transposed else None, scale, N, K, TILE=TILE, num_warps=WEIGHT_WARPS,
    )  # fmt: skip
    return q, q_t, scale


@Kernel
@triton.jit(do_not_specialize=["blocks"])  # it is assigned to
def _join_weight_kernel(w, w_scale, blocks, last_w, last_scale, q, q_t, scale, N, K, TILE: tl.constexpr):
    """One 128x128 block of quantized weights, put where it belongs in one or both layouts.

    w: (E, blocks * 128, K) and last_w: (E, N - blocks * 128, K) uint8, contiguous, joined along N; w_scale, last_scale:
    a byte per block. q: (E, N, K) or None; q_t: (E, K, N) or None; scale: (E, N // 128, K // 128) uint8.
    """
    k_block, out_block, e = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    n_block = out_block
    if out_block >= blocks:
        n_block -= blocks
        w, w_scale, blocks = last_w, last_scale, N // TILE - blocks
    n = 4 * tl.arange(0, TILE // 4)
    k = k_block * TILE + tl.arange(0, TILE)
    row = (n_block * TILE + n).to(tl.int64)[:, None]
    rows = load_four(w + e * blocks * TILE * K + row * K + k[None, :], K)
    if q is not None:
        row = (out_block * TILE + n).to(tl.int64)[:, None]
        for j in tl.static_range(4):
            tl.store(q + e * N * K + (row + j) * K + k[None, :], rows[j])
    if q_t is not None:
        store_words(q_t, _words_of_bytes(join_four(rows)), e * K + k[:, None], N, out_block, TILE)
    byte = tl.load(w_scale + (e * blocks + n_block) * (K // TILE) + k_block)
    tl.store(scale + (e * (N // TILE) + out_block) * (K // TILE) + k_block, byte)


def join_weight(
    weights: list[Tensor], scales: list[Tensor], plain: bool, transposed: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """One operand of one or two quantized weights (E, N_i, K) e4m3, joined along N: their bytes, moved.

    Returns:
        As :func:`quantize_weight`.
    """
    E, _, K = weights[0].shape
    N = sum(w.shape[1] for w in weights)
    device = weights[0].device
    q = torch.empty((E, N, K) if plain else 0, dtype=torch.uint8, device=device)
    q_t = torch.empty((E, K, N) if transposed else 0, dtype=torch.uint8, device=device)
    scale = torch.empty(E, N // TILE, K // TILE, dtype=E8M0, device=device)
    weights, scales = [w.contiguous().view(torch.uint8) for w in weights], [s.contiguous() for s in scales]
    _join_weight_kernel[(K // TILE, N // TILE, E)](
        weights[0], scales[0], weights[0].shape[1] // TILE, weights[-1], scales[-1],
        q if plain else None, q_t if transposed else None, scale, N, K, TILE=TILE, num_warps=WEIGHT_WARPS,
    )  # fmt: skip
    return q.view(FP8), q_t.view(FP8), scale
