"""Tests what tools/quickstart.sh and tools/run_train.sh show of a run, and how they end when it fails."""

import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.utils.tensorboard import SummaryWriter

from tests.processes import time_limit
from tools import compare_losses, progress

ROOT = Path(__file__).parents[1]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1", "--tee=3"]
BOX = """\
[rank0]:╭─ Invalid choice ──────────────────────────────────────╮
[rank0]:│ invalid choice 'foo' for argument '--wgrad'. Expected │
[rank0]:│ one of ('balanced', 'bf16').                          │
[rank0]:│ ───────────────────────────────────────────────────── │
[rank0]:│ For full helptext, run                                │
[rank0]:╰───────────────────────────────────────────────────────╯
"""


def launched(*command: str) -> subprocess.CompletedProcess:
    script = [sys.executable, str(ROOT / "tools/launch.py")]
    return subprocess.run([*script, *command], capture_output=True, text=True, timeout=time_limit(60))


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
    done = launched("sh", "-c", f"cat {tmp_path}/log; exit 1")
    assert done.returncode == 1 and (TORCHRUN_SAYS in done.stdout) == ("====" in done.stdout) == shown
    assert done.stdout.splitlines()[-1].startswith(error)


def step(n: int) -> str:
    return (
        f"[rank0]:- INFO - step: {n:2}  loss:  {9 - n / 10:.5f}  grad_norm:  1.0  memory: 35.10GiB(25%)  tps: 9,000\n"
    )


def test_progress(monkeypatch):
    """The first and the last step, others at most every five seconds, and a line where the log is silent."""
    clock = iter([0, 1, 2, 3, 9, 18, 19, 20])
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    log = ["[rank0]:INFO - FP8-Flow-MoE: 2 layers converted\n", step(1), step(2), step(3), None, step(4), step(5)]
    assert list(progress.shown(log, "bf16", 5)) == [
        "bf16: FP8-Flow-MoE: 2 layers converted\n",
        "bf16: step 1 of 5: loss 8.90000, 9,000 tokens/s, 35.10 GiB\n",
        "bf16: step 3 of 5: loss 8.70000, 9,000 tokens/s, 35.10 GiB\n",
        "bf16: step 3 of 5, 18 s\n",
        "bf16: step 5 of 5: loss 8.50000, 9,000 tokens/s, 35.10 GiB\n",
    ]


def test_scripts_are_valid_shell():
    for script in sorted((ROOT / "tools").glob("*.sh")):
        subprocess.run(["bash", "-n", str(script)], check=True)


TICKS = """\
import logging, sys, time
logging.basicConfig(stream=sys.stdout, level=logging.INFO)
for tick in range(5):
    (logging.info if tick % 2 else print)(f"tick {tick}")
    time.sleep(0.2)
raise ValueError("set a to b")
"""


def test_lines_appear_when_they_are_printed(tmp_path: Path):
    """Through torchrun's pipe and through that of launch.py, which would collect 8 KB; the last is a rank's error."""
    (tmp_path / "ticks.py").write_text(TICKS)
    command = [sys.executable, str(ROOT / "tools/launch.py"), *TORCHRUN, str(tmp_path / "ticks.py")]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        lines = [(line, time.monotonic()) for line in process.stdout]
    at = [when for line, when in lines if "tick " in line]
    assert process.returncode == 1 and len(at) == 5
    assert at[-1] - at[0] > 0.4  # at most two of the pauses were lost on a busy machine
    assert lines[-1][0] == "error: ValueError: set a to b\n"


def test_output_passes_as_it_comes():
    """A line of silence stands on its own, also where it interrupts another."""
    chunks = [None, b"..", b"\xc3", None, b"\xbc.\n", None]
    seen = re.sub(rb"\d+ s", b"0 s", b"".join(progress.passed_on(chunks, "tests")))
    assert seen == b"tests: 0 s\n..\xc3\ntests: 0 s\n\xbc.\ntests: 0 s\n"


