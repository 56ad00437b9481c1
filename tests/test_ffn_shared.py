"""experiments/kernels/ffn_shared.py: its candidates compute the same, and its records say against what."""

import functools

import torch

from experiments.kernels import ffn_shared
from experiments.kernels.ffn_shared import OURS, REFERENCE, WITH_CASTS
from experiments.reference import relative_error


def test_candidates_compute_the_same_ffn(monkeypatch):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    torch.manual_seed(0)
    results = {name: run() for name, run in ffn_shared.candidates(256, 256, 384, "cpu").items()}
    for ours, cast, bf16 in zip(results[OURS], results[WITH_CASTS], results[REFERENCE], strict=True):
        assert torch.equal(ours, cast)
        assert 0.01 < relative_error(ours.detach().view_as(bf16), bf16.detach()) < 0.1


def test_records_of_an_ffn():
    times = {"back to back": {OURS: 2.0, WITH_CASTS: 2.5, REFERENCE: 3.0}}
    found = ffn_shared.records("16B shared, 4096 tokens", times, {"back to back": 2.0})
    assert [(r["name"], r["shape"], r["speedup"], r["share_of_roofline"]) for r in found] == [
        ("ffn_shared", "16B shared, 4096 tokens, back to back", 1.5, 0.75),
        ("ffn_shared_with_casts", "16B shared, 4096 tokens, back to back", 1.2, 0.6),
    ]
