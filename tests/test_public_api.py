"""What a user without a trainer meets: the module, the example, determinism."""

import os
import re
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import titan_fp8moe
from tests.distributed.conftest import ROOT
from tests.layer import DEVICE, D, E, H, K, T, make_layer
from titan_fp8moe import Fp8FlowMoEConfig, RoutedExperts, ops, recipe, routed_experts
from titan_fp8moe.layer import experts

EXAMPLE = str(ROOT / "examples/plain_pytorch.py")


def run_example(*command: str) -> float:
    """The example's last loss relative to fp32's."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    match = re.search(r"last loss ([+-][\d.]+)% from fp32", done.stdout)
    assert match, done.stdout + done.stderr
    return float(match[1]) / 100


@pytest.mark.parametrize("arguments", [(), ("--compile",)], ids=["eager", "compiled"])
def test_example(arguments):
    assert abs(run_example(sys.executable, EXAMPLE, *arguments)) < 0.02


def test_example_on_two_processes():
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    assert abs(run_example(*launcher, EXAMPLE)) < 0.02


def test_module_is_the_function():
    module = RoutedExperts(E, D, H, device=DEVICE)
    x, scores, ids, _ = make_layer()
    assert module.w1.shape == (E, H, D) and module.w2.shape == (E, D, H) and module.w1.abs().max() <= D**-0.5
    want = routed_experts(x, module.w1, module.w2, module.w3, ids, scores)
    assert torch.equal(module(x, ids, scores), want)
    assert torch.equal(module(x, ids, scores, meanwhile=lambda: x), want + x)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, ids, scores), want)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((6, 200, H), "dim = 200 and hidden_dim = 128 must be multiples of 128"), ((6, D, 64), "hidden_dim = 64")],
)
def test_module_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        RoutedExperts(*arguments)


@pytest.fixture
def mesh(tmp_path):
    dist.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("inner", [True, False], ids=["experts", "parent"])
def test_scores_stay_fp32_under_fsdp(mesh, monkeypatch, inner):
    """FSDP2's mixed precision casts a module's floating-point arguments, but not the module's scores."""

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.router = torch.nn.Linear(D, E, bias=False)
            self.experts = RoutedExperts(E, D, H)

        def forward(self, x):
            scores, ids = self.router(x).float().softmax(-1).topk(K)
            return self.experts(x, ids, scores)

    block, seen = Block(), []
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    if inner:
        fully_shard(block.experts, mesh=mesh, mp_policy=policy)
    fully_shard(block, mesh=mesh, mp_policy=policy)
    for module in (block, block.experts):
        if isinstance(module, torch.distributed.fsdp.FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    op = experts._forward_op
    monkeypatch.setattr(experts, "_forward_op", lambda *args: seen.append([a.dtype for a in args[:2]]) or op(*args))
    block(torch.randn(16, D)).sum().backward()
    assert seen == [[torch.bfloat16, torch.float32]]
    assert block.experts.w1.grad.to_local().any() and block.router.weight.grad.to_local().any()


@pytest.mark.parametrize("deterministic", [False, True])
def test_same_inputs_same_bits(deterministic):
    """Forward and backward, also under torch.use_deterministic_algorithms."""
    x, scores, ids, weights = make_layer()
    leaves = [t.requires_grad_() for t in (x, scores, *weights)]

    def step():
        out = routed_experts(x, *weights, ids, scores)
        return [out.detach(), *torch.autograd.grad(out.square().sum(), leaves)]

    want = step()
    torch.use_deterministic_algorithms(deterministic)
    try:
        for _ in range(3):
            for a, b in zip(step(), want, strict=True):
                assert torch.equal(a, b)
    finally:
        torch.use_deterministic_algorithms(False)


def test_flops_are_counted():
    x, scores, ids, weights = make_layer()
    with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
        routed_experts(x, *weights, ids, scores)
    assert counter.get_total_flops() == 2 * recipe.row_capacity(T * K, E) * 3 * H * D
    w1, w2, w3 = weights
    with torch.utils.flop_counter.FlopCounterMode(display=False) as padded:
        routed_experts(x, w1[:, :112], w2[:, :, :112], w3[:, :112], ids, scores)
    assert padded.get_total_flops() == counter.get_total_flops()


def test_public_names():
    names = {"Fp8FlowLinear", "Fp8FlowMoEConfig", "RoutedExperts", "WeightCache", "check_room", "grouped_mm"}
    names |= {"routed_experts", "self_check", "clip_grad_norm_", "distributed_data_parallel", "parameter_groups"}
    assert set(titan_fp8moe.__all__) == {"SAVED_OPS", "__version__", *names}
    for name in names:
        assert len(getattr(titan_fp8moe, name).__doc__) > 80
    assert ops is not None and Fp8FlowMoEConfig().wgrad == "balanced"
