"""Draws the TFLOP/s of the grouped GEMMs over rows and groups, as range.png next to their records.

python -m experiments.gemm_range.plot experiments/gemm_range/results.json
"""

from pathlib import Path

import matplotlib.pyplot as plt

from experiments.pictures import draw_records, save
from experiments.timing import AFTER_IDLING, BACK_TO_BACK

GEMMS = {"ours": "o", "torchao rowwise": "s", "bf16": "^", "cublas dense fp8": "_"}


def _sizes(record: dict) -> list[int]:
    """Rows, groups, N and K."""
    return [int(part.split(" ")[-1]) for part in record["shape"].split(", ")[:4]]


def _order(record: dict) -> tuple:
    """M-grouped GEMMs first, then by N and K; balanced cases first, then by rows and groups."""
    rows, groups, N, K = _sizes(record)
    return "wgrad" in record["name"], N, K, "skewed" in record["shape"], rows, groups


def plot(records: list[dict], path: Path) -> None:
    """A column for each state of the GPU, a row for each GEMM."""
    panels: dict[tuple[str, str], dict[str, dict[str, float]]] = {}
    for r in sorted(records, key=_order):
        parts, (rows, groups, N, K) = r["shape"].split(", "), _sizes(r)
        kind = "weight gradient" if "wgrad" in r["name"] else "m-grouped"
        case = f"{rows // 1024}k/{groups}{' s' if 'skewed' in parts else ''}"
        panel = panels.setdefault((f"{kind}, N {N}, K {K}", parts[-1]), {}).setdefault(case, {})
        panel |= {"ours": r["value"], r["reference"]: r["reference_value"]}
        if "cublas_dense" in r:
            panel["cublas dense fp8"] = r["cublas_dense"]
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
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside upper center", ncols=len(GEMMS))
    figure.supxlabel("thousand rows / groups (s: skewed)")
    save(figure, path)


if __name__ == "__main__":
    draw_records(__doc__, plot, "range.png")