def test_progress_leaves_the_command_its_status():
    command = "(printf begun; printf ' failed' >&2; exit 3)"
    script = f"set -o pipefail; {command} 2>&1 | {sys.executable} tools/progress.py it"
    done = subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=time_limit(30))
    assert (done.returncode, done.stdout, done.stderr) == (3, "begun failed", "")


def run_tool(script: Path | str, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    command = ["bash", str(ROOT / "tools" / script), *arguments]
    variables = os.environ | environment
    return subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=time_limit(15))


def fake_python(folder: Path, program: str) -> str:
    """A Python in the place of this one that does none of the work; the PATH that begins with it."""
    for name in ("python3", "python"):
        (folder / name).write_text(f"#!/bin/sh\n{program}")
        (folder / name).chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def test_training_without_torchtitan_names_the_environment(tmp_path: Path):
    """A new shell after the quickstart, whose Python lacks even torchrun."""
    done = run_tool("run_train.sh", PATH=fake_python(tmp_path, f'exec {sys.executable} -I -S "$@"'))
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
    (tmp_path / "job.toml").write_text(
        text.replace("custom_config_module", "#") if removed == "config_module" else text
    )
    for name in {"tokenizer", "train"} - {removed}:
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer.json").touch()
    path = fake_python(
        tmp_path, f'case "$1" in tools/launch.py) echo launched ;; *) exec {sys.executable} "$@" ;; esac'
    )
    arguments = arguments.replace("CORPUS", str(tmp_path)).split()
    done = run_tool("run_train.sh", *arguments, PATH=path, CONFIG_FILE=str(tmp_path / "job.toml"))
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
      for option in ("--torchtitan3", "-torchtitan03", "torchtitan03", "--training.steps 2 --torchtitan03")),
])  # fmt: skip
def test_mistakes_are_refused_before_any_work(tmp_path: Path, script: str, variables: dict, arguments: str, said: str):
    """No import, no corpus; no baseline of an earlier run is removed, no variable of torchtitan's script ignored."""
    path = fake_python(tmp_path, "touch $(dirname $0)/worked")
    done = run_tool(script, *arguments.split(), PATH=path, **variables)
    begins, *others = said.split(" ... ")
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.startswith(f"error: {begins}"), done.stderr
    assert all(part in done.stderr for part in others) and not (tmp_path / "worked").exists()


PYTHON = """\
case "$*" in
*progress.py*) cat ;;
*torch.cuda*) echo bf16 cpu ;;
*compare_losses.py*) for last; do :; done; [ -z "$DRAWS" ] || touch "$last" ;;
esac
"""


@pytest.mark.parametrize("draws", ["", "1"], ids=["no picture", "a picture"])
def test_the_quickstart_names_files_that_exist(tmp_path: Path, draws: str):
    """The picture of an earlier run is not this one's."""
    (tmp_path / "curves.png").touch()
    environment = dict(PATH=fake_python(tmp_path, PYTHON), OUT=str(tmp_path), DRAWS=draws, CUDA_VISIBLE_DEVICES="")
    environment["VIRTUAL_ENV"] = "/its/venv" if draws else ""
    done = run_tool("quickstart.sh", **environment)
    assert done.returncode == 0, done.stderr
    assert f"table: {tmp_path}/table.txt" in done.stdout and ("curves:" in done.stdout) == bool(draws)
    next_steps = done.stdout.partition("next, in ")[2]
    for module in ("doctor", "torchtitan.dry_run"):
        assert f"-m titan_fp8moe.{module} " in next_steps
        assert (ROOT / f"titan_fp8moe/{module.replace('.', '/')}.py").exists()
    assert "cp train_configs/debug.toml my_run.toml" in next_steps
    assert ("source /its/venv/bin/activate" in next_steps) == bool(draws)


FAKE_PYTHON = """\
case "$*" in
"- 0.2.2 torchtitan") echo $TORCHTITAN ;;
"- 0.2.2 "*) echo $LACKS ;;
*venv*) mkdir -p .venv/bin && echo 'export LACKS=' >.venv/bin/activate ;;
*progress.py*) cat ;;
esac
"""


