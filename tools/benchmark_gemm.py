"""Speed of the grouped GEMMs beside PyTorch's, at the shapes of DeepSeek-V3 671B and 16B on one H200.

    python -m tools.benchmark_gemm [--quick] [--out gemm.json]

Every figure is TFLOP/s of the median time, in two states of the card: in bursts (``triton.testing.do_bench``, back to
back, where power limits the clocks) and rested (single runs after 40 ms of idling). Candidates take turns in random
order, so that all of them meet the same clocks and temperature. Groups have 0.7 to 1.3 times the average number of
rows. References:

* ``bf16``: ``torch._grouped_mm``.
* ``torchao rowwise``: ``torch._scaled_grouped_mm``, torchao's, one scale per row and column, fast accumulation.
* ``cublas dense fp8``: ``torch._scaled_mm``, one scale per tensor, fast accumulation; one GEMM of the same size.
"""

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import triton
from torch import Tensor

from experiments.record import environment, write_records
from titan_fp8moe import recipe
from titan_fp8moe.kernels import grouped_mm as kernels
from titan_fp8moe.recipe import TILE

BF16 = torch.bfloat16
LAYERS = [  # name, M routed rows, E local experts, D model dim, H expert hidden dim
    ("671B, 32 ranks", 32768, 8, 7168, 2048),
    ("671B, 8 ranks", 32768, 32, 7168, 2048),
    ("16B, 1 rank", 98304, 64, 2048, 1408),
    ("16B, 8 ranks", 98304, 8, 2048, 1408),
]
REFERENCES = ("bf16", "torchao rowwise", "cublas dense fp8")


