"""The measurement of a dry run: the layers that it times, and what it says of them."""

import functools
import itertools
import sys

import pytest
import torch

from tests.layer import refused
from tests.processes import ROOT, call, run_script
from titan_fp8moe.trainer import measure
from titan_fp8moe.trainer.measure import Layer, describe, verdict

JOB = "--training.seq_len=64", "--training.local_batch_size=4", "--fp8_flow_moe.linear_fqns=attention.wo."


def layers_of(*arguments: str) -> list[Layer]:
    from titan_fp8moe.torchtitan import dry_run

    sys.argv = ["dry_run", str(ROOT / "train_configs/debug.toml"), *JOB, *arguments]
    built = dry_run.from_command_line(None)
    return [*measure.layers(built)]


def names(*arguments: str) -> list[str]:
    return [f"{layer.name}; {layer.tokens}" for layer in layers_of(*arguments)]


def on_a_cpu() -> list[str]:
    """By a clock for which bf16 takes 1 ms, and FP8 0.5 ms from 256 tokens on, or 2 ms."""
    turns = itertools.count()

    def clock(step: functools.partial) -> float:
        return 1.0 if next(turns) % 2 == 0 else 0.5 if len(step.func.__self__.leaves[0]) >= 256 else 2.0

    compiled = functools.partial(torch.compile, backend="aot_eager", fullgraph=True)
    return [line for layer in layers_of() for line in describe(layer, "cpu", clock, compiled)]


def test_one_layer_of_each_shape():
    """Expert parallelism leaves a rank fewer experts, but as many as a token has."""
    found = call(names)
    assert found[0].startswith("linear layers.0.attention.wo, ") and found[1].startswith("dense FFN layers.0.")
    assert found[2].startswith("MoE layer layers.1.moe, 8 experts, top 3, dims 256 and ") and len(found) == 3
    assert all(name.endswith("; 256") for name in found)
    parallel = call(names, "--parallelism.expert_parallel_degree=4")
    assert parallel[2].startswith("MoE layer layers.1.moe, 3 experts, top 3")


def test_what_it_says_of_a_layer():
    said = call(on_a_cpu)
    assert len(said) == 6
    for figures, sentence in zip(said[::2], said[1::2], strict=True):
        assert ": bf16 1.00 ms, FP8 0.50 ms (2.00x); saved " in figures
        bf16, fp8 = (float(error.rstrip("%")) for error in figures.split(" up to ")[1].split(" and "))
        assert 0 < bf16 < 2 < fp8 < 10, figures
        assert sentence == "FP8 pays with 256 tokens, below about 256 not (128: 0.50x)"


@pytest.mark.parametrize(("tokens", "gain", "said"), [
    (4096, lambda T: T / 1024, "FP8 pays with 4,096 tokens, below about 1,024 not (512: 0.50x)"),
    (1024, lambda T: 1.5, "FP8 pays with 1,024 tokens, also with 128 (128: 1.50x)"),
    (1024, lambda T: T / 4096, "FP8 does not pay with 1,024 tokens, only from about 4,096 on (1.00x)"),
    (4096, lambda T: 0.9, "FP8 does not pay with 4,096 tokens, nor with 65,536 (0.90x)"),
])  # fmt: skip
def test_the_verdict(tokens, gain, said):
    assert verdict(tokens, gain(tokens), gain) == said


@pytest.mark.skipif(torch.cuda.is_available(), reason="without a GPU")
def test_without_a_gpu():
    with refused("--measure times layers on a GPU", error=SystemExit):
        layers_of("--measure")


@pytest.mark.gpu
def test_on_a_gpu():
    job = str(ROOT / "train_configs/debug.toml"), *JOB, "--measure"
    done = run_script("-m", "titan_fp8moe.torchtitan.dry_run", *job, gpu=True, seconds=240)
    assert done.stdout.count("\n          FP8 ") == 3 and "not the gain of a step" in done.stdout, done.stderr
