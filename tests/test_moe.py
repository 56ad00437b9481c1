"""The whole layer: gradients, casts, saved bytes, and what happens to numbers at the edges."""

import functools
import itertools
import re
import subprocess
import sys
import types
import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from experiments.reference import moe_layer, relative_error
from tests.layer import DEVICE, CastCounter, D, E, H, T, apply_layer, make_layer, run
from titan_fp8moe import RoutedExperts, dispatch, ops, routed_experts
from titan_fp8moe.config import Fp8FlowMoEConfig
from titan_fp8moe.layer import checks, experts, group
from titan_fp8moe.layer.group import feed_forward, linear
from titan_fp8moe.layer.weights import ExpertWeights
from titan_fp8moe.nn import grouped_mm
from titan_fp8moe.recipe import TRANSPOSE_MODES, row_capacity
from titan_fp8moe.torchtitan.converter import _SAVED_OPS

ALL_MODES = [
    Fp8FlowMoEConfig(wgrad=wgrad, save_h=save_h, recompute=recompute)
    for wgrad, save_h, recompute in itertools.product(
        ("balanced", "scaling_aware", "bf16"), ("bf16", "fp8"), ("none", "activation", "experts")
    )
]


@pytest.mark.parametrize("recompute", ["none", "activation", "experts"])
def test_a_kept_operand_is_not_recomputed(recompute, monkeypatch):
    """Of GEMM 2; GEMM 1 is counted in test_two_explicit_casts."""
    op, recomputed = ops.swiglu_quantize_backward, []
    monkeypatch.setattr(ops, "swiglu_quantize_backward", lambda *args: recomputed.append(args[6]) or op(*args))
    x, scores, chosen, weights = make_layer()
    run(x, scores, chosen, weights, torch.randn_like(x), Fp8FlowMoEConfig(recompute=recompute))
    assert recomputed == [recompute != "none"]


@pytest.mark.parametrize("recompute", ["none", "activation", "experts"])
def test_two_explicit_casts(recompute):
    """One standalone quantization in the forward, one in the backward, and no other way into fp8 but the fused
    functions, inside of which the reference casts on a CPU."""
    x, scores, chosen, weights = make_layer()
    leaves = [t.requires_grad_() for t in (x, scores, *weights)]
    with CastCounter() as forward:
        out = routed_experts(x, *weights, chosen, leaves[1], config=Fp8FlowMoEConfig(recompute=recompute))
    with CastCounter() as backward:
        out.backward(torch.randn_like(out))
    assert not forward.stray_casts and not backward.stray_casts
    once = dict.fromkeys(("quantize_rows", "permute_rows"), 1)
    again = int(recompute == "experts")
    assert forward.ops == once | dict(
        routed_experts_forward=1, expert_routing=1, quantize_weights=2, grouped_mm=2, swiglu_quantize=1, unpermute_sum=1
    )
    assert backward.ops == once | dict(
        routed_experts_hidden_gradients=1, routed_experts_gradients=1, permute_rows=1 + again, grouped_mm=2 + again,
        quantize_weights=2 + again, swiglu_quantize_backward=1, transpose_pair=2, grouped_mm_wgrad=2,
        unpermute_gradients=1,
    )  # fmt: skip


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


@pytest.mark.parametrize("recompute", ["none", "activation", "experts"])
@pytest.mark.parametrize("frozen", [(0,), (1,), (0, 1)])
def test_frozen_inputs_cost_nothing(frozen, recompute):
    """Neither GEMM nor sum for the gradient of a frozen input; the other gradients are the same."""
    x, scores, chosen, weights = make_layer()
    dout, config = torch.randn_like(x), Fp8FlowMoEConfig(recompute=recompute)
    _, *want = run(x, scores, chosen, weights, dout, config)
    leaves = [t.detach().clone() for t in (x, scores, *weights)]
    for i, leaf in enumerate(leaves):
        leaf.requires_grad_(i not in frozen)
    out = routed_experts(leaves[0], *leaves[2:], chosen, leaves[1], config=config)
    with CastCounter() as backward:
        out.backward(dout)
    assert backward.ops["grouped_mm"] == 2 - (0 in frozen) + (recompute == "experts")
    assert backward.ops["unpermute_gradients"] == 1 - (0 in frozen)
    ffn = feed_forward(leaves[0], ExpertWeights(*(w[0] for w in leaves[2:])), config)
    with CastCounter() as backward:
        torch.autograd.grad(ffn, leaves[2:], dout)
    assert backward.ops["grouped_mm"] == 2 - (0 in frozen) + (recompute == "experts")
    for i, (leaf, grad) in enumerate(zip(leaves, want, strict=True)):
        assert leaf.grad is None if i in frozen else torch.equal(leaf.grad, grad)


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


