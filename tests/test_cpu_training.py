"""torchtitan 0.2.2 on CPUs, its validation and the small model. ``tests/test_titan_jobs.py`` trains and resumes."""

import resource
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torchtitan.components.validate import Validator

from tests.distributed.conftest import case_dir as corpus  # noqa: F401  a fixture
from tests.processes import ended_well, run_workers
from titan_fp8moe.torchtitan import flavors
from titan_fp8moe.torchtitan.cpu import _histc_with_integers
from titan_fp8moe.torchtitan.flavors import MoEValidator
from titan_fp8moe.trainer import cpu


def train(corpus: Path, tmp_path: Path, converters: list[str], n_processes: int, overrides: list[str]) -> str:  # noqa: F811
    """Log of a run of train_configs/debug.toml with these model converters."""
    arguments = f"""
        --job.config_file=train_configs/debug.toml --job.dump_folder={tmp_path}
        --model.converters={",".join(converters)} --model.hf_assets_path={corpus}/tokenizer
        --training.dataset_path={corpus}/data --validation.dataset_path={corpus}/data --training.seq_len=128
        --training.local_batch_size=2 --lr_scheduler.warmup_steps=2 --metrics.log_freq=1
        --metrics.disable_color_printing
    """
    run = run_workers("-m", n_processes, "torchtitan.train", *arguments.split(), *overrides, cpu_only=True)
    assert ended_well(run) and "for other ranks to complete" in run.stdout, run.stderr[-6000:]
    return run.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="warned of on machines without a GPU")
def test_memory_is_the_peak_of_the_process():
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # in KiB
    assert all(peak <= bytes_ < 1.1 * peak for bytes_ in cpu._cpu_device_module().memory_stats().values())


def test_histc_takes_integers_too():
    histc, size = _histc_with_integers(torch.histc), 2**24
    assert torch.equal(histc(torch.tensor([0, 2, 2]), 3, 0, 3), torch.tensor([1, 0, 2]))
    doubles = torch.tensor([size + 1.0], dtype=torch.float64)  # fp32 would round it down
    assert histc(doubles, 2, size, size + 2).tolist() == [0, 1]


def test_llama4_validates(corpus: Path, tmp_path: Path):  # noqa: F811
    """torchtitan's own validator gives its attention masks that it refuses."""
    overrides = ["--model.name=llama4", "--model.flavor=debugmodel", "--training.steps=2", "--validation.enable"]
    overrides += ["--validation.freq=5", "--validation.steps=2", "--validation.seq_len=128"]
    assert "INFO - validate step: " in train(corpus, tmp_path, ["fp8_flow_moe"], 1, overrides)


def test_validation_leaves_load_balancing_alone(monkeypatch: pytest.MonkeyPatch):
    """And ends with an error where rows had no room: after the last step no optimizer would say so."""
    model = nn.Module()
    model.moe = nn.Module()
    model.moe.register_buffer("tokens_per_expert", torch.arange(8.0))

    def count_tokens(validator: Validator, model_parts: list[nn.Module], step: int) -> None:
        model_parts[0].moe.tokens_per_expert.add_(1)

    monkeypatch.setattr(Validator, "validate", count_tokens)
    monkeypatch.setattr(flavors, "check_room", Mock(side_effect=RuntimeError("a larger dispatch_capacity")))
    with pytest.raises(RuntimeError, match="larger dispatch_capacity"):
        MoEValidator.validate(object.__new__(MoEValidator), [model], step=1)
    assert torch.equal(model.moe.tokens_per_expert, torch.arange(8.0))
