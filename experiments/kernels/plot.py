"""Draws what ``data_movement`` has measured, as kernels.png next to its records.

    python -m experiments.kernels.plot experiments/kernels/results.json

The picture has the share of a device-to-device copy that each data-movement kernel reaches.
"""

from pathlib import Path

import matplotlib.pyplot as plt

from experiments.pictures import draw_records, save

KERNELS = (
    "quantize",
    "weight_quantize",
    "swiglu",
    "swiglu_backward",
    "transpose_balanced",
    "permute",
    "unpermute",
)
PEERS = {"torchao": "^", "torchtitan": "s", "compiled PyTorch": "o"}


def case_of(record: dict) -> tuple[str, int, int]:
    return record["layer"], record["rows"], record["E"]


def plot_data_movement(records: list[dict], path: Path) -> None:
    """A row for each kernel, a bar for each shape and routing."""
    records = [r for r in records if r["name"] in KERNELS]
    records = [r for r in records if not r["routing"].endswith("by token")]  # compared with another of ours
    shapes = list(dict.fromkeys(case_of(r) for r in records))
    figure, axes = plt.subplots(len(KERNELS), 1, figsize=(9, 14), sharex=True, sharey=True, layout="constrained")
    for axis, name in zip(axes, KERNELS, strict=True):
        for i, case in enumerate(shapes):
            here = [r for r in records if r["name"] == name and case_of(r) == case]
            if not here:
                continue
            ours = [r for r in here if r["reference"] == "copy"]
            for r, offset in zip(ours, (-0.2, 0.2) if len(ours) == 2 else (0,), strict=True):
                color = "tab:orange" if r["routing"] == "skewed" else "tab:blue"
                axis.bar(i + offset, r["speedup"], 0.4, color=color)
                axis.text(i + offset, r["speedup"], f"{r['speedup']:.0%}", ha="center", va="bottom", fontsize=7)
            for r in here:
                if r["reference"] in PEERS:
                    share = r["reference_value"] / ours[0]["reference_value"]
                    axis.plot(i, share, PEERS[r["reference"]], color="black", markersize=5)
        axis.set_title(name, fontsize=10, loc="left")
        axis.set_ylim(0, 1.12)
    axes[-1].set_xticks(range(len(shapes)), [f"{layer}\n{rows} rows, E {E}" for layer, rows, E in shapes])
    handles = [plt.Rectangle((0, 0), 1, 1, color=c) for c in ("tab:blue", "tab:orange")]
    handles += [plt.Line2D([], [], color="black", marker=m, linestyle="") for m in PEERS.values()]
    figure.legend(handles, ["this package", "skewed routing", *PEERS], loc="outside upper center", ncols=5)
    figure.supylabel("share of a device copy")
    save(figure, path)


if __name__ == "__main__":
    draw_records(__doc__, plot_data_movement, "kernels.png")
