import os

import pytest
import torch


def pytest_collection_modifyitems(items):
    """Tests marked ``gpu`` need real kernels."""
    if torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU of compute capability 9.0"))


@pytest.fixture(autouse=True)
def seed() -> int:
    """Fresh random numbers in every run; the seed is in the report of a failed test, ``SEED=...`` repeats it (of what
    hypothesis draws ``--hypothesis-seed``). Arguments made at collection are the same in every run."""
    seed = int(os.environ["SEED"]) if "SEED" in os.environ else torch.seed() % 2**31
    print(f"SEED={seed}")
    torch.manual_seed(seed)
    return seed
