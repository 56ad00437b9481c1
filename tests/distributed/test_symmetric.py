"""Dispatch through symmetric memory: processes over shared files on a CPU, or that share one GPU."""

import pytest
import torch

from tests.distributed.faults_worker import SYMMETRIC_FAULTS
from tests.processes import assert_ends, run_checks, run_script

ROUTINGS = {"cpu": 10, "cuda": 230}


@pytest.fixture
def on_one_gpu(monkeypatch):
    monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_layers_equal_the_all_to_all_path(num_ranks):
    run_checks("symmetric_worker.py", num_ranks, str(ROUTINGS["cpu"]), cpu_only=True)


@pytest.mark.gpu
@pytest.mark.parametrize("connections", ["", "1"], ids=["", "CUDA_DEVICE_MAX_CONNECTIONS=1"])
def test_layers_on_one_gpu(on_one_gpu, connections, monkeypatch):
    if connections:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", connections)
    routings = 20 if connections else ROUTINGS["cuda"]
    run_checks("symmetric_worker.py", 4, str(routings), one_gpu=True)


# Rank 0's exit code and last words. On a GPU the kernel traps, and the message follows CUDA's error.
ENDS = {how: (1, r"for ranks \[1\]. They have died, raised an error") for how in SYMMETRIC_FAULTS} | {
    "late": (0, "the result is right")
}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_lost_and_late_ranks(tmp_path, device, on_one_gpu):
    if device == "cuda" and torch.cuda.device_count() == 1:
        pytest.skip("needs two GPUs: on one that ranks share, the survivor's kernel has hung, past its own timeout")
    command = "tests/distributed/faults_worker.py", tmp_path, "symmetric"
    done = run_script(*command, gpu=device == "cuda", seconds=150)
    for how, (code, message) in ENDS.items():
        codes = "(?:1|-6)" if code and device == "cuda" else code  # CUDA may abort the process in its last moments
        assert_ends(done, tmp_path, how, codes, message)
