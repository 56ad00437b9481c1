"""Does FP8 train like bf16 over expert parallelism, at the size of the 16B model's layers?

    python tools/build_corpus.py --out outputs/corpus
    python -m experiments.convergence.expert_parallel_16b --out experiments/convergence [--ranks 2] [--steps 300]

Each run is torchtitan's trainer with four of the 16B model's layers, compiled, one GPU per rank; all have the same seed
and data. ``fp8_flow`` exchanges tokens with NCCL, ``symmetric`` through symmetric memory. A run that its log says is
complete is not repeated, so that the script can go on where it was cut off.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np

from titan_fp8moe.testing import environment, require_gpu, write_records

CONFIG = "train_configs/deepseek_v3_16b_short.toml"
RUNS = Path("outputs/convergence/expert_parallel_16b")
VARIANTS = {
    "bf16": ["--fp8_flow_moe.filter_fqns=layers"],
    "fp8_flow": [],
    # the router is not trained yet: all tokens of a step may go to one rank
    "symmetric": ["--fp8_flow_moe.dispatch=symmetric", "--fp8_flow_moe.dispatch_capacity={ranks}"],
}
STEP = re.compile(r"^\[rank0\].*step: *\d+ +loss: *(\S+) .*memory: *([\d.]+)GiB.* tps: *([\d,]+)", re.MULTILINE)
WARM = 20  # steps that the speed leaves out


def train(variant: str, ranks: int, steps: int) -> None:
    """Runs a variant; its output goes to RUNS/VARIANT.log.

    Raises:
        SystemExit: if it fails.
    """
    log = RUNS / f"{variant}.log"
    command = ["torchrun", "--standalone", f"--nproc_per_node={ranks}", "--role=rank", "--tee=3", "-m"]
    command += ["torchtitan.train", f"--job.config_file={CONFIG}", f"--job.dump_folder={RUNS / variant}"]
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
    (RUNS / f"{variant}.json").write_text(json.dumps(environment()))


def read(variant: str) -> tuple[np.ndarray, float, float]:
    """The loss of each step, the largest memory in GiB, and the median of tokens/s per GPU."""
    path = RUNS / f"{variant}.log"
    steps = STEP.findall(path.read_text()) if path.exists() else []
    losses = np.array([float(loss) for loss, _, _ in steps])
    speeds = [float(speed.replace(",", "")) for _, _, speed in steps[WARM:]]
    return losses, max((float(memory) for _, memory, _ in steps), default=0), statistics.median(speeds or [0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder of results.json")
    parser.add_argument("--ranks", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=300, help="default: %(default)s")
    args = parser.parse_args()
    RUNS.mkdir(parents=True, exist_ok=True)
    for variant in VARIANTS:
        if len(read(variant)[0]) < args.steps:
            require_gpu()
            train(variant, args.ranks, args.steps)
    shape = f"16B, 4 layers, 4 x 4096 tokens per GPU, {args.steps} steps, EP {args.ranks}"
    print(f"{shape}: the training loss next to bf16's")
    print(f"{'':12}{'last 50 steps':>15}{'last 10 steps':>15}{'tokens/s/GPU':>14}{'GiB':>8}")
    reference, records = read("bf16")[0], []
    for variant in VARIANTS:
        losses, memory, speed = read(variant)
        last = {n: losses[-n:].mean() / reference[-n:].mean() - 1 for n in (50, 10)}
        print(f"{variant:12}{last[50]:+15.3%}{last[10]:+15.3%}{speed:14,.0f}{memory:8.1f}")
        if variant != "bf16":
            records.append(
                json.loads((RUNS / f"{variant}.json").read_text())
                | dict(name=f"expert_parallel {variant}", shape=shape, value=float(losses[-50:].mean()),
                       unit="nats per token, mean of the last 50 steps", reference="bf16",
                       reference_value=float(reference[-50:].mean()), speedup=None,
                       tokens_per_second=speed, memory_gib=memory)
            )  # fmt: skip
    if args.out:
        write_records(args.out / "results.json", records)


if __name__ == "__main__":
    main()
