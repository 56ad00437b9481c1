"""Draws the README's picture: tokens/s of the strongest bf16 and of this package.

    python -m experiments.headline experiments/throughput/results.json docs/headline.png

It has the rows of :data:`experiments.tables.HEADLINE`, whose ratios are over the strongest bf16 of the same invocation.
"""

import io
import json
from pathlib import Path

import matplotlib.pyplot as plt
from PIL import Image

from experiments.records import script_parser
from experiments.tables import Records, headline_runs

OURS, BF16 = "#0072B2", "#B0B0B0"


def draw(records: Records, path: Path) -> None:
    runs = [*headline_runs(records)]
    figure, axis = plt.subplots(figsize=(9, 0.75 * len(runs) + 0.6), layout="constrained")
    for i, (_, bf16, speed, _) in enumerate(runs):
        ratio = f" ({speed['speedup']:.2f}x)" if bf16 == "fused" else ""
        for value, at, color, label in (
            (speed["reference_value"], i - 0.2, BF16, f"bf16, {bf16}"),
            (speed["value"], i + 0.2, OURS, f"titan_fp8moe{ratio}"),
        ):
            axis.barh(at, value, 0.38, color=color)
            axis.text(value, at, f" {value:,.0f}  {label}", va="center", fontsize=9)
    axis.set_yticks(range(len(runs)), [title for title, *_ in runs], fontsize=10)
    axis.invert_yaxis()
    axis.set_xlim(0, 1.5 * max(speed["value"] for _, _, speed, _ in runs))
    axis.set_xticks([])
    axis.spines[["top", "right", "bottom"]].set_visible(False)
    axis.tick_params(axis="y", length=0)
    axis.set_title("tokens/s per GPU", fontsize=10, loc="left")
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
