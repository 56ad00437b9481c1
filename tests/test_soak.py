"""The soak's layers are valid and varied, and it notices what it looks for (on a CPU, the reference against itself)."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from tests import soak
from titan_fp8moe import ops


def test_layers_are_varied():
    layers = [soak.draw(seed, 4096) for seed in range(200)]
    for field in ("routing", "shared", "score_before", "dtype", "experts", "top_k"):
        assert len({getattr(layer, field) for layer in layers}) > 1
    assert {layer.routing for layer in layers} == {*soak.ROUTINGS}
    assert len({str(layer.config) for layer in layers}) == 12 and max(layer.tokens for layer in layers) == 4096
    assert soak.draw(3, 512) == soak.draw(3, 512)


def test_seeds_go_on(monkeypatch, capsys):
    seconds = itertools.count()
    monkeypatch.setattr(soak, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    assert soak.run(first=5, seconds=3, largest=40, device="cpu") == 7
    assert "go on with --first 7" in capsys.readouterr().out


@pytest.mark.parametrize("spoil, message", [(1.02, "relative errors"), (None, "other bits")])
def test_what_differs_is_noticed(monkeypatch, spoil, message):
    """The specification is run while the kernels are switched off."""
    step, calls = soak.step, []

    def spoiled(*args):
        calls.append(args)
        results = step(*args)
        wrong = ops.backend.emulating() if spoil else len(calls) == 2
        return [t * 1.02 if wrong else t for t in results]

    monkeypatch.setattr(soak, "step", spoiled)
    with pytest.raises(SystemExit, match=f"error: seed 2, Layer.*{message}"):
        soak.run(first=2, seconds=60, largest=40, device="cpu")
    assert torch.is_grad_enabled()
