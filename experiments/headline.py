"""Draws the README's picture: tokens/s of bf16 and of this package, and tokens/s over memory as the batch grows.

    python -m experiments.headline experiments/throughput docs/headline.png

The bars are the newest records of ``SHAPE`` in ``results.json``, each at its fastest checkpointing. The ratios are
over the strongest bf16, ours is the last, in colour. The curves are the sweep's, of the cards in
``sweep.json``; without that file there are none.
"""

import json
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from experiments.pictures import save
from experiments.records import script_parser
from experiments.tables import BF16, PEERS, Records, best

TITLE, MODEL = "DeepSeek-V3 16B, 6 layers", "16B, 6 layers"
NAME, SHAPE = "train_16b", f"{MODEL}, sdpa, local batch 4, random routing, 1 GPU"
LABEL, OURS, OTHERS = "FP8, titan_fp8moe", "#0072B2", "#B0B0B0"


def bars(records: Records) -> tuple[dict[str, float], float]:
    """Tokens/s by label, ours last, and the strongest bf16's."""
    found = records.of(NAME, SHAPE)
    without_checkpointing = records.of(f"{NAME} checkpointing=none", SHAPE)
    ours = max(r["value"] for r in [*found.values(), *without_checkpointing.values()])
    peers = {title: best(found, names) for title, names in PEERS.items()}
    others = {title: found[peer]["reference_value"] for title, peer in peers.items() if peer}
    strongest = max(found[peer]["reference_value"] for peer in (best(found, names) for names in BF16) if peer)
    return others | {LABEL: ours}, strongest


def draw_bars(axis: Axes, found: dict[str, float], strongest: float) -> None:
    """One bar per variant, labelled with its value and its ratio to the strongest bf16's."""
    values = [*found.values()]
    axis.barh(range(len(values)), values, color=[OTHERS] * (len(values) - 1) + [OURS])
    for i, length in enumerate(values):
        axis.text(length, i, f" {length:,.0f} ({length / strongest:.2f}x)", va="center", fontsize=10)
    axis.set_yticks(range(len(values)), [*found], fontsize=10)
    axis.invert_yaxis()
    axis.set_xlim(0, 1.45 * max(values))
    axis.set_xticks([])
    axis.set_title("tokens/s, local batch 4, best checkpointing", fontsize=10, loc="left")
    axis.spines[["top", "right", "bottom"]].set_visible(False)
    axis.tick_params(axis="y", length=0)


def curves(points: list[dict]) -> dict[tuple[str, str], list[tuple[float, float]]]:
    """By card and variant, memory and tokens/s of the local batches that fit, smallest first."""
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for p in sorted(points, key=lambda p: p["local_batch"]):
        if p["shape"].startswith(MODEL) and not p["error"]:
            key = p["shape"].rpartition(", ")[2], p["variant"]
            found.setdefault(key, []).append((p["memory_gib"], p["tokens_per_second"]))
    return found


def draw_curves(axis: Axes, found: dict[tuple[str, str], list[tuple[float, float]]]) -> None:
    cards = list(dict.fromkeys(card for card, _ in found))
    styles = list(dict.fromkeys(variant for _, variant in found))
    for (card, variant), line in found.items():
        label = f"{variant.replace(':checkpointing=', ', ').replace(':', ', ')}, {card}"
        style = f"-{'osv^Dx*'[styles.index(variant) % 7]}"
        alpha = 1 - 0.5 * cards.index(card) / len(cards)
        color = OURS if variant.startswith("fp8") else OTHERS
        axis.plot(*zip(*line, strict=True), style, color=color, alpha=alpha, markersize=4, label=label)
    axis.set_title("tokens/s over GiB reserved, as the local batch grows", fontsize=10, loc="left")
    axis.legend(fontsize=6)


def draw(records: Records, points: list[dict], path: Path) -> None:
    """Writes the picture."""
    found, strongest = bars(records)
    lines = curves(points)
    size = (12 if lines else 6, max(0.55 * len(found) + 0.9, 3.5 if lines else 0))
    figure, axes = plt.subplots(1, 1 + bool(lines), figsize=size, layout="constrained", squeeze=False)
    draw_bars(axes[0, 0], found, strongest)
    if lines:
        draw_curves(axes[0, 1], lines)
    first = next(iter(records.of(NAME, SHAPE).values()))
    figure.suptitle(f"{TITLE} ({first['hardware']}, commit {first['commit']}, {first['date']})", fontsize=11)
    save(figure, path, dpi=150)


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("folder", type=Path, help="of results.json and sweep.json")
    parser.add_argument("picture", type=Path, help="the file to write")
    args = parser.parse_args()
    records, points = (
        json.loads(path.read_text()) if path.exists() else []
        for path in (args.folder / "results.json", args.folder / "sweep.json")
    )
    draw(Records(records), points, args.picture)


if __name__ == "__main__":
    main()
