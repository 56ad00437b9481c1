"""Expert-parallel rows equal single-process rows: bit for bit, or up to bf16 rounding of each rank's sum."""

import pytest

from tests.distributed.conftest import ended_well, run_workers


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_rows_equal_one_process(num_ranks):
    done = run_workers("rows_worker.py", num_ranks, timeout=300)
    log = done.stdout[-3000:] + done.stderr[-3000:]
    assert ended_well(done), log
    # 8 cases x 4 settings x (3 row results + 3 weight gradients), less one check, and none failed.
    assert done.stdout.count("ok ") == 8 * (4 * 6 - 1) and "FAILED" not in done.stdout, log
