"""What tools/quickstart.sh and tools/run_train.sh show of a run, and how they end when it fails."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tools import launch, progress

ROOT = Path(__file__).parents[1]
REPORT = """\
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
torchtitan.train FAILED
"""
BOX = """\
[rank0]:╭─ Invalid choice ──────────────────────────────────────╮
[rank0]:│ invalid choice 'foo' for argument '--wgrad'. Expected │
[rank0]:│ one of ('balanced', 'bf16').                          │
[rank0]:│ ───────────────────────────────────────────────────── │
[rank0]:│ For full helptext, run                                │
[rank0]:╰───────────────────────────────────────────────────────╯
"""


@pytest.mark.parametrize(
    "log,error",
    [
        (f"[rank0]:[rank0]: ValueError: set a to b\n{REPORT}", "ValueError: set a to b"),
        (f"[rank1]:torch.OutOfMemoryError: CUDA out of memory.\n{REPORT}", "OutOfMemoryError: CUDA out of memory."),
        (BOX + REPORT, "invalid choice 'foo' for argument '--wgrad'. Expected one of ('balanced', 'bf16')."),
        ("KeyError: 1\nerror: model.flavor = 'tinny': there is 'tiny'\n", "model.flavor = 'tinny': there is 'tiny'"),
        (f"[rank0]:step: 1\n{REPORT}", None),
    ],
)
def test_last_error(log: str, error: str | None):
    assert launch.last_error(log.splitlines(keepends=True)) == error


def launched(*command: str) -> subprocess.CompletedProcess:
    script = [sys.executable, str(ROOT / "tools/launch.py")]
    return subprocess.run([*script, *command], capture_output=True, text=True, timeout=120)


def test_torchrun_ends_with_the_error_of_a_rank(tmp_path: Path):
    (tmp_path / "script.py").write_text("print('begun')\nraise ValueError('set a to b')\n")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1", "--tee=3"]
    done = launched(*torchrun, str(tmp_path / "script.py"))
    assert done.returncode == 1
    assert "begun" in done.stdout and "ChildFailedError" in done.stdout
    assert done.stdout.splitlines()[-1] == "error: ValueError: set a to b"


def test_a_command_that_succeeds_is_shown_as_it_is():
    done = launched(sys.executable, "-c", "print('ValueError: no'); print('yes')")
    assert (done.returncode, done.stdout, done.stderr) == (0, "ValueError: no\nyes\n", "")


def step(n: int) -> str:
    return (
        f"[rank0]:- INFO - step: {n:2}  loss:  {9 - n / 10:.5f}  grad_norm:  1.0  memory: 35.10GiB(25%)  tps: 9,000\n"
    )


def test_progress(monkeypatch):
    """The first and the last step, others at most every five seconds, and a line where the log is silent."""
    clock = iter([0, 1, 2, 3, 9, 18, 19, 20])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    log = ["[rank0]:INFO - FP8-Flow-MoE: 2 layers converted\n", step(1), step(2), step(3), None, step(4), step(5)]
    assert list(progress.shown(log, "bf16", 5)) == [
        "bf16: FP8-Flow-MoE: 2 layers converted",
        "bf16: step 1 of 5: loss 8.90000, 9,000 tokens/s, 35.10 GiB",
        "bf16: step 3 of 5: loss 8.70000, 9,000 tokens/s, 35.10 GiB",
        "bf16: step 3 of 5, 18 s",
        "bf16: step 5 of 5: loss 8.50000, 9,000 tokens/s, 35.10 GiB",
    ]


def test_silence_is_noticed(monkeypatch):
    monkeypatch.setattr(progress, "SILENT_S", 0.2)

    def log():
        yield "first"
        time.sleep(0.5)
        yield "last"

    seen = list(progress.with_pauses(log()))
    assert seen[0] == "first" and seen[-1] == "last" and None in seen


def test_scripts_are_valid_shell():
    for script in sorted((ROOT / "tools").glob("*.sh")):
        subprocess.run(["bash", "-n", str(script)], check=True)
