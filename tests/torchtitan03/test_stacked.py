"""The layers of torchtitan's main, by stand-ins with the parameters, arguments and results that it has at 00a4c147."""

import subprocess
import sys
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.processes import ROOT, call, time_limit
from titan_fp8moe import SharedExperts, routed_experts
from titan_fp8moe.config import Fp8FlowMoEConfig
from titan_fp8moe.nn.modules import add_cache
from titan_fp8moe.torchtitan03.stacked import StackedExperts, StackedFeedForward

E, F, D, T, K = 4, 144, 128, 64, 2


class Stacked(nn.Module):
    """GroupedLinear, and without a group Linear."""

    def __init__(self, *shape: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape) / 8)


class SwiGLU:
    pass


class SiTUGLU:
    pass


@dataclass
class Config:
    fp8_flow: Fp8FlowMoEConfig
    placement: Any = None
    activation_fn: Any = SwiGLU


class RoutedExperts(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.w13, self.w2 = Stacked(E, 2, F, D), Stacked(E, D, F)
        self.activation_fn, self.token_dispatcher = config.activation_fn(), SimpleNamespace(ep_mesh=None)


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.w13, self.w2 = Stacked(2, F, D), Stacked(D, F)


class Fp8Experts(StackedExperts, RoutedExperts):
    pass


class Fp8Shared(StackedFeedForward, FeedForward):
    def __init__(self, config: Fp8FlowMoEConfig):
        super().__init__()
        self.config = config
        add_cache(self)

    def scores(self, x: Tensor) -> None:
        return None


def make(**settings: Any) -> tuple[Fp8Experts, Fp8Shared]:
    config = Fp8FlowMoEConfig(**settings)
    return Fp8Experts(Config(config)), Fp8Shared(config)


def arguments() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    scores, ids = torch.rand(T, E).topk(K)
    return torch.randn(T, D), scores, ids, torch.bincount(ids.flatten(), minlength=E)


@pytest.mark.parametrize("cached", [False, True])
def test_bits_are_those_of_split_weights(cached: bool):
    experts, shared = make(cache_weights=cached)
    x, scores, ids, counts = arguments()
    split = [w.detach().clone().requires_grad_() for w in (*experts.w13.weight.unbind(1), experts.w2.weight)]
    apart = [w.detach().clone().requires_grad_() for w in (*shared.w13.weight.unbind(0), shared.w2.weight)]
    for _ in range(2):  # microbatches
        got = experts(x, scores, ids, counts, shared=shared)
        (w1, w3, w2), (s1, s3, s2) = split, apart
        want = routed_experts(x, w1, w2, w3, ids, scores, shared=SharedExperts(s1, s2, s3))
        assert torch.equal(got, want)
        got.square().sum().backward()
        want.square().sum().backward()
    for layer, weights, dim in ((experts, split, 1), (shared, apart, 0)):
        w1, w3, w2 = weights
        assert torch.equal(layer.w13.weight.grad, torch.stack((w1.grad, w3.grad), dim))
        assert torch.equal(layer.w2.weight.grad, w2.grad)


def test_an_ffn_alone():
    _, shared = make()
    x = torch.randn(2, 8, D)
    h = nn.functional.linear(x, shared.w13.weight.flatten(0, 1)).unflatten(-1, (2, F))
    want = nn.functional.linear(nn.functional.silu(h[..., 0, :]) * h[..., 1, :], shared.w2.weight)
    assert (shared.run(x) - want).norm() < 0.1 * want.norm()


def test_refusals():
    with pytest.raises(ValueError, match="fp8_all_gather does not know gate and up in one"):
        make(fp8_all_gather=True)
    with pytest.raises(ValueError, match="does not know the activation SiTUGLU"):
        Fp8Experts(Config(Fp8FlowMoEConfig(), activation_fn=SiTUGLU))


def test_what_a_rank_has_of_dtensors():
    """Under tensor parallelism gate and up of the same rows. A validation, without gradients, changes no cache that
    training uses: the weights are not frozen."""
    assert call(_of_dtensors) == [True] * 5


def _of_dtensors() -> list[bool]:
    dist.init_process_group("fake", rank=1, world_size=2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    experts, shared = make()
    whole, ffn = experts.w13.weight.detach(), shared.w13.weight.detach()
    places = {experts.w13: Shard(2), experts.w2: Shard(2), shared.w13: Shard(1), shared.w2: Shard(1)}
    for linear, place in places.items():
        linear.weight = nn.Parameter(distribute_tensor(linear.weight.detach(), mesh, [place], src_data_rank=None))
    with torch.no_grad():
        given, joined = experts.for_layer(experts, None), shared.shared()
        found = [torch.equal(given.weights.w1, whole[:, :, F // 2 :].flatten(1, 2))]
        found += [torch.equal(joined.weights.w1, ffn[0, F // 2 :]) and torch.equal(joined.weights.w3, ffn[1, F // 2 :])]
        for linear in (experts.w2, shared.w2):
            linear.weight.requires_grad_(False)
        found += [not experts.for_layer(experts, None).frozen and not shared.shared().frozen]
        for linear in (experts.w13, shared.w13):
            linear.weight.requires_grad_(False)
        found += [experts.for_layer(experts, None).frozen, shared.shared().frozen]
    return found


MAIN = """
from dataclasses import make_dataclass
from torchtitan.models.common import moe
moe.RoutedExperts.Config = make_dataclass("Config", ["w13", "w2", "token_dispatcher", "activation_fn"])
import titan_fp8moe.torchtitan03
"""


def test_main_is_refused_by_name():
    done = subprocess.run(
        [sys.executable, "-c", MAIN], cwd=ROOT, capture_output=True, text=True, timeout=time_limit(60)
    )
    message = "ImportError: titan_fp8moe.torchtitan03 is for MoE layers of torchtitan 0.3.0, but the installed 0.3"
    assert message in done.stderr and "have activation_fn, token_dispatcher, w13, w2; install" in done.stderr
