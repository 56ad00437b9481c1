"""Compare the training curves of torchtitan runs and fail when one leaves the reference.

The first run is the reference. A run is a folder that torchtitan logged to with TensorBoard. All event files below it
are taken as one run: after a restart, a step that was logged twice keeps the later value.

The losses of a run and of the reference are compared at the steps both logged, after smoothing each with the mean
over the last ``--smooth`` steps. Relative deviations are (run - reference) / reference of the smoothed losses; the
one at the last common step decides. Tokens/s and memory are per device, as torchtitan logs them.

Exit status: 0 if every run is within the tolerance, 1 if one is not or has a loss that is not finite, 2 if the runs
cannot be compared.

Example::

    python tools/compare_losses.py --run bf16=outputs/bf16 --run fp8=outputs/fp8 --tolerance 0.01 --out curves.png
"""

import argparse
import math
import re
import statistics
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

LOSS = "loss_metrics/global_avg_loss"
VALIDATION_LOSS = "validation_metrics/loss"
GRAD_NORM = "grad_norm"
TOKENS_PER_SECOND = "throughput(tps)"
PEAK_MEMORY = "memory/max_reserved(GiB)"
TAGS = (LOSS, VALIDATION_LOSS, GRAD_NORM, TOKENS_PER_SECOND, PEAK_MEMORY)
WARM_UP = 10  # steps that tokens/s leave out

# The reference is black; the others follow the palette of Okabe and Ito, which colour-blind readers can tell apart.
REFERENCE_COLOR = "#000000"
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")


class UsageError(Exception):
    """The runs cannot be compared; the message tells the user what to change."""


class Point(NamedTuple):
    """One logged value. Points sort by the time they were written."""

    wall_time: float
    step: int
    tag: str
    value: float


@dataclass
class Run:
    """The merged metrics of a run: for every tag of ``TAGS`` that was logged, its values by step, in step order."""

    name: str
    metrics: dict[str, dict[int, float]]

    @property
    def losses(self) -> dict[int, float]:
        return self.metrics[LOSS]

    def values(self, tag: str) -> list[float]:
        return list(self.metrics.get(tag, {}).values())

    def smoothed(self, tag: str, steps: Iterable[int], window: int) -> np.ndarray:
        """For every step, the mean of the values logged in the ``window`` steps that end there."""
        at = np.array(list(steps))
        values = np.array([self.metrics[tag][step] for step in at])
        starts = np.searchsorted(at, at - window, side="right")
        return np.array([values[start : end + 1].mean() for end, start in enumerate(starts)])


class Deviation(NamedTuple):
    """The steps that a run and the reference have in common, and how far apart their smoothed losses are there."""

    steps: np.ndarray
    relative: np.ndarray


@dataclass
class Summary:
    """What is reported of a run. None stands for a metric that was not logged or, in the reference, not defined."""

    last_step: int
    final_loss: float
    smoothed_final_loss: float
    compared_up_to_step: int | None = None
    final_deviation: float | None = None
    largest_deviation: float | None = None
    largest_deviation_step: int | None = None
    mean_deviation: float | None = None
    tokens_per_second: float | None = None
    peak_memory_gib: float | None = None
    validation_loss: float | None = None
    grad_norm: float | None = None
    failures: list[str] = field(default_factory=list)


def tensorboard_points(path: Path) -> Iterator[Point]:
    from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator

    events = EventAccumulator(str(path), size_guidance={SCALARS: 0})  # 0 keeps all values instead of a sample.
    events.Reload()
    for tag in set(TAGS).intersection(events.Tags()[SCALARS]):
        for event in events.Scalars(tag):
            yield Point(event.wall_time, event.step, tag, event.value)


