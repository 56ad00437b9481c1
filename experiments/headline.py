"""Draws the README's picture: tokens/s of whole models in bf16 and with this package.

    python -m experiments.headline experiments/throughput/results.json docs/headline.png

A panel per model of :data:`experiments.tables.WHOLE`. The ratios are over the strongest bf16 that was measured; ours is
the last bar.
"""

import io
import json
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from PIL import Image

from experiments.records import script_parser
from experiments.tables import BF16, PEERS, WHOLE, Records, beside_bf16, best, card, first

LABEL, OURS, OTHERS = "FP8, titan_fp8moe", "#0072B2", "#B0B0B0"


def bars(records: Records, name: str, shape: str) -> tuple[dict[str, float], dict]:
    """Tokens/s by label, ours last, and a record of the state that ran them."""
    found = beside_bf16(records, name, shape)
    peers = {title: best(found, names) for title, names in PEERS.items() if names in BF16}
    others = {title: found[peer]["reference_value"] for title, peer in peers.items() if peer}
    run = first(found)
    return others | {LABEL: run["value"]}, run


def draw_bars(axis: Axes, title: str, found: dict[str, float], run: dict) -> None:
    """One bar per variant, labelled with its value and its ratio to the strongest bf16's."""
    values = [*found.values()]
    axis.barh(range(len(values)), values, color=[OTHERS] * (len(values) - 1) + [OURS])
    for i, length in enumerate(values):
        axis.text(length, i, f" {length:,.0f} ({length / max(values[:-1]):.2f}x)", va="center", fontsize=10)
    axis.set_yticks(range(len(values)), [*found], fontsize=10)
    axis.invert_yaxis()
    axis.set_xlim(0, 1.5 * max(values))
    axis.set_xticks([])
    axis.spines[["top", "right", "bottom"]].set_visible(False)
    axis.tick_params(axis="y", length=0)
    axis.set_title(f"{title}, tokens/s per GPU\ncommit {run['commit']}, {run['date']}", fontsize=10, loc="left")


def draw(records: Records, path: Path) -> None:
    figure, axes = plt.subplots(1, len(WHOLE), figsize=(6.5 * len(WHOLE), 2.2), layout="constrained", squeeze=False)
    for axis, (title, (name, shape, _)) in zip(axes[0], WHOLE.items(), strict=True):
        found, run = bars(records, name, shape)
        draw_bars(axis, f"{title}, {shape.rpartition(', ')[2].removesuffix(' GPUs')} {card(run)}s", found, run)
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=150)
    # 128 colours: a third of matplotlib's size.
    Image.open(drawn).convert("RGB").quantize(128, dither=Image.Dither.NONE).save(path, optimize=True)


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("records", type=Path, help="results.json of the throughput experiment")
    parser.add_argument("picture", type=Path, help="the file to write")
    args = parser.parse_args()
    draw(Records(json.loads(args.records.read_text())), args.picture)


if __name__ == "__main__":
    main()
