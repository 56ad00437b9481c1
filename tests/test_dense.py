"""FFNs and linears with casts of their own: gradients, casts, padding, checkpointing, caches, compile."""

import pytest
import torch
import torch.nn.functional as F

from experiments.reference import make_layer, relative_error
from tests.layer import (
    DEVICE,
    CastCounter,
    assert_equal,
    generations,
    refused,
    results,
    saved_bytes,
)
from tests.specs import SETTINGS
from titan_fp8moe import Fp8FlowLinear, routed_experts
from titan_fp8moe.config import Fp8FlowMoEConfig
from titan_fp8moe.layer import statistics
from titan_fp8moe.layer.group import feed_forward, linear
from titan_fp8moe.layer.operands import WeightCache
from titan_fp8moe.layer.weights import ExpertWeights
from titan_fp8moe.recipe import padded

D, H = 256, 176  # H is padded to 256
DEFAULTS = Fp8FlowMoEConfig()


def leaves(tokens=300, hidden=H, dtype=torch.float32):
    shapes = (hidden, D), (D, hidden), (hidden, D)
    x = torch.randn(2, tokens, D, device=DEVICE, dtype=dtype)
    return [t.requires_grad_() for t in (x, *(torch.randn(s, device=DEVICE, dtype=dtype) * 0.05 for s in shapes))]


def ffn(inputs, config=DEFAULTS, cache=None):
    return feed_forward(inputs[0], ExpertWeights(*inputs[1:]), config, cache)