@pytest.mark.parametrize(("recompute", "save_h"), [("activation", "fp8"), ("experts", "bf16")])
def test_what_is_read_last_is_freed_before_the_weight_gradients(monkeypatch, recompute, save_h):
    """h and dx. With activation checkpointing; without it autograd holds what was saved until the layer's backward
    ends."""
    x, scores, chosen, weights = make_layer()
    leaves = [t.requires_grad_() for t in (x, scores, *weights)]
    config = Fp8FlowMoEConfig(recompute=recompute, save_h=save_h)
    wgrad, read, alive = ops.grouped_mm_wgrad, {}, []

    def watch(name, position):
        op = getattr(ops, name)

        def wrapper(*args, **options):
            read[name] = weakref.ref(args[position])
            return op(*args, **options)

        monkeypatch.setattr(ops, name, wrapper)

    watch("swiglu_quantize_backward", 1)
    watch("unpermute_gradients", 0)
    monkeypatch.setattr(
        ops, "grouped_mm_wgrad", lambda *args: alive.append([r() is not None for r in read.values()]) or wgrad(*args)
    )

    def layer(x):
        return routed_experts(x, *leaves[2:], chosen, leaves[1], config=config)

    contexts = functools.partial(create_selective_checkpoint_contexts, list(_SAVED_OPS))
    for kwargs in ({}, dict(context_fn=contexts)):
        checkpoint(layer, leaves[0], use_reentrant=False, **kwargs).sum().backward()
    assert alive == [[False, False]] * 4


def test_mixed_precision_changes_nothing():
    """A trainer's autocast, as torchtitan's without FSDP, means bf16; the experts' products stay fp32."""
    x, scores, chosen, weights = make_layer()
    args = x, scores, chosen, weights, torch.randn_like(x), Fp8FlowMoEConfig()
    want = run(*args)
    with torch.autocast(DEVICE, torch.bfloat16):
        got = run(*args)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


def test_second_derivatives_are_refused():
    """Where the incoming gradient is a constant, too."""
    x, scores, chosen, weights = make_layer()
    leaves = [t.requires_grad_() for t in (x, scores, *weights)]
    for loss in (torch.sum, torch.linalg.norm):
        for leaf in leaves:
            with pytest.raises(RuntimeError, match="no second derivative.*create_graph=True"):
                torch.autograd.grad(loss(routed_experts(x, *weights, chosen, scores)), leaf, create_graph=True)


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


def test_routing_tensors_reach_the_op_contiguous(monkeypatch):
    """The kernels read a row of choices as one piece of memory."""
    x, scores, chosen, weights = make_layer()
    want = routed_experts(x, *weights, chosen, scores)
    op, seen = experts._forward_op, []

    def record(*args):
        seen.extend(arg for arg in args if isinstance(arg, torch.Tensor) and arg.shape == chosen.shape)
        return op(*args)

    monkeypatch.setattr(experts, "_forward_op", record)
    views = (t.t().contiguous().t() for t in (chosen, scores))
    assert torch.equal(routed_experts(x, *weights, *views), want)
    assert len(seen) == 2 and all(t.is_contiguous() for t in seen)


