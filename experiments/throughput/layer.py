"""One MoE layer, forward and backward, FP8-Flow against torchtitan's bf16 in the same run.

    python -m experiments.throughput.layer --out experiments/throughput            # one GPU
    python -m experiments.throughput.layer --out experiments/throughput --gpus 2   # experts over two

The layers are torchtitan's ``MoE`` with the same bf16 parameters, parallelized and compiled by torchtitan's functions;
router, reorderer, shared experts and combine are inside the time. Variants take turns in blocks of back-to-back steps,
in an order drawn anew for each round. FSDP and the quantization of weights are outside; another variant quantizes them
at every step. On one GPU, where no step syncs with the host, both are measured a second time as CUDA graphs, which are
never CPU-bound.

A shape has a process per GPU: some shapes compile at the same time, then they are measured one by one. Records are
written after each to ``results.json``, every round's times and all kernels to ``outputs/throughput``. A variant that
fails, as when memory runs out, is named with its error and left out. After ``--budget`` seconds the script ends with
what it has.
"""

import argparse
import functools
import gc
import itertools
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
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torchtitan.models.moe.moe as moe_module
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torchtitan.config.job_config import Compile
from torchtitan.models.llama4.infra.parallelize import apply_compile
from torchtitan.models.moe.moe import MoE, MoEArgs

import titan_fp8moe.torchtitan  # noqa: F401  registers and, without a GPU, patches torchtitan
from experiments.throughput import kernel_trace
from experiments.throughput.routing import BalancedRandomRouter
from titan_fp8moe.config import Fp8FlowMoEConfig
from titan_fp8moe.moe import routed_experts
from titan_fp8moe.testing import exit_on_sigterm, in_model, write_records, write_text
from titan_fp8moe.torchtitan import parallel
from titan_fp8moe.torchtitan.modules import Fp8FlowMoE
from titan_fp8moe.weights import WeightCache

WORK = Path("outputs/throughput")
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
PROFILED_STEPS = 3
MIN_STEPS = 5  # of a variant's turn


@dataclass
class Shape:
    """``experts`` and ``tokens`` are per GPU."""

    model: str
    D: int
    H: int
    top_k: int
    experts: int
    tokens: int

    def moe_args(self, gpus: int) -> MoEArgs:
        softmax = self.model == "16B"
        return MoEArgs(
            num_experts=self.experts * gpus,
            num_shared_experts=2 if softmax else 1,
            score_func="softmax" if softmax else "sigmoid",
            route_norm=not softmax,
            route_scale=1.0 if softmax else 2.5,
            score_before_experts=False,
            top_k=self.top_k,
            _debug_force_load_balance=True,
        )

    def __str__(self) -> str:
        return f"{self.model}, {self.experts} experts per GPU, {self.tokens} tokens"


SHAPES = [Shape("671B", 7168, 2048, 8, experts, tokens) for experts in (32, 8, 64) for tokens in (4096, 16384)]
SHAPES += [Shape("16B", 2048, 1408, 6, 64, tokens) for tokens in (4096, 16384)]
TINY = [Shape("tiny", 256, 128, 3, 6, 64)]  # runs on a CPU

DEFAULTS = Fp8FlowMoEConfig()
MODES = {
    "save_h=fp8": Fp8FlowMoEConfig(save_h="fp8"),
    "recompute=none": Fp8FlowMoEConfig(recompute="none"),
    "recompute=none save_h=fp8": Fp8FlowMoEConfig(recompute="none", save_h="fp8"),
    "recompute=experts": Fp8FlowMoEConfig(recompute="experts"),
}


