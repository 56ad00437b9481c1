"""Experts of an ``ep_group`` as one process sees them: copies, devices, groups of parameters."""

import copy
import io
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.layer import refused
from titan_fp8moe import Fp8FlowMoEConfig, RoutedExperts, clip_grad_norm_, parameter_groups
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
    weight = experts.w1
    assert weight.is_meta and weight.device_mesh.device_type == "cuda"
    experts.w2.requires_grad = False
    experts.to_empty(device="cpu").reset_parameters()
    assert experts.w1 is weight and weight.device_mesh.device_type == "cpu" and weight.device_mesh.get_group() is group
    assert not experts.w2.requires_grad and weight.requires_grad and weight.dtype == torch.bfloat16
    assert 0.99 < float(weight.detach().to_local().abs().max()) * 128**0.5 <= 1.01
    step(experts)
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
