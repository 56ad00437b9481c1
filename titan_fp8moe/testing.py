"""What tests, tools and experiments share: a reference MoE layer, timers for GPU kernels, and records of results.

Imports torch, Triton and the standard library only, so that it works wherever the package does.
"""

import datetime
import functools
import importlib.metadata
import json
import os
import platform
import random
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
import triton
import triton.testing
from torch import Tensor, nn
from triton.language.extra.cuda import globaltimer

from titan_fp8moe.recipe import TILE

# --- reference --------------------------------------------------------------------------------------------------------


class LayerInputs(NamedTuple):
    """Random inputs of an MoE layer.

    Attributes:
        x_TD: (T, D) tokens.
        topk_scores_TK: (T, K) fp32 in [0, 1).
        topk_ids_TK: (T, K) int64, K different experts for each token.
        weights: w1 (E, H, D), w2 (E, D, H) and w3 (E, H, D), fp32.
    """

    x_TD: Tensor
    topk_scores_TK: Tensor
    topk_ids_TK: Tensor
    weights: list[Tensor]


def make_layer(
    tokens: int,
    dim: int,
    hidden: int,
    experts: int,
    top_k: int,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    std: float = 0.05,
) -> LayerInputs:
    """Inputs of a layer: ``x_TD`` is normal in ``dtype``, weights are normal with standard deviation ``std``."""
    x_TD = torch.randn(tokens, dim, device=device, dtype=dtype)
    topk_scores_TK = torch.rand(tokens, top_k, device=device)
    topk_ids_TK = torch.rand(tokens, experts, device=device).topk(top_k, dim=1).indices
    shapes = (hidden, dim), (dim, hidden), (hidden, dim)
    weights = [torch.randn(experts, *shape, device=device) * std for shape in shapes]
    return LayerInputs(x_TD, topk_scores_TK, topk_ids_TK, weights)


def moe_layer(
    x_TD: Tensor,
    topk_scores_TK: Tensor,
    topk_ids_TK: Tensor,
    w1: Tensor,
    w2: Tensor,
    w3: Tensor,
    score_before_experts: bool,
) -> Tensor:
    """The routed experts from first principles, differentiable, in the precision of ``x_TD``.

    Sums score * W2 (silu(W1 x) * (W3 x)) over a token's experts, or with ``score_before_experts`` the experts applied
    to score * x. Shapes are those of :class:`LayerInputs`; returns (T, D).
    """
    out_TD = torch.zeros_like(x_TD)
    for e in range(w1.shape[0]):
        token, k = (topk_ids_TK == e).nonzero(as_tuple=True)
        score = topk_scores_TK[token, k].unsqueeze(1).to(x_TD.dtype)
        x = x_TD[token] * score if score_before_experts else x_TD[token]
        y = (F.silu(x @ w1[e].T) * (x @ w3[e].T)) @ w2[e].T
        out_TD = out_TD.index_add(0, token, y if score_before_experts else y * score)
    return out_TD


class _Block(nn.Module):
    def __init__(self, moe: nn.Module):
        super().__init__()
        self.moe, self.moe_enabled = moe, True


def in_model(moe: nn.Module) -> nn.Module:
    """A model of one block with this MoE layer, as torchtitan's parallelize functions expect it."""
    model = nn.Module()
    model.layers = nn.ModuleDict({"0": _Block(moe)})
    return model


def relative_error(out: Tensor, ref: Tensor) -> float:
    """||out - ref|| / ||ref|| in float64; NaN if either has one, which no threshold accepts."""
    return float((out.double() - ref.double()).norm() / ref.double().norm())