class Bench:
    """All variants of one shape's layer, sharing parameters, inputs and gradients."""

    def __init__(self, shape: Shape, gpus: int):
        self.shape, self.gpus, self.first = shape, gpus, None
        self.mesh = init_device_mesh(DEVICE, (gpus,), mesh_dim_names=("ep",)) if gpus > 1 else None
        self.cache = WeightCache()  # what all variants share: the weights never change here
        eager_experts = moe_module._run_experts_grouped_mm
        layers = {
            name: self._layer(name)
            for name in ("bf16 eager", "fp8 eager", "fp8", "fp8 forced balance", "bf16", "bf16 forced balance")
        }
        for name, moe in layers.items():
            if "eager" not in name:
                moe_module._run_experts_grouped_mm = eager_experts  # or torchtitan compiles what is compiled
                apply_compile(in_model(moe), Compile(enable=True), ep_enabled=gpus > 1)
        compiled_experts = moe_module._run_experts_grouped_mm
        self.flow = layers["fp8"]
        x_shape = (1, shape.tokens, shape.D)
        self.x = torch.randn(x_shape, device=DEVICE, dtype=torch.bfloat16).requires_grad_()
        self.dout = torch.randn(x_shape, device=DEVICE, dtype=torch.bfloat16)
        self.forwards = {
            name: self._forward(moe, eager_experts if "eager" in name else compiled_experts)
            for name, moe in layers.items()
        }
        self.forwards["fp8 with weight quantization"] = self._forward(self.flow, None, quantize_weights=True)
        for mode, config in MODES.items():
            self.forwards[f"fp8 {mode}"] = self._forward(self.flow, None, config)

    def _layer(self, name: str) -> MoE:
        with torch.device("meta"):
            dtype = torch.get_default_dtype()
            torch.set_default_dtype(torch.bfloat16)
            moe = MoE(self.shape.moe_args(self.gpus), self.shape.D, self.shape.H)
            torch.set_default_dtype(dtype)
        if "forced" not in name:
            moe.router.__class__ = BalancedRandomRouter
        if name.startswith("fp8"):
            Fp8FlowMoE.convert(moe, DEFAULTS)
        if self.mesh is not None:
            parallel.llama4_parallelize.apply_moe_ep_tp(in_model(moe), None, self.mesh, None, None)
        if self.first is None:
            moe.to_empty(device=DEVICE)
            with torch.no_grad():
                moe.init_weights(0.02, torch.device(DEVICE))
            self.first = moe
        for module, other in zip(moe.modules(), self.first.modules(), strict=True):
            module._parameters, module._buffers = other._parameters, other._buffers
        return moe

    def _forward(
        self, moe: MoE, run_experts: Callable | None, config: Fp8FlowMoEConfig = DEFAULTS,
        quantize_weights: bool = False,
    ) -> Callable[[], Tensor]:  # fmt: skip
        def forward() -> Tensor:
            moe_module._run_experts_grouped_mm = run_experts
            if isinstance(moe, Fp8FlowMoE):
                moe.experts.config, moe.experts.cache = config, None if quantize_weights else self.cache
            return moe(self.x)

        return forward

    def step(self, name: str) -> None:
        self.x.grad = None
        for p in self.first.parameters():
            p.grad = None
        self.forwards[name]().backward(self.dout)

    def routed_step(self) -> Callable[[], None]:
        """Forward and backward of :func:`routed_experts` alone, on plain tensors, with the route of the layer."""
        inputs = []
        hook = self.flow.experts.register_forward_pre_hook(lambda _, args: inputs.extend(args))
        self.forwards["fp8"]()  # with gradients, or torch.compile compiles the layer once more
        hook.remove()
        x_TD, topk_ids_TK, scores = inputs
        x_TD, scores_TK = (t.detach().requires_grad_() for t in (x_TD, scores.tensor))
        experts = self.flow.experts
        local = [w.to_local() if isinstance(w, DTensor) else w for w in (experts.w1, experts.w2, experts.w3)]
        weights = [w.detach().requires_grad_() for w in local]
        group = None if self.mesh is None else self.mesh.get_group()
        dout_TD = self.dout.view_as(x_TD)

        def run() -> None:
            for leaf in (x_TD, scores_TK, *weights):
                leaf.grad = None
            routed_experts(x_TD, *weights, topk_ids_TK, scores_TK, ep_group=group).backward(dout_TD)

        return run

    def saved_bytes(self, name: str) -> int:
        """Bytes of the storages that the forward keeps for the backward, parameters and their casts left out."""
        skip = {_storage(t).data_ptr() for t in itertools.chain(self.first.parameters(), self.first.buffers())}
        kept = {}

        def pack(t: Tensor) -> Tensor:
            if _storage(t).data_ptr() not in skip:
                kept[_storage(t).data_ptr()] = _storage(t).nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            out = self.forwards[name]()
        out.backward(self.dout)
        return sum(kept.values())

    def peak_bytes(self, name: str) -> int:
        """Bytes that a step allocates at its peak, beyond parameters, gradients and input."""
        self.step(name)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        self.step(name)
        return torch.cuda.max_memory_allocated() - before


