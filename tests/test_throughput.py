"""The parts of experiments/throughput that decide what its numbers mean."""

import math
from pathlib import Path

import pytest
import torch

from experiments.throughput.kernel_trace import Kernel, by_class, own_kernels, timeline
from experiments.throughput.routing import balanced_random_experts
from experiments.throughput.train import Run


@pytest.mark.parametrize("tokens,top_k,experts", [(4096, 6, 64), (1024, 8, 32), (512, 8, 8), (0, 2, 4)])
def test_balanced_random_experts(tokens, top_k, experts):
    chosen = balanced_random_experts(tokens, top_k, experts, torch.device("cpu"))
    assert chosen.shape == (tokens, top_k)
    assert (chosen.sort(1).values.diff(dim=1) > 0).all(), "a token has an expert twice"
    assert (torch.bincount(chosen.flatten(), minlength=experts) == tokens * top_k // experts).all()


def test_balanced_random_experts_spread_like_uniform_ones():
    """A token's 6 of 64 experts touch as many of 4 ranks as a uniform draw does; consecutive ones touch 1.25."""
    ranks = balanced_random_experts(4096, 6, 64, torch.device("cpu")) // 16
    touched = torch.stack([(ranks == r).any(1) for r in range(4)]).sum(0).double().mean()
    assert float(touched) == pytest.approx(4 * (1 - math.comb(48, 6) / math.comb(64, 6)), abs=0.03)


def test_timeline():
    kernels = [
        Kernel("a", 0, 10, -5, 7),
        Kernel("ncclDevKernel_SendRecv", 5, 20, 0, 8),
        Kernel("b", 30, 40, 25, 7),  # launched 5 us after the GPU fell idle
        Kernel("c", 45, 50, 1, 7),  # launched long before: not the host's fault
    ]
    expected = {"span": 50, "communication": 15, "exposed communication": 10, "idle": 15, "host-bound": 5}
    assert timeline(kernels) == pytest.approx({key: us / 1e3 for key, us in expected.items()})


def test_classes_know_this_package():
    own = own_kernels()
    assert {"_quantize_rows_kernel", "wgrad_hopper_kernel", "_swiglu_kernel"} <= set(own)
    names = ["wgrad_hopper_kernel", "void cutlass::device_kernel<GroupProblemShape<int>>", "Memset (Device)"]
    classes = by_class([Kernel(name, 0, 1000, 0, 7) for name in names], own)
    assert classes == {"grouped GEMM": (2.0, 2), "copy, fill, cast, cat": (1.0, 1)}


def test_log(tmp_path: Path):
    line = (
        "[rank0]:[titan] 2026-11-21 13:13:01,717 - root - INFO - step: {step:2}  loss:  8.21696  grad_norm:  1.2345  "
        "memory: 91.90GiB({step}.50%)  tps: 11,{step:03}  tflops: 1.00  mfu: 20.70%\n"
    )
    run = Run.__new__(Run)
    run.variant, run.seed, run.log = "bf16", 0, tmp_path / "log"
    run.log.write_text("".join(line.format(step=step) for step in range(2, 13, 2)))
    result = run.result()
    assert result["tokens_per_second"] == [11010, 11012] and result["median_tokens_per_second"] == 11011
    assert result["steady_steps"] == 4 and result["peak_memory_gib"] == 91.9
    assert list(result["losses"]) == [2, 4, 6, 8, 10, 12] and result["losses"][2] == 8.21696
