"""The package's own comparison of kernels with the specification runs them all, and finds that they agree."""

import sys

import torch

from tests.kernels.conftest import INTERPRETED
from titan_fp8moe import ops
from titan_fp8moe.activations import ACTIVATIONS
from titan_fp8moe.dispatch.symmetric import kernels as symmetric_kernels
from titan_fp8moe.kernels import launch, swiglu
from titan_fp8moe.kernels.launch import Kernel, _probe_kernel
from titan_fp8moe.ops import self_check


def test_the_probe_stores_its_arguments(device, monkeypatch):
    """On a GPU, where its launches decide whether others are fast, launched here and by Triton."""
    monkeypatch.setattr(launch, "_fast", None)
    assert INTERPRETED or launch._is_fast()
    for fast in (True, False):
        monkeypatch.setattr(launch, "_fast", fast)
        assert launch.launch_probe(device).tolist() == [3, 5, 1, 48, 7, 2**40 + 1, 9, 2]


def test_every_kernel_is_run_and_agrees(monkeypatch):
    """Without a GPU the interpreter's kernels stand for it; Gluon's have no interpreter."""
    launched, launch_kernel = set(), Kernel._launch
    monkeypatch.setattr(Kernel, "_launch", lambda k, *args, **kw: launched.add(k) or launch_kernel(k, *args, **kw))
    if INTERPRETED:
        on, run = [], self_check.run
        monkeypatch.setattr(ops.backend, "use_kernels", lambda x: bool(on))

        def run_here(case, device):
            on[:] = [True] * (device == "cuda")
            return run(case, "cpu")

        monkeypatch.setattr(self_check, "run", run_here)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert self_check.self_check() == []
    modules = [m for name, m in sys.modules.items() if ".kernels" in name and name.startswith("titan_fp8moe.")]
    modules.remove(symmetric_kernels)  # other ranks take part in them
    kernels = {value for module in modules for value in vars(module).values() if isinstance(value, Kernel)}
    kernels |= {kernel(name, False, False) for name in ACTIVATIONS for kernel in (swiglu._forward, swiglu._backward)}
    absent = {kernel.kernel.__name__ for kernel in kernels - launched - {_probe_kernel}}
    assert absent == ({"grouped_mm_hopper_kernel", "wgrad_hopper_kernel"} if INTERPRETED else set())
