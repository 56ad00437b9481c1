"""Records keep what was measured, and say how."""

import json
import lzma
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from experiments import records
from experiments.records import environment, write_records


def test_records_are_replaced_whole(tmp_path: Path, monkeypatch):
    path = tmp_path / "results.json"
    record = records.record("a", "s", "ms", 1, "r", 2)
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


@pytest.mark.skipif(not shutil.which("git"), reason="needs git")
def test_commit_of_a_checkout(tmp_path: Path, monkeypatch):
    """Other Python files than a commit's give it a "+"; records do not. A copy without git names its own."""
    (tmp_path / "package").mkdir()
    monkeypatch.setattr(records, "__file__", str(tmp_path / "package/records.py"))
    monkeypatch.setattr(records, "commit", records.commit.__wrapped__)
    monkeypatch.delenv("TITAN_FP8MOE_COMMIT", raising=False)
    assert environment()["commit"] is None

    def git(*args: str) -> str:
        command = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b", *args]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    (tmp_path / "a.py").write_text("a = 1\n")
    for command in (["init"], ["add", "a.py"], ["commit", "-m", "a"]):
        git(*command)
    commit = git("rev-parse", "--short", "HEAD")
    for name, mark in (("results.json", ""), ("b.py", "+")):
        (tmp_path / name).touch()
        assert environment()["commit"] == commit + mark
    (tmp_path / "b.py").unlink()
    (tmp_path / "a.py").write_text("a = 2\n")
    assert environment()["commit"] == f"{commit}+"
    monkeypatch.setenv("TITAN_FP8MOE_COMMIT", "abc1234")
    assert environment()["commit"] == "abc1234"


def test_the_long_run_is_its_losses():
    """The kept losses of every step give the records of the 3,000 steps."""
    folder = Path(__file__).parents[1] / "experiments/convergence"
    with lzma.open(folder / "3000_steps.json.xz") as file:
        runs = json.load(file)
    measured = {
        "training loss, last quarter": lambda run: statistics.fmean(run["loss_metrics/global_avg_loss"][-750:]),
        "held-out loss": lambda run: run["validation_metrics/loss"][-1],
        "speed": lambda run: statistics.harmonic_mean(run["throughput(tps)"][10:]),
        "memory": lambda run: max(run["memory/max_reserved(GiB)"]),
    }
    by_name = {name: {tag: list(values.values()) for tag, values in tags.items()} for name, tags in runs.items()}
    names = {"bf16": "bf16-s1", "bf16, one bit of a weight changed": "bf16_bit-s1"}
    records = [r for r in json.loads((folder / "results.json").read_text()) if r["name"].startswith("3,000 steps: ")]
    assert len(records) == 8
    for r in records:
        of = measured[r["name"].partition(": ")[2]]
        want = of(by_name["fp8-s1"]), of(by_name[names[r["reference"]]])
        assert (r["value"], r["reference_value"]) == pytest.approx(want), r["name"]
