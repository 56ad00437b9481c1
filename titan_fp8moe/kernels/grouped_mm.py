"""GEMMs over expert groups on Hopper, in plain Triton.

Two kernels, one shape of loop: a persistent program walks over 128x128 output tiles; each step multiplies two 128x128
fp8 tiles that TMA brought to shared memory, and adds the product, times a power of two, to an fp32 accumulator in
registers. The promotion every 128 of the contraction dim is where scales are applied and where precision is kept:
Hopper's tensor cores sum fp8 products with about 14 bits.

Every expert's group is a multiple of 128 rows, so a tile of rows belongs to one expert, and which one is read off the
group ends in device memory: the host never learns how many rows an expert got.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

TILE = tl.constexpr(128)
# Tiles are visited in super-rows, so that the programs running at one time share both operands in L2: 132 programs on
# 8 rows of tiles read 8 + 17 strips.
SUPER_ROW = tl.constexpr(8)
INT_MAX = tl.constexpr(2**31 - 1)


@triton.jit
def _power_of_two(byte):
    """fp32 2**(byte - 127): a scale byte is an fp32 exponent field."""
    return (byte.to(tl.int32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _tile_position(index, num_rows, num_columns):
    """Row and column of the index-th tile: super-rows top to bottom, columns in a super-row, rows in a column."""
    first_row = index // (SUPER_ROW * num_columns) * SUPER_ROW
    height = tl.minimum(num_rows - first_row, SUPER_ROW)
    index = index % (SUPER_ROW * num_columns)
    return first_row + index % height, index // height


@triton.jit(do_not_specialize=["a_scale_stride_k"])
def grouped_mm_kernel(
    a_desc,  # (M, K) e4m3
    b_desc,  # (E * N, K) e4m3
    out_desc,  # (M, N)
    a_scale,  # (M, K // 128) bytes, stride 1 along M
    b_scale,  # (E, N // 128, K // 128) bytes
    offsets_E,
    a_scale_stride_k,
    b_scale_stride_e,
    b_scale_stride_n,
    b_scale_stride_k,
    N: tl.constexpr,
    K: tl.constexpr,
    E: tl.constexpr,
    E_POW2: tl.constexpr,
):
    """One program computes every num_programs-th tile of out[m] = a[m] @ b[expert of m]^T."""
    experts = tl.arange(0, E_POW2)
    ends = tl.load(offsets_E + experts, mask=experts < E, other=INT_MAX)
    row_tiles = tl.load(offsets_E + E - 1) // TILE
    column_tiles: tl.constexpr = N // TILE
    for tile in range(tl.program_id(0), row_tiles * column_tiles, tl.num_programs(0)):
        m, n = _tile_position(tile, row_tiles, column_tiles)
        expert = tl.sum((ends <= m * TILE).to(tl.int32))
        a_scale_ptrs = a_scale + m * TILE + tl.arange(0, TILE)
        b_scale_ptr = b_scale + expert * b_scale_stride_e + n * b_scale_stride_n
        acc = tl.zeros((TILE, TILE), dtype=tl.float32)
        for k in range(K // TILE):
            # Scales are requested before the product and used after it, which hides their latency.
            a_byte = tl.load(a_scale_ptrs + k * a_scale_stride_k)
            b_byte = tl.load(b_scale_ptr + k * b_scale_stride_k)
            a = a_desc.load([m * TILE, k * TILE])
            b = b_desc.load([expert * N + n * TILE, k * TILE])
            product = tl.dot(a, b.T)
            # The factor is exact down to 2**-149; what it flushes would be a result below the normal fp32 numbers.
            acc += product * (_power_of_two(a_byte) * _power_of_two(b_byte))[:, None]
        out_desc.store([m * TILE, n * TILE], acc.to(out_desc.dtype))


@triton.jit(do_not_specialize=["a_scale_stride", "b_scale_stride"])
def grouped_mm_wgrad_kernel(
    a_desc,  # (N, M) e4m3
    b_desc,  # (K, M) e4m3
    out_desc,  # (E * N, K)
    a_scale,  # (N // 128, M // 128) bytes, or (N, M // 128) if SCALE_PER_COLUMN; stride 1 along M
    b_scale,  # (K // 128, M // 128) bytes, or (K, M // 128)
    offsets_E,
    a_scale_stride,
    b_scale_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    E: tl.constexpr,
    SCALE_PER_COLUMN: tl.constexpr,
):
    """One program computes every num_programs-th tile of out[e] = sum over m in group e of a[:, m] b[:, m]^T."""
    row_tiles: tl.constexpr = N // TILE
    column_tiles: tl.constexpr = K // TILE
    for tile in range(tl.program_id(0), E * row_tiles * column_tiles, tl.num_programs(0)):
        expert = tile // (row_tiles * column_tiles)
        n, k = _tile_position(tile % (row_tiles * column_tiles), row_tiles, column_tiles)
        start = tl.load(offsets_E + expert - 1, mask=expert > 0, other=0) // TILE
        end = tl.load(offsets_E + expert) // TILE
        if SCALE_PER_COLUMN:
            a_scale_ptrs = a_scale + (n * TILE + tl.arange(0, TILE)) * a_scale_stride
            b_scale_ptrs = b_scale + (k * TILE + tl.arange(0, TILE)) * b_scale_stride
        else:
            a_scale_ptrs = a_scale + n * a_scale_stride
            b_scale_ptrs = b_scale + k * b_scale_stride
        acc = tl.zeros((TILE, TILE), dtype=tl.float32)
        for m in range(start, end):
            a_byte = tl.load(a_scale_ptrs + m)
            b_byte = tl.load(b_scale_ptrs + m)
            a = a_desc.load([n * TILE, m * TILE])
            b = b_desc.load([k * TILE, m * TILE])
            product = tl.dot(a, b.T)
            if SCALE_PER_COLUMN:
                acc += product * _power_of_two(a_byte)[:, None] * _power_of_two(b_byte)[None, :]
            else:
                acc += product * (_power_of_two(a_byte) * _power_of_two(b_byte))
        # An expert without rows writes its zeros.
        out_desc.store([expert * N + n * TILE, k * TILE], acc.to(out_desc.dtype))
