"""Routing replay serves the router of torchtitan 0.3, whose scores have a batch dim."""

import pytest
import torch
from torch import nn
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC

from tests.torchtitan03.test_converter import build, convert, deepseek_v3_debugmodel, make_job
from titan_fp8moe import record_routing, replay_routing
from titan_fp8moe.torchtitan03.compiling import compile_before_experts
from titan_fp8moe.torchtitan03.modules import Fp8FlowMoE


def test_converted_layer():
    job = make_job()
    convert(job)
    for model in (build(job), build(deepseek_v3_debugmodel())):
        moe = model.layers["3"].moe.to_empty(device="cpu")
        for tensor in (*moe.parameters(), *moe.buffers()):
            nn.init.normal_(tensor, std=0.05) if tensor.is_floating_point() else tensor.zero_()
        if not isinstance(moe, Fp8FlowMoE):
            moe.routed_experts.forward = lambda x, *_: x  # the router is what is tested; its GEMMs are bf16
        moe.tokens_per_expert_E.zero_()
        E, K = moe.router.num_experts, moe.router.top_k
        x, others = torch.randn(2, 24, moe.router.gate.weight.shape[1]), torch.rand(2, 24, 1, E).topk(K).indices
        with record_routing(moe) as routing:
            want = moe(x)
        with replay_routing(moe, routing.routed_experts()):
            assert torch.equal(moe(x), want)
        moe.tokens_per_expert_E.zero_()
        with replay_routing(moe, others):
            moe(x)
        assert torch.equal(moe.tokens_per_expert_E.long(), others.flatten().bincount(minlength=E))


@pytest.mark.parametrize("policy", [None, SelectiveAC, FullAC])
def test_blocks_compiled_up_to_their_experts(policy: type | None):
    """Outside of a replay the router is in the graph. Only full checkpointing counts its experts twice."""
    torch._dynamo.reset()
    job = make_job()
    convert(job)
    plain = build(job).layers["3"].to_empty(device="cpu")
    for tensor in (*plain.parameters(), *plain.buffers()):
        nn.init.normal_(tensor, std=0.05) if tensor.is_floating_point() else tensor.zero_()
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
