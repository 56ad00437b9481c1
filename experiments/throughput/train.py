"""Tokens per second and memory of models in bf16, with other FP8 experts and in FP8-Flow, in turn.

    python tools/build_corpus.py --out outputs/corpus
    python -m experiments.throughput.train --out experiments/throughput --gpus 1 --layers 6

Every run is a launch of its own. Repetitions differ by the seed; within one all variants have the same seed and data,
and an order that is drawn anew. Records hold the spread of the repetitions and are written after each run to
``results.json``; logs and figures stay in ``outputs/throughput``. An invocation that was cut off goes on with the runs
that it lacks, on the same hardware, versions, commit and number of steps.

A variant may set the converter's options, ``fp8_flow:recompute=experts,save_h=fp8``, and ``checkpointing``:
``bf16_fused:checkpointing=saved``. That is torchtitan's per op unless it is ``saved`` (per op, and ``_grouped_mm`` kept
too), ``none`` or ``full``. Experts are spread over all GPUs, or over ``ep`` of them: ``bf16_fused:ep=1``. Overrides of
torchtitan's after ``--`` hold for every run; the records carry them in their shape.

Dense models have no routing; their variants are ``bf16``, torchao's ``float8_tensorwise`` and ``float8_rowwise``, and
``fp8_flow``, which has FFNs in FP8, with ``fp8_flow:linear_fqns=attention.`` the attention's linears too.

``--torchtitan 0.3.0`` measures torchtitan 0.3, installed in its place: other variants, only flex attention, forced
routing and selective checkpointing, without or with ``--cuda-graphs``.
"""

import argparse
import json
import math
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from experiments.records import begin, environment, other_torch, record, script_parser, write_records, write_text

CONFIG = "experiments/throughput/train.toml"
SETTING_03 = "experiments.throughput.setting03"
WORK = Path("outputs/throughput")
GATE = "THROUGHPUT_GATE"  # names a file for which a run waits, once its modules are imported


class Model(NamedTuple):
    """torchtitan's names, what its flavor has, and the beginning of a record's shape."""

    name: str
    flavor: str
    layers: int
    attention: str
    label: str


MODELS = {
    "16b": Model("deepseek_v3", "16B", 27, "flex", "16B"),
    "qwen3_30b": Model("qwen3", "30B-A3B", 48, "sdpa", "Qwen3-30B-A3B"),
    "llama3_8b": Model("llama3", "8B", 32, "sdpa", "Llama 3 8B"),
    "llama3_1b": Model("llama3", "1B", 16, "sdpa", "Llama 3 1B"),
}
CONVERTERS = {
    "bf16": [],
    "bf16_whole": ["whole_blocks"],  # its blocks compiled as one graph each
    "bf16_fused": ["fused_bf16", "whole_blocks"],
    "torchao": ["torchao_rowwise"],
    "torchao_whole": ["torchao_rowwise", "whole_blocks"],
    "naive_blockwise": ["naive_blockwise"],  # a cast around each grouped GEMM
    "naive_whole": ["naive_blockwise", "whole_blocks"],
    "float8_tensorwise": ["float8_tensorwise"],  # torchao's, of dense models
    "float8_rowwise": ["float8_rowwise"],
    "fp8_flow": ["fp8_flow_moe"],
}
ROUTING = {"random": ["balanced_random"], "model": []}
CHECKPOINTING = {
    "": ([], []),  # torchtitan's, per op
    "saved": (["save_grouped_mm"], []),
    "none": ([], ["--activation_checkpoint.mode=none"]),
    "full": ([], ["--activation_checkpoint.mode=full"]),
}
STEADY = 10  # steps before: compilation, allocator, warm-up of clocks
STEP = re.compile(r"^\[rank0\].*step: *(\d+) +loss: *(\S+) +grad_norm: *(\S+) +memory: *([\d.]+)GiB.* tps: *([\d,]+)")


def overrides(variant: str, args: argparse.Namespace, seed: int) -> list[str]:
    """torchtitan's command line for a variant."""
    name, _, given = variant.partition(":")
    options = dict(option.split("=", 1) for option in given.split(",") if option)
    if args.torchtitan == "0.3.0":
        flags = [
            f"--module={SETTING_03}",
            f"--config={args.model}:{args.layers}:{name}",
            f"--training.{'no-' * args.cuda_graphs}disable_cuda_graphs",
        ]
    else:
        kept, mode = CHECKPOINTING[options.pop("checkpointing", "")]
        converters = [*ROUTING[args.routing], *kept, *CONVERTERS[name]]
        flags = [
            f"--job.config_file={CONFIG}",
            f"--model.name={MODELS[args.model].name}",
            f"--model.flavor={MODELS[args.model].flavor}_{args.layers}_layers_{args.attention}",
            *mode,
            *([f"--model.converters={','.join(converters)}"] if converters else []),
        ]
    return [
        *flags,
        f"--parallelism.expert_parallel_degree={options.pop('ep', args.gpus)}",
        f"--training.local_batch_size={args.local_batch}",
        f"--training.steps={args.steps}",
        f"--debug.seed={seed}",
        *(f"--fp8_flow_moe.{name}" + ("" if value == "true" else f"={value}") for name, value in options.items()),
        *args.overrides,
    ]


