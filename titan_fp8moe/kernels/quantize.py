"""Kernels that quantize to e4m3 with power-of-two scales: rows in 1x128 tiles, weights in 128x128 blocks.

``scale_of_amax`` is the only device function that turns an amax into a scale. Like
:func:`titan_fp8moe.recipe.scale_byte` it needs no logarithm and no division. SwiGLU quantizes with ``quantize_tiles``.
"""

import functools
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_fp8moe.kernels.launch import Kernel
from titan_fp8moe.kernels.sizes import cdiv, empty_weight
from titan_fp8moe.recipe import (
    BLOCK,
    E8M0,
    FP8,
    SAMPLES,
    SCALE_TILE,
    STATE_HEADER,
    check_values,
    group_rows,
    padded,
    sample_step,
)

# Chosen by a sweep on an H200; one configuration serves all shapes.
TILES = 32  # per CTA: 32 x 128 bf16 are 8 KiB, four 16-byte loads in flight per thread
WARPS = 4
WEIGHT_WARPS = 4
DEQUANTIZED_ROWS = 32  # divides 128, so no CTA straddles offsets_E[-1]; not swept
# Not measured: enough CTAs to fill an H100 twice, and few enough to be over at once where nothing has changed.
REFRESH_CTAS = 2048
SAMPLE_WARPS = 8
TILE = tl.constexpr(SCALE_TILE)
HEADER = tl.constexpr(STATE_HEADER)


@triton.jit
def abs_bits(x):
    """Absolute values of fp32 ``x`` as int32 bit patterns, which order like the values; NaN and Inf sort on top."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scale_of_amax(bits):
    """Scale byte (int32) of amax bit patterns, and the fp32 factor ``2**(127 - byte)`` that quantizes values.

    The factor is NaN for a tile that holds a NaN or Inf: every product is then NaN, and its e4m3 code 0x7F.
    """
    # 448 is 1.75 * 2**8: the sum carries into the exponent field exactly where amax's fraction exceeds 1.75. The
    # largest finite amax has byte 247, so the factor's exponent field, 254 - byte, is at least 7: it is normal.
    finite = bits < 0x7F800000
    byte = ((tl.where(finite, bits, 0) + 0x1FFFFF) >> 23) - 8
    byte = tl.minimum(tl.maximum(byte, 1), 254)
    factor = tl.where(finite, (254 - byte) << 23, 0x7FC00000)
    return byte, factor.to(tl.float32, bitcast=True)


@triton.jit
def scale_tiles(x):
    """Scales fp32 ``x`` (ROWS, 128) into e4m3's range, one tile per row; returns fp32 and uint8 scales (ROWS,)."""
    byte, factor = scale_of_amax(tl.max(abs_bits(x), axis=1))
    return x * factor[:, None], byte.to(tl.uint8)


@triton.jit
def quantize_tiles(x):
    """As :func:`scale_tiles`, in e4m3."""
    values, byte = scale_tiles(x)
    return values.to(tl.float8e4nv), byte


@triton.jit
def round_both_ways(x):
    """The e4m3 value nearest to each of fp32 ``x``, at most 448, and the next one on x's other side; both in fp32."""
    # In units of the distance between neighbours, an eighth of x's power of two but at least 2**-9, these are integers.
    unit = tl.maximum((x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True) * 0.125, 2.0**-9)
    steps = tl.abs(x) * (0x7F000000 - unit.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)  # 1 / unit, exactly
    nearest = (steps + 1.5 * 2.0**23) - 1.5 * 2.0**23
    unit = tl.where(x < 0, -unit, unit)
    return nearest * unit, (nearest + tl.where(nearest < steps, 1.0, -1.0)) * unit


