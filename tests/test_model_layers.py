"""experiments/kernels/model_layers.py: its candidates compute the same layer, and its main records them."""

import functools
import json
import sys

import pytest
import torch

from experiments.kernels import model_layers
from experiments.kernels.model_layers import FUSED, MODELS, SWIGLU, WHOLE


@pytest.mark.parametrize("name", MODELS)
def test_candidates_compute_the_same_layer(name, monkeypatch, tmp_path):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    out = tmp_path / "results.json"
    monkeypatch.setattr(sys, "argv", ["model_layers", "--tiny", "--trial", "--only", name, "--out", str(out)])
    model_layers.main()  # raises where results are 0.15 apart
    found = json.loads(out.read_text())
    clamped = [SWIGLU] if MODELS[name].spec.activation == "clamped_swiglu" else []
    assert [r["reference"] for r in found] == [WHOLE, FUSED, *clamped] and found[0]["value"] > 0
    assert {r["name"] for r in found} == {f"layer_{name}"}
    problem = model_layers.Problem(model_layers.tiny(MODELS[name]), "cpu")
    theirs = problem.fused()()
    with pytest.raises(RuntimeError, match="differ from ours by"):
        model_layers.check(problem.ours(MODELS[name].spec)(), [2 * each for each in theirs])
