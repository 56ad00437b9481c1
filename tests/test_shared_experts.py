"""Shared experts in the FP8 data flow: gradients, casts, saved bytes, overlap, and which layers have them."""

import functools
import re

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torchtitan.models.moe.moe import FeedForward

from tests.layer import DEVICE, CastCounter, D, E, H, K, T, apply_layer, generations, make_layer, saved_bytes
from tests.specs import SETTINGS
from titan_fp8moe import RoutedExperts, SharedExperts, routed_experts
from titan_fp8moe.config import Fp8FlowMoEConfig
from titan_fp8moe.layer.operands import WeightCache
from titan_fp8moe.layer.weights import ExpertWeights
from titan_fp8moe.nn import modules
from titan_fp8moe.recipe import group_rows, row_capacity
from titan_fp8moe.torchtitan.converter import _SAVED_OPS
from titan_fp8moe.torchtitan.modules import why_not_fp8

SHARED_H = 256


def make_inputs(tokens=T, dtype=torch.float32):
    """x, scores, the experts' w1, w2, w3 and the shared experts', as leaves; and the chosen experts."""
    x, scores, ids, weights = make_layer(tokens, dtype=dtype)
    shared = [torch.randn(s, device=DEVICE) * 0.05 for s in ((SHARED_H, D), (D, SHARED_H), (SHARED_H, D))]
    return [t.requires_grad_() for t in (x, scores, *weights, *shared)], ids


def run(leaves, ids, config=None, **kwargs):
    weights, shared = ExpertWeights(*leaves[2:5]), ExpertWeights(*leaves[5:])
    return apply_layer(leaves[0], weights, ids, leaves[1], config=config or SETTINGS[1], shared=shared, **kwargs)


@pytest.mark.parametrize("scored", [False, True])
def test_two_casts_and_no_other_kernel(scored):
    """One quantization in the forward and one in the backward serve routed and shared experts. The shared output and
    input gradient have no addition of their own, nor has a product with scores."""
    leaves, ids = make_inputs()
    forward_of = functools.partial(run_scored, with_scores(leaves)) if scored else functools.partial(run, leaves)
    with CastCounter() as forward:
        out = forward_of(ids)
    with CastCounter() as backward:
        out.backward(torch.randn_like(out))
    assert not forward.stray_casts and not backward.stray_casts
    both = dict(quantize_group=1, permute_rows=1, quantize_weights=4, grouped_mm=4)
    assert forward.ops == both | dict(routed_experts_forward=1, expert_routing=1, swiglu_quantize=2, unpermute_sum=1)
    backward_only = dict(routed_experts_hidden_gradients=1, routed_experts_gradients=1)
    backward_only |= dict(swiglu_quantize_backward=2, transpose_pair=4, grouped_mm_wgrad=4, unpermute_gradients=1)
    assert backward.ops == both | backward_only


@pytest.mark.parametrize("config", SETTINGS, ids=str)
def test_saved_bytes(config):
    """Of the shared experts: h as the settings say, the rows' scales once more, column-major; x and its scales once;
    and 4 bytes per token if it has a score."""
    leaves, ids = make_inputs(dtype=torch.bfloat16)
    weights = {leaf.data_ptr() for leaf in leaves[2:]}

    def saved_by(forward):
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: t.data_ptr() in weights or saved.append(t.numel() * t.itemsize) or t, lambda t: t
        ):
            forward()
        return sum(saved)

    def fp8(width):
        return width + width // 128

    def ffn(width, rows):
        h = 0 if config.recompute == "experts" else fp8(2 * width) if config.save_h == "fp8" else 4 * width
        return rows * (h + (fp8(width) if config.recompute == "none" else 0))

    rows, group = row_capacity(T * K, E), group_rows(T)
    routing = rows * 8 + T * K * 4 + E * 4
    x = group * (fp8(D) + D // 128) + 4
    want = routing + x + ffn(H, rows) + ffn(SHARED_H, group)
    assert saved_by(lambda: run(leaves, ids, config)) == want
    assert saved_by(lambda: run_scored(with_scores(leaves), ids, config)) == want + 4 * group


def test_cached_weights():
    leaves, ids = make_inputs()
    caches = dict(cache=WeightCache(), shared_cache=WeightCache())
    want = torch.autograd.grad(run(leaves, ids).square().sum(), leaves)
    for _ in range(2):
        got = torch.autograd.grad(run(leaves, ids, **caches).square().sum(), leaves)
        assert [generations(cache) for cache in caches.values()] == [[1, 1], [1, 1]]
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a, b)
    with torch.no_grad():
        leaves[5].mul_(0.5)
        for _ in range(2):
            assert torch.equal(run(leaves, ids, **caches), run(leaves, ids))
    assert [generations(cache) for cache in caches.values()] == [[1, 1], [2, 1]], "the shared experts' w1 only"


