"""The whole layer: wrong ids, and what a token's row depends on: RL scores a token in another batch than
it was sampled in. tests/test_any_layer.py has numbers and rows, tests/distributed/test_layers.py those of ranks."""

import subprocess
import sys

import pytest
import torch

from experiments.reference import relative_error
from tests.layer import DEVICE, D, E, H, T, apply_layer, make_layer, run
from tests.test_any_layer import PLAIN, Tensors, ours
from titan_fp8moe import RoutedExperts, dispatch, ops, routed_experts
from titan_fp8moe.config import Fp8FlowMoEConfig
from titan_fp8moe.layer.weights import ExpertWeights


def test_tokens_are_spread_evenly_inside_a_context_only():
    x, scores, _, weights = make_layer(tokens=2 * E)
    ids = torch.full((2 * E, 1), 3, device=DEVICE)
    ids[0] = -1
    alike = torch.arange(2 * E, device=DEVICE).view(-1, 1) % E
    alike[0] = -1
    want = [routed_experts(x, *weights, chosen, scores[:, :1].contiguous()) for chosen in (alike, ids)]
    with dispatch.evenly():
        got = [routed_experts(x, *weights, ids, scores[:, :1].contiguous())]
    got.append(routed_experts(x, *weights, ids, scores[:, :1].contiguous()))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_bf16_scores_warn():
    x, scores, chosen, weights = make_layer()
    compiled = torch.compile(routed_experts, backend="aot_eager", fullgraph=True)
    module = RoutedExperts(E, D, H, device=DEVICE)
    for layer in (routed_experts, compiled, lambda x, w1, w2, w3, *pairs: module(x, *pairs)):
        with pytest.warns(UserWarning, match="compute them in fp32"):
            got = layer(x, *weights, chosen, scores.bfloat16())
        if layer is routed_experts:
            assert torch.equal(got, routed_experts(x, *weights, chosen, scores.bfloat16().float()))


def test_weight_gradients_depend_on_the_order(seed):
    """128 tokens share a scale there, and sums are in the order of the tokens."""
    tensors = Tensors.of(PLAIN, seed)
    got, want = ours(PLAIN, tensors.rows(torch.randperm(PLAIN.tokens))), ours(PLAIN, tensors)
    assert all(0 < relative_error(got[name], want[name]) < 0.02 for name in ("w1", "w2", "w3"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_ranks_round_their_parts(dtype, seed):
    """tests/distributed/test_layers.py has these bits from ranks. One with all experts on one rank keeps its own."""
    layer = PLAIN._replace(dtype=dtype)
    tensors = Tensors.of(layer, seed)
    whole, parts, on_rank = ours(layer, tensors)["out"], [], tensors.ids // (layer.experts // 2)
    fp32 = tensors._replace(leaves=tensors.leaves | dict(x=tensors.leaves["x"].float()), dout=tensors.dout.float())
    for rank in range(2):
        part = fp32._replace(ids=tensors.ids.masked_fill(on_rank != rank, -1))
        parts.append(ours(layer, part)["out"].bfloat16().float())
    spread = (parts[0] + parts[1]).to(dtype)
    assert 0 < relative_error(spread, whole) < 3e-3
    bound = 2**-8 * (parts[0].abs() + parts[1].abs() + (whole.abs() if dtype == torch.bfloat16 else 0))
    assert ((spread - whole).abs() <= bound).all()
    one_rank = (on_rank.float().var(1) == 0).to(whole.device)
    assert one_rank.any() and torch.equal(spread[one_rank].bfloat16(), whole[one_rank].bfloat16())


@pytest.mark.gpu
def test_emulation_on_a_gpu():
    """The reference runs on a GPU when asked to, and the kernels give what it gives."""
    x, scores, chosen, weights = make_layer(dtype=torch.bfloat16)
    dout = torch.randn(T, D, device=DEVICE)
    result = run(x, scores, chosen, weights, dout, Fp8FlowMoEConfig())
    ops.emulate(True)
    try:
        emulated = run(x, scores, chosen, weights, dout, Fp8FlowMoEConfig())
    finally:
        ops.emulate(False)
    for a, b in zip(result, emulated, strict=True):
        # bf16 rounding of the GEMMs' results, and the few fp8 codes it moves: with the tensor cores' sums modelled by
        # noise, 0.0035 on average, with a standard deviation of 0.0006 over inputs.
        assert relative_error(a, b) < 8e-3


@pytest.mark.parametrize("wrong", [E, -2, 2**31 - 1, 2**40])
@pytest.mark.skipif(DEVICE == "cuda", reason="see test_wrong_experts_end_in_an_assertion")
def test_ids_that_are_no_experts_are_refused(wrong):
    """By what the public can call. -1 is none, and ``apply_layer`` takes all others for -1, too."""
    x, scores, chosen, weights = make_layer()
    module = RoutedExperts(E, D, H)
    ignored = chosen.clone()
    ignored[7, 1] = -1
    want = routed_experts(x, *weights, ignored, scores)
    chosen[7, 1] = wrong
    compiled = torch.compile(routed_experts, backend="aot_eager", fullgraph=True)
    for call in (
        lambda: routed_experts(x, *weights, chosen, scores),
        lambda: compiled(x, *weights, chosen, scores),
        lambda: module(x, chosen, scores),
    ):
        with pytest.raises(ValueError, match=rf"topk_ids has \[{wrong}\]"):
            call()
    if abs(wrong) < 2**31:
        config = Fp8FlowMoEConfig()
        got = apply_layer(x, ExpertWeights(*weights), chosen, scores, config=config, check_ids=False)
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
