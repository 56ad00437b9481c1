"""The dry run of torchtitan 0.3 jobs: what a rank holds, and mistakes that it finds."""

import os
import re
import subprocess
import sys

import pytest

from tests.processes import ROOT, call, time_limit
from tests.test_warm_up import kernels_of_16b, kernels_of_job
from titan_fp8moe.trainer import preflight

DEBUG = ["--config", "deepseek_v3_debugmodel", "--training.disable_cuda_graphs"]
FLAG = "--override.imports=titan_fp8moe.torchtitan03.fp8_flow_moe"


def run(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "titan_fp8moe.torchtitan03.dry_run", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=time_limit(60))


def test_a_rank_of_many(tmp_path):
    """The second pipeline stage of 671B on 256 ranks, which no machine of tests could allocate, nor its log begin."""
    degrees = ["--parallelism.expert_parallel_degree=64", "--parallelism.pipeline_parallel_degree=4"]
    logs = ["--metrics.enable_tensorboard", f"--dump_folder={tmp_path}"]
    done = run("--module=deepseek_v3", "--config=deepseek_v3_671b", FLAG, "--rank=100", *degrees, *logs)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line[:10].strip() in DESCRIBED]
    assert lines[0] == "model     deepseek_v3 671B, 119 parts in FP8"
    assert lines[1] == "layout    256 ranks = pp 4 x dp_replicate 1 x dp_shard 64 x cp 1 x tp 1"
    assert lines[2] == "          experts: ep 64 x etp 1 x fsdp 1"
    assert lines[4].startswith("rank 100  2,") and lines[4].endswith("GiB with gradients and Adam states")
    assert lines[6] == "          layers 7, 8, 9, 10, 11, 12, 13, 14"
    assert lines[9] == "          w1_EFD (256, 2048, 7168), on this rank (4, 2048, 7168)"
    assert not any(tmp_path.iterdir())


MEASURED = [  # of experiments/throughput/results.json: config, expert-parallel ranks, arguments, GiB
    ("16b:6:selective:fp8_flow", 1, (), 56.95),
    ("16b:6:selective:bf16", 1, (), 61.0),
    ("16b:6:selective:fp8_flow", 1, ("--training.local_batch_size=1", "--training.no_disable_cuda_graphs"), 57.67),
    ("16b:27:selective:fp8_flow", 4, ("--fp8_flow_moe.dispatch=symmetric",), 89.26),
    ("qwen3_30b:5:selective:fp8_flow", 1, (), 61.14),
]


@pytest.mark.parametrize(("config", "ranks", "arguments", "gib"), MEASURED)
def test_peaks_are_those_measured(config: str, ranks: int, arguments: tuple[str, ...], gib: float):
    job = f"--config={config}", f"--world-size={ranks}", f"--parallelism.expert_parallel_degree={ranks}"
    done = run("--module=experiments.throughput.setting03", *job, "--training.local_batch_size=4", *arguments)
    assert done.returncode == 0, done.stderr
    assert float(re.search(r"peak about ([\d.]+) GiB", done.stdout)[1]) == pytest.approx(gib, rel=0.06)


def test_the_quickstarts_model_on_a_gpu():
    """Layers of the 16B model as they are, of which one GPU holds four."""
    done = run("--config=deepseek_v3_16b_short")
    assert done.returncode == 0, done.stderr
    assert "model     deepseek_v3 16B, 7 parts in FP8" in done.stdout
    assert "layers 0, 1, 2, 3 with" in done.stdout and "rank 0    1,869,107,200 parameters" in done.stdout
    assert "w1_EFD (64, 1408, 2048), on this rank (64, 1408, 2048)" in done.stdout


def test_a_config_of_ones_own():
    done = run("--module=examples.torchtitan03_config", "--config=my_run")
    assert done.returncode == 0, done.stderr
    assert "debugmodel, 11 parts in FP8" in done.stdout and "layer 1, Fp8FlowGroupedExperts" in done.stdout


def test_multi_token_prediction():
    """Its layer counts, with its shared experts."""
    done = run("--module=deepseek_v3", "--config=deepseek_v3_debugmodel_mtp", DEBUG[-1], FLAG)
    assert done.returncode == 0, done.stderr
    assert "debugmodel, 13 parts in FP8" in done.stdout and "norm, lm_head, mtp_layers" in done.stdout


def test_the_kernels_of_a_job():
    """Of :mod:`titan_fp8moe.warm_up`: those of a layer and of an FFN, and those that one linear has besides."""
    job = "--module=deepseek_v3", "--config=deepseek_v3_16b", "--training.local_batch_size=1", "--training.seq_len=256"
    linear = "--parallelism.expert_parallel_degree=8", f'{FLAG}={{"linear_fqns": ["layers.0.attention.wo."]}}'
    found, expected = call(kernels_of_job, *job, *linear), call(kernels_of_16b, 256)
    kinds = {"_balance_exponent_kernel", "grouped_mm_hopper_kernel", "wgrad_hopper_kernel"}
    assert found > expected and {key.split()[0] for key in found - expected} == kinds


def test_a_dry_run_leaves_the_process_as_it_was():
    """A notebook may check a job before it trains one."""
    assert call(_left_by_a_dry_run) == ({}, True)


def _left_by_a_dry_run() -> tuple[dict[str, str], bool]:
    from titan_fp8moe.torchtitan03 import dry_run

    before = dict(os.environ)
    arguments = ["--parallelism.expert_parallel_degree=2", "--training.disable_cuda_graphs"]
    sys.argv = ["dry_run", "--config=deepseek_v3_debugmodel", *arguments]
    assert dry_run.from_command_line(None).dims.ep == 2
    left = {name: value for name, value in os.environ.items() if before.get(name) != value}
    return left, preflight.trains_here()


NO_SUCH = (
    "error: Config function 'no_such' not found in titan_fp8moe.torchtitan03.config_registry. "
    "Available config functions: ['deepseek_v3_16b', "
)
DESCRIBED = ("", "model", "layout", "batch", "rank 100", "experts")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([*DEBUG, "--training.global_batch_size=7"], "error: global batch size must be multiple of local batch size"),
        ([*DEBUG, "--parallelism.expert_parallel_degree=3"], "error: layers.1.moe: 8 experts do not divide over 3"),
        ([*DEBUG, "--rank=1"], "error: --world-size 1 has no rank 1"),
        (["--config=no_such"], NO_SUCH),
        (
            [*DEBUG, "--override.imports=torchtitan.overrides.fused_swiglu.fused_swiglu"],
            "error: Override 'titan_fp8moe.torchtitan03.fp8_flow_moe' claims 'model_spec.model.layers.1.moe', an ",
        ),
        (
            ["--module=deepseek_v3", *DEBUG, f'{FLAG}={{"h": 1}}'],
            "error: Fp8FlowMoEConfig.__init__() got an unexpected keyword argument 'h'",
        ),
        (
            ["--module=deepseek_v3", *DEBUG, f'{FLAG}={{"save_h": 1}}'],
            "error: fp8_flow_moe.save_h is 1; set it to one of",
        ),
    ],
    ids=["batch", "experts", "rank", "config", "override", "setting", "value"],
)
def test_mistakes_end_in_one_sentence(arguments, message):
    done = run(*arguments)
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and last.startswith(message), last
