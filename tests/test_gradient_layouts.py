"""Every gradient is dense, and a DTensor's lies as it says: fused optimizers read memory by its address."""

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.torch_version import TorchVersion

from tests.layer import DEVICE
from titan_fp8moe import (
    Adapter,
    Fp8FlowLinear,
    Fp8FlowMoEConfig,
    Lora,
    RoutedExperts,
    SharedExperts,
    grouped_mm,
    parameter_groups,
    routed_experts,
)
from titan_fp8moe.layer.group import feed_forward
from titan_fp8moe.layer.weights import ExpertWeights

T, K, D, H, SHARED_H, R = 64, 2, 144, 176, 128, 5  # D, H and R are padded by the kernels
STORED = "rows", "swapped", "wider"


def leaf(*shape: int, stored: str = "rows", dtype: torch.dtype = torch.float32) -> nn.Parameter:
    """Values whose last two dims lie as they are, ``swapped``, or with gaps between ``wider`` rows."""
    *outer, rows, columns = shape
    if stored == "swapped":
        values = torch.randn(*outer, columns, rows, device=DEVICE, dtype=dtype).transpose(-1, -2)
    else:
        gap = 16 if stored == "wider" else 0
        values = torch.randn(*outer, rows, columns + gap, device=DEVICE, dtype=dtype)[..., :columns]
    return nn.Parameter(values.mul_(0.1))


def inputs(experts: int) -> tuple[Tensor, Tensor, Tensor]:
    k = min(K, experts)
    x, scores = leaf(T, D), nn.Parameter(torch.rand(T, k, device=DEVICE))
    return x, torch.rand(T, experts, device=DEVICE).topk(k).indices, scores


