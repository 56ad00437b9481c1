"""torchtitan's own configs, started by its own command line with the one flag."""

import json
import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torchtitan.train
from torchtitan.components.metrics import MetricsProcessor

from tests.processes import call
from tests.torchtitan03 import small
from titan_fp8moe.torchtitan03.metrics import Fp8FlowMetrics

FLAG = "titan_fp8moe.torchtitan03.fp8_flow_moe"
SETTINGS = {"recompute": "experts", "filter_fqns": ["layers.1.moe.shared_experts"], "linear_fqns": ["attention.wo."]}
OPTIONS = [
    *("--training.steps=3", "--training.seq_len=64", "--training.local_batch_size=2", "--training.disable_cuda_graphs"),
    *("--training.mixed_precision_param=float32", "--parallelism.expert_parallel_degree=1", "--debug.seed=1"),
    *("--compile.backend=aot_eager", "--metrics.log_freq=1", "--dataloader.dataset=c4_test"),
]


def losses(*arguments: str) -> tuple[str, list[Any]]:
    """Class of the metrics processor, and loss and gradient norm of each step."""
    found: list[Any] = []
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="localhost", MASTER_PORT="0")
    kinds = []

    def log(self: MetricsProcessor, step: int, *values: float, **_: Any) -> None:
        kinds.append(type(self).__name__)
        found.append((step, *values))

    with patch.object(MetricsProcessor, "log", log), patch.object(sys, "argv", ["train", *arguments]):
        torchtitan.train.main()
    return kinds[0], found


@pytest.fixture
def data(case_dir: Path, tmp_path: Path) -> list[str]:
    lines = [json.dumps({"text": f"t{2 + i * i % 14}"}) for i in range(64)]
    (tmp_path / "data").mkdir()
    (tmp_path / "data/part.jsonl").write_text("\n".join(lines))
    folders = {"dataloader.dataset_path": tmp_path / "data", "hf_assets_path": case_dir / "tokenizer"}
    return [f"--{name}={folder}" for name, folder in (folders | {"dump_folder": tmp_path / "out"}).items()]


@pytest.mark.parametrize("name", [function.__name__ for function in small.CONFIGS])
def test_losses_are_those_of_the_config_module(name: str, data: list[str]):
    """To the digit, of three steps, with gradient norms; bf16 has others."""
    settings = {k: v for k, v in SETTINGS.items() if name.startswith("deepseek") or k == "recompute"}
    arguments = ["--module=tests.torchtitan03.small", *OPTIONS, *data]
    got = call(losses, f"--config={name}", "--override.imports", f"{FLAG}={json.dumps(settings)}", *arguments)
    options = [f"--fp8_flow_moe.{k}={v if isinstance(v, str) else ','.join(v)}" for k, v in settings.items()]
    want = call(losses, f"--config={name}_section", *options, *arguments)
    bf16 = call(losses, f"--config={name}", *arguments)
    assert got == want and got[0] == Fp8FlowMetrics.__name__ and len(got[1]) == 3
    assert bf16[0] == MetricsProcessor.__name__ and bf16[1] != got[1]
    assert [step[1] for step in bf16[1]] == pytest.approx([step[1] for step in got[1]], rel=5e-3)
