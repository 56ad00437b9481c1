"""What the layer does when a number is NaN, ranks disagree or one is lost."""

import signal

import pytest
import torch

from tests.distributed.faults_worker import TIMEOUT
from tests.processes import assert_ends, run_checks, run_script


def test_nan_and_disagreement():
    run_checks("faults_worker.py", 2)


# Rank 0's exit code and last words. NCCL's watchdog aborts the process, whose stream waits for good.
LOST = {
    ("gloo", "dies"): (1, "ops/all_to_all.py", "Connection"),
    ("gloo", "stalls"): (1, "ops/all_to_all.py", f"Timed out waiting {TIMEOUT}000ms"),
    ("nccl", "dies"): (-signal.SIGABRT, f"OpType=ALLTOALL_BASE.*Timeout.ms.={TIMEOUT}000"),
    ("nccl", "stalls"): (-signal.SIGABRT, f"OpType=ALLTOALL_BASE.*Timeout.ms.={TIMEOUT}000"),
}


@pytest.mark.parametrize("backend", ["gloo", pytest.param("nccl", marks=pytest.mark.gpu)])
def test_lost_rank_ends_the_others(tmp_path, backend):
    if backend == "nccl" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    command = "tests/distributed/faults_worker.py", tmp_path, backend
    # NCCL's watchdog waits four times as long for its traces, by default a minute.
    wait = {"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "500"}
    done = run_script(*command, gpu=backend == "nccl", seconds=150, **wait)
    for how in ("dies", "stalls"):
        assert_ends(done, tmp_path, how, *LOST[backend, how])
