"""Expert parallelism equals one process that adds the ranks' parts in the same order, bit for bit."""

import pytest

from tests.processes import run_checks


@pytest.mark.parametrize(("num_ranks", "dims"), [(2, ()), (4, ()), (2, ("192", "80"))])
def test_rows_equal_one_process(num_ranks, dims):
    run_checks("rows_worker.py", num_ranks, *dims)
