"""When ``dispatch = "auto"`` goes over to symmetric memory, and back."""

import dataclasses
import logging

import pytest
import torch

from tests.patched import undone
from titan_fp8moe import Fp8FlowMoEConfig
from titan_fp8moe.dispatch import auto
from titan_fp8moe.dispatch.symmetric.workspace import ROWS, NoRoom, Sizes, Workspace
from titan_fp8moe.layer import statistics
from titan_fp8moe.nn.modules import Fp8FlowLinear
from titan_fp8moe.trainer import auto_dispatch, preflight


@pytest.fixture(autouse=True)
def enabled(group, caplog):
    caplog.set_level(logging.INFO)
    with undone():
        auto.enable(torch.device("cpu"))
        yield
        auto.disable()


def uniform(room: float) -> tuple[int, int]:
    return round(1000 * room), round(500 * room)


def note(rows: int, tokens: int = 500) -> None:
    auto.note((rows, tokens), 4, uniform)


def steps(count: int, rows: int) -> None:
    for _ in range(count):
        auto.run_step(lambda: note(rows), lambda: None)


def route() -> tuple[str, float]:
    config = dataclasses.replace(Fp8FlowMoEConfig(), dispatch="auto")
    return config.backend.description, auto.room()


@pytest.mark.parametrize(
    ("rows", "tokens", "room"),
    [(1000, 500, 1.25), (1136, 500, 1.25), (1137, 500, 1.5), (1000, 600, 1.5), (2272, 500, 2.5)],
)
def test_room_for_the_fullest_layer_and_a_tenth(rows, tokens, room):
    steps(19, 100)
    assert route() == ("all-to-all", 0)
    auto.run_step(lambda: (note(1000), note(rows, tokens), note(1000)), lambda: None)
    assert route() == ("symmetric memory", room)
    with torch.no_grad():
        assert route()[0] == "all-to-all"


@pytest.mark.parametrize("shards", [1, 16])
def test_a_next_job_of_the_process_is_not_taken_for_symmetric(monkeypatch, shards):
    """Whose experts are on one rank, or on two nodes: its checks come before auto begins anew."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    steps(20, 1000)
    assert route()[0] == "symmetric memory"
    preflight.check_dispatch(Fp8FlowMoEConfig(), preflight.ExpertLayout(shards, 1, 2, 64))


def test_buffers_may_be_filled_to_the_margin(monkeypatch):
    monkeypatch.setattr(auto, "MARGIN", 1.25)
    steps(20, 1000)
    assert auto.room() == 1.25


def test_the_fullest_of_the_last_steps_counts():
    steps(1, 2273)  # more than any room
    steps(19, 1000)
    assert not auto.is_fast()
    steps(1, 1000)
    assert auto.room() == 1.25


def test_steps_without_a_layer_do_not_count():
    for _ in range(20):
        auto.run_step(lambda: None, lambda: None)
    assert not auto.is_fast()


def test_room_for_all_that_can_come_suffices():
    for _ in range(20):
        auto.run_step(lambda: auto.note((2000, 1000), 2, lambda room: uniform(min(room, 2))), lambda: None)
    assert auto.room() == 2.0


def test_a_step_without_room_runs_again_and_the_next_attempt_waits():
    steps(20, 500)
    calls = []

    def step():
        calls.append(route()[0])
        if len(calls) == 1:
            raise NoRoom("full")
        note(1500)
        return "done"

    assert auto.run_step(step, lambda: calls.append("forgotten")) == "done"
    assert calls == ["symmetric memory", "forgotten", "all-to-all"]
    steps(38, 500)
    assert not auto.is_fast()
    steps(1, 500)
    assert auto.room() == 1.75


@pytest.fixture
def gpu(monkeypatch):
    """The peak is 60 of 100, of which 30 grow with the rows."""
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 30)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda _: 60)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (0, 100))
    auto.enable(torch.device("cuda", 0))


@pytest.mark.parametrize(
    ("layers", "reason"),
    [((2500,), "for more than 2.5 times"), ((2200, 400, 400), "too little memory for 2.5 times")],
)
def test_the_log_says_why(gpu, caplog, layers, reason):
    for _ in range(110):
        auto.run_step(lambda: [note(rows) for rows in layers], lambda: None)
    (said,) = [record.getMessage() for record in caplog.records]
    assert "100 steps over the all-to-all" in said and reason in said


@pytest.mark.parametrize(("layers", "room"), [((1800, 200), 2.0), ((2200, 400, 400), 0), ((2200, 1150, 1150), 2.5)])
def test_memory_for_the_rows_of_the_room(gpu, layers, room):
    """The mean of the layers' rows is what the peak has been for."""
    for _ in range(20):
        auto.run_step(lambda: [note(rows) for rows in layers], lambda: None)
    assert auto.room() == room


