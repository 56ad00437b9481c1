"""Which blocks of torchtitan 0.3 compile up to their experts, also in a routing replay. Results are test_layouts's."""

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.protocols.module import Module

from tests.patched import undone
from tests.torchtitan03.jobs import make_job, randomize, start
from titan_fp8moe import record_routing, replay_routing
from titan_fp8moe.dispatch import auto
from titan_fp8moe.torchtitan03 import compiling
from titan_fp8moe.torchtitan03.compiling import compile_before_experts


def test_unknown_blocks_stay_as_they_are(caplog):
    block = nn.Linear(1, 1)
    assert not compile_before_experts(block, backend="eager", fullgraph=True) and "forward" not in vars(block)
    assert "does not know torch.nn.modules.linear.Linear" in caplog.text


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
        self.attention_norm = nn.Identity()

    def forward(self, x: Tensor, masks: None) -> Tensor:
        return x + self.moe(self.ffn_norm(x))


def wrapped(block: nn.Module, policy: str) -> nn.Module:
    """With functions of its own, as torchtitan makes them for each layer."""
    own = {"context_fn": lambda: create_selective_checkpoint_contexts([torch.ops.aten.addmm.default])}
    return block if policy == "none" else checkpoint_wrapper(block, early_stop=False, **own if policy == "op" else {})


@pytest.mark.parametrize("policy", ["none", "op", "full"])
def test_all_sizes_of_the_buffers_have_graphs(monkeypatch, policy: str):
    """Of steps over both ways and a validation, with two masks as gpt_oss has. Blocks with the same mask share one."""
    attention = lambda block, x, *_: x if block.mask == "sliding" else 2 * x  # noqa: E731
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
                block(torch.ones(2, 4, requires_grad=True), None).sum().backward()
                with torch.no_grad():
                    block(torch.ones(2, 4), None)
        assert counters["stats"]["unique_graphs"] == 2 * 2 + len(auto.ROOMS)


@pytest.mark.parametrize("policy", [None, SelectiveAC, FullAC])
def test_routing_replay(policy: type | None):
    """Outside of a replay the router is in the graph. Only full checkpointing counts its experts twice."""
    torch._dynamo.reset()
    plain = randomize(start(make_job()).layers["3"])
    plain.attention.forward = lambda x, *_: x  # of a kind that needs a mask
    moe, forward = plain.moe, plain.forward
    block = policy(policy.Config())._wrap_block(plain) if policy else plain
    assert compile_before_experts(block, backend="aot_eager")
    E, K = moe.router.num_experts, moe.router.top_k
    x, ids = torch.randn(2, 64, moe.router.gate.weight.shape[1]), torch.rand(2, 64, 1, E).topk(K).indices
    with record_routing(moe) as routing:
        own = block(x, None)
    with replay_routing(moe, routing.routed_experts()):
        torch.testing.assert_close(block(x, None), own)
    results = []
    for run, counted in ((forward, 1), (block, 2 if policy is FullAC else 1)):
        moe.tokens_per_expert_E.zero_()
        with replay_routing(moe, ids):
            out = run(x, None)
            results.append([out, *torch.autograd.grad(out.square().sum(), list(moe.parameters()))])
        assert torch.equal(moe.tokens_per_expert_E.long(), counted * ids.flatten().bincount(minlength=E))
    torch.testing.assert_close(*results)
