"""Tests what tools/quickstart.sh and tools/run_train.sh show of a run, and how they end when it fails."""

import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.utils.tensorboard import SummaryWriter

from tests.processes import ROOT, time_limit
from tools import compare_losses, progress

BOX = """\
[rank0]:╭─ Invalid choice ──────────────────────────────────────╮
[rank0]:│ invalid choice 'foo' for argument '--wgrad'. Expected │
[rank0]:│ one of ('balanced', 'bf16').                          │
[rank0]:│ ───────────────────────────────────────────────────── │
[rank0]:│ For full helptext, run                                │
[rank0]:╰───────────────────────────────────────────────────────╯
"""


def run(*command: str, **environment: str) -> subprocess.CompletedProcess:
    options = dict(env=os.environ | environment, capture_output=True, text=True, timeout=time_limit(30))
    return subprocess.run(command, cwd=ROOT, **options)


TORCHRUN_SAYS = "E1127 20:48:21 1 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 1) pid: 2"


@pytest.mark.parametrize(("rank", "report", "shown", "error"), [
    ("[rank0]: ValueError: a", "exitcode  : 1 (pid: 2)\n  ValueError: a", False, "error: ValueError: a"),
    (BOX, "exitcode  : 2 (pid: 2)", False, "error: invalid choice 'foo' for argument '--wgrad'. Expected one of ('bal"),
    ("KeyError: 1", "rank      : 1\n  ValueError: of a rank that is not shown", True, "error: ValueError: of a rank"),
    ("KeyError: 1", "exitcode  : -9 (pid: 2)\ntraceback : Signal 9 (SIGKILL)", True, "error: KeyError: 1"),
    ("torch.OutOfMemoryError: CUDA", "exitcode  : 1 (pid: 2)", True, "error: OutOfMemoryError: CUDA"),
    ("KeyError: 1\nerror: model.flavor = 'a': b", "exitcode  : 1 (pid: 2)", True, "error: model.flavor = 'a': b"),
    ("step: 1", "exitcode  : 1 (pid: 2)", True, "===="),
])  # fmt: skip
def test_the_last_line_is_the_error_of_a_rank(tmp_path: Path, rank: str, report: str, shown: bool, error: str):
    """torchrun's report of it is left out where it only repeats that."""
    (tmp_path / "log").write_text(f"[rank0]:{rank}\n{TORCHRUN_SAYS}\nTraceback\n{report}\n====\n")
    done = run(sys.executable, "tools/launch.py", "sh", "-c", f"cat {tmp_path}/log; exit 1")
    assert done.returncode == 1 and (TORCHRUN_SAYS in done.stdout) == ("====" in done.stdout) == shown
    assert done.stdout.splitlines()[-1].startswith(error)


def test_progress():
    """The first and the last step, others at most every five seconds."""
    log = "- INFO - step: {:2}  loss:  8.90000  grad_norm:  1.0  memory: 35.10GiB(25%)  tps: 9,000\n".format
    shown = progress.shown(["an import\n", "INFO - FP8-Flow-MoE: 2 layers\n", *map(log, (1, 2, 3))], "bf16", 3)
    steps = [f"bf16: step {n} of 3: loss 8.90000, 9,000 tokens/s, 35.10 GiB\n" for n in (1, 3)]
    assert [*shown] == ["bf16: FP8-Flow-MoE: 2 layers\n", *steps]


