"""Helpers that tests and experiments share: inputs are as described, and records keep what was measured."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from experiments import provenance, timing
from experiments.provenance import environment
from experiments.records import write_records
from experiments.timing import AFTER_IDLING, BACK_TO_BACK, group_ends, median_ms
from tests.processes import run_script
from titan_fp8moe.recipe import TILE


@pytest.mark.parametrize("rows,experts", [(2048, 8), (98304, 64), (204800, 256)])
def test_group_ends(rows, experts):
    ends = group_ends(rows, experts, "cpu")
    sizes = ends.diff(prepend=ends.new_zeros(1))
    assert ends.dtype == torch.int32 and ends.shape == (experts,) and ends[-1] == rows
    assert (sizes >= 0).all() and (sizes % TILE == 0).all()
    assert torch.equal(ends, group_ends(rows, experts, "cpu"))


def test_medians_by_state(monkeypatch, capsys):
    """Of candidates that take turns; a reference that fails is named and left out, ours is an error."""
    monkeypatch.setattr(timing, "CUDA", True)
    times = iter([3.0, 1.0, 2.0, 5.0, 4.0])
    monkeypatch.setattr(timing, "back_to_back_ms", lambda run: next(times))
    monkeypatch.setattr(timing, "after_idling_ms", lambda run: run() + 0.5)

    def refused() -> float:
        raise RuntimeError("no kernel for this GPU")

    candidates = {"ours": lambda: 7.0, "reference": refused}
    assert median_ms(candidates) == {BACK_TO_BACK: {"ours": 3.0}, AFTER_IDLING: {"ours": 7.5}}
    assert "reference: no kernel for this GPU" in capsys.readouterr().err
    with pytest.raises(RuntimeError, match="no kernel"):
        median_ms({"ours, fp32": refused})


@pytest.mark.gpu
def test_times_on_a_gpu():
    busy = timing.elapsed_ms(lambda: timing.occupy(1, 2.0))
    assert busy > 1.9  # others may use the GPU, and the first launch compiles
    found = median_ms({"ours": lambda: timing.occupy(1, 1.0)}, busy_sms=True)
    assert len(found) == 3 and all(ms["ours"] > 0.9 for ms in found.values())


def test_records_are_replaced_whole(tmp_path: Path, monkeypatch):
    path = tmp_path / "results.json"
    record = dict(name="a", shape="s", reference="r", value=1)
    write_records(path, [record])
    with monkeypatch.context() as context:
        context.setattr("os.replace", lambda *_: sys.exit("ended here"))
        with pytest.raises(SystemExit):
            write_records(path, [record | dict(value=2)])
    assert [r["value"] for r in json.loads(path.read_text())] == [1]
    write_records(path, [record | dict(value=3), record | dict(shape="t")])
    assert [(r["shape"], r["value"]) for r in json.loads(path.read_text())] == [("s", 3), ("t", 1)]


def test_records_say_how_they_were_made(monkeypatch, tmp_path):
    monkeypatch.setattr("sys.argv", ["experiments/a.py", "--b", "c d", str(tmp_path / "e")])
    for spec, command in ((None, "python experiments/a.py"), (SimpleNamespace(name="x.a"), "python -m x.a")):
        monkeypatch.setattr(sys.modules["__main__"], "__spec__", spec)
        assert environment()["command"] == f"{command} --b 'c d' e"


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch) -> Path:
    """A checkout that seems to hold this package; its commit is asked for anew."""
    (tmp_path / "package").mkdir()
    monkeypatch.setattr(provenance, "__file__", str(tmp_path / "package/provenance.py"))
    monkeypatch.setattr(provenance, "commit", provenance.commit.__wrapped__)
    return tmp_path


@pytest.mark.skipif(not shutil.which("git"), reason="needs git")
def test_commit_of_a_checkout(checkout: Path):
    def git(*args: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        return subprocess.run(
            ["git", *identity, *args], cwd=checkout, check=True, capture_output=True, text=True
        ).stdout

    (checkout / "a.py").write_text("a = 1\n")
    git("init")
    git("add", "a.py")
    git("commit", "-m", "a")
    commit = git("rev-parse", "--short", "HEAD").strip()
    (checkout / "results.json").write_text("[]")
    assert environment()["commit"] == commit
    (checkout / "a.py").write_text("a = 2\n")
    assert environment()["commit"] == f"{commit}+"
    git("checkout", "a.py")
    (checkout / "b.py").touch()
    assert environment()["commit"] == f"{commit}+"


def test_commit_of_a_copy_without_git(checkout: Path, monkeypatch):
    monkeypatch.delenv("TITAN_FP8MOE_COMMIT", raising=False)
    assert environment()["commit"] is None
    monkeypatch.setenv("TITAN_FP8MOE_COMMIT", "abc1234")
    assert environment()["commit"] == "abc1234"


GPU_SCRIPTS = sorted(
    path
    for folder in ("kernels", "throughput", "transformers", "expert_parallel")
    for path in (Path(__file__).parents[1] / "experiments" / folder).glob("*.py")
    if "__main__" in path.read_text() and path.stem not in ("setting",)
)


def test_scripts_ask_for_a_gpu_first():
    assert len(GPU_SCRIPTS) > 10
    for path in GPU_SCRIPTS:
        main = path.read_text().split("\ndef main(")[1]
        assert "begin(args.trial)" in main, path


@pytest.mark.skipif(torch.cuda.is_available(), reason="without a GPU")
def test_a_script_without_a_gpu_ends_with_a_sentence():
    done = run_script("-m", "experiments.kernels.gemm", "--out", "o")
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: this measures on a GPU, and PyTorch")
