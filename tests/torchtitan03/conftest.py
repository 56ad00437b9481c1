"""They need an environment with torchtitan 0.3, which ``tools/run_tests.sh --torchtitan03`` makes."""

import importlib.metadata
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed.conftest import WorkerResults, case_dir  # noqa: F401  a fixture
from tests.torchtitan03.cases import FOUR_RANKS, SINGLE, TWO_RANKS

collect_ignore_glob = [] if importlib.metadata.version("torchtitan").startswith("0.3.") else ["test_*.py"]


@pytest.fixture(scope="session")
def results(case_dir: Path) -> Iterator[WorkerResults]:  # noqa: F811
    yield WorkerResults(case_dir, "../torchtitan03/worker.py", {1: [*SINGLE], 2: [*TWO_RANKS], 4: [*FOUR_RANKS]})
    for path in case_dir.glob("*.pt"):  # 2 GB, which pytest would keep for three sessions
        path.unlink()
