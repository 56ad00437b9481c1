"""Reads where a GPU's time goes from a torch.profiler trace, and records such traces of training steps."""

import gzip
import importlib
import itertools
import json
import math
import os
import pkgutil
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from triton.runtime.jit import JITFunction

import titan_fp8moe.dispatch
import titan_fp8moe.kernels
from titan_fp8moe.kernels import launch

_COPIES = "copy, fill, cast, cat"
# The first that matches a name decides. A kernel of torch.compile is named after all of its operators.
_CLASSES = [
    ("communication", r"nccl"),
    ("attention", r"flex_attention|triton_tem_|flash|fmha|sdpa"),  # GEMMs have templates with max-autotune only
    ("grouped GEMM", r"GroupProblemShape|grouped_gemm|^(?!triton_).*grouped_mm"),
    ("fp32 matmul", r"sgemm|f32f32_f32f32|gemv|gemmSN|gemmk1|simt_"),
    ("dense GEMM", r"nvjet|gemm|cutlass|splitK|cublas"),
    ("SwiGLU", r"silu"),
    ("sort and count", r"[sS]ort|topk|gatherTopK|[hH]istogram|[sS]can|cumsum|bitonic|fill_indices"),
    ("gather and scatter", r"(?<!with_)index|gather|scatter|_permute|_unpermute"),
    ("optimizer", r"multi_tensor_apply|foreach|adam|lpnorm"),
    (_COPIES, r"triton_\w+_fused_((_to_copy|_unsafe_view|cat|clone|copy|expand|full|slice|transpose|zeros)_)+\d+$"),
    ("compiled pointwise", r"triton_"),
    (_COPIES, r"Memcpy|Memset|[cC]opy|[fF]ill|Cat|zeros|_cat_"),
    ("other pointwise", r"elementwise|reduce_kernel"),
]  # fmt: skip
# Kernels of this package, by the module or package in it that defines them.
_OWN_CLASSES = {
    "dispatch.symmetric": "communication",
    "kernels.gemm": "grouped GEMM",
    "kernels.launch": "other pointwise",  # once per process
    "kernels.permute": "permute, pack, unpermute",
    "kernels.quantize": "quantize",
    "kernels.routing": "permute, pack, unpermute",
    "kernels.swiglu": "SwiGLU",
    "kernels.transpose": "transpose",
}


def own_kernels() -> dict[str, str]:
    """Class by name, of every kernel of this package.

    Raises:
        ValueError: for kernels in a module that has no class in ``_OWN_CLASSES``.
    """
    names = {}
    roots = titan_fp8moe.kernels, titan_fp8moe.dispatch
    packages = [pkgutil.walk_packages(root.__path__, f"{root.__name__}.") for root in roots]
    for info in itertools.chain(*packages):
        module = importlib.import_module(info.name)
        for name, value in vars(module).items():
            value = value.kernel if isinstance(value, launch.Kernel) else value
            if isinstance(value, JITFunction) and value.__module__ == module.__name__:
                child = ".".join(info.name.split(".")[1:3])
                if child not in _OWN_CLASSES:
                    raise ValueError(f"{info.name} defines {name}, but {__name__}._OWN_CLASSES has no {child!r}")
                names[name] = _OWN_CLASSES[child]
    return names


@dataclass
class Kernel:
    """A kernel, copy or fill on the GPU. Times in microseconds; ``launched`` is when the host asked for it,
    NaN where the trace does not say."""

    name: str
    start: float
    end: float
    launched: float
    stream: int

    @property
    def communication(self) -> bool:
        return "nccl" in self.name


def load(path: Path) -> list[Kernel]:
    """The kernels of a chrome trace written by torch.profiler, gzipped or not, in the order they started."""
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt") as file:
        events = json.load(file)["traceEvents"]
    launches = {
        e["args"]["correlation"]: e["ts"]
        for e in events
        if e.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in e.get("args", {})
    }
    kernels = [
        Kernel(e["name"], e["ts"], e["ts"] + e["dur"], launches.get(e["args"].get("correlation"), math.nan),
               e["args"].get("stream", 0))
        for e in events
        if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    ]  # fmt: skip
    return sorted(kernels, key=lambda k: k.start)


