"""Which blocks of torchtitan 0.3 compile up to their experts, and in which steps. Results are test_layouts's."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from torchtitan.protocols.module import Module

from tests.patched import undone
from titan_fp8moe.dispatch import auto
from titan_fp8moe.layer import statistics
from titan_fp8moe.torchtitan03 import compiling
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


class Experts(nn.Module):
    shared_experts = None

    def route(self, h: Tensor) -> tuple[Tensor]:
        return (h,)

    def forward(self, h: Tensor, routing: tuple[Tensor] | None = None) -> Tensor:
        return h * auto.room()


class Block(Module):
    def __init__(self, mask: str):
        super().__init__()
        self.mask, self.moe, self.ffn_norm = mask, Experts(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.moe(self.ffn_norm(x))


def wrapped(block: nn.Module, policy: str) -> nn.Module:
    """With functions of its own, as torchtitan makes them for each layer."""
    own = {"context_fn": lambda: create_selective_checkpoint_contexts([torch.ops.aten.addmm.default])}
    return block if policy == "none" else checkpoint_wrapper(block, early_stop=False, **own if policy == "op" else {})


@pytest.mark.parametrize("policy", ["none", "op", "full"])
def test_all_sizes_of_the_buffers_have_graphs(monkeypatch, policy: str):
    """Of steps over both ways and a validation, with two masks as gpt_oss has. Blocks with the same mask share one."""
    attention = lambda block, x: x if block.mask == "sliding" else 2 * x  # noqa: E731
    monkeypatch.setitem(compiling._ATTENTION, f"{__name__}.Block", attention)
    torch._dynamo.reset()
    counters.clear()
    with undone():
        blocks = [wrapped(Block(mask), policy) for mask in 3 * ("sliding", "full")]
        for block in blocks:
            assert compile_before_experts(block, backend="eager", fullgraph=True)
        for room in ("", *map(str, auto.ROOMS)):
            monkeypatch.setattr(auto._state, "room", room)
            for block in blocks:
                block(torch.ones(2, 4, requires_grad=True)).sum().backward()
                with torch.no_grad():
                    block(torch.ones(2, 4))
        assert counters["stats"]["unique_graphs"] == 2 * 2 + len(auto.ROOMS)
