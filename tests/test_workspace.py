"""Which events of a GPU the host waits for before an optimizer's step. tests/distributed has real replays."""

from collections.abc import Callable

import pytest
import torch

from titan_fp8moe import check_room
from titan_fp8moe.dispatch.symmetric.workspace import ROWS, Sizes, Workspace


class Event:
    """Stands for a GPU that works only when the host syncs. A capture makes external events nodes of a graph."""

    nodes: list["Event"] | None = None
    pending: Callable[[], None] | None = None

    def __init__(self, external: bool = False):
        self.external = external

    def record(self, stream: object) -> None:
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
    """A rank's workspace, as on a GPU."""
    monkeypatch.setattr(Event, "nodes", None)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: Event.nodes is not None)
    sizes = Sizes(2, 8, 128, 2, 2)
    at = Workspace(sizes, 0, [torch.zeros(sizes.nbytes, dtype=torch.uint8) for _ in range(2)], lambda: 1.0)
    at._planned = [Event()]
    at.planned()
    return at


def capture(at: Workspace, layers: int) -> list[Event]:
    Event.nodes = []
    for _ in range(layers):
        at.planned()
    nodes, Event.nodes = Event.nodes, None
    assert len(nodes) == layers
    return nodes


@pytest.mark.parametrize("layer", [0, 2, 3, 4])
def test_a_step_waits_for_each_layer_of_each_replay(at, layer):
    nodes = capture(at, 3) + capture(at, 2)
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


def test_a_step_waits_for_the_last_eager_layer(at):
    capture(at, 2)
    at.planned()
    at._planned[0].pending = lambda: at.report[ROWS].fill_(999)
    with pytest.raises(RuntimeError, match="would have needed 999 rows"):
        check_room()
