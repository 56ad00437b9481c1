"""The host's time for one MoE layer, forward and backward: what a step waits for where the GPU has little to do.

    python -m experiments.throughput.host_time [--variants bf16 "bf16 whole" fp8] --out experiments/throughput

The layer has so few experts and tokens that its kernels end before the host has launched the next ones; the GPU's share
of the time is printed as a check. The number of launches depends on neither. ``LAYERS`` layers run back to back, and
the variants of :mod:`experiments.throughput.variants` take turns. Below the times of each variant are the functions
that take them, by part and one by one, from cProfile, which slows Python down but not C++: use them as shares.
"""

import argparse
import cProfile
import functools
import gc
import pstats
import random
import statistics
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch

import titan_fp8moe
from experiments.throughput import layer
from experiments.throughput.variants import VARIANTS, Bench, Shape
from titan_fp8moe import testing
from titan_fp8moe.testing import write_records
from titan_fp8moe.torchtitan import parallel

LAYERS = 27
DEFAULTS = ["bf16", "bf16 whole", "fp8", "fp8 with weight quantization"]
# The first that is in a file's path names its part.
PARTS = {
    f"{titan_fp8moe.__path__[0]}/kernels": "titan_fp8moe's launches",
    titan_fp8moe.__path__[0]: "titan_fp8moe",
    "/torchtitan/": "torchtitan",
    "/torch/_library": "torch's custom ops",
    "/torch/_ops": "torch's custom ops",
    "/torch/_dynamo": "torch.compile",
    "/torch/_functorch": "torch.compile",
    "/torch/_inductor": "torch.compile",
    "torchinductor": "compiled code",
    "/triton/": "Triton",
    "/torch/": "torch's other Python",
}


def part(path: str) -> str:
    return next((name for piece, name in PARTS.items() if piece in path), "other")


def by_function(run: Callable[[], None]) -> Counter[tuple[str, str]]:
    """Milliseconds inside each function, callees apart, by part and name. A C function counts with its callers.

    Autograd's thread is invisible to cProfile, so the backward runs in this one.
    """
    profiler = cProfile.Profile()
    with torch.autograd.set_multithreading_enabled(False):
        profiler.runcall(run)
    layer.synchronize()
    found = Counter()
    for (path, line, name), (_, _, own, _, callers) in pstats.Stats(profiler).stats.items():  # pyrefly: ignore
        if path == "~":
            for (caller, _, _), (_, _, seconds, _) in callers.items():
                found[part(caller), name] += seconds * 1e3
        else:
            found[part(path), f"{'/'.join(Path(path).parts[-2:])}:{line} {name}"] += own * 1e3
    return found


def show(functions: Counter[tuple[str, str]], top: int) -> None:
    parts, total = Counter(), functions.total()
    for (part, _), ms in functions.items():
        parts[part] += ms
    print("  by part: " + ", ".join(f"{part} {ms / total:.0%}" for part, ms in parts.most_common()))
    for (part, name), ms in functions.most_common(top):
        print(f"    {ms / total:6.1%}  {part}: {name[:80]}")


def records(shape: Shape, ms: dict[str, float]) -> list[dict]:
    """``host_time`` of each FP8-Flow variant against each bf16 variant."""
    return [
        {
            "name": " ".join(f"host_time {name.removeprefix('fp8')}".split()), "shape": f"{shape}, 1 GPU",
            "value": ms[name], "unit": "ms forward + backward", "reference": reference,
            "reference_value": ms[reference], "speedup": ms[reference] / ms[name],
        }
        for name in ms if name.startswith("fp8")
        for reference in ms if reference.startswith("bf16")
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of results.json")
    parser.add_argument("--model", default="16B", help="tiny for a CPU")
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=DEFAULTS, metavar="VARIANT")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--top", type=int, default=12, help="functions to list")
    args = parser.parse_args()
    if args.model != "tiny":
        testing.require_gpu()
    shape = Shape(args.model, args.experts, args.tokens)
    parallel.install()
    bench = Bench(shape, 1, {name: VARIANTS[name] for name in args.variants})
    failed = layer.warm_up(bench)
    gc.collect()
    gc.disable()

    def layers(name: str) -> None:
        for _ in range(LAYERS):
            bench.step(name)

    runs = {name: functools.partial(layers, name) for name in bench.forwards}
    times = {name: [] for name in runs}
    for _ in range(args.rounds):
        for name in random.sample(list(runs), len(runs)):
            times[name].append(layer.elapsed(runs[name], 1, lead=1) / LAYERS)
    ms = {name: statistics.median(values) for name, values in times.items()}
    for name, run in runs.items():
        trace = layer.profile(functools.partial(bench.step, name))
        busy = sum(k.end - k.start for k in trace) / 1e3 / layer.PROFILED_STEPS
        launches = len(trace) / layer.PROFILED_STEPS
        print(f"{name}: {ms[name]:.3f} ms per layer ({min(times[name]):.3f} to {max(times[name]):.3f}), "
              f"{launches:.0f} kernels, which take the GPU {busy:.3f} ms")  # fmt: skip
        show(by_function(run), args.top)
    for name, error in failed.items():
        print(f"{name}: {error}")
    write_records(args.out / "results.json", records(shape, ms))


if __name__ == "__main__":
    main()
