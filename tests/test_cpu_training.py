"""torchtitan 0.2.2 on CPUs, its validation and the small model. ``tests/test_titan_jobs.py`` trains and resumes."""

import resource
from pathlib import Path

import pytest
import torch
from torch import nn
from torchtitan.components.validate import Validator

from tests.distributed.conftest import case_dir  # noqa: F401  a fixture
from tests.jobs import fp8_flags
from tests.test_titan_jobs import VALIDATION, logged, train
from titan_fp8moe.dispatch.symmetric.workspace import ROWS, Sizes, Workspace
from titan_fp8moe.torchtitan.cpu import _histc_with_integers
from titan_fp8moe.torchtitan.flavors import MoEValidator
from titan_fp8moe.trainer import cpu


@pytest.mark.skipif(torch.cuda.is_available(), reason="warned of on machines without a GPU")
def test_memory_is_the_peak_of_the_process():
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # in KiB
    assert all(peak <= bytes_ < 1.1 * peak for bytes_ in cpu._cpu_device_module().memory_stats().values())


def test_histc_takes_integers_too():
    histc, size = _histc_with_integers(torch.histc), 2**24
    assert torch.equal(histc(torch.tensor([0, 2, 2]), 3, 0, 3), torch.tensor([1, 0, 2]))
    doubles = torch.tensor([size + 1.0], dtype=torch.float64)  # fp32 would round it down
    assert histc(doubles, 2, size, size + 2).tolist() == [0, 1]


def test_llama4_validates(case_dir: Path, tmp_path: Path):  # noqa: F811
    """torchtitan's own validator gives its attention masks that it refuses."""
    flags = "--model.name=llama4", "--model.flavor=debugmodel", *fp8_flags(), *VALIDATION
    assert logged(train(case_dir, tmp_path, 2, *flags, ep=1), "validate step")


def test_validation_leaves_load_balancing_alone(monkeypatch: pytest.MonkeyPatch):
    """And ends with an error where rows had no room: after the last step no optimizer would say so."""
    model = nn.Module()
    model.moe = nn.Module()
    model.moe.register_buffer("tokens_per_expert", torch.arange(8.0))

    def count_tokens(validator: Validator, model_parts: list[nn.Module], step: int) -> None:
        model_parts[0].moe.tokens_per_expert.add_(1)

    monkeypatch.setattr(Validator, "validate", count_tokens)
    sizes = Sizes(1, 1, 128, 1, 1)
    at = Workspace(sizes, 0, [torch.zeros(sizes.nbytes, dtype=torch.uint8)], lambda: 1.0)
    at.report[ROWS] = 999
    with pytest.raises(RuntimeError, match="larger dispatch_capacity"):
        MoEValidator.validate(object.__new__(MoEValidator), [model], step=1)
    assert torch.equal(model.moe.tokens_per_expert, torch.arange(8.0))
