"""When ``dispatch = "auto"`` goes over to symmetric memory, and back."""

import pytest
import torch

from tests.layer import DEVICE
from tests.patched import undone
from titan_fp8moe import Fp8FlowMoEConfig
from titan_fp8moe.dispatch import auto
from titan_fp8moe.dispatch.symmetric.workspace import ROWS, NoRoom, Sizes, Workspace
from titan_fp8moe.layer import statistics
from titan_fp8moe.nn.linear import Fp8FlowLinear
from titan_fp8moe.trainer import auto_dispatch, preflight


@pytest.fixture(autouse=True)
def enabled(group):
    with undone():
        auto.enable(torch.device("cpu"))
        yield
        auto.disable()


def uniform(room: float) -> tuple[int, int]:
    return round(1100 * room), round(550 * room)


def note(rows: int, tokens: int = 500) -> None:
    auto.note((rows, tokens), 4, uniform)


def steps(count: int, rows: int) -> None:
    for _ in range(count):
        auto.run_step(lambda: note(rows), lambda: None)


def route() -> tuple[str, float]:
    return Fp8FlowMoEConfig(dispatch="auto").backend.description, auto.room()


@pytest.mark.parametrize(("layers", "room"), [  # of each step (rows, tokens)
    (19 * [[(100, 500)]] + [[(1000, 500), (1250, 500), (1000, 500)]], 1.25),
    (19 * [[(100, 500)]] + [[(1000, 500), (1251, 500), (1000, 500)]], 1.5),
    (19 * [[(100, 500)]] + [[(1000, 650)]], 1.5),
    (20 * [[(2500, 500)]], 2.5),
    (19 * [[(100, 500)]], 0),
    ([[(2501, 500)]] + 19 * [[(1000, 500)]], 0),  # more than any room
    ([[(2501, 500)]] + 20 * [[(1000, 500)]], 1.25),
    (20 * [[]], 0),
])  # fmt: skip
def test_room_for_the_fullest_layer_of_the_last_steps_and_a_tenth(layers, room):
    """Buffers may be full to the margin."""
    for step in layers:
        auto.run_step(lambda step=step: [note(*needed) for needed in step], lambda: None)
    assert route() == ("symmetric memory" if room else "all-to-all", room)
    with torch.no_grad():
        assert route()[0] == "all-to-all"


def test_room_for_all_that_can_come_suffices(monkeypatch):
    """The next job of the process may have its experts on one rank, or on two nodes: it is not taken for symmetric."""
    for _ in range(20):
        auto.run_step(lambda: auto.note((2200, 1100), 2, lambda room: uniform(min(room, 2))), lambda: None)
    assert auto.room() == 2.0
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    for shards in (1, 16):
        preflight.check_dispatch(Fp8FlowMoEConfig(), preflight.ExpertLayout(shards, 1, 2, 64))


def test_a_step_without_room_runs_again_and_the_next_attempt_waits():
    steps(20, 500)
    calls = []

    def step():
        calls.append(route()[0])
        if len(calls) == 1:
            raise NoRoom("full")
        note(1700)
        return "done"

    assert auto.run_step(step, lambda: calls.append("forgotten")) == "done"
    assert calls == ["symmetric memory", "forgotten", "all-to-all"]
    steps(38, 500)
    assert not auto.is_fast()
    steps(1, 500)
    assert auto.room() == 1.75
    auto.disable()
    with pytest.raises(NoRoom):
        auto.run_step(lambda: calls.clear() or step(), lambda: None)


@pytest.mark.parametrize(("layers", "room"), [((1800, 200), 2.0), ((2400, 1200, 1200), 2.5), ((2400, 450, 450), 0)])
def test_memory_for_the_rows_of_the_room(monkeypatch, layers, room):
    """The mean of the layers' rows is what the peak has been for: it is 60 of 100, of which 30 grow with the rows."""
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 30)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda _: 60)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (0, 100))
    auto.enable(torch.device("cuda", 0))
    for _ in range(20):
        auto.run_step(lambda: [note(rows) for rows in layers], lambda: None)
    assert auto.room() == room


@pytest.mark.parametrize(("mine", "others"), [(999, False), (0, True), (0, False)])
def test_ranks_ask_each_other_once_a_step(monkeypatch, mine, others):
    """Before the first of two optimizers; where one lacks room, they tell each other the room that the step needed."""
    steps(20, 500)
    calls, sizes = [], Sizes(1, 1, 128, 1, 1)
    at = Workspace(sizes, 0, [torch.zeros(sizes.nbytes, dtype=torch.uint8)], lambda: 1.0)
    at.report[ROWS] = mine

    def all_reduce(value, *_):
        calls.append(float(value))
        value.clamp_(min=others)

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    optimizers = [torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))]) for _ in range(2)]

    def step() -> None:
        if auto.is_fast():
            for optimizer in optimizers:
                optimizer.step()

    auto.run_step(step, lambda: None)
    assert calls[0] == bool(mine) and len(calls) == 1 + bool(mine or others)
    assert auto.is_fast() == (not mine and not others)


