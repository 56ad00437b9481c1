"""One MoE layer, forward and backward, FP8-Flow against bf16 in the same run.

    python -m experiments.throughput.layer --out experiments/throughput --models 671B --tokens 16384

The layers are torchtitan's ``MoE`` with the same parameters, bf16 unless ``--fp32``;
:mod:`experiments.throughput.variants` has the models and the variants. Router, shared experts and combine are inside
the time. On one GPU FP8-Flow's layer is one graph, as in training.

Variants take turns in blocks of back-to-back steps, in an order drawn anew for each round. The record ``moe_layer``
leaves FSDP and the quantization of weights out; ``moe_layer_with_weights`` quantizes them in every forward and
backward. Where they are kept for four microbatches, each bears a fourth of the time.

A shape has a process per GPU: some shapes compile at the same time, then they are measured one by one. Records are
written after each to ``results.json``. A variant that fails, as when memory runs out, is named with its error and left
out. After ``--budget`` seconds the script ends with what it has.
"""

import argparse
import functools
import gc
import json
import math
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from experiments.records import begin, other_torch, record, script_parser, write_records, write_text
from experiments.throughput.variants import ABLATIONS, MODELS, VARIANTS, Bench, Shape, Variant, variants
from experiments.timing import CUDA, elapsed_ms, in_turn, medians
from titan_fp8moe.torchtitan import parallel

ROUNDS, BLOCK_MS = 4, 80.0  # turns of a variant and their length
MIN_STEPS = 5  # of a variant's turn
REFERENCES = ("bf16", "bf16 whole", "bf16 fused")


def synchronize() -> None:
    if CUDA:
        torch.cuda.synchronize()
    if dist.is_initialized():
        dist.barrier()


def elapsed(run: Callable[[], None], times: int, lead: int = 0) -> float:
    """Milliseconds per call of ``times`` calls back to back, right behind ``lead`` that are not timed."""
    synchronize()
    for _ in range(lead):
        run()
    return elapsed_ms(run, times)


def warm_up(bench: Bench) -> dict[str, str]:
    """Runs every variant twice, which compiles it. Those that fail on any rank are taken out; returns their errors."""
    failed = {}
    for name in list(bench.forwards):
        error = None
        try:
            for _ in range(2):
                bench.step(name)
            if not bench.x.grad.isfinite().all():
                raise RuntimeError("the gradient of the input is not finite")
        except Exception as e:
            traceback.print_exc()
            error = f"{type(e).__name__}: {e}".splitlines()[0][:200]
        ok = torch.tensor(error is None, dtype=torch.int32)
        if dist.is_initialized():
            dist.all_reduce(ok, dist.ReduceOp.MIN)  # over gloo
        if not ok:
            failed[name] = error or "failed on another rank"
            del bench.forwards[name]
        torch.cuda.empty_cache()  # other shapes share the GPU by now
    return failed


