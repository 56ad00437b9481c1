import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


def run_workers(script: str, num_ranks: int, *args: str, timeout: int = 900) -> subprocess.CompletedProcess:
    """Runs tests/distributed/<script> on ``num_ranks`` processes: gloo on CPU, NCCL where there are enough GPUs."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    if torch.cuda.device_count() < num_ranks:
        env["CUDA_VISIBLE_DEVICES"] = ""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={num_ranks}"]
    return subprocess.run(
        [*command, str(ROOT / "tests/distributed" / script), *args],
        env=env,
        cwd=ROOT,
        timeout=timeout,
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="session")
def case_dir(tmp_path_factory) -> Path:
    """Where the workers leave their results, with a tokenizer and a dataset for torchtitan to load."""
    from tokenizers import Tokenizer, models

    out = tmp_path_factory.mktemp("cases")
    (out / "tokenizer").mkdir()
    (out / "data").mkdir()
    vocab = {"<s>": 0, "</s>": 1} | {f"t{i}": i for i in range(2, 16)}
    Tokenizer(models.WordLevel(vocab, unk_token="<s>")).save(str(out / "tokenizer/tokenizer.json"))
    (out / "tokenizer/tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    (out / "data/part.jsonl").write_text('{"text": "unused"}\n' * 8)
    return out
