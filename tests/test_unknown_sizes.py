"""Sizes that a graph does not know, such as the number of tokens that a mask selects, and layers of fake tensors."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.torch_version import TorchVersion

from tests.layer import DEVICE
from titan_fp8moe import (
    Adapter,
    Fp8FlowMoEConfig,
    Lora,
    RoutedExperts,
    SharedExperts,
    grouped_ffn,
    grouped_mm,
    routed_experts,
)
from titan_fp8moe.layer.group import feed_forward
from titan_fp8moe.layer.weights import ExpertWeights
from titan_fp8moe.nn.modules import Fp8FlowLinear

T, D, E, K = 64, 128, 4, 2
CONFIG = Fp8FlowMoEConfig()


class Routed(nn.Module):
    def __init__(self, device: str | None = DEVICE):
        super().__init__()
        self.experts = RoutedExperts(E, D, D, device=device)

    def forward(self, x: Tensor, ids: Tensor, scores: Tensor) -> Tensor:
        return self.experts(x, ids, scores)


class WithShared(Routed):
    def __init__(self):
        super().__init__()
        self.w1, self.w2, self.w3 = (nn.Parameter(torch.randn(D, D, device=DEVICE) * 0.05) for _ in range(3))

    def forward(self, x: Tensor, ids: Tensor, scores: Tensor) -> Tensor:
        return self.experts(x, ids, scores, shared=SharedExperts(self.w1, self.w2, self.w3))


class Linear(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = Fp8FlowLinear(D, D, device=DEVICE)

    def forward(self, x: Tensor, ids: Tensor, scores: Tensor) -> Tensor:
        return self.linear(x)


class Dense(nn.Module):
    """An FFN of every token."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(D, D, device=DEVICE) * 0.05 for _ in range(3))

    def forward(self, x: Tensor, ids: Tensor, scores: Tensor) -> Tensor:
        return feed_forward(x, ExpertWeights(*self.weights), CONFIG)


class Grouped(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(E, D, D, device=DEVICE) * 0.05)

    def forward(self, x: Tensor, ids: Tensor, scores: Tensor) -> Tensor:
        ends = (ids[:, :1] == torch.arange(E, device=DEVICE)).sum(0).cumsum(0, dtype=torch.int32)
        return grouped_mm(x.bfloat16(), self.weight, offs=ends)


class GroupedFFN(nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(E, D, D, device=DEVICE) * 0.05 for _ in range(3))

    def forward(self, x: Tensor, ids: Tensor, scores: Tensor) -> Tensor:
        ends = (ids[:, :1] == torch.arange(E, device=DEVICE)).sum(0).cumsum(0, dtype=torch.int32)
        w1, w2, w3 = (self.weights[i] for i in range(3))  # torch 2.11 unpacks no lists of parameters
        return grouped_ffn(x, w1, w2, w3, ends, scores=scores[:, 0])


class Clamped(GroupedFFN):
    """With numbers in its specification; :func:`routed_experts` of plain tensors."""

    def forward(self, x: Tensor, ids: Tensor, scores: Tensor) -> Tensor:
        w1, w2, w3 = (self.weights[i] for i in range(3))
        parameters = dict(limit=2.0, alpha=1.5)
        options = dict(activation="clamped_swiglu", activation_parameters=parameters)
        return routed_experts(x, w1, w2, w3, ids, scores, **options)


def make_inputs(tokens: int = T) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(tokens, D, device=DEVICE, requires_grad=True)
    return x, torch.rand(tokens, E, device=DEVICE).topk(K).indices, torch.rand(tokens, K, device=DEVICE)