def _storage(t: Tensor) -> torch.UntypedStorage:
    return (t.to_local() if isinstance(t, DTensor) else t).untyped_storage()


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
    start = time.perf_counter()
    if CUDA:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
    for _ in range(times):
        run()
    if not CUDA:
        return (time.perf_counter() - start) * 1e3 / times
    events[1].record()
    torch.cuda.synchronize()
    return events[0].elapsed_time(events[1]) / times


def warm_up(bench: Bench) -> dict[str, str]:
    """Runs every variant twice, which compiles it. Those that fail on any rank are taken out; returns their errors."""
    failed = {}
    for name in list(bench.forwards):
        error = None
        try:
            for _ in range(2):
                bench.step(name)
            if CUDA:
                torch.cuda.synchronize()
        except Exception as e:
            traceback.print_exc()
            error = _first_line(e)
        ok = torch.tensor(error is None, dtype=torch.int32)
        if dist.is_initialized():
            dist.all_reduce(ok, dist.ReduceOp.MIN)  # over gloo
        if not ok:
            failed[name] = error or "failed on another rank"
            del bench.forwards[name]
        if CUDA:
            torch.cuda.empty_cache()  # other shapes share the GPU by now
    return failed


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200] if str(error).strip() else ''}"


def capture(bench: Bench, name: str) -> Callable[[], None]:
    """A variant's step as a CUDA graph, which keeps the memory that the step allocates.

    Raises:
        RuntimeError: if the step cannot be captured, or if the graph's gradient of the input is another.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # autograd remembers on which stream a parameter's gradient was last added
        bench.step(name)
    expected = bench.x.grad
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        bench.step(name)
    graph.replay()
    error = float((bench.x.grad - expected).float().norm() / expected.float().norm())
    if not error < 1e-2:  # torchtitan's layer adds in another order each time
        raise RuntimeError(f"the graph's gradient of the input differs by {error:.2g}")
    return graph.replay


def times_of_graphs(bench: Bench, failed: dict[str, str], rounds: int, block_ms: float) -> dict[str, list[float]]:
    """Milliseconds per replay; what cannot be captured is added to ``failed``."""
    replays = {}
    for variant in ("fp8", "bf16"):
        if variant in bench.forwards:
            name = f"{variant} as a CUDA graph"
            try:
                replays[name] = capture(bench, variant)
            except Exception as e:
                traceback.print_exc()
                failed[name] = _first_line(e)
    return times_in_turn(replays, rounds, block_ms)


def times_in_turn(steps: dict[str, Callable[[], None]], rounds: int, block_ms: float) -> dict[str, list[float]]:
    """Milliseconds per step of each variant in each round."""
    repeats = {}
    for name, step in steps.items():
        count = torch.tensor(math.ceil(block_ms / elapsed(step, 2)))
        if dist.is_initialized():
            dist.broadcast(count, 0)
        repeats[name] = max(MIN_STEPS, int(count))
    times = {name: [] for name in steps}
    draw = random.Random(0)  # the same on all ranks
    for _ in range(rounds):
        for name in draw.sample(list(times), len(times)):
            # Half a turn's length untimed: the card's clocks still are those of what ran before, up to 3% apart.
            times[name].append(elapsed(steps[name], repeats[name], repeats[name] // 2))
    return times


def profile(run: Callable[[], None]) -> list[kernel_trace.Kernel]:
    """The kernels of PROFILED_STEPS calls. Without a GPU there are none."""
    run()
    synchronize()
    with kernel_trace.light_profiler() as profiler:
        for _ in range(PROFILED_STEPS):
            run()
        synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return kernel_trace.load(path)


def per_step(summary: dict[str, tuple[float, int]]) -> dict[str, tuple[float, float]]:
    return {name: (ms / PROFILED_STEPS, n / PROFILED_STEPS) for name, (ms, n) in summary.items()}


def measure(bench: Bench, failed: dict[str, str], rounds: int, block_ms: float) -> Iterator[dict]:
    """What is known of a shape, first without profiles, then with them, then with the graphs' times."""
    own = kernel_trace.own_kernels()
    result = {"shape": asdict(bench.shape), "gpus": bench.gpus, "failed": failed}
    steps = {name: functools.partial(bench.step, name) for name in bench.forwards}
    result["ms"] = times_in_turn(steps, rounds, block_ms)
    saved = [name for name in bench.forwards if "forced" not in name and "quantization" not in name]
    result["saved_bytes_per_token"] = {name: bench.saved_bytes(name) / bench.shape.tokens for name in saved}
    if CUDA:
        result["peak_bytes"] = {name: bench.peak_bytes(name) for name in saved}
    yield result
    names = [name for name in ("bf16", "fp8") if name in bench.forwards]
    traces = {name: profile(lambda: bench.step(name)) for name in names}  # noqa: B023
    result["classes"] = {name: per_step(kernel_trace.by_class(trace, own)) for name, trace in traces.items()}
    result["timelines"] = {name: kernel_trace.timeline(trace) for name, trace in traces.items() if trace}
    result["kernels"] = {name: per_step(kernel_trace.by_name(trace)) for name, trace in traces.items()}
    if "fp8" in traces:
        routed = profile(bench.routed_step())
        result["routed_experts"] = per_step(kernel_trace.by_name(routed))
        result["routed_experts_others"] = per_step(kernel_trace.by_name(k for k in routed if k.name not in own))
    yield result
    if CUDA and bench.gpus == 1:
        result["ms"] |= times_of_graphs(bench, failed, rounds, block_ms)
        yield result