def group_ends(M: int, E: int) -> Tensor:
    """(E,) int32 ends of groups of 0.7 to 1.3 times M / E rows, multiples of 128 that add up to M, in random order."""
    tiles = (torch.linspace(0.7, 1.3, E) * (M / E / TILE)).round().long()
    tiles[E // 2] += M // TILE - tiles.sum()
    order = torch.randperm(E, generator=torch.Generator().manual_seed(0))
    return (tiles[order] * TILE).cumsum(0).to(torch.int32).cuda()


def forward_candidates(M: int, N: int, K: int, offsets_E: Tensor) -> dict[str, Callable]:
    E = offsets_E.shape[0]
    x, w = torch.randn(M, K, device="cuda", dtype=BF16), torch.randn(E, N, K, device="cuda", dtype=BF16)
    (a, a_scale), (b, b_scale) = recipe.quantize_rows(x), recipe.quantize_weight(w)
    a_scale = recipe.column_major(a_scale)
    ones_M, ones_EN, one = (torch.ones(shape, device="cuda") for shape in ((M,), (E, N), ()))
    wT, bT = w.transpose(1, 2), b.transpose(1, 2)
    return {
        "ours": lambda: kernels.grouped_mm(a, a_scale, b, b_scale, offsets_E, BF16),
        "bf16": lambda: torch._grouped_mm(x, wT, offs=offsets_E, out_dtype=BF16),
        "torchao rowwise": lambda: torch._scaled_grouped_mm(
            a, bT, ones_M, ones_EN, offs=offsets_E, out_dtype=BF16, use_fast_accum=True
        ),
        "cublas dense fp8": lambda: torch._scaled_mm(a, bT[0], one, one, out_dtype=BF16, use_fast_accum=True),
    }


def wgrad_candidates(M: int, N: int, K: int, offsets_E: Tensor) -> dict[str, Callable]:
    E = offsets_E.shape[0]
    x, dy = torch.randn(M, K, device="cuda", dtype=BF16), torch.randn(M, N, device="cuda", dtype=BF16)
    b, b_scale, a, a_scale = recipe.transpose_pair(*recipe.quantize_rows(x), *recipe.quantize_rows(dy))
    ones_EN, ones_EK, one = (torch.ones(shape, device="cuda") for shape in ((E * N,), (E * K,), ()))
    return {
        "ours": lambda: kernels.grouped_mm_wgrad(a, a_scale, b, b_scale, offsets_E, BF16),
        "bf16": lambda: torch._grouped_mm(dy.t(), x, offs=offsets_E, out_dtype=BF16),
        "torchao rowwise": lambda: torch._scaled_grouped_mm(
            a, b.t(), ones_EN, ones_EK, offs=offsets_E, out_dtype=BF16, use_fast_accum=True
        ),
        "cublas dense fp8": lambda: torch._scaled_mm(a, b.t(), one, one, out_dtype=BF16, use_fast_accum=True),
    }


def gemms(D: int, H: int) -> list[tuple[str, Callable, int, int]]:
    """(name, candidates, N, K) of a layer's six GEMMs."""
    return [
        ("forward 1", forward_candidates, 2 * H, D),
        ("forward 2", forward_candidates, D, H),
        ("dgrad 2", forward_candidates, H, D),
        ("dgrad 1", forward_candidates, D, 2 * H),
        ("wgrad 1", wgrad_candidates, 2 * H, D),
        ("wgrad 2", wgrad_candidates, D, H),
    ]


def shuffled(names: list[str]) -> list[str]:
    return random.sample(names, len(names))


def rested_time(run: Callable) -> float:
    """Milliseconds of one run on a card that has idled."""
    torch.cuda.synchronize()
    time.sleep(0.04)
    torch.cuda._sleep(1_000_000)  # covers the time the host takes to launch
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def measure(candidates: dict[str, Callable], flop: int, rounds: int, rep_ms: int) -> dict[str, dict[str, float]]:
    """TFLOP/s of each candidate by state; without those that this PyTorch refuses to run, which are named on stderr."""
    names = []
    for name, run in candidates.items():
        try:
            run()
            names.append(name)
        except RuntimeError as error:
            print(f"{name}: {str(error).splitlines()[0]}", file=sys.stderr)
    bursts, rested = {name: [] for name in names}, {name: [] for name in names}
    for _ in range(rounds):
        for name in shuffled(names):
            bursts[name].append(triton.testing.do_bench(candidates[name], rep=rep_ms, return_mode="median"))
    for _ in range(5):
        for name in shuffled(names):
            rested[name].append(rested_time(candidates[name]))
    return {
        state: {name: flop / statistics.median(ms) * 1e-9 for name, ms in times.items()}
        for state, times in (("bursts", bursts), ("rested", rested))
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one short round of bursts instead of five")
    parser.add_argument("--out", type=Path, help="add the records to this JSON file")
    args = parser.parse_args()
    rounds, rep_ms = (1, 30) if args.quick else (5, 60)
    setting = environment()
    print(setting["hardware"], setting["versions"])
    columns = "".join(f"{name:>17}" for name in ("ours", *REFERENCES))
    print(f"{'TFLOP/s, bursts / rested':30}{'N':>6}{'K':>6}{columns}")
    records = []
    torch.manual_seed(0)
    for layer, M, E, D, H in LAYERS:
        offsets_E = group_ends(M, E)
        for gemm, candidates, N, K in gemms(D, H):
            speeds = measure(candidates(M, N, K, offsets_E), 2 * M * N * K, rounds, rep_ms)
            cells = [[s.get(name, float("nan")) for s in speeds.values()] for name in ("ours", *REFERENCES)]
            columns = "".join(f"{burst:>9.0f} / {rest:<5.0f}" for burst, rest in cells)
            print(f"{layer + ', ' + gemm:30}{N:6}{K:6}{columns}", flush=True)
            for state, speed in speeds.items():
                for name in REFERENCES:
                    if name in speed:
                        records.append(
                            {
                                "name": "grouped_mm_wgrad" if candidates is wgrad_candidates else "grouped_mm",
                                "shape": f"{layer}, {gemm}, M {M}, E {E}, N {N}, K {K}, {state}",
                                "value": round(speed["ours"], 1),
                                "unit": "TFLOP/s",
                                "reference": name,
                                "reference_value": round(speed[name], 1),
                                "speedup": round(speed["ours"] / speed[name], 3),
                            }
                        )
    if args.out:
        write_records(args.out, records)


if __name__ == "__main__":
    main()
