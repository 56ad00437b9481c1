"""torchtitan 0.3's own command line on two expert-parallel processes: options, validation, a checkpoint, resuming, and
the export of what it saves."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import titan_fp8moe.torchtitan03  # noqa: F401  uses the CPU
from tests.processes import ended_well, time_limit

ROOT = Path(__file__).parents[2]
OPTIONS = """
    --module tests.torchtitan03.small --config deepseek_v3_16b --compile.backend aot_eager
    --parallelism.expert_parallel_degree 2 --training.disable_cuda_graphs
    --training.seq_len 64 --training.local_batch_size 2 --training.steps 3 --debug.seed 1
    --metrics.disable_color_printing --metrics.log_freq 1
    --dataloader.dataset c4_test --checkpoint.enable --checkpoint.interval 2
    --validator.enable --validator.freq 2 --validator.steps 1 --validator.dataloader.dataset c4_test
"""


FP8 = ["--override.imports", 'titan_fp8moe.torchtitan03.fp8_flow_moe={"save_h": "fp8"}']
SAVE_IN_HF = ["--checkpoint.last_save_in_hf", "--checkpoint.last_save_model_only"]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}


def train(case_dir: Path, tmp_path: Path, *more: str) -> str:
    data = f"{case_dir}/data"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--role=rank"]
    command += ["--tee=3", "-m", "torchtitan.train", *OPTIONS.split()]
    command += ["--hf_assets_path", f"{case_dir}/tokenizer", "--dump_folder", str(tmp_path)]
    command += ["--dataloader.dataset_path", data, "--validator.dataloader.dataset_path", data, *more]
    environment = ENVIRONMENT | {"HF_HOME": str(tmp_path / "hf")}
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=time_limit(120))
    log = run.stdout + run.stderr
    assert ended_well(run) and "Training completed" in log, log[-5000:]
    return log


def losses(log: str, kind: str = "step") -> list[float]:
    return [float(loss) for loss in re.findall(rf"(?m)^\[rank0\].*INFO - {kind}: +\d+ +loss: +(\S+)", log)]


def export(*args: str | Path) -> str:
    command = [sys.executable, "-m", "titan_fp8moe.export_fp8", *args]
    run = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=time_limit(60))
    return run.stdout + run.stderr


def test_training_resumes_and_exports(case_dir: Path, tmp_path: Path):
    log = train(case_dir, tmp_path, *FP8)
    assert "1 MoE layers, 1 shared experts, 1 dense FFNs, 0 linears in FP8" in log and "save_h=fp8" in log
    assert len(losses(log)) == 3 and losses(log, "validate step")
    shutil.rmtree(tmp_path / "checkpoint/step-3")
    # FP8's experts are outside of FSDP, bf16's inside: each resumes from the other.
    bf16 = losses(train(case_dir, tmp_path))
    assert bf16 == pytest.approx(losses(log)[2:], rel=2e-3)
    assert len(losses(train(case_dir, tmp_path, *FP8, "--training.steps=4"))) == 1
    for step in (3, 4):
        shutil.rmtree(tmp_path / f"checkpoint/step-{step}")
    assert losses(train(case_dir, tmp_path, *FP8, *SAVE_IN_HF)) == pytest.approx(losses(log)[2:], rel=1e-4)
    out, steps = tmp_path / "fp8", tmp_path / "checkpoint"
    assert "let it save with checkpoint.last_save_in_hf" in export(steps / "step-2", out)
    said = export(steps / "step-2", out, "--config", "train_configs/debug.toml")
    assert said.splitlines()[-1].startswith("error: titan_fp8moe.torchtitan is for torchtitan 0.2.2")
    (tmp_path / "config.json").write_text(json.dumps(dict(num_hidden_layers=2, hidden_size=256, n_routed_experts=8)))
    said = export(steps / "step-3", out, "--assets", tmp_path, "--quantized-from", "bf16", "--verify")
    assert "24 matrices in FP8 from bf16" in said and "are the checkpoint's, bit for bit" in said, said