def child(shape: Shape, args: argparse.Namespace) -> None:
    """Compiles, says so by a file, waits for a line on stdin, measures, writes the results and says that it is done."""
    rank, gpus = int(os.environ["RANK"]), args.gpus
    torch.manual_seed(rank)
    if CUDA:
        torch.cuda.set_device(rank)
    if gpus > 1:
        dist.init_process_group("cpu:gloo,cuda:nccl" if CUDA else "gloo")
    parallel.install()
    bench = Bench(shape, gpus)
    failed = warm_up(bench)
    gc.collect()
    gc.disable()  # as torchtitan's trainer does: no step waits for a collection
    synchronize()
    (args.child / f"{rank}.ready").touch()
    if not sys.stdin.readline():
        return
    for result in measure(bench, failed, args.rounds, args.block_ms):
        if rank == 0:
            write_text(args.child / "result.json", json.dumps(result))
    (args.child / f"{rank}.done").touch()
    if dist.is_initialized():
        dist.destroy_process_group()


class Processes:
    """A shape's processes, one per GPU; all that they write is in ``folder``."""

    def __init__(self, index: int, folder: Path, args: argparse.Namespace):
        self.folder = folder
        folder.mkdir()
        with socket.socket() as s:
            s.bind(("", 0))
            port = s.getsockname()[1]
        command = [sys.executable, "-m", "experiments.throughput.layer", "--out", str(args.out)]
        command += ["--index", str(index), "--child", str(folder), "--gpus", str(args.gpus)]
        command += ["--rounds", str(args.rounds), "--block-ms", str(args.block_ms), *["--tiny"] * args.tiny]
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


def records(result: dict) -> list[dict]:
    shape, ms = Shape(**result["shape"]), {k: statistics.median(v) for k, v in result["ms"].items()}
    label = f"{shape}, {result['gpus']} GPU{'s' * (result['gpus'] > 1)}"

    def record(name: str, value: float, unit: str, reference: str, reference_value: float) -> dict:
        return {
            "name": name.strip(), "shape": label, "value": value, "unit": unit, "reference": reference,
            "reference_value": reference_value, "speedup": reference_value / value,
        }  # fmt: skip

    unit, out = "ms forward + backward", []
    pairs = {
        "moe_layer": ("fp8", "bf16"),
        "moe_layer eager": ("fp8 eager", "bf16 eager"),
        "moe_layer forced balance": ("fp8 forced balance", "bf16 forced balance"),
        "moe_layer_with_weights": ("fp8 with weight quantization", "bf16"),
        "moe_layer as a CUDA graph": ("fp8 as a CUDA graph", "bf16 as a CUDA graph"),
    } | {f"moe_layer {mode}": (f"fp8 {mode}", "bf16") for mode in MODES}
    for name, (ours, bf16) in pairs.items():
        if ours in ms and bf16 in ms:
            how = "eager" if "eager" in bf16 else "compiled" + ", as a CUDA graph" * ("graph" in bf16)
            out.append(record(name, ms[ours], unit, f"torchtitan bf16, {how}", ms[bf16]))
    for r in (r for r in out if r["name"] == "moe_layer" and "classes" in result):
        r["classes"] = {
            who: {kind: round(time, 4) for kind, (time, _) in result["classes"][name].items()}
            for who, name in (("ours", "fp8"), ("reference", "bf16"))
        }
    for key, unit, title in (
        ("saved_bytes_per_token", "bytes per token", "saved"),
        ("peak_bytes", "bytes beyond parameters, gradients and input", "peak"),
    ):
        values = result.get(key, {})
        for name, value in values.items():
            if name.startswith("fp8") and name != "fp8 eager" and "bf16" in values:
                title_ = f"moe_layer {title} {name.removeprefix('fp8').strip()}"
                out.append(record(title_, value, unit, "torchtitan bf16, compiled", values["bf16"]))
    return out


