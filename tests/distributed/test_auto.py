"""``dispatch = "auto"`` goes over to symmetric memory and back, and loses no step."""

import pytest

from tests.processes import run_checks


@pytest.mark.parametrize(("num_ranks", "case"), [(2, "checkpointed"), (4, "eager"), (4, "split")])
def test_training_equals_the_all_to_all(case_dir, num_ranks, case):
    """On four ranks one expert-parallel group of two has no room, and the other one knows nothing of it."""
    run_checks("auto_worker.py", num_ranks, str(case_dir), case)
