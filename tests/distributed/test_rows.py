"""Expert parallelism equals one process that adds the ranks' parts in the same order, bit for bit."""

import pytest

from tests.processes import ended_well, run_workers


@pytest.mark.parametrize(("num_ranks", "settings", "dims"), [(2, 3, ()), (4, 1, ()), (2, 1, ("192", "80"))])
def test_rows_equal_one_process(num_ranks, settings, dims):
    done = run_workers("rows_worker.py", num_ranks, *dims)
    log = done.stdout[-3000:] + done.stderr[-3000:]
    assert ended_well(done), log
    # 8 cases x settings x (3 results of rows + 3 weight gradients), and none failed.
    assert done.stdout.count("ok ") == 8 * settings * 6 and "FAILED" not in done.stdout, log