def read_run(name: str, path: Path) -> Run:
    """Read and merge everything that was logged below ``path``."""
    if not path.is_dir():
        raise UsageError(f"run {name}: {path} is not a folder")
    files = sorted(path.rglob("events.out.tfevents.*"))
    if not files:
        raise UsageError(
            f"run {name}: no TensorBoard event files (events.out.tfevents.*) below {path}; train with "
            "--metrics.enable_tensorboard, also next to --metrics.enable_wandb"
        )
    # With metrics.save_for_all_ranks or fault tolerance several processes log the same steps, each in its own folder.
    # Their values differ, so they must not be merged as a restart is.
    writers = {"/".join(re.findall(r"\b(?:rank|replica)_\d+\b", str(file.relative_to(path)))) for file in files}
    if len(writers) > 1:
        raise UsageError(f"run {name}: {path} has the logs of {', '.join(sorted(writers))}; give the folder of one")

    points = {file: list(tensorboard_points(file)) for file in files}
    # A restart begins at a later step than what it continues.
    starts = {file: min((p.step for p in points[file] if p.tag == LOSS), default=math.inf) for file in files}
    first = min(starts.values())
    if len(runs := [file for file in files if starts[file] == first < math.inf]) > 1:
        folders = ", ".join(sorted({str(file.parent.relative_to(path)) for file in runs}))
        raise UsageError(
            f"run {name}: {path} holds {len(runs)} runs that start at step {first}, in {folders}; give the folder of "
            "one, or remove the other's files"
        )

    metrics: dict[str, dict[int, float]] = {}
    for point in sorted(point for logged in points.values() for point in logged):
        metrics.setdefault(point.tag, {})[point.step] = point.value
    if LOSS not in metrics:
        raise UsageError(f"run {name}: nothing below {path} has the metric {LOSS}; found {sorted(metrics) or 'none'}")
    run = Run(name, {tag: dict(sorted(values.items())) for tag, values in metrics.items()})
    for step, loss in run.losses.items():
        if math.isfinite(loss) and loss <= 0:
            raise UsageError(
                f"run {name}: the loss at step {step} is {loss}, which is no cross-entropy; with pipeline parallelism "
                "only ranks of the last stage log the loss"
            )
    return run


def compare(run: Run, reference: Run, window: int) -> Deviation:
    # Reduced to the common steps before smoothing: else runs with unequal log_freq would average different steps.
    steps = [step for step in reference.losses if step in run.losses]
    if not steps:
        raise UsageError(
            f"runs {reference.name} and {run.name} have no common steps ({_logged(reference)} and {_logged(run)}); "
            "train them with the same metrics.log_freq"
        )
    expected = reference.smoothed(LOSS, steps, window)
    with np.errstate(invalid="ignore"):  # inf / inf; summarize reports non-finite losses.
        relative = (run.smoothed(LOSS, steps, window) - expected) / expected
    return Deviation(np.array(steps), relative)


def _logged(run: Run) -> str:
    steps = list(run.losses)
    return f"{len(steps)} steps from {steps[0]} to {steps[-1]}"


def summarize(run: Run, deviation: Deviation | None, window: int, tolerance: float) -> Summary:
    """Summarize ``run`` and list what is wrong with it; ``deviation`` is None for the reference."""
    steps = list(run.losses)
    summary = Summary(
        last_step=steps[-1],
        final_loss=run.losses[steps[-1]],
        smoothed_final_loss=float(run.smoothed(LOSS, steps, window)[-1]),
    )
    warm = [value for step, value in run.metrics.get(TOKENS_PER_SECOND, {}).items() if step > WARM_UP]
    if warm:
        summary.tokens_per_second = statistics.median(warm)
    # Devices without memory statistics log values that are not positive.
    summary.peak_memory_gib = max((value for value in run.values(PEAK_MEMORY) if value > 0), default=None)
    if validation_losses := run.values(VALIDATION_LOSS):
        summary.validation_loss = validation_losses[-1]
    if grad_norms := run.metrics.get(GRAD_NORM):
        summary.grad_norm = float(run.smoothed(GRAD_NORM, grad_norms, window)[-1])

    for label, tag in (("loss", LOSS), ("validation loss", VALIDATION_LOSS)):
        broken = [(step, value) for step, value in run.metrics.get(tag, {}).items() if not math.isfinite(value)]
        if broken:
            step, value = broken[0]
            summary.failures.append(f"{label} is {value} at step {step} ({len(broken)} logged values are not finite)")

    if deviation is not None:
        magnitude = np.abs(deviation.relative)
        largest = int(magnitude.argmax())
        summary.compared_up_to_step = int(deviation.steps[-1])
        summary.final_deviation = float(deviation.relative[-1])
        summary.largest_deviation = float(magnitude[largest])
        summary.largest_deviation_step = int(deviation.steps[largest])
        summary.mean_deviation = float(magnitude.mean())
        if not magnitude[-1] <= tolerance:  # Also true for NaN, that is if the reference is not finite.
            summary.failures.append(
                f"smoothed loss deviates by {summary.final_deviation:+.3%} at step {summary.compared_up_to_step}, "
                f"the tolerance is {tolerance:.3%}"
            )
    return summary


