"""Experts as models of 2026 have them, such as with biases: against the same experts in float64."""

import itertools
import re

import pytest
import torch
from torch import Tensor

from experiments.reference import make_layer, relative_error
from tests.layer import DEVICE, gradients
from titan_fp8moe import Fp8FlowMoEConfig, Fp8Weight, RoutedExperts, routed_experts
from titan_fp8moe.layer import statistics
from titan_fp8moe.layer.weights import Biases
from titan_fp8moe.spec import ExpertSpec

T, D, H, E, K = 300, 256, 128, 8, 3
# Few values reach the limit: one that FP8 moves across it has another gradient.
GPT_OSS = dict(activation="clamped_swiglu", activation_parameters=dict(limit=3.0, alpha=1.702, offset=1.0))
CONFIGS = [
    Fp8FlowMoEConfig(wgrad=wgrad, save_h=save_h, recompute=recompute)
    for wgrad, save_h, recompute in itertools.product(
        ("balanced", "bf16"), ("bf16", "fp8"), ("none", "activation", "experts")
    )
]
NAMES = "out", "x", "scores", "w1", "w2", "w3", "b1", "b2", "b3"


def make_biases(experts: int = E, dim: int = D, hidden: int = H) -> list[Tensor]:
    return [torch.randn(experts, n, device=DEVICE) * 0.5 for n in (hidden, dim, hidden)]


def run(x, scores, ids, weights, biases, dout, before: bool = False, **options) -> list[Tensor]:
    """Output and gradients, named by NAMES."""

    def layer(x, scores, w1, w2, w3, *biases):
        bias = dict(zip(("b1", "b2", "b3"), biases, strict=False))
        return routed_experts(x, w1, w2, w3, ids, scores, score_before_experts=before, **bias, **GPT_OSS, **options)

    return gradients(layer, (x, scores, *weights, *biases), dout)


# --- biases -----------------------------------------------------------------------------------------------------------


def test_biases_of_gate_and_up_have_equal_strides():
    """Kernels take one pair of strides for the two."""
    b1, b2, b3 = make_biases()
    across = b3.mT.contiguous().mT
    for biases in (Biases(b1, b2, across), Biases(across, b2, b3), Biases(torch.cat([b1, b3], 1), b2)):
        gate, up = biases.gate_up(ExpertSpec())
        assert gate.stride() == up.stride() and gate.shape == up.shape == b1.shape


@pytest.mark.parametrize(("names", "change", "message"), [
    (("b1",), lambda b1: b1, "the biases must be b1 (8, 128), b2 (8, 256), b3 (8, 128); got b1 (8, 128)"),
    (NAMES[-3:], lambda b1: b1[:, :64], "got b1 (8, 64)"),
    (NAMES[-3:], torch.Tensor.half, "all bf16 or all fp32"),
])  # fmt: skip
def test_wrong_biases_are_refused(names, change, message):
    x, scores, ids, weights = make_layer(T, D, H, E, K, device=DEVICE)
    biases = dict(zip(NAMES[-3:], make_biases(), strict=True))
    biases["b1"] = change(biases["b1"])
    with pytest.raises(ValueError, match=re.escape(message)):
        routed_experts(x, *weights, ids, scores, **{name: biases[name] for name in names})


def test_a_module_with_biases():
    torch.manual_seed(1)
    experts = RoutedExperts(E, D, H, bias=True, device=DEVICE, **GPT_OSS)
    torch.manual_seed(1)
    plain = RoutedExperts(E, D, H, device=DEVICE, **GPT_OSS)
    assert list(plain.state_dict()) == ["w1", "w2", "w3"]
    assert {name: tuple(b.shape) for name, b in experts.named_parameters() if name[0] == "b"} == {
        "b1": (E, H), "b2": (E, D), "b3": (E, H),
    }  # fmt: skip
    for name, weight in plain.named_parameters():
        assert torch.equal(weight, getattr(experts, name))
    assert 0.9 * D**-0.5 < experts.b1.abs().max() <= D**-0.5 and 0.9 * H**-0.5 < experts.b2.abs().max() <= H**-0.5
    x, scores, ids, _ = make_layer(T, D, H, E, K, device=DEVICE)
    weights, biases = [p.detach() for p in (experts.w1, experts.w2, experts.w3)], [experts.b1, experts.b2, experts.b3]
    dout = torch.randn(T, D, device=DEVICE)
    want = run(x, scores, ids, weights, [b.detach() for b in biases], dout)
    out = experts(x, ids, scores)
    out.backward(dout)
    assert torch.equal(out, want[0])
    for a, b in zip([experts.w1, experts.w2, experts.w3, *biases], want[3:], strict=True):
        assert torch.equal(a.grad, b)