@pytest.mark.parametrize(
    "kind", [Routed, WithShared, Dense, Linear, Grouped, GroupedFFN], ids=lambda kind: kind.__name__
)
@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_tokens_selected_by_a_mask(kind: type[nn.Module]):
    if kind is WithShared and TorchVersion(torch.__version__) < (2, 13):
        pytest.skip("torch.compile loses the symbols of the rows of shared experts")
    layer, inputs = kind(), make_inputs()

    def select(mask: Tensor, *tensors: Tensor) -> Tensor:
        at = mask.nonzero().squeeze(1)
        return layer(*(t[at] for t in tensors))

    compiled = torch.compile(select, fullgraph=True, backend="aot_eager")
    some = torch.rand(T, device=DEVICE) > 0.5
    for mask in (some, ~some, torch.zeros_like(some), torch.ones_like(some)):
        results = []
        for call in (select, compiled):
            out = call(mask, *inputs)
            results.append([out, *torch.autograd.grad(out.float().square().sum(), [inputs[0], *layer.parameters()])])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("kind", [Routed, WithShared, Dense, Linear, GroupedFFN, Clamped], ids=lambda k: k.__name__)
def test_dynamic_shapes(kind: type[nn.Module]):
    """``dynamic=True`` makes symbols of all numbers, and of those in a specification too."""
    layer = kind()
    _assert_compiled_equals(layer, list(layer.parameters()))


def _assert_compiled_equals(layer: Callable[..., Tensor], params: list[Tensor]) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(layer, dynamic=True, fullgraph=True, backend="aot_eager")
    for count in (T, 33):
        inputs, results = make_inputs(count), []
        for call in (layer, compiled):
            out = call(*inputs)
            results.append([out, *torch.autograd.grad(out.float().square().sum(), [inputs[0], *params])])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("option", ["lora", "biases", "both"])
@pytest.mark.parametrize("function", [routed_experts, grouped_ffn], ids=lambda function: function.__name__)
def test_dynamic_shapes_of_lora_and_biases(function: Callable[..., Tensor], option: str, fused: bool):
    """Of tensors that no module has: all their sizes, and the adapters' scales, are symbols."""
    leaves: list[Tensor] = []

    def leaf(*shape: int) -> Tensor:
        leaves.append((torch.randn(E, *shape, device=DEVICE) * 0.05).requires_grad_())
        return leaves[-1]

    rows = [2 * D, D] if fused else [D, D, D]
    weights: list = [leaf(N, D).requires_grad_(option == "biases") for N in rows] + [None] * fused
    options: dict = {}
    if option != "biases":
        options["lora"] = Lora(*(Adapter(leaf(8, D), leaf(N, 8), 0.5) for N in rows))
    if option != "lora":
        options |= {name: leaf(N) for name, N in zip(("b1", "b2", "b3"), rows, strict=False)}

    def layer(x: Tensor, ids: Tensor, scores: Tensor) -> Tensor:
        if function is routed_experts:
            return routed_experts(x, *weights, ids, scores, **options)
        ends = (ids[:, :1] == torch.arange(E, device=DEVICE)).sum(0).cumsum(0, dtype=torch.int32)
        return grouped_ffn(x, *weights, ends, scores=scores[:, 0], **options)

    _assert_compiled_equals(layer, [t for t in leaves if t.requires_grad])


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("kind", [Routed, WithShared, Dense, Linear, GroupedFFN], ids=lambda kind: kind.__name__)
def test_export_with_any_number_of_tokens(kind: type[nn.Module], strict: bool):
    layer, tokens = kind(), torch.export.Dim("tokens", min=0, max=4096)
    inputs = tuple(t.detach() for t in make_inputs())
    with torch.no_grad():
        program = torch.export.export(layer, inputs, dynamic_shapes=({0: tokens},) * 3, strict=strict).module()
    for count in (0, 1, 3, 128, 200):
        more = tuple(t.detach() for t in make_inputs(count))
        with torch.no_grad():
            assert torch.equal(program(*more), layer(*more))


def test_a_layer_of_fake_tensors():
    """Built and run, as estimators of memory do."""
    with FakeTensorMode():
        layer, (x, ids, scores) = Routed(device="cpu"), (t.cpu() for t in make_inputs())
        x = x.detach().requires_grad_()
        out = layer(x, ids, scores)
        out.sum().backward()
        layer.experts.add_lora(rank=16, alpha=16)
        assert layer.experts.lora_A["w1"].shape == (E, 16, D) and out.shape == (T, D)
    assert x.grad.shape == x.shape
