"""The dry run of torchtitan 0.3 jobs: what a rank holds. Its mistakes are ``tests/test_titan_jobs.py``'s."""

import re
from pathlib import Path

import pytest

from tests.processes import call, run_script
from tests.test_warm_up import kernels_of_16b, kernels_of_job

FLAG = "--override.imports=titan_fp8moe.torchtitan03.fp8_flow_moe"
MTP = "--config=deepseek_v3_debugmodel_mtp", "--training.disable_cuda_graphs"


def run(*arguments: str) -> str:
    done = run_script("-m", "titan_fp8moe.torchtitan03.dry_run", *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_rank_of_many(tmp_path: Path):
    """The second pipeline stage of 671B on 256 ranks, which no machine of tests could allocate, nor its log begin."""
    degrees = ["--parallelism.expert_parallel_degree=64", "--parallelism.pipeline_parallel_degree=4"]
    logs = ["--metrics.enable_tensorboard", f"--dump_folder={tmp_path}"]
    said = run("--module=deepseek_v3", "--config=deepseek_v3_671b", FLAG, "--rank=100", *degrees, *logs)
    layout = "256 ranks = pp 4 x dp_replicate 1 x dp_shard 64 x cp 1 x tp 1\n          experts: ep 64 x etp 1 x fsdp 1"
    layers, experts = "layers 7, 8, 9, 10, 11, 12, 13, 14\n", "w1_EFD (256, 2048, 7168), on this rank (4, 2048, 7168)"
    for words in ("deepseek_v3 671B, 119 parts in FP8\n", layout, "\nrank 100  2,", layers, experts):
        assert words in said, said
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(("arguments", "said"), [
    # The quickstart's: layers of the 16B model as they are, of which one GPU holds four.
    (["--config=deepseek_v3_16b_short"], ["16B, 7 parts in FP8", "layers 0, 1, 2, 3 with", "on this rank (64, 1408"]),
    (["--module=examples.torchtitan03_config", "--config=my_run"], ["debugmodel, 11 parts in FP8", "layer 1, Fp8Flow"]),
    # The layer that predicts the token after next counts, with its shared experts.
    (["--module=deepseek_v3", *MTP, FLAG], ["debugmodel, 13 parts in FP8", "norm, lm_head, mtp_layers"]),
])  # fmt: skip
def test_what_a_rank_holds(arguments: list[str], said: list[str]):
    out = run(*arguments)
    assert not [words for words in said if words not in out], out


MEASURED = [  # of experiments/throughput/results.json: config, expert-parallel ranks, arguments, GiB
    ("16b:6:bf16", 1, (), 61.0),
    ("16b:6:fp8_flow", 1, ("--training.local_batch_size=1", "--training.no_disable_cuda_graphs"), 57.67),
    ("16b:27:fp8_flow", 4, ("--fp8_flow_moe.dispatch=symmetric",), 89.26),
]


@pytest.mark.parametrize(("config", "ranks", "arguments", "gib"), MEASURED)
def test_peaks_are_those_measured(config: str, ranks: int, arguments: tuple[str, ...], gib: float):
    job = f"--config={config}", f"--world-size={ranks}", f"--parallelism.expert_parallel_degree={ranks}"
    said = run("--module=experiments.throughput.setting03", *job, "--training.local_batch_size=4", *arguments)
    assert float(re.search(r"peak about ([\d.]+) GiB", said)[1]) == pytest.approx(gib, rel=0.06)


def test_the_kernels_of_a_job():
    """Of :mod:`titan_fp8moe.warm_up`: those of a layer and of an FFN, and those that one linear has besides."""
    job = "--module=deepseek_v3", "--config=deepseek_v3_16b", "--training.local_batch_size=1", "--training.seq_len=256"
    linear = "--parallelism.expert_parallel_degree=8", f'{FLAG}={{"linear_fqns": ["layers.0.attention.wo."]}}'
    found, expected = call(kernels_of_job, *job, *linear), call(kernels_of_16b, 256)
    kinds = {"_balance_exponent_kernel", "grouped_mm_hopper_kernel", "wgrad_hopper_kernel"}
    assert found > expected and {key.split()[0] for key in found - expected} == kinds
