"""Table, pictures and records of the runs in a folder, as far as they came.

    python -m experiments.convergence.analyse WORK            # prints the table
    python -m experiments.convergence.analyse WORK --out DIR  # also table.md, convergence.png, stress.png, results.json
    python -m experiments.convergence.analyse WORK --status   # a line per run

A variant is compared with the bf16 run of its seed and change, at the last evaluation that all runs of this change
have; bf16 itself, where the change should make no difference, with bf16 without it.
"""

import argparse
import json
from itertools import groupby
from pathlib import Path

import numpy as np

from experiments.record import write_records

SMOOTH = 50  # steps of the running mean
SETTLED = 200  # first step at which deviations count: before, the loss falls by several percent in a window


class Run:
    """What one variant logged."""

    def __init__(self, path: Path):
        self.folder, self.name = path.parent, path.parent.name
        recipe, seed, *change = self.name.split("-")
        self.recipe, self.seed, self.change = recipe, seed, change[0] if change else ""
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
        return self.meta["first_step"] + SETTLED

    def ms_per_step(self) -> float:
        recent = self.flushes[-9:]
        if len(recent) < 2:
            return float("nan")
        seconds = recent[-1]["seconds"] - recent[0]["seconds"]
        return 1000 * seconds / (recent[-1]["flushed"] - recent[0]["flushed"])


def read_runs(work: Path) -> list[Run]:
    order = ["bf16", "balanced", "scaling_aware", "requantize", "rowwise", "naive"]
    runs = [Run(path) for path in work.glob("*/log.jsonl")]
    return sorted(
        (run for run in runs if run.meta), key=lambda run: (run.change, order.index(run.recipe), run.seed, run.name)
    )


def reference_of(run: Run, runs: list[Run]) -> Run | None:
    names = {other.name: other for other in runs}
    plain = f"bf16-{run.seed}"
    if run.recipe == "bf16":
        return names.get(plain) if run.change.endswith(("resume", "perturbed")) else None
    return names.get(f"{plain}-{run.change}" if run.change else plain)


def agreement(run: Run, reference: Run, step: int) -> float | None:
    """Mean share of a token's experts that both runs chose, over layers and tokens of the fixed batch."""
    paths = [r.folder / f"choices.{step}.npy" for r in (run, reference)]
    if not all(path.exists() for path in paths):
        return None
    mine, theirs = (np.load(path) for path in paths)
    return float((mine[..., :, None] == theirs[..., None, :]).sum((-1, -2)).mean() / mine.shape[-1])


def agreements(work: Path, runs: list[Run]) -> dict[str, dict[str, float]]:
    """Per run and step. Kept in a file, because the raw logs in the repository are without the choices."""
    path = work / "agreement.json"
    kept = json.loads(path.read_text()) if path.exists() else {}
    for run in runs:
        reference = reference_of(run, runs)
        if reference is None:
            continue
        values = {str(step): agreement(run, reference, step) for step in run.evaluations}
        values = {step: value for step, value in values.items() if value is not None}
        if values:
            kept[run.name] = values
    path.write_text(json.dumps(kept, indent=1) + "\n")
    return kept


def training_deviation(run: Run, reference: Run, last: int) -> tuple[np.ndarray, np.ndarray]:
    """Steps and relative deviation of the smoothed training loss, from SETTLED steps after the start on."""
    steps, mine = run.smoothed(run.loss)
    other_steps, theirs = reference.smoothed(reference.loss)
    common, i, j = np.intersect1d(steps, other_steps, return_indices=True)
    keep = (common >= run.settled()) & (common <= last)
    return common[keep], mine[i[keep]] / theirs[j[keep]] - 1


def summarize(runs: list[Run], chosen: dict[str, dict[str, float]]) -> list[dict]:
    rows = []
    for _, group in groupby(runs, key=lambda run: run.change):
        members = list(group)
        step = max(set.intersection(*(set(run.evaluations) for run in members)))
        for run in members:
            evaluation, reference = run.evaluations[step], reference_of(run, runs)
            until = run.steps <= step
            row = {
                "name": run.name,
                "step": step,
                "held_out_loss": evaluation["held_out_loss"],
                "training_loss": float(run.loss[until][-SMOOTH:].mean()) if until.any() else None,
                "max_violation": float(np.mean(evaluation["max_violation"])),
                "load_entropy": float(np.mean(evaluation["load_entropy"])),
                "score_entropy": float(np.mean(evaluation["score_entropy"])),
                "median_grad_norm": float(np.median(run.grad_norm[until])) if until.any() else None,
                "largest_grad_norm": float(run.grad_norm[run.steps >= run.settled()].max(initial=0)),
                "ms_per_step": run.ms_per_step(),
            }
            if reference is not None and step in reference.evaluations:
                other = reference.evaluations[step]["held_out_loss"]
                steps, deviation = training_deviation(run, reference, step)
                row |= {
                    "reference": reference.name,
                    "held_out_deviation": evaluation["held_out_loss"] / other - 1,
                    "agreement": chosen.get(run.name, {}).get(str(step)),
                }
                if len(steps):
                    at = int(np.abs(deviation).argmax())
                    row |= {
                        "final_deviation": float(deviation[-1]),
                        "largest_deviation": float(deviation[at]),
                        "largest_deviation_step": int(steps[at]),
                    }
            rows.append(row)
    return rows


