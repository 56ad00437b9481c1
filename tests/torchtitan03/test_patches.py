"""Changes of other packages by the adapter for torchtitan 0.3: each is listed and undone."""

import torch

from tests.patched import assert_listed_and_undone, snapshot, undone
from tests.torchtitan03.test_converter import convert, make_job
from titan_fp8moe.torchtitan03 import cpu


def test_torchtitan():
    with undone():
        before = snapshot()
        if not torch.cuda.is_available():
            cpu.enable_cpu_training()
        convert(make_job())
        assert_listed_and_undone(before)
