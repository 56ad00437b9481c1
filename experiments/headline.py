"""Draws the README's picture from the records of training: tokens/s and memory of bf16 and of this package.

    python -m experiments.headline experiments/throughput/results.json docs/headline.png

The bars are those of the newest run of ``SHAPE``. The first is the reference of the ratios. Ours is the last, in
colour.
"""

import argparse
import json
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from experiments.pictures import save
from experiments.tables import Records, value

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


def bars(records: Records, name: str) -> dict[str, float]:
    """The values of a panel by label, ours last."""
    found = records.of(name, SHAPE)
    others = {label: found[key]["reference_value"] for key, label in BARS.items() if key in found}
    return others | {"FP8, titan_fp8moe": value(found)}


def draw_panel(axis: Axes, records: Records, name: str) -> None:
    """One bar per variant, labelled with its value and its ratio to the first one's."""
    label, number = PANELS[name]
    found = bars(records, name)
    values = [*found.values()]
    axis.barh(range(len(values)), values, color=[OTHERS] * (len(values) - 1) + [OURS])
    for i, length in enumerate(values):
        ratio = f" ({length / values[0]:.2f}x)" if i else ""
        axis.text(length, i, f" {number.format(length)}{ratio}", va="center", fontsize=10)
    axis.set_yticks(range(len(values)), [*found], fontsize=10)
    axis.set_xlim(0, 1.45 * max(values))
    axis.set_xticks([])
    axis.set_title(label, fontsize=10, loc="left")
    axis.spines[["top", "right", "bottom"]].set_visible(False)
    axis.tick_params(axis="y", length=0)


def draw(records: Records, path: Path) -> None:
    """Writes the picture: tokens/s on the left, memory on the right."""
    count = len(bars(records, "train_16b"))
    figure, axes = plt.subplots(1, 2, figsize=(10, 0.55 * count + 0.9), sharey=True, layout="constrained")
    for axis, name in zip(axes, PANELS, strict=True):
        draw_panel(axis, records, name)
    axes[0].invert_yaxis()  # shared: the first row is on top
    first = next(iter(records.of("train_16b", SHAPE).values()))
    source = f"{first['hardware']}, commit {first['commit']}, {first['date']}"
    figure.suptitle(f"{TITLE} ({source})", fontsize=11)
    save(figure, path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="JSON file of records")
    parser.add_argument("picture", type=Path, help="the file to write")
    args = parser.parse_args()
    draw(Records(json.loads(args.results.read_text())), args.picture)


if __name__ == "__main__":
    main()
