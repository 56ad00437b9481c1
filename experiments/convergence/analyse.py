"""Tables and records of the runs in a folder, as far as they came.

    python -m experiments.convergence.analyse RUNS            # prints the tables
    python -m experiments.convergence.analyse RUNS --out DIR  # also adds to DIR/results.json

RUNS has the logs that train.py writes. A run is compared with the bf16 run of its seed and change, at the last
evaluation that both have; bf16 with perturbed weights with bf16 without.

Where runs were repeated from a checkpoint, a second table says what the repetitions allow to conclude: a recipe's mean
deviation from the mean of bf16 of the same checkpoint, with a 95% confidence interval from the pooled variance of runs
of one recipe and checkpoint. Only runs that came to the end count.
"""

import json
from collections import defaultdict
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from experiments.records import script_parser, write_records
from experiments.tables import markdown

SMOOTH = 50  # steps of the mean of a training loss


class Run:
    """The log of one variant."""

    def __init__(self, name: str, log: list[dict]):
        self.name, self.meta = name, log[0]
        self.recipe, self.seed, self.change, self.noise = self.meta["variant"]
        steps = [r for r in log if "loss" in r]
        self.steps = np.array([r["step"] for r in steps])
        self.loss, self.grad_norm = (np.array([r[key] for r in steps]) for key in ("loss", "grad_norm"))
        self.evaluations = {r["step"]: r for r in log if "held_out_loss" in r}
        self.flushes = [r for r in log if "flushed" in r]

    def training_loss(self, step: int) -> float:
        """The mean of the last SMOOTH losses up to a step."""
        return float(self.loss[self.steps <= step][-SMOOTH:].mean())

    def ms_per_step(self) -> float:
        """The median of the intervals between two lines of the log that no evaluation began."""
        found = [
            1000 * (end["seconds"] - start["seconds"]) / (end["flushed"] - start["flushed"])
            for start, end in pairwise(self.flushes)
            if start["flushed"] not in self.evaluations
        ]
        return float(np.median(found or np.nan))


def read_log(path: Path) -> list[dict]:
    """The lines of a log but one that was being written when the run was cut off."""
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def read_runs(folder: Path) -> list[Run]:
    """The runs of a folder by change, bf16 first."""
    runs = [Run(path.parent.name, log) for path in folder.glob("*/log.jsonl") if (log := read_log(path))]
    return sorted(runs, key=lambda run: (run.change, run.recipe != "bf16", run.recipe, run.seed, run.noise))


def reference_of(run: Run, runs: list[Run]) -> Run | None:
    """bf16 of the same seed and change without noise."""
    key = ("bf16", run.seed, run.change, 0)
    found = (other for other in runs if (other.recipe, other.seed, other.change, other.noise) == key)
    return next((other for other in found if other is not run), None)


def summarize(runs: list[Run]) -> list[dict]:
    rows = []
    for run in runs:
        reference = reference_of(run, runs)
        step = max(set(run.evaluations) & set(reference.evaluations if reference else run.evaluations), default=None)
        if step is None:
            continue
        evaluation = run.evaluations[step]
        row = {
            "name": run.name,
            "step": step,
            "held_out_loss": evaluation["held_out_loss"],
            "training_loss": run.training_loss(step),
            "max_violation": float(np.mean(evaluation["max_violation"])),
            "median_grad_norm": float(np.median(run.grad_norm[run.steps <= step])),
            "tokens_per_second": 1000 * run.meta["tokens_per_step"] / run.ms_per_step(),
        }
        if run.meta["clamp"]:
            gates, ups = np.mean(evaluation["clamped"], 0).tolist()
            row |= {"clamped_gates": gates, "clamped_ups": ups}
        if reference is not None:
            deviation = evaluation["held_out_loss"] / reference.evaluations[step]["held_out_loss"] - 1
            row |= {"reference": reference.name, "held_out_deviation": deviation}
            row["final_deviation"] = row["training_loss"] / reference.training_loss(step) - 1
        rows.append(row)
    return rows


