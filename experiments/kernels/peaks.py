"""What one GPU reaches at its best: bytes of a device copy, and products of cuBLAS in bf16 and FP8, next to ours.

    python -m experiments.kernels.peaks --out experiments/kernels/results.json

FP8 of cuBLAS has one scale per tensor and fast accumulation; ours has scales per 1x128 tile and 128x128 block, and adds
up in fp32 after every 128 values. Other scripts measure shapes of models; shares of a peak are shares of these figures.
"""

from collections.abc import Callable

import torch

from experiments.records import measure_each, record
from experiments.timing import median_ms, state_records, tflops
from titan_fp8moe import ops, recipe

BF16 = torch.bfloat16
SHAPES = [(4096, 4096, 4096), (8192, 8192, 8192), (16384, 8192, 8192), (32768, 4096, 7168), (8192, 16384, 16384)]
COPY_BYTES = 2**31
PEERS = "bf16", "fp8 per tensor"


def products(M: int, N: int, K: int) -> dict[str, Callable[[], object]]:
    x, w = (torch.randn(rows, K, device="cuda", dtype=BF16) for rows in (M, N))
    (a, a_scale), b = ops.quantize_rows(x), ops.quantize_weight(w.unsqueeze(0))
    ends, one = torch.tensor([M], dtype=torch.int32, device="cuda"), torch.ones((), device="cuda")
    a_scale, b_q = recipe.column_major(a_scale), b.q[0]
    return {
        "ours": lambda: ops.grouped_mm(a, a_scale, *b, ends, BF16),
        "bf16": lambda: x @ w.t(),
        "fp8 per tensor": lambda: torch._scaled_mm(a, b_q.t(), one, one, out_dtype=BF16, use_fast_accum=True),
    }


def measure(shape: tuple[int, int, int] | None) -> list[dict]:
    """Records of a product, or of the copy."""
    if shape is None:
        source, target = (torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda") for _ in range(2))
        times = median_ms({"copy": lambda: target.copy_(source)})
        speeds = {f"{COPY_BYTES} bytes, {state}": 2e-6 * COPY_BYTES / of["copy"] for state, of in times.items()}
        return [record("peak copy", title, "GB/s", speed, "", None) for title, speed in speeds.items()]
    (M, N, K), title = shape, "M {}, N {}, K {}".format(*shape)
    speeds = tflops(median_ms(products(M, N, K)), M * N * K)
    return state_records("peak product", title, speeds, "ours", PEERS, "TFLOP/s")


if __name__ == "__main__":
    measure_each(__doc__, "shape", (None, *SHAPES), measure)