COLUMNS = {  # of the table: an attribute of Summary and its format
    "step": ("last_step", "d"),
    "loss": ("final_loss", ".5f"),
    "smoothed": ("smoothed_final_loss", ".5f"),
    "deviation": ("final_deviation", "+.3%"),
    "largest": ("largest_deviation", ".3%"),
    "mean": ("mean_deviation", ".3%"),
    "tokens/s": ("tokens_per_second", ",.0f"),
    "memory GiB": ("peak_memory_gib", ".2f"),
    "val. loss": ("validation_loss", ".5f"),
    "grad norm": ("grad_norm", ".4f"),
}


def format_table(summaries: dict[str, Summary], reference: str) -> str:
    rows = [["run", *COLUMNS, "result"]]
    for name, summary in summaries.items():
        values = ((getattr(summary, attribute), spec) for attribute, spec in COLUMNS.values())
        cells = ["-" if value is None else format(value, spec) for value, spec in values]
        passed = "reference" if name == reference else "ok"
        rows.append([name, *cells, "FAIL" if summary.failures else passed])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    # Words to the left, numbers to the right.
    align = [str.ljust, *[str.rjust] * len(COLUMNS), str.ljust]
    aligned = [[pad(*cell) for pad, *cell in zip(align, row, widths, strict=True)] for row in rows]
    return "\n".join("  ".join(row).rstrip() for row in aligned)


