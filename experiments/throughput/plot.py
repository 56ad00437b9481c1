"""Draws a layer's time by class of kernel, in bf16 and in FP8-Flow, from the files of layer.py.

python -m experiments.throughput.plot_layer experiments/throughput/layer_1gpu.json
"""

import json
import statistics
import sys
from pathlib import Path

import matplotlib.pyplot as plt

from experiments.throughput.layer import Shape


def main() -> None:
    path = Path(sys.argv[1])
    results = [r for r in json.loads(path.read_text()) if {"bf16", "fp8"} <= r.get("classes", {}).keys()]
    labels = list(dict.fromkeys(label for r in results for layer in r["classes"].values() for label in layer))
    colors = dict(zip(labels, plt.get_cmap("tab20").colors, strict=False))
    figure, axis = plt.subplots(figsize=(9, 0.9 * len(results) + 1.5), layout="constrained")
    names = []
    for i, result in enumerate(results):
        bf16, fp8 = (statistics.median(result["ms"][name]) for name in ("bf16", "fp8"))
        names.append(str(Shape(**result["shape"])).replace(", ", "\n"))
        for name, time, offset in (("bf16", bf16, -0.2), ("fp8", fp8, 0.2)):
            left = 0
            for label, (ms, _) in result["classes"][name].items():
                axis.barh(i + offset, ms / bf16, 0.36, left, color=colors[label])
                left += ms / bf16
            axis.plot([time / bf16] * 2, [i + offset - 0.18, i + offset + 0.18], color="black")
            speedup = f"  {bf16 / fp8:.2f}x" if name == "fp8" else ""
            axis.text(max(left, time / bf16) + 0.01, i + offset, f"{time:.1f} ms{speedup}", va="center", fontsize=8)
    axis.set_yticks(range(len(names)), names, fontsize=8)
    axis.invert_yaxis()
    axis.set_xlim(0, 1.25)
    axis.set_xlabel("share of the bf16 layer's time: bf16 above, FP8-Flow below; black: the layer, colors: its kernels")
    handles = [plt.Rectangle((0, 0), 1, 1, color=color) for color in colors.values()]
    figure.legend(handles, colors, loc="outside upper center", ncols=4, fontsize=8)
    figure.savefig(path.with_suffix(".png"), dpi=110)


if __name__ == "__main__":
    main()
