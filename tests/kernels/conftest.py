"""Kernel tests run the real kernels on a GPU, and with ``TRITON_INTERPRET=1`` the interpreter on a CPU.

Triton reads the variable when a kernel is defined, so the rest of the package needs another process.
"""

import os
from pathlib import Path

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:
    from tests.interpreter import correct_conversions

    correct_conversions()


def pytest_configure(config):
    # NumPy warns of Inf - Inf and Inf * 0, which some tests are about.
    config.addinivalue_line("filterwarnings", "ignore:invalid value encountered:RuntimeWarning")


def pytest_collection_modifyitems(items):
    if not INTERPRETED and not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs a GPU, or TRITON_INTERPRET=1 on a CPU")
        for item in items:
            if Path(__file__).parent in item.path.parents:
                item.add_marker(skip)


@pytest.fixture
def device() -> str:
    return "cpu" if INTERPRETED else "cuda"


@pytest.fixture
def generator(device, seed) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    """Fills memory from ``torch.empty`` and ``new_empty`` with 0xA5: what a kernel forgets to write is then seen."""

    def poisoned(allocate):
        def wrapper(*args, **kwargs):
            out = allocate(*args, **kwargs)
            if out.numel():
                out.reshape(-1).view(torch.uint8).fill_(0xA5)
            return out

        return wrapper

    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))


@pytest.fixture(autouse=True)
def programs_in_any_order(monkeypatch, seed):
    """Interprets a launch's programs from the last one where the seed is odd: no result may depend on their order."""
    if INTERPRETED and seed % 2:
        from triton.runtime.interpreter import interpreter_builder

        set_index = interpreter_builder.set_grid_idx

        def set_last_first(*index):
            set_index(*(n - 1 - i for n, i in zip(interpreter_builder.grid_dim, index, strict=True)))

        monkeypatch.setattr(interpreter_builder, "set_grid_idx", set_last_first)
