"""Speed of the grouped GEMMs, next to PyTorch's, on one Hopper GPU.

    python -m experiments.kernels.gemm [--quick] --out experiments/kernels/results.json    layers of DeepSeek-V3
    python -m experiments.kernels.gemm --range --out experiments/kernels/results.json      few to many rows and groups
    python -m experiments.kernels.plot experiments/kernels/results.json                    draws what --range measured

A figure is TFLOP/s of the median time, back to back (where power limits the clocks) and after idling. Layers are also
measured while another kernel occupies 16 SMs, as communication does. All runs start with a cold L2, except those of
``--range`` back to back. Groups have 0.7 to 1.3 times the average number of rows. References:

* ``bf16``: ``torch._grouped_mm``.
* ``torchao rowwise``: ``torch._scaled_grouped_mm``, torchao's, one scale per row and column, fast accumulation.
* ``cublas dense fp8``: ``torch._scaled_mm``, one scale per tensor, fast accumulation; one GEMM of the same size.

``--range`` covers 2,048 to 204,800 rows and 2 to 256 groups, balanced and skewed (one group has half of the rows, a
quarter of the groups has none). It times CUDA graphs, because Python takes longer to launch a small GEMM than the GPU
takes to run it; "host" is the time of a launch. Each result is checked against float64 products of the dequantized
operands, in 16 groups and up to 1024 rows of each, over memory filled with NaN.

Records are written after each GEMM.
"""

import argparse
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor

from titan_fp8moe import ops, recipe
from titan_fp8moe.kernels.gemm import grouped_mm as kernels
from titan_fp8moe.recipe import TILE
from titan_fp8moe.testing import (
    AFTER_IDLING,
    environment,
    graphed,
    group_ends,
    host_ms,
    launched,
    median_ms,
    write_records,
)

BF16 = torch.bfloat16
LAYERS = [  # name, M routed rows, E local experts, D model dim, H expert hidden dim
    ("671B, 32 ranks", 32768, 8, 7168, 2048),
    ("671B, 8 ranks", 32768, 32, 7168, 2048),
    ("16B, 1 rank", 98304, 64, 2048, 1408),
    ("16B, 8 ranks", 98304, 8, 2048, 1408),
]
REFERENCES = ("bf16", "torchao rowwise", "cublas dense fp8")
RANGE_SHAPES = [(4096, 7168), (7168, 4096), (2816, 2048), (2048, 1408)]  # N, K
RANGE_WGRADS = [(4096, 7168), (2048, 1408)]
RANGE_BALANCED = [  # M rows, E groups
    *((2048, 2), (2048, 8)),
    *((8192, 8), (8192, 32), (8192, 64)),
    *((32768, 2), (32768, 8), (32768, 32), (32768, 256)),
    *((98304, 8), (98304, 64), (98304, 256)),
    *((204800, 8), (204800, 64), (204800, 256)),
]
RANGE_SKEWED = [(2048, 8), (2048, 32), (8192, 32), (32768, 8), (98304, 64), (204800, 256)]


@dataclass
class Gemm:
    """``operands`` are those of :func:`titan_fp8moe.kernels.gemm.grouped_mm` or ``grouped_mm_wgrad``."""

    operands: tuple[Tensor, ...]
    candidates: dict[str, Callable]


def forward_gemm(M: int, N: int, K: int, offsets_E: Tensor) -> Gemm:
    E = offsets_E.shape[0]
    x, w = torch.randn(M, K, device="cuda", dtype=BF16), torch.randn(E, N, K, device="cuda", dtype=BF16)
    (a, a_scale), (b, b_scale) = ops.quantize_rows(x), ops.quantize_weight(w)
    a_scale = recipe.column_major(a_scale)
    ones_M, ones_EN, one = (torch.ones(shape, device="cuda") for shape in ((M,), (E, N), ()))
    wT, bT = w.transpose(1, 2), b.transpose(1, 2)
    candidates = {
        "ours": lambda: kernels.grouped_mm(a, a_scale, b, b_scale, offsets_E, BF16),
        "bf16": lambda: torch._grouped_mm(x, wT, offs=offsets_E, out_dtype=BF16),
        "torchao rowwise": lambda: torch._scaled_grouped_mm(
            a, bT, ones_M, ones_EN, offs=offsets_E, out_dtype=BF16, use_fast_accum=True
        ),
        "cublas dense fp8": lambda: torch._scaled_mm(a, bT[0], one, one, out_dtype=BF16, use_fast_accum=True),
    }
    return Gemm((a, a_scale, b, b_scale), candidates)


