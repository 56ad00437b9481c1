"""Draws the README's picture from the records of training: tokens/s and memory of bf16 and of this package.

    python -m experiments.headline experiments/throughput/results.json docs/headline.png

The bars are those of the newest run of ``SHAPE``. The first is the reference of the ratios. Ours is the last, in
colour.
"""

import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from experiments.pictures import save

TITLE, SHAPE = "DeepSeek-V3 16B, 6 layers", "16B, 6 layers, sdpa, local batch 4, random routing, 1 GPU"
BARS = {
    "bf16": "bf16, torchtitan",
    "bf16_whole": "bf16, blocks compiled whole",
    "torchao": "torchao, FP8 experts",
    "naive_blockwise": "FP8, a cast around each GEMM",
}
PANELS = {
    "train_16b": ("tokens/s, more is better", "{:,.0f}"),
    "train_16b memory": ("peak memory in GiB, less is better", "{:.1f}"),
}
OURS, OTHERS = "#0072B2", "#B0B0B0"


def newest(records: list[dict]) -> list[dict]:
    """The records of ``SHAPE`` that belong to the run of the newest one."""
    found = [record for record in records if record["shape"] == SHAPE and record["name"] in PANELS]
    last = max(found, key=lambda record: record["date"])
    return [record for record in found if all(record[key] == last[key] for key in ("date", "commit", "hardware"))]


def bars(run: list[dict], name: str) -> dict[str, float]:
    """The values of a panel by label, ours last."""
    references = {r["reference"]: r["reference_value"] for r in run if r["name"] == name}
    ours = next(r["value"] for r in run if r["name"] == name)
    return {label: references[key] for key, label in BARS.items() if key in references} | {"FP8, titan_fp8moe": ours}


def draw_panel(axis: Axes, run: list[dict], name: str) -> None:
    """One bar per variant, labelled with its value and its ratio to the first one's."""
    label, number = PANELS[name]
    found = bars(run, name)
    values = [*found.values()]
    axis.barh(range(len(values)), values, color=[OTHERS] * (len(values) - 1) + [OURS])
    for i, value in enumerate(values):
        ratio = f" ({value / values[0]:.2f}x)" if i else ""
        axis.text(value, i, f" {number.format(value)}{ratio}", va="center", fontsize=10)
    axis.set_yticks(range(len(values)), [*found], fontsize=10)
    axis.set_xlim(0, 1.45 * max(values))
    axis.set_xticks([])
    axis.set_title(label, fontsize=10, loc="left")
    axis.spines[["top", "right", "bottom"]].set_visible(False)
    axis.tick_params(axis="y", length=0)


def draw(records: list[dict], path: Path) -> None:
    """Writes the picture: tokens/s on the left, memory on the right."""
    run = newest(records)
    count = len(bars(run, "train_16b"))
    figure, axes = plt.subplots(1, 2, figsize=(10, 0.55 * count + 0.9), sharey=True, layout="constrained")
    for axis, name in zip(axes, PANELS, strict=True):
        draw_panel(axis, run, name)
    axes[0].invert_yaxis()  # shared: the first row is on top
    source = f"{run[0]['hardware']}, commit {run[0]['commit']}, {run[0]['date']}"
    figure.suptitle(f"{TITLE} ({source})", fontsize=11)
    save(figure, path, dpi=150)


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:])
    draw(json.loads(source.read_text()), target)