def strides(tensor: Tensor) -> list[int]:
    """Of the dims along which there is a step."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def is_dense(tensor: Tensor) -> bool:
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.numel() == 1 + sum((size - 1) * stride for size, stride in steps)


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def check(run, parameters: dict[str, Tensor]) -> None:
    """The gradients that autograd returns, and those that it leaves in the parameters of what ``run()`` computes."""
    returned = torch.autograd.grad(run().sum(), list(parameters.values()))
    run().sum().backward()
    for (name, parameter), grad in zip(parameters.items(), returned, strict=True):
        assert grad.shape == parameter.shape and type(grad) is type(parameter.grad), name
        assert is_dense(local(grad)) and strides(local(grad)) == strides(grad), (name, grad.stride())
        left = parameter.grad
        assert is_dense(local(left)) and strides(local(left)) == strides(left), (name, left.stride())
        if is_dense(local(parameter)):
            assert strides(left) == strides(parameter), (name, left.stride(), parameter.stride())


@pytest.mark.parametrize("adapters", [None, torch.float32, torch.bfloat16], ids=["", "fp32 adapters", "bf16 adapters"])
@pytest.mark.parametrize("experts", [1, 4])
@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
@pytest.mark.parametrize("spread", [False, True], ids=["", "ep_group"])
def test_of_a_module(group, spread, activation, experts, adapters):
    ep_group = group if spread else None
    module = RoutedExperts(
        experts, D, H, activation=activation, bias=True, ep_group=ep_group, device=DEVICE, dtype=adapters
    )
    if adapters is not None:
        module.add_lora(R, 2 * R)
    x, ids, scores = inputs(experts)
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    assert len(trained) == (6 if activation == "swiglu" else 4)
    assert all(isinstance(p, DTensor) == spread for p in trained.values())
    check(lambda: module(x, ids, scores), trained | dict(x=x, scores=scores))


def compiled(stored: str):
    """torch.compile of PyTorch 2.11 fails on these DTensors, before and after the layer."""
    return pytest.param(
        True, stored, marks=pytest.mark.skipif(TorchVersion(torch.__version__) < (2, 13), reason="needs torch 2.13")
    )


@pytest.mark.parametrize(("compiled", "stored"), [*((False, s) for s in STORED), compiled("rows"), compiled("swapped")])
def test_of_spread_weights_however_they_are_stored(group, stored, compiled):
    """The gradients of w1 and w3 are made as rows. In a graph PyTorch lays those of wider rows as the parameter is."""
    module = RoutedExperts(4, D, H, bias=True, ep_group=group, device=DEVICE)
    for name, p in list(module.named_parameters()):
        values = leaf(*p.shape, stored=stored).detach()
        setattr(module, name, nn.Parameter(DTensor.from_local(values, p.device_mesh, p.placements, run_check=False)))
    x, ids, scores = inputs(4)
    run = torch.compile(module, backend="aot_eager") if compiled else module
    check(lambda: run(x, ids, scores), dict(module.named_parameters()))


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("w1", ["apart", "fused", "interleaved"])
def test_of_a_function(stored, w1):
    rows = H if w1 == "apart" else 2 * H
    shapes = dict(w1=(4, rows, D), w2=(4, D, H), b1=(4, rows), b2=(4, D))
    shared = dict(w1=(SHARED_H, D), w2=(D, SHARED_H), w3=(SHARED_H, D))
    if w1 == "apart":
        shapes |= dict(w3=(4, H, D), b3=(4, H))
    if w1 == "fused":
        shared = dict(w1=(2 * SHARED_H, D), w2=(D, SHARED_H))
    p = {name: leaf(*shape, stored=stored) for name, shape in shapes.items()}
    s = {name: leaf(*shape, stored=stored) for name, shape in shared.items()}
    x, ids, scores = inputs(4)
    options = dict(b1=p["b1"], b2=p["b2"], b3=p.get("b3"), interleaved=w1 == "interleaved", shared=SharedExperts(**s))
    of_shared = {f"shared.{name}": t for name, t in s.items()}
    check(
        lambda: routed_experts(x, p["w1"], p["w2"], p.get("w3"), ids, scores, **options),
        p | of_shared | dict(x=x, scores=scores),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("stored", STORED)
def test_of_adapters_ffns_and_products(stored, dtype):
    sizes = dict(w1=(H, D), w2=(D, H), w3=(H, D))
    A = {name: leaf(4, R, columns, stored=stored, dtype=dtype) for name, (_, columns) in sizes.items()}
    B = {name: leaf(4, rows, R, stored=stored, dtype=dtype) for name, (rows, _) in sizes.items()}
    lora = Lora(**{name: Adapter(A[name], B[name], 2.0) for name in sizes})
    frozen = [leaf(4, *size, dtype=dtype).requires_grad_(False) for size in sizes.values()]
    x, ids, scores = inputs(4)
    adapters = {f"{name}.{n}": t for name, ts in (("A", A), ("B", B)) for n, t in ts.items()}
    check(lambda: routed_experts(x, *frozen, ids, scores, lora=lora), adapters)
    weights = {name: leaf(*size, stored=stored, dtype=dtype) for name, size in sizes.items()}
    check(lambda: feed_forward(x, ExpertWeights(**weights), Fp8FlowMoEConfig()), weights | dict(x=x))
    w, rows = leaf(4, 128, 256, stored=stored, dtype=dtype), leaf(T, 128, dtype=torch.bfloat16)
    ends = torch.tensor([8, 16, 24, T], dtype=torch.int32, device=DEVICE)
    check(lambda: grouped_mm(rows, w, ends), dict(w=w, x=rows))
    linear = Fp8FlowLinear(128, 256, device=DEVICE)
    linear.weight = leaf(256, 128, stored=stored, dtype=dtype)
    check(lambda: linear(rows), dict(w=linear.weight))


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()], ids=str)
def test_of_a_linear_under_tensor_parallelism(group, stored, placement):
    mesh, linear = init_device_mesh(DEVICE, (1,)), Fp8FlowLinear(128, 256, device=DEVICE)
    values, x = leaf(256, 128, stored=stored).detach(), torch.randn(T, 128, device=DEVICE)
    linear.weight = nn.Parameter(DTensor.from_local(values, mesh, [placement], run_check=False))
    placed = DTensor.from_local(x, mesh, [Shard(1) if placement == Shard(1) else Replicate()], run_check=False)
    check(lambda: linear(placed).full_tensor(), dict(w=linear.weight))


@pytest.mark.parametrize("adapters", [None, torch.float32, torch.bfloat16], ids=["", "fp32 adapters", "bf16 adapters"])
@pytest.mark.parametrize("spread", [False, True], ids=["", "ep_group"])
@pytest.mark.parametrize("stored", ["rows", "swapped"])
def test_fused_adamw_has_the_moments_of_the_unfused(group, spread, adapters, stored):
    def moments(fused: bool) -> dict[str, tuple[Tensor, Tensor]]:
        torch.manual_seed(0)
        module = RoutedExperts(4, D, H, bias=True, ep_group=group if spread else None, device=DEVICE, dtype=adapters)
        for name, p in list(module.named_parameters()):
            if stored == "swapped" and p.ndim == 3:
                values = local(p.detach()).transpose(1, 2).contiguous().transpose(1, 2)
                placed = values
                if isinstance(p, DTensor):
                    placed = DTensor.from_local(values, p.device_mesh, p.placements, run_check=False)
                setattr(module, name, nn.Parameter(placed))
        if adapters is not None:
            module.add_lora(R, 2 * R)
            for B in module.lora_B.values():
                nn.init.normal_(local(B.detach()), std=0.1)
        x, ids, scores = inputs(4)
        module(x, ids, scores).square().sum().backward()
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        optimizer = torch.optim.AdamW(parameter_groups(trained.values()), fused=fused)
        optimizer.step()
        states = {name: optimizer.state[p] for name, p in trained.items()}
        return {name: tuple(local(state[key]) for key in ("exp_avg", "exp_avg_sq")) for name, state in states.items()}

    got, want = moments(True), moments(False)
    assert len(want) == 6
    for name, pair in want.items():
        for fused, unfused in zip(got[name], pair, strict=True):
            assert unfused.any(), name
            torch.testing.assert_close(fused, unfused, rtol=1e-3, atol=1e-6 * float(unfused.abs().max()), msg=name)
