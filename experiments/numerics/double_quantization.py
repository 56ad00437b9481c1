"""Errors of a weight gradient dW = dyᵀ x whose FP8 operands are rounded once, or by rows and again by columns.

A GEMM before it needs rows of x and dy in 1x128 tiles, this one columns in 128x1 tiles. The second rounding adds an
error with fp32 scales, and none with powers of two unless tokens differ in size.

    python -m experiments.numerics.double_quantization --out experiments/numerics
"""

from statistics import median

import torch
from torch import Tensor

from experiments.records import begin, record, script_parser, write_records
from experiments.reference import relative_error
from titan_fp8moe import ops, recipe

TOKENS, DIM, SEEDS = 1024, 512, 8
DATA = {"normal": 0, "opposed token scales": 3}  # x times 2^n and dy times 2^-n, n of so many binades


def fp32_scales(x: Tensor) -> Tensor:
    tiles = x.unflatten(1, (-1, recipe.SCALE_TILE))
    scale = tiles.abs().amax(2, keepdim=True) / 448
    return ((tiles / scale).to(recipe.FP8).float() * scale).flatten(1)


def powers_of_two(x: Tensor) -> Tensor:
    return recipe.dequantize(*recipe.quantize_rows(x))


SCALES = {fp32_scales: "fp32 scales", powers_of_two: "powers of two"}


def errors(seed: int, binades: int) -> dict[str, float]:
    generator = torch.Generator().manual_seed(seed)
    spread = torch.exp2(torch.randn(TOKENS, 1, generator=generator).mul(binades).round())
    x, dy = (torch.randn(TOKENS, DIM, generator=generator) for _ in range(2))
    x, dy = x * spread, dy / spread
    exact, found = dy.double().T @ x.double(), {}
    for rounded in SCALES:
        rows = rounded(dy), rounded(x)
        for name, (a, b) in {"once": rows, "rows, then columns": [rounded(t.T.contiguous()).T for t in rows]}.items():
            found[f"{name}: {SCALES[rounded]}"] = relative_error(a.double().T @ b.double(), exact)
    operands = [t for q, scale in map(recipe.quantize_rows, (x, dy)) for t in (q, recipe.column_major(scale))]
    offsets = torch.tensor([TOKENS], dtype=torch.int32)
    for mode in recipe.TRANSPOSE_MODES:
        xT, xTs, dyT, dyTs = ops.transpose_pair(*operands, offsets, mode)
        dw = ops.grouped_mm_wgrad(dyT, dyTs, xT, xTs, offsets, torch.float32)[0]
        found[f"{mode}: {SCALES[powers_of_two]}"] = relative_error(dw, exact)
    return found


def main() -> None:
    args = begin(script_parser(__doc__, out="folder of results.json"), gpu=False)
    records = []
    for data, binades in DATA.items():
        runs = [errors(seed, binades) for seed in range(SEEDS)]
        for name in runs[0]:
            values, once = ([run[key] for run in runs] for key in (name, f"once: {name.partition(': ')[2]}"))
            name, shape = f"double_rounding {name}, {data}", f"{TOKENS} x {DIM} x {DIM}"
            found = record(name, shape, "relative error", median(values), "once", median(once))
            records.append(found | {"smallest": min(values), "largest": max(values)})
    write_records(args.out / "results.json", records)


if __name__ == "__main__":
    main()