def test_lines_appear_when_they_are_printed():
    """Python would collect 8 KB of what goes through launch.py's pipe."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    ticks = "import time\nfor _ in range(5): print('tick'); time.sleep(0.2)"
    command = [sys.executable, "tools/launch.py", sys.executable, "-c", ticks]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=environment) as process:
        at = [time.monotonic() for _ in process.stdout]
    assert len(at) == 5 and at[-1] - at[0] > 0.4  # at most two of the pauses were lost on a busy machine


def test_progress_leaves_the_command_its_status():
    command = "(printf begun; printf ' failed' >&2; exit 3)"
    script = f"set -o pipefail; {command} 2>&1 | {sys.executable} tools/progress.py it"
    done = run("bash", "-c", script)
    assert (done.returncode, done.stdout, done.stderr) == (3, "begun failed", "")


def fake_python(folder: Path, program: str) -> str:
    """A Python in the place of this one that does none of the work; the PATH that begins with it."""
    for name in ("python3", "python"):
        (folder / name).write_text(f"#!/bin/sh\n{program}")
        (folder / name).chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def test_training_without_torchtitan_names_the_environment(tmp_path: Path):
    """A new shell after the quickstart, whose Python lacks even torchrun."""
    done = run("tools/run_train.sh", PATH=fake_python(tmp_path, f'exec {sys.executable} -I -S "$@"'))
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith(f"error: {tmp_path}/python3 lacks torchtitan; activate its environment")


@pytest.mark.parametrize(("removed", "arguments", "said"), [
    ("config_module", "", 'fp8_flow_moe is unknown to torchtitan; set job.custom_config_module = "titan_fp8moe.'),
    ("", "--model.converters quantize.grouped_mm.float8,fp8_flow_moe", "model.converters has fp8_flow_moe and"),
    ("tokenizer", "", "model.hf_assets_path = 'CORPUS/tokenizer' has no tokenizer.json; download it, or"),
    ("", "--model.hf-assets-path CORPUS", "model.hf_assets_path = 'CORPUS' has no tokenizer.json"),
    ("train", "", "training.dataset_path = 'CORPUS/train' does not exist; tools/build_corpus.py makes"),
    ("", "--training.dataset=c4 --training.dataset_path=/no/where", "training.dataset_path = '/no/where' does not"),
    ("config_module", "--job.custom_config_module=titan_fp8moe.torchtitan", ""),
    ("config_module", "--model.converters=", "fp8_flow_moe is unknown to torchtitan"),  # the table is
    ("", "--model.converters=", ""),
    ("train", "--training.dataset c4 --training.dataset_path owner/name", ""),
])  # fmt: skip
def test_what_a_first_run_lacks_is_named_before_it_is_launched(tmp_path: Path, removed: str, arguments: str, said: str):
    text = (ROOT / "train_configs/debug.toml").read_text().replace("outputs/corpus", str(tmp_path))
    job = tmp_path / "job.toml"
    job.write_text(text.replace("custom_config_module", "#") if removed == "config_module" else text)
    for name in {"tokenizer", "train"} - {removed}:
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.json").touch()
    program = f'case "$1" in tools/launch.py) echo launched ;; *) exec {sys.executable} "$@" ;; esac'
    arguments = arguments.replace("CORPUS", str(tmp_path)).split()
    done = run("tools/run_train.sh", *arguments, PATH=fake_python(tmp_path, program), CONFIG_FILE=str(job))
    if not said:
        assert (done.returncode, done.stdout) == (0, "launched\n"), done.stderr
        assert ("note: model.converters has no fp8_flow_moe" in done.stderr) == ("--model.converters=" in arguments)
        return
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"error: {said.replace('CORPUS', str(tmp_path))}")


NO_FILE = {"CONFIG_FILE": "train_configs/no_such.toml"}
DRY_RUN = "python3 -m titan_fp8moe.torchtitan.dry_run train_configs/debug.toml --world-size 8"


@pytest.mark.parametrize(("script", "variables", "arguments", "said"), [
    ("run_train.sh", NO_FILE, "", "CONFIG_FILE = train_configs/no_such.toml: no such file; "),
    ("run_train.sh", {"COMM_MODE": "fake", "NGPU": "8"}, "", f"COMM_MODE = fake does nothing here; ... {DRY_RUN}"),
    ("run_train.sh", {"TRAIN_FILE": "a.py"}, "", "TRAIN_FILE = a.py does ... start that module with torchrun"),
    ("quickstart.sh", NO_FILE, "", "CONFIG_FILE = train_configs/no_such.toml: no such file; "),
    ("quickstart.sh", {"STEPS": "abc"}, "", "STEPS = abc; set it to a whole number from 1"),
    ("quickstart.sh", {"STEPS": "0"}, "", "STEPS = 0; set it"),
    ("quickstart.sh", {"NGPU": "two"}, "--torchtitan03", "NGPU = two; set it"),
    *(("quickstart.sh", {}, option, f"{option.split()[-1]} is no option; known are --torchtitan03, as the first")
      for option in ("--torchtitan3", "torchtitan03", "--training.steps 2 --torchtitan03")),
])  # fmt: skip
def test_mistakes_are_refused_before_any_work(tmp_path: Path, script: str, variables: dict, arguments: str, said: str):
    """No import, no corpus; no baseline of an earlier run is removed, no variable of torchtitan's script ignored."""
    path = fake_python(tmp_path, "touch $(dirname $0)/worked")
    done = run(f"tools/{script}", *arguments.split(), PATH=path, **variables)
    begins, *others = said.split(" ... ")
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.startswith(f"error: {begins}"), done.stderr
    assert all(part in done.stderr for part in others) and not (tmp_path / "worked").exists()


