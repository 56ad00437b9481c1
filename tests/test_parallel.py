"""Experts of an ``ep_group`` as one process sees them, and modules with DTensors on a mesh of one rank."""

import copy
import functools
import io
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.layer import DEVICE, refused
from titan_fp8moe import Fp8FlowLinear, Fp8FlowMoEConfig, Fp8Weight, RoutedExperts, clip_grad_norm_, parameter_groups
from titan_fp8moe.nn import parallel


def step(experts):
    torch.manual_seed(1)
    x, ids, scores = torch.randn(32, 128), torch.rand(32, 4).topk(2).indices, torch.rand(32, 2)
    out = experts(x, ids, scores)
    out.square().sum().backward()
    return out.detach()


def saved(experts):
    buffer = io.BytesIO()
    torch.save(experts, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("make", [copy.deepcopy, saved, lambda m: torch.optim.swa_utils.AveragedModel(m).module])
def test_a_copy_shares_the_group(group, make):
    experts = RoutedExperts(4, 128, 128, ep_group=group, config=Fp8FlowMoEConfig(cache_weights=True))
    copied = make(experts)
    assert copied.ep_group is experts.ep_group is group and copied.w1.device_mesh == experts.w1.device_mesh
    assert copied.w1.to_local().data_ptr() != experts.w1.to_local().data_ptr()
    assert torch.equal(step(copied), step(experts)) and copied.cache is not experts.cache
    plain = make(RoutedExperts(4, 128, 128))
    assert plain.ep_group is None


def test_a_group_behind_fsdps_dim(group):
    groups, sizes = [None, group], [2, 1]
    of_dims = dict(get_group=groups.__getitem__, size=sizes.__getitem__, get_coordinate=lambda: [1, 0])
    assert parallel.group_of(SimpleNamespace(device_mesh=SimpleNamespace(ndim=2, **of_dims))) is group


def test_a_mesh_follows_the_weights(group, monkeypatch):
    """The meta device has none, and a module may move to another one."""
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        experts = RoutedExperts(4, 128, 128, ep_group=group, device="meta", dtype=torch.bfloat16)
        adapted = RoutedExperts(4, 128, 128, device="meta")
    weight = experts.w1
    assert weight.is_meta and weight.device_mesh.device_type == "cuda"
    experts.w2.requires_grad = False
    experts.to_empty(device="cpu").reset_parameters()
    assert experts.w1 is weight and weight.device_mesh.device_type == "cpu" and weight.device_mesh.get_group() is group
    assert not experts.w2.requires_grad and weight.requires_grad and weight.dtype == torch.bfloat16
    assert 0.99 < float(weight.detach().to_local().abs().max()) * 128**0.5 <= 1.01
    step(experts)
    adapted.add_lora(8, 8)
    adapted.to_empty(device="cpu").reset_parameters()
    assert adapted.w1.any() and adapted.lora_A["w2"].any() and not adapted.lora_B["w2"].any()
    experts.float()
    assert experts.w1.dtype == experts.w1.grad.dtype == torch.float32


def test_a_given_mesh_stays(group):
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "ep"))["ep"]
    experts = RoutedExperts(4, 128, 128, ep_group=mesh)
    assert experts.w1.device_mesh == mesh and experts.ep_group is mesh.get_group()
    with torch.device("meta"):
        assert RoutedExperts(4, 128, 128, ep_group=mesh).to_empty(device="cpu").w1.device_mesh == mesh
    assert RoutedExperts(4, 128, 128, ep_group=group).w1.device_mesh != mesh  # torch caches equal ones together


def test_clipping_of_what_is_not_finite(group):
    """tests/distributed/test_parallel.py has what is."""
    experts, plain = RoutedExperts(4, 128, 256, ep_group=group), nn.Parameter(torch.zeros(2))
    assert clip_grad_norm_([], 1.0) == 0 and clip_grad_norm_(plain, 1.0) == 0  # no gradients
    step(experts)
    experts.w1.grad.to_local()[0, 0, 0] = float("inf")
    with refused("non-finite", error=RuntimeError):
        clip_grad_norm_(experts.parameters(), 1.0, error_if_nonfinite=True)
    assert clip_grad_norm_(experts.w1, 1.0).isinf()


def test_groups_of_parameters(group):
    plain, experts = nn.Linear(4, 4), RoutedExperts(4, 128, 128, ep_group=group)
    others = RoutedExperts(4, 128, 128, ep_group=group)  # a mesh of its own, which is equal
    groups = parameter_groups([*plain.parameters(), *experts.parameters(), *others.parameters()])
    assert [len(g["params"]) for g in groups] == [2, 6]
    assert groups[1]["params"][0] is experts.w1 and isinstance(experts.w1.device_mesh, DeviceMesh)
    assert "num_experts=4 over 1 ranks" in repr(experts)


# --- DTensors ---------------------------------------------------------------------------------------------------------


PLACED = [(Replicate(), Replicate()), (Replicate(), Shard(0)), (Shard(0), Replicate()), (Shard(1), Shard(1))]


@pytest.mark.parametrize("weight, x", PLACED)
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


@pytest.mark.skipif(torch.__version__ < "2.13", reason="FSDP2 takes no integer parameters")
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
