"""The whole layer: gradients, casts, saved bytes, and what happens to numbers at the edges."""

import functools
import itertools
import subprocess
import sys
import types
import weakref

import pytest
import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from tests.layer import DEVICE, CastCounter, D, E, H, K, T, apply_layer, make_layer, run
from tests.specs import SPECS
from titan_fp8moe import RoutedExperts, dispatch, ops, routed_experts
from titan_fp8moe.activations import ACTIVATIONS
from titan_fp8moe.config import Fp8FlowMoEConfig
from titan_fp8moe.layer import checks, experts, group
from titan_fp8moe.layer.group import feed_forward, linear
from titan_fp8moe.layer.weights import ExpertWeights
from titan_fp8moe.nn import grouped_mm
from titan_fp8moe.ops import backend
from titan_fp8moe.recipe import TRANSPOSE_MODES, row_capacity
from titan_fp8moe.testing import moe_layer, relative_error
from titan_fp8moe.torchtitan.converter import _SAVED_OPS

ALL_MODES = [
    Fp8FlowMoEConfig(wgrad=wgrad, save_h=save_h, recompute=recompute)
    for wgrad, save_h, recompute in itertools.product(
        ("balanced", "scaling_aware", "bf16"), ("bf16", "fp8"), ("none", "activation", "experts")
    )
]


@pytest.mark.parametrize("score_before", [False, True])
def test_gradients_against_fp64_layer(score_before):
    x, scores, chosen, weights = make_layer()
    dout = torch.randn(T, D, device=DEVICE)
    leaves = [t.double().requires_grad_() for t in (x, scores, *weights)]
    reference = moe_layer(leaves[0], leaves[1], chosen, *leaves[2:], score_before)
    reference.backward(dout.double())
    expected = [reference.detach(), *[leaf.grad for leaf in leaves]]
    for config in ALL_MODES:
        # Three quantized operands at 2.6% each, a fourth when h is kept in fp8. Of the scores there are so few that the
        # error of their gradient varies: standard deviation 0.003, of the others at most 0.0006.
        limit = 0.09 if config.save_h == "fp8" else 0.075
        result = run(x, scores, chosen, weights, dout, config, score_before)
        errors = [relative_error(a, b) for a, b in zip(result, expected, strict=True)]
        score_error = errors.pop(2)
        assert score_error < limit + 0.01, (config, score_error)
        assert max(errors) < limit, (config, errors)
        assert min(errors) > 0.01, "nothing was quantized"