def group_ends(rows: int, experts: int, skewed: bool = False, device: str = "cuda") -> Tensor:
    """(experts,) int32 ends of row groups, multiples of 128 that end at ``rows``, the same in every run.

    Groups have 0.7 to 1.3 times the average number of rows. Skewed, one has half of the rows, a quarter of the groups
    has none and the others are equal.
    """
    if skewed:
        tiles = torch.full((experts,), rows // 2 // TILE // (experts - experts // 4 - 1))
        tiles[: experts // 4] = 0
        tiles[-1] += rows // TILE - tiles.sum()
    else:
        tiles = (torch.linspace(0.7, 1.3, experts) * (rows / experts / TILE)).round().long()
        tiles[experts // 2] += rows // TILE - tiles.sum()
    order = torch.randperm(experts, generator=torch.Generator().manual_seed(0))
    return (tiles[order] * TILE).cumsum(0).to(torch.int32).to(device)


def require_gpu() -> None:
    """Ends the program with one sentence if PyTorch finds no GPU, before anything is built for it."""
    if not torch.cuda.is_available():
        built = "" if torch.version.cuda else ", and is built without CUDA"
        sys.exit(f"error: this measures on a GPU, and PyTorch {torch.__version__} finds none{built}")


# --- time on a GPU ----------------------------------------------------------------------------------------------------

BACK_TO_BACK = "back to back"
AFTER_IDLING = "after idling"
WITH_BUSY_SMS = "with 16 busy SMs"
BUSY_SMS = 16


def elapsed_ms(run: Callable[[], object]) -> float:
    """Milliseconds between the GPU's arrival at ``run`` and its end."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def after_idling_ms(run: Callable[[], object], idle_s: float = 0.04) -> float:
    """Milliseconds of one run after the GPU has idled, with nothing of its operands in L2."""
    torch.cuda.synchronize()
    time.sleep(idle_s)
    torch.empty(2**28, dtype=torch.uint8, device="cuda").zero_()
    torch.cuda._sleep(2_000_000)  # longer than the host takes to launch
    return elapsed_ms(run)


def launched(rep_ms: int) -> Callable[[Callable[[], object]], Callable[[], float]]:
    """Makes back-to-back timers that launch from Python for ``rep_ms``, with a cold L2; for :func:`median_ms`."""

    def timer(run: Callable[[], object]) -> Callable[[], float]:
        return lambda: cast(float, triton.testing.do_bench(run, rep=rep_ms, return_mode="median"))

    return timer


def graphed(run: Callable[[], object], pool: Any = None, graph_ms: float = 3.0) -> Callable[[], float]:
    """A back-to-back timer for what the GPU runs faster than Python launches it, with a warm L2.

    A CUDA graph repeats ``run`` for ``graph_ms``; the timer returns milliseconds per run. Graphs of which none runs
    while another does may share the memory ``pool``, of ``torch.cuda.graph_pool_handle()``.
    """
    runs = max(1, round(graph_ms / after_idling_ms(run, 0)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        for _ in range(runs):
            run()

    def timer() -> float:
        graph.replay()
        return elapsed_ms(graph.replay) / runs

    return timer


@triton.jit(do_not_specialize=["nanoseconds"])
def _occupy_kernel(nanoseconds):
    start = globaltimer()
    now = start
    while now - start < nanoseconds:
        now = globaltimer()


def occupy(num_sms: int, ms: float) -> None:
    """Keeps SMs busy for a time: none of them has room for a CTA of a GEMM."""
    launch = _occupy_kernel[(num_sms,)]
    launch(int(ms * 1e6), num_warps=16)  # pyrefly: ignore[unexpected-keyword]


def with_busy_sms_ms(run: Callable[[], object], busy_ms: float) -> float:
    """Milliseconds of one run while ``BUSY_SMS`` SMs are busy on another stream, for at least ``busy_ms``."""
    torch.cuda.synchronize()
    time.sleep(0.01)
    stream = torch.cuda.Stream()
    torch.cuda._sleep(4_000_000)  # longer than the host takes to launch
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        occupy(BUSY_SMS, busy_ms)
    torch.cuda._sleep(30_000)
    return elapsed_ms(run)


def host_ms(run: Callable[[], object], runs: int = 20) -> float:
    """Milliseconds that the host takes to launch ``run``."""
    torch.cuda.synchronize()
    torch.cuda._sleep(20_000_000)
    start = time.perf_counter()
    for _ in range(runs):
        run()
    return (time.perf_counter() - start) / runs * 1e3


def _in_turn(timers: dict[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Median of each timer; in each round they run in a random order."""
    times: dict[str, list[float]] = {name: [] for name in timers}
    for _ in range(rounds):
        for name in random.sample(list(timers), len(timers)):
            times[name].append(timers[name]())
    return {name: statistics.median(ms) for name, ms in times.items()}


def median_ms(
    candidates: dict[str, Callable[[], object]],
    rounds: int,
    back_to_back: Callable[[Callable[[], object]], Callable[[], float]],
    rounds_after_idling: int = 5,
    idle_s: float = 0.04,
    rounds_with_busy_sms: int = 0,
) -> dict[str, dict[str, float]]:
    """Median milliseconds by state of the GPU and candidate.

    The states are ``BACK_TO_BACK``, where power limits the clocks, ``AFTER_IDLING`` and, if asked for,
    ``WITH_BUSY_SMS``, as communication occupies them. Candidates take turns, so that all of them meet the same clocks
    and temperature.

    Args:
        candidates: functions that launch; names of this package's begin with "ours".
        back_to_back: makes a timer, see :func:`launched` and :func:`graphed`.

    Raises:
        Exception: what one of this package's candidates raises. Another candidate that fails is left out and its error
            goes to stderr.
    """
    bursts = {}
    for name, run in candidates.items():
        try:
            run()
            bursts[name] = back_to_back(run)
        except Exception as error:
            if name.startswith("ours"):
                raise
            print(f"{name}: {str(error)[:150]}", file=sys.stderr)
    runs = {name: candidates[name] for name in bursts}
    states = {
        BACK_TO_BACK: _in_turn(bursts, rounds),
        AFTER_IDLING: _in_turn(
            {name: functools.partial(after_idling_ms, run, idle_s) for name, run in runs.items()}, rounds_after_idling
        ),
    }
    if rounds_with_busy_sms:
        busy_ms = 4 * max(states[AFTER_IDLING].values())
        timers = {name: functools.partial(with_busy_sms_ms, run, busy_ms) for name, run in runs.items()}
        states[WITH_BUSY_SMS] = _in_turn(timers, rounds_with_busy_sms)
    return states


# --- records ----------------------------------------------------------------------------------------------------------


@functools.cache
def commit() -> str | None:
    """The checkout's short commit, with "+" if Python, shell or TOML files differ from it.

    ``$TITAN_FP8MOE_COMMIT`` where that is set, as for a copy of the files; None where there is neither.
    """
    root = Path(__file__).parents[1]
    if (name := os.environ.get("TITAN_FP8MOE_COMMIT")) or not (root / ".git").exists():
        return name

    def git(*args: str) -> str:
        command = ["git", "-C", str(root), *args]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    changed = git("status", "--porcelain", "--", "*.py", "*.sh", "*.toml")
    return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def environment() -> dict[str, object]:
    """Where and how a number was measured: hardware, versions, commit, date and command, without a machine's paths."""
    gpus = torch.cuda.device_count()
    hardware = f"{gpus} x {torch.cuda.get_device_name()}" if gpus else f"CPU ({platform.machine()})"
    versions = {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda}
    for package in ("triton", "torchtitan", "torchao"):
        versions[package] = _version(package)
    spec = sys.modules["__main__"].__spec__  # None for a script that is run by its path
    module = ["-m", spec.name] if spec else []
    return {
        "hardware": hardware,
        "versions": versions,
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
        "command": shlex.join(["python", *module, *map(_name, sys.argv[1 if module else 0 :])]),
    }


def _name(argument: str) -> str:
    return os.path.basename(argument) if os.path.isabs(argument) else argument


def write_text(path: Path, text: str) -> None:
    """Replaces a file as a whole: a reader, or whoever ends this process, finds the old text or the new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.new")
    new.write_text(text)
    os.replace(new, path)


def write_records(path: Path, records: list[dict]) -> None:
    """Adds ``records`` to the list in ``path``, one per line.

    They replace records of the same name, shape and reference, and get the fields of :func:`environment` that they
    lack.
    """

    def key(record: dict) -> tuple[str, str, str]:
        return record["name"], json.dumps(record["shape"]), record["reference"]

    env = environment()
    new = {key(record): env | record for record in records}
    old = json.loads(path.read_text()) if path.exists() else []
    kept = [record for record in old if key(record) not in new]
    lines = ",\n".join(json.dumps(record) for record in kept + list(new.values()))
    write_text(path, f"[\n{lines}\n]\n")


def exit_on_sigterm() -> None:
    """Turns SIGTERM into SystemExit, so that ``finally`` blocks end the processes that this one has started."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