def finals(runs: list[Run]) -> tuple[list[Run], dict[str, list[float]]]:
    """The runs from a checkpoint that came to the end, and their last losses."""
    done = [run for run in runs if run.change == "resume" and run.meta["last_step"] in run.evaluations]
    losses = {
        "held-out loss": [run.evaluations[run.meta["last_step"]]["held_out_loss"] for run in done],
        f"training loss, last {SMOOTH} steps": [float(run.loss[-SMOOTH:].mean()) for run in done],
    }
    return done, losses


class Effect(NamedTuple):
    """A recipe's deviation from bf16: the mean over checkpoints, half its 95% confidence interval, number of runs."""

    mean: float
    half_width: float
    runs: int

    def __str__(self) -> str:
        return f"{self.mean:+.3%} ± {self.half_width:.3%}"


@cache
def student_t(freedom: int) -> float:
    """Half the width of a 95% interval in standard errors, drawn: two to three digits."""
    return float(np.quantile(np.abs(np.random.default_rng(0).standard_t(freedom, 1_000_000)), 0.95))


def effects(cells: list[tuple[str, str]], losses: list[float]) -> tuple[float, int, dict[str, Effect]]:
    """Effects of the recipes by repeated runs; ``cells`` has recipe and checkpoint of each run.

    Returns the standard deviation of runs of one cell, relative to the mean of bf16 of the checkpoint and pooled over
    cells, its degrees of freedom, and the recipes' effects.
    """
    by_cell = defaultdict(list)
    for cell, loss in zip(cells, losses, strict=True):
        by_cell[cell].append(loss)
    bf16 = {checkpoint: np.mean(values) for (recipe, checkpoint), values in by_cell.items() if recipe == "bf16"}
    by_cell = {cell: np.array(values) / bf16[cell[1]] - 1 for cell, values in by_cell.items() if cell[1] in bf16}
    freedom = sum(len(values) - 1 for values in by_cell.values())
    if freedom == 0:
        return float("nan"), 0, {}
    deviation = (sum(((v - v.mean()) ** 2).sum() for v in by_cell.values()) / freedom) ** 0.5
    t = student_t(freedom)
    result = {}
    for recipe in dict.fromkeys(name for name, _ in by_cell if name != "bf16"):
        mine = {checkpoint: values for (name, checkpoint), values in by_cell.items() if name == recipe}
        variance = sum(1 / len(values) + 1 / len(by_cell["bf16", c]) for c, values in mine.items()) / len(mine) ** 2
        mean = float(np.mean([values.mean() for values in mine.values()]))
        result[recipe] = Effect(mean, t * float(deviation * variance**0.5), sum(map(len, mine.values())))
    return float(deviation), freedom, result


def paired(runs: list[Run], losses: list[float], recipe: str) -> Effect | None:
    """A recipe's deviation from bf16 over pairs of runs that share checkpoint and noise; None with fewer than two."""
    by_run = {(run.recipe, run.seed, run.noise): loss for run, loss in zip(runs, losses, strict=True)}
    pairs = [(loss, by_run.get(("bf16", *key))) for (name, *key), loss in by_run.items() if name == recipe]
    deviations = np.array([mine / bf16 - 1 for mine, bf16 in pairs if bf16])
    if len(deviations) < 2:
        return None
    error = deviations.std(ddof=1) / len(deviations) ** 0.5
    return Effect(float(deviations.mean()), float(student_t(len(deviations) - 1) * error), len(deviations))


def format_effects(runs: list[Run]) -> str:
    """The second table, empty where nothing was repeated."""
    done, finals_by_kind = finals(runs)
    head = ["recipe", "runs", "against bf16, 95% interval", "difference shown", "pairs"]
    parts = []
    for kind, losses in finals_by_kind.items():
        deviation, freedom, by_recipe = effects([(run.recipe, run.seed) for run in done], losses)
        rows = []
        for recipe, effect in by_recipe.items():
            shown = "yes" if abs(effect.mean) > effect.half_width else "no"
            pairs = str(paired(done, losses, recipe) or "")
            rows.append([recipe, str(effect.runs), str(effect), shown, pairs])
        if rows:
            spread = f"standard deviation {deviation:.3%} ({freedom} degrees of freedom)"
            parts += [f"\nFinal {kind}; runs of one recipe and checkpoint: {spread}\n", markdown(head, rows)]
    return "\n".join(parts)


