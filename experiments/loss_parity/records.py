"""Adds the comparison that run.sh left in FOLDER to the results.json next to it.

python -m experiments.loss_parity.records FOLDER OVERRIDES
"""

import json
import sys
from pathlib import Path

from titan_fp8moe.testing import write_records


def main() -> None:
    folder, overrides = Path(sys.argv[1]), sys.argv[2]
    runs = json.loads((folder / "comparison.json").read_text())["runs"]
    bf16, flow = runs["bf16"], runs["fp8_flow"]
    values = {
        "smoothed final training loss": ("smoothed_final_loss", "nats per token", None),
        "throughput": ("tokens_per_second", "tokens/s/GPU", flow["tokens_per_second"] / bf16["tokens_per_second"]),
        "peak memory": ("peak_memory_gib", "GiB reserved", bf16["peak_memory_gib"] / flow["peak_memory_gib"]),
    }
    records = [
        dict(name=f"{folder.name} {name}", shape=overrides, value=flow[key], unit=unit, reference="bf16",
             reference_value=bf16[key], speedup=speedup)
        for name, (key, unit, speedup) in values.items()
    ]  # fmt: skip
    for key in ("final_deviation", "largest_deviation", "mean_deviation"):
        records.append(
            dict(name=f"{folder.name} {key}", shape=overrides, value=flow[key], unit="of bf16's smoothed loss",
                 reference="bf16", reference_value=0.0, speedup=None)
        )  # fmt: skip
    command = f"./experiments/loss_parity/run.sh experiments/loss_parity {folder.name}"
    write_records(folder.parent / "results.json", [record | {"command": command} for record in records])


if __name__ == "__main__":
    main()
