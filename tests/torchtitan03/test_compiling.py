"""Which blocks of torchtitan 0.3 compile up to their experts, and in which steps. Results are test_layouts's."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from torch import nn

from titan_fp8moe.layer import statistics
from titan_fp8moe.torchtitan03.compiling import _forward, compile_before_experts


def test_unknown_blocks_stay_as_they_are(caplog):
    block = nn.Linear(1, 1)
    assert not compile_before_experts(block, backend="eager", fullgraph=True) and "forward" not in vars(block)
    assert "does not know torch.nn.modules.linear.Linear" in caplog.text


@pytest.mark.parametrize("counted", [False, True])
def test_counted_steps_run_eagerly(monkeypatch, counted: bool):
    monkeypatch.setattr(statistics, "collecting", lambda: counted)
    graph, eager = Mock(return_value=(1, 2, "routing")), Mock(return_value=(1, 2, "routing"))
    moe = nn.Identity()
    moe.forward = lambda h, routing: 10 * h if routing == ["routing"] else None
    block = SimpleNamespace(moe=moe)
    assert _forward(graph, eager, None, block, "x") == 21
    assert graph.called != counted and eager.called == counted