FIGURES = {  # of a row: title and format in the table, unit in a record
    "held_out_loss": ("held-out loss", ".4f", "nats per token"),
    "held_out_deviation": ("against bf16", "+.3%", "of the reference's held-out loss"),
    "training_loss": (f"training loss, last {SMOOTH} steps", ".4f", "nats per token"),
    "final_deviation": ("against bf16", "+.3%", "of the reference's training loss"),
    "max_violation": ("max violation", ".3f", "largest load / mean - 1, held-out text"),
    "median_grad_norm": ("gradient norm, median", ".3f", ""),
    "tokens_per_second": ("tokens/s", ",.0f", "tokens/s; other runs may have shared the GPU"),
    "clamped_gates": ("clamped gates", ".2%", "of the routed experts' gates, held-out text"),
    "clamped_ups": ("clamped ups", ".2%", "of the routed experts' ups, held-out text"),
}


def format_table(rows: list[dict]) -> str:
    head, lines = ["variant", "step", *(title for title, *_ in FIGURES.values())], []
    for row in rows:
        cells = [format(row[key], form) if key in row else "" for key, (_, form, _) in FIGURES.items()]
        lines.append([row["name"], str(row["step"]), *cells])
    return markdown(head, lines)


def records(runs: list[Run], rows: list[dict]) -> list[dict]:
    by_name, rows_by_name = {run.name: run for run in runs}, {row["name"]: row for row in rows}
    result = []
    for row in rows:
        meta, reference = by_name[row["name"]].meta, row.get("reference")
        for key in (key for key in FIGURES if key in row):
            other = rows_by_name.get(reference, {}).get(key) if reference else None
            result.append(
                dict(meta["environment"], command=command(by_name[row["name"]]), name=f"{row['name']} {key}",
                     shape=f"{shape(meta)}, step {row['step']} of {meta['steps']}, {meta['experts']}", value=row[key],
                     unit=FIGURES[key][-1], reference=reference or "none", reference_value=other, speedup=None)
            )  # fmt: skip
    done, finals_by_kind = finals(runs)
    for kind, losses in finals_by_kind.items():
        deviation, freedom, by_recipe = effects([(run.recipe, run.seed) for run in done], losses)
        for recipe, (mean, half_width, count) in by_recipe.items():
            result.append(
                dict(done[0].meta["environment"], command=command(done[0]), name=f"{recipe}: final {kind}",
                     shape=f"{shape(done[0].meta)}, {count} runs", value=mean, half_width=half_width,
                     unit="of bf16's mean of the checkpoint; half_width: of the 95% confidence interval",
                     reference=f"standard deviation of runs of one recipe and checkpoint, {freedom} degrees of freedom",
                     reference_value=deviation, speedup=None)
            )  # fmt: skip
    for record in result:  # JSON has no NaN
        record |= {key: str(v) for key, v in record.items() if isinstance(v, float) and not np.isfinite(v)}
    return result


def shape(meta: dict) -> str:
    flavor = meta["config"]["model"]["flavor"]
    if meta["clamp"]:
        flavor += f" clamped at {meta['clamp']:g}"
    return f"{flavor}, {meta['parameters']:,} parameters, {meta['tokens_per_step']} tokens/step"


def command(run: Run) -> str:
    return f"bash experiments/convergence/run.sh {run.meta['stage']}"


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("runs", type=Path, help="folder of the runs' logs")
    parser.add_argument("--out", type=Path, help="folder of results.json")
    args = parser.parse_args()
    runs = [run for run in read_runs(args.runs) if run.evaluations and len(run.steps)]
    if not runs:
        raise SystemExit(f"{args.runs} has no run that was evaluated after its first step")
    rows = summarize(runs)
    print(f"{runs[0].meta['stage']}: {shape(runs[0].meta)}\n\n{format_table(rows)}\n" + format_effects(runs))
    if args.out is not None:
        write_records(args.out / "results.json", records(runs, rows))


if __name__ == "__main__":
    main()
