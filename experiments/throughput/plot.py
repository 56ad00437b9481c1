"""Draws a layer's time by class of kernel, in fused bf16 and in FP8-Flow, from the records of layer.py on one GPU.

python -m experiments.throughput.plot experiments/throughput/results.json
"""

from pathlib import Path

import matplotlib.pyplot as plt

from experiments.pictures import draw_records, save


def draw(records: list[dict], path: Path, tokens: int = 8192) -> None:
    """A pair of bars for each layer: the reference's kernels above, ours below, both over the reference's time."""
    shape = f", {tokens} tokens, 1 GPU"
    records = [r for r in records if r["name"] == "moe_layer" and r["shape"].endswith(shape) and "classes" in r]
    records = [*{r["shape"]: r for r in records if r["reference"] == "bf16 fused"}.values()]  # the newest
    labels = list(dict.fromkeys(label for r in records for layer in r["classes"].values() for label in layer))
    colors = dict(zip(labels, plt.get_cmap("tab20").colors, strict=False))
    figure, axis = plt.subplots(figsize=(9, 0.9 * len(records) + 1.5), layout="constrained")
    for i, r in enumerate(records):
        whole = r["reference_value"]
        for who, time, offset in (("reference", whole, -0.2), ("ours", r["value"], 0.2)):
            left = 0
            for label, ms in r["classes"][who].items():
                axis.barh(i + offset, ms / whole, 0.36, left, color=colors[label])
                left += ms / whole
            axis.plot([time / whole] * 2, [i + offset - 0.18, i + offset + 0.18], color="black")
            speedup = f"  {r['speedup']:.2f}x" if who == "ours" else ""
            axis.text(max(left, time / whole) + 0.01, i + offset, f"{time:.1f} ms{speedup}", va="center", fontsize=8)
    names = [r["shape"].removesuffix(", 1 GPU").replace(", ", "\n") for r in records]
    axis.set_yticks(range(len(names)), names, fontsize=8)
    axis.invert_yaxis()
    axis.set_xlim(0, 1.25)
    axis.set_xlabel(
        "share of the fused bf16 layer's time: bf16 above, ours below; black: the layer, colors: its kernels"
    )
    handles = [plt.Rectangle((0, 0), 1, 1, color=color) for color in colors.values()]
    figure.legend(handles, colors, loc="outside upper center", ncols=4, fontsize=8)
    save(figure, path)


if __name__ == "__main__":
    draw_records(__doc__, draw, "layer.png")
