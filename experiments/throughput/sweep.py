"""The highest tokens/s of each precision on one card, over local batch and checkpointing, and the largest batch.

    python -m experiments.throughput.sweep --out experiments/throughput --layers 6 --attention sdpa --budget 420

A point is a training run of ``STEPS`` steps, whose logs after step ``WARM`` count. Along a curve, a precision with its
checkpointing, the local batch doubles from ``FIRST`` until memory runs out; then bisection finds the largest batch to
within an eighth. Curves take turns in an order drawn anew. Points go to ``sweep.json`` one by one, and what it has of
this card and commit is not run again: call the script until it prints "complete". Each call ends within a run of its
budget. Points of other commits go, so that no figure is of two states.

``results.json`` gets two records, the fastest point and the largest batch of FP8-Flow against those of bf16.
"""

import json
import random
import sys
import time
from pathlib import Path

from experiments.provenance import environment
from experiments.records import begin, record, write_list, write_records
from experiments.throughput.train import OUT_OF_MEMORY, Run, finish, parser, record_model

CURVES = [
    *(f"bf16_fused:checkpointing={mode}" for mode in ("saved", "none", "full")),
    "fp8_flow",
    *(f"fp8_flow:{setting}" for setting in ("checkpointing=none", "checkpointing=full", "recompute=experts")),
]
STEPS, WARM = 10, 4
FIRST = 4  # local batch of a curve
PRECISIONS = ("bf16", "fp8")

Point = dict


def next_batch(fits: dict[int, bool]) -> int | None:
    """The local batch to try after these, None where the largest is known to within an eighth."""
    largest = max((batch for batch, fitted in fits.items() if fitted), default=0)
    smallest = min((batch for batch, fitted in fits.items() if not fitted), default=None)
    if smallest is None:
        return 2 * largest or FIRST
    gap = smallest - largest
    return None if gap <= max(1, largest // 8) else largest + gap // 2


def todo(points: list[Point]) -> list[tuple[str, int]]:
    """The next point of each curve that is not complete. A run that failed otherwise ends its curve."""
    found = []
    for curve in CURVES:
        mine = [p for p in points if p["variant"] == curve]
        batch = next_batch({p["local_batch"]: not p["error"] for p in mine})
        if batch and all(p["error"] in (None, OUT_OF_MEMORY) for p in mine):
            found.append((curve, batch))
    return found


def prepare(variant: str, batch: int, args) -> tuple[Run, int]:
    extra = f"--training.local_batch_size={batch}", "--metrics.log_freq=2"
    return Run(variant, args, 0, f"{variant}_{batch}", extra), batch


def measure(run: Run, batch: int, timeout: float) -> Point:
    try:
        run.begin()
        result = run.result(run.wait(timeout), WARM)
    finally:
        run.end()
    if result["error"] not in (None, OUT_OF_MEMORY):
        print(run.log.read_text()[-2000:], flush=True)
    fitted = not result["error"]
    return {
        "variant": run.variant,
        "local_batch": batch,
        "error": result["error"],
        "tokens_per_second": result["median_tokens_per_second"] if fitted else None,
        "memory_gib": result["peak_memory_gib"] if fitted else None,
    }


def records(found: list[Point], model: str, shape: str) -> list[dict]:
    """FP8-Flow's fastest point and largest batch against bf16's, once both are known."""
    fitted = [[p for p in found if p["variant"].startswith(precision) and not p["error"]] for precision in PRECISIONS]
    if not all(fitted):
        return []
    out = []
    for key, title, unit in (
        ("tokens_per_second", "fastest", "tokens/s/GPU"),
        ("local_batch", "largest local batch", "sequences"),
    ):
        bf16, ours = (max(those, key=lambda p: p[key]) for those in fitted)
        points = {"ours": ours, "reference": bf16}
        out.append(record(f"train_{model} {title}", shape, unit, ours[key], "bf16", bf16[key], points=points))
    return out


def main() -> None:
    p = parser(__doc__)
    p.add_argument("--budget", type=float, default=420, help="seconds after which no further run is begun")
    p.set_defaults(gpus=1)
    args = p.parse_args()
    begin(args.trial)
    end = time.monotonic() + args.budget
    args.steps, setting = STEPS, environment()
    shape = f"{finish(args, 'sweep')}, {setting['hardware'].removeprefix('1 x ')}"
    path: Path = args.out / "sweep.json"
    every = json.loads(path.read_text()) if path.exists() else []
    points = [point for point in every if (point["shape"], point["commit"]) == (shape, setting["commit"])]
    others = [point for point in every if point["shape"] != shape]
    prepared: list[tuple[Run, int]] = []  # one measured, one that imports meanwhile
    try:
        while True:
            waiting = todo(points)
            free = [c for c in waiting if c[0] not in {run.variant for run, _ in prepared}]
            if time.monotonic() < end:
                chosen = random.sample(free, min(len(free), 2 - len(prepared)))
                prepared += [prepare(*curve, args) for curve in chosen]
            if not prepared:
                break
            point = measure(*prepared.pop(0), args.timeout)
            print(json.dumps(point), flush=True)
            points.append(point | {"shape": shape} | setting)
            write_list(path, others + points)
    finally:
        for run, _ in prepared:
            run.end()
    write_records(args.out / "results.json", records(points, record_model(args), shape))
    print("to do: " + ", ".join(f"{curve} {batch}" for curve, batch in waiting) if waiting else "complete")
    failed = {p["variant"]: p["error"] for p in points if p["error"] not in (None, OUT_OF_MEMORY)}
    if failed:
        sys.exit(f"error: curves ended early: {failed}")


if __name__ == "__main__":
    main()
