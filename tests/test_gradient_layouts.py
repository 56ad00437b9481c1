"""Gradients of grouped GEMMs and linears are dense, and a DTensor's lies as it says, since fused optimizers read memory
by its address. tests/test_any_layer.py has experts and FFNs."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.torch_version import TorchVersion

from tests.layer import DEVICE
from tests.test_any_layer import is_dense, lie, steps
from titan_fp8moe import Fp8FlowLinear, RoutedExperts, grouped_mm, parameter_groups
from titan_fp8moe.nn.parallel import local_of

T, R = 64, 5
STORED = pytest.mark.parametrize("how", ["rows", "swapped", "wider"])


def leaf(*shape: int, how: str = "rows", dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(lie(torch.randn(shape, device=DEVICE, dtype=dtype) / 10, how))


def check(run: Callable[[], Tensor], *parameters: Tensor) -> None:
    """The gradients that autograd returns, and those that it leaves in the parameters of what ``run()`` computes."""
    returned = torch.autograd.grad(run().sum(), parameters)
    run().sum().backward()
    for parameter, grad in zip(parameters, returned, strict=True):
        assert grad.shape == parameter.shape and type(grad) is type(parameter.grad)
        for given in (grad, parameter.grad):
            assert is_dense(local_of(given)) and steps(local_of(given)) == steps(given)
        if is_dense(local_of(parameter)):
            assert steps(parameter.grad) == steps(parameter)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@STORED
def test_of_grouped_gemms_and_linears(how, dtype):
    w, rows = leaf(4, 128, 256, how=how, dtype=dtype), leaf(T, 128, dtype=torch.bfloat16)
    ends = torch.tensor([8, 16, 24, T], dtype=torch.int32, device=DEVICE)
    check(lambda: grouped_mm(rows, w, ends), w, rows)
    linear = Fp8FlowLinear(128, 256, device=DEVICE)
    linear.weight = leaf(256, 128, how=how, dtype=dtype)
    check(lambda: linear(rows), linear.weight)


@pytest.mark.parametrize("compiled", [False, True])
@STORED
def test_of_spread_weights(group, how, compiled):
    """The gradients of w1 and w3 are made as rows."""
    if compiled and (how == "wider" or TorchVersion(torch.__version__) < (2, 13)):
        pytest.skip("graphs lay those of wider rows as the parameter is; torch 2.11 compiles no DTensors")
    module = RoutedExperts(4, 144, 176, bias=True, ep_group=group, device=DEVICE)
    for name, p in list(module.named_parameters()):
        values = DTensor.from_local(leaf(*p.shape, how=how).detach(), p.device_mesh, p.placements, run_check=False)
        setattr(module, name, nn.Parameter(values))
    ids, scores = torch.rand(T, 4, device=DEVICE).topk(2).indices, torch.rand(T, 2, device=DEVICE)
    run, x = torch.compile(module, backend="aot_eager") if compiled else module, leaf(T, 144)
    check(lambda: run(x, ids, scores), *module.parameters())


@STORED
@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()], ids=str)
def test_of_a_linear_under_tensor_parallelism(group, how, placement):
    mesh, linear = init_device_mesh(DEVICE, (1,)), Fp8FlowLinear(128, 256, device=DEVICE)
    values, x = leaf(256, 128, how=how).detach(), torch.randn(T, 128, device=DEVICE)
    linear.weight = nn.Parameter(DTensor.from_local(values, mesh, [placement], run_check=False))
    placed = DTensor.from_local(x, mesh, [Shard(1) if placement == Shard(1) else Replicate()], run_check=False)
    check(lambda: linear(placed).full_tensor(), linear.weight)


@pytest.mark.parametrize("adapters", [None, torch.float32, torch.bfloat16], ids=["", "fp32 adapters", "bf16 adapters"])
@pytest.mark.parametrize("spread", [False, True], ids=["", "ep_group"])
@pytest.mark.parametrize("how", ["rows", "swapped"])
def test_fused_adamw_has_the_moments_of_the_unfused(group, spread, adapters, how):
    def moments(fused: bool) -> dict[str, tuple[Tensor, Tensor]]:
        torch.manual_seed(0)
        options = dict(bias=True, device=DEVICE, dtype=adapters)
        module = RoutedExperts(4, 144, 176, ep_group=group if spread else None, **options)
        for name, p in list(module.named_parameters()):
            values: Tensor = lie(local_of(p.detach()), how if p.ndim == 3 else "rows")
            if isinstance(p, DTensor):
                values = DTensor.from_local(values, p.device_mesh, p.placements, run_check=False)
            setattr(module, name, nn.Parameter(values))
        if adapters is not None:
            module.add_lora(R, 2 * R)
            for B in module.lora_B.values():
                nn.init.normal_(local_of(B.detach()), std=0.1)
        ids, scores = torch.rand(T, 4, device=DEVICE).topk(2).indices, torch.rand(T, 2, device=DEVICE)
        module(torch.randn(T, 144, device=DEVICE) / 10, ids, scores).square().sum().backward()
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        optimizer = torch.optim.AdamW(parameter_groups(trained.values()), fused=fused)
        optimizer.step()
        states = {name: optimizer.state[p] for name, p in trained.items()}
        return {
            name: tuple(local_of(state[key]) for key in ("exp_avg", "exp_avg_sq")) for name, state in states.items()
        }

    got, want = moments(True), moments(False)
    assert len(want) == 6
    for name, pair in want.items():
        for fused, unfused in zip(got[name], pair, strict=True):
            assert unfused.any(), name
            torch.testing.assert_close(fused, unfused, rtol=1e-3, atol=1e-6 * float(unfused.abs().max()), msg=name)
