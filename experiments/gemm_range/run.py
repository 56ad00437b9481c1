"""Speed and error of the grouped GEMMs from few to many rows and groups, on one Hopper GPU.

    python -m experiments.gemm_range.run --out experiments/gemm_range
    python -m experiments.gemm_range.plot experiments/gemm_range/results.json

126 cases have 2,048 to 204,800 rows and 2 to 256 groups, balanced (0.7 to 1.3 times the average number of rows) and
skewed (one group has half of the rows, a quarter of the groups has none). A figure is TFLOP/s of the median time, back
to back with a warm L2 and after idling with a cold one, next to the references of :mod:`experiments.kernels.gemm`.

Back to back times CUDA graphs, because Python takes longer to launch a small GEMM than the GPU takes to run it; "host"
is the time of a launch. Each result is checked against float64 products of the dequantized operands, in 16 groups and
up to 1024 rows of each, over memory filled with NaN. Records are written after each GEMM.
"""

import random
import sys
from collections.abc import Callable, Iterator
from unittest.mock import patch

import torch
from torch import Tensor

from experiments.kernels.gemm import BF16, REFERENCES, cells, forward_gemm, speed_records, wgrad_gemm
from experiments.records import begin, script_parser, within, write_records
from experiments.timing import AFTER_IDLING, graphed, group_ends, host_ms, median_ms
from titan_fp8moe import recipe
from titan_fp8moe.kernels.gemm import grouped_mm as kernels
from titan_fp8moe.recipe import TILE

GROUPED = ("bf16", "torchao rowwise")
NAMES = ("ours", *REFERENCES)
SHAPES = [(4096, 7168), (7168, 4096), (2816, 2048), (2048, 1408)]  # N, K
WGRADS = [(4096, 7168), (2048, 1408)]
BALANCED = [  # M rows, E groups
    *((2048, 2), (2048, 8)),
    *((8192, 8), (8192, 32), (8192, 64)),
    *((32768, 2), (32768, 8), (32768, 32), (32768, 256)),
    *((98304, 8), (98304, 64), (98304, 256)),
    *((204800, 8), (204800, 64), (204800, 256)),
]
SKEWED = [(2048, 8), (2048, 32), (8192, 32), (32768, 8), (98304, 64), (204800, 256)]


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


# --- cases ------------------------------------------------------------------------------------------------------------


def cases() -> Iterator[tuple[Callable, int, int, int, int, bool]]:
    """(GEMM, M, E, N, K, skewed) of each."""
    for skewed, sizes in ((False, BALANCED), (True, SKEWED)):
        for make, shapes in ((forward_gemm, SHAPES), (wgrad_gemm, WGRADS)):
            for N, K in shapes:
                for M, E in sizes:
                    yield make, M, E, N, K, skewed


def measure(make: Callable, M: int, E: int, N: int, K: int, skewed: bool) -> list[dict]:
    """The records of one case."""
    times, more = measure_case(make, M, N, K, group_ends(M, E, skewed))
    label = f"{'wgrad' if make is wgrad_gemm else 'm'} {M} E{E} {N}x{K}{' skewed' if skewed else ''}"
    host = "".join(f"{more['host_us'].get(name, float('nan')):6.0f}" for name in NAMES[:3])
    errors = "  ".join(f"{e:.1e} {worst:.1e}" for e, worst in zip(more["error"], more["worst_block"], strict=True))
    print(f"{label:39}{cells(NAMES, 2 * M * N * K, times, 13)}{host}  {errors}", flush=True)
    name = "grouped_mm_wgrad range" if make is wgrad_gemm else "grouped_mm range"
    shape = f"M {M}, E {E}, N {N}, K {K}{', skewed' if skewed else ''}"
    return range_records(name, shape, 2 * M * N * K, times, more)


def range_records(name: str, shape: str, flop: int, times: dict[str, dict[str, float]], more: dict) -> list[dict]:
    """A record for each state and grouped reference, which has the speeds of the other candidates as fields."""
    fields = {"cublas dense fp8": "cublas_dense", "ours, fp32 out": "fp32_out"}
    others = {
        f"{shape}, {state}": {field: round(flop / ms[who] * 1e-9, 1) for who, field in fields.items() if who in ms}
        for state, ms in times.items()
    }
    records = speed_records(name, shape, flop, times)
    return [r | more | others[r["shape"]] for r in records if r["reference"] in GROUPED]


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
    pool = torch.cuda.graph_pool_handle()
    times = median_ms(gemm.candidates, 4, lambda run: graphed(run, pool), rounds_after_idling=3, idle_s=0.015)
    host = {}
    if M <= 8192:
        host = {name: round(host_ms(gemm.candidates[name]) * 1e3, 1) for name in times[AFTER_IDLING]}
    return times, {
        "host_us": host,
        "error": list(map(rounded, errors)),
        "worst_block": list(map(rounded, worst_blocks)),
    }


def print_verdict(records: list[dict]) -> None:
    """What is slower than a grouped reference, and whose error is too large."""
    slower = [r for r in records if r["speedup"] < 1]
    print(f"\nslower than a grouped reference: {len(slower)}")
    for r in slower:
        print(f"{r['name']}: {r['shape']}: {r['value']} against {r['reference']} {r['reference_value']}")
    wrong = [r for r in records if not all(e < limit for e, limit in zip(r["error"], (2e-3, 2e-4), strict=False))]
    if wrong:
        print("error too large:", "; ".join(dict.fromkeys(f"{r['name']}, {r['shape']}" for r in wrong)))


def main() -> None:
    args = script_parser(__doc__, out="folder of results.json", budget="GEMM").parse_args()
    begin()
    print(f"{'TFLOP/s, back to back / after idling':39}" + "".join(f"{name.split()[-1]:>13}" for name in NAMES), end="")
    print("   host µs: ours, bf16, rowwise; error and worst block, bf16 (and fp32)")
    records, failed = [], []
    for make, *sizes in within(args.budget, cases()):
        try:
            new = measure(make, *sizes)
        except Exception as error:  # the other cases can still be measured
            failed.append(f"{make.__name__} of M, E, N, K, skewed {sizes}")
            print(f"{failed[-1]}: {str(error)[:150]}", flush=True)
            continue
        records += new
        write_records(args.out / "results.json", new)
    print_verdict(records)
    if failed:
        sys.exit(f"error: {len(failed)} cases failed: {'; '.join(failed)}")


if __name__ == "__main__":
    main()
