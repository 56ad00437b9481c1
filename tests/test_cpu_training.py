"""Training through torchtitan's own command line, on CPU processes: the loss falls in bf16 and in FP8."""

import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from torchtitan.components.validate import Validator

from tests.jobs import make_config, make_model
from tests.processes import CPU, ended_well, run_workers, time_limit
from titan_fp8moe.torchtitan import flavors
from titan_fp8moe.torchtitan.cpu import _histc_with_integers
from titan_fp8moe.torchtitan.flavors import MoEValidator
from titan_fp8moe.trainer import cpu

ROOT = Path(__file__).parent.parent
STEPS = 10
OVERRIDES = [
    f"--training.steps={STEPS}",
    "--training.seq_len=128",
    "--training.local_batch_size=2",
    "--lr_scheduler.warmup_steps=2",
    "--metrics.log_freq=1",
    "--metrics.disable_color_printing",
]
EP2 = ["--parallelism.expert_parallel_degree=2"]
VALIDATION = ["--validation.enable", "--validation.freq=5", "--validation.steps=2", "--validation.seq_len=128"]
DONE = "for other ranks to complete"  # what rank 0 says at the end
OP_AC = ["--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=op"]
# Of torchtitan 0.2.2's models/deepseek_v3/train_configs/debug_model.toml, which its wheel lacks, what is no default.
DEBUG_MODEL = """
metrics = { log_freq = 1 }
optimizer = { lr = 8e-4 }
lr_scheduler = { warmup_steps = 2, decay_ratio = 0.8, decay_type = "linear", min_lr_factor = 0.0 }
training = { dataset = "c4_test" }
activation_checkpoint = { mode = "selective", selective_ac_option = "op" }
quantize.linear.float8 = { filter_fqns = ["output", "router.gate"] }
quantize.grouped_mm.float8 = { fqns = ["experts"] }
[model]
name = "deepseek_v3"
flavor = "debugmodel"
"""
SWITCHED_ON = ["--job.custom_config_module", "titan_fp8moe.torchtitan", "--model.converters", "fp8_flow_moe"]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level tokenizer and predictable text, laid out as tools/build_corpus.py does."""
    folder = tmp_path_factory.mktemp("corpus")
    names = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<s>", "</s>"]
    tokenizer = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    (folder / "tokenizer").mkdir()
    tokenizer.save(str(folder / "tokenizer/tokenizer.json"))
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer/tokenizer_config.json").write_text(json.dumps(special))
    for split in ("train", "validation"):
        (folder / split).mkdir()
        texts = (f"{i} and {i + 1} make {2 * i + 1}. " * 20 for i in range(200))
        (folder / split / "part.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return folder


def train(corpus: Path, tmp_path: Path, converters: list[str], n_processes: int, overrides: list[str]) -> str:
    """Log of a run of train_configs/debug.toml with these model converters."""
    debug_toml = (ROOT / "train_configs/debug.toml").read_text()
    config = tmp_path / "config.toml"
    text, n_replaced = re.subn(r"(?m)^converters = .*$", f"converters = {json.dumps(converters)}", debug_toml)
    assert n_replaced == 1
    config.write_text(text.replace("outputs/corpus", str(corpus)))
    arguments = [f"--job.config_file={config}", *OVERRIDES, f"--job.dump_folder={tmp_path}", *overrides]
    run = run_workers("-m", n_processes, "torchtitan.train", *arguments, cpu_only=True)
    assert ended_well(run) and DONE in run.stdout, run.stderr[-6000:]
    return run.stdout


def losses(log: str, kind: str = "step") -> list[float]:
    found = re.findall(rf"(?m)^(?:\[rank0\]:)?\[titan\].*INFO - {kind}: +\d+ +loss: +(\S+)", log)
    return [float(loss) for loss in found]


@pytest.mark.parametrize(("n_processes", "overrides"), [(1, VALIDATION), (2, EP2 + OP_AC)])
def test_loss_falls(corpus: Path, tmp_path: Path, n_processes: int, overrides: list[str]):
    log = train(corpus, tmp_path, ["fp8_flow_moe"], n_processes, overrides)
    loss = losses(log)
    assert len(loss) == STEPS * n_processes  # all ranks say so
    assert loss[-1] < loss[0] - 2, loss
    assert ("mixed_precision_param defaults to float32" in log) is not cpu.has_fast_bf16()
    if overrides == VALIDATION:
        validation_loss = losses(log, "validate step")
        assert len(validation_loss) == 3  # after steps 1, 5 and 10
        assert validation_loss[-1] < validation_loss[0] - 2, validation_loss


def test_two_flags_switch_on_fp8_for_torchtitans_own_file(corpus: Path, tmp_path: Path):
    """With torchrun, from a folder that is no checkout."""
    (tmp_path / "debug_model.toml").write_text(DEBUG_MODEL)
    options = {
        "job.config_file": tmp_path / "debug_model.toml",
        "job.dump_folder": tmp_path,
        "model.hf_assets_path": corpus / "tokenizer",
        "training.dataset_path": corpus / "train",
        "training.seq_len": 64,
        "training.local_batch_size": 2,
        "training.steps": 3,
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "-m", "torchtitan.train"]
    command += [*(f"--{name}={value}" for name, value in options.items()), *SWITCHED_ON, *EP2]
    process: dict = dict(cwd=tmp_path, env=os.environ | CPU | {"PYTHONPATH": str(ROOT)}, timeout=time_limit(120))
    run = subprocess.run(command, capture_output=True, text=True, **process)
    log = re.sub(r"\x1b\[[\d;]*m", "", run.stdout + run.stderr)
    assert ended_well(run) and DONE in log, log[-6000:]
    assert "5 MoE layers, 5 shared experts, 1 dense FFNs, 0 linears in FP8" in log
    assert len(losses(log)) == 3 * 2  # torchrun shows all ranks


def test_a_filter_on_the_command_line_is_bf16(corpus: Path, tmp_path: Path):
    """As no converter: the same losses and gradient norms to the last digit that the log has."""
    same = "--training.steps=3", "--debug.seed=0"
    log = train(corpus, tmp_path, ["fp8_flow_moe"], 1, [*same, "--fp8_flow_moe.filter_fqns=layers"])
    assert "0 MoE layers, 0 shared experts, 0 dense FFNs, 0 linears in FP8" in log
    bf16 = train(corpus, tmp_path, [], 1, [*same])
    figures = re.compile(r"step: +\d+ +loss: +\S+ +grad_norm: +\S+")
    assert len(figures.findall(bf16)) == 3 and figures.findall(log) == figures.findall(bf16)


@pytest.mark.skipif(torch.cuda.is_available(), reason="warned of on machines without a GPU")
def test_memory_is_the_peak_of_the_process():
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # in KiB
    assert all(peak <= bytes_ < 1.1 * peak for bytes_ in cpu._cpu_device_module().memory_stats().values())


def test_the_tiny_flavor_is_a_small_deepseek_v3():
    model = make_model(make_config())
    assert sum(p.numel() for p in model.parameters()) == 5_798_016
    router = model.layers["1"].moe.router
    assert (router.score_func, router.route_norm, router.route_scale) == ("sigmoid", True, 2.5)


def test_histc_takes_integers_too():
    histc, size = _histc_with_integers(torch.histc), 2**24
    assert torch.equal(histc(torch.tensor([0, 2, 2]), 3, 0, 3), torch.tensor([1, 0, 2]))
    doubles = torch.tensor([size + 1.0], dtype=torch.float64)  # fp32 would round it down
    assert histc(doubles, 2, size, size + 2).tolist() == [0, 1]


def test_llama4_validates(corpus: Path, tmp_path: Path):
    """torchtitan's own validator gives its attention masks that it refuses."""
    overrides = ["--model.name=llama4", "--model.flavor=debugmodel", "--training.seq_len=128", "--training.steps=2"]
    log = train(corpus, tmp_path, ["fp8_flow_moe"], 1, [*VALIDATION, *overrides])
    assert losses(log, "validate step")


def test_validation_leaves_load_balancing_alone(monkeypatch: pytest.MonkeyPatch):
    """Also where an error ends it."""
    model = nn.Module()
    model.moe = nn.Module()
    model.moe.register_buffer("tokens_per_expert", torch.arange(8.0))

    def count_tokens(validator: Validator, model_parts: list[nn.Module], step: int) -> None:
        model_parts[0].moe.tokens_per_expert.add_(1)
        raise RuntimeError("out of memory")

    monkeypatch.setattr(Validator, "validate", count_tokens)
    with pytest.raises(RuntimeError, match="out of memory"):
        MoEValidator.validate(object.__new__(MoEValidator), [model], step=1)
    assert torch.equal(model.moe.tokens_per_expert, torch.arange(8.0))


def test_validation_without_room_is_an_error(monkeypatch: pytest.MonkeyPatch):
    """After the last step no optimizer would say so."""
    monkeypatch.setattr(Validator, "validate", lambda *_, **__: None)
    monkeypatch.setattr(flavors, "check_room", Mock(side_effect=RuntimeError("a larger dispatch_capacity")))
    with pytest.raises(RuntimeError, match="larger dispatch_capacity"):
        MoEValidator.validate(object.__new__(MoEValidator), [nn.Module()], step=1)
