"""What a layer casts, multiplies, saves, allocates and frees: routed experts alone and beside shared ones."""

import contextlib
import functools

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from tests.layer import DEVICE, Allocated, CastCounter, D, Lifetimes, T, apply_layer, make_layer, saved_bytes
from tests.offline_compile import matrices, meta
from tests.specs import SETTINGS
from titan_fp8moe import SAVED_OPS, Fp8FlowMoEConfig
from titan_fp8moe.layer.group import feed_forward
from titan_fp8moe.layer.run import Experts, run_layer
from titan_fp8moe.layer.weights import ExpertWeights
from titan_fp8moe.spec import ExpertSpec

SHARED_H = 256


def make_inputs(tokens=T, scored=False):
    """x, scores, the experts' w1, w2, w3, the shared experts', and any scores of these, as leaves; and the chosen
    experts. Scores and choices are column-major."""
    x, scores, ids, weights = make_layer(tokens)
    scores, ids = (t.t().contiguous().t() for t in (scores, ids))
    shared = [torch.randn(s, device=DEVICE) * 0.05 for s in ((SHARED_H, D), (D, SHARED_H), (SHARED_H, D))]
    more = [torch.rand(tokens, device=DEVICE)] if scored else []
    return [t.requires_grad_() for t in (x, scores, *weights, *shared, *more)], ids


def run(leaves, ids, config=SETTINGS[1], **kwargs):
    x, scores, *rest = leaves
    if len(leaves) > 5:
        kwargs |= dict(shared=ExpertWeights(*rest[3:6]), shared_scores=rest[6] if len(rest) > 6 else None)
    return apply_layer(x, ExpertWeights(*rest[:3]), ids, scores, config=config, **kwargs)


@pytest.mark.parametrize("recompute", ["none", "activation", "experts"])
@pytest.mark.parametrize("kind", ["alone", "shared", "scored"])
def test_two_casts_and_no_other_kernel(kind, recompute):
    """One quantization in the forward, one in the backward, and no other way into fp8 but the fused functions, inside
    of which the reference casts on a CPU. Shared experts share both, and add no sum of outputs or gradients."""
    leaves, ids = make_inputs(scored=kind == "scored")
    leaves, both = leaves[: 5 if kind == "alone" else None], 2 - (kind == "alone")
    with CastCounter() as forward:
        out = run(leaves, ids, Fp8FlowMoEConfig(recompute=recompute))
    with CastCounter() as backward:
        out.backward(torch.randn_like(out))
    assert not forward.stray_casts and not backward.stray_casts
    routing = [t for t in forward.args["routed_experts_forward"] if isinstance(t, Tensor) and t.shape == ids.shape]
    assert len(routing) == 2 and all(t.is_contiguous() for t in routing)  # kernels read a row of choices at once
    once = {"quantize_rows" if kind == "alone" else "quantize_group": 1, "permute_rows": 1}
    again = int(recompute == "experts")
    assert forward.ops == once | dict(
        routed_experts_forward=1, expert_routing=1, quantize_weights=2 * both, grouped_mm=2 * both,
        swiglu_quantize=both, unpermute_sum=1,
    )  # fmt: skip
    assert backward.ops == once | dict(
        routed_experts_hidden_gradients=1, routed_experts_gradients=1, permute_rows=1 + again,
        grouped_mm=(2 + again) * both, quantize_weights=(2 + again) * both, swiglu_quantize_backward=both,
        transpose_pair=2 * both, grouped_mm_wgrad=2 * both, unpermute_gradients=1,
    )  # fmt: skip
    assert backward.args["swiglu_quantize_backward"][6] == (recompute != "none")  # a kept operand is not made again


@pytest.mark.parametrize("recompute", ["none", "experts"])
@pytest.mark.parametrize(
    "frozen", [(0,), (1,), (0, 1), (2, 3, 4), (5, 6, 7), tuple(range(2, 8)), tuple(range(8))], ids=str
)
def test_what_is_frozen_costs_neither_products_nor_rows(group, frozen, recompute):
    """Of the routed or the shared experts, with and without a dispatch that travels; other gradients stay. Without a
    dispatch both read the same rows: they go if nobody trains."""
    leaves, ids = make_inputs(64, scored=True)
    config = Fp8FlowMoEConfig(recompute=recompute)
    flags = dict(frozen={2, 3, 4} <= set(frozen), shared_frozen={5, 6, 7} <= set(frozen))
    for ep_group in (None, group):
        forward = functools.partial(run, ids=ids, config=config, ep_group=ep_group)
        out, trained = saved_bytes(functools.partial(forward, leaves))
        want = torch.autograd.grad(out.square().sum(), leaves)
        some = [leaf.detach().requires_grad_(i not in frozen) for i, leaf in enumerate(leaves)]
        for options in (flags, {}):
            out, kept = saved_bytes(functools.partial(forward, some, **options))
            assert (kept < trained) == (recompute == "none" and any(options.values()))
            with CastCounter() as backward:
                got = torch.autograd.grad(out.square().sum(), [leaf for leaf in some if leaf.requires_grad])
            assert all(map(torch.equal, got, [grad for i, grad in enumerate(want) if i not in frozen]))
            assert backward.ops["grouped_mm_wgrad"] == 4 - 2 * sum(flags.values())
            needed = 4 if 0 not in frozen else 3 if 1 not in frozen and ep_group else 2
            assert backward.ops["grouped_mm"] == needed + 2 * (recompute == "experts")
            assert ep_group or backward.ops["unpermute_gradients"] == (0 not in frozen)


