"""What probe.py saw during a run: figures over time by layer and kind of operand, as a table, records and a picture."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from experiments.convergence.probe import TRANSPOSES
from experiments.pictures import save

if TYPE_CHECKING:
    from experiments.convergence.analyse import Run

GRADS = ("dW1,3", "dW2")
BLOCKS = {
    "gap": "binades, mean of the blocks",
    "largest_gap": "binades, largest of the blocks",
    "gap_over_2": "share of blocks with a gap over 2 binades",
    "correlation": "of token exponents of x and dy within blocks",
    **dict.fromkeys(TRANSPOSES, "relative error of dW from the transpose"),
}
STATISTICS = {
    "underflow": "share of values that quantization makes zero, with those that were zero",
    "flushed": "share of values that the transpose makes zero",
    "row_spread_p99": "binades between a row's largest and smallest scale, 99th percentile",
    "exponent_mean": "mean exponent of the scales",
}
KINDS = ("x", "a", "dy", "dh")


def probed(runs: list["Run"]) -> list["Run"]:
    """The runs with all FFNs in FP8, the default transposes and no noise. The first is the one that is shown."""
    return [run for run in runs if run.recipe == "balanced" and not run.noise and any(_probes(run))]


def _probes(run: "Run") -> dict[int, dict]:
    return {step: e for step, e in sorted(run.evaluations.items()) if e.get("transposes")}


def by_layer(run: "Run", grad: str, key: str) -> np.ndarray:
    """(steps, layers) of one of ``BLOCKS``."""
    return np.array([[layer[grad][key] for layer in e["transposes"]] for e in _probes(run).values()])


def over_time(run: "Run", kind: str, key: str) -> list[float]:
    """One of ``STATISTICS`` by step."""
    return [e["statistics"][f"{kind}/{key}"] for e in _probes(run).values()]


def table(run: "Run") -> str:
    probes = _probes(run)
    lines = [
        f"{run.name}: {len(probes)} probes from step {min(probes)} to {max(probes)}",
        "",
        "| gradient, figure | median | smallest | largest | at step, MoE layer |",
        "|---|---|---|---|---|",
    ]
    for grad in GRADS:
        for key in BLOCKS:
            values = by_layer(run, grad, key)
            step, layer = np.unravel_index(values.argmax(), values.shape)
            lines.append(
                f"| {grad} {key} | {np.median(values):.3g} | {values.min():.3g} | {values.max():.3g} "
                f"| {[*probes][step]}, {layer + 1} |"
            )
    lines += ["", "| operand, figure | first | middle | last |", "|---|---|---|---|"]
    for kind in KINDS:
        for key in STATISTICS:
            values = over_time(run, kind, key)
            cells = (f"{values[i]:.5f}" for i in (0, len(values) // 2, -1))
            lines.append(f"| {kind} {key} | {' | '.join(cells)} |")
    return "\n".join(lines)


def records(run: "Run", common: dict) -> list[dict]:
    """Medians over steps and layers with their extremes, and statistics of the last step with the first's."""
    result = []
    for grad in GRADS:
        for key, unit in BLOCKS.items():
            values = by_layer(run, grad, key)
            result.append(
                dict(common, name=f"{run.name} {grad} {key}", value=float(np.median(values)), unit=unit,
                     smallest=float(values.min()), largest=float(values.max()), reference="none",
                     reference_value=None, speedup=None)
            )  # fmt: skip
    for kind in KINDS:
        for key, unit in STATISTICS.items():
            values = over_time(run, kind, key)
            result.append(
                dict(common, name=f"{run.name} {kind} {key}", value=values[-1], unit=unit,
                     reference=f"step {run.meta['first_step']}", reference_value=values[0], speedup=None)
            )  # fmt: skip
    return result


def draw(run: "Run", path: Path) -> None:
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, 3, figsize=(17, 9), constrained_layout=True)
    steps = list(_probes(run))
    for axis, (key, unit) in zip((*axes[0], axes[1, 0]), STATISTICS.items(), strict=True):
        for i, kind in enumerate(KINDS):
            axis.plot(steps, over_time(run, kind, key), color=f"C{i}", label=kind)
        axis.set_title(key, fontsize=10)
        axis.set_ylabel(unit, fontsize=8)
        if key in ("underflow", "flushed"):
            axis.set_yscale("symlog", linthresh=1e-5)
    for grad, style in zip(GRADS, ("-", "--"), strict=True):
        for layer, values in enumerate(by_layer(run, grad, "gap_over_2").T):
            label = f"{grad}, MoE layer {layer + 1}"
            axes[1, 1].plot(steps, 100 * values, style, color=f"C{layer}", label=label)
        for i, mode in enumerate(TRANSPOSES):
            values = by_layer(run, grad, mode)
            axes[1, 2].plot(steps, values.max(1), style, color=f"C{i}", label=f"{grad}, {mode}")
    axes[1, 1].set_title("gap_over_2", fontsize=10)
    axes[1, 1].set_ylabel("% of blocks with token scales anti-correlated by more than 2 binades", fontsize=8)
    axes[1, 2].set_title("transposes", fontsize=10)
    axes[1, 2].set_ylabel("relative error of dW, largest of the layers", fontsize=8)
    axes[1, 2].set_yscale("log")
    for axis in axes.flat:
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7, ncol=2)
    save(figure, path, dpi=90)
