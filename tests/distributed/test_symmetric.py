"""Dispatch through symmetric memory: processes over shared files on a CPU, or that share one GPU."""

import os
import re
import subprocess
import sys

import pytest

from tests.distributed.conftest import ROOT, ended_well, run_workers
from tests.distributed.symmetric_faults_worker import FAULTS, TIMEOUT

ROUTINGS = {"cpu": 10, "cuda": 230}


@pytest.fixture
def on_one_gpu(monkeypatch):
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]))


def check_layers(done: subprocess.CompletedProcess, routings: int, more: int) -> None:
    log = done.stdout[-3000:] + done.stderr[-3000:]
    assert ended_well(done), log
    # Inference, more experts than tokens, 2 with biases, padded sizes, 2 facts of a frozen input, 2 compiled steps,
    # 3 ways of checkpointing, 4 facts of an overflow, 2 of unlike settings and 1 of unlike sizes. ``more`` are 5 CUDA
    # graphs, or 2 of a later group.
    checks = routings + more + 2 + 2 + 1 + 2 + 2 + 3 + 4 + 2 + 1
    assert done.stdout.count("ok ") == checks and "FAILED" not in done.stdout, log


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_layers_equal_the_all_to_all_path(num_ranks):
    done = run_workers("symmetric_worker.py", num_ranks, str(ROUTINGS["cpu"]), timeout=200, cpu_only=True)
    check_layers(done, ROUTINGS["cpu"], more=2)


@pytest.mark.gpu
@pytest.mark.parametrize("connections", ["", "1"], ids=["", "CUDA_DEVICE_MAX_CONNECTIONS=1"])
def test_layers_on_one_gpu(on_one_gpu, connections, monkeypatch):
    if connections:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", connections)
    routings = 20 if connections else ROUTINGS["cuda"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=4"]
    command += ["tests/distributed/symmetric_worker.py", str(routings)]
    check_layers(subprocess.run(command, cwd=ROOT, timeout=300, capture_output=True, text=True), routings, more=5)


# Rank 0's exit code and last words. On a GPU the kernel traps, and the message follows CUDA's error.
ENDS = {how: (1, r"for ranks \[1\]. They have died, raised an error") for how in FAULTS} | {
    "late": (0, "the result is right")
}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_lost_and_late_ranks(tmp_path, device, on_one_gpu, monkeypatch):
    if device == "cpu":
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    command = [sys.executable, str(ROOT / "tests/distributed/symmetric_faults_worker.py"), str(tmp_path)]
    done = subprocess.run(command, timeout=300, capture_output=True, text=True)
    for how, (code, message) in ENDS.items():
        words = tmp_path / f"{how}.err"
        said = words.read_text() if words.exists() else "rank 0 has not begun"
        log = f"{done.stdout}\n{done.stderr[-3000:]}\n{said[-6000:]}"
        codes = "(?:1|-6)" if code and device == "cuda" else code  # CUDA may abort the process in its last moments
        ended = re.search(rf"{how}: rank 0 ended with {codes} after ([\d.]+) s", done.stdout)
        assert ended and float(ended[1]) < TIMEOUT + 10, log
        assert re.search(message, said), log
