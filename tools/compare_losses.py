"""Compare the training curves of torchtitan runs and fail when one leaves its reference.

    python tools/compare_losses.py --run bf16=outputs/bf16 --run fp8=outputs/fp8 --tolerance 0.01 --out curves.png

A run is a folder of TensorBoard or W&B, also offline. Of a step that a restart logged twice the later value counts.
Runs named like the first before ``-s`` are baselines: bf16-s1, bf16-s2, and bf16_bit-s1 with one bit of a weight
changed. The reference of a run is the baseline of its seed, or the first. The relative deviation of smoothed losses at
the last common step decides.

Exit status: 0 within the tolerance, 1 if a run is not or has a loss that is not finite, 2 if they cannot be compared.
"""

import argparse
import json
import lzma
import math
import re
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

LOSS, VALIDATION_LOSS, GRAD_NORM = "loss_metrics/global_avg_loss", "validation_metrics/loss", "grad_norm"
TOKENS_PER_SECOND, PEAK_MEMORY = "throughput(tps)", "memory/max_reserved(GiB)"
SCHEDULE = {"lr": "learning rate", "n_tokens_seen": "number of tokens seen"}
TAGS = {LOSS, VALIDATION_LOSS, GRAD_NORM, TOKENS_PER_SECOND, PEAK_MEMORY, *SCHEDULE}
WARM_UP = 10  # steps that tokens/s leave out
# Half a 95% interval in standard errors, of 2 pairs, 3, ...
T95 = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.16, 2.145, 2.131)
# The reference is black, others have the palette of Okabe and Ito.
COLORS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
COLUMNS = {  # of the table, with their formats
    "step": "d", "loss": ".5f", "smoothed": ".5f", "deviation": "+.3%", "largest": ".3%", "mean": ".3%",
    "tokens/s": ",.0f", "memory GiB": ".2f", "val. loss": ".5f", "grad norm": ".4f",
}  # fmt: skip
Point = tuple[float, int, str, float]  # wall time, step, tag, value


class UsageError(Exception):
    """The runs cannot be compared; the message tells the user what to change."""


class Run(NamedTuple):
    """The merged metrics of a run: for every tag of ``TAGS`` that was logged, its values by step, in step order."""

    name: str
    metrics: dict[str, dict[int, float]]

    @property
    def losses(self) -> dict[int, float]:
        return self.metrics[LOSS]

    def smoothed(self, tag: str, steps: list[int], window: int) -> np.ndarray:
        """For every step, the mean of the values logged in the ``window`` steps that end there."""
        at, values = np.array(steps), np.array([self.metrics[tag][step] for step in steps])
        starts = np.searchsorted(at, at - window, side="right")
        return np.array([values[start : end + 1].mean() for end, start in enumerate(starts)])


class Deviation(NamedTuple):
    """How far smoothed losses are from the reference's at the common steps, and the mean loss of their last quarter."""

    reference: Run
    steps: list[int]
    relative: np.ndarray
    last_quarter: float


def tensorboard_points(path: Path) -> Iterator[Point]:
    from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator

    events = EventAccumulator(str(path), size_guidance={SCALARS: 0})  # 0 keeps all values instead of a sample.
    events.Reload()
    for tag in TAGS.intersection(events.Tags()[SCALARS]):
        for event in events.Scalars(tag):
            yield event.wall_time, event.step, tag, event.value


def wandb_points(path: Path) -> Iterator[Point]:
    from wandb.proto import wandb_internal_pb2 as messages

    for content in leveldb_records(path.read_bytes()):
        history = messages.Record.FromString(content).history
        items = {(*item.nested_key, item.key)[0]: json.loads(item.value_json) for item in history.item}
        for tag in TAGS.intersection(items):
            yield items["_timestamp"], history.step.num, tag, float(items[tag])


def leveldb_records(data: bytes) -> Iterator[bytes]:
    """The records of a log in LevelDB's format behind W&B's seven bytes. A killed run's last record may be cut off."""
    at, record = 7, b""
    while at + 7 <= len(data):
        left = 2**15 - at % 2**15  # of a block
        if left < 7:
            at += left
            continue
        end, kind = at + 7 + int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        record, at = record + data[at + 7 : end], end
        if kind in (1, 4) and end <= len(data):  # a whole record, or its last part
            yield record
            record = b""