def test_which_can_be_fp8():
    assert why_not_fp8(FeedForward(256, 512), 2) is None
    assert why_not_fp8(FeedForward(256, 512), 32) is None  # padded
    assert "hidden dim 512 / 64 none of 16" in why_not_fp8(FeedForward(256, 512), 64)
    assert "model dim 200" in why_not_fp8(FeedForward(200, 256), 1)
    other = FeedForward(256, 256)
    other.w2 = torch.nn.Linear(256, 256)
    assert why_not_fp8(other, 1) == "FeedForward of Linear, Linear, Linear"
    assert why_not_fp8(torch.nn.Identity(), 1) == "Identity of NoneType, NoneType, NoneType"


# --- times a score per token ------------------------------------------------------------------------------------------


def with_scores(leaves, tokens=T):
    """The leaves, and the shared experts' scores."""
    return [*leaves, torch.rand(tokens, device=DEVICE).requires_grad_()]


def run_scored(leaves, ids, config=None, **kwargs):
    return run(leaves[:-1], ids, config, shared_scores=leaves[-1], **kwargs)


def test_checkpointing_and_compile(group):
    """Per op it repeats nothing; whole, and as one graph, the bits are the same."""
    leaves, ids = make_inputs(64)
    leaves = with_scores(leaves, 64)
    contexts = functools.partial(create_selective_checkpoint_contexts, list(_SAVED_OPS))
    for ep_group in (None, group):
        layer = functools.partial(run_scored, ids=ids, ep_group=ep_group)
        want = torch.autograd.grad(layer(leaves).square().sum(), leaves)
        for options in (dict(context_fn=contexts), {}):
            out = checkpoint(lambda x, layer=layer: layer([x, *leaves[1:]]), leaves[0], use_reentrant=False, **options)
            with CastCounter() as counter:
                got = torch.autograd.grad(out.square().sum(), leaves)
            assert all(map(torch.equal, got, want))
            assert counter.ops["grouped_mm"] == 4 or not options
    compiled = torch.compile(lambda *leaves: run_scored(leaves, ids), backend="aot_eager", fullgraph=True)
    got = torch.autograd.grad(compiled(*leaves).square().sum(), leaves)
    want = torch.autograd.grad(run_scored(leaves, ids).square().sum(), leaves)
    assert all(map(torch.equal, got, want))


@pytest.mark.parametrize("recompute", ["none", "experts"])
@pytest.mark.parametrize("frozen", [(0,), (2, 3, 4), (5, 6, 7), tuple(range(2, 8)), tuple(range(8))])
def test_what_is_frozen_costs_neither_products_nor_rows(group, frozen, recompute):
    """Of the routed or the shared experts, with and without a dispatch that travels; other gradients stay. Without a
    dispatch both read the same rows: they go if nobody trains."""
    leaves, ids = make_inputs(64)
    leaves, config = with_scores(leaves, 64), Fp8FlowMoEConfig(recompute=recompute)
    flags = dict(frozen={2, 3, 4} <= set(frozen), shared_frozen={5, 6, 7} <= set(frozen))
    for ep_group in (None, group):
        forward = functools.partial(run_scored, ids=ids, config=config, ep_group=ep_group)
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


def test_scores_of_shared_experts_stay_fp32_under_fsdp(group, monkeypatch):
    seen = []
    monkeypatch.setattr(modules, "run_layer", lambda x, *args: seen.append(args[3]) or x)
    experts = RoutedExperts(2, 128, 128, device=DEVICE)
    fully_shard(experts, mesh=init_device_mesh("cpu", (1,)), mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    x, scores = torch.randn(4, 128), torch.rand(4, 1)
    experts(x, torch.zeros(4, 1).long(), scores, shared=SharedExperts(x, x, x, scores[:, 0]))
    (shared,) = seen
    assert shared.w1.dtype == torch.bfloat16 and torch.equal(shared.scores, scores[:, 0])


@pytest.mark.parametrize(("change", "message"), [
    (dict(w2=torch.zeros(256, 128)), "w2 (256, H)"),
    (dict(w3=None, w1=torch.zeros(320, 256), w2=torch.zeros(256, 160)), "w1 (2H, 256) with w3 None"),
    (dict(w1=torch.zeros(256, 256).half()), "all bf16 or all fp32"),
    (dict(scores=torch.zeros(T, 1)), "scores (300,) fp32 or None"),
    (dict(scores=torch.zeros(T).bfloat16()), "scores (300,) torch.bfloat16"),
])  # fmt: skip
def test_shared_experts_that_do_not_fit(change, message):
    (x, scores, *weights), ids = make_inputs()
    change = {name: value if value is None else value.to(DEVICE) for name, value in change.items()}
    shared = SharedExperts(*weights[3:])
    with pytest.raises(ValueError, match=re.escape(message)):
        routed_experts(x, *weights[:3], ids, scores, shared=shared._replace(**change))
    interleaved = torch.stack(weights[:3:2], 2).flatten(1, 2)
    fused = SharedExperts(torch.cat(weights[3::2]), weights[4])
    with pytest.raises(ValueError, match="w1 and w3 .H, 256., H a multiple of 16, and w2"):
        routed_experts(x, interleaved, weights[1], None, ids, scores, interleaved=True, shared=fused)
    with pytest.raises(ValueError, match="with w3 None, as 'relu2' has no gate"):
        routed_experts(x, *weights[:2], None, ids, scores, activation="relu2", shared=shared)