ONCE_ALL_FIT = "all-to-all, and over symmetric memory once all rows fit"


# The experts' ranks and those of their hidden dims, a node's ranks if a launcher tells, GPUs.
@pytest.mark.parametrize(("dispatch", "shards", "ranks", "gpus", "way"), [
    ("auto", (2, 1), "2", 0, ONCE_ALL_FIT),
    ("auto", (2, 2), "2", 0, "all-to-all: 4 ranks share the experts and a node has 2"),
    ("symmetric", (2, 1), "2", 0, "symmetric memory"),
    ("auto", (4, 1), "6", 0, "all-to-all: 4 ranks share the experts and a node has 6"),
    ("auto", (3, 1), "6", 6, ONCE_ALL_FIT),
    ("auto", (32, 1), None, 64, "all-to-all: LOCAL_WORLD_SIZE does not say how many ranks a node has"),
    ("symmetric", (32, 1), None, 8, "symmetric memory, if the 32 ranks share a node"),
    ("all_to_all", (32, 1), None, 0, "all-to-all"),
    ("auto", (2, 1), "2", -2, "all-to-all: a GPU cannot access another one's memory"),
])  # fmt: skip
def test_which_jobs_may_take_symmetric_memory(monkeypatch, dispatch, shards, ranks, gpus, way):
    """Those with MoE layers in FP8. A negative number of GPUs cannot read each other. A dry run knows no node."""
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if ranks is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: abs(gpus))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: gpus > 0)
    config, layout = Fp8FlowMoEConfig(dispatch=dispatch), preflight.ExpertLayout(*shards, 1, 64)
    assert auto_dispatch.prepare(config, layout, None, 1) == f"dispatch over {way}"
    assert auto.is_enabled() == way.startswith(ONCE_ALL_FIT)
    for none in ((layout._replace(expert_shards=1), None, 1), (layout, None, 0)):
        assert auto_dispatch.prepare(config, *none) == "" and not auto.is_enabled()
    if dispatch == "auto":
        assert auto_dispatch.prepare(config, layout, "its reason", 1) == "dispatch over all-to-all: its reason"
        assert not auto.is_enabled()
    with preflight.for_other_machines():
        ends = "" if dispatch == "all_to_all" else f", if the {shards[0] * shards[1]} ranks share a node"
        assert auto_dispatch.prepare(config, layout, None, 1).endswith(ends) and not auto.is_enabled()


@pytest.mark.parametrize("where", ["dataloader", "forward"])
def test_a_step_that_runs_again_counts_once(where):
    """Its tokens, which torchtitan 0.2.2 counts as it loads them, 0.3 in each forward, also in routers' counts and in
    statistics. It draws the same numbers. Rows of a step without room are NaN."""
    linear, router, x, logged, drawn = Fp8FlowLinear(128, 128), torch.nn.Module(), torch.randn(64, 128), [], []
    for name in ("tokens_per_expert", "tokens_per_expert_E", "nan_flags", "expert_bias"):
        router.register_buffer(name, torch.zeros(2))

    class Trainer:
        model_parts, ntokens_seen = [linear, router], 100

        def train_step(self, data):
            for size in [next(data) for _ in range(2)]:
                self.ntokens_seen += size if where == "forward" else 0
            drawn.append([torch.rand(8, device=device) for device in {"cpu", DEVICE}])
            for buffer in router.buffers():
                buffer += 1
            (linear(x) * (torch.nan if auto.is_fast() else 1)).sum().backward()
            if auto.is_fast():
                raise NoRoom("full")
            logged.append(self.ntokens_seen)

    def load():
        for size in (3, 4):
            trainer.ntokens_seen += size if where == "dataloader" else 0
            yield size

    auto_dispatch.run_steps_again(Trainer)
    steps(20, 500)
    trainer = Trainer()
    statistics.collect()
    trainer.train_step(load())
    assert logged == [107] and trainer.ntokens_seen == 107 and all(map(torch.equal, *drawn))
    assert [name for name, buffer in router.named_buffers() if (buffer == 2).all()] == ["expert_bias"]
    counts = statistics.summarize(statistics.take("cpu"))
    assert counts["dy/nan_tiles"] == 0 and counts["dy/exponent_max"] == -8
