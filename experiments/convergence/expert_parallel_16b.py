"""Does FP8 train like bf16 over expert parallelism, at the size of the 16B model's layers?

    python tools/build_corpus.py --out outputs/corpus
    python -m experiments.convergence.expert_parallel_16b --out experiments/convergence [--ranks 2] [--steps 300]

Each run is torchtitan's trainer with four of the 16B model's layers, compiled, one GPU per rank; all have the same seed
and data. ``fp8_flow`` exchanges tokens with NCCL, ``symmetric`` through symmetric memory. A run that is complete is not
repeated, so that the script can go on where it was cut off; remove its JSON file to repeat it.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np

from experiments.throughput.train import STEP
from titan_fp8moe.testing import environment, require_gpu, write_records

CONFIG = "train_configs/deepseek_v3_16b_short.toml"
RUNS = Path("outputs/convergence/expert_parallel_16b")
VARIANTS = {
    "bf16": ["--fp8_flow_moe.filter_fqns=layers"],
    "fp8_flow": [],
    # the router is not trained yet: all tokens of a step may go to one rank
    "symmetric": ["--fp8_flow_moe.dispatch=symmetric", "--fp8_flow_moe.dispatch_capacity={ranks}"],
}
WARM = 20  # steps that the speed leaves out


def train(variant: str, runs: Path, ranks: int, steps: int) -> None:
    """Runs a variant. Its output goes to VARIANT.log; once it is complete, VARIANT.json says where it ran.

    Raises:
        SystemExit: if it fails.
    """
    log = runs / f"{variant}.log"
    command = ["torchrun", "--standalone", f"--nproc_per_node={ranks}", "--role=rank", "--tee=3", "-m"]
    command += ["torchtitan.train", f"--job.config_file={CONFIG}", f"--job.dump_folder={runs / variant}"]
    command += [f"--training.steps={steps}", "--metrics.log_freq=1", "--metrics.disable_color_printing"]
    command += ["--debug.seed=0", f"--parallelism.expert_parallel_degree={ranks}"]
    command += [option.format(ranks=ranks) for option in VARIANTS[variant]]
    with log.open("w") as file:
        done = subprocess.run(
            [sys.executable, "tools/launch.py", *command], stdout=file, stderr=subprocess.STDOUT,
            env=os.environ | {"PYTORCH_ALLOC_CONF": "expandable_segments:True"},
        )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{variant} ended with exit code {done.returncode}: see {log}")
    (runs / f"{variant}.json").write_text(json.dumps(environment()))


def read(log: Path) -> tuple[np.ndarray, float, float]:
    """The loss of each step, the largest memory in GiB, and the median of tokens/s per GPU."""
    steps = [match.groups() for match in map(STEP.search, log.read_text().splitlines()) if match]
    _, losses, _, memory, speeds = zip(*steps, strict=True)
    speed = statistics.median(int(speed.replace(",", "")) for speed in speeds[WARM:])
    return np.array(losses, dtype=float), max(map(float, memory)), speed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder of results.json")
    parser.add_argument("--ranks", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=300, help="default: %(default)s")
    args = parser.parse_args()
    runs = RUNS / f"ep{args.ranks}-{args.steps}-steps"
    runs.mkdir(parents=True, exist_ok=True)
    for variant in VARIANTS:
        if not (runs / f"{variant}.json").exists():
            require_gpu()
            train(variant, runs, args.ranks, args.steps)
    shape = f"16B, 4 layers, 4 x 4096 tokens per GPU, {args.steps} steps, EP {args.ranks}"
    print(f"{shape}: the training loss next to bf16's")
    print(f"{'':12}{'last 50 steps':>15}{'last 10 steps':>15}{'tokens/s/GPU':>14}{'GiB':>8}")
    reference, records = read(runs / "bf16.log")[0], []
    for variant in VARIANTS:
        losses, memory, speed = read(runs / f"{variant}.log")
        last = {n: losses[-n:].mean() / reference[-n:].mean() - 1 for n in (50, 10)}
        print(f"{variant:12}{last[50]:+15.3%}{last[10]:+15.3%}{speed:14,.0f}{memory:8.1f}")
        if variant != "bf16":
            records.append(
                json.loads((runs / f"{variant}.json").read_text())
                | dict(name=f"expert_parallel {variant}", shape=shape, value=float(losses[-50:].mean()),
                       unit="nats per token, mean of the last 50 steps", reference="bf16",
                       reference_value=float(reference[-50:].mean()), speedup=None,
                       tokens_per_second=speed, memory_gib=memory)
            )  # fmt: skip
    if args.out:
        write_records(args.out / "results.json", records)


if __name__ == "__main__":
    main()
