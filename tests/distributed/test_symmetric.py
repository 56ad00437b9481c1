"""Dispatch through symmetric memory: processes over shared files on a CPU, or that share one GPU."""

import re
import subprocess

import pytest

from tests.distributed.symmetric_faults_worker import FAULTS, TIMEOUT
from tests.processes import ended_well, run_script, run_workers, time_limit

ROUTINGS = {"cpu": 10, "cuda": 230}


@pytest.fixture
def on_one_gpu(monkeypatch):
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


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
    done = run_workers("symmetric_worker.py", num_ranks, str(ROUTINGS["cpu"]), cpu_only=True)
    check_layers(done, ROUTINGS["cpu"], more=2)


@pytest.mark.gpu
@pytest.mark.parametrize("connections", ["", "1"], ids=["", "CUDA_DEVICE_MAX_CONNECTIONS=1"])
def test_layers_on_one_gpu(on_one_gpu, connections, monkeypatch):
    if connections:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", connections)
    routings = 20 if connections else ROUTINGS["cuda"]
    check_layers(run_workers("symmetric_worker.py", 4, str(routings), one_gpu=True), routings, more=5)


# Rank 0's exit code and last words. On a GPU the kernel traps, and the message follows CUDA's error.
ENDS = {how: (1, r"for ranks \[1\]. They have died, raised an error") for how in FAULTS} | {
    "late": (0, "the result is right")
}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_lost_and_late_ranks(tmp_path, device, on_one_gpu):
    done = run_script("tests/distributed/symmetric_faults_worker.py", tmp_path, gpu=device == "cuda", seconds=150)
    for how, (code, message) in ENDS.items():
        words = tmp_path / f"{how}.err"
        said = words.read_text() if words.exists() else "rank 0 has not begun"
        log = f"{done.stdout}\n{done.stderr[-3000:]}\n{said[-6000:]}"
        codes = "(?:1|-6)" if code and device == "cuda" else code  # CUDA may abort the process in its last moments
        ended = re.search(rf"{how}: rank 0 ended with {codes} after ([\d.]+) s", done.stdout)
        assert ended and float(ended[1]) < TIMEOUT + time_limit(10), log
        assert re.search(message, said), log
