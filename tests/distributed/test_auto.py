"""``dispatch = "auto"`` goes over to symmetric memory and back, and loses no step."""

import pytest

from tests.processes import run_checks


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_training_equals_the_all_to_all(case_dir, num_ranks):
    run_checks("auto_worker.py", num_ranks, str(case_dir))
