"""Writes ``dry_runs.json``: the dry run's estimates in GiB that pages cite. A test repeats each.

python -m experiments.dry_runs
"""

import json
import re
import subprocess
import sys
from pathlib import Path

from experiments.records import write_text

PATH = Path(__file__).with_name("dry_runs.json")
RECOMPUTE = "--fp8_flow_moe.recompute experts"
FOUR = "--world-size 4 --parallelism.expert_parallel_degree 4"
JOBS = {
    f"{model}_{name}": f"train_configs/{file}.toml {arguments}"
    for model, file in (("moe16b", "deepseek_v3_16b"), ("qwen3", "qwen3_30b_a3b"))
    for name, arguments in (("8", "--world-size 8"), ("8_experts", f"--world-size 8 {RECOMPUTE}"), ("4", FOUR))
}


def estimate(arguments: str) -> dict[str, float]:
    """The GiB that a dry run prints: states, the peak over the all-to-all, and the two over symmetric memory."""
    command = [sys.executable, "-m", "titan_fp8moe.torchtitan.dry_run", *arguments.split()]
    output = subprocess.run(command, capture_output=True, text=True, cwd=PATH.parents[1]).stdout
    (states,) = re.findall(r"parameters, ([\d.]+) GiB with gradients", output)
    (peak,) = re.findall(r"peak about ([\d.]+) GiB", output)
    symmetric = re.findall(r"over symmetric memory about ([\d.]+) to ([\d.]+) GiB", output)[0]
    return dict(zip(("states", "peak", "least", "most"), map(float, (states, peak, *symmetric)), strict=True))


def main() -> None:
    write_text(PATH, json.dumps({name: estimate(arguments) for name, arguments in JOBS.items()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
