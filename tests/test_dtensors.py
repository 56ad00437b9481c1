"""Modules with DTensors, on a mesh of one rank: where results lie, and weights that nobody has gathered."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.layer import DEVICE
from tests.processes import call
from titan_fp8moe import Fp8FlowLinear, Fp8Weight, RoutedExperts


@pytest.mark.parametrize(
    ("weight", "x"),
    [(Replicate(), Replicate()), (Replicate(), Shard(0)), (Shard(0), Replicate()), (Shard(1), Shard(1))],
)
def test_a_linear_of_dtensors(group, weight, x):
    """Its output and weight gradient are placed as ``nn.Linear``'s."""
    mesh, placed = init_device_mesh(DEVICE, (1,)), []
    for kind in (functools.partial(nn.Linear, bias=False), Fp8FlowLinear):
        linear = kind(128, 256, device=DEVICE)
        linear.weight = nn.Parameter(distribute_tensor(linear.weight.detach(), mesh, [weight]))
        rows = distribute_tensor(torch.randn(64, 128, device=DEVICE), mesh, [x]).requires_grad_()
        out = linear(rows)
        out.backward(torch.ones_like(out))
        placed.append([t.placements for t in (out, linear.weight.grad)])
    assert placed[0] == placed[1]


stored_in_fsdp = pytest.mark.skipif(torch.__version__ < "2.13", reason="FSDP2 takes no integer parameters")


@stored_in_fsdp
def test_weights_that_fsdp_has_not_gathered(group):
    mesh = init_device_mesh(DEVICE, (1, 1), mesh_dim_names=("dp", "ep"))
    experts, linear = RoutedExperts(4, 128, 128, device=DEVICE), Fp8FlowLinear(128, 128, device=DEVICE)
    spread = RoutedExperts(4, 128, 128, device=DEVICE, ep_group=mesh["ep"])
    stored = RoutedExperts.from_fp8(*map(Fp8Weight.quantize, experts.adaptable().values()))
    fully_shard(nn.Sequential(experts, spread, stored, linear), mesh=mesh["dp"])
    x, ids = torch.randn(8, 128, device=DEVICE), torch.zeros(8, 1, dtype=torch.int64, device=DEVICE)
    for module in (experts, spread, stored, linear):
        with pytest.raises(RuntimeError, match="call the module that FSDP wraps"):
            module(x) if module is linear else module(x, ids, torch.ones(8, 1, device=DEVICE))


def shape_of_unequal_parts() -> tuple[int, ...]:
    """Of a linear's output for three tokens of two ranks. For a process of its own."""
    dist.init_process_group("fake", rank=0, world_size=2)
    mesh, linear = init_device_mesh("cpu", (2,)), Fp8FlowLinear(128, 256)
    linear.weight = nn.Parameter(DTensor.from_local(linear.weight.detach(), mesh, [Replicate()], run_check=False))
    whole = torch.empty(1, 3, 128)
    mine = dict(shape=whole.shape, stride=whole.stride(), run_check=False)
    return tuple(linear(DTensor.from_local(whole[:, :2], mesh, [Shard(1)], **mine)).shape)


def test_ranks_with_unequal_parts():
    assert call(shape_of_unequal_parts) == (1, 3, 256)
