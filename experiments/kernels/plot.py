"""Draws the share of a device copy that each kernel reaches.

python -m experiments.kernels.plot experiments/kernels/results.json
"""

import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt

# Kernels, and the share to reach at the large shapes: 671B, 16B.
GOALS = {
    "quantize": (0.95, 0.95),
    "weight_quantize": (0.85, 0.85),
    "swiglu": (0.88, 0.88),
    "swiglu_backward": (0.85, 0.85),
    "transpose_balanced": (0.83, 0.81),
    "permute": (0.8, 0.8),
    "unpermute": (0.8, 0.8),
}
PEERS = {"torchao": "^", "torchtitan": "s", "compiled PyTorch": "o"}


def main() -> None:
    path = Path(sys.argv[1])
    records = [r for r in json.loads(path.read_text()) if r["name"] in GOALS]
    records = [r for r in records if not r["shape"]["routing"].endswith("by token")]  # compared with another of ours

    def shape(record: dict) -> tuple[str, int, int]:
        return tuple(record["shape"][key] for key in ("layer", "rows", "E"))

    shapes = list(dict.fromkeys(shape(r) for r in records))
    figure, axes = plt.subplots(len(GOALS), 1, figsize=(9, 14), sharex=True, sharey=True, layout="constrained")
    for axis, (name, goals) in zip(axes, GOALS.items(), strict=True):
        for i, (layer, rows, E) in enumerate(shapes):
            here = [r for r in records if r["name"] == name and shape(r) == (layer, rows, E)]
            if not here:
                continue
            copy = next(r["reference_value"] for r in here if r["reference"] == "copy")
            ours = [r for r in here if r["reference"] == "copy"]
            for r, offset in zip(ours, (-0.2, 0.2) if len(ours) == 2 else (0,), strict=True):
                color = "tab:orange" if r["shape"]["routing"] == "skewed" else "tab:blue"
                axis.bar(i + offset, r["speedup"], 0.4, color=color)
                axis.text(i + offset, r["speedup"], f"{r['speedup']:.0%}", ha="center", va="bottom", fontsize=7)
            for r in here:
                if r["reference"] in PEERS:
                    axis.plot(i, r["reference_value"] / copy, PEERS[r["reference"]], color="black", markersize=5)
            if rows > 4096:
                axis.hlines(goals[layer == "16B"], i - 0.45, i + 0.45, color="tab:red")
        axis.set_title(name, fontsize=10, loc="left")
        axis.set_ylim(0, 1.12)
    axes[-1].set_xticks(range(len(shapes)), [f"{layer}\n{rows} rows, E {E}" for layer, rows, E in shapes])
    handles = [plt.Rectangle((0, 0), 1, 1, color=c) for c in ("tab:blue", "tab:orange")]
    handles += [plt.Line2D([], [], color="tab:red")]
    handles += [plt.Line2D([], [], color="black", marker=m, linestyle="") for m in PEERS.values()]
    figure.legend(handles, ["this package", "skewed routing", "goal", *PEERS], loc="outside upper center", ncols=6)
    figure.supylabel("share of a device copy")
    figure.savefig(path.with_name("kernels.png"), dpi=110)


if __name__ == "__main__":
    main()
