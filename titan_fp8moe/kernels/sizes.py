"""Sizes for launches: the limit on rows, integer arithmetic, and results that ops and their fakes allocate alike.

A layer's Python calls these functions 20 times, for which Triton's ``cdiv`` and ``next_power_of_2`` are slow.
"""

import torch
from torch import Tensor

from titan_fp8moe.recipe import BLOCK, E8M0, FP8, SCALE_TILE

MAX_ROWS = 2**21 - 128
"""The most rows that a rank may have in a layer, padding included. A CUDA grid has at most 65535 blocks along y, which
have 32 rows here."""


def cdiv(x: int, y: int) -> int:
    return -(-x // y)


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()


def empty_rows(like: Tensor, M: int, D: int, there: bool = True) -> tuple[Tensor, Tensor]:
    """Uninitialized (M, D) e4m3 and its (M, D // 128) e8m0 scales, column-major. Both are empty unless ``there``."""
    device = like.device
    if not there:
        return torch.empty(0, dtype=FP8, device=device), torch.empty(0, dtype=E8M0, device=device)
    q = torch.empty(M, D, dtype=FP8, device=device)  # a tuple of sizes takes half a microsecond longer
    return q, torch.empty_strided((M, D // SCALE_TILE), (1, M), dtype=E8M0, device=device)


def empty_weight(
    like: Tensor, E: int, N: int, K: int, plain: bool, transposed: bool, scales: torch.dtype = E8M0
) -> tuple[Tensor, Tensor, Tensor]:
    """Uninitialized results of :func:`titan_fp8moe.kernels.quantize.quantize_weight`."""
    device = like.device
    q = torch.empty(*((E, N, K) if plain else (0,)), dtype=FP8, device=device)
    q_t = torch.empty(*((E, K, N) if transposed else (0,)), dtype=FP8, device=device)
    return q, q_t, torch.empty(E, N // BLOCK, K // BLOCK, dtype=scales, device=device)
