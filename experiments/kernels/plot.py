"""Draws what ``data_movement`` and ``gemm --range`` have measured, as kernels.png and range.png next to their records.

    python -m experiments.kernels.plot experiments/kernels/results.json

kernels.png has the share of a device-to-device copy that each data-movement kernel reaches; range.png has the TFLOP/s
of the grouped GEMMs over rows and groups.
"""

import argparse
import json
from pathlib import Path

import matplotlib.pyplot as plt

from titan_fp8moe.testing import AFTER_IDLING, BACK_TO_BACK

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
GEMMS = {"ours": "o", "torchao rowwise": "s", "bf16": "^", "cublas dense fp8": "_"}


def plot_data_movement(records: list[dict], path: Path) -> None:
    """A row for each kernel, a bar for each shape and routing."""
    records = [r for r in records if r["name"] in KERNELS]
    records = [r for r in records if not r["shape"]["routing"].endswith("by token")]  # compared with another of ours

    def shape(record: dict) -> tuple[str, int, int]:
        return tuple(record["shape"][key] for key in ("layer", "rows", "E"))

    shapes = list(dict.fromkeys(shape(r) for r in records))
    figure, axes = plt.subplots(len(KERNELS), 1, figsize=(9, 14), sharex=True, sharey=True, layout="constrained")
    for axis, name in zip(axes, KERNELS, strict=True):
        for i, case in enumerate(shapes):
            here = [r for r in records if r["name"] == name and shape(r) == case]
            if not here:
                continue
            ours = [r for r in here if r["reference"] == "copy"]
            for r, offset in zip(ours, (-0.2, 0.2) if len(ours) == 2 else (0,), strict=True):
                color = "tab:orange" if r["shape"]["routing"] == "skewed" else "tab:blue"
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
    figure.savefig(path, dpi=110)


def plot_gemm_range(records: list[dict], path: Path) -> None:
    """A column for each state of the GPU, a row for each GEMM."""
    panels: dict[tuple[str, str], dict[str, dict[str, float]]] = {}
    for r in records:
        if not r["name"].endswith("range"):
            continue
        parts = r["shape"].split(", ")
        rows, groups, N, K = (part.split(" ")[-1] for part in parts[:4])
        kind = "weight gradient" if "wgrad" in r["name"] else "m-grouped"
        case = f"{int(rows) // 1024}k/{groups}{' s' if 'skewed' in parts else ''}"
        panel = panels.setdefault((f"{kind}, N {N}, K {K}", parts[-1]), {}).setdefault(case, {})
        panel |= {"ours": r["value"], r["reference"]: r["reference_value"]}
    titles = list(dict.fromkeys(title for title, _ in panels))
    figure, axes = plt.subplots(
        len(titles), 2, figsize=(13, 2.4 * len(titles)), sharex=True, sharey=True, layout="constrained", squeeze=False
    )
    for i, title in enumerate(titles):
        for axis, state in zip(axes[i], (BACK_TO_BACK, AFTER_IDLING), strict=True):
            panel = panels[title, state]
            for name, marker in GEMMS.items():
                points = [(case, speeds[name]) for case, speeds in panel.items() if name in speeds]
                axis.plot(*zip(*points, strict=True), marker, label=name, markersize=9 if marker == "_" else 5)
            axis.set_title(f"{title}, {state}", fontsize=9, loc="left")
            axis.grid(axis="y", alpha=0.3)
            axis.tick_params("x", rotation=90, labelsize=7)
            axis.set_ylim(0, 1650)
        axes[i][0].set_ylabel("TFLOP/s")
    axes[0][0].legend(fontsize=7, loc="lower right")
    figure.supxlabel("thousand rows / groups (s: skewed)")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="JSON file of records")
    path = parser.parse_args().results
    records = json.loads(path.read_text())
    plot_data_movement(records, path.with_name("kernels.png"))
    plot_gemm_range(records, path.with_name("range.png"))


if __name__ == "__main__":
    main()
