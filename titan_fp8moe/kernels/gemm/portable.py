"""GEMMs over expert groups in plain Triton. They run everywhere, in Triton's interpreter too.

:mod:`.grouped_mm` picks them where there is no Hopper GPU. On sm_90 the kernels in Gluon are faster.
These are not tuned for other GPUs: they have run on sm_90 only. CI also compiles them for sm_89, where they spill
registers, and for sm_100 and sm_120.

**Loop.** Both kernels have the same shape. A persistent CTA walks over 128x128 output tiles. For each block of 128
along the contraction dim, TMA loads two 128x128 fp8 tiles into shared memory. Their product, times their scales, is
added to an fp32 accumulator in registers. This promotion applies the scales and keeps the precision: Hopper's tensor
cores sum fp8 products with about 14 bits.

**Experts.** Every expert's group is a multiple of 128 rows, so a tile of rows belongs to one expert. The kernel reads
which one from the group ends in device memory. The CPU need not know how many rows an expert has.

**Range.** A product's factor, 2**(e_a + e_b), is an fp32 number, exact down to 2**-149. With an fp32 scale of b it is
exact where it is a normal number. A factor that underflows belongs to a result below the smallest normal number. It
overflows, to Inf, only where the largest values of the two tiles have a product beyond fp32. Indices are int32: fewer
than 2**31 rows, and fewer than 2**31 scales per operand.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from titan_fp8moe.recipe import GEMM_TILE, SCALE_BITS

# Rows of tiles in a swizzle group. CTAs that run at the same time then share both operands in L2: 132 CTAs on 8 rows of
# tiles read 8 + 17 strips.
GROUP_SIZE_M = 8
# sm_120 has 99 KiB of shared memory, of which a stage takes 32 and a result up to 64.
STAGES, WGRAD_STAGES = 3, 2
TILES = [GEMM_TILE, GEMM_TILE]


@triton.jit
def _scale(bits, SHIFT: tl.constexpr):
    """A scale as fp32: a byte is its exponent field, other integers are its first bits."""
    return (bits.to(tl.int32) << SHIFT).to(tl.float32, bitcast=True)


@triton.jit
def _tile_position(index, num_rows, num_columns, GROUP_SIZE_M: tl.constexpr):
    """Row and column of the index-th tile. Swizzle groups follow each other from top to bottom, each walked column by
    column."""
    first_row = index // (GROUP_SIZE_M * num_columns) * GROUP_SIZE_M
    height = tl.minimum(num_rows - first_row, GROUP_SIZE_M)
    index -= first_row * num_columns
    return first_row + index % height, index // height


# Strides and alignments that depend on the number of rows must not recompile a kernel at every step.
@triton.jit(
    do_not_specialize=[
        "a_scale_stride_m",
        "a_scale_stride_k",
        "b_scale_stride_e",
        "b_scale_stride_n",
        "b_scale_stride_k",
    ],
    do_not_specialize_on_alignment=["a_scale", "b_scale"],
)
def grouped_mm_kernel(
    a_desc,  # (M, K) e4m3
    b_desc,  # (E * N, K) e4m3
    out_desc,  # (M, N)
    a_scale,  # (M, K // 128) bytes, fast when column-major
    b_scale,  # (E, N // 128, K // 128) integers, of B_SHIFT
    offsets_E,
    a_scale_stride_m,
    a_scale_stride_k,
    b_scale_stride_e,
    b_scale_stride_n,
    b_scale_stride_k,
    N: tl.constexpr,
    K: tl.constexpr,
    E: tl.constexpr,
    E_POW2: tl.constexpr,
    B_SHIFT: tl.constexpr,
    TILE: tl.constexpr,
    GROUP_SIZE_M: tl.constexpr,
):
    """Each CTA computes every num_programs-th tile of out[m] = a[m] @ b[expert of m]^T."""
    experts = tl.arange(0, E_POW2)
    ends = tl.load(offsets_E + experts, mask=experts < E, other=2**31 - 1)
    num_rows = tl.load(offsets_E + E - 1) // TILE
    num_columns: tl.constexpr = N // TILE
    # Flattened, the two loops are one pipeline: TMA loads the next tile's operands while this tile is being stored.
    for tile in tl.range(tl.program_id(0), num_rows * num_columns, tl.num_programs(0), flatten=True):
        row, column = _tile_position(tile, num_rows, num_columns, GROUP_SIZE_M)
        m, n = row * TILE, column * TILE
        expert = tl.sum((ends <= m).to(tl.int32))
        a_scale_ptrs = a_scale + (m + tl.arange(0, TILE)) * a_scale_stride_m
        b_scale_ptr = b_scale + expert * b_scale_stride_e + column * b_scale_stride_n
        acc = tl.zeros((TILE, TILE), dtype=tl.float32)
        for k in range(K // TILE):
            # Scales are loaded before the product and used after it, which hides their latency.
            a_byte = tl.load(a_scale_ptrs + k * a_scale_stride_k)
            b_bits = tl.load(b_scale_ptr + k * b_scale_stride_k)
            a = a_desc.load([m, k * TILE])
            b = b_desc.load([expert * N + n, k * TILE])
            product = tl.dot(a, b.T)
            acc += product * (_scale(a_byte, 23) * _scale(b_bits, B_SHIFT))[:, None]
        out_desc.store([m, n], acc.to(out_desc.dtype))


@triton.jit(
    do_not_specialize=["a_scale_stride_n", "a_scale_stride_m", "b_scale_stride_k", "b_scale_stride_m"],
    do_not_specialize_on_alignment=["a_scale", "b_scale"],
)
def grouped_mm_wgrad_kernel(
    a_desc,  # (N, M) e4m3
    b_desc,  # (K, M) e4m3
    out_desc,  # (E * N, K); if PARTS is None, (E, rows, columns)
    a_scale,  # (N // 128, M // 128) bytes
    b_scale,  # (K // 128, M // 128) bytes
    offsets_E,
    a_scale_stride_n,
    a_scale_stride_m,
    b_scale_stride_k,
    b_scale_stride_m,
    N: tl.constexpr,
    K: tl.constexpr,
    E: tl.constexpr,
    PARTS: tl.constexpr,
    TILE: tl.constexpr,
    GROUP_SIZE_M: tl.constexpr,
):
    """Each CTA computes every num_programs-th tile of out[e] = sum of a[:, m] b[:, m]^T over group e's rows m."""
    num_rows: tl.constexpr = N // TILE
    num_columns: tl.constexpr = K // TILE
    num_tiles: tl.constexpr = num_rows * num_columns
    for tile in range(tl.program_id(0), E * num_tiles, tl.num_programs(0)):
        expert = tile // num_tiles
        row, column = _tile_position(tile - expert * num_tiles, num_rows, num_columns, GROUP_SIZE_M)
        n, k = row * TILE, column * TILE
        start = tl.load(offsets_E + expert - 1, mask=expert > 0, other=0) // TILE
        end = tl.load(offsets_E + expert) // TILE
        a_scale_ptr = a_scale + row * a_scale_stride_n
        b_scale_ptr = b_scale + column * b_scale_stride_k
        acc = tl.zeros((TILE, TILE), dtype=tl.float32)
        for block in range(start, end):
            a_byte = tl.load(a_scale_ptr + block * a_scale_stride_m)
            b_byte = tl.load(b_scale_ptr + block * b_scale_stride_m)
            a = a_desc.load([n, block * TILE])
            b = b_desc.load([k, block * TILE])
            product = tl.dot(a, b.T)
            acc += product * (_scale(a_byte, 23) * _scale(b_byte, 23))
        # An expert without rows gets its zeros here. Rows and columns past the result's last are dropped.
        if PARTS is None:
            out_desc.store([expert, n, k], tl.reshape(acc.to(out_desc.dtype), (1, TILE, TILE)))
        else:
            part_rows: tl.constexpr = N // PARTS
            out_desc.store([(n // part_rows * E + expert) * part_rows + n % part_rows, k], acc.to(out_desc.dtype))


def _tiles(x: Tensor) -> TensorDescriptor:
    """TMA descriptor of a matrix that is read or written in 128x128 tiles; its rows may be strided."""
    return TensorDescriptor.from_tensor(x, TILES)


def _grid_size(num_tiles: int, device: torch.device) -> int:
    """One CTA per SM. On a CPU, in Triton's interpreter, there are 4, so that each has several tiles."""
    limit = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
    return min(num_tiles, limit)


def launch_forward(a_MK, a_scale, b_ENK, b_scale, offsets_E, out):
    """As :func:`.forward.launch_forward`."""
    (M, K), (E, N, _) = a_MK.shape, b_ENK.shape
    # The grid covers the whole buffer. Only the device knows how many of its rows are in use.
    grid = (_grid_size(M // GEMM_TILE * (N // GEMM_TILE), a_MK.device),)
    bits, b_shift = SCALE_BITS[b_scale.dtype]
    grouped_mm_kernel[grid](
        _tiles(a_MK), _tiles(b_ENK.view(E * N, K)), _tiles(out), a_scale.view(torch.uint8), b_scale.view(bits),
        offsets_E, *a_scale.stride(), *b_scale.stride(), N=N, K=K, E=E, E_POW2=triton.next_power_of_2(E),
        B_SHIFT=b_shift, TILE=GEMM_TILE, GROUP_SIZE_M=GROUP_SIZE_M, num_warps=8, num_stages=STAGES,
        enable_fp_fusion=True,  # as launch.Kernel
    )  # fmt: skip


def launch_wgrad(aT_NM, aT_scale, bT_KM, bT_scale, offsets_E, out, parts):
    """As :func:`.wgrad.launch_wgrad`."""
    N, K, E = aT_NM.shape[0], bT_KM.shape[0], offsets_E.shape[0]
    grid = (_grid_size(E * (N // GEMM_TILE) * (K // GEMM_TILE), aT_NM.device),)
    result = TensorDescriptor.from_tensor(out, [1, *TILES]) if parts is None else _tiles(out.view(-1, out.shape[2]))
    grouped_mm_wgrad_kernel[grid](
        _tiles(aT_NM), _tiles(bT_KM), result, aT_scale.view(torch.uint8), bT_scale.view(torch.uint8), offsets_E,
        *aT_scale.stride(), *bT_scale.stride(), N=N, K=K, E=E, PARTS=parts, TILE=GEMM_TILE, GROUP_SIZE_M=GROUP_SIZE_M,
        num_warps=8, num_stages=WGRAD_STAGES, enable_fp_fusion=True,
    )  # fmt: skip
