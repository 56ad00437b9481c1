"""What users of torchtitan 0.3 switch on with FP8 layers: other optimizers and overrides, as far as a CPU goes."""

import copy

import pytest
import torch
from torchtitan.models.common.feed_forward import FeedForward
from torchtitan.models.common.linear import Linear

from tests.torchtitan03.test_converter import build, by_registry, convert, flagged
from titan_fp8moe.config import Fp8FlowMoEConfig
from titan_fp8moe.torchtitan03.modules import Fp8FlowFeedForward, Fp8FlowMoE

FUSED = "torchtitan.overrides.fused_swiglu"


def make_ffn(cache_weights: bool) -> Fp8FlowFeedForward:
    up, down = (Linear.Config(in_features=i, out_features=o) for i, o in ((128, 256), (256, 128)))
    config = Fp8FlowMoEConfig(cache_weights=cache_weights)
    return Fp8FlowFeedForward.Config(w1=up, w2=down, w3=up, fp8_flow=config).build()


@pytest.mark.parametrize("frozen", [(), ("w2",), ("w1", "w3")], ids=["none", "down", "gate_up"])
def test_muon_with_cached_and_frozen_weights(frozen: tuple[str, ...]):
    """Two microbatches a step, bit for bit as without a cache, which would go on with what Muon has changed."""
    plain, cached = make_ffn(False), make_ffn(True)
    cached.load_state_dict(plain.state_dict())
    before = copy.deepcopy(plain.state_dict())
    x = torch.randn(3, 2, 32, 128)
    outputs = []
    for ffn in (plain, cached):
        for name in frozen:
            getattr(ffn, name).requires_grad_(False)
        muon = torch.optim.Muon([p for p in ffn.parameters() if p.requires_grad], lr=0.1)
        outputs.append([])
        for step in x:
            for microbatch in step:
                y = ffn(microbatch)
                y.square().mean().backward()
                outputs[-1].append(y.detach())
            muon.step()
            muon.zero_grad()
    assert all(map(torch.equal, *outputs)) and not torch.equal(ffn.w1.weight, ffn.w3.weight)
    for name, weight in cached.state_dict().items():
        assert torch.equal(weight, plain.state_dict()[name])
        assert torch.equal(weight, before[name]) == (name.split(".")[0] in frozen)


def test_fused_swiglu():
    """The converter leaves fused FFNs and shared experts in bf16 beside FP8 experts; fused experts are refused. With
    the flag torchtitan refuses both, which are inside of layers that it claims."""
    job = by_registry()
    job.override.imports = [f"{FUSED}.fused_swiglu"]
    reasons = {part.kind: part.reason for part in convert(job)}
    fused = "FusedSwiGLU of Linear, Linear, Linear"
    assert reasons == {"moe": None, "shared_experts": fused, "feed_forward": fused}
    layer = build(job).layers["1"].moe
    assert type(layer) is Fp8FlowMoE and not layer.fp8_shared
    assert type(layer.shared_experts).__name__ == "FusedSwiGLU" and isinstance(layer.shared_experts, FeedForward)
    job = by_registry()
    job.override.imports = [f"{FUSED}.fused_grouped_experts"]
    with pytest.raises(ValueError, match="layers.1.moe has a FusedGroupedExperts; leave it in bf16"):
        convert(job)
    for name in ("fused_swiglu", "fused_grouped_experts"):
        with pytest.raises(ValueError, match="an ancestor of"):
            convert(flagged(f"{FUSED}.{name}"))
