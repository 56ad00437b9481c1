"""When ``dispatch = "auto"`` goes over to symmetric memory, and back."""

import dataclasses
import logging

import pytest
import torch

from titan_fp8moe import Fp8FlowMoEConfig, patches
from titan_fp8moe.dispatch import auto
from titan_fp8moe.dispatch.symmetric.workspace import NoRoom
from titan_fp8moe.trainer import auto_dispatch, preflight


@pytest.fixture(autouse=True)
def enabled(monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(auto, "_greatest", float)
    with patches.undone():
        auto.enable(torch.device("cpu"), 1.5)
        yield
        auto.disable()


def steps(count: int, share: float) -> None:
    for _ in range(count):
        auto.run_step(lambda: auto.note(int(1000 * share), 1000, 2000), lambda: None)


def backend() -> str:
    return dataclasses.replace(Fp8FlowMoEConfig(), dispatch="auto").backend.description


def test_calm_steps_follow_each_other():
    steps(9, 0.8)
    steps(1, 0.81)
    steps(9, 0.8)
    assert backend() == "all-to-all"
    steps(1, 0.1)
    assert backend() == "symmetric memory"
    with torch.no_grad():
        assert backend() == "all-to-all"


def test_steps_without_a_layer_are_not_calm():
    for _ in range(20):
        auto.run_step(lambda: None, lambda: None)
    assert not auto.is_fast()


def test_room_for_all_that_can_come_suffices():
    for _ in range(10):
        auto.run_step(lambda: auto.note(1000, 1000, 1000), lambda: None)
    assert auto.is_fast()


def test_a_step_without_room_runs_again_and_the_next_attempt_waits():
    steps(10, 0.5)
    calls = []

    def step():
        calls.append(backend())
        if len(calls) == 1:
            raise NoRoom("full")
        auto.note(1, 1000, 2000)
        return "done"

    assert auto.run_step(step, lambda: calls.append("forgotten")) == "done"
    assert calls == ["symmetric memory", "forgotten", "all-to-all"]
    steps(18, 0.5)
    assert not auto.is_fast()
    steps(1, 0.5)
    assert auto.is_fast()


@pytest.mark.parametrize(("memory", "reason"), [(True, "filled 90% to 90%"), (False, "too little memory")])
def test_the_log_says_why(monkeypatch, caplog, memory, reason):
    monkeypatch.setattr(auto, "_has_memory", lambda: memory)
    steps(100, 0.9 if memory else 0.1)
    (said,) = [record.getMessage() for record in caplog.records]
    assert "100 steps over the all-to-all" in said and reason in said


def test_memory_for_the_rows_of_the_room(monkeypatch):
    """The peak is 60 of 100, of which 30 may grow by a half."""
    monkeypatch.setattr(auto._state, "device", torch.device("cuda", 0))
    for before, fits in ((30, True), (-21, False)):
        monkeypatch.setattr(auto._state, "before", before)
        monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda _: 60)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (0, 100))
        assert auto._has_memory() == fits


def test_disabled_nothing_is_run_again():
    auto.disable()
    with pytest.raises(NoRoom):
        auto.run_step(lambda: (_ for _ in ()).throw(NoRoom("full")), lambda: None)


@pytest.mark.parametrize(
    ("settings", "shards", "local", "reason", "way"),
    [
        ({}, 2, "2", None, "dispatch over all-to-all, and over symmetric memory once all rows fit"),
        ({}, 4, "2", None, "dispatch over all-to-all: 4 ranks share the experts and a node has 2"),
        ({}, 2, "2", "a job's reason", "dispatch over all-to-all: a job's reason"),
        ({}, 1, "2", None, ""),
        (dict(dispatch="all_to_all"), 2, "2", None, "dispatch over all-to-all"),
        (dict(dispatch="symmetric"), 2, "2", None, "dispatch over symmetric memory"),
    ],
)
def test_which_jobs_may_take_symmetric_memory(monkeypatch, settings, shards, local, reason, way):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    layout = preflight.ExpertLayout(shards, 1, 1, 64)
    assert auto_dispatch.prepare(Fp8FlowMoEConfig(**settings), layout, reason) == way
    assert auto.is_enabled() == way.endswith("once all rows fit")