@pytest.mark.parametrize(
    ("mine", "others", "raised"),
    [(999, False, "would have needed 999 rows"), (0, True, "other expert-parallel ranks"), (0, False, None)],
)
def test_ranks_ask_each_other_once_a_step(monkeypatch, caplog, mine, others, raised):
    steps(20, 500)
    calls, sizes = [], Sizes(1, 1, 128, 1, 1)
    at = Workspace(sizes, 0, [torch.zeros(sizes.nbytes, dtype=torch.uint8)], lambda: 1.0)
    at.report[ROWS] = mine

    def all_reduce(value, *_):
        calls.append(float(value))
        value.clamp_(min=others)

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizers = [torch.optim.SGD([parameter]) for _ in range(2)]

    def step() -> None:
        if auto.is_fast():
            for optimizer in optimizers:
                optimizer.step()

    caplog.clear()
    auto.run_step(step, lambda: None)
    assert calls[0] == bool(mine) and len(calls) == 1 + bool(raised)  # then others tell the room that a step needed
    said = [record.getMessage() for record in caplog.records]
    assert (raised in said[0]) if raised else not said


def test_disabled_nothing_is_run_again():
    auto.disable()
    with pytest.raises(NoRoom):
        auto.run_step(lambda: (_ for _ in ()).throw(NoRoom("full")), lambda: None)


@pytest.mark.parametrize(
    ("settings", "shards", "reason", "way"),
    [
        ({}, (2, 1), None, "dispatch over all-to-all, and over symmetric memory once all rows fit"),
        ({}, (4, 1), None, "dispatch over all-to-all: 4 ranks share the experts and a node has 2"),
        ({}, (2, 2), None, "dispatch over all-to-all: 4 ranks share the experts and a node has 2"),
        ({}, (2, 1), "a job's reason", "dispatch over all-to-all: a job's reason"),
        ({}, (1, 1), None, ""),
        (dict(dispatch="all_to_all"), (2, 1), None, "dispatch over all-to-all"),
        (dict(dispatch="symmetric"), (2, 1), None, "dispatch over symmetric memory"),
    ],
)
def test_which_jobs_may_take_symmetric_memory(monkeypatch, settings, shards, reason, way):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    layout = preflight.ExpertLayout(*shards, 1, 64)
    assert auto_dispatch.prepare(Fp8FlowMoEConfig(**settings), layout, reason) == way
    assert auto.is_enabled() == way.endswith("once all rows fit")


@pytest.mark.parametrize(
    ("dispatch", "gpus", "way"),
    [
        ("auto", 0, "all-to-all, and over symmetric memory once all rows fit, if the 32 ranks share a node"),
        ("auto", 8, "all-to-all: 32 ranks share the experts and a node has 8"),
        ("auto", 64, "all-to-all, and over symmetric memory once all rows fit, if the 32 ranks share a node"),
        ("symmetric", 8, "symmetric memory, if the 32 ranks share a node"),
        ("all_to_all", 0, "all-to-all"),
    ],
)
def test_without_torchrun_nobody_tells_how_many_ranks_a_node_has(monkeypatch, dispatch, gpus, way):
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: True)
    layout = preflight.ExpertLayout(32, 1, 1, 64)
    said, _ = auto_dispatch.describe(Fp8FlowMoEConfig(dispatch=dispatch), layout, None)
    assert said == f"dispatch over {way}"


