"""Speed of the grouped GEMMs of DeepSeek-V3's layers, next to PyTorch's, on one Hopper GPU.

    python -m experiments.kernels.gemm --out experiments/kernels/results.json

A figure is TFLOP/s of the median time, back to back (where power limits the clocks), after idling, and after idling
while another kernel occupies 16 SMs, as communication does. All runs start with a cold L2. Groups have 0.7 to 1.3 times
the average number of rows. References:

* ``bf16``: ``torch._grouped_mm``.
* ``torchao rowwise``: ``torch._scaled_grouped_mm``, torchao's, one scale per row and column, fast accumulation.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from experiments.records import measure_each, other_torch
from experiments.timing import group_ends, median_ms, state_records, tflops
from titan_fp8moe import ops, recipe
from titan_fp8moe.kernels.gemm import grouped_mm as kernels

BF16 = torch.bfloat16
LAYERS = [  # name, M routed rows, E local experts, D model dim, H expert hidden dim
    ("671B, 8 ranks", 32768, 32, 7168, 2048),
    ("16B, 1 rank", 98304, 64, 2048, 1408),
]
PEERS = "bf16", "torchao rowwise"
FP32, UNIT = "ours, fp32 out", "TFLOP/s"
ROWWISE = dict(out_dtype=BF16, use_fast_accum=True)
Candidates = dict[str, Callable[[], Tensor]]


def forward_gemm(M: int, N: int, K: int, offsets_E: Tensor) -> Candidates:
    E = offsets_E.shape[0]
    x, w = torch.randn(M, K, device="cuda", dtype=BF16), torch.randn(E, N, K, device="cuda", dtype=BF16)
    (a, a_scale), (b, b_scale) = ops.quantize_rows(x), ops.quantize_weight(w)
    a_scale = recipe.column_major(a_scale)
    ones_M, ones_EN = (torch.ones(shape, device="cuda") for shape in ((M,), (E, N)))
    wT, bT = w.transpose(1, 2), b.transpose(1, 2)
    return {
        "ours": lambda: kernels.grouped_mm(a, a_scale, b, b_scale, offsets_E, BF16),
        "bf16": lambda: torch._grouped_mm(x, wT, offs=offsets_E, out_dtype=BF16),
        "torchao rowwise": lambda: torch._scaled_grouped_mm(a, bT, ones_M, ones_EN, offs=offsets_E, **ROWWISE),
    }


def wgrad_gemm(M: int, N: int, K: int, offsets_E: Tensor) -> Candidates:
    E = offsets_E.shape[0]
    x, dy = torch.randn(M, K, device="cuda", dtype=BF16), torch.randn(M, N, device="cuda", dtype=BF16)
    rows = [(q, recipe.column_major(scale)) for q, scale in (ops.quantize_rows(x), ops.quantize_rows(dy))]
    b, b_scale, a, a_scale = ops.transpose_pair(*rows[0], *rows[1], offsets_E, "balanced")
    ones_EN, ones_EK = (torch.ones(shape, device="cuda") for shape in ((E * N,), (E * K,)))
    return {
        "ours": lambda: kernels.grouped_mm_wgrad(a, a_scale, b, b_scale, offsets_E, BF16),
        FP32: lambda: kernels.grouped_mm_wgrad(a, a_scale, b, b_scale, offsets_E, torch.float32),
        "bf16": lambda: torch._grouped_mm(dy.t(), x, offs=offsets_E, out_dtype=BF16),
        "torchao rowwise": lambda: torch._scaled_grouped_mm(a, b.t(), ones_EN, ones_EK, offs=offsets_E, **ROWWISE),
    }


def measure(case: tuple) -> list[dict]:
    """The records of one of :func:`cases`."""
    layer, M, E, title, make, N, K = case
    offsets_E = group_ends(M, E)
    candidates = make(M, N, K, offsets_E)
    speeds = tflops(median_ms(candidates, busy_sms=True), M * N * K)
    shape = ", ".join([layer, title, f"M {M}, E {E}, N {N}, K {K}", *other_torch()])
    if make is not wgrad_gemm:
        return state_records("grouped_mm", shape, speeds, "ours", PEERS, UNIT)
    found = state_records("grouped_mm_wgrad", shape, speeds, "ours", PEERS, UNIT)
    return found + state_records("grouped_mm_wgrad_fp32", shape, speeds, FP32, ("bf16",), UNIT)


def cases() -> Iterator[tuple]:
    """Layer, M, E, title, GEMM, N and K of the six GEMMs of each layer."""
    for layer, M, E, D, H in LAYERS:
        for title, make, N, K in (
            ("forward 1", forward_gemm, 2 * H, D),
            ("forward 2", forward_gemm, D, H),
            ("dgrad 2", forward_gemm, H, D),
            ("dgrad 1", forward_gemm, D, 2 * H),
            ("wgrad 1", wgrad_gemm, 2 * H, D),
            ("wgrad 2", wgrad_gemm, D, H),
        ):
            yield layer, M, E, title, make, N, K


if __name__ == "__main__":
    measure_each(__doc__, "GEMM", cases(), measure)