def test_the_quickstart_names_what_it_wrote(tmp_path: Path):
    """The picture of an earlier run is not this one's."""
    (tmp_path / "curves.png").touch()
    python = 'case "$*" in *progress.py*) cat ;; *torch.cuda*) echo bf16 cpu ;; esac'
    done = run("tools/quickstart.sh", PATH=fake_python(tmp_path, python), OUT=str(tmp_path), CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    assert f"table: {tmp_path}/table.txt" in done.stdout and "curves:" not in done.stdout


LOSSES, BROKEN = [4.0] * 99, [4.0] * 39 + [math.nan] + [4.0] * 59
BEFORE, ABOVE, BELOW = ([5.0] * 20 + [4.0] * 20 + [end] * 20 for end in (4.0, 4.05, 3.95))
ONE_BIT = dict(bf16=[4.0] * 40, bf16_bit=[4.12] * 40, fp8=[4.02] * 40)


@pytest.mark.parametrize(("runs", "tolerance", "said"), [
    # In the middle too, where the last losses agree.
    (dict(bf16=BROKEN, fp8=LOSSES), 0.01, ["FAIL bf16: loss is nan at step 40"]),
    (dict(bf16=LOSSES, fp8=BROKEN), 0.01, ["FAIL fp8: loss is nan at step 40"]),
    # The mean of the last 20 steps is 0% or 1.25% from the reference's. Before, losses were 25% from it.
    (dict(bf16=LOSSES[:60], fp8=BEFORE), 0.001, ["+0.000%", "25.000%"]),
    (dict(bf16=LOSSES[:60], fp8=ABOVE), 0.012, ["FAIL fp8: smoothed loss deviates by +1.250%"]),
    (dict(bf16=LOSSES[:60], fp8=BELOW), 0.012, ["FAIL fp8: smoothed loss deviates by -1.250%"]),
    (dict(bf16=LOSSES[:60], fp8=ABOVE), 0.013, ["+1.250%"]),
    # A baseline, which fails never.
    (ONE_BIT, 0.01, ["+3.000%", "bf16 differs from itself by up to 3.00%", "fp8 differs from bf16 by +0.50%"]),
])  # fmt: skip
def test_the_verdict_on_losses(tmp_path: Path, capsys, runs: dict, tolerance: float, said: list[str]):
    for name, losses in runs.items():
        with SummaryWriter(tmp_path / name) as writer:
            for step, loss in enumerate(losses, 1):
                writer.add_scalar(compare_losses.LOSS, loss, step)
    folders = (f"--run={name}={tmp_path / name}" for name in runs)
    status = compare_losses.main([*folders, f"--tolerance={tolerance}", f"--out={tmp_path}/curves.png"])
    output = capsys.readouterr().out
    assert status == ("FAIL" in said[0]) == ("FAIL" in output) and all(part in output for part in said), output