@pytest.mark.parametrize("how", ["eagerly", "compiled", "checkpointed", "checkpointed by op", "offloaded"])
@pytest.mark.parametrize("kind", ["experts", "fp8 h", "recomputed", "shared", "travelling", "ffn"])
def test_what_is_read_last_is_freed_before_the_larger_weight_gradients(monkeypatch, group, kind, how):
    """h and dx. A saved h is there while w2's gradient is made, and in a plain eager step until the layer's backward
    ends."""
    leaves, ids = make_inputs(64)
    leaves, shared = leaves if kind in ("shared", "travelling") else leaves[:5], kind in ("shared", "travelling")
    config = Fp8FlowMoEConfig(
        recompute="experts" if kind == "recomputed" else "activation",
        save_h="fp8" if kind == "fp8 h" else "bf16",
        dispatch="symmetric" if kind == "travelling" else "auto",
    )
    lifetimes = Lifetimes(monkeypatch, ["grouped_mm_wgrad"])
    lifetimes.watch("swiglu_quantize_backward", 1)
    lifetimes.watch("unpermute_gradients", 0)

    def layer(x):
        if kind == "ffn":
            return feed_forward(x, ExpertWeights(*(w[0] for w in leaves[2:5])), config)
        return run([x, *leaves[1:]], ids, config, ep_group=group if kind == "travelling" else None)

    by_op = dict(context_fn=functools.partial(create_selective_checkpoint_contexts, list(SAVED_OPS)))
    step, hooks = layer, contextlib.nullcontext()
    if how == "compiled":
        torch._dynamo.reset()
        step = torch.compile(layer, backend="aot_eager")
    elif "checkpointed" in how:
        step = functools.partial(checkpoint, layer, use_reentrant=False, **by_op if "by op" in how else {})
    elif how == "offloaded":
        hooks = torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone)
    with hooks:
        step(leaves[0]).sum().backward()
    alive, saved = [[any(refs) for refs in call] for call in lifetimes.calls], kind != "recomputed"
    of_w2, of_w13 = [saved, False], [how == "eagerly" and saved, False]
    assert alive == [of_w2] * (1 + shared) + [of_w13] * (1 + shared)


# --- allocations ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("form", "interleaved"), [
    ("apart", False), ("fused", False), ("fused", True), ("turned", False), ("turned", True),
])  # fmt: skip
@pytest.mark.parametrize(("D", "H"), [(64, 16), (192, 80), (320, 144)])  # gpt-oss's 2880 is 64 modulo 128
def test_no_temporary_of_a_parameters_size(D, H, form, interleaved):
    """Beside the gradients there are quantized weights only, and autograd takes the gradients without a copy. Kernels
    are not run."""
    experts, tokens = 256, 2
    leaves = matrices(experts, H, D, form=form)
    ids, scores = meta(tokens, 1, dtype=torch.int64), meta(tokens, 1, dtype=torch.float32).detach()
    expert = ExpertSpec.of("clamped_swiglu", dict(limit=3.0, alpha=1.702, offset=1.0))
    expert = expert._replace(interleaved=interleaved)
    with Allocated() as mode:
        out = run_layer(meta(tokens, D).detach(), ids, scores, Experts(leaves, Fp8FlowMoEConfig(), expert=expert))
        out.backward(meta(tokens, D))
    assert "wgrad_hopper_kernel" in mode.kernels
    assert all(w.grad.stride() == w.stride() for w in leaves if w is not None)
    large = [made for made in mode.made if made[1] >= experts * D * H and made[2] in (torch.bfloat16, torch.float32)]
    # Gate's and up's gradients are one tensor.
    assert large == [("empty", n * experts * D * H, torch.bfloat16) for n in (1, 2)]