def wait_for_turn() -> None:
    """Waits for the file of ``GATE`` in a run's processes, while the run before it has the GPUs."""
    while GATE in os.environ and not Path(os.environ[GATE]).exists():
        time.sleep(0.05)


class Run:
    """One training run, from the moment its processes import Python modules. ``begin`` lets it use the GPUs."""

    def __init__(self, variant: str, args: argparse.Namespace, seed: int, **caches: str):
        self.variant, self.steps, self.seed = variant, args.steps, seed
        self.label = re.sub(r"[^\w.-]", "_", f"{variant}_{seed}")
        self.log, self.gate, self.dump = (args.work / f"{self.label}{suffix}" for suffix in (".log", ".gate", ""))
        self.gate.unlink(missing_ok=True)
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={args.gpus}"]
        launcher += ["--role=rank", "--tee=3", "-m", "torchtitan.train"]  # all ranks: any may run out of memory
        dump = f"--{'job.' * (args.torchtitan == '0.2.2')}dump_folder={self.dump}"
        env = {GATE: str(self.gate), "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
        self.process = subprocess.Popen(
            [*launcher, dump, *overrides(variant, args, seed)],
            env=os.environ | env | {"TOKENIZERS_PARALLELISM": "false"} | caches,
            stdout=self.log.open("w"), stderr=subprocess.STDOUT,
        )  # fmt: skip

    def begin(self) -> None:
        self.gate.touch()

    def wait(self, timeout: float, until: str | None = None) -> str | None:
        """Waits until rank 0 has logged ``until``, or its last step; returns what went wrong, or None."""
        logged = re.compile(rf"^\[rank0\].*{until or f'step: {self.steps:2} '}", re.MULTILINE)
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            ended = self.process.poll() is not None
            log = self.log.read_text()
            if logged.search(log):
                return None
            if re.search(r"OutOfMemoryError|out of memory|Failed to CUDA calloc", log):  # the last is NCCL's
                return "out of memory"
            if ended:
                return f"ended with exit code {self.process.returncode}"
            time.sleep(0.2)
        return f"not done after {timeout:.0f} s"

    def end(self) -> None:
        """Ends all processes of the run: nothing that follows the last step is needed."""
        # The launcher ends the ranks, which have sessions of their own: first with SIGTERM, after 30 s with SIGKILL.
        self.process.terminate()
        self.process.wait()
        self.gate.unlink(missing_ok=True)
        shutil.rmtree(self.dump, ignore_errors=True)

    def result(self, error: str | None) -> dict:
        """Figures of the steps after the first ``STEADY``: the speed is all their tokens over all their time."""
        rows = [match.groups() for match in map(STEP.search, self.log.read_text().splitlines()) if match]
        steady = [row for row in rows if int(row[0]) > STEADY]
        tokens = [int(row[4].replace(",", "")) for row in steady]
        losses = {row[0]: float(row[1]) for row in rows}
        broken = [f"the loss is {loss} at step {step}" for step, loss in losses.items() if not math.isfinite(loss)]
        return {
            "variant": self.variant,
            "seed": self.seed,
            "error": error or next(iter(broken), None),
            "tokens_per_second": tokens,
            "overall_tokens_per_second": statistics.harmonic_mean(tokens) if tokens else None,
            "peak_memory_gib": max((float(row[3]) for row in steady), default=None),
            "losses": losses,
        }


def in_turn(todo: list[tuple[str, int]], args: argparse.Namespace) -> Iterator[dict]:
    """Results of runs of (variant, seed), one after another; the next one's imports go on during each."""
    deadline = args.begin + args.budget
    waiting = []
    try:
        for index in range(len(todo)):
            for variant, seed in todo[index : index + 2][len(waiting) :]:
                waiting.append(Run(variant, args, seed))
            run = waiting[0]
            run.begin()
            result = run.result(run.wait(min(args.timeout, deadline - time.monotonic())))
            if result["error"]:
                print(f"{run.label}: {result['error']}\n{run.log.read_text()[-3000:]}", flush=True)
            waiting.pop(0).end()
            yield result
            if time.monotonic() > deadline:
                print(f"out of time after {index + 1} of {len(todo)} runs", flush=True)
                return
    finally:
        for run in waiting:
            run.end()


def drawn(variants: list[str], seeds: list[int]) -> list[tuple[str, int]]:
    """All (variant, seed), a repetition after the other, each in an order of its own."""
    return [(variant, seed) for seed in seeds for variant in random.Random(seed).sample(variants, len(variants))]


MEASURED = ("overall_tokens_per_second", "tokens/s/GPU", ""), ("peak_memory_gib", "GiB reserved", "memory")


def write(results: list[dict], args: argparse.Namespace, shape: str, measured: Iterable[tuple] = MEASURED) -> None:
    """Records the median of each FP8-Flow variant's completed runs against those of the references and the defaults.

    Names are ``train_16b``, the variant's options, and what is measured if that is not the speed. Records also have the
    spread of both: largest less smallest, relative to the median. ``measured``: keys of results, units, ends of names.
    """
    found, model = [], "train_" + args.model + "_titan03" * (args.torchtitan == "0.3.0")
    for key, unit, suffix in measured:
        values = {}
        for r in results:
            if r[key] is not None and r["error"] is None:
                values.setdefault(r["variant"], []).append(r[key])
        median = {variant: statistics.median(v) for variant, v in values.items()}
        spread = {variant: (max(v) - min(v)) / median[variant] for variant, v in values.items() if len(v) > 1}
        for variant in (name for name in median if name.startswith("fp8_flow")):
            name = " ".join(filter(None, (model, *variant.partition(":")[2].split(","), suffix)))
            for reference in [v for v in median if v != variant and not v.startswith("fp8_flow:")]:
                r = record(name, shape, unit, median[variant], reference, median[reference])
                if variant in spread and reference in spread:
                    r |= {"spread": {"ours": spread[variant], "reference": spread[reference]}}
                found.append(r)
    write_records(args.out / "results.json", found)


def require_success(results: list[dict]) -> None:
    if failed := [f"{r['variant']}, seed {r['seed']}: {r['error']}" for r in results if r["error"]]:
        sys.exit(f"error: runs failed: {'; '.join(failed)}")


def parser(description: str, variants: list[str], seeds: list[int]) -> argparse.ArgumentParser:
    p = script_parser(description, out="folder of results.json")
    p.add_argument("--variants", nargs="+", default=variants, help=f"of {', '.join(CONVERTERS)}, or setting03.py's")
    p.add_argument("--seeds", type=int, nargs="+", default=seeds, help="a repeat for each")
    p.add_argument("--gpus", type=int, default=4)
    p.add_argument("--model", choices=MODELS, default="16b")
    p.add_argument("--layers", type=int, help="of the model's; default: all")
    p.add_argument("--attention", choices=("flex", "sdpa"), help="default: the model's; sdpa is cuDNN's on Hopper")
    p.add_argument("--local-batch", type=int, default=4)
    p.add_argument("--routing", choices=ROUTING, default="random")
    p.add_argument("--torchtitan", choices=("0.2.2", "0.3.0"), default="0.2.2", help="what is installed")
    p.add_argument("--cuda-graphs", action="store_true", help="torchtitan 0.3's, of whole steps")
    p.add_argument("--steps", type=int, default=40, help="a multiple of 10")
    p.add_argument("--timeout", type=float, default=300, help="seconds that one run may take")
    p.add_argument("overrides", nargs="*", help="torchtitan overrides for every run, --name=value, after --")
    return p


def finish(args: argparse.Namespace, prefix: str) -> str:
    """Sets ``args.layers``, ``args.attention`` and the folder ``args.work``; returns the shape that records have."""
    model = MODELS[args.model]
    args.layers, args.attention = args.layers or model.layers, args.attention or model.attention
    if model.name == "llama3":  # dense
        args.routing = "model"
    if args.torchtitan == "0.3.0":
        args.attention, args.routing = "flex", "forced"
    parts = [
        f"{model.label}, {args.layers} layers, {args.attention}",
        f"local batch {args.local_batch}",
        *[f"{args.routing} routing"] * (model.name != "llama3"),
        f"{args.gpus} GPU{'s' * (args.gpus > 1)}",
        *["CUDA graphs"] * args.cuda_graphs,
        *(other_torch() if args.torchtitan == "0.2.2" else []),
        *(setting.removeprefix("--") for setting in args.overrides),  # other settings are other measurements
    ]
    shape = ", ".join(parts)
    args.work = WORK / re.sub(r"[^\w.-]+", "_", f"{prefix} {shape}")
    args.work.mkdir(parents=True, exist_ok=True)
    return shape


def main() -> None:
    p = parser(__doc__, ["bf16", "bf16_whole", "bf16_fused:checkpointing=saved", "fp8_flow"], [0, 1])
    p.add_argument("--budget", type=float, default=3600, help="seconds that all runs may take")
    args = begin(p)
    args.begin = time.monotonic()
    shape = finish(args, "train")
    # Only runs of one machine, state and length are compared.
    made = {key: environment()[key] for key in ("hardware", "versions", "commit")} | {"steps": args.steps}
    path = args.work / "runs.json"
    wanted = drawn(args.variants, args.seeds)
    before = json.loads(path.read_text()) if path.exists() else []
    results = [r for r in before if r["made"] == made and (r["variant"], r["seed"]) in wanted and not r["error"]]
    done = [(r["variant"], r["seed"]) for r in results]
    for result in in_turn([run for run in wanted if run not in done], args):
        results.append(result | {"made": made})
        shown = {key: value for key, value in result.items() if key != "losses"}
        print(f"{time.monotonic() - args.begin:.0f} s, {shape}: {shown}", flush=True)
        write_text(path, json.dumps(results, indent=1) + "\n")
        write(results, args, shape)
    require_success(results)


if __name__ == "__main__":
    main()