def test_recompute_modes_agree():
    """With h in bf16, what is recomputed instead of kept is the same numbers."""
    x, scores, chosen, weights = make_layer()
    dout = torch.randn(T, D, device=DEVICE)
    kept, *others = [
        run(x, scores, chosen, weights, dout, Fp8FlowMoEConfig(recompute=mode))
        for mode in ("none", "activation", "experts")
    ]
    for other in others:
        for a, b in zip(kept, other, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("recompute", ["none", "activation", "experts"])
def test_what_is_kept_is_not_recomputed(recompute, monkeypatch):
    """GEMM 2's operand; GEMM 1 is counted in test_two_explicit_casts."""
    op, recomputed = ops.swiglu_quantize_backward, []

    def record(*args, recompute_a, **options):
        recomputed.append(recompute_a)
        return op(*args, recompute_a=recompute_a, **options)

    monkeypatch.setattr(ops, "swiglu_quantize_backward", record)
    x, scores, chosen, weights = make_layer()
    run(x, scores, chosen, weights, torch.randn_like(x), Fp8FlowMoEConfig(recompute=recompute))
    assert recomputed == [recompute != "none"]


@pytest.mark.parametrize("recompute", ["none", "activation", "experts"])
def test_two_explicit_casts(recompute):
    """One standalone quantization in the forward, one in the backward, and no other way into fp8 but the fused ops.

    Counted from what the dispatcher sees of the layer. (Inside an op on a CPU the reference casts, of course: below the
    dispatcher's view here, and one fused kernel on a GPU.)
    """
    x, scores, chosen, weights = make_layer()
    leaves = [t.requires_grad_() for t in (x, scores, *weights)]
    with CastCounter() as forward:
        out = routed_experts(x, *weights, chosen, leaves[1], config=Fp8FlowMoEConfig(recompute=recompute))
    with CastCounter() as backward:
        out.backward(torch.randn_like(out))
    assert forward.ops["quantize_rows"] == 1 and backward.ops["quantize_rows"] == 1
    assert not forward.stray_casts and not backward.stray_casts
    assert forward.ops == {
        "quantize_rows": 1,
        "expert_routing": 1,
        "permute_rows": 1,
        "quantize_weight": 2,
        "grouped_mm": 2,
        "swiglu_quantize": 1,
        "unpermute_sum": 1,
    }
    assert backward.ops == {
        "quantize_rows": 1,
        "permute_rows": 2 if recompute == "experts" else 1,
        "quantize_weight": 2,
        "grouped_mm": 3 if recompute == "experts" else 2,
        "swiglu_quantize_backward": 1,
        "transpose_pair": 2,
        "grouped_mm_wgrad": 2,
        "unpermute_gradients": 1,
    }


def test_checkpointing_by_op_keeps_the_experts():
    """Of a block checkpointed by op, the recomputation takes the routed experts' results as they are."""
    x, scores, chosen, weights = make_layer()
    leaves = [t.requires_grad_() for t in (x, scores, *weights)]

    def block(x):
        return routed_experts(x * 1.0, *weights, chosen, leaves[1]) * 2.0

    def gradients(run):
        out = run(x)
        with CastCounter() as counter:
            return torch.autograd.grad(out.square().sum(), leaves), counter.ops

    contexts = functools.partial(create_selective_checkpoint_contexts, list(_SAVED_OPS))
    got, got_ops = gradients(functools.partial(checkpoint, block, use_reentrant=False, context_fn=contexts))
    want, want_ops = gradients(block)
    assert got_ops == want_ops
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("save_h", ["bf16", "fp8"])
@pytest.mark.parametrize("recompute", ["none", "activation", "experts"])
def test_saved_bytes(save_h, recompute):
    """Saved for backward: x in fp8, once per token, what save_h and recompute say, and the layout; nothing else beside
    parameters."""
    x, scores, chosen, weights = make_layer(dtype=torch.bfloat16)
    leaves = [t.requires_grad_() for t in (x, scores, *weights)]
    saved = []

    def pack(t):
        if not any(t is leaf or t.data_ptr() == leaf.data_ptr() for leaf in leaves[2:]):
            saved.append(t.numel() * t.itemsize)
        return t

    config = Fp8FlowMoEConfig(save_h=save_h, recompute=recompute)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = routed_experts(x, *weights, chosen, leaves[1], config=config)

    def fp8(width):
        return width + width // 128

    h = 0 if recompute == "experts" else 2 * 2 * H if save_h == "bf16" else fp8(2 * H)
    operand = fp8(H) if recompute == "none" else 0
    index = 4 + 4  # token and score of each row
    rows, pairs = row_capacity(T * K, E), T * K
    # Of each pair its row.
    assert sum(saved) == T * fp8(D) + rows * (h + operand + index) + pairs * 4 + E * 4
    out.sum().backward()


@pytest.mark.parametrize("power", [-40, -7, 12])
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


def test_pairs_without_an_expert_have_no_score_gradient():
    """Also where x is frozen, so that no rows are summed."""
    x, scores, chosen, weights = make_layer()
    chosen[::3, 1] = -1
    grads = []
    for trained in (True, False):
        leaves = [x.clone().requires_grad_(trained), scores.clone().requires_grad_()]
        routed_experts(leaves[0], *weights, chosen, leaves[1]).square().sum().backward()
        grads.append(leaves[1].grad)
    assert torch.equal(*grads) and (grads[1][::3, 1] == 0).all() and grads[1].any()


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


def test_every_expert_weight_moves():
    x, scores, chosen, weights = make_layer()
    weights = [w.requires_grad_() for w in weights]
    before = [w.detach().clone() for w in weights]
    optimizer = torch.optim.AdamW(weights, lr=1e-3, weight_decay=0)  # which moves all of them
    routed_experts(x, *weights, chosen, scores).square().sum().backward()
    optimizer.step()
    for w, old in zip(weights, before, strict=True):
        # A gradient may be exactly zero.
        assert (w != old).double().mean((1, 2)).min() > 0.999


@pytest.mark.parametrize("save_h", ["bf16", "fp8"])
@pytest.mark.parametrize("recompute", ["none", "activation", "experts"])
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


def test_nan_token_shows_in_its_own_output_only():
    x, scores, chosen, weights = make_layer()
    x[7, 5] = float("nan")
    out = routed_experts(x, *weights, chosen, scores)
    assert out[7].isnan().all()
    assert out[torch.arange(T, device=DEVICE) != 7].isfinite().all()


@pytest.mark.parametrize("kind", ["no_tokens", "one_token", "one_expert", "more_experts_than_tokens", "129_rows"])
def test_extreme_routing(kind):
    tokens, experts = {"no_tokens": (0, E), "one_token": (1, E), "more_experts_than_tokens": (5, 64)}.get(
        kind, (129, E)
    )
    # One token's score gradient is three numbers, which may all be near zero: errors are of several draws together.
    # Theirs still vary, standard deviation 0.011 around 0.067 with one token, 0.006 with one expert; of the other
    # gradients at most 0.0024.
    results, references = [], []
    for _ in range({1: 16, 5: 4}.get(tokens, 1)):
        x, scores, chosen, weights = make_layer(tokens, experts)
        if kind == "one_expert":
            chosen = torch.full_like(chosen, E - 1)
        dout = torch.randn_like(x)
        results.append(run(x, scores, chosen, weights, dout, Fp8FlowMoEConfig()))
        leaves = [t.double().requires_grad_() for t in (x, scores, *weights)]
        reference = moe_layer(leaves[0], leaves[1], chosen, *leaves[2:], False)
        reference.backward(dout.double())
        references.append([reference.detach(), *[leaf.grad for leaf in leaves]])
        unused = [e for e in range(experts) if not (chosen == e).any()]
        assert all(bool((grad[unused] == 0).all()) for grad in results[-1][3:])
    for i, (draws, expected) in enumerate(zip(zip(*results, strict=True), zip(*references, strict=True), strict=True)):
        a, b = torch.stack(draws), torch.stack(expected)
        assert a.shape == b.shape
        if tokens:
            assert relative_error(a, b) < (0.15 if i == 2 else 0.09)


def test_second_derivatives_are_refused():
    """Where the incoming gradient is a constant, too."""
    x, scores, chosen, weights = make_layer()
    leaves = [t.requires_grad_() for t in (x, scores, *weights)]
    for loss in (torch.sum, torch.linalg.norm):
        for leaf in leaves:
            with pytest.raises(RuntimeError, match="no second derivative.*create_graph=True"):
                torch.autograd.grad(loss(routed_experts(x, *weights, chosen, scores)), leaf, create_graph=True)
    dense = ExpertWeights(*(w[0] for w in weights))
    for out in (feed_forward(x, dense, Fp8FlowMoEConfig()), linear(x, dense.w1, Fp8FlowMoEConfig())):
        with pytest.raises(RuntimeError, match="no second derivative"):
            torch.autograd.grad(out.sum(), x, create_graph=True)


@pytest.mark.skipif(torch.__version__ < "2.12", reason="graphs of PyTorch 2.11 treat these gradients as constants")
def test_compiled_second_derivatives_are_refused():
    x, scores, chosen, weights = make_layer()
    x.requires_grad_()
    compiled = torch.compile(lambda x: routed_experts(x, *weights, chosen, scores), backend="aot_eager", fullgraph=True)
    (dx,) = torch.autograd.grad(compiled(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        dx.sum().backward()


def test_tiny_gradients_survive():
    """A gradient of 1e-10 per element is far below e4m3's own range, and none of it is lost."""
    x, scores, chosen, weights = make_layer()
    dout = torch.randn(T, D, device=DEVICE) * 1e-10
    result = run(x, scores, chosen, weights, dout, Fp8FlowMoEConfig())
    leaves = [t.double().requires_grad_() for t in (x, scores, *weights)]
    moe_layer(leaves[0], leaves[1], chosen, *leaves[2:], False).backward(dout.double())
    for grad, leaf in zip(result[1:], leaves, strict=True):
        assert relative_error(grad, leaf.grad) < 0.08


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


@pytest.mark.parametrize("recompute", ["activation", "experts"])
def test_fused_gate_and_up(recompute, monkeypatch):
    """One weight (E, 2H, D) gives the same numbers as its halves, and is not copied in either direction."""
    x, scores, chosen, (w1, w2, w3) = make_layer()
    dout, config = torch.randn_like(x), Fp8FlowMoEConfig(recompute=recompute)
    want = run(x, scores, chosen, (w1, w2, w3), dout, config)
    leaves = [t.clone().requires_grad_() for t in (x, scores, torch.cat([w1, w3], 1), w2)]
    quantize, read = ops.quantize._quantize_weight, []
    monkeypatch.setattr(ops.quantize, "_quantize_weight", lambda w, *args: read.extend(w) or quantize(w, *args))
    with CastCounter() as counter:
        out = routed_experts(leaves[0], *leaves[2:], None, chosen, leaves[1], config=config)
    out.backward(dout)
    assert {t.data_ptr() for t in read} == {leaf.data_ptr() for leaf in leaves[2:]}
    assert leaves[2].grad.is_contiguous() and counter.ops["quantize_weight"] == 2
    got = [out, leaves[0].grad, leaves[1].grad, leaves[2].grad[:, :H], leaves[3].grad, leaves[2].grad[:, H:]]
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


def test_bf16_scores_warn_once():
    x, scores, chosen, weights = make_layer()
    compiled = torch.compile(routed_experts, backend="aot_eager", fullgraph=True)
    module = RoutedExperts(E, D, H, device=DEVICE)
    for layer in (routed_experts, compiled, lambda x, w1, w2, w3, *pairs: module(x, *pairs)):
        experts._warn_once.cache_clear()
        with pytest.warns(UserWarning, match="compute them in fp32.*in the module that calls titan_fp8moe") as caught:
            got = [layer(x, *weights, chosen, scores.bfloat16()) for _ in range(2)]
        assert len(caught) == 1
    got = [routed_experts(x, *weights, chosen, scores.bfloat16())]
    assert torch.equal(got[0], routed_experts(x, *weights, chosen, scores.bfloat16().float()))


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
    with pytest.raises(
        ValueError, match="x is on cuda:1, but kernels run on the current device, 0; call torch.cuda.set_"
    ):
        backend.check_caller(there)
    there.device = torch.device("cuda", 0)
    backend.check_caller(there)
    checked = []
    for module in (checks, grouped_mm, group):
        monkeypatch.setattr(module, "check_caller", checked.append)
    routed_experts(x, *weights, chosen, scores)
    grouped_mm.grouped_mm(x.bfloat16(), weights[0].mT, torch.tensor([T] * E, dtype=torch.int32, device=DEVICE))
    feed_forward(x, ExpertWeights(*(w[0] for w in weights)), Fp8FlowMoEConfig())
    linear(x, weights[0][0], Fp8FlowMoEConfig())
    assert [tuple(t.shape) for t in checked] == [(T, D)] * 4


def test_meanwhile_is_added():
    x, scores, chosen, weights = make_layer()
    shared = torch.randn(D, D, device=DEVICE, requires_grad=True)
    want = routed_experts(x, *weights, chosen, scores) + x @ shared
    got = routed_experts(x, *weights, chosen, scores, meanwhile=lambda: x @ shared)
    assert torch.equal(got, want)
    got.sum().backward()
    assert shared.grad.any()


def test_compiles_without_a_graph_break():
    x, scores, chosen, weights = make_layer()
    params = [torch.nn.Parameter(w) for w in weights]

    def step(x, scores, chosen, w1, w2, w3):
        return routed_experts(x, w1, w2, w3, chosen, scores)

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    out = compiled(x, scores, chosen, *params)
    out.sum().backward()
    grads = [p.grad.clone() for p in params]
    for p in params:
        p.grad = None
    expected = step(x, scores, chosen, *params)
    expected.sum().backward()
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    for p, g in zip(params, grads, strict=True):
        torch.testing.assert_close(g, p.grad, rtol=0, atol=0)


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


def test_dims_that_do_not_fit_are_refused():
    x, scores, chosen, weights = make_layer()
    w1, w2, w3 = weights
    with pytest.raises(ValueError, match="D and H must be multiples of 16.*got D 200 and H 128"):
        routed_experts(x[:, :200], w1[..., :200], w2[:, :200], w3[..., :200], chosen, scores)
    with pytest.raises(ValueError, match="got D 256 and H 60"):  # gate and up in one
        routed_experts(x, w1[:, :120], w2[..., :60], None, chosen, scores)
    with pytest.raises(ValueError, match="got D 256 and H 120"):
        routed_experts(x, w1[:, :120], w2[..., :120], w3[:, :120], chosen, scores)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(x=slice(1, None)), r"x must be \(T, D\).*got \(299, 256\), \(300, 3\), \(300, 3\)"),
        (dict(scores=lambda s: s.repeat(1, 2)), r"topk_ids and topk_scores \(T, K\).*\(300, 3\), \(300, 6\)"),
        (dict(x=torch.Tensor.half), r"x must be bf16 or fp32, got torch.float16"),
        (dict(chosen=lambda c: c[:, 0]), r"topk_ids and topk_scores \(T, K\).*\(300,\), \(300, 3\)"),
        (dict(w1=lambda w: w[0]), r"w1 \(E, H, D\).*and \(128, 256\)"),
        (dict(w2=lambda w: w.to("meta")), r"must be on one device, got .*meta"),
        (dict(scores=torch.Tensor.half), r"topk_scores must be fp32, got torch.float16"),
        (dict(chosen=torch.Tensor.byte), r"topk_ids must be int32 or int64, got torch.uint8"),
        (dict(w3=lambda w: w.repeat(1, 2, 1)), r"w1 and w3 must be \(E, H, D\).*\(8, 256, 256\)"),
        (dict(w2=lambda w: w.transpose(1, 2)), r"w2 \(E, D, H\).*\(8, 128, 256\)"),
        (dict(w2=torch.Tensor.bfloat16), r"all of one dtype.*torch.bfloat16"),
        (dict(w3=lambda w: None), r"or w1 \(E, 2H, D\) with w3 None.*\(8, 256, 128\) torch.float32, None"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(change, message):
    """Kernels would take no notice of most of them."""
    x, scores, chosen, weights = make_layer()
    inputs = dict(x=x, scores=scores, chosen=chosen, w1=weights[0], w2=weights[1], w3=weights[2])
    ((name, how),) = change.items()
    inputs[name] = inputs[name][how] if isinstance(how, slice) else how(inputs[name])
    with pytest.raises(ValueError, match=message):
        routed_experts(*(inputs[name] for name in ("x", "w1", "w2", "w3", "chosen", "scores")))


@pytest.mark.skipif(DEVICE == "cuda", reason="nothing waits for the GPU to see that all ids are 0")
def test_swapped_ids_and_scores_are_refused():
    """As torch.topk returns them, and with the conversions that get past the dtypes."""
    x, _, _, weights = make_layer()
    scores, ids = torch.rand(T, E).topk(K)
    for args in ((scores, ids), (scores, ids.float()), (scores.long(), ids.float()), (ids, ids)):
        with pytest.raises(ValueError, match=r"ids and topk_scores seem swapped.*experts take \(ids, scores\)"):
            routed_experts(x, *weights, *args)
    zeros, one = torch.zeros_like(ids), [w[:1] for w in weights]
    for scores in (torch.ones(T, K), torch.zeros(T, K), torch.full((T, K), 2.5), torch.full((T, K), float(E))):
        routed_experts(x, *weights, zeros, scores)
    routed_experts(x, *one, zeros, torch.full((T, K), 2.0))
    routed_experts(x[:0], *weights, zeros[:0], scores[:0])


@pytest.mark.parametrize("wrong", [E, E + 1, -2, 2**31 - 1, 2**31, 2**40, -(2**31)])
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
        with pytest.raises(ValueError, match=rf"topk_ids has \[{wrong}\].*experts of all ranks are 0 to 7"):
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
    with pytest.raises(ValueError, match="900 rows for its 8 experts.*fewer tokens"):
        routed_experts(x, *weights, chosen, scores)
    with pytest.raises(ValueError, match="dispatches 2000 tokens"):
        dispatch.base.check_rows("a rank", 0, 128, E, num_sent=2000)


@pytest.mark.parametrize(
    "wrong",
    [
        {"wgrad": "fp8"},
        {"save_h": "fp32"},
        {"recompute": "all"},
        {"filter_fqns": "a"},
    ],
)
def test_config_rejects(wrong):
    (name,) = wrong
    with pytest.raises(ValueError, match=f"fp8_flow_moe.{name} is .*; set it to"):
        Fp8FlowMoEConfig(**wrong)


@pytest.mark.parametrize("spec", [s for s in SPECS if not s.score_before_experts], ids=lambda spec: spec.activation)
@pytest.mark.parametrize("save_h", ["bf16", "fp8"])
def test_activations(spec, save_h):
    """Of the function and the module, forward and backward, against the entry's own forward in fp32."""
    x, scores, chosen, weights = make_layer()
    weights = [w * 0.7 for w in weights]  # h of 1.6, so that clamps are reached
    entry, dout = ACTIVATIONS[spec.activation], torch.randn_like(x)
    parameters = dict(zip(entry.parameters, spec.parameters, strict=True))
    config = Fp8FlowMoEConfig(save_h=save_h)

    weights = weights[: 1 + spec.rows_per_unit]

    def reference(x, scores, w1, w2, w3=None):
        one_hot = torch.nn.functional.one_hot(chosen, E).to(x) * scores.unsqueeze(2)
        h = (None if w is None else torch.einsum("td,nhd->tnh", x, w) for w in (w1, w3))
        return torch.einsum("tnh,ndh,tn->td", entry.forward(*h, *spec.parameters), w2, one_hot.sum(1))

    def ours(x, scores, w1, w2, w3=None):
        options = dict(config=config, activation=spec.activation, activation_parameters=parameters)
        return routed_experts(x, w1, w2, w3, chosen, scores, **options)

    results = []
    for layer in (reference, ours):
        leaves = [t.detach().clone().requires_grad_() for t in (x, scores, *weights)]
        out = layer(*leaves)
        results.append([out.detach(), *torch.autograd.grad(out, leaves, dout)])
    # FP8 noise moves some h across a clamp, which has another slope there.
    bound = 0.1 if entry.beyond is None else 0.2
    assert all(relative_error(got, want) < bound for want, got in zip(*results, strict=True))
    module = RoutedExperts(
        E, D, H, config=config, activation=spec.activation, activation_parameters=parameters, device=DEVICE
    )
    for param, w in zip(module.parameters(), weights, strict=True):
        param.data.copy_(w)
    assert torch.equal(module(x, chosen, scores), results[1][0])


def test_a_wrong_activation_is_refused_where_it_is_named():
    with pytest.raises(ValueError, match="limit of activation 'clamped_swiglu' is -1; set it to a positive number"):
        RoutedExperts(2, 128, 128, activation="clamped_swiglu", activation_parameters={"limit": -1})
    x, scores, chosen, weights = make_layer()
    with pytest.raises(ValueError, match="activation is 'relu'; set it to one of 'swiglu'"):
        routed_experts(x, *weights, chosen, scores, activation="relu")