def test_a_dry_run_knows_no_node(monkeypatch):
    """Whatever this machine's launcher and GPUs are."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    for dispatch in ("auto", "symmetric"):
        with preflight.for_other_machines():
            way, _ = auto_dispatch.describe(
                Fp8FlowMoEConfig(dispatch=dispatch), preflight.ExpertLayout(32, 1, 1, 64), None
            )
        assert way.endswith(", if the 32 ranks share a node")


def test_gpus_that_cannot_read_each_other_take_the_all_to_all(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: False)
    way = auto_dispatch.prepare(Fp8FlowMoEConfig(), preflight.ExpertLayout(2, 1, 1, 64), None)
    assert way == "dispatch over all-to-all: a GPU cannot access another one's memory" and not auto.is_enabled()


def again(train_step, *model_parts: torch.nn.Module) -> None:
    """A step of this trainer, which has no room the first time."""
    steps(20, 500)

    class Trainer:
        ntokens_seen = 0

        def train_step(self, data_iterator):
            train_step()
            if auto.is_fast():
                raise NoRoom("full")

    Trainer.model_parts = list(model_parts)
    auto_dispatch.run_steps_again(Trainer)
    Trainer().train_step(iter([]))


def test_what_a_forward_leaves_behind_is_cleared():
    layer = torch.nn.Module()
    for name in ("tokens_per_expert", "tokens_per_expert_E", "nan_flags", "expert_bias"):
        layer.register_buffer(name, torch.zeros(2))

    def train_step():
        for buffer in layer.buffers():
            buffer += 1

    again(train_step, torch.nn.Sequential(layer))
    assert [name for name, buffer in layer.named_buffers() if (buffer == 2).all()] == ["expert_bias"]


@pytest.mark.parametrize("where", ["dataloader", "forward"])
def test_a_step_that_runs_again_counts_its_tokens_once(where):
    """torchtitan 0.2.2 counts them as it loads them, 0.3 in each forward. The step logs their number."""
    steps(20, 500)
    logged, outcomes = [], [NoRoom("full"), None]

    class Trainer:
        model_parts, ntokens_seen = [], 100

        def train_step(self, data_iterator):
            for size in [next(data_iterator) for _ in range(2)]:
                self.ntokens_seen += size if where == "forward" else 0
            if error := outcomes.pop(0):
                raise error
            logged.append(self.ntokens_seen)

    def load():
        for size in (3, 4):
            trainer.ntokens_seen += size if where == "dataloader" else 0
            yield size

    auto_dispatch.run_steps_again(Trainer)
    trainer = Trainer()
    trainer.train_step(load())
    assert logged == [107] and trainer.ntokens_seen == 107


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("noise", ["dropout", "router", "compiled"])
def test_a_step_that_runs_again_draws_the_same_numbers(device, noise):
    """And the next steps those of a run over the all-to-all."""
    layer = {
        "dropout": torch.nn.Dropout(),
        "router": lambda x: x + torch.randn_like(x),
        "compiled": torch.compile(torch.nn.Dropout(), backend="aot_eager"),
    }[noise]

    class Trainer:
        model_parts, ntokens_seen, drawn = [], 0, []

        def train_step(self, data_iterator):
            self.drawn.append([layer(torch.ones(8, device=device)) for _ in range(next(data_iterator))])
            if self.drawn is second and len(second) == 2:
                raise NoRoom("full")

    auto_dispatch.run_steps_again(Trainer)
    first, second = [], []
    for Trainer.drawn in (first, second):
        steps(20, 500)
        assert auto.is_fast()
        torch.manual_seed(0)
        for _ in range(3):
            Trainer().train_step(iter([2]))
    assert len(first) == 3 and len(second) == 4 and not auto.is_fast()
    for want, got in zip([*first[:2], *first[1:]], second, strict=True):
        assert all(map(torch.equal, want, got))


def test_statistics_count_no_step_without_room():
    """Its rows are NaN. What is run again counts."""
    linear, x = Fp8FlowLinear(128, 128), torch.randn(64, 128, requires_grad=True)
    statistics.collect()
    again(lambda: (linear(x) * (torch.nan if auto.is_fast() else 1)).sum().backward(), linear)
    counts = statistics.summarize(statistics.take("cpu"))
    assert counts["dy/nan_tiles"] == 0 and counts["dy/exponent_max"] == -8
