"""experiments/kernels/model_layers.py: its candidates compute the same layer, and its main records them."""

import functools
import json
import sys

import pytest
import torch

from experiments.kernels import model_layers
from experiments.kernels.model_layers import FUSED, MODELS, SWIGLU, WHOLE


@pytest.mark.parametrize("name", ["gpt-oss-120B", "Nemotron-3-Nano", "Qwen3-Next"])
def test_candidates_compute_the_same_layer(name, monkeypatch, tmp_path):
    """Of a model with clamps and biases, one without gates, and one whose shared expert has a gate."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    out = tmp_path / "results.json"
    monkeypatch.setattr(sys, "argv", ["model_layers", "--tiny", "--trial", "--only", name, "--out", str(out)])
    model_layers.main()  # raises where results are 0.15 apart
    found = json.loads(out.read_text())
    clamped = [SWIGLU] if MODELS[name].spec.activation == "clamped_swiglu" else []
    assert [r["reference"] for r in found] == [WHOLE, FUSED, *clamped] and found[0]["value"] > 0
    assert {r["name"] for r in found} == {f"layer_{name}"}


def test_candidates_that_differ_end_the_run():
    model = MODELS["gpt-oss-120B"]
    problem = model_layers.Problem(model_layers.tiny(model), "cpu")
    theirs = problem.fused()()
    with pytest.raises(RuntimeError, match="differ from ours by"):
        model_layers.check(problem.ours(model.spec)(), [2 * each for each in theirs])
