"""Tables, curves and records of the runs in a folder, as far as they came.

    python -m experiments.convergence.analyse RUNS            # prints the tables
    python -m experiments.convergence.analyse RUNS --out DIR  # also adds to DIR/results.json and draws DIR/STAGE.png

RUNS has the logs that train.py writes. A run is compared with the bf16 run of its seed and change, at the last
evaluation that both have; bf16 with perturbed weights with bf16 without.

Where runs were repeated from a checkpoint, a second table says what the repetitions allow to conclude: a recipe's mean
deviation from the mean of bf16 of the same checkpoint, with a 95% confidence interval from the pooled variance of runs
of one recipe and checkpoint. Only runs that came to the end count.
"""

import argparse
import json
import re
from collections import defaultdict
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib import pyplot as plt

from experiments.pictures import save
from experiments.records import script_parser, write_records
from experiments.tables import markdown

SMOOTH = 50  # steps of the running mean
SETTLED = 200  # first step at which deviations from scratch count: before, the loss falls by percents in a window
MARGIN = 0.001  # of the loss: the pictures shade it and the tables say who stays within
COLOURS = {"bf16": "black", "balanced": "C0", "experts_only": "C5", "ffns_only": "C4"}
RECIPES = tuple(COLOURS)


class Run:
    """What one variant logged."""

    def __init__(self, path: Path):
        self.folder, self.name = path.parent, path.parent.name
        # resume1, resume2, ... are resume with other noise, and so is again after any other change
        parts = re.fullmatch(r"([^-]+)-(s\d+)(?:-(?!again)(resume|[^-]+?)((?<=resume)\d)?)?(-again)?", self.name)
        self.recipe, self.seed, self.change, noise, again = parts.groups("")
        self.noise = noise + again
        records = []
        for line in path.read_text().splitlines():
            try:
                records.append(json.loads(line))
            except json.JSONDecodeError:  # the line being written when the run was cut off
                break
        self.meta = records[0] if records else None
        steps = [r for r in records if "loss" in r]
        self.steps = np.array([r["step"] for r in steps])
        self.loss, self.grad_norm, self.load = (
            np.array([r[key] for r in steps]) for key in ("loss", "grad_norm", "max_violation")
        )
        self.evaluations = {r["step"]: r for r in records if "held_out_loss" in r}
        self.flushes = [r for r in records if "flushed" in r]

    def smoothed(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Steps and the mean of the last SMOOTH values there."""
        if len(values) < SMOOTH:
            return self.steps[:0], values[:0]
        return self.steps[SMOOTH - 1 :], np.convolve(values, np.ones(SMOOTH) / SMOOTH, "valid")

    def settled(self) -> int:
        """The first step at which deviations and gradient norms count."""
        return self.meta["first_step"] or SETTLED

    def label(self) -> str:
        return f"{self.recipe}, seed {self.seed[1:]}{', perturbed' if self.noise else ''}"

    def ms_per_step(self) -> float:
        """The median of the intervals between two lines of the log that no evaluation began."""
        found = [
            1000 * (end["seconds"] - start["seconds"]) / (end["flushed"] - start["flushed"])
            for start, end in pairwise(self.flushes)
            if start["flushed"] not in self.evaluations
        ]
        return float(np.median(found or np.nan))


def read_runs(folder: Path) -> list[Run]:
    runs = [Run(path) for path in folder.glob("*/log.jsonl")]
    return sorted(
        (run for run in runs if run.meta),
        key=lambda run: (run.change, RECIPES.index(run.recipe), run.seed, run.noise),
    )


def reference_of(run: Run, runs: list[Run]) -> Run | None:
    name = "-".join(filter(None, ("bf16", run.seed, run.change)))
    return next((other for other in runs if other.name == name and other is not run), None)


def training_deviation(run: Run, reference: Run, last: int) -> tuple[np.ndarray, np.ndarray]:
    """Steps and relative deviation of the smoothed training loss, from SETTLED steps after the start on."""
    steps, mine = run.smoothed(run.loss)
    other_steps, theirs = reference.smoothed(reference.loss)
    common, i, j = np.intersect1d(steps, other_steps, return_indices=True)
    keep = (common >= run.settled()) & (common <= last)
    return common[keep], mine[i[keep]] / theirs[j[keep]] - 1


def held_out_deviation(run: Run, reference: Run, step: int) -> tuple[float, float]:
    """Relative deviation at ``step``, and its standard error over the held-out windows, which both runs share."""
    mine, theirs = (r.evaluations[step] for r in (run, reference))
    difference = np.subtract(mine["window_losses"], theirs["window_losses"])
    error = float(difference.std(ddof=1) / len(difference) ** 0.5 / theirs["held_out_loss"])
    return mine["held_out_loss"] / theirs["held_out_loss"] - 1, error


def summarize(runs: list[Run]) -> list[dict]:
    rows = []
    for run in runs:
        reference = reference_of(run, runs)
        step = max(set(run.evaluations) & set(reference.evaluations if reference else run.evaluations), default=None)
        if step is None:
            continue
        evaluation, until = run.evaluations[step], run.steps <= step
        row = {
            "name": run.name,
            "step": step,
            "held_out_loss": evaluation["held_out_loss"],
            "training_loss": float(run.loss[until][-SMOOTH:].mean()) if until.any() else None,
            "max_violation": float(np.mean(evaluation["max_violation"])),
            "median_grad_norm": float(np.median(run.grad_norm[until])) if until.any() else None,
            "largest_grad_norm": float(run.grad_norm[run.steps >= run.settled()].max(initial=0)),
            "tokens_per_second": 1000 * run.meta["tokens_per_step"] / run.ms_per_step(),
        }
        if run.meta["clamp"]:
            gates, ups = np.mean(evaluation["clamped"], 0).tolist()
            row |= {"clamped_gates": gates, "clamped_ups": ups}
        if reference is not None:
            deviation, error = held_out_deviation(run, reference, step)
            row |= {"reference": reference.name, "held_out_deviation": deviation, "held_out_error": error}
            if len(deviation := training_deviation(run, reference, step)[1]):
                row["final_deviation"] = float(deviation[-1])
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

    def within_margin(self) -> str:
        if abs(self.mean) + self.half_width <= MARGIN:
            return "yes"
        return "no" if abs(self.mean) - self.half_width > MARGIN else "undecided"


@cache
def student_t(freedom: int) -> float:
    """Half the width of a 95% interval in standard errors, drawn: two to three digits."""
    return float(np.quantile(np.abs(np.random.default_rng(0).standard_t(freedom, 1_000_000)), 0.95))


def effects(cells: list[tuple[str, str]], losses: list[float]) -> tuple[float, int, dict[str, Effect]]:
    """What repeated runs say of each recipe; ``cells`` has recipe and checkpoint of each run.

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
    for recipe in RECIPES[1:]:
        mine = {checkpoint: values for (name, checkpoint), values in by_cell.items() if name == recipe}
        if mine:
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
    head = ["recipe", "runs", "against bf16, 95% interval", "difference shown", f"within {MARGIN:.1%}", "pairs"]
    parts = []
    for kind, losses in finals_by_kind.items():
        deviation, freedom, by_recipe = effects([(run.recipe, run.seed) for run in done], losses)
        rows = []
        for recipe, effect in by_recipe.items():
            shown = "yes" if abs(effect.mean) > effect.half_width else "no"
            pairs = str(paired(done, losses, recipe) or "")
            rows.append([recipe, str(effect.runs), str(effect), shown, effect.within_margin(), pairs])
        if rows:
            spread = f"standard deviation {deviation:.3%} ({freedom} degrees of freedom)"
            parts += [f"\nFinal {kind}; runs of one recipe and checkpoint: {spread}\n", markdown(head, rows)]
    return "\n".join(parts)


def format_table(rows: list[dict]) -> str:
    def cell(row: dict, key: str, form: str = "+.3%") -> str:
        return format(row[key], form) if row.get(key) is not None else ""

    head = ["variant", "step", "held-out loss", "against bf16", "±", "training loss", "final", "max violation"]
    head += ["gradient norm, median / largest", "tokens/s", "clamped gates / ups"]
    lines = []
    for row in rows:
        norms = f"{cell(row, 'median_grad_norm', '.3f')} / {row['largest_grad_norm']:.2f}"
        against = [cell(row, "held_out_deviation"), cell(row, "held_out_error", ".3%")]
        losses = [cell(row, "held_out_loss", ".4f"), *against, cell(row, "training_loss", ".4f")]
        more = [cell(row, "final_deviation"), cell(row, "max_violation", ".3f"), norms]
        clamped = " / ".join(filter(None, (cell(row, f"clamped_{of}", ".2%") for of in ("gates", "ups"))))
        lines.append([row["name"], str(row["step"]), *losses, *more, cell(row, "tokens_per_second", ",.0f"), clamped])
    return markdown(head, lines)


PANELS = (
    f"training loss, mean of {SMOOTH} steps",
    "training loss, % from bf16",
    "held-out loss, % from bf16",
    "gradient norm before clipping",
    "largest load of an expert / mean - 1",
)


def draw(runs: list[Run], path: Path) -> None:
    """A row of panels for each change. Deviations are from bf16 of the same seed and change."""
    changes = sorted({run.change for run in runs})
    size = (5 * len(PANELS), 4 * len(changes))
    figure, axes = plt.subplots(len(changes), len(PANELS), figsize=size, constrained_layout=True, squeeze=False)
    for row, change in zip(axes, changes, strict=True):
        loss, deviation, evaluated, norm, load = row
        for run in (run for run in runs if run.change == change):
            style = {"color": COLOURS[run.recipe], "lw": 0.8 if run.noise else 1.3, "label": run.label()}
            style["ls"] = {"s1": "--" if run.noise else "-", "s2": ":" if run.noise else "-."}[run.seed]
            for axis, values in ((loss, run.loss), (norm, run.grad_norm), (load, run.load)):
                axis.plot(*run.smoothed(values), **style)
            if reference := reference_of(run, runs):
                steps, values = training_deviation(run, reference, 10**9)
                deviation.plot(steps, 100 * values, **style)
                both = [step for step in sorted(run.evaluations) if step in reference.evaluations]
                evaluated.plot(both, [100 * held_out_deviation(run, reference, step)[0] for step in both], **style)
        for axis, title in zip(row, PANELS, strict=True):
            axis.set_title(f"{change}: {title}" if change else title, fontsize=10)
            axis.grid(alpha=0.3)
        for axis in (deviation, evaluated):
            axis.axhspan(-100 * MARGIN, 100 * MARGIN, color="green", alpha=0.15)
        norm.set_yscale("log")
        loss.legend(fontsize=7)
    save(figure, path, dpi=90)


def records(runs: list[Run], rows: list[dict]) -> list[dict]:
    units = {
        "held_out_loss": "nats per token",
        "held_out_deviation": "of the reference's held-out loss",
        "held_out_error": "standard error of held_out_deviation over the held-out windows",
        "final_deviation": "of the reference's smoothed training loss",
        "max_violation": "largest load / mean - 1, held-out text",
        "clamped_gates": "of the routed experts' gates, held-out text",
        "clamped_ups": "of the routed experts' ups, held-out text",
        "median_grad_norm": "",
        "largest_grad_norm": f"after step {SETTLED}",
        "tokens_per_second": "tokens/s; other runs may have shared the GPU",
    }
    by_name, rows_by_name = {run.name: run for run in runs}, {row["name"]: row for row in rows}
    result = []
    for row in rows:
        meta, reference = by_name[row["name"]].meta, row.get("reference")
        for key, unit in units.items():
            if row.get(key) is None:
                continue
            other = rows_by_name.get(reference, {}).get(key) if reference else None
            result.append(
                dict(meta["environment"], command=command(by_name[row["name"]]), name=f"{row['name']} {key}",
                     shape=f"{shape(meta)}, step {row['step']} of {meta['steps']}, {meta['experts']}", value=row[key],
                     unit=unit, reference=reference or "none", reference_value=other, speedup=None)
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
    parser.add_argument("--out", type=Path, help="folder of results.json and the curves")
    args = parser.parse_args()
    analyse([run for run in read_runs(args.runs) if run.evaluations and len(run.steps)], args)


def analyse(runs: list[Run], args: argparse.Namespace) -> None:
    """Prints the tables; with ``--out`` also writes records and draws curves."""
    if not runs:
        raise SystemExit(f"{args.runs} has no run that was evaluated after its first step")
    rows = summarize(runs)
    print(f"{runs[0].meta['stage']}: {shape(runs[0].meta)}\n\n{format_table(rows)}\n" + format_effects(runs))
    if args.out is not None:
        write_records(args.out / "results.json", records(runs, rows))
        draw([run for run in runs if run.change != "trunk"], args.out / f"{runs[0].meta['stage']}.png")


if __name__ == "__main__":
    main()