@triton.jit
def _load_tiles(x, tile, num_tiles, COLUMNS: tl.constexpr):
    """Loads tiles (TILES, TILE) as fp32, zeros from the ``num_tiles``-th on. x is contiguous. Its rows are whole tiles
    or, with COLUMNS, have so many columns; then each row's last tile is filled up with zeros."""
    column, mask = tl.arange(0, TILE)[None, :], (tile < num_tiles)[:, None]
    if COLUMNS is None:
        at = tile[:, None] * TILE + column
    else:
        tiles: tl.constexpr = (COLUMNS + TILE - 1) // TILE  # of a row
        column += (tile % tiles * TILE)[:, None]
        at, mask = (tile // tiles)[:, None] * COLUMNS + column, mask & (column < COLUMNS)
    return tl.load(x + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["num_tiles", "num_stored"])
def _quantize_tiles_kernel(
    x, q, scale, nan_flag, num_tiles, num_stored, scale_t, end, COLUMNS: tl.constexpr, G: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    """Quantizes the ``num_tiles`` tiles of x, and zeros behind them, see :func:`_load_tiles`, to q (num_stored, TILE),
    contiguous, and scale (num_stored,) uint8. With ``scale_t``, of R rows of G tiles, it also stores the scales
    column-major, (G, R), and R itself to ``end``. Stores 1 to ``nan_flag`` if a tile holds a NaN or Inf."""
    tile = tl.program_id(0).to(tl.int64) * TILES + tl.arange(0, TILES)
    mask = tile < num_stored
    at = tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
    tiles = _load_tiles(x, tile, num_tiles, COLUMNS)
    values, byte = quantize_tiles(tiles)
    if nan_flag is not None:
        # Threads and CTAs may store at once, but all store 1.
        tl.store(nan_flag + tl.zeros_like(tile), 1, mask=tl.max(abs_bits(tiles), axis=1) >= 0x7F800000)
    tl.store(q + at, values, mask=mask[:, None])
    tl.store(scale + tile, byte, mask=mask)
    if scale_t is not None:
        R = num_stored // G
        tl.store(scale_t + tile % G * R + tile // G, byte, mask=mask)
        if tl.program_id(0) == 0:
            tl.store(end, R)


_ROWS = dict(scale_t=None, end=None, G=None)
_rows, _padded_rows = Kernel(_quantize_tiles_kernel, COLUMNS=None, **_ROWS), Kernel(_quantize_tiles_kernel, **_ROWS)
_group, _padded_group = Kernel(_quantize_tiles_kernel, COLUMNS=None), Kernel(_quantize_tiles_kernel)


def quantize_rows(x_TD, nan_flag=None):
    """Kernel of :func:`titan_fp8moe.recipe.quantize_rows`."""
    T, D = x_TD.shape
    return _quantize_tiles(x_TD, T, nan_flag, _padded_rows if D % SCALE_TILE else _rows)


def quantize_group(x_TD, nan_flag=None):
    """Kernel of :func:`titan_fp8moe.recipe.quantize_group`."""
    (T, D), device = x_TD.shape, x_TD.device
    R, G = group_rows(T), padded(D) // SCALE_TILE
    scale_t = torch.empty(G, R, dtype=E8M0, device=device)
    end = torch.empty(1, dtype=torch.int32, device=device)
    kernel = _padded_group if D % SCALE_TILE else _group
    q, scale = _quantize_tiles(x_TD, R, nan_flag, kernel, scale_t, end, G=G)
    return q, scale, scale_t.t(), end


def _quantize_tiles(
    x_TD: Tensor, R: int, nan_flag: Tensor | None, kernel: Kernel, *column_major: Tensor, **constants: int
) -> tuple[Tensor, Tensor]:
    """Launches ``kernel``, one of those above, for R rows: those of x, and zeros."""
    check_values(x_TD)
    (T, columns), device = x_TD.shape, x_TD.device
    D = padded(columns)
    tiles = D // SCALE_TILE
    if columns != D:
        constants["COLUMNS"] = columns
    q = torch.empty(R, D, dtype=FP8, device=device)
    scale = torch.empty(R, tiles, dtype=E8M0, device=device)
    # Rows are contiguous, so the result is one list of tiles.
    num_stored = R * tiles
    kernel[(cdiv(num_stored, TILES),)](
        x_TD.contiguous(), q, scale, nan_flag, T * tiles, num_stored, *column_major, TILES=TILES,
        num_warps=WARPS, **constants,
    )  # fmt: skip
    return q, scale


@Kernel
@triton.jit(do_not_specialize=["scale_stride_m", "scale_stride_k"])
def _dequantize_rows_kernel(
    q, scale, scale_stride_m, scale_stride_k, offsets_E, out, K, E: tl.constexpr, ROWS: tl.constexpr
):
    """CTA (tile column, row block). q and out: (M, K), contiguous."""
    tile, first = tl.program_id(0), tl.program_id(1) * ROWS
    if first >= tl.load(offsets_E + E - 1):
        return
    row = first + tl.arange(0, ROWS)
    byte = tl.load(scale + row * scale_stride_m + tile * scale_stride_k)
    factor = (byte.to(tl.int32) << 23).to(tl.float32, bitcast=True)
    at = row.to(tl.int64)[:, None] * K + tile * TILE + tl.arange(0, TILE)[None, :]
    tl.store(out + at, (tl.load(q + at).to(tl.float32) * factor[:, None]).to(tl.bfloat16))


def dequantize_rows(q_MK, scale, offsets_E):
    """Kernel of :func:`titan_fp8moe.recipe.dequantize_rows`; leaves rows at and past ``offsets_E[-1]`` unwritten."""
    (M, K), (stride_m, stride_k) = q_MK.shape, scale.stride()
    assert q_MK.is_contiguous()
    out = torch.empty(M, K, dtype=torch.bfloat16, device=q_MK.device)
    _dequantize_rows_kernel[(K // SCALE_TILE, M // DEQUANTIZED_ROWS)](
        q_MK, scale, stride_m, stride_k, offsets_E, out, K,
        E=offsets_E.shape[0], ROWS=DEQUANTIZED_ROWS, num_warps=WARPS,
    )  # fmt: skip
    return out


@triton.jit
def load_four(x, stride):
    """Loads rows 4 * r + j of a block, j = 0..3, as four tensors; ``x`` points to the rows 4 * r."""
    return tl.load(x), tl.load(x + stride), tl.load(x + 2 * stride), tl.load(x + 3 * stride)


@triton.jit
def _load_four_inside(x, stride, row, num_rows, inside):
    """As :func:`load_four`; zeros past the last row and where ``inside`` (1, C) is not set."""
    return (
        tl.load(x, mask=(row < num_rows) & inside, other=0.0),
        tl.load(x + stride, mask=(row + 1 < num_rows) & inside, other=0.0),
        tl.load(x + 2 * stride, mask=(row + 2 < num_rows) & inside, other=0.0),
        tl.load(x + 3 * stride, mask=(row + 3 < num_rows) & inside, other=0.0),
    )


@triton.jit
def join_four(x):
    """Joins four tensors, row 4 * r + 2 * a + b at [r, ..., a, b]: neighbouring rows lie side by side in registers."""
    return tl.join(tl.join(x[0], x[2]), tl.join(x[1], x[3]))


@triton.jit
def transposed_words(x):
    """Converts floats (R, C, 2, 2) of ``join_four`` to e4m3 and transposes them; returns words, int32 (C, R).

    A word holds one column's codes of four neighbouring rows. The transpose through shared memory thus moves words, not
    bytes, and one instruction converts a pair of rows.

    This also avoids a bug of ptxas 12.8: once it has merged two converted pairs into a word, it extracts single bytes
    wrongly. So each layout is converted on its own, in the order of its words, and no byte is ever extracted.
    """
    return _words_of_bytes(x.to(tl.float8e4nv).to(tl.uint8, bitcast=True))


@triton.jit
def _words_of_bytes(byte):
    """Packs uint8 (R, C, 2, 2) into words and transposes them; returns int32 (C, R)."""
    # A sum of bytes in different positions has no carries. The first row gets the lowest byte, the first in memory.
    shift = 16 * tl.arange(0, 2)[:, None] + 8 * tl.arange(0, 2)[None, :]
    return tl.trans(tl.sum(tl.sum(byte.to(tl.int32) << shift[None, None, :, :], axis=3), axis=2))


@triton.jit
def store_words(q_t, words, row, stride, block):
    """Stores ``transposed_words`` of a block to columns block * 128..(block + 1) * 128 of ``row`` (128, 1) of q_t."""
    # As words: a row of q_t is a multiple of 128 bytes, so 4 divides its stride and every word is aligned.
    column = block * (TILE // 4) + tl.arange(0, TILE // 4)
    tl.store(q_t.to(tl.pointer_type(tl.int32)) + row * (stride // 4) + column[None, :], words)


@triton.jit
def _quantize_block(
    w, stride_e, stride_n, num_rows, last_w, last_stride_e, last_stride_n, last_num_rows, last_block, num_columns, q,
    q_t, scale, N, K, k_block, out_block, e, BESIDE: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Quantizes one 128x128 block of the operand: reads it once, writes it in one or both layouts.

    w, last_w: (E, num_rows, num_columns), unit stride along the columns. Each is padded with zeros to whole blocks
        unless WHOLE. They are concatenated along N, or along K if BESIDE; last_w starts at block ``last_block``.
    q: (E, N, K) or None; q_t: (E, K, N) or None; scale: (E, N // 128, K // 128) uint8.
    """
    n_block, first_column = out_block, k_block * TILE
    if BESIDE:
        if k_block >= last_block:
            first_column -= last_block * TILE
            w = last_w  # of the same shape and strides
    elif n_block >= last_block:
        n_block -= last_block
        w, stride_e, stride_n, num_rows = last_w, last_stride_e, last_stride_n, last_num_rows
    n = 4 * tl.arange(0, TILE // 4)
    column = first_column + tl.arange(0, TILE)
    k = k_block * TILE + tl.arange(0, TILE)
    row = (n + n_block * TILE).to(tl.int64)[:, None]
    block = w + e * stride_e + row * stride_n + column[None, :]
    if WHOLE:
        rows = load_four(block, stride_n)
    else:
        rows = _load_four_inside(block, stride_n, row, num_rows, column[None, :] < num_columns)
    x = join_four(rows)
    if x.dtype == tl.bfloat16:
        # amax of the 16-bit patterns: a block widened to fp32 would stay in registers and halve occupancy. A bf16 is
        # the upper half of an fp32, so the order is the same and << 16 gives the fp32 pattern.
        bits = tl.max(x.to(tl.int16, bitcast=True) & 0x7FFF).to(tl.int32) << 16
    else:
        bits = tl.max(abs_bits(x))
    byte, factor = scale_of_amax(bits)

    if q is not None:
        row = (n + out_block * TILE).to(tl.int64)[:, None]
        for j in tl.static_range(4):
            tl.store(q + e * N * K + (row + j) * K + k[None, :], (rows[j].to(tl.float32) * factor).to(tl.float8e4nv))
    if q_t is not None:
        store_words(q_t, transposed_words(x.to(tl.float32) * factor), e * K + k[:, None], N, out_block)
    tl.store(scale + (e * (N // TILE) + out_block) * (K // TILE) + k_block, byte.to(tl.uint8))


@triton.jit(do_not_specialize=["num_rows", "last_num_rows"])  # the block assigns to the first
def _quantize_weight_kernel(
    w, stride_e, stride_n, num_rows, last_w, last_stride_e, last_stride_n, last_num_rows, last_block, num_columns, q,
    q_t, scale, N, K, BESIDE: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """CTA (k_block, out_block, e) quantizes one block."""
    k_block, out_block, e = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    _quantize_block(
        w, stride_e, stride_n, num_rows, last_w, last_stride_e, last_stride_n, last_num_rows, last_block, num_columns,
        q, q_t, scale, N, K, k_block, out_block, e, BESIDE, WHOLE
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows", "last_num_rows"])
def _refresh_weight_kernel(
    w, stride_e, stride_n, num_rows, last_w, last_stride_e, last_stride_n, last_num_rows, last_block, num_columns, q,
    q_t, scale, N, K, seen, BESIDE: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """As :func:`_quantize_weight_kernel`, but only if the second entry of ``seen`` is set. Few CTAs share an expert's
    blocks, so that a launch which finds nothing to do is over at once."""
    if tl.load(seen + 1) == 0:
        return
    k_block, e = tl.program_id(0), tl.program_id(2).to(tl.int64)
    for out_block in range(tl.program_id(1), N // TILE, tl.num_programs(1)):
        _quantize_block(
            w, stride_e, stride_n, num_rows, last_w, last_stride_e, last_stride_n, last_num_rows, last_block,
            num_columns, q, q_t, scale, N, K, k_block, out_block, e, BESIDE, WHOLE
        )  # fmt: skip


_quantize, _quantize_beside = (Kernel(_quantize_weight_kernel, BESIDE=beside) for beside in (False, True))
_refresh, _refresh_beside = (Kernel(_refresh_weight_kernel, BESIDE=beside) for beside in (False, True))


@triton.jit
def _value_bits(w, stride_e, stride_n, index, N, K):
    """Bit patterns of the values (E, N, K) at flat indices, as int32."""
    x = tl.load(w + index // K // N * stride_e + index // K % N * stride_n + index % K)
    return x.to(tl.int16, bitcast=True).to(tl.int32) if x.dtype == tl.bfloat16 else x.to(tl.int32, bitcast=True)


@Kernel
@triton.jit(do_not_specialize=["force"])
def _seen_weights_kernel(
    w, stride_e, stride_n, last_w, last_stride_e, last_stride_n, state, steps, force, generation, result, N, K, size,
    step, count, PAIR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One CTA of :func:`titan_fp8moe.recipe.seen_weights`. ``size`` is a weight's, ``step`` lies between its samples,
    ``count`` of them, a multiple of BLOCK. ``result`` (2,) gets the copies' generation, and whether to make them."""
    seen = tl.load(state)
    now = seen if steps is None else tl.load(steps)
    stale, samples = (seen < 0) | (seen != now) | (force != 0), count
    if generation is not None:
        stale = tl.load(generation) != tl.load(state + 1)
        samples = tl.where(stale, count, 0)
    different = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, samples, BLOCK):
        i = start + tl.arange(0, BLOCK)
        bits = _value_bits(w, stride_e, stride_n, i.to(tl.int64) * step % size, N, K)
        different |= bits ^ tl.load(state + HEADER + i)
        tl.store(state + HEADER + i, bits)
        if PAIR:
            bits = _value_bits(last_w, last_stride_e, last_stride_n, i.to(tl.int64) * step % size, N, K)
            different |= bits ^ tl.load(state + HEADER + count + i)
            tl.store(state + HEADER + count + i, bits)
    if generation is None:
        stale |= tl.max((different != 0).to(tl.int32), 0) != 0
        given = tl.load(state + 2) + stale.to(tl.int32)
        wanted = tl.where(stale, given, tl.load(state + 1))
        tl.store(state + 2, given)
    else:
        wanted = tl.load(generation)
        tl.debug_barrier()  # no warp may find the new header and leave out its samples
    if stale:
        tl.store(state, tl.maximum(now, 0))
        tl.store(state + 1, wanted)
    tl.store(result, wanted)
    tl.store(result + 1, stale.to(tl.int32))


def stored_transposed(weights: Sequence[Tensor]) -> bool:
    """Whether the weights (E, N, K) lie in memory as (E, K, N), two alike: such as gate and up of one (E, K, 2N)."""
    first, last = weights[0], weights[-1]
    if first.stride(2) == 1 or first.stride(1) != 1:
        return False
    return first.shape == last.shape and first.stride() == last.stride()


def _copied(w: Tensor) -> Tensor:
    _warn_of_copies(f"{tuple(w.shape)} with strides {w.stride()}")
    return w.contiguous()


@functools.cache
def _warn_of_copies(which: str) -> None:
    warnings.warn(
        f"weights {which} are copied each time they are quantized, in every forward and "
        "backward; store them as (E, N, K) with unit stride along K (w1 and w3 (E, H, D), w2 (E, D, H)), or fuse gate "
        "and up as (E, 2H, D), which may also be the transpose of (E, D, 2H)",
        stacklevel=2,
    )


def _blocks(weights: list[Tensor], beside: bool) -> tuple[list[Any], tuple[int, int, int], bool]:
    """The arguments of :func:`_quantize_block` up to ``num_columns``, the operand's (E, N, K), and WHOLE."""
    w, last_w = weights[0], weights[-1]
    w, last_w = w if w.stride(2) == 1 else _copied(w), last_w if last_w.stride(2) == 1 else _copied(last_w)
    (E, rows, columns), last_rows, first_N, K = w.shape, last_w.shape[1], padded(w.shape[1]), padded(w.shape[2])
    whole = columns == K and rows == first_N and last_rows % BLOCK == 0
    last_block, shape = first_N // BLOCK, (E, first_N + (padded(last_rows) if len(weights) > 1 else 0), K)
    if beside:
        last_block, shape = K // BLOCK, (E, first_N, 2 * K)
    args = [w, *w.stride()[:2], rows, last_w, *last_w.stride()[:2], last_rows, last_block]
    return [*args, columns], shape, whole


def quantize_weight(weights, plain, transposed, beside=False):
    """Kernel of :func:`titan_fp8moe.recipe.quantize_weight` for one or two weights, concatenated along N.

    Args:
        weights: (E, N_i, K) bf16 or fp32, any strides. Unless they have unit stride along K, or are
            :func:`stored_transposed`, they are copied, with one warning.
        plain, transposed: which of the two layouts to write.
        beside: concatenate two along K.

    Returns:
        q (E, N, K) e4m3, empty unless ``plain``; q_t (E, K, N) e4m3, empty unless ``transposed``; scale
        (E, N // 128, K // 128) e8m0. N is the sum of the padded N_i, K is padded.
    """
    if stored_transposed(weights):  # a block's transpose has the same values
        q_t, q, scale = quantize_weight([w.transpose(1, 2) for w in weights], transposed, plain, len(weights) > 1)
        return q, q_t, scale.transpose(1, 2)
    source, (E, N, K), whole = _blocks(weights, beside)
    q, q_t, scale = empty_weight(weights[0], E, N, K, plain, transposed)
    (_quantize_beside if beside else _quantize)[(K // BLOCK, N // BLOCK, E)](
        *source, q if plain else None, q_t if transposed else None, scale, N, K,
        WHOLE=whole, num_warps=WEIGHT_WARPS,
    )  # fmt: skip
    return q, q_t, scale


def refresh_weight(weights, q, q_t, scale, state, steps, force, generation, beside=False):
    """Kernels of :func:`titan_fp8moe.ops.refresh_weight`: one decides, the other quantizes if it must."""
    if stored_transposed(weights):
        matrices, scale = [w.transpose(1, 2) for w in weights], scale.transpose(1, 2)
        return refresh_weight(matrices, q_t, q, scale, state, steps, force, generation, len(weights) > 1)
    source, (E, N, K), whole = _blocks(weights, beside)
    w, stride_e, stride_n, rows, last_w, last_stride_e, last_stride_n, *_, columns = source
    seen = torch.empty(2, dtype=torch.int32, device=w.device)
    count = (state.numel() - STATE_HEADER) // len(weights)
    _seen_weights_kernel[(1,)](
        w, stride_e, stride_n, last_w, last_stride_e, last_stride_n, state, steps, int(force), generation, seen, rows,
        columns, w.numel(), sample_step(w), count, PAIR=len(weights) > 1, BLOCK=SAMPLES,
        num_warps=SAMPLE_WARPS,
    )  # fmt: skip
    parts = min(N // BLOCK, cdiv(REFRESH_CTAS, K // BLOCK * E))
    (_refresh_beside if beside else _refresh)[(K // BLOCK, parts, E)](
        *source, q, q_t, scale, N, K, seen, WHOLE=whole, num_warps=WEIGHT_WARPS
    )
    return seen


@Kernel
@triton.jit(do_not_specialize=["blocks"])  # the kernel assigns to it
def _join_weight_kernel(w, w_scale, blocks, last_w, last_scale, q, q_t, scale, N, K):
    """CTA (k_block, out_block, e) copies one 128x128 block of quantized weights into one or both layouts.

    w: (E, blocks * 128, K) and last_w: (E, N - blocks * 128, K) uint8, contiguous, concatenated along N.
    w_scale, last_scale: one number per block.
    q: (E, N, K) or None; q_t: (E, K, N) or None; scale: (E, N // 128, K // 128).
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
        store_words(q_t, _words_of_bytes(join_four(rows)), e * K + k[:, None], N, out_block)
    number = tl.load(w_scale + (e * blocks + n_block) * (K // TILE) + k_block)
    tl.store(scale + (e * (N // TILE) + out_block) * (K // TILE) + k_block, number)


def join_weight(w, w_scale, last_w, last_scale, plain, transposed):
    """As :func:`quantize_weight` for one or two weights that are quantized: moves bytes."""
    weights, scales = [w] if last_w is None else [w, last_w], [w_scale] if last_scale is None else [w_scale, last_scale]
    E, _, K = w.shape
    N = sum(w.shape[1] for w in weights)
    q, q_t, scale = empty_weight(w, E, N, K, plain, transposed, w_scale.dtype)
    weights, scales = [w.contiguous().view(torch.uint8) for w in weights], [s.contiguous() for s in scales]
    _join_weight_kernel[(K // BLOCK, N // BLOCK, E)](
        weights[0], scales[0], weights[0].shape[1] // BLOCK, weights[-1], scales[-1],
        q.view(torch.uint8) if plain else None, q_t.view(torch.uint8) if transposed else None, scale, N, K,
        num_warps=WEIGHT_WARPS,
    )  # fmt: skip
    return q, q_t, scale
