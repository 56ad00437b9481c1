"""The whole layer: exact scaling, wrong ids, and what a token's row depends on: RL scores a token in another batch than
it was sampled in. tests/test_any_layer.py has numbers and rows, tests/distributed/test_layers.py those of ranks."""

import subprocess
import sys

import pytest
import torch

from experiments.reference import moe_layer, relative_error
from tests.layer import DEVICE, D, E, H, T, apply_layer, make_layer, run
from tests.test_any_layer import PLAIN, Tensors, ours
from titan_fp8moe import RoutedExperts, dispatch, ops, routed_experts
from titan_fp8moe.config import Fp8FlowMoEConfig
from titan_fp8moe.layer.weights import ExpertWeights
from titan_fp8moe.recipe import TRANSPOSE_MODES


@pytest.mark.parametrize("power", [-40, 7])
def test_scaling_the_gradient_scales_every_gradient_exactly(power):
    x, scores, chosen, weights = make_layer()
    dout = torch.randn(T, D, device=DEVICE)
    for wgrad in TRANSPOSE_MODES:
        config = Fp8FlowMoEConfig(wgrad=wgrad)
        plain = run(x, scores, chosen, weights, dout, config)
        scaled = run(x, scores, chosen, weights, dout * 2.0**power, config)
        for a, b in zip(plain[1:], scaled[1:], strict=True):
            torch.testing.assert_close(a * 2.0**power, b, rtol=0, atol=0)


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


@pytest.mark.skipif(torch.__version__ < "2.12", reason="graphs of PyTorch 2.11 treat these gradients as constants")
def test_compiled_second_derivatives_are_refused():
    x, scores, chosen, weights = make_layer()
    x.requires_grad_()
    compiled = torch.compile(lambda x: routed_experts(x, *weights, chosen, scores), backend="aot_eager", fullgraph=True)
    (dx,) = torch.autograd.grad(compiled(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        dx.sum().backward()


def test_weight_gradient_with_anti_correlated_scales():
    """Tokens small in x and large in dy, and the reverse: the balanced transpose loses nothing over exact row-wise
    values, the paper's transpose does."""
    x, scores, chosen, weights = make_layer(tokens=1024)
    spread = torch.randint(-5, 6, (1024, 1), device=DEVICE).float()
    # Gate times up grows with the square of x, so this makes all tokens weigh about the same in every dW.
    x, dout = x * torch.exp2(spread), torch.randn(1024, D, device=DEVICE) * torch.exp2(-2 * spread)
    scores = torch.ones_like(scores)
    leaves = [t.double().requires_grad_() for t in (x, scores, *weights)]
    moe_layer(leaves[0], leaves[1], chosen, *leaves[2:], False).backward(dout.double())
    errors = {}
    for wgrad in ("bf16", "balanced", "scaling_aware"):
        result = run(x, scores, chosen, weights, dout, Fp8FlowMoEConfig(wgrad=wgrad))
        errors[wgrad] = [relative_error(g, leaf.grad) for g, leaf in zip(result[3:], leaves[2:], strict=True)]
    for exact, balanced in zip(errors["bf16"], errors["balanced"], strict=True):
        assert balanced < exact * 1.05, errors
    # w2's operands differ the most from token to token.
    assert errors["scaling_aware"][1] > 2 * errors["bf16"][1], errors


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
