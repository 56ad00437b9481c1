"""Draws the README's picture: tokens/s of bf16 and of this package, and tokens/s over memory as the batch grows.

    python -m experiments.headline experiments/throughput docs/headline.png

The bars are the records of ``SHAPE`` on the card on which torchtitan's bf16 was measured last, with checkpointing per
op. The ratios are over the strongest bf16, ours is the last, in colour. The curves are the fastest of each precision in
the sweep on that card, with the local batch at each point; where ``sweep.json`` has none of it there are no curves.
"""

import json
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from experiments.pictures import save
from experiments.records import script_parser, write_list
from experiments.tables import BF16, PEERS, Records, best, card, first

TITLE, MODEL = "DeepSeek-V3 16B, 6 layers", "16B, 6 layers"
NAME, SHAPE = "train_16b", f"{MODEL}, sdpa, local batch 4, random routing, 1 GPU"
LABEL, OURS, OTHERS = "FP8, titan_fp8moe", "#0072B2", "#B0B0B0"


def bars(records: Records) -> tuple[dict[str, float], float, dict]:
    """Tokens/s by label, ours last, the strongest bf16's, and a record of the card and state that ran them."""
    run = first(next(run for run in records.runs(NAME, SHAPE) if "bf16" in run))
    every = records.of(NAME, SHAPE, hardware=run["hardware"])
    found = {name: r for name, r in every.items() if not name.endswith(("=none", "=full"))}
    ours = max(r["value"] for r in found.values())
    peers = {title: best(found, names) for title, names in PEERS.items()}
    others = {title: found[peer]["reference_value"] for title, peer in peers.items() if peer}
    strongest = max(found[peer]["reference_value"] for peer in (best(found, names) for names in BF16) if peer)
    return others | {LABEL: ours}, strongest, run


def title(axis: Axes, what: str, *records: dict) -> None:
    commits, dates = (", ".join(sorted({r[key] for r in records})) for key in ("commit", "date"))
    axis.set_title(f"{what}\n{card(records[0])}, commit {commits}, {dates}", fontsize=9, loc="left")


def draw_bars(axis: Axes, found: dict[str, float], strongest: float) -> None:
    """One bar per variant, labelled with its value and its ratio to the strongest bf16's."""
    values = [*found.values()]
    axis.barh(range(len(values)), values, color=[OTHERS] * (len(values) - 1) + [OURS])
    for i, length in enumerate(values):
        axis.text(length, i, f" {length:,.0f} ({length / strongest:.2f}x)", va="center", fontsize=10)
    axis.set_yticks(range(len(values)), [*found], fontsize=10)
    axis.invert_yaxis()
    axis.set_xlim(0, 1.5 * max(values))
    axis.set_xticks([])
    axis.spines[["top", "right", "bottom"]].set_visible(False)
    axis.tick_params(axis="y", length=0)


def shown(points: list[dict]) -> list[dict]:
    """Of a card's points those of the two curves, ours first, smallest batch first; what did not fit is left out."""
    fitted = sorted((p for p in points if not p["error"]), key=lambda p: p["local_batch"])
    curves = []
    for precision in ("fp8", "bf16"):
        mine = [p for p in fitted if p["variant"].startswith(precision)]
        fastest = max(mine, key=lambda p: p["tokens_per_second"], default=None)
        curves += [p for p in mine if p["variant"] == fastest["variant"]]
    return curves


def draw_curves(axis: Axes, points: list[dict]) -> None:
    for variant in dict.fromkeys(p["variant"] for p in points):
        line = [p for p in points if p["variant"] == variant]
        label = variant.replace("fp8_flow", "FP8").replace("bf16_fused", "bf16, fused").replace(":", ", ")
        label = label.replace("checkpointing=", "checkpointing ")
        color = OURS if variant.startswith("fp8") else OTHERS
        memory, speed, batches = (
            tuple(p[key] for p in line) for key in ("memory_gib", "tokens_per_second", "local_batch")
        )
        axis.plot(memory, speed, "-o", color=color, markersize=4, label=label)
        for x, y, batch in zip(memory, speed, batches, strict=True):
            axis.annotate(batch, (x, y), (0, 4), textcoords="offset points", fontsize=6, ha="center")
    axis.yaxis.set_major_formatter("{x:,.0f}")
    axis.set_xlabel("GiB reserved", fontsize=9)
    axis.tick_params(labelsize=8)
    axis.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)


def draw(records: Records, points: list[dict], path: Path) -> list[dict]:
    """Writes the picture; returns the points of its curves."""
    found, strongest, run = bars(records)
    points = shown([p for p in points if p["hardware"] == run["hardware"]])
    size = (13 if points else 6, max(0.55 * len(found) + 0.9, 3.5 if points else 0))
    figure, axes = plt.subplots(1, 1 + bool(points), figsize=size, layout="constrained", squeeze=False)
    draw_bars(axes[0, 0], found, strongest)
    title(axes[0, 0], "tokens/s, local batch 4, checkpointing per op", run)
    if points:
        draw_curves(axes[0, 1], points)
        title(axes[0, 1], "tokens/s as the local batch (at each point) grows until memory is full", *points)
    figure.suptitle(TITLE, fontsize=11)
    save(figure, path, dpi=150)
    return points


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("folder", type=Path, help="of results.json and sweep.json")
    parser.add_argument("picture", type=Path, help="the file to write")
    parser.add_argument("--prune", action="store_true", help="leave only the points of the curves in sweep.json")
    args = parser.parse_args()
    records, points = (
        json.loads(path.read_text()) if path.exists() else []
        for path in (args.folder / "results.json", args.folder / "sweep.json")
    )
    drawn = draw(Records(records), [p for p in points if p["shape"].startswith(MODEL)], args.picture)
    if args.prune:
        write_list(args.folder / "sweep.json", drawn)


if __name__ == "__main__":
    main()
