"""What the layer does when routing is extreme, a number is NaN or a rank is lost."""

import re
import signal

import pytest
import torch

from tests.distributed.faults_worker import TIMEOUT
from tests.processes import ended_well, run_script, run_workers, time_limit


def test_extreme_routing_nan_and_disagreement():
    done = run_workers("faults_worker.py", 2)
    log = done.stdout[-3000:] + done.stderr[-3000:]
    assert ended_well(done), log
    # 3 routings x (2 rows + 2 x 3 weight gradients), 1 + 2 NaNs x (loss + 2 x 2 rows + 2 x 3 weight gradients).
    # 5 settings, 3 numbers of rows.
    assert done.stdout.count("ok ") == 47 + 8 and "FAILED" not in done.stdout, log


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
        code, *messages = LOST[backend, how]
        words = tmp_path / f"{how}.err"
        said = words.read_text() if words.exists() else "rank 0 has not begun"
        log = f"{done.stdout}\n{done.stderr[-3000:]}\n{said[-6000:]}"
        ended = re.search(rf"{how}: rank 0 ended with {code} after ([\d.]+) s", done.stdout)
        assert ended and float(ended[1]) < TIMEOUT + time_limit(10), log
        assert all(re.search(message, said) for message in messages), log