def wgrad_gemm(M: int, N: int, K: int, offsets_E: Tensor) -> Gemm:
    E = offsets_E.shape[0]
    x, dy = torch.randn(M, K, device="cuda", dtype=BF16), torch.randn(M, N, device="cuda", dtype=BF16)
    rows = [(q, recipe.column_major(scale)) for q, scale in (ops.quantize_rows(x), ops.quantize_rows(dy))]
    b, b_scale, a, a_scale = ops.transpose_pair(*rows[0], *rows[1], offsets_E, "balanced")
    ones_EN, ones_EK, one = (torch.ones(shape, device="cuda") for shape in ((E * N,), (E * K,), ()))
    candidates = {
        "ours": lambda: kernels.grouped_mm_wgrad(a, a_scale, b, b_scale, offsets_E, BF16),
        "ours, fp32 out": lambda: kernels.grouped_mm_wgrad(a, a_scale, b, b_scale, offsets_E, torch.float32),
        "bf16": lambda: torch._grouped_mm(dy.t(), x, offs=offsets_E, out_dtype=BF16),
        "torchao rowwise": lambda: torch._scaled_grouped_mm(
            a, b.t(), ones_EN, ones_EK, offs=offsets_E, out_dtype=BF16, use_fast_accum=True
        ),
        "cublas dense fp8": lambda: torch._scaled_mm(a, b.t(), one, one, out_dtype=BF16, use_fast_accum=True),
    }
    return Gemm((a, a_scale, b, b_scale), candidates)


def gemms(D: int, H: int) -> list[tuple[str, Callable, int, int]]:
    """(name, GEMM, N, K) of a layer's six GEMMs."""
    return [
        ("forward 1", forward_gemm, 2 * H, D),
        ("forward 2", forward_gemm, D, H),
        ("dgrad 2", forward_gemm, H, D),
        ("dgrad 1", forward_gemm, D, 2 * H),
        ("wgrad 1", wgrad_gemm, 2 * H, D),
        ("wgrad 2", wgrad_gemm, D, H),
    ]


# --- error ------------------------------------------------------------------------------------------------------------


def over_nan(run: Callable, *args) -> Tensor:
    """Runs with memory from ``torch.empty`` filled with NaN: what is not written is seen."""
    empty = torch.empty

    def poisoned(*args, **kwargs):
        out = empty(*args, **kwargs)
        out.view(torch.uint8).fill_(0xFF)
        return out

    with patch.object(torch, "empty", poisoned):
        return run(*args)


def sample(offsets_E: Tensor) -> Iterator[tuple[int, int, int]]:
    """(expert, start, end) of the largest, the first and the last group, and others up to 16."""
    ends = offsets_E.tolist()
    groups = list(zip(range(len(ends)), [0, *ends], ends, strict=False))
    largest = max(groups, key=lambda group: group[2] - group[1])
    yield from dict.fromkeys([largest, groups[0], groups[-1], *random.sample(groups, min(13, len(groups)))])


def both_ends(start: int, end: int) -> list[slice]:
    """The first and the last 512 of a range, or all of it."""
    return [slice(start, end)] if end - start <= 1024 else [slice(start, start + 512), slice(end - 512, end)]


