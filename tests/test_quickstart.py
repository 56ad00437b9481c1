"""Tests what tools/quickstart.sh and tools/run_train.sh show of a run, and how they end when it fails."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from tests.processes import call, time_limit
from tools import launch, progress
from tools.one_bit import change_one_bit

ROOT = Path(__file__).parents[1]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1", "--tee=3"]
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
    return subprocess.run([*script, *command], capture_output=True, text=True, timeout=time_limit(60))


def test_torchrun_ends_with_the_error_of_a_rank(tmp_path: Path):
    (tmp_path / "script.py").write_text("print('begun')\nraise ValueError('set a to b')\n")
    done = launched(*TORCHRUN, str(tmp_path / "script.py"))
    assert done.returncode == 1
    assert "begun" in done.stdout and "ChildFailedError" in done.stdout
    assert done.stdout.splitlines()[-1] == "error: ValueError: set a to b"


TORCHRUN_SAYS = "E1127 20:48:21 1 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 1) pid: 2"


@pytest.mark.parametrize(("rank", "report", "shown", "error"), [
    ("ValueError: a", "exitcode  : 1 (pid: 2)\n  ValueError: a", False, "ValueError: a"),
    (BOX, "exitcode  : 2 (pid: 2)", False, "invalid choice 'foo' for argument '--wgrad'. Expected one of "),
    ("KeyError: 1", "rank      : 1\n  ValueError: of a rank that is not shown", True, "ValueError: of a rank"),
    ("KeyError: 1", "exitcode  : -9 (pid: 2)\ntraceback : Signal 9 (SIGKILL)", True, "KeyError: 1"),
])  # fmt: skip
def test_torchrun_repeats_no_error(tmp_path: Path, rank: str, report: str, shown: bool, error: str):
    (tmp_path / "log").write_text(f"[rank0]:{rank}\n{TORCHRUN_SAYS}\nTraceback\n{report}\n====\n")
    done = launched("sh", "-c", f"cat {tmp_path}/log; exit 1")
    assert done.returncode == 1 and (TORCHRUN_SAYS in done.stdout) == ("====" in done.stdout) == shown
    assert done.stdout.splitlines()[-1].startswith(f"error: {error}")


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
"""


def test_lines_appear_when_they_are_printed(tmp_path: Path):
    """Through torchrun's pipe and through that of launch.py; both would collect 8 KB."""
    (tmp_path / "ticks.py").write_text(TICKS)
    command = [sys.executable, str(ROOT / "tools/launch.py"), *TORCHRUN, str(tmp_path / "ticks.py")]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        at = [time.monotonic() for line in process.stdout if "tick" in line]
    assert process.returncode == 0 and len(at) == 5
    assert at[-1] - at[0] > 0.4  # at most two of the pauses were lost on a busy machine


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


@pytest.mark.parametrize("script", ["run_train.sh", "quickstart.sh"])
def test_a_wrong_config_file_is_found_before_imports(script: str):
    """Some 30 seconds of them, on a machine that has not read torch yet."""
    done = run_tool(script, CONFIG_FILE="train_configs/no_such.toml")
    assert done.returncode == 2 and done.stdout == ""
    assert re.fullmatch(r".*CONFIG_FILE = train_configs/no_such.toml: no such file; .*\n", done.stderr)


@pytest.mark.parametrize(("variable", "remedy"), [
    ("COMM_MODE", "python3 -m titan_fp8moe.torchtitan.dry_run train_configs/debug.toml --world-size 8"),
    ("TRAIN_FILE", "start that module with torchrun"),
])  # fmt: skip
def test_variables_of_torchtitans_script_are_not_ignored(variable: str, remedy: str):
    done = run_tool("run_train.sh", NGPU="8", **{variable: "fake_backend"})
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith(f"error: {variable} = fake_backend") and remedy in done.stderr


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


@pytest.mark.parametrize(("variables", "arguments", "said"), [
    ({"STEPS": "abc"}, "", "STEPS = abc; set it to a whole number from 1"),
    ({"STEPS": "0"}, "", "STEPS = 0; set it"),
    ({"NGPU": "two"}, "--torchtitan03", "NGPU = two; set it"),
    ({}, "--torchtitan3", "--torchtitan3 is no option; known are --torchtitan03"),
    ({}, "-torchtitan03", "-torchtitan03 is no option; known are --torchtitan03"),
    ({}, "torchtitan03", "torchtitan03 is no option; known are --torchtitan03"),
    ({}, "--training.steps 2 --torchtitan03", "--torchtitan03 is no option; known are --torchtitan03, as the first"),
])  # fmt: skip
def test_the_quickstart_refuses_mistakes_before_any_work(tmp_path: Path, variables: dict, arguments: str, said: str):
    """No baseline of an earlier run is removed, no corpus built."""
    path = fake_python(tmp_path, "touch $(dirname $0)/worked")
    done = run_tool("quickstart.sh", *arguments.split(), PATH=path, **variables)
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.startswith(f"error: {said}"), done.stderr
    assert not (tmp_path / "worked").exists()


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


TRAIN = """\
import torch
model = torch.nn.Sequential()
model.layers = torch.nn.Sequential(torch.nn.Linear(2, 2))
weight = model.layers[0].weight.detach()
before = weight.clone()
model(torch.ones(2)), model(torch.ones(2))
print(before.view(torch.int32) ^ weight.view(torch.int32))
"""


def test_one_bit_of_one_weight_is_changed(tmp_path: Path):
    (tmp_path / "torchtitan").mkdir()
    (tmp_path / "torchtitan/__init__.py").touch()
    (tmp_path / "torchtitan/train.py").write_text(TRAIN)
    variables = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    command = [sys.executable, "-m", "tools.one_bit"]
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=time_limit(60))
    assert re.findall(r"\d+", done.stdout.partition("dtype")[0]) == [str(2**16), "0", "0", "0"], done.stderr


def _changed_bits(rank: int) -> int:
    """One of four ranks: two replicas of two shards of a weight with one row, so the second shard is empty."""
    torch.distributed.init_process_group("fake", rank=rank, world_size=4)
    mesh, shard = init_device_mesh("cpu", (2, 2)), torch.zeros(1 - rank % 2, 4)
    weight = DTensor.from_local(shard, mesh, [Replicate(), Shard(0)], shape=torch.Size([1, 4]), stride=(4, 1))
    layer = nn.Linear(4, 1, bias=False)
    layer.weight = nn.Parameter(weight)
    change_one_bit(nn.ModuleDict({"layers": nn.ModuleDict({"0": layer})}))
    return int(shard.count_nonzero())


def test_ranks_change_the_same_bit():
    assert [call(_changed_bits, rank) for rank in range(4)] == [1, 0, 1, 0]


def test_a_later_pipeline_stage_changes_no_bit():
    stage = nn.ModuleDict({"layers": nn.ModuleDict({"7": nn.Linear(2, 2)})})
    before = [param.clone() for param in stage.parameters()]
    change_one_bit(stage)
    assert all(map(torch.equal, before, stage.parameters()))
