"""A converted layer by itself: what a recomputation routes, which tokens count, and whose tokens a rank sends."""

import functools
from unittest.mock import Mock

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torchtitan.distributed import expert_parallel
from torchtitan.models.moe.moe import FeedForward, MoE, MoEArgs

import titan_fp8moe.torchtitan  # noqa: F401  without a GPU, the router needs its patches
from tests.layer import DEVICE
from titan_fp8moe.config import Fp8FlowMoEConfig
from titan_fp8moe.torchtitan import parallel
from titan_fp8moe.torchtitan.converter import _SAVED_OPS
from titan_fp8moe.torchtitan.modules import Fp8FlowMoE, _of_this_rank, why_not_fp8


def make_converted() -> MoE:
    layer = MoE(MoEArgs(num_experts=8, top_k=3), dim=256, hidden_dim=128).to(DEVICE)
    with torch.no_grad():
        layer.init_weights(0.02, torch.device(DEVICE))
    Fp8FlowMoE.convert(layer, Fp8FlowMoEConfig())
    return layer


def test_which_shared_experts_can_be_fp8():
    assert why_not_fp8(FeedForward(256, 512), 32) is None  # padded
    other = FeedForward(256, 256)
    other.w2 = torch.nn.Linear(256, 256)
    assert why_not_fp8(other, 1) == "FeedForward of Linear, Linear, Linear"
    assert why_not_fp8(torch.nn.Identity(), 1) == "Identity of NoneType, NoneType, NoneType"


class TopKCounter(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is torch.ops.aten.topk.default
        return func(*args, **(kwargs or {}))


def test_checkpointing_by_op_keeps_the_chosen_experts():
    """A recomputation that chose anew could choose otherwise; the whole layer's is the whole forward again."""
    layer = make_converted()
    contexts = functools.partial(create_selective_checkpoint_contexts, list(_SAVED_OPS))
    for options, choices in (({"context_fn": contexts}, 1), ({}, 2)):
        x = torch.randn(2, 32, 256, device=DEVICE, requires_grad=True)
        with TopKCounter() as counter:
            checkpoint(layer, x, use_reentrant=False, **options).sum().backward()
        assert counter.count == choices and x.grad.isfinite().all()


def test_only_tokens_of_training_count_for_load_balancing():
    layer, x = make_converted(), torch.randn(2, 32, 256, device=DEVICE)
    with torch.no_grad():
        layer(x)
    assert layer.tokens_per_expert.sum() == 0
    layer(x)
    assert layer.tokens_per_expert.sum() == 64 * 3


@pytest.mark.parametrize(("tokens", "ranks"), [(0, 2), (1, 4), (5, 2), (8, 4)])
def test_each_token_is_sent_by_one_tensor_parallel_rank(tokens: int, ranks: int):
    topk_ids_TK, mesh, sent = torch.randint(8, (tokens, 3)), Mock(), []
    mesh.size.return_value = ranks
    for mesh.get_local_rank.return_value in range(ranks):
        sent.append(_of_this_rank(topk_ids_TK, mesh))
    served = torch.stack([part >= 0 for part in sent])
    assert torch.equal(served.sum(0), torch.ones_like(topk_ids_TK))
    assert torch.equal(torch.stack(sent).amax(0), topk_ids_TK)
    assert served[:, :, 0].sum(1).max() <= -(-tokens // ranks)


def test_styles_of_torchtitan_know_converted_experts(group):
    """They set a mesh and need no hooks. Derived styles keep theirs, and what they have sharded is not taken for
    whole."""
    parallel.install()
    mesh = init_device_mesh(DEVICE, (1,))
    for style, dim in ((expert_parallel.TensorParallel, "tp_mesh"), (expert_parallel.ExpertParallel, "ep_mesh")):
        experts = make_converted().experts
        style()._apply(experts, mesh)
        assert getattr(experts, dim) is mesh and not experts._forward_pre_hooks
    experts = make_converted().experts
    type("Derived", (expert_parallel.ExpertParallel,), {})()._apply(experts, mesh)
    assert experts._forward_pre_hooks and experts.ep_mesh is None
    experts._forward_pre_hooks.clear()
    with pytest.raises(RuntimeError, match="does not know"):
        experts(*torch.empty(3, 8, 256))