def sampled_error(pairs: Iterator[tuple[Tensor, Tensor]]) -> tuple[float, float]:
    """||out - ref|| / ||ref||, and the same of the worst 128x128 block, of (out, ref) in float64, (m, n) each."""
    wrong, size, worst = 0.0, 0.0, 0.0
    for out, ref in pairs:
        blocks = (ref.shape[0] // TILE, TILE, ref.shape[1] // TILE, TILE)
        error_2, ref_2 = ((x**2).view(blocks).sum((1, 3)) for x in (out.double() - ref, ref))
        wrong, size = wrong + error_2.sum().item(), size + ref_2.sum().item()
        if ref_2.numel():
            # An expert without rows has a weight gradient of zeros, and an error only if it is not.
            worst = max(worst, torch.where(error_2 == 0, 0, error_2 / ref_2).sqrt().max().item())
    return (wrong / size) ** 0.5, worst


def forward_error(operands: tuple[Tensor, ...], offsets_E: Tensor, dtype: torch.dtype) -> tuple[float, float]:
    a, a_scale, b, b_scale = operands
    out = over_nan(kernels.grouped_mm, *operands, offsets_E, dtype)

    def pairs():
        for e, start, end in sample(offsets_E):
            w = recipe.dequantize(b[e], b_scale[e], torch.float64)
            for rows in both_ends(start, end):
                if rows.stop > rows.start:
                    yield out[rows], recipe.dequantize(a[rows], a_scale[rows], torch.float64) @ w.t()

    return sampled_error(pairs())


def wgrad_error(operands: tuple[Tensor, ...], offsets_E: Tensor, dtype: torch.dtype) -> tuple[float, float]:
    a, a_scale, b, b_scale = operands
    out = over_nan(kernels.grouped_mm_wgrad, *operands, offsets_E, dtype)

    def dequantized(q, scale, rows, start, end):
        blocks = slice(rows.start // TILE, rows.stop // TILE), slice(start // TILE, end // TILE)
        return recipe.dequantize(q[rows, start:end], scale[blocks], torch.float64)

    def pairs():
        for e, start, end in sample(offsets_E):
            if start == end:
                yield out[e], torch.zeros_like(out[e], dtype=torch.float64)
                continue
            for rows in both_ends(0, a.shape[0]):
                for columns in both_ends(0, b.shape[0]):
                    rhs = dequantized(b, b_scale, columns, start, end).t()
                    yield out[e, rows, columns], dequantized(a, a_scale, rows, start, end) @ rhs

    return sampled_error(pairs())


# --- tables -----------------------------------------------------------------------------------------------------------


def speed_records(name: str, shape: str, flop: int, times: dict[str, dict[str, float]], **more) -> list[dict]:
    """A record for each state and reference."""
    tflops = {state: {who: flop / ms * 1e-9 for who, ms in by_name.items()} for state, by_name in times.items()}
    return [
        {
            "name": name,
            "shape": f"{shape}, {state}",
            "value": round(speed["ours"], 1),
            "unit": "TFLOP/s",
            "reference": reference,
            "reference_value": round(speed[reference], 1),
            "speedup": round(speed["ours"] / speed[reference], 3),
        }
        | more
        for state, speed in tflops.items()
        for reference in speed
        if reference != "ours"
    ]


def cells(names: tuple[str, ...], flop: int, times: dict[str, dict[str, float]], width: int) -> str:
    """Of each candidate its speed in each state."""
    speeds = [[flop / t.get(name, float("nan")) * 1e-9 for t in times.values()] for name in names]
    return "".join(f"{' / '.join(f'{speed:.0f}' for speed in row):>{width}}" for row in speeds)


def benchmark_layers(quick: bool) -> Iterator[list[dict]]:
    """The records of one GEMM after another."""
    rounds, rep_ms = (1, 30) if quick else (5, 60)
    names = ("ours", "ours, fp32 out", *REFERENCES)
    print(f"{'TFLOP/s, back to back / idle / busy':34}{'N':>6}{'K':>6}" + "".join(f"{name:>20}" for name in names))
    for layer, M, E, D, H in LAYERS:
        offsets_E = group_ends(M, E)
        for title, make, N, K in gemms(D, H):
            times = median_ms(
                make(M, N, K, offsets_E).candidates, rounds, launched(rep_ms), rounds_with_busy_sms=rounds
            )
            flop = 2 * M * N * K
            print(f"{layer + ', ' + title:34}{N:6}{K:6}" + cells(names, flop, times, 20), flush=True)
            op = "grouped_mm_wgrad" if make is wgrad_gemm else "grouped_mm"
            yield speed_records(op, f"{layer}, {title}, M {M}, E {E}, N {N}, K {K}", flop, times)


def range_cases() -> Iterator[tuple[Callable, int, int, int, int, bool]]:
    for skewed, sizes in ((False, RANGE_BALANCED), (True, RANGE_SKEWED)):
        for make, shapes in ((forward_gemm, RANGE_SHAPES), (wgrad_gemm, RANGE_WGRADS)):
            for N, K in shapes:
                for M, E in sizes:
                    yield make, M, E, N, K, skewed


def benchmark_range() -> Iterator[list[dict]]:
    """The records of one case after another."""
    names = ("ours", *REFERENCES)
    print(f"{'TFLOP/s, back to back / after idling':39}" + "".join(f"{name.split()[-1]:>13}" for name in names), end="")
    print("   host µs: ours, bf16, rowwise; error and worst block, bf16 (and fp32)")
    for make, M, E, N, K, skewed in range_cases():
        op = "grouped_mm_wgrad range" if make is wgrad_gemm else "grouped_mm range"
        shape = f"M {M}, E {E}, N {N}, K {K}{', skewed' if skewed else ''}"
        try:
            times, more = measure_case(make, M, N, K, group_ends(M, E, skewed))
        except Exception as error:  # the other cases can still be measured
            print(f"{op}: {shape}: {str(error)[:150]}", flush=True)
            continue
        finally:
            torch.cuda.empty_cache()
        label = f"{'wgrad' if make is wgrad_gemm else 'm'} {M} E{E} {N}x{K}{' skewed' if skewed else ''}"
        host = "".join(f"{more['host_us'].get(name, float('nan')):6.0f}" for name in names[:3])
        errors = "  ".join(f"{e:.1e} {worst:.1e}" for e, worst in zip(more["error"], more["worst_block"], strict=True))
        print(f"{label:39}{cells(names, 2 * M * N * K, times, 13)}{host}  {errors}", flush=True)
        yield speed_records(op, shape, 2 * M * N * K, times, **more)


def rounded(x: float) -> float:
    return float(f"{x:.4g}")


def measure_case(
    make: Callable, M: int, N: int, K: int, offsets_E: Tensor
) -> tuple[dict[str, dict[str, float]], dict[str, object]]:
    """Times, and what else the records of a range have."""
    gemm = make(M, N, K, offsets_E)
    is_wgrad = make is wgrad_gemm
    check = wgrad_error if is_wgrad else forward_error
    dtypes = (BF16, torch.float32) if is_wgrad else (BF16,)
    errors, worst_blocks = zip(*(check(gemm.operands, offsets_E, dtype) for dtype in dtypes), strict=True)
    timer = partial(graphed, pool=torch.cuda.graph_pool_handle())
    times = median_ms(gemm.candidates, 4, timer, rounds_after_idling=3, idle_s=0.015)
    host = {}
    if M <= 8192:
        host = {name: round(host_ms(gemm.candidates[name]) * 1e3, 1) for name in times[AFTER_IDLING]}
    return times, {
        "host_us": host,
        "error": list(map(rounded, errors)),
        "worst_block": list(map(rounded, worst_blocks)),
    }


def print_verdict(records: list[dict]) -> None:
    """Of a range: what is slower than a grouped reference, and whose error is too large."""
    slower = [r for r in records if r["reference"] in ("bf16", "torchao rowwise") and r["speedup"] < 1]
    print(f"\nslower than a grouped reference: {len(slower)}")
    for r in slower:
        print(f"{r['name']}: {r['shape']}: {r['value']} against {r['reference']} {r['reference_value']}")
    wrong = [r for r in records if not all(e < limit for e, limit in zip(r["error"], (2e-3, 2e-4), strict=False))]
    if wrong:
        print("error too large:", "; ".join(dict.fromkeys(f"{r['name']}, {r['shape']}" for r in wrong)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one short round instead of five")
    parser.add_argument("--range", action="store_true", help="few to many rows and groups instead of two models")
    parser.add_argument("--out", type=Path, help="add the records to this JSON file")
    parser.add_argument("--budget", type=float, default=3600, help="seconds after which no further GEMM is begun")
    args = parser.parse_args()
    setting = environment()
    print(setting["hardware"], setting["versions"])
    torch.manual_seed(0)
    records, deadline = [], time.monotonic() + args.budget
    for new in benchmark_range() if args.range else benchmark_layers(args.quick):
        records += new
        if args.out:
            write_records(args.out, new)
        if time.monotonic() > deadline:
            print("out of time")
            break
    if args.range:
        print_verdict(records)


if __name__ == "__main__":
    main()
