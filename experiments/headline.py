"""Draws the README's picture: tokens/s and memory of bf16, torchao's FP8 experts and this package.

    python -m experiments.headline experiments/headline.json docs/headline.png

The JSON file has a title, where and how the rows were measured, and ``rows``: variant, tokens_per_second, memory_gib.
The first row is the reference of the ratios. Ours is the last and is drawn in colour.
"""

import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from experiments.pictures import save

PANELS = {
    "tokens_per_second": ("tokens/s, more is better", "{:,.0f}"),
    "memory_gib": ("peak memory in GiB, less is better", "{:.1f}"),
}
OURS, OTHERS = "#0072B2", "#B0B0B0"


def draw_panel(axis: Axes, rows: list[dict], key: str) -> None:
    """One bar per row, labelled with its value and its ratio to the first row's."""
    label, number = PANELS[key]
    values = [row[key] for row in rows]
    axis.barh(range(len(rows)), values, color=[OTHERS] * (len(rows) - 1) + [OURS])
    for i, value in enumerate(values):
        ratio = f" ({value / values[0]:.2f}x)" if i else ""
        axis.text(value, i, f" {number.format(value)}{ratio}", va="center", fontsize=10)
    axis.set_yticks(range(len(rows)), [row["variant"] for row in rows], fontsize=10)
    axis.set_xlim(0, 1.45 * max(values))
    axis.set_xticks([])
    axis.set_title(label, fontsize=10, loc="left")
    axis.spines[["top", "right", "bottom"]].set_visible(False)
    axis.tick_params(axis="y", length=0)


def draw(results: dict, path: Path) -> None:
    """Writes the picture: tokens/s on the left, memory on the right."""
    rows = results["rows"]
    figure, axes = plt.subplots(1, 2, figsize=(10, 0.55 * len(rows) + 0.9), sharey=True, layout="constrained")
    for axis, key in zip(axes, PANELS, strict=True):
        draw_panel(axis, rows, key)
    axes[0].invert_yaxis()  # shared: the first row is on top
    source = f"{results['hardware']}, commit {results['commit']}, {results['date']}"
    figure.suptitle(f"{results['title']} ({source})", fontsize=11)
    save(figure, path, dpi=150)


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:])
    draw(json.loads(source.read_text()), target)