def show(result: dict) -> None:
    shape, ms = Shape(**result["shape"]), {k: statistics.median(v) for k, v in result["ms"].items()}
    print(f"\n== {shape}, {result['gpus']} GPU(s)")
    for name, value in ms.items():
        kind = next((k for k in (" forced balance", " eager", " as a CUDA graph") if k in name), "")
        reference = ms.get(f"bf16{kind}")
        low, high = min(result["ms"][name]), max(result["ms"][name])
        saved = result["saved_bytes_per_token"].get(name)
        peak = result.get("peak_bytes", {}).get(name)
        print(
            f"{name:30} {value:8.3f} ms ({low:.3f} to {high:.3f})"
            + (f" {reference / value:5.2f}x" if reference else "")
            + (f"  saved {saved / 1024:6.1f} KiB/token" if saved else "")
            + (f"  peak {peak / 2**30:5.2f} GiB" if peak else "")
        )
    for name, error in result["failed"].items():
        print(f"{name:30} {error}")
    if "classes" not in result:
        return
    for label in dict.fromkeys(itertools.chain(*result["classes"].values())):
        cells = [result["classes"].get(name, {}).get(label, (0, 0)) for name in ("bf16", "fp8")]
        print(f"  {label:26}" + "".join(f"{t:10.3f} ms {n:5.0f}x" for t, n in cells))
    for name, line in result["timelines"].items():
        print(f"  {name}: " + ", ".join(f"{key} {value / PROFILED_STEPS:.3f}" for key, value in line.items()))
    print("  not this package's inside routed_experts, forward + backward:")
    for name, (t, n) in result.get("routed_experts_others", {}).items():
        print(f"    {n:4.1f}x {t * 1e3:8.1f} us  {name[:110]}")


def save(result: dict, out: Path, work: Path = WORK) -> None:
    """In place of what an earlier run may have written of this shape."""
    write_records(out / "results.json", records(result))
    path = work / f"layer_{result['gpus']}gpu.json"
    kept = json.loads(path.read_text()) if path.exists() else []
    kept = [r for r in kept if r["shape"] != result["shape"]]
    write_text(path, json.dumps([*kept, result]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of results.json")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--block-ms", type=float, default=80.0, help="length of a variant's turn, at least 5 steps")
    parser.add_argument("--together", type=int, default=4, help="shapes that compile at the same time")
    parser.add_argument("--budget", type=float, default=3600, help="seconds that all of it may take")
    parser.add_argument("--shapes", nargs="+", default=[""], help="only shapes whose name contains one of these")
    parser.add_argument("--tiny", action="store_true", help="a shape for a CPU")
    parser.add_argument("--index", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    shapes = TINY if args.tiny else SHAPES
    if args.child is not None:
        return child(shapes[args.index], args)
    exit_on_sigterm()
    args.out.mkdir(parents=True, exist_ok=True)
    # In the order of --shapes, then of SHAPES.
    selected = list(dict.fromkeys(i for part in args.shapes for i, shape in enumerate(shapes) if part in str(shape)))
    begin = time.monotonic()
    deadline = begin + args.budget
    with tempfile.TemporaryDirectory() as folder:
        for first in range(0, len(selected), args.together):
            if time.monotonic() > deadline:
                break
            batch = selected[first : first + args.together]
            started = {index: Processes(index, Path(folder) / str(index), args) for index in batch}
            errors = {}
            try:
                for index, processes in started.items():
                    errors[index] = processes.wait("ready", deadline)
                    if errors[index]:
                        processes.end()  # or what is left of it runs beside the measurements
                compiled = list(errors.values()).count(None)
                print(f"compiled {compiled} of {len(started)} shapes, {time.monotonic() - begin:.0f} s", flush=True)
                for index, processes in started.items():
                    error = errors[index] or processes.measure(deadline)
                    processes.end()
                    if result := processes.result():
                        show(result)
                        save(result, args.out)
                    if error:
                        print(f"{shapes[index]}: {error}\n{processes.logs()}")
                    print(f"  {time.monotonic() - begin:.0f} s", flush=True)
            finally:
                for processes in started.values():
                    processes.end()


if __name__ == "__main__":
    main()