def format_table(rows: list[dict]) -> str:
    def percent(row: dict, key: str) -> str:
        return f"{row[key]:+.3%}" if row.get(key) is not None else ""

    def number(row: dict, key: str, form: str) -> str:
        return format(row[key], form) if row.get(key) is not None else ""

    head = (
        "variant|step|held-out loss|against bf16|training loss|final|largest (step)|same experts|max violation|"
        "load entropy|score entropy|gradient norm, median / largest|ms/step"
    ).split("|")
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in rows:
        largest = percent(row, "largest_deviation")
        cells = [
            row["name"],
            str(row["step"]),
            f"{row['held_out_loss']:.4f}",
            percent(row, "held_out_deviation"),
            number(row, "training_loss", ".4f"),
            percent(row, "final_deviation"),
            f"{largest} ({row['largest_deviation_step']})" if largest else "",
            number(row, "agreement", ".1%"),
            f"{row['max_violation']:.3f}",
            f"{row['load_entropy']:.4f}",
            f"{row['score_entropy']:.4f}",
            f"{number(row, 'median_grad_norm', '.3f')} / {row['largest_grad_norm']:.2f}",
            f"{row['ms_per_step']:.0f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    spread = seed_spread(rows)
    if spread:
        lines += ["", "Seed spread of the held-out loss: " + ", ".join(f"{r} {v:.3%}" for r, v in spread.items())]
    return "\n".join(lines)


def seed_spread(rows: list[dict]) -> dict[str, float]:
    """|seed 2 / seed 1 - 1| of the held-out loss, per recipe that has both."""
    loss = {row["name"]: row["held_out_loss"] for row in rows}
    recipes = [name.removesuffix("-s1") for name in loss if name.endswith("-s1")]
    return {r: abs(loss[f"{r}-s2"] / loss[f"{r}-s1"] - 1) for r in recipes if f"{r}-s2" in loss}


def draw(runs: list[Run], rows: list[dict], chosen: dict, out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    main = [run for run in runs if run.change in ("", "perturbed")]
    colours = {run.name: f"C{index}" for index, run in enumerate(main)}
    spread = seed_spread(rows).get("bf16")
    figure, axes = plt.subplots(2, 3, figsize=(17, 9), constrained_layout=True)
    held_out, deviation, evaluated, experts, norm, load = axes.flat
    for run in main:
        style = {"color": colours[run.name], "lw": 1.2, "ls": "--" if run.seed != "s1" else "-"}
        at = sorted(run.evaluations)
        losses = np.array([run.evaluations[step]["held_out_loss"] for step in at])
        held_out.plot(at[1:], losses[1:], label=run.name, **style)
        norm.plot(*run.smoothed(run.grad_norm), label=run.name, **style)
        load.plot(*run.smoothed(run.load), label=run.name, **style)
        reference = reference_of(run, runs)
        if reference is None:
            continue
        steps, values = training_deviation(run, reference, 10**9)
        deviation.plot(steps, 100 * values, label=run.name, **style)
        both = [step for step in at[1:] if step in reference.evaluations]
        ratios = [run.evaluations[s]["held_out_loss"] / reference.evaluations[s]["held_out_loss"] - 1 for s in both]
        evaluated.plot(both, 100 * np.array(ratios), label=run.name, **style)
        same = chosen.get(run.name, {})
        experts.plot([int(s) for s in same], [100 * v for v in same.values()], label=run.name, **style)
    if spread:
        evaluated.axhspan(-100 * spread, 100 * spread, color="grey", alpha=0.2, label="spread of bf16's two seeds")
    for axis in (deviation, evaluated):
        axis.axhspan(-0.1, 0.1, color="green", alpha=0.15, label="0.1%")
    held_out.set_yscale("log")
    norm.set_yscale("log")
    titles = {
        held_out: "held-out loss, nats per token",
        deviation: f"training loss, mean of {SMOOTH} steps: % from bf16 of the same seed",
        evaluated: "held-out loss: % from bf16 of the same seed",
        experts: "experts chosen that bf16 of the same seed also chose, %",
        norm: "gradient norm before clipping",
        load: "largest load of an expert / mean - 1, mean over layers",
    }
    for axis, title in titles.items():
        axis.set(title=title, xlabel="step")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    figure.savefig(out / "convergence.png", dpi=90)

    branches = [run for run in runs if run.change.startswith("resume") and reference_of(run, runs)]
    if branches:
        figure, (training, evaluated) = plt.subplots(1, 2, figsize=(13, 4.5), constrained_layout=True)
        for run in branches:
            reference = reference_of(run, runs)
            steps, values = training_deviation(run, reference, 10**9)
            training.plot(steps, 100 * values, label=run.name, lw=1.2)
            both = [step for step in sorted(run.evaluations) if step in reference.evaluations]
            ratios = [run.evaluations[s]["held_out_loss"] / reference.evaluations[s]["held_out_loss"] - 1 for s in both]
            evaluated.plot(both, 100 * np.array(ratios), label=run.name, lw=1.2)
        training.set(title=f"training loss, mean of {SMOOTH} steps: % from bf16, same checkpoint", xlabel="step")
        evaluated.set(title="held-out loss: % from bf16, same checkpoint", xlabel="step")
        for axis in (training, evaluated):
            axis.axhspan(-0.1, 0.1, color="green", alpha=0.15, label="0.1%")
            axis.legend(fontsize=7)
            axis.grid(alpha=0.3)
        figure.savefig(out / "branch.png", dpi=90)

    changes = sorted({run.change for run in runs if not run.change.startswith("resume")} - {"", "perturbed"})
    if changes:
        figure, axes = plt.subplots(1, len(changes), figsize=(5 * len(changes), 4), constrained_layout=True)
        for axis, change in zip(np.atleast_1d(axes), changes, strict=True):
            members = [run for run in runs if run.change == change]
            for run in members:
                axis.plot(*run.smoothed(run.loss), label=run.name, lw=1.2)
            axis.set(title=members[0].meta["change"][:60], xlabel="step", ylabel="training loss")
            axis.legend(fontsize=7)
            axis.grid(alpha=0.3)
        figure.savefig(out / "stress.png", dpi=90)


def records(runs: list[Run], rows: list[dict]) -> list[dict]:
    units = {
        "held_out_loss": "nats per token",
        "held_out_deviation": "of the reference's held-out loss",
        "final_deviation": "of the reference's smoothed training loss",
        "largest_deviation": "of the reference's smoothed training loss",
        "agreement": "share of chosen experts that the reference chose",
        "max_violation": "largest load / mean - 1, held-out text",
        "load_entropy": "of the largest possible",
        "score_entropy": "of the largest possible",
        "median_grad_norm": "",
        "largest_grad_norm": f"after step {SETTLED}",
        "ms_per_step": "ms, with the other runs on the same GPU",
    }
    by_name, rows_by_name = {run.name: run for run in runs}, {row["name"]: row for row in rows}
    result = []
    for row in rows:
        meta, reference = by_name[row["name"]].meta, row.get("reference")
        config = meta["config"]
        shape = (
            f"{config['model']['flavor']}, {meta['parameters']:,} parameters, {meta['tokens_per_step']} tokens/step, "
            f"step {row['step']} of {meta['steps']}, {meta['experts']}"
        )
        for key, unit in units.items():
            if row.get(key) is None:
                continue
            other = rows_by_name.get(reference, {}).get(key) if reference else None
            result.append(
                meta["environment"]
                | {"command": "bash experiments/convergence/run.sh", "name": f"{row['name']} {key}", "shape": shape}
                | {"value": row[key], "unit": unit}
                | {"reference": reference or "none", "reference_value": other, "speedup": None}
            )
    return result


def status(runs: list[Run]) -> None:
    for run in runs:
        last = max(run.evaluations, default=None)
        held_out = f"held-out {run.evaluations[last]['held_out_loss']:.4f} at {last}" if last is not None else ""
        loss = f"{run.loss[-SMOOTH:].mean():.4f}" if len(run.loss) else "-"
        speed, at = run.ms_per_step(), run.steps[-1] if len(run.steps) else 0
        left = (run.meta["steps"] - at) * speed / 1000
        graph = "graph" if run.meta["graph"] else "eager"
        print(f"{run.name:24} step {at:5} loss {loss} {held_out:26} {speed:6.1f} ms/step {left:5.0f} s left  {graph}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--status", action="store_true")
    args = parser.parse_args()
    runs = read_runs(args.work)
    if args.status:
        return status(runs)
    runs = [run for run in runs if run.evaluations and len(run.steps)]
    chosen = agreements(args.work, runs)
    rows = summarize(runs, chosen)
    table = format_table(rows)
    print(table)
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "table.md").write_text(table + "\n")
        draw(runs, rows, chosen, args.out)
        write_records(args.out / "results.json", records(runs, rows))


if __name__ == "__main__":
    main()