def classify(name: str, own: dict[str, str]) -> str:
    if name in own:
        return own[name]
    return next((label for label, pattern in _CLASSES if re.search(pattern, name)), "other")


def by_class(kernels: Iterable[Kernel], own: dict[str, str]) -> dict[str, tuple[float, int]]:
    """Milliseconds and launches of each class, longest first."""
    time, launches = Counter(), Counter()
    for kernel in kernels:
        label = classify(kernel.name, own)
        time[label] += (kernel.end - kernel.start) / 1e3
        launches[label] += 1
    return {label: (time[label], launches[label]) for label, _ in time.most_common()}


def _merge(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    merged = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _length(intervals: list[tuple[float, float]]) -> float:
    return sum(end - start for start, end in intervals)


def timeline(kernels: list[Kernel]) -> dict[str, float]:
    """Milliseconds from the first kernel's start to the last one's end, and of it:

    * ``communication``: a collective runs; ``exposed communication``: one runs and nothing else does,
    * ``idle``: nothing runs; ``host-bound``: nothing runs and the next kernel had not been launched when the GPU fell
      idle, up to its launch; ``idle, launch unknown``: the trace lacks the next kernel's launch, which lies before the
      trace began. The rest of the idle time is between a launch and its start: latency, or a wait for another rank or
      stream.
    """
    busy = _merge((k.start, k.end) for k in kernels)
    compute = _merge((k.start, k.end) for k in kernels if not k.communication)
    communication = _merge((k.start, k.end) for k in kernels if k.communication)
    launched = {}
    for k in kernels:
        launched[k.start] = min(k.launched, launched.get(k.start, k.launched))
    host_bound = unknown = 0.0
    for (_, idle_from), (start, _) in itertools.pairwise(busy):
        if math.isnan(launched[start]):
            unknown += start - idle_from
        else:
            host_bound += max(min(launched[start], start) - idle_from, 0.0)
    span = busy[-1][1] - busy[0][0]
    return {
        "span": span / 1e3,
        "communication": _length(communication) / 1e3,
        "exposed communication": (_length(busy) - _length(compute)) / 1e3,
        "idle": (span - _length(busy)) / 1e3,
        "host-bound": host_bound / 1e3,
        "idle, launch unknown": unknown / 1e3,
    }


def host_bound_share(line: dict[str, float]) -> float:
    """Of a :func:`timeline`, the fraction in which the GPU has nothing to run and the CPU has launched nothing. An
    unknown launch counts as the CPU's fault."""
    return (line["host-bound"] + line["idle, launch unknown"]) / line["span"]


def light_profiler() -> torch.profiler.profile:
    """Of the host's work only launches are recorded: more would slow it, and its gaps would show. Without a GPU there
    is nothing to see."""
    activity = torch.profiler.ProfilerActivity
    return torch.profiler.profile(activities=[activity.CUDA if torch.cuda.is_available() else activity.CPU])


TRACED = range(14, 18)
"""The steps, counted from 1, that a trace has. Four of them: torchtitan reads the loss at every second."""
TRACE_WRITTEN = "trace written"


def trace_steps(trainer: type, path: str) -> None:
    """Makes ``trainer`` leave a chrome trace of those steps."""
    train_step, steps = trainer.train_step, itertools.count(1)
    profiler = light_profiler()

    def traced(self, *args):
        step = next(steps)
        if step == TRACED.start:
            torch.cuda.synchronize()
            profiler.start()
        result = train_step(self, *args)
        if step == TRACED.stop - 1:
            torch.cuda.synchronize()
            profiler.stop()
            profiler.export_chrome_trace(path)
            print(TRACE_WRITTEN, flush=True)
        return result

    trainer.train_step = traced


def wait_for_turn(trainer: Callable[[], type]) -> None:
    """Makes rank 0 leave a trace in ``$THROUGHPUT_TRACE``, then waits for the file that ``$THROUGHPUT_GATE`` names."""
    if (trace := os.environ.get("THROUGHPUT_TRACE")) and os.environ.get("RANK") == "0":
        trace_steps(trainer(), trace)
    if gate := os.environ.get("THROUGHPUT_GATE"):
        while not Path(gate).exists():
            time.sleep(0.05)
