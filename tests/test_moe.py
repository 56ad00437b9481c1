"""The whole layer, FFNs and linears. tests/test_any_layer.py has their numbers."""

import subprocess
import sys

import pytest
import torch

from experiments.reference import relative_error
from tests.layer import DEVICE, CastCounter, D, E, H, apply_layer, assert_equal, make_layer, refused
from tests.test_any_layer import PLAIN, Tensors, ours
from titan_fp8moe import RoutedExperts, dispatch, routed_experts
from titan_fp8moe.config import Fp8FlowMoEConfig
from titan_fp8moe.layer.group import feed_forward, linear
from titan_fp8moe.layer.weights import ExpertWeights

DEFAULTS = Fp8FlowMoEConfig()


def test_tokens_are_spread_evenly_inside_a_context_only():
    x, _, _, weights = make_layer(tokens=2 * E)
    scores = torch.rand(2 * E, 1, device=DEVICE)
    ids, even = torch.full((2 * E, 1), 3, device=DEVICE), torch.arange(2 * E, device=DEVICE).view(-1, 1) % E
    ids[0] = even[0] = -1
    want = [routed_experts(x, *weights, chosen, scores) for chosen in (even, ids)]
    with dispatch.evenly():
        inside = routed_experts(x, *weights, ids, scores)
    assert_equal([inside, routed_experts(x, *weights, ids, scores)], want)


def test_bf16_scores_warn():
    x, scores, ids, weights = make_layer()
    compiled = torch.compile(routed_experts, backend="aot_eager", fullgraph=True)
    want = routed_experts(x, *weights, ids, scores.bfloat16().float())
    for layer in (routed_experts, compiled):
        with pytest.warns(UserWarning, match="compute them in fp32"):
            assert torch.equal(layer(x, *weights, ids, scores.bfloat16()), want)


def test_weight_gradients_depend_on_the_order(seed):
    """128 tokens share a scale there, and sums are in the order of the tokens."""
    tensors = Tensors.of(PLAIN, seed)
    got, want = ours(PLAIN, tensors.rows(torch.randperm(PLAIN.tokens))), ours(PLAIN, tensors)
    assert all(0 < relative_error(got[name], want[name]) < 0.02 for name in ("w1", "w2", "w3"))


@pytest.mark.parametrize("wrong", [E, -2, 2**31 - 1, 2**40])
@pytest.mark.skipif(DEVICE == "cuda", reason="see test_wrong_experts_end_in_an_assertion")
def test_ids_that_are_no_experts_are_refused(wrong, group):
    """By what the public can call. -1 is none, and ``apply_layer`` takes all others for -1, too."""
    x, scores, ids, weights = make_layer()
    module = RoutedExperts(E, D, H)
    ids[7, 1] = -1
    want = routed_experts(x, *weights, ids, scores)
    ids[7, 1] = wrong
    compiled = torch.compile(routed_experts, backend="aot_eager", fullgraph=True)
    for call in (
        lambda: routed_experts(x, *weights, ids, scores),
        lambda: compiled(x, *weights, ids, scores),
        lambda: module(x, ids, scores),
        lambda: routed_experts(x, *weights, ids, scores, ep_group=group),
    ):
        with pytest.raises(ValueError, match=rf"topk_ids has \[{wrong}\]"):
            call()
    if abs(wrong) < 2**31:
        got = apply_layer(x, ExpertWeights(*weights), ids, scores, config=DEFAULTS, check_ids=False)
        assert torch.equal(got, want)


@pytest.mark.gpu
@pytest.mark.parametrize("captured", [False, True])
def test_wrong_experts_end_in_an_assertion(captured):
    """In a process of its own, whose context is lost; also in a CUDA graph. Valid ids pass."""
    code = f"""
import torch
from tests.layer import make_layer, E
from titan_fp8moe import routed_experts
x, scores, chosen, weights = make_layer(dtype=torch.bfloat16)
run = lambda: routed_experts(x, *weights, chosen, scores)
chosen[0, 0] = -1
run(), run(), torch.cuda.synchronize()
if {captured}:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    run = graph.replay
    run(), torch.cuda.synchronize()
print("valid ids passed", flush=True)
chosen[5, 1] = E
run(), torch.cuda.synchronize()
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode and "valid ids passed" in result.stdout
    assert "topk_ids: an id is neither -1 nor one of the experts'" in result.stderr
    assert "device-side assert" in result.stderr


# --- FFNs and linears -------------------------------------------------------------------------------------------------


def make_dense(dtype=torch.float32):
    """x of 200 tokens; an FFN, whose hidden size is padded, and a linear, as functions of it."""
    shapes = (2, 100, D), (176, D), (D, 176), (176, D), (128, D)
    x, *weights, w = ((torch.randn(s, device=DEVICE) * 0.05).to(dtype).requires_grad_() for s in shapes)
    return x, (lambda x: feed_forward(x, ExpertWeights(*weights), DEFAULTS), lambda x: linear(x, w, DEFAULTS))


def test_only_what_is_needed_is_computed():
    x, w = torch.randn(50, 256, device=DEVICE), torch.randn(128, 256, device=DEVICE)
    for needed, op in ((x, "grouped_mm_wgrad"), (w, "quantize_weight_transposed")):
        out = linear(x.clone().requires_grad_(needed is x), w.clone().requires_grad_(needed is w), DEFAULTS)
        with CastCounter() as counter:
            out.sum().backward()
        assert counter.ops[op] == 0 and counter.ops["quantize_group"] == 1
        assert (counter.ops["grouped_mm"], counter.ops["grouped_mm_wgrad"]) == ((1, 0) if needed is x else (0, 1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_outputs_can_change_in_place(dtype):
    """As those of ``nn.Linear``: by an activation or a residual."""
    x, layers = make_dense(dtype)
    for layer in layers:
        (want,), (got,) = (torch.autograd.grad(out.sum(), x) for out in (layer(x).relu(), layer(x).relu_()))
        assert torch.equal(got, want) and layer(x).shape[:2] == x.shape[:2]


def test_autocast_and_evaluation():
    x, layers = make_dense()
    for layer in layers:
        want = layer(x)
        with torch.autocast(DEVICE, torch.bfloat16):
            assert layer(x).dtype == torch.bfloat16
        with refused("the result would be torch.float16"), torch.autocast(DEVICE, torch.float16):
            layer(x)
        with torch.no_grad():
            assert torch.equal(layer(x), want)
