"""Draws the README's picture: tokens/s of the strongest bf16 and of this package, and the losses of a long run.

    python -m experiments.headline

The first panel has the rows of :data:`experiments.tables.HEADLINE`, whose ratios are over the strongest bf16 of the
same invocation. The second has the losses of experiments/convergence/3000_steps.json.xz, and how far they are apart.
"""

import io
import json
import lzma
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from PIL import Image

from experiments.records import script_parser
from experiments.tables import ROOT, Records, headline_runs, read

OURS, BF16 = "#0072B2", "#B0B0B0"
LOSSES = Path(__file__).parent / "convergence/3000_steps.json.xz"
WINDOW = 100  # steps of a mean
RUNS = {"bf16_bit-s1": ("bf16 with one bit of one weight changed", "#606060"), "fp8-s1": ("titan_fp8moe", OURS)}


def draw(records: Records, path: Path) -> None:
    runs = [*headline_runs(records)]
    figure = plt.figure(figsize=(9, 0.75 * len(runs) + 3.2), layout="constrained")
    axis, below = figure.subplots(2, height_ratios=(0.75 * len(runs) + 0.6, 2.6))
    draw_speeds(axis, runs)
    draw_losses(below)
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=150)
    # 128 colours: a third of matplotlib's size.
    Image.open(drawn).convert("RGB").quantize(128, dither=Image.Dither.NONE).save(path, optimize=True)


def draw_losses(axis: Any) -> None:
    """How far the runs' losses are from bf16's, in percent of means of the last steps."""
    with lzma.open(LOSSES) as file:
        saved = json.load(file)
    losses = {name: np.array([*tags["loss_metrics/global_avg_loss"].values()]) for name, tags in saved.items()}
    means = {name: np.convolve(loss, np.ones(WINDOW) / WINDOW, "valid") for name, loss in losses.items()}
    steps = np.arange(WINDOW, len(losses["bf16-s1"]) + 1)
    axis.axhline(0, color=BF16, linewidth=3, label="bf16")
    for name, (label, color) in RUNS.items():
        axis.plot(steps, 100 * (means[name] / means["bf16-s1"] - 1), color=color, linewidth=1.2, label=label)
    title = f"training loss over bf16's in percent, means of {WINDOW} steps: 16B, 6 layers, 3,000 steps"
    axis.set_title(title, fontsize=10, loc="left")
    axis.set_xlim(0, len(losses["bf16-s1"]))
    axis.spines[["top", "right"]].set_visible(False)
    axis.tick_params(labelsize=9)
    axis.legend(fontsize=9, ncols=3, frameon=False, loc="upper left")
    axis.set_ylim(-2, 2.4)


def draw_speeds(axis: Any, runs: list[tuple]) -> None:
    for i, (_, speed, _) in enumerate(runs):
        for value, at, color, label in (
            (speed["reference_value"], i - 0.2, BF16, "bf16, fused"),
            (speed["value"], i + 0.2, OURS, f"titan_fp8moe ({speed['speedup']:.2f}x)"),
        ):
            axis.barh(at, value, 0.38, color=color)
            axis.text(value, at, f" {value:,.0f}  {label}", va="center", fontsize=9)
    axis.set_yticks(range(len(runs)), [title.replace(", ", "\n", 1) for title, *_ in runs], fontsize=9)
    axis.invert_yaxis()
    axis.set_xlim(0, 1.5 * max(speed["value"] for _, speed, _ in runs))
    axis.set_xticks([])
    axis.spines[["top", "right", "bottom"]].set_visible(False)
    axis.tick_params(axis="y", length=0)
    axis.set_title("tokens/s per GPU", fontsize=10, loc="left")


def main() -> None:
    script_parser(__doc__).parse_args()
    draw(read(), ROOT / "docs/headline.png")


if __name__ == "__main__":
    main()
