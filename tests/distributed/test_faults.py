"""What the layer does when routing is extreme, a number is NaN or a rank is lost."""

import os
import subprocess
import sys

from tests.distributed.conftest import ROOT, ended_well, run_workers
from tests.distributed.faults_worker import TIMEOUT


def test_extreme_routing_and_nan():
    done = run_workers("faults_worker.py", 2, timeout=120)
    log = done.stdout[-3000:] + done.stderr[-3000:]
    assert ended_well(done), log
    # 3 routings x (2 rows + 2 x 3 weight gradients), 1 + 2 NaNs x (loss + 2 x 2 rows + 2 x 3 weight gradients).
    assert done.stdout.count("ok ") == 47 and "FAILED" not in done.stdout, log


def test_lost_rank_ends_the_others(tmp_path):
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/distributed/faults_worker.py"), str(tmp_path)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "CUDA_VISIBLE_DEVICES": ""},
        timeout=120,
        capture_output=True,
        text=True,
    )
    log = done.stdout[-3000:] + done.stderr[-3000:]
    for how, message in (("dies", "Connection"), ("stalls", f"Timed out waiting {TIMEOUT}000ms")):
        assert f"{how}: rank 0 ended with 1" in done.stdout, log
        seconds, said = (tmp_path / f"{how}.txt").read_text().split("\n", 1)
        assert float(seconds) < TIMEOUT + 5, seconds
        assert "ops/all_to_all.py" in said and message in said, said
