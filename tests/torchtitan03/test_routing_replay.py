"""Routing replay in blocks of torchtitan 0.3 that are compiled up to their experts."""

import pytest
import torch
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC

from tests.torchtitan03.jobs import make_job, randomize, start
from titan_fp8moe import record_routing, replay_routing
from titan_fp8moe.torchtitan03.compiling import compile_before_experts


@pytest.mark.parametrize("policy", [None, SelectiveAC, FullAC])
def test_blocks_compiled_up_to_their_experts(policy: type | None):
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