@pytest.mark.parametrize(("lacks", "torchtitan", "venv", "code", "said"), [
    ("", "", None, 0, ""),
    ("ruff", "", None, 2, "lacks ruff; run in it: pip install -e '.[torchtitan,dev]'"),
    ("ruff", "", "export LACKS=", 0, ""),
    ("torch", "torchtitan", "export LACKS=ruff", 2, "lacks ruff; run in it"),
    ("torch", "torchtitan", None, 0, "Installing into .venv"),
], ids=["complete", "without dev", "own .venv", "own .venv without dev", "nothing"])  # fmt: skip
def test_one_environment_for_all_scripts(tmp_path: Path, lacks: str, torchtitan: str, venv: str, code: int, said: str):
    """None is built beside one that has torchtitan."""
    (tmp_path / "tools").mkdir()
    script = tmp_path / "tools/environment.sh"
    script.write_text((ROOT / "tools/environment.sh").read_text())
    if venv is not None:
        (tmp_path / ".venv/bin").mkdir(parents=True)
        (tmp_path / ".venv/bin/activate").write_text(venv)
    path = fake_python(tmp_path, FAKE_PYTHON)
    environment = os.environ | {"PATH": path, "LACKS": lacks, "TORCHTITAN": torchtitan}
    command = ["bash", "-euc", f"set -o pipefail; . {script} ruff; [ -z $LACKS ]"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=time_limit(15))
    assert done.returncode == code and said in done.stdout + done.stderr, done.stderr
    assert (tmp_path / ".venv").exists() == (venv is not None or said.startswith("Installing"))


@pytest.fixture
def compare(tmp_path, capsys, monkeypatch):
    """The quickstart's verdict on the losses of runs."""
    monkeypatch.setattr(compare_losses, "plot", lambda *_: None)

    def run(runs, *options):
        for name, losses in runs.items():
            with SummaryWriter(tmp_path / name) as writer:
                for step, loss in enumerate(losses, 1):
                    writer.add_scalar(compare_losses.LOSS, loss, step)
        status = compare_losses.main([*(f"--run={name}={tmp_path / name}" for name in runs), *options])
        return status, capsys.readouterr().out

    return run


@pytest.mark.parametrize("broken", ["bf16", "fp8"])
def test_a_loss_that_is_not_finite_fails(compare, broken):
    """In the middle too, where the last losses agree."""
    runs = dict(bf16=[4.0] * 99, fp8=[4.0] * 99) | {broken: [4.0] * 39 + [math.nan] + [4.0] * 59}
    status, output = compare(runs)
    assert status == 1 and f"FAIL {broken}: loss is nan at step 40" in output


@pytest.mark.parametrize("end", [4.05, 3.95])
@pytest.mark.parametrize(("tolerance", "failed"), [(0.013, 0), (0.012, 1)])
def test_the_end_alone_decides(compare, end, tolerance, failed):
    """There the mean of 20 steps is 1.25% from the reference. Before, losses were 25% from it."""
    runs = dict(bf16=[4.0] * 60, fp8=[5.0] * 20 + [4.0] * 20 + [end] * 20)
    status, output = compare(runs, f"--tolerance={tolerance}")
    assert status == failed == output.count("FAIL fp8: smoothed loss deviates")


@pytest.mark.parametrize("seed", ["", "-s2"])
def test_bf16_with_one_bit_changed_is_a_baseline(compare, seed):
    """Of its seed's run, not of the first. pairs.sh and quickstart.sh name it alike."""
    runs = {"bf16-s1": [5.0] * 40} if seed else {}
    runs |= {f"bf16{seed}": [4.0] * 40, f"bf16_bit{seed}": [4.12] * 40, f"fp8{seed}": [4.02] * 40}
    status, output = compare(runs)
    assert status == 0 and ("+3.000%" in output) and output.count("baseline\n") == len(runs) - 1
    most = "20.00%" if seed else "3.00%"
    assert f"yardstick: bf16 differs from itself by up to {most}" in output
    assert f"fp8 differs from bf16{seed} by +0.50% in the mean" in output


def test_a_setting_in_a_name_is_no_seed(compare):
    assert compare({"bf16": [4.0] * 40, "bf16-symmetric": [4.12] * 40})[0] == 1
