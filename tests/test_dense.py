"""What FFNs and linears compute. tests/test_any_layer.py has numbers, tests/test_cache.py kept weights."""

import pytest
import torch

from tests.layer import DEVICE, CastCounter, refused
from titan_fp8moe import Fp8FlowMoEConfig
from titan_fp8moe.layer.group import feed_forward, linear
from titan_fp8moe.layer.weights import ExpertWeights

D, H = 256, 176  # H is padded to 256
DEFAULTS = Fp8FlowMoEConfig()


def leaves():
    """x of 200 tokens, and the weights of an FFN."""
    shapes = (2, 100, D), (H, D), (D, H), (H, D)
    return [(torch.randn(shape, device=DEVICE) * 0.05).requires_grad_() for shape in shapes]


def ffn(inputs):
    return feed_forward(inputs[0], ExpertWeights(*inputs[1:]), DEFAULTS)


def test_only_what_is_needed_is_computed():
    x = torch.randn(50, 256, device=DEVICE, requires_grad=True)
    w = torch.randn(128, 256, device=DEVICE)
    for needed, op in ((x, "grouped_mm_wgrad"), (w.requires_grad_(), "quantize_weight_transposed")):
        out = linear(x.detach().requires_grad_(needed is x), w.detach().requires_grad_(needed is w), DEFAULTS)
        with CastCounter() as counter:
            out.sum().backward()
        assert counter.ops[op] == 0 and counter.ops["quantize_group"] == 1
        assert (counter.ops["grouped_mm"], counter.ops["grouped_mm_wgrad"]) == ((1, 0) if needed is x else (0, 1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_outputs_can_change_in_place(dtype):
    """As those of ``nn.Linear``: by an activation or a residual."""
    x, *weights = (t.detach().to(dtype).requires_grad_() for t in leaves())
    square = torch.randn(128, D, device=DEVICE, dtype=dtype, requires_grad=True)
    for layer in (lambda: linear(x, square, DEFAULTS), lambda: ffn([x, *weights])):
        (want,), (got,) = (torch.autograd.grad(out.sum(), x) for out in (layer().relu(), layer().relu_()))
        assert torch.equal(got, want) and layer().shape[:2] == x.shape[:2]


def test_autocast_and_evaluation():
    inputs = leaves()
    with torch.autocast(DEVICE, torch.bfloat16):
        assert ffn(inputs).dtype == torch.bfloat16
    for layer in (lambda: linear(inputs[0], torch.randn(128, D, device=DEVICE), DEFAULTS), lambda: ffn(inputs)):
        with refused("the result would be torch.float16"), torch.autocast(DEVICE, torch.float16):
            layer()
    with torch.no_grad():
        assert torch.equal(ffn(inputs), ffn([t.requires_grad_() for t in inputs]))
