"""What tests share: workers that fail or hang end, and a case that ends them does not fail those after it."""

import subprocess

import pytest
import torch

from tests.distributed import conftest
from tests.processes import TIMED_OUT, run_script, run_workers


def test_a_case_that_ends_the_workers_fails_alone(tmp_path, monkeypatch):
    runs = []

    def run_workers(script, num_ranks, out, *names, cpu_only):
        runs.append(names)
        for name in names:
            if name == "raises":
                torch.save({"error": "its traceback"}, f"{out}/{name}.pt")
                return subprocess.CompletedProcess([], 1, "", "")
            if name in ("crashes", "hangs"):
                return subprocess.CompletedProcess([], 1, "", f"{name} ended it")
            torch.save({"name": name}, f"{out}/{name}.pt")
        return subprocess.CompletedProcess([], 0, "", "")

    monkeypatch.setattr(conftest, "run_workers", run_workers)
    results = conftest.WorkerResults(
        tmp_path, "worker.py", {2: ["a", "crashes", "b", "raises", "hangs", "c"]}, cpu_only=True
    )
    assert [results.get(name)["name"] for name in ("c", "a", "b")] == ["c", "a", "b"] and len(runs) == 4
    for name in ("crashes", "hangs"):
        with pytest.raises(AssertionError, match=rf"no result for {name}[^\n]*\n\s*{name} ended it"):
            results.get(name)
    with pytest.raises(AssertionError, match="its traceback"):
        results.get("raises")
    assert runs == [
        ("a", "crashes", "b", "raises", "hangs", "c"),
        ("b", "raises", "hangs", "c"),
        ("hangs", "c"),
        ("c",),
    ]


def test_workers_that_never_begin_are_not_tried_for_each_case(tmp_path, monkeypatch):
    runs = []
    done = subprocess.CompletedProcess([], 1, "", "ImportError")
    monkeypatch.setattr(conftest, "run_workers", lambda *args, **options: runs.append(args) or done)
    results = conftest.WorkerResults(tmp_path, "worker.py", {2: [*"abcdef"]}, cpu_only=True)
    for name in "abcdef":
        with pytest.raises(AssertionError, match="ImportError"):
            results.get(name)
    assert len(runs) == 2


def test_a_rank_that_fails_ends_the_others():
    code = "import os, sys, time; time.sleep(1000) if os.environ['RANK'] == '0' else sys.exit('its reason')"
    done = run_workers("-c", 2, code, cpu_only=True)
    assert (done.returncode, done.stderr.strip()) == (1, "its reason")


def test_a_process_that_hangs_ends():
    done = run_script("-c", "import time; print('begun', flush=True); time.sleep(1000)", seconds=1)
    assert (done.returncode, done.stdout) == (TIMED_OUT, "begun\n") and "stopped after" in done.stderr