def times_in_turn(steps: dict[str, Callable[[], None]], rounds: int, block_ms: float) -> dict[str, list[float]]:
    """Milliseconds per step of each variant in each round."""
    repeats = {}
    for name, step in steps.items():
        count = torch.tensor(math.ceil(block_ms / elapsed(step, 2)))
        if dist.is_initialized():
            dist.broadcast(count, 0)
        repeats[name] = max(MIN_STEPS, int(count))
    # Half a turn's length untimed: the card's clocks still are those of what ran before, up to 3% apart.
    turns = {n: functools.partial(elapsed, step, repeats[n], repeats[n] // 2) for n, step in steps.items()}
    return in_turn(turns, rounds, random.Random(0))  # the same order on all ranks


def measure(bench: Bench, failed: dict[str, str], rounds: int, block_ms: float) -> dict:
    """Each round's milliseconds of the variants, and the bytes that they save."""
    steps = {name: functools.partial(bench.step, name) for name in bench.forwards}
    microbatches = {name: bench.chosen[name].microbatches for name in steps}
    with torch._dynamo.config.patch(error_on_recompile=True):  # or compilation would be inside the times
        times = times_in_turn(steps, rounds, block_ms)
    ms = {name: [ms / microbatches[name] for ms in times[name]] for name in times}
    saved = [name for name in bench.forwards if not bench.chosen[name].quantizes_weights]
    saved_bytes = {name: bench.saved_bytes(name) / bench.shape.tokens for name in saved}
    result = {"shape": bench.shape._asdict(), "gpus": bench.gpus, "failed": failed}
    return result | {"ms": ms, "saved_bytes_per_token": saved_bytes}


def choose(shape: Shape, gpus: int, names: list[str]) -> tuple[dict[str, Variant], dict[str, str]]:
    """The variants of these names that a shape has, and the reasons why others are missing."""
    there = variants(shape, gpus)
    missing = {name: f"not a variant of this layer on {gpus} GPU(s)" for name in names if name not in there}
    return {name: there[name] for name in names if name in there}, missing


def child(shape: Shape, args: argparse.Namespace) -> None:
    """Compiles, says so by a file, waits for a line on stdin, measures, writes the results and says that it is done."""
    rank, gpus = int(os.environ["RANK"]), args.gpus
    torch.manual_seed(rank)
    torch.cuda.set_device(rank)
    if gpus > 1:
        dist.init_process_group("cpu:gloo,cuda:nccl")
    parallel.install()
    chosen, missing = choose(shape, gpus, args.variants)
    bench = Bench(shape, gpus, chosen)
    failed = missing | warm_up(bench)
    gc.collect()
    gc.disable()  # as torchtitan's trainer does: no step waits for a collection
    synchronize()
    (args.child / f"{rank}.ready").touch()
    if not sys.stdin.readline():
        return
    result = measure(bench, failed, ROUNDS, BLOCK_MS)
    if rank == 0:
        write_text(args.child / "result.json", json.dumps(result))
    (args.child / f"{rank}.done").touch()
    if dist.is_initialized():
        dist.destroy_process_group()


class Processes:
    """A shape's processes, one per GPU; all that they write is in ``folder``."""

    def __init__(self, shape: Shape, folder: Path, args: argparse.Namespace):
        self.folder = folder
        folder.mkdir()
        with socket.socket() as s:
            s.bind(("", 0))
            port = s.getsockname()[1]
        command = [sys.executable, "-m", "experiments.throughput.layer", "--out", str(args.out)]
        command += ["--models", shape.model, "--tokens", str(shape.tokens), *["--fp32"] * args.fp32]
        command += ["--child", str(folder), "--gpus", str(args.gpus), "--variants", *args.variants]
        self.processes = []
        for rank in range(args.gpus):
            env = os.environ | {"RANK": str(rank), "WORLD_SIZE": str(args.gpus), "MASTER_ADDR": "localhost"}
            env |= {"MASTER_PORT": str(port), "TORCHINDUCTOR_COMPILE_THREADS": "4"}
            with open(folder / f"{rank}.log", "w") as log:
                self.processes.append(
                    subprocess.Popen(command, env=env, text=True, stdin=subprocess.PIPE, stdout=log,
                                     stderr=subprocess.STDOUT)
                )  # fmt: skip

    def wait(self, what: str, deadline: float) -> str | None:
        """Waits until every rank is ``ready`` or ``done``; returns what went wrong, or None."""
        while True:
            codes = [p.poll() for p in self.processes]
            if all((self.folder / f"{rank}.{what}").exists() for rank in range(len(codes))):
                return None
            if any(code is not None for code in codes):
                return f"ended with exit codes {codes}, None: was running"
            if time.monotonic() > deadline:
                return "out of time"
            time.sleep(0.1)

    def measure(self, deadline: float) -> str | None:
        for process in self.processes:
            process.stdin.write("go\n")
            process.stdin.flush()
        return self.wait("done", deadline)

    def result(self) -> dict | None:
        path = self.folder / "result.json"
        return json.loads(path.read_text()) if path.exists() else None

    def end(self) -> None:
        """A process that is done may hang on the way out, one of a failed group in a collective."""
        for process in self.processes:
            process.kill()
            process.wait()

    def logs(self) -> str:
        return "\n".join(path.read_text()[-1500:] for path in sorted(self.folder.glob("*.log")))


def median_of(results: list[dict]) -> dict:
    """The result of several processes of a shape: the median time of each, and all else of the first."""
    if len(results) == 1:
        return results[0]
    names = set.intersection(*(set(result["ms"]) for result in results))
    ms = {name: [statistics.median(r["ms"][name]) for r in results] for name in results[0]["ms"] if name in names}
    return results[0] | {"ms": ms, "processes": len(results)}


def references(name: str) -> list[str]:
    """The variants that a variant is compared with."""
    of_defaults = name in (*ABLATIONS, "fp8 with bf16 shared experts")
    return [*REFERENCES] + ["fp8"] * of_defaults


def record_name(name: str, title: str = "") -> str:
    """``moe_layer``, what is measured unless it is the time, and what the variant differs in from the defaults."""
    with_weights = "fp8 with weight quantization"
    if name.startswith(with_weights):
        return "moe_layer_with_weights" + name.removeprefix(with_weights)
    return " ".join(f"moe_layer {title} {name.removeprefix('fp8')}".split())


def records(result: dict) -> list[dict]:
    shape, ms = Shape(**result["shape"]), medians(result["ms"])
    label = ", ".join([str(shape), *other_torch(), f"{result['gpus']} GPU{'s' * (result['gpus'] > 1)}"])
    out = []
    for values, unit, title in (
        (ms, "ms forward + backward", ""),
        (result.get("saved_bytes_per_token", {}), "bytes per token", "saved"),
    ):
        for name in (name for name in values if name.startswith("fp8")):
            for reference in (reference for reference in references(name) if reference in values):
                name_of = record_name(name, title)
                out.append(record(name_of, label, unit, values[name], reference, values[reference]))
    return out


def show(result: dict, found: list[dict]) -> None:
    """Prints each variant's times, then its records."""
    print(f"\n== {Shape(**result['shape'])}, {result['gpus']} GPU(s), {result.get('processes', 1)} process(es)")
    for name, ms in result["ms"].items():
        print(f"{name:42} {statistics.median(ms):8.3f} ms ({min(ms):.3f} to {max(ms):.3f})")
    for r in found:
        print(f"{r['name']}, {r['reference']}: {r['value']:.3f} {r['unit']} ({r['speedup']:.2f}x)")
    for name, error in result["failed"].items():
        print(f"{name:42} {error}")


def measure_batch(
    started: list[tuple[Shape, Processes]], results: dict[Shape, list[dict]], out: Path, start: float, deadline: float
) -> list[str]:
    """Waits until all have compiled, then measures one by one; returns what failed."""
    errors, failed = [], []
    for _, processes in started:
        errors.append(processes.wait("ready", deadline))
        if errors[-1]:
            processes.end()  # or what is left of it runs beside the measurements
    print(f"compiled {errors.count(None)} of {len(started)} shapes, {time.monotonic() - start:.0f} s", flush=True)
    for (shape, processes), compile_error in zip(started, errors, strict=True):
        error = compile_error or processes.measure(deadline)
        processes.end()
        if result := processes.result():
            results.setdefault(shape, []).append(result)
            result = median_of(results[shape])
            found = records(result)
            show(result, found)
            write_records(out / "results.json", found)
        if error:
            failed.append(f"{shape}: {error}")
            print(f"{failed[-1]}\n{processes.logs()}")
        print(f"  {time.monotonic() - start:.0f} s", flush=True)
    return failed


def arguments() -> argparse.Namespace:
    parser = script_parser(__doc__, out="folder of results.json")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--processes", type=int, default=1, help="for each shape; a time is the median of theirs")
    parser.add_argument("--together", type=int, default=4, help="processes that compile at the same time")
    parser.add_argument("--budget", type=float, default=3600, help="seconds that all of it may take")
    models = [name for name in MODELS if name != "tiny"]
    parser.add_argument("--models", nargs="+", choices=models, default=models)
    parser.add_argument("--tokens", type=int, nargs="+", default=[16384, 8192, 4096], help="per GPU")
    parser.add_argument("--fp32", action="store_true", help="parameters in fp32, not bf16")
    chosen, what = [name for name in VARIANTS if name not in ABLATIONS], f"of {', '.join(map(repr, VARIANTS))}"
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=chosen, metavar="VARIANT", help=what)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    shapes = [Shape(model, tokens, args.fp32) for model in args.models for tokens in args.tokens]
    if args.child is not None:
        child(shapes[0], args)
        return
    begin(args.trial)
    shapes = [shape for shape in shapes for _ in range(args.processes)]
    args.out.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    deadline = start + args.budget
    results: dict[Shape, list[dict]] = {}
    failed = []
    with tempfile.TemporaryDirectory() as folder:
        for first in range(0, len(shapes), args.together):
            if time.monotonic() > deadline:
                break
            batch = enumerate(shapes[first : first + args.together], first)
            started = [(shape, Processes(shape, Path(folder) / str(i), args)) for i, shape in batch]
            try:
                failed += measure_batch(started, results, args.out, start, deadline)
            finally:
                for _, processes in started:
                    processes.end()
    if failed:
        sys.exit(f"error: shapes failed: {'; '.join(failed)}")


if __name__ == "__main__":
    main()