@pytest.mark.parametrize("config", [*SETTINGS, Fp8FlowMoEConfig(wgrad="scaling_aware")], ids=str)
@pytest.mark.parametrize("tokens", [0, 129])
def test_gradients_against_fp64(config, tokens):
    """And the number of casts."""
    inputs = leaves(tokens)
    dout = torch.randn(2, tokens, D, device=DEVICE)
    with CastCounter() as counter:
        got = results(inputs, ffn(inputs, config), dout)
    assert counter.ops["quantize_group"] == 2 and not counter.ops["quantize_rows"] and not counter.stray_casts
    exact = [t.detach().double().requires_grad_() for t in inputs]
    x, gate, down, up = exact
    want = results(exact, (F.silu(x @ gate.T) * (x @ up.T)) @ down.T, dout.double())
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape and a.dtype == torch.float32 and (a.is_contiguous() or a.shape == (D, H))
        if tokens:
            assert 0.01 < relative_error(a, b) < 0.1, relative_error(a, b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_linear(dtype):
    x = torch.randn(3, 50, 384, device=DEVICE, dtype=dtype, requires_grad=True)
    w = (torch.randn(256, 384, device=DEVICE) * 0.05).to(dtype).requires_grad_()
    dout = torch.randn(3, 50, 256, device=DEVICE, dtype=dtype)
    with CastCounter() as counter:
        out = linear(x, w, DEFAULTS)
        dx, dw = torch.autograd.grad(out, [x, w], dout)
    assert counter.ops["quantize_group"] == 2 and not counter.stray_casts
    exact = [t.detach().double().requires_grad_() for t in (x, w)]
    want = results(exact, exact[0] @ exact[1].T, dout.double())
    for a, b in zip((out, dx, dw), want, strict=True):
        assert a.dtype == dtype and a.shape == b.shape and 0.01 < relative_error(a, b) < 0.06, relative_error(a, b)


def test_rows_of_a_linear_do_not_depend_on_each_other():
    w, x = torch.randn(256, D, device=DEVICE), torch.randn(300, D, device=DEVICE)
    x = x * torch.exp2(torch.randint(-4, 5, (300, 1), device=DEVICE))  # a scale that rows share would be seen
    some = torch.randperm(300, device=DEVICE)[:9]
    assert torch.equal(linear(x[some], w, DEFAULTS), linear(x, w, DEFAULTS)[some])


def test_only_what_is_needed_is_computed():
    x = torch.randn(50, 256, device=DEVICE, requires_grad=True)
    w = torch.randn(128, 256, device=DEVICE)
    for needed, op in ((x, "grouped_mm_wgrad"), (w.requires_grad_(), "quantize_weight_transposed")):
        out = linear(x.detach().requires_grad_(needed is x), w.detach().requires_grad_(needed is w), DEFAULTS)
        with CastCounter() as counter:
            out.sum().backward()
        assert counter.ops[op] == 0 and counter.ops["quantize_group"] == 1
        assert (counter.ops["grouped_mm"], counter.ops["grouped_mm_wgrad"]) == ((1, 0) if needed is x else (0, 1))


def test_modules_keep_their_parameter():
    stock = torch.nn.Linear(256, 128, bias=False, device=DEVICE)
    weight = stock.weight
    Fp8FlowLinear.convert(stock, DEFAULTS)
    assert type(stock) is Fp8FlowLinear and stock.weight is weight and list(stock.state_dict()) == ["weight"]
    assert Fp8FlowLinear(256, 128)(torch.randn(4, 256)).shape == (4, 128)
    no_linear, other = "only an nn.Linear without a bias", torch.nn.Identity()
    for module in (torch.nn.Linear(256, 128), other):
        with refused(no_linear):
            Fp8FlowLinear.convert(module, DEFAULTS)


def test_caches_quantize_once_per_step():
    inputs, caches = leaves(100), [WeightCache(), WeightCache()]
    w = torch.randn(128, D, device=DEVICE).requires_grad_()

    def step():
        before = sum(sum(generations(cache)) for cache in caches)
        out = linear(ffn(inputs, cache=caches[0]), w, DEFAULTS, caches[1])
        grads = torch.autograd.grad(out.sum(), [*inputs, w])
        return grads, sum(sum(generations(cache)) for cache in caches) - before

    want = torch.autograd.grad(linear(ffn(inputs), w, DEFAULTS).sum(), [*inputs, w])
    for quantizations in (3, 0):
        got, count = step()
        assert count == quantizations
        assert_equal(got, want)
    torch.optim.SGD([w], lr=0.1).step()
    assert step()[1] == 3


def test_autocast_and_evaluation():
    inputs = leaves(100)
    with torch.autocast(DEVICE, torch.bfloat16):
        assert ffn(inputs).dtype == torch.bfloat16
    for layer in (lambda: linear(inputs[0], torch.randn(128, D, device=DEVICE), DEFAULTS), lambda: ffn(inputs)):
        with refused("the result would be torch.float16"), torch.autocast(DEVICE, torch.float16):
            layer()
    with torch.no_grad():
        assert torch.equal(ffn(inputs), ffn([t.requires_grad_() for t in inputs]))


@pytest.mark.parametrize("kind", ["ffn", "experts without a gate"])
def test_padding_does_not_count_in_statistics(kind):
    inputs, w = leaves(), torch.randn(128, D, device=DEVICE).requires_grad_()
    statistics.collect()
    if kind == "ffn":
        linear(ffn(inputs), w, DEFAULTS).square().sum().backward()
    else:  # with h positive, so that only padding has no gradient
        x, scores, ids, (w1, w2, _) = make_layer(300, D, H, 8, 3, device=DEVICE)
        out = routed_experts(x.abs(), w1.abs().requires_grad_(), w2, None, ids, scores, activation="relu2")
        out.backward(torch.randn_like(out))
    figures = statistics.summarize(statistics.take(DEVICE))
    # Normal values: some underflow, but 80 of 256 columns would be 31%.
    for kind in ("x", "a", "dy", "dh", "w"):
        assert figures[f"{kind}/underflow"] < 0.05, kind


@pytest.mark.parametrize("recompute", ["none", "activation", "experts"])
def test_frozen_weights(recompute):
    """Same output and dx. No rows are saved that only weight gradients read, and weights are quantized once."""
    config = Fp8FlowMoEConfig(recompute=recompute)
    x, *weights = leaves(256)
    w, caches = torch.randn(128, D, device=DEVICE).requires_grad_(), [WeightCache("forward") for _ in range(2)]

    def run(frozen):
        given = caches if frozen else (None, None)

        def forward():
            y = feed_forward(x, ExpertWeights(*weights), config, given[0], frozen=frozen)
            return y, linear(x, w, config, given[1], frozen=frozen)

        outs, kept = saved_bytes(forward)
        return [*outs, *(torch.autograd.grad(out.sum(), x)[0] for out in outs)], kept

    want, trained = run(False)
    for t in (*weights, w):
        t.requires_grad_(False)
    for _ in range(2):
        got, frozen = run(True)
        assert_equal(got, want)
    H, tokens = weights[1].shape[1], x.shape[:-1].numel()
    rows = tokens * (D + D // 128)
    hidden = {"none": tokens * (padded(H) + padded(H) // 128)}.get(recompute, 0)
    numbers = 3 * 8  # the copies' generations
    assert trained - frozen + numbers == hidden + rows * (1 if recompute == "experts" else 2)
    assert [generations(cache) for cache in caches] == [[1, 1], [1]]
