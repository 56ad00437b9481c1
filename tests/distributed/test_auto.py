"""``dispatch = "auto"`` goes over to symmetric memory and back, and loses no step."""

import pytest

from tests.distributed.cases import AUTO
from tests.distributed.conftest import WorkerResults


@pytest.fixture(scope="module")
def results(case_dir) -> WorkerResults:
    groups = {n: [name for name, row in AUTO.items() if row.ranks == n] for n in (2, 4)}
    return WorkerResults(case_dir, ("runner.py", "tests.distributed.training:run_auto"), groups)


@pytest.mark.parametrize("case", AUTO)
def test_training_equals_the_all_to_all(results, case):
    results.get(case)
