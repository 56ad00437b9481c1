"""Kernels that fuse biases, the activation, the router's score and quantization, forward and backward; fp32 inside.

The activation is an entry of :data:`titan_fp8moe.activations.ACTIVATIONS`, of which a kernel inlines the functions.
Experts without biases run the same kernels, compiled without them.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_fp8moe.activations import ACTIVATIONS, MAX_PARAMETERS
from titan_fp8moe.kernels.launch import Kernel
from titan_fp8moe.kernels.quantize import TILE, quantize_tiles, round_both_ways, scale_tiles
from titan_fp8moe.kernels.routing import expert_of
from titan_fp8moe.kernels.sizes import cdiv, empty_rows
from titan_fp8moe.recipe import SCALE_TILE, column_major, padded
from titan_fp8moe.spec import ExpertSpec

# Rows per CTA. It divides 128, so no CTA straddles offsets_E[-1], and the scales of 32 rows are one 32-byte sector of a
# column. (M is a multiple of 128, so a new M never specializes a kernel anew.)
ROWS = 32
# A CTA of the backward walks along whole rows. Fewer rows make more CTAs, and pipelined loads keep memory busy while a
# CTA computes.
BACKWARD_ROWS = 16
BACKWARD_STAGES = 3
WARPS = BACKWARD_WARPS = 4
CLAMP_WARPS = 8  # where h is rounded both ways; 4 spill registers
BIAS_COLUMNS = 64  # of the biases' gradients that a CTA sums
_NO_BIAS = dict(gate_bias=None, up_bias=None, BIAS_STRIDE_E=None, BIAS_STRIDE_H=None, HIDDEN=None)


@triton.jit
def _store_tiles(q, scale, x, row, tile, M, D):
    """Quantizes x (ROWS, 128) into tile column ``tile`` of q (M, D) and of its column-major scales."""
    values, byte = quantize_tiles(x)
    _store(q, scale, values, byte, row, tile, M, D)


@triton.jit
def _store(q, scale, values, byte, row, tile, M, D):
    """Stores e4m3 values (ROWS, 128) as tile column ``tile`` of q (M, D), and the bytes of their scales."""
    tl.store(q + row.to(tl.int64)[:, None] * D + tile * TILE + tl.arange(0, TILE)[None, :], values)
    tl.store(scale + tile * M + row, byte)


@triton.jit
def _dequantize(values, byte):
    return values * (byte.to(tl.int32) << 23).to(tl.float32, bitcast=True)[:, None]


@triton.jit
def _load_tiles(x, byte, row, tile, D):
    """Loads tile column ``tile`` of x (M, D) as fp32 (ROWS, 128); x is bf16, or e4m3 whose scale bytes are ``byte``."""
    values = tl.load(x + row.to(tl.int64)[:, None] * D + tile * TILE + tl.arange(0, TILE)[None, :]).to(tl.float32)
    return values if byte is None else _dequantize(values, byte)


@triton.jit
def _load_scales(scale, row, tile, H, M, GATED: tl.constexpr):
    """Loads the scale bytes (ROWS,) of gate and up for tile column ``tile``; ``scale`` is column-major."""
    byte = tl.load(scale + tile * M + row)
    return byte, tl.load(scale + (tile + H // TILE) * M + row) if GATED else byte


@triton.jit
def _pairs(first, tile, ROWS: tl.constexpr):
    """Rows and tile columns (2 * ROWS,) of the two tiles of interleaved h that make a tile of gate and one of up."""
    i = tl.arange(0, 2 * ROWS)
    return first + i // 2, 2 * tile + i % 2


@triton.jit
def _load_pairs(h, scale, row, tile, M, TILES: tl.constexpr):
    """As :func:`_load_tiles` for h of TILES tile columns; zeros past the last."""
    at = row.to(tl.int64)[:, None] * (TILES * TILE) + (tile * TILE)[:, None] + tl.arange(0, TILE)[None, :]
    values = tl.load(h + at, mask=(tile < TILES)[:, None], other=0.0).to(tl.float32)
    if scale is not None:
        values = _dequantize(values, tl.load(scale + tile * M + row, mask=tile < TILES, other=1))
    return values


@triton.jit
def _store_pairs(q, scale, values, byte, row, tile, M, TILES: tl.constexpr):
    at = row.to(tl.int64)[:, None] * (TILES * TILE) + (tile * TILE)[:, None] + tl.arange(0, TILE)[None, :]
    tl.store(q + at, values, mask=(tile < TILES)[:, None])
    tl.store(scale + tile * M + row, byte, mask=tile < TILES)


@triton.jit
def _split(pairs, ROWS: tl.constexpr):
    """Gate and up (ROWS, 128) of interleaved tiles (2 * ROWS, 128)."""
    return tl.split(tl.reshape(pairs, (ROWS, TILE, 2)))


@triton.jit
def _join(g, u, ROWS: tl.constexpr):
    """The inverse of :func:`_split`."""
    return tl.reshape(tl.join(g, u), (2 * ROWS, TILE))


@triton.jit
def _load_bias(bias, tile, STRIDE: tl.constexpr, HIDDEN: tl.constexpr):
    """Loads tile column ``tile`` of an expert's bias as fp32 (1, 128), zeros past column HIDDEN."""
    column = tile * TILE + tl.arange(0, TILE)
    return tl.load(bias + column * STRIDE, mask=column < HIDDEN, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _crossed(g, u, g_read, u_read, s, b_g, b_u, p0, p1, p2, BEYOND: tl.constexpr, SCORE_FIRST: tl.constexpr):
    """Masks of gate and up: values that rounding moves to another side of the activation's clamp."""
    if not SCORE_FIRST:
        s = 1.0
    g_side, u_side = BEYOND(_plus(s * g, b_g), _plus(s * u, b_u), p0, p1, p2)
    g_read_side, u_read_side = BEYOND(_plus(s * g_read, b_g), _plus(s * u_read, b_u), p0, p1, p2)
    return g_side != g_read_side, u_side != u_read_side


@triton.jit
def _swiglu_kernel(
    h, score, offsets_E, q, q_scale, h_q, h_scale, M, H, p0, p1, p2, gate_bias, up_bias, E: tl.constexpr,
    FORWARD: tl.constexpr, BEYOND: tl.constexpr, GATED: tl.constexpr, SCORE_FIRST: tl.constexpr,
    BIAS_STRIDE_E: tl.constexpr, BIAS_STRIDE_H: tl.constexpr, HIDDEN: tl.constexpr, PAIRED: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """CTA (tile, row block) computes a tile of the operand, from one of gate and one of up.

    h: (M, 2H) bf16. Unless GATED it is (M, H), which is read as gate and as up, and only gate is stored.
    h_q, h_scale: None, or h is also quantized.
    p0, p1, p2: the activation's parameters. gate_bias, up_bias: None, or (E, HIDDEN).
    PAIRED: None, or h's tile columns where gate and up are interleaved.
    """
    tile, first = tl.program_id(0), tl.program_id(1) * ROWS
    if first >= tl.load(offsets_E + E - 1):
        return
    row = first + tl.arange(0, ROWS)
    up_tile = tile + H // TILE
    N = 2 * H if GATED else H
    pair_row, pair_tile = _pairs(first, tile, ROWS)
    if PAIRED is not None:
        pairs = _load_pairs(h, None, pair_row, pair_tile, M, PAIRED)
        g, u = _split(pairs, ROWS)
    else:
        pairs = None
        g = _load_tiles(h, None, row, tile, N)
        u = _load_tiles(h, None, row, up_tile, N) if GATED else g
    s = 1.0 if score is None else tl.load(score + row)[:, None]
    if gate_bias is not None:
        at = expert_of(offsets_E, first, E).to(tl.int64) * BIAS_STRIDE_E
        b_g = _load_bias(gate_bias + at, tile, BIAS_STRIDE_H, HIDDEN)
        b_u = _load_bias(up_bias + at, tile, BIAS_STRIDE_H, HIDDEN) if GATED else b_g
    else:
        b_g, b_u = None, None
    # Nothing is converted to e4m3 and back here: ptxas of CUDA 12.8, which Triton 3.6 has, then takes other values.
    if h_q is not None and PAIRED is not None:
        kept, byte = scale_tiles(pairs)
        if BEYOND is not None:
            nearest, other = round_both_ways(kept)
            g_read, u_read = _split(_dequantize(nearest, byte), ROWS)
            crossed = _crossed(g, u, g_read, u_read, s, b_g, b_u, p0, p1, p2, BEYOND, SCORE_FIRST)
            kept = tl.where(_join(crossed[0].to(tl.int8), crossed[1].to(tl.int8), ROWS) != 0, other, kept)
        _store_pairs(h_q, h_scale, kept.to(tl.float8e4nv), byte, pair_row, pair_tile, M, PAIRED)
    if h_q is not None and PAIRED is None:
        g_kept, g_byte = scale_tiles(g)
        u_kept, u_byte = scale_tiles(u)
        if BEYOND is not None:
            g_nearest, g_other = round_both_ways(g_kept)
            u_nearest, u_other = round_both_ways(u_kept)
            g_read, u_read = _dequantize(g_nearest, g_byte), _dequantize(u_nearest, u_byte)
            crossed = _crossed(g, u, g_read, u_read, s, b_g, b_u, p0, p1, p2, BEYOND, SCORE_FIRST)
            g_kept, u_kept = tl.where(crossed[0], g_other, g_kept), tl.where(crossed[1], u_other, u_kept)
        _store(h_q, h_scale, g_kept.to(tl.float8e4nv), g_byte, row, tile, M, N)
        if GATED:
            _store(h_q, h_scale, u_kept.to(tl.float8e4nv), u_byte, row, up_tile, M, N)
    if SCORE_FIRST:
        g, u = s * g, s * u
    out = FORWARD(_plus(g, b_g), _plus(u, b_u), p0, p1, p2)
    if not SCORE_FIRST:
        out *= s
    _store_tiles(q, q_scale, out, row, tile, M, H)


@triton.jit
def _plus(x, bias):
    return x if bias is None else x + bias


@functools.cache
def _forward(activation: str, biased: bool, interleaved: bool) -> Kernel:
    entry, absent = ACTIVATIONS[activation], {} if biased else _NO_BIAS
    if not interleaved:
        absent = absent | dict(PAIRED=None)
    functions = dict(FORWARD=entry.forward_triton, BEYOND=entry.beyond_triton)
    return Kernel(_swiglu_kernel, GATED=entry.gated, **functions, **absent)


def _bias_arguments(gate: Tensor | None, up: Tensor | None) -> tuple[tuple[Tensor | None, ...], dict[str, Any]]:
    """Positional and constexpr arguments of a kernel with biases."""
    if gate is None:
        return (), {}
    assert up is None or gate.stride() == up.stride()
    stride_e, stride_h = gate.stride()
    return (gate, up), dict(BIAS_STRIDE_E=stride_e, BIAS_STRIDE_H=stride_h, HIDDEN=gate.shape[1])


def _parameters(spec: ExpertSpec) -> tuple[float, ...]:
    return (*spec.parameters, *(0.0,) * (MAX_PARAMETERS - len(spec.parameters)))


def swiglu_quantize(h_M2H, score_M, offsets_E, expert, keep_h, gate_bias=None, up_bias=None):
    """Kernel of :func:`titan_fp8moe.ops.swiglu_quantize`; leaves rows at and past ``offsets_E[-1]`` unwritten.

    M and H are multiples of 128, ``h_M2H`` is contiguous.
    """
    assert h_M2H.is_contiguous()
    M, N = h_M2H.shape
    H = padded(N // expert.rows_per_unit)
    q, q_scale = empty_rows(h_M2H, M, H)
    h_q, h_scale = empty_rows(h_M2H, M, N, keep_h)
    biases, constants = _bias_arguments(gate_bias, up_bias)
    if expert.interleaved:
        constants["PAIRED"] = N // SCALE_TILE
    warps = CLAMP_WARPS if keep_h and ACTIVATIONS[expert.activation].beyond is not None else WARPS
    _forward(expert.activation, gate_bias is not None, expert.interleaved)[(H // SCALE_TILE, M // ROWS)](
        h_M2H, score_M, offsets_E, q, q_scale, h_q if keep_h else None, h_scale if keep_h else None,
        M, H, *_parameters(expert), *biases, E=offsets_E.shape[0], SCORE_FIRST=expert.score_before_experts,
        ROWS=ROWS, num_warps=warps, **constants,
    )  # fmt: skip
    return q, q_scale, h_q, h_scale


@triton.jit
def _sum_dy(dy, dy_scale, b2, partial, s, row, M, D: tl.constexpr, DIM: tl.constexpr, SCORE_FIRST: tl.constexpr):
    """Sums the CTA's rows of dy (M, D). Returns b2's part of ds (ROWS,), and stores b2's gradient to ``partial`` (D,),
    unless that is None."""
    ds_row = tl.zeros((row.shape[0],), tl.float32)
    for tile in tl.range(D // TILE):
        y = _load_tiles(dy, tl.load(dy_scale + tile * M + row), row, tile, D)
        if not SCORE_FIRST:
            ds_row += tl.sum(y * _load_bias(b2, tile, 1, DIM), axis=1)
            y *= s
        if partial is not None:
            tl.store(partial + tile * TILE + tl.arange(0, TILE), tl.sum(y, axis=0))
    return ds_row


@triton.jit
def _store_sums(partial, dg, du, tile, H, N, GATED: tl.constexpr, PAIRED: tl.constexpr):
    """Stores the CTA's sums of the biases' gradients, in the order of h's columns."""
    if PAIRED is not None:
        column = 2 * tile * TILE + tl.arange(0, 2 * TILE)
        sums = tl.reshape(tl.join(tl.sum(dg, axis=0), tl.sum(du, axis=0)), (2 * TILE,))
        tl.store(partial + column, sums, mask=column < N)
    else:
        column = tile * TILE + tl.arange(0, TILE)
        tl.store(partial + column, tl.sum(dg, axis=0))
        if GATED:
            tl.store(partial + H + column, tl.sum(du, axis=0))


@triton.jit
def _store_gradients(
    dh, dh_scale, dg, du, first, row, tile, M, H: tl.constexpr, GATED: tl.constexpr, PAIRED: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Quantizes gate's and up's gradients (ROWS, 128) into dh, at their tiles in h."""
    if PAIRED is not None:
        values, byte = quantize_tiles(_join(dg, du, ROWS))
        pair_row, pair_tile = _pairs(first, tile, ROWS)
        _store_pairs(dh, dh_scale, values, byte, pair_row, pair_tile, M, PAIRED)
    elif GATED:
        _store_tiles(dh, dh_scale, dg, row, tile, M, 2 * H)
        _store_tiles(dh, dh_scale, du, row, tile + H // TILE, M, 2 * H)
    else:
        _store_tiles(dh, dh_scale, dg, row, tile, M, H)


@triton.jit
def _swiglu_backward_kernel(
    d, h, h_scale, score, offsets_E, dh, dh_scale, q, q_scale, ds, M, p0, p1, p2, gate_bias, up_bias, b2, dy,
    dy_scale, partial, H: tl.constexpr, E: tl.constexpr, FORWARD: tl.constexpr, BACKWARD: tl.constexpr,
    GATED: tl.constexpr, SCORE_FIRST: tl.constexpr, BIAS_STRIDE_E: tl.constexpr, BIAS_STRIDE_H: tl.constexpr,
    HIDDEN: tl.constexpr, D: tl.constexpr, DIM: tl.constexpr, PAIRED: tl.constexpr, STAGES: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """A CTA takes whole rows, so that the order in which ds is summed is fixed. Without ``score`` there is no ds.

    h: bf16, or e4m3 with h_scale. q and q_scale are None unless GEMM 2's operand is recomputed.
    gate_bias, up_bias: None, or (E, HIDDEN). b2: (E, DIM), None where ds does not depend on it; dy: (M, D) e4m3.
    partial: None, or (M // ROWS, N + D) fp32 for the CTAs' sums of the biases' gradients, N the columns of h.
    PAIRED, GATED: as in the forward.
    """
    N: tl.constexpr = PAIRED * TILE if PAIRED is not None else 2 * H if GATED else H
    first = tl.program_id(0) * ROWS
    if first >= tl.load(offsets_E + E - 1):
        return
    row = first + tl.arange(0, ROWS)
    s = 1.0 if score is None else tl.load(score + row)[:, None]
    ds_row = tl.zeros((ROWS,), tl.float32)
    expert = 0
    if gate_bias is not None:
        expert = expert_of(offsets_E, first, E).to(tl.int64)
        gate_bias += expert * BIAS_STRIDE_E
        if GATED:
            up_bias += expert * BIAS_STRIDE_E
    if partial is not None:
        partial += tl.program_id(0).to(tl.int64) * (N + D)
    if dy is not None:
        sums = None if partial is None else partial + N
        ds_row = _sum_dy(dy, dy_scale, b2 + expert * DIM, sums, s, row, M, D, DIM, SCORE_FIRST)
    # Scales are loaded one tile ahead by hand: Triton does not pipeline loads of single bytes.
    next_g_byte, next_u_byte = None, None
    if h_scale is not None and PAIRED is None:
        next_g_byte, next_u_byte = _load_scales(h_scale, row, 0, H, M, GATED)
    for tile in tl.range(H // TILE, num_stages=STAGES):
        up_tile = tile + H // TILE
        g_byte, u_byte = next_g_byte, next_u_byte
        if h_scale is not None and PAIRED is None:
            next_tile = tl.minimum(tile + 1, H // TILE - 1)
            next_g_byte, next_u_byte = _load_scales(h_scale, row, next_tile, H, M, GATED)
        da = _load_tiles(d, None, row, tile, H)
        if PAIRED is not None:
            pair_row, pair_tile = _pairs(first, tile, ROWS)
            h_g, h_u = _split(_load_pairs(h, h_scale, pair_row, pair_tile, M, PAIRED), ROWS)
        else:
            h_g = _load_tiles(h, g_byte, row, tile, N)
            h_u = _load_tiles(h, u_byte, row, up_tile, N) if GATED else h_g
        if SCORE_FIRST:
            g, u = s * h_g, s * h_u
        else:
            g, u = h_g, h_u
        if gate_bias is not None:
            g += _load_bias(gate_bias, tile, BIAS_STRIDE_H, HIDDEN)
            if GATED:
                u += _load_bias(up_bias, tile, BIAS_STRIDE_H, HIDDEN)
        out = FORWARD(g, u, p0, p1, p2)
        if not SCORE_FIRST:
            ds_row += tl.sum(da * out, axis=1)
            out *= s
            da *= s
        dg, du = BACKWARD(g, u, da, p0, p1, p2)
        if partial is not None:
            _store_sums(partial, dg, du, tile, H, N, GATED, PAIRED)
        if SCORE_FIRST:
            ds_row += tl.sum(dg * h_g + du * h_u if GATED else dg * h_g, axis=1)
            dg *= s
            du *= s
        _store_gradients(dh, dh_scale, dg, du, first, row, tile, M, H, GATED, PAIRED, ROWS)
        if q is not None:
            _store_tiles(q, q_scale, out, row, tile, M, H)
    if score is not None:
        tl.store(ds + row, ds_row)


@Kernel
@triton.jit(do_not_specialize=["columns", "hidden", "up_gap", "down_gap"])
def _bias_gradient_kernel(
    partial, offsets_E, dbias, columns, hidden, up_gap, down_gap, WIDTH: tl.constexpr, ROWS: tl.constexpr,
    BLOCKS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """CTA (column block, e) sums the rows of ``partial`` (M // ROWS, WIDTH) that belong to expert e, in a fixed order.

    dbias: (E, columns), without the padding before up, ``up_gap`` columns, and before down, ``down_gap``. Without a
    gate down comes in the place of up.
    """
    e = tl.program_id(1)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    start = tl.load(offsets_E + e - 1, mask=e > 0, other=0) // ROWS
    end = tl.load(offsets_E + e) // ROWS
    at = column + tl.where(column >= hidden, up_gap, 0) + tl.where(column >= 2 * hidden, down_gap, 0)
    total = tl.zeros((BLOCKS, COLUMNS), tl.float32)
    for first in range(start, end, BLOCKS):
        block = first + tl.arange(0, BLOCKS)
        mask = (block < end)[:, None] & (column < columns)[None, :]
        total += tl.load(partial + block.to(tl.int64)[:, None] * WIDTH + at[None, :], mask=mask, other=0.0)
    tl.store(dbias + e.to(tl.int64) * columns + column, tl.sum(total, axis=0), mask=column < columns)


@functools.cache
def _backward(activation: str, biased: bool, interleaved: bool) -> Kernel:
    entry, absent = ACTIVATIONS[activation], {}
    if not biased:
        absent = _NO_BIAS | dict(b2=None, dy=None, dy_scale=None, partial=None, D=None, DIM=None)
    if not interleaved:
        absent = absent | dict(PAIRED=None)
    functions = dict(FORWARD=entry.forward_triton, BACKWARD=entry.backward_triton)
    return Kernel(_swiglu_backward_kernel, GATED=entry.gated, **functions, **absent)


def swiglu_quantize_backward(
    d_MH, h_M2H, h_scale, score_M, offsets_E, expert, recompute_a, gate_bias=None, up_bias=None, b2=None,
    dy=None, dy_scale=None, bias_gradients=False,
):  # fmt: skip
    """Kernel of :func:`titan_fp8moe.ops.swiglu_quantize_backward`; leaves rows at and past ``offsets_E[-1]`` unwritten.

    M and H are multiples of 128, ``d_MH`` and ``h_M2H`` are contiguous. ``h_scale`` may have any strides and is copied
    unless column-major: a saved tensor may return with other strides (``torch.autograd.graph.save_on_cpu``).
    """
    assert d_MH.is_contiguous() and h_M2H.is_contiguous()
    (M, H), N, parameters = d_MH.shape, h_M2H.shape[1], _parameters(expert)
    dh, dh_scale = empty_rows(d_MH, M, N)
    q, q_scale = empty_rows(d_MH, M, H, recompute_a)
    ds = torch.empty(0 if score_M is None else M, dtype=torch.float32, device=d_MH.device)
    partial, biases, constants = None, (), {}
    if gate_bias is not None and b2 is not None and dy is not None:
        (gate_up, constants), D = _bias_arguments(gate_bias, up_bias), dy.shape[1]
        if bias_gradients:
            partial = torch.empty(M // BACKWARD_ROWS, N + D, dtype=torch.float32, device=d_MH.device)
        reads_dy = bias_gradients or not expert.score_before_experts
        rows = (b2.contiguous(), dy, dy_scale) if reads_dy else (None, None, None)
        biases, constants = (*gate_up, *rows, partial), constants | dict(D=D, DIM=b2.shape[1])
    if expert.interleaved:
        constants["PAIRED"] = N // SCALE_TILE
    _backward(expert.activation, gate_bias is not None, expert.interleaved)[(M // BACKWARD_ROWS,)](
        d_MH, h_M2H, None if h_scale is None else column_major(h_scale), score_M, offsets_E,
        dh, dh_scale, q if recompute_a else None, q_scale if recompute_a else None, ds, M,
        *parameters, *biases, H=H, E=offsets_E.shape[0], SCORE_FIRST=expert.score_before_experts,
        STAGES=BACKWARD_STAGES, ROWS=BACKWARD_ROWS, num_warps=BACKWARD_WARPS, **constants,
    )  # fmt: skip
    results = [dh, dh_scale, q, q_scale, ds]
    if partial is not None and gate_bias is not None and b2 is not None:
        results.append(_bias_gradient(partial, offsets_E, gate_bias, b2, N, expert))
    return results


def _bias_gradient(
    partial: Tensor, offsets_E: Tensor, gate_bias: Tensor, b2: Tensor, N: int, spec: ExpertSpec
) -> Tensor:
    """(E, 2 * hidden + D) of the biases' dtype: gate and up in the order of h, down; without a gate (E, hidden + D)."""
    (E, hidden), parts = gate_bias.shape, spec.rows_per_unit
    up_gap = 0 if spec.interleaved else N // parts - hidden
    columns = parts * hidden + b2.shape[1]
    dbias = torch.empty(E, columns, dtype=b2.dtype, device=b2.device)
    _bias_gradient_kernel[(cdiv(columns, BIAS_COLUMNS), E)](
        partial, offsets_E, dbias, columns, hidden, up_gap, N - parts * hidden - up_gap, WIDTH=partial.shape[1],
        ROWS=BACKWARD_ROWS, BLOCKS=32, COLUMNS=BIAS_COLUMNS, num_warps=4,
    )  # fmt: skip
    return dbias
