"""A rank is lost, or the disk full, while torchtitan trains: the job ends by itself, and what resumes is what was."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.processes import ROOT, time_limit
from tests.test_cpu_training import EP2, OVERRIDES, corpus  # noqa: F401  a fixture

STEPS, INTERVAL = 6, 2


def train(corpus: Path, out: Path, fault: str = "") -> tuple[int, str]:  # noqa: F811
    """Exit code and log of two ranks with a checkpoint every two steps, which resume from what is in ``out``."""
    config = (ROOT / "train_configs/debug.toml").read_text().replace("outputs/corpus", str(corpus))
    config = config.replace('"titan_fp8moe.torchtitan"', '"tests.distributed.faulty_training"')
    out.mkdir(exist_ok=True)
    (out / "config.toml").write_text(config)
    environment = os.environ | {
        "NGPU": "2",
        "LOG_RANK": "0,1",
        "CONFIG_FILE": str(out / "config.toml"),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "FAULT": fault,
        "HF_HOME": str(out / "hf"),
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    }
    options = [*OVERRIDES, f"--training.steps={STEPS}", *EP2, "--debug.seed=1", "--comm.train_timeout_seconds=20"]
    options += ["--checkpoint.enable", f"--checkpoint.interval={INTERVAL}", "--checkpoint.no-last_save_model_only"]
    command = ["tools/run_train.sh", *options, f"--job.dump_folder={out}"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=time_limit(75))
    return done.returncode, done.stdout + done.stderr


def losses(log: str) -> dict[int, str]:
    """Loss and gradient norm by step, as printed."""
    return {
        int(n): text for n, text in re.findall(r"(?m)^\[rank0\].*INFO - step: +(\d+) +(loss: .*grad_norm: +\S+)", log)
    }


def weights(out: Path) -> dict[str, torch.Tensor]:
    """All tensors of the last checkpoint, optimizer states among them."""
    path = out / "tensors.pt"
    dcp_to_torch_save(out / f"checkpoint/step-{STEPS}", path)
    tensors: dict[str, torch.Tensor] = {}

    def collect(name: str, value: object) -> None:
        if isinstance(value, dict):
            for key, part in value.items():
                collect(f"{name}.{key}", part)
        elif isinstance(value, torch.Tensor):
            tensors[name] = value

    collect("", torch.load(path, weights_only=False))
    return tensors


@pytest.fixture(scope="module")
def undisturbed(corpus, tmp_path_factory):  # noqa: F811
    out = tmp_path_factory.mktemp("undisturbed")
    code, log = train(corpus, out)
    assert code == 0 and len(losses(log)) == STEPS, log[-6000:]
    return losses(log), weights(out)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault, resumes_after",
    # Two MoE layers: the 9th is in step 5. The third decision is to go over to symmetric memory after two steps.
    [("forward@9", 4), ("backward@9", 4), ("save@2", 2), ("disk@2", 2), ("auto@3", 0)],
)
def test_it_ends_and_resumes(corpus, tmp_path, undisturbed, fault, resumes_after):  # noqa: F811
    want, tensors = undisturbed
    code, log = train(corpus, tmp_path, fault)
    assert code != 0 and STEPS not in losses(log), log[-6000:]
    # Whichever torchrun sees first: the lost rank, or what its peer says.
    lost, full = r"SIGKILL|Connection (reset|closed) by peer", r"(?m)^error: OSError.*No space left on device"
    assert re.search(full if fault == "disk@2" else lost, log), log[-3000:]
    code, log = train(corpus, tmp_path)
    assert code == 0, log[-6000:]
    got = losses(log)
    assert got == {step: text for step, text in want.items() if step > resumes_after}
    resumed = weights(tmp_path)
    assert len(tensors) > 20 and resumed.keys() == tensors.keys()
    assert all(torch.equal(resumed[name], tensor) for name, tensor in tensors.items())
