"""experiments/convergence: pairs of runs, the statistics over pairs, and the noise of gradients."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch
from torchtitan.models.deepseek_v3 import deepseekv3_args
from torchtitan.models.deepseek_v3.model.model import DeepSeekV3Model

import titan_fp8moe.torchtitan  # noqa: F401  registers the flavor `tiny`
from experiments import check, tables
from experiments.convergence import compare, noise
from experiments.convergence.data import OnePass

ROOT = Path(__file__).parents[1]


@pytest.fixture
def corpus(tmp_path):
    rng = np.random.default_rng(0)
    for split, count in (("train", 3000), ("validation", 300)):
        np.save(tmp_path / f"{split}.npy", (rng.zipf(1.3, count) % 8192).astype(np.uint16))
    return tmp_path


def test_a_pass_reads_each_window_once(corpus):
    """The seed alone decides the order; the last batches are not among the first."""
    windows = OnePass(corpus, 8, 2, seed=1)
    batches = [labels for _, labels in windows]
    assert len(batches) == 3000 // 8 // 2
    assert len({*map(tuple, torch.cat(batches).tolist())}) == 2 * len(batches)
    first = [labels.tolist() for _, labels in OnePass(corpus, 8, 2, seed=1)]
    assert first == [labels.tolist() for labels in batches]
    assert first != [labels.tolist() for _, labels in OnePass(corpus, 8, 2, seed=2)]
    assert [labels.tolist() for _, labels in windows.last(3)] == first[-3:]
    ranks = [[labels.tolist() for _, labels in OnePass(corpus, 8, 2, 1, rank, 2)] for rank in range(2)]
    assert [batch for step in zip(*ranks, strict=True) for batch in step] == first[: len(first) // 2 * 2]


TINY = (
    *(
        "--model.flavor=tiny",
        "--training.seq_len=32",
        "--training.local_batch_size=2",
        "--training.global_batch_size=4",
    ),
    *(
        "--training.steps=3",
        "--lr_scheduler.warmup_steps=1",
        "--compile.no-enable",
        "--eval-windows=4",
        "--minibatches=2",
    ),
)


def train(name, corpus, *flags, ranks=1):
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
    command = [
        sys.executable,
        *torchrun,
        "-m",
        "experiments.convergence.pair",
        name,
        "--work",
        corpus,
        "--corpus",
        corpus,
    ]
    env = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([*command, *TINY, *flags], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def test_runs_of_a_pair_differ_by_the_recipe_alone(corpus):
    """Same weights and tokens, other arithmetic. Measuring the noise leaves the run as it is."""
    (corpus / "measured").mkdir()
    for split in ("train", "validation"):
        (corpus / "measured" / f"{split}.npy").symlink_to(corpus / f"{split}.npy")
    runs = [train("fp8-s1", corpus), train("bf16-s1", corpus)]
    runs.append(train("bf16-s1", corpus / "measured", "--noise-after", "0.3", "1"))
    for run in runs:
        _, errors = run.communicate()
        assert run.returncode == 0, errors.decode()[-2000:]
    found = compare.read_runs(corpus)
    (pair,) = compare.pairs_of(found)  # which checks weights and tokens
    assert len(pair.fp8.steps) == 3
    assert 0 < abs(pair.fp8.steps[0]["loss"] / pair.bf16.steps[0]["loss"] - 1) < 1e-3
    measured = compare.read_runs(corpus / "measured")["bf16-s1"]
    for key in ("loss", "grad_norm"):
        assert measured.column(key).tolist() == pair.bf16.column(key).tolist()
    assert measured.end == pair.bf16.end
    assert measured.noise.keys() == {"1", "3"}
    by_error = {name: figures["by_kind"]["routed w2"]["error"] for name, figures in measured.noise["3"].items()}
    assert by_error["fp8 against bf16"]["variance"] > by_error["bf16 against fp32"]["variance"] > 0


@pytest.mark.slow
def test_pair_of_two_ranks(corpus):
    """FP8 spreads the experts, bf16 holds them all: same weights and tokens."""
    runs = [
        train("fp8-s1", corpus, "--parallelism.expert_parallel_degree=2", ranks=2),
        train("bf16-s1", corpus, ranks=2),
    ]
    for run in runs:
        _, errors = run.communicate()
        assert run.returncode == 0, errors.decode()[-2000:]
    (pair,) = compare.pairs_of(compare.read_runs(corpus))
    assert 0 < abs(pair.fp8.end["held_out_loss"] / pair.bf16.end["held_out_loss"] - 1) < 1e-2


def a_run(seed_loss, steps=8, weights="w", tokens="t", noise=None):
    meta = {"steps": steps, "weights": weights, "tokens_per_step": 8, "parameters": 1}
    meta |= {"config": {"model": {"flavor": "tiny"}}, "environment": {"hardware": "CPU", "commit": "c", "date": "d"}}
    rest = {"grad_norm": 1.0, "tokens_per_second": 1.0, "seconds": 1}
    losses = [9.0] * (steps * 3 // 4) + [seed_loss] * (steps // 4)
    lines = [meta, *({"step": step, "loss": loss} | rest for step, loss in enumerate(losses, 1))]
    lines += [{"step": steps, "noise": noise}] if noise else []
    return [*lines, {"step": steps, "tokens_crc": tokens, "held_out_loss": seed_loss}]


def write(folder, name, lines, end="\n"):
    (folder / name).mkdir()
    (folder / name / "log.jsonl").write_text("\n".join(map(json.dumps, lines)) + end)


def test_effect_is_a_paired_t_interval(tmp_path):
    """Over pairs, of the last quarter alone; what seeds do to both runs cancels."""
    for seed, loss, deviation in ((1, 2.0, 0.001), (2, 3.0, 0.002), (3, 4.0, 0.003), (4, 5.0, 0.006)):
        write(tmp_path, f"bf16-s{seed}", a_run(loss))
        write(tmp_path, f"fp8-s{seed}", a_run(loss * (1 + deviation)))
    write(tmp_path, "bf16-s5", a_run(2.0))
    write(tmp_path, "fp8-s5", a_run(2.0)[:-2], end='\n{"step": 8, "lo')  # cut off
    runs = compare.read_runs(tmp_path)
    assert len(runs["fp8-s5"].steps) == 7
    pairs = compare.pairs_of(runs)
    assert [pair.seed for pair in pairs] == [1, 2, 3, 4]
    each = compare.deviations(pairs)
    effect = compare.Effect.of(each["training loss, last quarter"])
    deviation = np.std([0.001, 0.002, 0.003, 0.006], ddof=1)
    assert effect.mean == pytest.approx(0.003)
    assert effect.half_width == pytest.approx(3.1824 * deviation / 2, rel=1e-4)  # t of 3 degrees of freedom, 97.5%
    assert compare.Effect.of(each["held-out loss"]) == pytest.approx(effect)
    # (1.9921 * 0.00216 / 0.0005)^2 = 74.1
    assert effect.needed(0.0005) == 75
    saved = tmp_path / "saved.json"
    saved.write_text(json.dumps(runs))
    assert compare.deviations(compare.pairs_of(compare.read_runs(saved))) == each


@pytest.mark.parametrize(
    ("freedom", "quantile"), [(1, 12.7062), (2, 4.3027), (7, 2.3646), (30, 2.0423), (100, 1.9840), (101, 1.9837)]
)
def test_student_t(freedom, quantile):
    assert compare.student_t(freedom) == pytest.approx(quantile, abs=3e-4)


@pytest.mark.parametrize("change", [{"weights": "other"}, {"tokens": "other"}, {"steps": 16}])
def test_unlike_runs_are_no_pair(tmp_path, change):
    write(tmp_path, "fp8-s1", a_run(2.0))
    write(tmp_path, "bf16-s1", a_run(2.0, **change))
    with pytest.raises(SystemExit, match="seed 1 had other"):
        compare.pairs_of(compare.read_runs(tmp_path))


def test_records_give_tables_and_a_picture(tmp_path):
    """Of a bias that was not found, too."""
    part = {"square_of_mean": 4.0, "standard_error": 0.1, "variance": 12.0}
    exact = {"square_of_mean": -0.01, "standard_error": 0.1, "variance": 0.17}
    by_kind = {"all": {"gradient": part, "error": part | {"variance": 0.0}, "critical_tokens": 3e6}}
    exact_by_kind = {"all": {"gradient": part, "error": exact, "critical_tokens": None}}
    measured = {"fp8 against bf16": by_kind, "bf16 against fp32": exact_by_kind}
    measured = {name: {"minibatches": 2, "tokens": 8, "by_kind": kinds} for name, kinds in measured.items()}
    for seed, deviation in ((1, 0.001), (2, 0.003)):
        write(tmp_path, f"bf16-s{seed}", a_run(2.0, 64, noise=measured if seed == 1 else None))
        write(tmp_path, f"fp8-s{seed}", a_run(2.0 * (1 + deviation), 64))
    runs = compare.read_runs(tmp_path)
    pairs = compare.pairs_of(runs)
    records = compare.pair_records(pairs) + compare.noise_records(runs["bf16-s1"])
    found = tables.Records(json.loads(json.dumps(records, allow_nan=False)))
    # t of 1 degree of freedom: 12.706 * 0.1%
    assert "| tiny | held-out loss | 2.0000 | **+0.20% ± 1.27%** | 2 | 0.14% |" in tables.pairs(found)
    assert "| all | 50.0% | 100% | 173% | 3 | 10.0% | ∞ |" in tables.gradient_noise(found)
    alone = tables.Records(json.loads(json.dumps(compare.pair_records(pairs[:1]), allow_nan=False)))
    assert "| tiny | held-out loss | 2.0000 | +0.10% | 1 |\n" in tables.pairs(alone)
    # Pairs of another text count as of the same sample: 0.1, 0.3 and 0.5%, t of 2 degrees of freedom 4.303.
    other = compare.pair_records(pairs[:1])[0] | {"date": "e", "commit": "b", "reference_value": 5.0, "each": [0.005]}
    del other["points"]
    both = compare.pair_records(pairs, [other, other | {"date": "f", "shape": "another model"}])
    of_both = tables.pairs(tables.Records(both))
    assert "| tiny | training loss, last quarter | 3.0000 | **+0.30% ± 0.50%** | 3 | 0.20% |" in of_both
    assert check.commits_of(both[0]) == {"b", "c"}
    assert compare.pair_records(pairs, both) == both
    compare.draw(pairs, tmp_path / "pairs.png")
    assert (tmp_path / "pairs.png").stat().st_size > 1000


def draws(count, mean, scatter, rng, size=1000):
    """Gradients of two kinds of weights: |E x|^2 is ``mean``, E |x - E x|^2 ``scatter``, half of each in each kind."""
    expected = torch.full((size,), (mean / 2 / size) ** 0.5, dtype=torch.float64)
    names = "layers.1.moe.experts.w1", "layers.1.attention.wq.weight"
    for _ in range(count):
        yield {
            name: expected + (scatter / 2 / size) ** 0.5 * torch.from_numpy(rng.standard_normal(size)) for name in names
        }


def test_moments_are_means_over_pairs():
    """Against the sums written out."""
    vectors = [*draws(5, 1.0, 9.0, np.random.default_rng(0))]
    moments = noise.Moments()
    for vector in vectors:
        moments.add({name: values.clone() for name, values in vector.items()})
    flat = [torch.cat([*vector.values()]) for vector in vectors]
    mean = np.mean([(a @ b).item() for a, b in combinations(flat, 2)])
    found = moments.of("all")
    assert found["square_of_mean"] == pytest.approx(mean)
    assert found["variance"] == pytest.approx(torch.stack(flat).var(0).sum().item())
    parts = [moments.of(kind) for kind in ("routed w1", "attention")]
    assert sum(part["variance"] for part in parts) == pytest.approx(found["variance"])


def test_estimates_are_unbiased_and_know_their_error():
    rng = np.random.default_rng(1)
    found = []
    for _ in range(300):
        moments = noise.Moments()
        for vector in draws(16, 0.02, 1.0, rng):
            moments.add(vector)
        found.append(moments.of("all"))
    errors = np.array([each["square_of_mean"] - 0.02 for each in found])
    assert abs(errors.mean()) < 4 * errors.std() / 300**0.5
    assert 0.85 < np.mean([abs(e) <= 2 * each["standard_error"] for e, each in zip(errors, found, strict=True)]) < 0.99


def test_error_equals_noise_at_the_critical_batch():
    gradient = {"square_of_mean": 5.0, "standard_error": 0.1, "variance": 3.0}
    error = {"square_of_mean": 0.002, "standard_error": 0.0001, "variance": 0.5}
    tokens = noise.critical_tokens(gradient, error, 100)
    minibatches = tokens / 100
    assert error["square_of_mean"] + error["variance"] / minibatches == pytest.approx(
        gradient["variance"] / minibatches
    )
    assert noise.critical_tokens(gradient, error | {"standard_error": 0.002}, 100) is None


FP8_KINDS = "routed w1", "routed w2", "routed w3", "shared experts", "dense FFN"


def test_twins_share_parameters_and_nothing_else():
    """A twin's gradients are the model's own; no gradient and no count of tokens stays behind."""
    args = replace(deepseekv3_args["tiny"])
    args.moe_impl = "standard"  # which torchtitan sets from the job
    torch.manual_seed(0)
    model = DeepSeekV3Model(args)
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device("cpu"))
    noise.to_fp32(model)
    tokens, labels = torch.randint(0, args.vocab_size, (2, 2, 32))
    twins = [noise.twin(model, lambda: DeepSeekV3Model(args), convert) for convert in (noise.to_fp32, noise.to_fp8)]
    whole, parts = (noise.gradients(twins[0], torch.autocast("cpu", enabled=False), n, tokens, labels) for n in (1, 2))
    fp8 = noise.gradients(twins[1], torch.autocast("cpu", torch.bfloat16), 1, tokens, labels)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(not moe.tokens_per_expert.any() for moe in noise.moes(model))
    torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1).float(), labels.flatten()).backward()
    kinds = set()
    for name, parameter in model.named_parameters():
        for found in (whole, parts):
            torch.testing.assert_close(found[name], parameter.grad, rtol=1e-3, atol=1e-6)
        error = (fp8[name] - parameter.grad).norm() / parameter.grad.norm()
        kinds.add(kind := noise.kind_of(name))
        assert (0.02 if kind in FP8_KINDS else 1e-4) < error < 0.25, name
    assert kinds == {*noise.KINDS.values()}
    twins[0].tok_embeddings.weight.data.zero_()
    assert not model.tok_embeddings.weight.any()
