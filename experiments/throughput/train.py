"""Tokens per second and memory of the 16B model in bf16, with torchao's fp8 rowwise experts and in FP8-Flow, in turn.

    python tools/build_corpus.py --out outputs/corpus
    python -m experiments.throughput.train --out experiments/throughput --gpus 4                # the whole model
    python -m experiments.throughput.train --out experiments/throughput --gpus 2 --layers 12    # what fits on two H200s

Every run is a launch of its own, A B C A B C; repeats differ by the seed, within one all variants have the same seed
and data. Results are written after each run. A variant may set the converter's options:
``fp8_flow:recompute=experts,save_h=fp8``.
"""

import argparse
import gzip
import json
import os
import re
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from experiments.record import write_records

CONFIG = "experiments/throughput/train.toml"
CONVERTERS = {"bf16": [], "torchao": ["torchao_rowwise"], "fp8_flow": ["fp8_flow_moe"]}
ROUTING = {
    "random": (["balanced_random"], []),
    "forced": ([], ["--debug.moe_force_load_balance"]),
    "model": ([], []),
}
STEADY = 8  # steps before: compilation, allocator, warm-up of clocks
_STEP = re.compile(r"step: *(\d+) +loss: *(\S+) +grad_norm: *(\S+) +memory: *([\d.]+)GiB.* tps: *([\d,]+)")


def overrides(variant: str, args: argparse.Namespace, seed: int) -> list[str]:
    """torchtitan's command line for a variant, ``name`` or ``name:option=value,...`` with options of [fp8_flow_moe]."""
    name, _, options = variant.partition(":")
    converters, flags = ROUTING[args.routing]
    flags = [
        f"--model.flavor={args.flavor or f'16B_{args.layers}_layers'}",
        f"--parallelism.expert_parallel_degree={args.gpus}",
        f"--training.steps={args.steps}",
        f"--debug.seed={seed}",
        *flags,
        *(f"--fp8_flow_moe.{option}" for option in options.split(",") if option),
        *args.overrides,
    ]
    if converters + CONVERTERS[name]:
        flags.append(f"--model.converters={','.join(converters + CONVERTERS[name])}")
    return flags