def read_run(name: str, path: Path) -> Run:
    """Read and merge everything that was logged below ``path``."""
    files, points_of = sorted(path.rglob("events.out.tfevents.*")), tensorboard_points
    if not files:
        files, points_of = sorted(path.rglob("run-*.wandb")), wandb_points
    if not files:
        flags = "--metrics.enable_tensorboard or --metrics.enable_wandb"
        kinds = "events.out.tfevents.* of TensorBoard or run-*.wandb of W&B"
        raise UsageError(f"run {name}: no {kinds} below {path}; train with {flags}")
    points = {file: list(points_of(file)) for file in files}
    # A restart begins at a later step than what it continues. Ranks that log, and other runs, begin at the same one.
    starts = {file: min((step for _, step, tag, _ in points[file] if tag == LOSS), default=math.inf) for file in files}
    first = min(starts.values())
    if len(runs := [str(file.parent.relative_to(path)) for file in files if starts[file] == first < math.inf]) > 1:
        what = f"{len(runs)} runs that start at step {first}, in {', '.join(runs)}"
        raise UsageError(f"run {name}: {path} holds {what}; give the folder of one, or remove the other's files")
    metrics: dict[str, dict[int, float]] = {}
    for _, step, tag, value in sorted(point for logged in points.values() for point in logged):
        metrics.setdefault(tag, {})[step] = value
    if min(metrics.get(LOSS, {0: 0.0}).values()) <= 0:
        why = "or it is no cross-entropy; with pipeline parallelism only ranks of the last stage log it"
        raise UsageError(f"run {name}: nothing below {path} has the metric {LOSS}, {why}")
    return Run(name, {tag: dict(sorted(values.items())) for tag, values in metrics.items()})


