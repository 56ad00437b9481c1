"""The streams of a workspace's transfers, and the events that the host waits for before an optimizer's step, without a
GPU. tests/distributed has real replays."""

import contextlib
import threading
from collections.abc import Callable

import pytest
import torch

from titan_fp8moe import check_room
from titan_fp8moe.dispatch.symmetric.workspace import ROWS, Sizes, Workspace
from titan_fp8moe.kernels import launch


class Stream:
    """``seen``: what the stream has been given, and what comes before that."""

    def __init__(self):
        self.seen = set()

    def wait_event(self, event: "Event") -> None:
        self.seen |= event.seen

    def wait_stream(self, other: "Stream") -> None:
        self.seen |= other.seen


class Event:
    """Stands for a GPU that works only when the host syncs. A capture makes external events nodes of a graph."""

    nodes: list["Event"] | None = None
    pending: Callable[[], None] | None = None

    def __init__(self, external: bool = False):
        self.external = external

    def record(self, stream: Stream | None = None) -> None:
        self.seen = {*(stream or torch.cuda.current_stream()).seen}
        if Event.nodes is not None:
            assert self.external, "CUDA could not wait for it after the capture"
            assert self not in Event.nodes, "CUDA does not say for which node of a graph an event stands"
            Event.nodes.append(self)

    def query(self) -> bool:
        return self.pending is None

    def synchronize(self) -> None:
        pending, self.pending = self.pending, None
        pending()


@pytest.fixture
def at(monkeypatch) -> Workspace:
    monkeypatch.setattr(Event, "nodes", None)
    current = Stream()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: current)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: Event.nodes is not None)
    sizes = Sizes(2, 8, 128, 2, 2)
    at = Workspace(sizes, 0, [torch.zeros(sizes.nbytes, dtype=torch.uint8) for _ in range(2)], lambda: 1.0)
    at._planned, at.stream, at._forked, at._moved = [Event()], Stream(), Event(), Event()
    at.planned()
    return at


def capture(at: Workspace, layers: int) -> list[Event]:
    Event.nodes = []
    for _ in range(layers):
        at.planned()
    nodes, Event.nodes = Event.nodes, None
    assert len(nodes) == layers
    return nodes


@pytest.mark.parametrize("layer", [0, 2, 3, 4, 5])
def test_a_step_waits_for_each_layer_of_each_replay_and_for_the_last_eager_one(at, layer):
    nodes = capture(at, 3) + capture(at, 2)
    at.planned()
    nodes.append(at._planned[0])
    optimizer = torch.optim.SGD([weight := torch.nn.Parameter(torch.ones(1))], lr=1.0)
    weight.grad = torch.full_like(weight, torch.nan)
    for _ in range(2):  # replays
        for node in nodes:
            node.pending = lambda: None
        nodes[layer].pending = lambda: at.report[ROWS].fill_(999)
        with pytest.raises(RuntimeError, match="would have needed 999 rows"):
            optimizer.step()
        assert weight == 1 and not at.report.any()
    check_room()


def test_results_of_a_transfer_are_not_filled(at):
    """That would run on the layer's stream, after the transfer on another has begun to write them."""
    torch.use_deterministic_algorithms(True)
    try:
        with at.beside():
            assert not torch.utils.deterministic.fill_uninitialized_memory
        assert torch.utils.deterministic.fill_uninitialized_memory
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("error", [False, True])
def test_a_transfer_begins_after_what_is_before_it_and_ends_before_the_join(at, error):
    """Also where an error ends it: the memory that it reads is freed after the join."""
    ours, its = torch.cuda.current_stream().seen, at.stream.seen
    ours.add("before")
    with contextlib.suppress(ZeroDivisionError), at.beside():
        assert launch._streams[threading.get_ident()] is at.stream
        its.add("plan")
        at.planned()
        its.add("pull")
        assert not error or 1 / 0
    ours.add("meanwhile")
    assert ours == {"before", "meanwhile"} and its == {"before", "plan", "pull"}
    assert at._planned[0].seen == {"before", "plan"}
    at.scratch = [torch.empty(1)]
    at.join()
    assert ours == {"before", "meanwhile", "plan", "pull"} and not at.scratch


def test_an_exchange_on_another_stream_waits_for_the_one_before(at, monkeypatch):
    at.begin()
    torch.cuda.current_stream().seen.add("forward")
    at.in_flight, other = False, Stream()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: other)
    at.begin()
    assert other.seen == {"forward"}