def plot(runs: list[Run], deviations: dict[str, Deviation], window: int, tolerance: float, out: Path) -> None:
    """Draw the losses (faint) and their smoothed curves on top, the deviations from ``runs[0]`` below.

    The reference is a broad line, which shows on both sides of a run that lies on it.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(9, 7), layout="constrained")
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
    for index, run in enumerate(runs):
        color = COLORS[(index - 1) % len(COLORS)] if index else REFERENCE_COLOR
        steps = list(run.losses)
        top.plot(steps, list(run.losses.values()), color=color, alpha=0.25, linewidth=0.8)
        label, width = (run.name, 1.6) if index else (f"{run.name} (reference)", 4.0)
        top.plot(steps, run.smoothed(LOSS, steps, window), color=color, linewidth=width, label=label)
        if run.name in deviations:
            deviation = deviations[run.name]
            # No label: the colors are those of the legend above, and a second legend would cover the curves.
            bottom.plot(deviation.steps, 100 * deviation.relative, color=color, linewidth=1.6)
    top.plot([], [], color=REFERENCE_COLOR, alpha=0.25, linewidth=0.8, label="thin: single steps")
    percent = 100 * tolerance
    bottom.axhspan(-percent, percent, color="#999999", alpha=0.25, linewidth=0, label=f"tolerance ±{percent:.3g}%")
    largest = max((float(abs(d.relative).max()) for d in deviations.values()), default=0.0)
    if math.isfinite(largest) and largest > 0:  # else the tolerance sets the range, and small deviations look flat
        bottom.set_ylim(-120 * largest, 120 * largest)
    bottom.xaxis.set_major_locator(MaxNLocator(integer=True))
    bottom.axhline(0, color=REFERENCE_COLOR, linewidth=0.8)
    top.set_ylabel("training loss")
    top.set_title(f"Training loss; thick: mean over {window} steps")
    bottom.set_ylabel(f"deviation from\n{runs[0].name} (%)")
    bottom.set_xlabel("step")
    for axes in (top, bottom):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(out, dpi=150)


def _named_path(argument: str) -> tuple[str, Path]:
    name, separator, path = argument.partition("=")
    if not (name and separator and path):
        raise argparse.ArgumentTypeError(f"{argument!r} is not NAME=PATH")
    return name, Path(path)


def _parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="compare_losses.py", description="Compare the training curves of torchtitan runs with those of the first."
    )
    add = parser.add_argument
    what = "a run and the folder with its TensorBoard files; give at least two, the reference first"
    add("--run", dest="runs", type=_named_path, action="append", required=True, metavar="NAME=PATH", help=what)
    add("--smooth", type=int, default=20, metavar="STEPS", help="window of the running mean (default: %(default)s)")
    what = "largest relative deviation of the final smoothed loss that passes (default: %(default)s)"
    add("--tolerance", type=float, default=0.01, metavar="F", help=what)
    add("--out", type=Path, default=Path("curves.png"), metavar="PNG", help="the figure (default: %(default)s)")
    return parser.parse_args(argv)


def _check_args(args: argparse.Namespace) -> None:
    names = [name for name, _ in args.runs]
    if len(names) < 2:
        raise UsageError("give at least two --run NAME=PATH, the reference first")
    if len(set(names)) < len(names):
        raise UsageError(f"every --run needs a name of its own, not {', '.join(names)}")
    if args.smooth < 1:
        raise UsageError(f"--smooth must be at least 1 step, not {args.smooth}")
    if not args.tolerance >= 0:
        raise UsageError(f"--tolerance must not be negative, not {args.tolerance}")
    if not args.out.parent.is_dir():
        raise UsageError(f"cannot write {args.out}: there is no folder {args.out.parent}")
    if args.out.suffix.lower() not in (".png", ".pdf", ".svg"):
        raise UsageError(f"cannot draw {args.out}: its name must end in .png, .pdf or .svg")


def report(runs: list[Run], args: argparse.Namespace) -> dict[str, Summary]:
    """Print the table and what is wrong, and draw the figure; ``runs[0]`` is the reference."""
    reference = runs[0]
    deviations = {run.name: compare(run, reference, args.smooth) for run in runs[1:]}
    summaries = {run.name: summarize(run, deviations.get(run.name), args.smooth, args.tolerance) for run in runs}
    print(format_table(summaries, reference.name))
    print(
        f"note: smoothed is the mean loss of the last {args.smooth} steps; deviation: how far from "
        f"{reference.name}'s at the last common step; largest and mean are of the deviations at all steps, without sign"
    )
    for name, deviation in deviations.items():
        last_steps = (summaries[name].last_step, summaries[reference.name].last_step)
        if deviation.steps[-1] < max(last_steps):
            print(
                f"note: {name} and {reference.name} end at steps {last_steps[0]} and {last_steps[1]}; "
                f"compared up to step {deviation.steps[-1]}"
            )
    for name, summary in summaries.items():
        for failure in summary.failures:
            print(f"FAIL {name}: {failure}")
    plot(runs, deviations, args.smooth, args.tolerance, args.out)
    return summaries


def main(argv: list[str] | None = None) -> int:
    """Run the tool and return its exit status."""
    args = _parse_args(argv)
    try:
        _check_args(args)
        summaries = report([read_run(name, path) for name, path in args.runs], args)
    except UsageError as error:
        print(f"compare_losses.py: error: {error}", file=sys.stderr)
        return 2
    return 1 if any(summary.failures for summary in summaries.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
