"""Searches the strongest bf16 that fits: tokens/s and GiB over checkpointing, local batch and parallelism.

    python -m experiments.throughput.search 16b 16b_two_gpus --points outputs/search.json

A study is a row of ``STUDIES``. A point is a training run of its own, of which the steps after the tenth count. Points
go to the file one by one, and what it has of this card and commit is not run again. A curve ends where memory runs out.
"""

import argparse
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

from experiments.provenance import environment
from experiments.records import begin, script_parser, write_text
from experiments.tables import markdown
from experiments.throughput.train import OUT_OF_MEMORY, STEADY, WORK, Run

STEPS = 40
ONE_GPU = tuple(f"bf16_fused:ep=1{kept}" for kept in ("", *(f",checkpointing={k}" for k in ("none", "saved", "full"))))
TWO_GPUS = (
    *(
        f"{name}:ep=1,checkpointing={kept}"
        for name in ("bf16_fused", "bf16_fused_reduced")
        for kept in ("none", "saved")
    ),
    *(f"{name}:ep=2,checkpointing=saved" for name in ("bf16", "bf16_reduced")),
)
RESHARD = [f"--parallelism.fsdp_reshard_after_forward={when}" for when in ("never", "default")]


class Study(NamedTuple):
    """``variants`` are those of train.py. All choices of ``flags`` combine: torchtitan's overrides, one of each."""

    gpus: int
    model: str
    layers: int
    variants: tuple[str, ...]
    batches: tuple[int, ...]
    flags: tuple[list[str], ...] = ()


STUDIES = {
    "16b": Study(1, "16b", 6, ONE_GPU, (2, 4, 8, 12, 16, 20, 24, 32)),
    "16b_two_gpus": Study(2, "16b", 14, TWO_GPUS, (2, 4, 6, 8), (RESHARD,)),
    "qwen3_two_gpus": Study(2, "qwen3_30b", 16, TWO_GPUS, (2, 4, 6, 8), (RESHARD,)),
}


class Curve(NamedTuple):
    """Points of one study that differ in their local batch."""

    study: str
    variant: str
    flags: tuple[str, ...]


def curves(names: list[str]) -> Iterator[Curve]:
    for name in names:
        for variant, *flags in itertools.product(STUDIES[name].variants, *STUDIES[name].flags):
            yield Curve(name, variant, tuple(flags))


def measure(curve: Curve, batch: int, timeout: float) -> dict:
    """A point: tokens/s per GPU over all steady steps, and the peak of memory."""
    study = STUDIES[curve.study]
    args = SimpleNamespace(
        gpus=study.gpus, model=study.model, layers=study.layers, attention="sdpa", routing="random", steps=STEPS,
        local_batch=batch, torchtitan="0.2.2", overrides=curve.flags, work=WORK / f"search_{curve.study}",
    )  # fmt: skip
    args.work.mkdir(parents=True, exist_ok=True)
    label = "_".join([curve.variant, *(flag.rpartition("=")[2] for flag in curve.flags), str(batch)])
    run = Run(curve.variant, args, 0, label, ("--metrics.log_freq=1",))
    try:
        run.begin()
        result = run.result(run.wait(timeout), STEADY)
    finally:
        run.end()
    speed, error = result["overall_tokens_per_second"], result["error"]
    if error not in (None, OUT_OF_MEMORY):
        print(f"{run.log}: {error}", file=sys.stderr)
    speed = None if error else round(speed)
    return {"error": error, "tokens_per_second": speed, "gib": None if error else result["peak_memory_gib"]}


def table(points: list[dict]) -> str:
    """A row for each curve, a column for each local batch; the fastest point of a study is bold."""
    rows, batches = [], sorted({p["batch"] for p in points})
    best = {p["study"]: max(q["tokens_per_second"] or 0 for q in points if q["study"] == p["study"]) for p in points}
    for curve in dict.fromkeys((p["study"], p["variant"], *p["flags"]) for p in points):
        cells = dict.fromkeys(batches, "")
        for p in points:
            if (p["study"], p["variant"], *p["flags"]) == curve:
                speed, text = p["tokens_per_second"], p["error"] or f"{p['tokens_per_second']:,}, {p['gib']}"
                cells[p["batch"]] = f"**{text}**" if speed and speed == best[p["study"]] else text
        study, variant, *flags = curve
        rows.append([study, " ".join([variant, *(flag.rpartition(".")[2] for flag in flags)]), *cells.values()])
    return markdown(["tokens/s per GPU, GiB", "local batch", *map(str, batches)], rows)


def main() -> None:
    p: argparse.ArgumentParser = script_parser(__doc__)
    p.add_argument("studies", nargs="*", help=f"of {', '.join(STUDIES)}; default: all")
    p.add_argument("--points", type=Path, default=Path("outputs/search.json"), help="what was measured")
    p.add_argument("--timeout", type=float, default=300, help="seconds that a run may take")
    args = p.parse_args()
    begin(args.trial)
    made = {key: environment()[key] for key in ("hardware", "commit")}
    points = json.loads(args.points.read_text()) if args.points.exists() else []
    args.points.parent.mkdir(parents=True, exist_ok=True)
    for curve in curves(args.studies or list(STUDIES)):
        for batch in STUDIES[curve.study].batches:
            key = curve._asdict() | {"flags": [*curve.flags], "batch": batch, **made}
            point = next((p for p in points if p.items() >= key.items()), None)
            if point is None:
                point = key | measure(curve, batch, args.timeout)
                points.append(point)
                write_text(args.points, json.dumps(points, indent=1) + "\n")
                print(json.dumps(point), flush=True)
            if point["error"]:
                break
    print(table([p for p in points if p.items() >= made.items()]))


if __name__ == "__main__":
    main()