def test_another_than_the_current_device_is_refused(monkeypatch):
    """In every entry; kernels would run on the current one, with addresses of the other."""
    x, scores, chosen, weights = make_layer()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    there = types.SimpleNamespace(is_cuda=True, device=torch.device("cuda", 1))
    with pytest.raises(ValueError, match="x is on cuda:1, .* call torch.cuda.set_device"):
        checks.check_device(there)
    there.device = torch.device("cuda", 0)
    checks.check_device(there)
    checked = []
    for module in (checks, grouped_mm, group):
        monkeypatch.setattr(module, "check_device", checked.append)
    routed_experts(x, *weights, chosen, scores)
    grouped_mm.grouped_mm(x.bfloat16(), weights[0].mT, torch.tensor([T] * E, dtype=torch.int32, device=DEVICE))
    feed_forward(x, ExpertWeights(*(w[0] for w in weights)), Fp8FlowMoEConfig())
    linear(x, weights[0][0], Fp8FlowMoEConfig())
    assert [tuple(t.shape) for t in checked] == [(T, D)] * 4


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


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("x", lambda x: x[1:], "x must be (T, D)"),
        ("x", torch.Tensor.half, "x must be bf16 or fp32"),
        ("scores", lambda s: s.repeat(1, 2), "topk_scores (T, K) fp32"),
        ("scores", torch.Tensor.half, "topk_scores (T, K) fp32 (torch.topk returns scores, then ids)"),
        ("chosen", lambda c: c[:, 0], "topk_ids (T, K)"),
        ("chosen", torch.Tensor.byte, "topk_ids (T, K) int32 or int64"),
        ("w1", lambda w: w[0], "w1 (E, H, D)"),
        ("w2", lambda w: w.to("meta"), "must be on one device"),
        ("w2", lambda w: w.transpose(1, 2), "w2 (E, D, H)"),
        ("w2", torch.Tensor.bfloat16, "all of one dtype"),
        ("w3", lambda w: w.repeat(1, 2, 1), "w1 and w3 must be (E, H, D)"),
        ("w3", lambda w: None, "w1 (E, 2H, D) with w3 None"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(name, change, message):
    """Kernels would take no notice of most of them."""
    x, scores, chosen, weights = make_layer()
    inputs = dict(x=x, w1=weights[0], w2=weights[1], w3=weights[2], chosen=chosen, scores=scores)
    inputs[name] = change(inputs[name])
    with pytest.raises(ValueError, match=re.escape(message)):
        routed_experts(*inputs.values())


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


def test_too_many_rows_are_refused(monkeypatch):
    x, scores, chosen, weights = make_layer()
    monkeypatch.setattr(dispatch.base, "MAX_ROWS", row_capacity(chosen.numel(), E) - 128)
    with pytest.raises(ValueError, match="900 rows for its 8 experts"):
        routed_experts(x, *weights, chosen, scores)
    with pytest.raises(ValueError, match="dispatches 2000 tokens"):
        dispatch.base.check_rows("a rank", 0, 128, E, num_sent=2000)


def test_a_wrong_activation_is_refused_where_it_is_named():
    with pytest.raises(ValueError, match="limit of activation 'clamped_swiglu' is -1"):
        RoutedExperts(2, 128, 128, activation="clamped_swiglu", activation_parameters={"limit": -1})
    x, scores, chosen, weights = make_layer()
    with pytest.raises(ValueError, match="activation is 'relu'; set it to one of"):
        routed_experts(x, *weights, chosen, scores, activation="relu")


def test_casts_of_a_conventional_flow_and_of_ours():
    """With a cast around each of three GEMMs rows of x and dy are cast six times. Their columns, which the weight
    gradients need, take six more where nobody transposes in FP8, as this stand-in does. Ours casts x and dout."""
    shapes = (2, 128, 256), (2, 256, 128), (2, 128, 256), (64, 256)
    w1, w2, w3, x = (torch.randn(s, device=DEVICE, dtype=torch.bfloat16).requires_grad_() for s in shapes)
    offs = torch.tensor([32, 64], dtype=torch.int32, device=DEVICE)
    with CastCounter() as conventional:
        gate, up = (grouped_mm.grouped_mm(x, w.transpose(1, 2), offs=offs) for w in (w1, w3))
        grouped_mm.grouped_mm(torch.nn.functional.silu(gate) * up, w2.transpose(1, 2), offs=offs).sum().backward()
    assert conventional.ops["quantize_rows"] == 6 and 2 * conventional.ops["transpose_pair"] == 6
    ids = torch.arange(64, device=DEVICE).unsqueeze(1) // 32
    with CastCounter() as ours:
        routed_experts(x, w1, w2, w3, ids, torch.ones(64, 1, device=DEVICE)).sum().backward()
    assert ours.ops["quantize_rows"] == 2 and not ours.stray_casts
