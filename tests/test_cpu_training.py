"""Training through torchtitan's own command line, on CPU processes: the loss falls in bf16 and in FP8."""

import json
import logging
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
from torchtitan.config import ConfigManager
from torchtitan.config.job_config import Debug
from torchtitan.distributed import utils
from torchtitan.models import attention

from tests.jobs import make_config, make_dims, make_model
from tests.processes import ended_well, run_workers, time_limit
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


def train(
    corpus: Path, tmp_path: Path, converters: list[str], n_processes: int, overrides: list[str], script: bool = False
) -> str:
    """Log of a run of train_configs/debug.toml with these model converters; with ``script`` through run_train.sh."""
    debug_toml = (ROOT / "train_configs/debug.toml").read_text()
    config = tmp_path / "config.toml"
    text, n_replaced = re.subn(r"(?m)^converters = .*$", f"converters = {json.dumps(converters)}", debug_toml)
    assert n_replaced == 1
    config.write_text(text.replace("outputs/corpus", str(corpus)))
    arguments = [*OVERRIDES, f"--job.dump_folder={tmp_path}", *overrides]
    if not script:
        run = run_workers(
            "-m", n_processes, "torchtitan.train", f"--job.config_file={config}", *arguments, cpu_only=True
        )
        assert ended_well(run) and DONE in run.stdout, run.stderr[-6000:]
        return run.stdout
    environment = os.environ | {
        "NGPU": str(n_processes),
        "LOG_RANK": ",".join(map(str, range(n_processes))),  # any may say why it ended
        "CONFIG_FILE": str(config),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",  # the CPU path, on a machine with GPUs too
        "HF_HOME": str(tmp_path / "hf"),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    }
    options = dict(cwd=ROOT, env=environment, capture_output=True, text=True, timeout=time_limit(120))
    run = subprocess.run(["tools/run_train.sh", *arguments], **options)
    log = run.stdout + run.stderr
    assert ended_well(run) and DONE in log, log[-6000:]
    return log


def losses(log: str, kind: str = "step") -> list[float]:
    found = re.findall(rf"(?m)^(?:\[rank0\]:)?\[titan\].*INFO - {kind}: +\d+ +loss: +(\S+)", log)
    return [float(loss) for loss in found]


@pytest.mark.parametrize(
    ("converters", "n_processes", "overrides"),
    [
        pytest.param([], 1, [], id="bf16", marks=pytest.mark.slow),
        pytest.param(["fp8_flow_moe"], 1, VALIDATION, id="fp8-validation"),
        pytest.param(["fp8_flow_moe"], 2, EP2 + OP_AC, id="fp8-ep2-op_ac"),
        pytest.param(["fp8_flow_moe"], 2, OP_AC, id="fp8-fsdp2-op_ac", marks=pytest.mark.slow),
    ],
)
def test_loss_falls(corpus: Path, tmp_path: Path, converters: list[str], n_processes: int, overrides: list[str]):
    log = train(corpus, tmp_path, converters, n_processes, overrides, script=n_processes > 1)
    loss = losses(log)
    assert len(loss) == STEPS
    assert loss[-1] < loss[0] - 2, loss
    assert ("mixed_precision_param defaults to float32" in log) is not cpu.has_fast_bf16()
    if overrides == VALIDATION:
        validation_loss = losses(log, "validate step")
        assert len(validation_loss) == 3  # after steps 1, 5 and 10
        assert validation_loss[-1] < validation_loss[0] - 2, validation_loss