def compare(run: Run, reference: Run, window: int) -> Deviation:
    # Reduced to the common steps before smoothing: else runs with unequal log_freq would average different steps.
    steps = [step for step in reference.losses if step in run.losses]
    if not steps:
        first, second = (f"{len(r.losses)} steps from {min(r.losses)} to {max(r.losses)}" for r in (reference, run))
        raise UsageError(
            f"runs {reference.name} and {run.name} have no common steps ({first} and {second}); train them with the "
            "same metrics.log_freq"
        )
    ours, theirs = (np.mean([r.losses[step] for step in steps[-max(len(steps) // 4, 1) :]]) for r in (run, reference))
    expected = reference.smoothed(LOSS, steps, window)
    with np.errstate(invalid="ignore"):  # inf / inf
        relative = (run.smoothed(LOSS, steps, window) - expected) / expected
        return Deviation(reference, steps, relative, float(ours / theirs - 1))


def summarize(run: Run, deviation: Deviation | None, window: int) -> dict[str, Any]:
    """The columns of a run that it logged. Devices without memory statistics log values that are not positive."""
    metrics, steps = run.metrics, list(run.losses)
    row = {"step": steps[-1], "loss": run.losses[steps[-1]], "smoothed": run.smoothed(LOSS, steps, window)[-1]}
    if deviation is not None:
        sizes = np.abs(deviation.relative)
        row |= {"deviation": deviation.relative[-1], "largest": sizes.max(), "mean": sizes.mean()}
    if warm := [value for step, value in metrics.get(TOKENS_PER_SECOND, {}).items() if step > WARM_UP]:
        row["tokens/s"] = statistics.median(warm)
    if memory := [value for value in metrics.get(PEAK_MEMORY, {}).values() if value > 0]:
        row["memory GiB"] = max(memory)
    if VALIDATION_LOSS in metrics:
        row["val. loss"] = [*metrics[VALIDATION_LOSS].values()][-1]
    if GRAD_NORM in metrics:
        row["grad norm"] = run.smoothed(GRAD_NORM, list(metrics[GRAD_NORM]), window)[-1]
    return row


def failures(run: Run, deviation: Deviation | None, tolerance: float) -> Iterator[str]:
    for label, tag in (("loss", LOSS), ("validation loss", VALIDATION_LOSS)):
        if broken := [(s, value) for s, value in run.metrics.get(tag, {}).items() if not math.isfinite(value)]:
            yield f"{label} is {broken[0][1]} at step {broken[0][0]} ({len(broken)} logged values are not finite)"
    if deviation is not None and not abs(end := deviation.relative[-1]) <= tolerance:  # also where it is NaN
        yield f"smoothed loss deviates by {end:+.3%} at step {deviation.steps[-1]}, the tolerance is {tolerance:.3%}"


def notes(run: Run, deviation: Deviation) -> Iterator[str]:
    other, last = deviation.reference, deviation.steps[-1]
    if last < max(ends := [max(r.losses) for r in (run, other)]):
        yield f"{run.name} and {other.name} end at steps {ends[0]} and {ends[1]}; compared up to step {last}"
    for tag, name in SCHEDULE.items():
        ours, theirs = run.metrics.get(tag, {}), other.metrics.get(tag, {})
        if step := next((s for s in theirs if s in ours and not math.isclose(ours[s], theirs[s], rel_tol=1e-5)), None):
            yield f"schedules differ: {name} at step {step} is {ours[step]:g}, of {other.name} {theirs[step]:g}"
            if tag == "lr":
                yield "training.steps sets the learning rates, so a run that resumes with more steps changes them"


def print_table(rows: dict[str, dict[str, Any]], results: dict[str, str]) -> None:
    cells = [["run", *COLUMNS, "result"]]
    for name, row in rows.items():
        cells.append([name, *(format(row[c], f) if c in row else "-" for c, f in COLUMNS.items()), results[name]])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for name, *line in cells:
        print(name.ljust(widths[0]), *map(str.rjust, line, widths[1:]), sep="  ")


def plot(runs: list[Run], deviations: dict[str, Deviation], window: int, tolerance: float, out: Path) -> None:
    """Draws the losses (faint) and their smoothed curves on top, the deviations from references below."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 7), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
    for index, run in enumerate(runs):
        color, steps = COLORS[(index - 1) % 6 + 1 if index else 0], list(run.losses)
        top.plot(steps, list(run.losses.values()), color=color, alpha=0.25, linewidth=0.8)
        # The reference is broad: it shows on both sides of a run that lies on it.
        top.plot(steps, run.smoothed(LOSS, steps, window), color=color, linewidth=1.6 if index else 4, label=run.name)
        if run.name in deviations:
            bottom.plot(deviations[run.name].steps, 100 * deviations[run.name].relative, color=color, linewidth=1.6)
    top.set(ylabel="training loss", title=f"Training loss; thin: single steps, thick: mean over {window}")
    bottom.set(ylabel=f"deviation (%), tolerance {100 * tolerance:.3g}", xlabel="step")
    top.legend()
    figure.savefig(out, dpi=150)


def report(runs: list[Run], window: int, tolerance: float, out: Path) -> bool:
    """Prints the table and what is wrong, and draws the figure. Returns whether something is."""
    seed = {run.name: match[0] if (match := re.search(r"-s\d+$", run.name)) else "" for run in runs}
    recipe = {name: name.removesuffix(seed[name]).removesuffix("_bit") for name in seed}
    baselines = {run.name: run for run in runs if recipe[run.name] == recipe[runs[0].name]}
    deviations = {}
    for run in runs[1:]:
        paired = baselines.get(recipe[runs[0].name] + seed[run.name], runs[0])
        deviations[run.name] = compare(run, runs[0] if paired is run else paired, window)
    judged = {run.name: None if run.name in baselines else deviations[run.name] for run in runs}
    wrong = {run.name: list(failures(run, judged[run.name], tolerance)) for run in runs}
    results = {n: "FAIL" if wrong[n] else "baseline" if n in baselines else "ok" for n in wrong}
    print_table({run.name: summarize(run, deviations.get(run.name), window) for run in runs}, results)
    print(
        f"note: smoothed is the mean loss of the last {window} steps; deviation: how far from the reference's at the "
        "last common step; largest and mean are of the deviations at all steps, without sign",
        *(f"note: {note}" for run in runs[1:] for note in notes(run, deviations[run.name])),
        sep="\n",
    )
    for name in dict.fromkeys(recipe.values()):
        found = [d for n, d in deviations.items() if recipe[n] == name]
        apart = [d.last_quarter for d in found]
        if name == recipe[runs[0].name] and apart:
            most = max(map(abs, apart))
            print(f"yardstick: {name} differs from itself by up to {most:.2%} in the mean of the last quarter")
        elif len(apart) > 1:
            half = T95[min(len(apart) - 2, len(T95) - 1)] * statistics.stdev(apart) / len(apart) ** 0.5
            spread = f"{statistics.fmean(apart):+.2%} ± {half:.2%} (95%, {len(apart)} runs)"
            print(f"{name} in the mean of the last quarter: {spread}")
        elif apart:
            print(f"{name} differs from {found[0].reference.name} by {apart[0]:+.2%} in the mean of the last quarter")
    print(*(f"FAIL {name}: {sentence}\n" for name in wrong for sentence in wrong[name]), sep="", end="")
    plot(runs, deviations, window, tolerance, out)
    return any(wrong.values())


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="compare_losses.py", description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--run", dest="runs", action="append", default=[], help="NAME=PATH, the run's folder; the reference first")
    add("--saved", type=Path, metavar="FILE", help="runs that --save wrote, which come first")
    add("--save", type=Path, metavar="FILE", help="write the runs' metrics, as JSON in .xz")
    add("--smooth", type=int, default=20, metavar="STEPS", help="window of the running mean (default: %(default)s)")
    add("--tolerance", type=float, default=0.01, metavar="F", help="of the final deviation (default: %(default)s)")
    add("--out", type=Path, default=Path("curves.png"), metavar="PNG", help="the figure (default: %(default)s)")
    args = parser.parse_args(argv)
    try:
        saved = json.loads(lzma.decompress(args.saved.read_bytes())) if args.saved else {}
        runs = [Run(n, {t: {int(s): v for s, v in of.items()} for t, of in m.items()}) for n, m in saved.items()]
        for name, separator, path in (run.partition("=") for run in args.runs):
            if not separator:
                raise UsageError(f"--run {name} is not NAME=PATH")
            runs.append(read_run(name, Path(path)))
        if len({run.name for run in runs}) < max(len(runs), 2):
            raise UsageError("give at least two --run NAME=PATH, each with a name of its own, the reference first")
        if args.save:
            args.save.write_bytes(lzma.compress(json.dumps(dict(runs)).encode()))
        return int(report(runs, args.smooth, args.tolerance, args.out))
    except UsageError as error:
        print(f"compare_losses.py: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
