"""The first layer and operand with a NaN or Inf is named, in one warning, whatever spreads after it."""

import logging
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.layer import DEVICE, D, H, apply_layer, make_layer
from titan_fp8moe import Fp8FlowMoEConfig
from titan_fp8moe.layer.group import feed_forward, linear
from titan_fp8moe.layer.weights import ExpertWeights
from titan_fp8moe.torchtitan import metrics
from titan_fp8moe.trainer.nan_watch import NOBODY, NanWatch

NAMES = ["layers.0.feed_forward", "layers.1.moe", "layers.2.moe"]


class Layers(nn.Module):
    """A dense FFN and two MoE layers, the first without and the last with shared experts."""

    def __init__(self, ep_group=None):
        super().__init__()
        self.layers, self.group, self.config = nn.ModuleList(nn.Module() for _ in NAMES), ep_group, Fp8FlowMoEConfig()
        _, self.scores, self.ids, weights = make_layer(64, experts=4)
        self.weights = [ExpertWeights(*(w.clone().requires_grad_() for w in weights)) for _ in NAMES]
        self.shared = [ExpertWeights(*(w.detach()[i].clone().requires_grad_() for w in weights)) for i in range(3)]

    def forward(self, x):
        flags = [layer.nan_flags for layer in self.layers]
        x = feed_forward(x, self.shared[0], self.config, nan_flags=flags[0])
        for i, shared in ((1, None), (2, self.shared[2])):
            options = dict(config=self.config, ep_group=self.group, shared=shared, nan_flags=flags[i])
            x = apply_layer(x, self.weights[i], self.ids, self.scores, **options)
        return x


def spoil(tensor):
    tensor.data.view(-1)[5] = torch.nan


@pytest.mark.parametrize("expert_parallel", [False, True])
@pytest.mark.parametrize("spoil_one, said", [
    (lambda layers, x, dout: x.data[3, 5].fill_(torch.inf), "layers.0.feed_forward, in its input x"),
    (lambda layers, x, dout: spoil(layers.shared[0].w1), "layers.1.moe, in its input x"),
    (lambda layers, x, dout: spoil(layers.weights[1].w1), "layers.2.moe, in its input x"),
    (lambda layers, x, dout: spoil(layers.weights[2].w1), "layers.1.moe, in its output's gradient dy"),
    (lambda layers, x, dout: spoil(dout), "layers.2.moe, in its output's gradient dy"),
    # Finite when it is quantized, Inf when it has been multiplied.
    (lambda layers, x, dout: dout.copy_(3e38 * dout.sign()), "layers.1.moe, in its output's gradient dy"),
])  # fmt: skip
def test_the_first_is_named_once(group, monkeypatch, caplog, expert_parallel, spoil_one, said):
    """Whether torchtitan logs the step or not."""
    monkeypatch.setattr(metrics.utils, "device_type", DEVICE)
    layers = Layers(group if expert_parallel else None)
    metrics.watch(dict(zip(NAMES, layers.layers, strict=True)))
    processor = SimpleNamespace(model_parts=[layers], job_config=SimpleNamespace(fp8_flow_moe=Fp8FlowMoEConfig()))
    should_log = metrics._looking(lambda self, step: step == 2)
    x, dout = torch.randn(2, 64, D, device=DEVICE)
    with caplog.at_level(logging.WARNING):
        for step in range(1, 5):
            if step == 2:
                spoil_one(layers, x, dout)
            layers(x.clone().requires_grad_()).backward(dout)
            assert should_log(processor, step) == (step == 2)
            if x.is_cuda:
                torch.cuda.synchronize()
            assert ("FP8-Flow-MoE: a NaN" in caplog.text) == (step > 2)
    assert caplog.text.count("NaN or Inf showed first") == 1
    assert f"showed first in {said}, by step 2" in caplog.text


def test_a_late_answer_is_still_the_first(group, caplog):
    """A host that is steps ahead of the device reads what the device has not written yet."""
    layers = [nn.Module() for _ in NAMES]
    watch = NanWatch(NAMES, dict(zip(NAMES, layers, strict=True)), DEVICE, logging.getLogger())
    watch.after_step([], 1)  # a rank without layers has seen nothing
    for layer in (layers[1], layers[0]):
        layer.nan_flags[0, 0] = 1
        watch.answer.fill_(NOBODY)
        watch.after_step(layers, 2)
    watch.after_step(layers, 3)
    assert "showed first in layers.1.moe, in its input x" in caplog.text


@pytest.mark.parametrize("compiled", [False, True])
def test_flags_need_no_saved_tensor(group, compiled):
    """Hooks that move saved tensors, to the host for example, give the backward copies of them. Linears have flags."""
    layers, flags = Layers(None if compiled else group), torch.zeros(2, 16, dtype=torch.uint8, device=DEVICE)
    NanWatch(NAMES, dict(zip(NAMES, layers.layers, strict=True)), DEVICE, logging.getLogger())  # gives them flags
    x, w = torch.randn(64, D, device=DEVICE), torch.randn(H, D, device=DEVICE, requires_grad=True)
    run = torch.compile(layers, backend="aot_eager") if compiled else layers
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda saved: saved):
        out = linear(run(x.requires_grad_()), w, Fp8FlowMoEConfig(), nan_flags=flags)
    out.backward(torch.full_like(out, float("nan")))
    for flagged in (flags, *(layer.nan_flags for layer in layers.layers)):
        assert flagged[1, 0] == 1
    x = x.detach().index_fill(0, torch.tensor([1], device=DEVICE), float("inf"))
    linear(x, w, Fp8FlowMoEConfig(), nan_flags=flags.zero_())
    assert flags[:, 0].tolist() == [1, 0]