@pytest.mark.parametrize(
    ("gpu", "launched", "fast", "expected"),
    [
        (False, True, False, "float32"),
        (True, True, False, "bfloat16"),
        (False, False, False, "bfloat16"),  # a dry run or an export, of a job on GPUs
        (False, True, True, "bfloat16"),
    ],
)
def test_a_rank_on_a_cpu_without_fast_bf16_computes_in_float32(
    monkeypatch: pytest.MonkeyPatch, caplog, gpu: bool, launched: bool, fast: bool, expected: str
):
    """Unless the job names a precision."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(torch.distributed, "is_torchelastic_launched", lambda: launched)
    monkeypatch.setattr(cpu, "has_fast_bf16", lambda: fast)
    cpu.compute_dtype.cache_clear()
    try:
        job = ConfigManager().parse_args(["--job.config_file=train_configs/debug.toml"])
        named = make_config("--training.mixed_precision_param=bfloat16")
    finally:
        cpu.compute_dtype.cache_clear()
    assert (job.training.mixed_precision_param, named.training.mixed_precision_param) == (expected, "bfloat16")
    assert job.training.seq_len == 256  # the table's other settings are the file's
    assert caplog.text.count("defaults to float32") == (expected == "float32")


@pytest.mark.skipif(torch.cuda.is_available(), reason="warned of on machines without a GPU")
def test_memory_is_the_peak_of_the_process():
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # in KiB
    assert all(peak <= bytes_ < 1.1 * peak for bytes_ in cpu._cpu_device_module().memory_stats().values())


def test_the_tiny_flavor_is_a_small_deepseek_v3():
    model = make_model(make_config())
    assert sum(p.numel() for p in model.parameters()) == 5_798_016
    router = model.layers["1"].moe.router
    assert (router.score_func, router.route_norm, router.route_scale) == ("sigmoid", True, 2.5)


def test_the_missing_grouped_gemm_is_no_news(caplog):
    with caplog.at_level(logging.WARNING):
        model = make_model(make_config())
        logging.warning("other warnings")
    assert not model.model_args.moe_args.use_grouped_mm
    assert "grouped mm" not in caplog.text and "other warnings" in caplog.text


def test_histc_takes_integers_too():
    histc, size = _histc_with_integers(torch.histc), 2**24
    assert torch.equal(histc(torch.tensor([0, 2, 2]), 3, 0, 3), torch.tensor([1, 0, 2]))
    doubles = torch.tensor([size + 1.0], dtype=torch.float64)  # fp32 would round it down
    assert histc(doubles, 2, size, size + 2).tolist() == [0, 1]


def test_masks_of_flex_attention_are_on_the_cpu(monkeypatch: pytest.MonkeyPatch):
    """A CUDA build names its accelerator without a driver too, and masks are made there by default."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("meta"))
    mask = attention.create_attention_mask(lambda b, h, i, j: i >= j, 1, None, 16, 16)
    assert mask.kv_num_blocks.device.type == "cpu"


@pytest.mark.skipif(torch.cuda.is_available(), reason="replaced on machines without a GPU")
def test_deterministic_jobs_keep_the_dense_attention(monkeypatch: pytest.MonkeyPatch):
    """torchtitan compiles flex attention anew for them, which has no backward on the CPU."""
    dense = attention.FlexAttentionWrapper._compiled_flex_attn
    monkeypatch.setattr(torch, "use_deterministic_algorithms", called := Mock())
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", False)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    utils.set_determinism(make_dims(), torch.device("cpu"), Debug(deterministic=True), [])
    called.assert_called_with(True, warn_only=False)
    assert attention.FlexAttentionWrapper._compiled_flex_attn is dense


def test_llama4_validates(corpus: Path, tmp_path: Path):
    """torchtitan's own validator gives its attention masks that it refuses."""
    overrides = ["--model.name=llama4", "--model.flavor=debugmodel", "--training.seq_len=128", "--training.steps=2"]
    log = train(corpus, tmp_path, ["fp8_flow_moe"], 1, [*VALIDATION, *overrides])
    assert losses(log, "validate step")


def test_validation_leaves_load_balancing_alone(monkeypatch: pytest.MonkeyPatch):
    model = nn.Module()
    model.moe = nn.Module()
    model.moe.register_buffer("tokens_per_expert", torch.arange(8.0))

    def count_tokens(validator: Validator, model_parts: list[nn.Module], step: int) -> None:
        model_parts[0].moe.tokens_per_expert.add_(1)

    monkeypatch.setattr(Validator, "validate", count_tokens)
    MoEValidator.validate(object.__new__(MoEValidator), [model], step=1)
    assert torch.equal(model.moe.tokens_per_expert, torch.arange(8.0))


def test_validation_without_room_is_an_error(monkeypatch: pytest.MonkeyPatch):
    """After the last step no optimizer would say so."""
    monkeypatch.setattr(Validator, "validate", lambda *_, **__: None)
    monkeypatch.setattr(flavors, "check_room", Mock(side_effect=RuntimeError("a larger dispatch_capacity")))
    with pytest.raises(RuntimeError, match="larger dispatch_capacity"):
        MoEValidator.validate(object.__new__(MoEValidator), [nn.Module()], step=1)
