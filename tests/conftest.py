import gc
import os

import pytest
import torch
import torch.distributed as dist

import tests.flags  # noqa: F401
from titan_fp8moe.kernels import warm_up

begin, warm_up.begin = warm_up.begin, lambda: None  # a test compiles its kernels itself
LONGEST = (
    *("tests/distributed/test_layouts", "tests/test_kernels_compile", "tests/test_transformers"),
    *("tests/test_titan_jobs", "tests/test_compiling", "tests/test_gemm_compile"),
)


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow")
    parser.addoption("--layers", type=int, default=80, help="how many layers tests/test_any_layer.py draws")


def pytest_generate_tests(metafunc):
    if "drawn_layer" in metafunc.fixturenames:
        metafunc.parametrize("drawn_layer", range(metafunc.config.getoption("--layers")))


def pytest_collection_modifyitems(config, items):
    """Tests marked ``gpu`` need real kernels, those marked ``slow`` are asked for. The longest files come first: each
    is one worker's, and the other waits at the end."""
    items.sort(key=lambda item: not any(path in item.nodeid for path in LONGEST))
    skipped = {}
    if not torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1":
        skipped["gpu"] = "needs a GPU of compute capability 9.0"
    if not config.getoption("--slow") and os.environ.get("RUN_SLOW") != "1":
        skipped["slow"] = "slow: run it with --slow or RUN_SLOW=1"
    for item in items:
        for marker, reason in skipped.items():
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish(session):
    """What has been imported is no garbage of a test's."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def group(tmp_path):
    """A group of this process alone: the path that tokens take between ranks, without other ranks."""
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def seed() -> int:
    """Fresh random numbers in every run; the seed is in the report of a failed test, ``SEED=...`` repeats it (of what
    hypothesis draws ``--hypothesis-seed``). Arguments made at collection are the same in every run."""
    seed = int(os.environ["SEED"]) if "SEED" in os.environ else torch.seed() % 2**31
    print(f"SEED={seed}")
    torch.manual_seed(seed)
    return seed
