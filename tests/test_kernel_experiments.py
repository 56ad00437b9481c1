"""What experiments/kernels compares, and what its records mean, with times that are known."""

import functools
import json
import sys

import pytest
import torch

from experiments.kernels import ffn_shared, liger_cute, model_layers, sonicmoe, transformer_engine
from experiments.kernels.transformer_engine import KEPT, OURS, PEERS
from experiments.reference import relative_error
from experiments.timing import AFTER_IDLING, BACK_TO_BACK, covered


def test_covered_counts_overlaps_once_and_gaps_never():
    assert covered([(10, 12), (0, 4), (1, 2), (3, 6)]) == 8
    assert covered([]) == 0


def te_lines() -> list[dict]:
    """Ours takes 2 ms and TransformerEngine's ways 4, 6 and 8; after idling twice as long; kernels half of it. A step
    with kept weights is four microbatches."""
    ms = {name: 2.0 * i for i, name in enumerate((OURS, *PEERS), 1)}
    ms |= {name + KEPT: 3 * value for name, value in ms.items()}
    times = {BACK_TO_BACK: ms, AFTER_IDLING: {name: 2 * value for name, value in ms.items()}}
    return transformer_engine.lines(times, {name: value / 2 for name, value in ms.items()})


def test_records_of_transformer_engine():
    found = transformer_engine.records("16B, 64 experts per GPU, 8 tokens", te_lines())
    assert len(found) == len(PEERS) * 2 * 2
    by_key = {(r["name"], r["reference"], r["shape"].rpartition(", ")[2]): r for r in found}
    each = by_key["routed_experts_te", "TransformerEngine, native", AFTER_IDLING]
    assert (each["value"], each["reference_value"], each["speedup"]) == (4, 12, 3)
    assert (each["gpu_busy"], each["reference_gpu_busy"]) == (1, 3)
    kept = by_key["routed_experts_te, weights kept for 4 microbatches", "TransformerEngine, one weight", BACK_TO_BACK]
    assert (kept["value"], kept["reference_value"], kept["speedup"]) == (1.5, 6, 4)
    assert (kept["gpu_busy"], kept["reference_gpu_busy"]) == (0.75, 3)


def test_records_of_liger_cute():
    times = {"LigerCute": (8.0, 2.0), "ours, all_to_all": (4.0, 4.0), "ours, symmetric": (2.0, 1.0)}
    lines = [dict(candidate=name, ms=ms, forward_ms=forward) for name, (ms, forward) in times.items()]
    found = liger_cute.records("16B, 32 experts per GPU, 8 tokens, 2 GPUs", lines)
    assert [r["name"] for r in found] == ["routed_experts_ep_liger", "routed_experts_ep_liger dispatch=symmetric"]
    assert [(r["value"], r["reference_value"], r["speedup"]) for r in found] == [(4, 8, 2), (2, 8, 4)]
    assert [(r["forward"], r["reference_forward"]) for r in found] == [(4, 2), (1, 2)]


def test_a_ranks_share_of_a_problem():
    torch.manual_seed(0)
    problem = sonicmoe.Problem(sonicmoe.Sizes(128, 128, 4, 2), 64, "cpu", ranks=2)
    assert problem.experts.w1.shape[0] == 2 and problem.ids.max() == 3


def test_rows_of_gate_and_up_alternate_and_return():
    w13 = torch.arange(2 * 6 * 1.0).view(2, 6, 1)
    mixed = sonicmoe.interleave(w13)
    assert mixed[0].flatten().tolist() == [0, 3, 1, 4, 2, 5]
    out, dw13, dw2 = sonicmoe.gate_first(lambda: [w13[0], mixed, w13[1]])()
    assert torch.equal(dw13, w13) and torch.equal(out, w13[0]) and torch.equal(dw2, w13[1])


def test_candidates_compute_the_same_ffn(monkeypatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    torch.manual_seed(0)
    results = {name: run() for name, run in ffn_shared.candidates(256, 256, 384, "cpu").items()}
    names = ffn_shared.OURS, ffn_shared.WITH_CASTS, ffn_shared.REFERENCE
    for ours, cast, bf16 in zip(*(results[name] for name in names), strict=True):
        assert torch.equal(ours, cast)
        assert 0.01 < relative_error(ours.detach().view_as(bf16), bf16.detach()) < 0.1


def test_records_of_an_ffn():
    times = {"back to back": {ffn_shared.OURS: 2.0, ffn_shared.WITH_CASTS: 2.5, ffn_shared.REFERENCE: 3.0}}
    found = ffn_shared.records("16B shared, 4096 tokens", times, {"back to back": 2.0})
    assert [(r["name"], r["shape"], r["speedup"], r["share_of_roofline"]) for r in found] == [
        ("ffn_shared", "16B shared, 4096 tokens, back to back", 1.5, 0.75),
        ("ffn_shared_with_casts", "16B shared, 4096 tokens, back to back", 1.2, 0.6),
    ]


@pytest.mark.parametrize("name", ["gpt-oss-120B", "Nemotron-3-Nano", "Qwen3-Next"])
def test_candidates_compute_the_same_layer(name, monkeypatch, tmp_path):
    """Of a model with clamps and biases, one without gates, and one whose shared expert has a gate."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    out = tmp_path / "results.json"
    monkeypatch.setattr(sys, "argv", ["model_layers", "--tiny", "--trial", "--only", name, "--out", str(out)])
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