# --- storage ----------------------------------------------------------------------------------------------------------


def test_interleaved_gate_and_up_are_one_weight():
    x, scores, ids, (w1, w2, w3) = make_layer(T, D, H, E, K, device=DEVICE)
    with pytest.raises(ValueError, match="give it with w3 None"):
        routed_experts(x, w1, w2, w3, ids, scores, interleaved=True)


# --- without a gate ---------------------------------------------------------------------------------------------------


def test_what_fits_experts_without_a_gate():
    x, scores, ids, (w1, w2, w3) = make_layer(T, D, H, E, K, device=DEVICE)
    for weights in ((w1, w2, w3), (torch.cat([w1, w3], 1), w2, None)):
        with pytest.raises(ValueError, match="'relu2' has no gate: w1 must be"):
            routed_experts(x, *weights, ids, scores, activation="relu2")
    with pytest.raises(ValueError, match="with w3 None and a gate"):
        routed_experts(x, w1, w2, None, ids, scores, activation="relu2", interleaved=True)
    biases = dict(zip(NAMES[-3:], make_biases(), strict=True))
    with pytest.raises(ValueError, match=r"the biases must be b1 \(8, 128\), b2 \(8, 256\); got"):
        routed_experts(x, w1, w2, None, ids, scores, activation="relu2", **biases)
    up, down, gate = (Fp8Weight.quantize(w) for w in (w1, w2, w3))
    for weights in ((up, down, gate), (Fp8Weight.quantize(torch.cat([w1, w3], 1)), down)):
        with pytest.raises(ValueError, match="'relu2' has no gate: w1 must be"):
            RoutedExperts.from_fp8(*weights, activation="relu2")(x, ids, scores)
    with pytest.raises(ValueError, match=r"or w1 \(E, 2H, D\) with w3 None"):
        RoutedExperts.from_fp8(up, down)(x, ids, scores)
    with pytest.raises(ValueError, match="names among w1, w2"):
        RoutedExperts(E, D, H, activation="relu2").add_lora(4, 8, weights=["w3"])


@pytest.mark.parametrize("bias", [False, True])
def test_a_module_without_a_gate(bias, group):
    """Over one rank too; stored in FP8; with adapters; and one seed draws the same w1 and w2 as with a gate."""
    modules, dout = [], torch.randn(T, D, device=DEVICE)
    for ep_group, activation in ((None, "relu2"), (group, "relu2"), (None, "swiglu")):
        torch.manual_seed(1)
        options = dict(activation=activation, bias=bias, device=DEVICE)
        modules.append(RoutedExperts(E, D, H, ep_group=ep_group, **options))
    experts, over_ranks, gated = modules
    assert list(experts.state_dict()) == ["w1", "w2", "b1", "b2"][: 4 if bias else 2] and experts.w3 is None
    assert torch.equal(experts.w1[0], gated.w1[0]) and torch.equal(experts.w2[0], gated.w2[0])
    assert D**-0.5 > experts.w1.max() > 0.9 * D**-0.5 and H**-0.5 > experts.w2.max() > 0.9 * H**-0.5
    x, scores, ids, _ = make_layer(T, D, H, E, K, device=DEVICE)
    out = experts(x, ids, scores)
    out.backward(dout)
    y = over_ranks(x, ids, scores)
    y.backward(dout)
    assert relative_error(y.detach(), out.detach()) < 0.01
    for a, b in zip(experts.parameters(), over_ranks.parameters(), strict=True):
        assert relative_error(b.grad.to_local(), a.grad) < 0.01
    if not bias:
        stored = [Fp8Weight.quantize(w) for w in (experts.w1, experts.w2)]
        assert torch.equal(RoutedExperts.from_fp8(*stored, activation="relu2")(x, ids, scores), out)
    experts.add_lora(4, 8)
    assert list(experts.lora_A) == ["w1", "w2"] and torch.equal(experts(x, ids, scores), out)


def test_statistics_count_the_columns_that_there_are():
    """With h positive, so that only padding has no gradient."""
    x, scores, ids, (w1, w2, _) = make_layer(T, D, 176, E, K, device=DEVICE)
    x, w1 = x.abs(), w1.abs().requires_grad_()
    statistics.collect()
    routed_experts(x, w1, w2, None, ids, scores, activation="relu2").backward(torch.randn(T, D, device=DEVICE))
    counts = statistics.take(DEVICE)
    for kind, columns in (("x", D), ("dh", 176), ("a", 176), ("dy", D)):
        values = counts[statistics.KINDS.index(kind)][: statistics._UNCOUNTED * 128]
        assert values.sum() == T * K * columns and values[::128].sum() < 0.02 * values.sum(), kind