class Run:
    """One training run, from the moment its processes import Python modules. ``begin`` lets it use the GPUs."""

    def __init__(self, variant: str, args: argparse.Namespace, seed: int, label: str, extra: tuple[str, ...] = ()):
        self.variant, self.steps, self.seed, self.label = variant, args.steps, seed, label
        self.log, self.gate, self.dump = (args.out / f"{label}{suffix}" for suffix in (".log", ".gate", ""))
        self.gate.unlink(missing_ok=True)
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={args.gpus}"]
        launcher += ["--local-ranks-filter=0", "--role=rank", "--tee=3", "-m", "torchtitan.train"]
        flags = [f"--job.config_file={CONFIG}", f"--job.dump_folder={self.dump}"]
        env = {"THROUGHPUT_GATE": str(self.gate), "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
        self.process = subprocess.Popen(
            [*launcher, *flags, *overrides(variant, args, seed), *extra],
            env=os.environ | env | {"TOKENIZERS_PARALLELISM": "false"},
            stdout=self.log.open("w"), stderr=subprocess.STDOUT,
        )  # fmt: skip

    def begin(self) -> None:
        self.gate.touch()

    def wait(self, timeout: float, until: str | None = None) -> str | None:
        """Waits until the log has ``until``, or its last step; returns what went wrong, or None."""
        until = until or f"step: {self.steps:2} "
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            ended = self.process.poll() is not None
            if until in self.log.read_text():
                return None
            if ended:
                return f"ended with exit code {self.process.returncode}"
            time.sleep(0.2)
        return f"not done after {timeout:.0f} s"

    def end(self) -> None:
        """Ends all processes of the run: nothing that follows the last step is needed."""
        self.process.terminate()  # the launcher ends the ranks, which have sessions of their own
        self.process.wait()
        self.gate.unlink(missing_ok=True)
        with gzip.open(f"{self.log}.gz", "wt") as file:
            file.write(self.log.read_text())
        self.log.unlink()
        shutil.rmtree(self.dump, ignore_errors=True)

    def result(self) -> dict:
        rows = [match.groups() for match in map(_STEP.search, self.log.read_text().splitlines()) if match]
        steady = [row for row in rows if int(row[0]) > STEADY]
        tokens = [int(row[4].replace(",", "")) for row in steady]
        return {
            "variant": self.variant,
            "seed": self.seed,
            "steady_steps": max([int(row[0]) for row in steady], default=STEADY) - STEADY,
            "tokens_per_second": tokens,
            "median_tokens_per_second": statistics.median(tokens) if tokens else None,
            "peak_memory_gib": max((float(row[3]) for row in steady), default=None),
            "losses": {int(row[0]): float(row[1]) for row in rows},
        }


def in_turn(args: argparse.Namespace) -> Iterator[Run]:
    """Runs that have reached their last step, or failed; the next one's imports go on during each."""
    deadline = time.monotonic() + args.budget
    todo = [(variant, seed) for seed in range(args.repeats) for variant in args.variants]
    waiting = []
    try:
        for index in range(len(todo)):
            for variant, seed in todo[index : index + 2][len(waiting) :]:
                waiting.append(Run(variant, args, seed, f"{variant.replace(':', '_')}_{seed}"))
            run = waiting[0]
            run.begin()
            error = run.wait(min(args.timeout, deadline - time.monotonic()))
            if error:
                print(f"{run.label}: {error}\n{run.log.read_text()[-3000:]}", flush=True)
            yield run
            waiting.pop(0).end()
            if time.monotonic() > deadline:
                print(f"out of time after {index + 1} of {len(todo)} runs", flush=True)
                return
    finally:
        for run in waiting:
            run.end()


def table(results: list[dict], steps: list[int]) -> str:
    lines = [
        "| variant | seed | tokens/s/GPU, median (min to max) | steady steps | memory, GiB | loss at "
        + " / ".join(map(str, steps)) + " |",
        "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for r in results:
        tokens = r["tokens_per_second"]
        speed = f"{r['median_tokens_per_second']:,.0f} ({min(tokens):,} to {max(tokens):,})" if tokens else "failed"
        losses = " / ".join(str(r["losses"].get(step, "")) for step in steps)
        lines.append(
            f"| {r['variant']} | {r['seed']} | {speed} | {r['steady_steps']} | {r['peak_memory_gib']} | {losses} |"
        )
    return "\n".join(lines)


def records(results: list[dict], shape: str) -> list[dict]:
    """Of each variant, the median of its runs against those of bf16 and torchao."""
    command, out = shlex.join(["python", "-m", "experiments.throughput.train", *sys.argv[1:]]), []
    for key, unit in (("median_tokens_per_second", "tokens/s/GPU"), ("peak_memory_gib", "GiB reserved")):
        values = {}
        for r in results:
            if r[key] is not None:
                values.setdefault(r["variant"], []).append(r[key])
        median = {variant: statistics.median(v) for variant, v in values.items()}
        for variant, value in median.items():
            for reference in {"bf16", "torchao"} & set(median) - {variant}:
                ratio = value / median[reference]
                out.append(
                    dict(name=f"train_16b {variant}", shape=f"{shape}, {unit}", value=value, unit=unit,
                         reference=reference, reference_value=median[reference],
                         speedup=ratio if "tokens" in key else 1 / ratio, command=command)
                )  # fmt: skip
    return out


def parser(description: str) -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--gpus", type=int, default=4)
    p.add_argument("--layers", type=int, default=27, help="of the 16B model's 27; the first is dense")
    p.add_argument("--flavor", help="another flavor of deepseek_v3 instead")
    p.add_argument("--routing", choices=ROUTING, default="random")
    p.add_argument("--steps", type=int, default=30)
    p.add_argument("--timeout", type=float, default=300, help="seconds that one run may take")
    p.add_argument("overrides", nargs="*", help="torchtitan overrides for every run, after --")
    return p


def main() -> None:
    p = parser(__doc__)
    p.add_argument("--variants", nargs="+", default=[*CONVERTERS], help=f"of {', '.join(CONVERTERS)}")
    p.add_argument("--repeats", type=int, default=2)
    p.add_argument("--budget", type=float, default=3600, help="seconds that all runs may take")
    args = p.parse_args()
    shape = f"{args.flavor or f'16B, {args.layers} layers'}, {args.gpus} GPUs, {args.routing} routing"
    args.out = args.out / f"train_{args.layers}layers_{args.gpus}gpu_{args.routing}"
    args.out.mkdir(parents=True, exist_ok=True)
    results = []
    for run in in_turn(args):
        results.append(run.result())
        print(f"\n{shape}\n{table(results, range(args.steps // 5, args.steps + 1, args.steps // 5))}", flush=True)
        (args.out / "runs.json").write_text(json.dumps(results, indent=1) + "\n")
        write_records(args.out.parent / "results.json", records(results, shape))


if __name__ == "__main__":
    main()
