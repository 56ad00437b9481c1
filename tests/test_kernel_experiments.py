"""The parts of experiments/kernels' peers that decide what their records mean, with times that are known."""

import functools
import json
import sys

import pytest
import torch

from experiments import tables
from experiments.kernels import dense, grouped_ffn, model_layers, sonicmoe, transformer_engine
from experiments.kernels.transformer_engine import KEPT, OURS, PEERS
from experiments.reference import largest_error
from experiments.timing import AFTER_IDLING, BACK_TO_BACK, covered


def test_covered_counts_overlaps_once_and_gaps_never():
    assert covered([(10, 12), (0, 4), (1, 2), (3, 6)]) == 8
    assert covered([]) == 0


def te_times() -> dict[str, dict[str, float]]:
    """Ours takes 2 ms and TransformerEngine's ways 4, 6 and 8; after idling twice as long; kernels half of it. A step
    with kept weights is four microbatches."""
    ms = {name: 2.0 * i for i, name in enumerate((OURS, *PEERS), 1)}
    ms |= {name + KEPT: 3 * value for name, value in ms.items()}
    factors = {BACK_TO_BACK: 1, AFTER_IDLING: 2, transformer_engine.GPU_BUSY: 0.5}
    return {state: {name: factor * value for name, value in ms.items()} for state, factor in factors.items()}


def test_records_of_transformer_engine():
    found = transformer_engine.records("16B, 64 experts per GPU, 8 tokens", te_times())
    assert len(found) == len(PEERS) * 2 * 2
    by_key = {(r["name"], r["reference"], r["shape"].rpartition(", ")[2]): r for r in found}
    each = by_key["routed_experts_te", "TransformerEngine, native", AFTER_IDLING]
    assert (each["value"], each["reference_value"], each["speedup"]) == (4, 12, 3)
    assert (each["gpu_busy"], each["reference_gpu_busy"]) == (1, 3)
    kept = by_key["routed_experts_te, weights kept for 4 microbatches", "TransformerEngine, one weight", BACK_TO_BACK]
    assert (kept["value"], kept["reference_value"], kept["speedup"]) == (1.5, 6, 4)
    assert (kept["gpu_busy"], kept["reference_gpu_busy"]) == (0.75, 3)


@pytest.mark.parametrize("experts,native", [(64, True), (128, False)])
def test_the_native_path_takes_64_weights(experts, native, monkeypatch):
    class Layer:
        def __init__(self, problem, **options):
            self.step = self.microbatches = self.results = None

    monkeypatch.setattr(transformer_engine, "Layer", Layer)
    monkeypatch.setattr(transformer_engine, "check", lambda *_: 0.1)
    problem = sonicmoe.Problem(sonicmoe.Sizes(128, 128, experts, 2), 4, "cpu")
    found = transformer_engine.candidates(problem)
    names = [OURS, *(peer for peer in PEERS if native or peer != "TransformerEngine, native")]
    assert sorted(found) == sorted(names + [name + KEPT for name in names])


def test_rows_of_gate_and_up_alternate_and_return():
    w13 = torch.arange(2 * 6 * 1.0).view(2, 6, 1)
    mixed = sonicmoe.interleave(w13)
    assert mixed[0].flatten().tolist() == [0, 3, 1, 4, 2, 5]
    out, dw13, dw2 = sonicmoe.gate_first(lambda: [w13[0], mixed, w13[1]])()
    assert torch.equal(dw13, w13) and torch.equal(out, w13[0]) and torch.equal(dw2, w13[1])


@pytest.mark.parametrize(
    "command,script",
    [
        ("python -m experiments.a.b --out c", "python -m experiments.a.b"),
        ("torchrun --nproc-per-node 2 a.py --out b.py", "torchrun --nproc-per-node 2 a.py"),
        ("bash experiments/a/run.sh long", "bash experiments/a/run.sh"),
    ],
)
def test_a_command_without_its_scripts_options(command, script):
    assert tables.script(command) == script


@pytest.mark.parametrize("name", ["gpt-oss-120B", "Nemotron-3-Nano", "Qwen3-Next"])
def test_candidates_compute_the_same_layer(name, monkeypatch, tmp_path):
    """Of a model with clamps and biases, one without gates, and one whose shared expert has a gate."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    out = tmp_path / "results.json"
    monkeypatch.setattr(sys, "argv", ["model_layers", "--tiny", "--only", name, "--out", str(out)])
    model_layers.main()  # raises where results are 0.15 apart
    found = json.loads(out.read_text())
    clamped = [model_layers.SWIGLU] if model_layers.MODELS[name].spec.activation == "clamped_swiglu" else []
    assert [r["reference"] for r in found] == [model_layers.WHOLE, model_layers.FUSED, *clamped]
    assert found[0]["value"] > 0
    assert {r["name"] for r in found} == {f"layer_{name}"}


def test_candidates_that_differ_end_the_run():
    model = model_layers.MODELS["gpt-oss-120B"]
    problem = model_layers.Problem(model_layers.tiny(model), "cpu")
    theirs = problem.fused()()
    with pytest.raises(RuntimeError, match="differ from ours by"):
        model_layers.check(problem.ours(model.spec)(), [2 * each for each in theirs])


def test_grouped_ffn_and_its_peers_compute_the_same(monkeypatch, tmp_path):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    out = tmp_path / "results.json"
    monkeypatch.setattr(sys, "argv", ["grouped_ffn", "--tiny", "--only", "16B", "--out", str(out)])
    grouped_ffn.main()  # raises where results are 0.15 apart
    found = json.loads(out.read_text())
    assert [r["reference"] for r in found] == [grouped_ffn.BF16_MM, grouped_ffn.ROUTED, grouped_ffn.PRODUCTS]
    assert found[0]["moves"] > 0


def test_dense_linears_and_their_roofline():
    """The candidates compute the same gradients; the bound is that of casts and GEMMs alone."""
    steps = dense.candidates(dense.Sizes(256, 192, 100), "cpu")
    assert largest_error(steps[dense.OURS](), steps[dense.REFERENCE]()) < 0.1
    assert largest_error(steps[dense.FFN](), steps[dense.REFERENCE_FFN]()) < 0.1
    for got, want in zip(steps[dense.KEPT](), steps[dense.OURS](), strict=True):
        assert torch.equal(got, want)
    bounds = {name: round(dense.roofline(sizes), 2) for name, sizes in dense.SHAPES.items()}
    assert bounds == {"16B, M 4096": 1.54, "16B, M 16384": 1.61, "671B, M 4096": 1.74, "671B, M 16384": 1.83}
