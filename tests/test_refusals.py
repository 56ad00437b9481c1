"""What settings and layers refuse, and the words that name the fault or its remedy. Kernels would notice few wrong
inputs. tests/test_titan_jobs.py has jobs."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.distributed.tensor import DTensor

from experiments.reference import make_layer
from tests.layer import DEVICE, refused
from titan_fp8moe import Fp8FlowLinear, Fp8FlowMoEConfig, RoutedExperts, grouped_ffn, grouped_mm, recipe, routed_experts
from titan_fp8moe.layer.group import feed_forward, linear
from titan_fp8moe.layer.lora import Adapter, Lora
from titan_fp8moe.layer.weights import ExpertWeights, SharedExperts
from titan_fp8moe.ops import Fp8Weight
from titan_fp8moe.trainer import preflight

T, D, H, E, K = 20, 256, 128, 4, 2
CONFIG = Fp8FlowMoEConfig()


@pytest.mark.parametrize(("name", "value", "remedy"), [
    ("wgrad", "requantize", "one of 'balanced', 'scaling_aware', 'bf16'"),
    ("save_h", "fp16", "one of 'bf16', 'fp8'"),
    ("recompute", "all", "one of 'none', 'activation', 'experts'"),
    ("cache_weights", 1, "true or false"),
    ("statistics_every", 2.5, "a number of steps, or 0 for never"),
    ("statistics_every", -1, "a number of steps, or 0 for never"),
    ("statistics_every", True, "a number of steps, or 0 for never"),
    ("filter_fqns", "layers.1.", "a list of non-empty strings"),
    ("filter_fqns", [""], "a list of non-empty strings"),
    ("dispatch_capacity", 0.5, "a number of at least 1"),
    ("dispatch_capacity", float("inf"), "a number of at least 1"),
])  # fmt: skip
def test_wrong_settings(name, value, remedy):
    with refused(f"fp8_flow_moe.{name} is {value!r}; set it to {remedy}"):
        Fp8FlowMoEConfig(**{name: value})


def test_a_wrong_setting_that_is_assigned_later():
    config = Fp8FlowMoEConfig()
    config.recompute = "full"  # type: ignore[assignment]
    with refused("fp8_flow_moe.recompute is 'full'"):
        RoutedExperts(E, D, H, config=config)


def test_gathered_weights_are_not_cached():
    with refused("set one to false"):
        Fp8FlowMoEConfig(fp8_all_gather=True, cache_weights=True)


@pytest.mark.parametrize(("name", "settings"), [
    ("save_h", dict(save_h="fp8", recompute="experts")),
    ("dispatch", dict(dispatch="symmetric")),
    ("dispatch_capacity", dict(dispatch_capacity=2.0)),
    ("cache_layouts", dict(cache_layouts="forward")),
    ("fp8_all_gather", dict(fp8_all_gather=True)),
    (None, dict(save_h="fp8", cache_layouts="forward", cache_weights=True)),
])  # fmt: skip
def test_settings_without_effect_are_named(caplog, name, settings):
    layout = preflight.ExpertLayout(1, 1, 1, 64)
    preflight.warn_of_settings_without_effect(Fp8FlowMoEConfig(**settings), layout)
    assert [line.split(" = ")[0] for line in caplog.messages] == ([f"fp8_flow_moe.{name}"] if name else [])


def ffn(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, config: Fp8FlowMoEConfig = CONFIG) -> Tensor:
    return feed_forward(x, ExpertWeights(w1, w2, w3), config)


def arguments(call: Any) -> dict[str, Any]:
    """Arguments that fit."""
    if call is RoutedExperts:
        return dict(num_experts=E, dim=D, hidden_dim=H)
    if call is Fp8FlowLinear:
        return dict(in_features=D, out_features=H)
    x, scores, ids, (w1, w2, w3) = make_layer(T, D, H, E, K, device=DEVICE)
    weights, offs = dict(w1=w1, w2=w2, w3=w3), torch.tensor([3, 3, 15, T], dtype=torch.int32, device=DEVICE)
    if call is grouped_mm:
        return dict(x=x.bfloat16(), w=w1.bfloat16().transpose(1, 2), offs=offs)
    if call is linear:
        return dict(x=x, w=w1[0], config=CONFIG)
    if call is ffn:
        return dict(x=x, **{name: w[0] for name, w in weights.items()})
    return dict(x=x, **weights) | (dict(offs=offs) if call is grouped_ffn else dict(topk_ids=ids, topk_scores=scores))


def zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, device=DEVICE)


def having(**settings: Any) -> Any:
    return dict(config=Fp8FlowMoEConfig(**settings))


def with_activation(activation: str, **parameters: float) -> Any:
    return dict(activation=activation, activation_parameters=parameters)


BIASES = dict(b1=zeros(E, H), b2=zeros(E, D), b3=zeros(E, H))
SHARED = SharedExperts(zeros(H, D), zeros(D, H), zeros(H, D))
A, B = zeros(E, 8, D), zeros(E, H, 8)


def beside(**changes: Any) -> Any:
    return dict(shared=SHARED._replace(**changes))


def adapted(A: Tensor, B: Tensor) -> Any:
    return dict(lora=Lora(w1=Adapter(A, B, 1.0)))


def stored(**changes: Any) -> Any:
    """All weights in FP8, but for those that ``changes`` make of them."""
    return {
        name: lambda w, name=name: changes.get(name, lambda q: q)(Fp8Weight.quantize(w)) for name in ("w1", "w2", "w3")
    }


def narrow(D: int, H: int) -> Any:
    """Weights of other sizes."""
    rows, columns = (lambda w: w[:, :H, :D]), lambda w: w[:, :D, :H]
    return dict(x=lambda x: x[:, :D], w1=rows, w2=columns, w3=rows)


def joined(w: Tensor) -> Tensor:
    return w.repeat(1, 2, 1)


PADDED = {
    name: cut if name == "x" else lambda w, cut=cut: Fp8Weight.quantize(cut(w)) for name, cut in narrow(192, 80).items()
}
NO_GATE, WITHOUT = dict(activation="relu2"), dict(w3=lambda w: None)
META, SHAPES, ADAPTERS = (lambda t: t.to("meta")), "w1 and w3 must be (E, H, D)", ("A (4, r, 256) and B (4, 128, r)",)
NEEDS_E4M3 = "must be contiguous e4m3 (E, N, K), N and K multiples of 128"
REFUSED: list[tuple[Any, dict[str, Any], tuple[str, ...]]] = [
    (routed_experts, dict(x=lambda x: x[1:]), ("x must be (T, D)", "got (19, 256)")),
    (routed_experts, dict(x=lambda x: x[None]), ("batch dims flattened",)),
    (routed_experts, dict(x=Tensor.half), ("x must be bf16 or fp32", "use x.bfloat16()")),
    (routed_experts, dict(topk_scores=lambda s: s.repeat(1, 2)), ("topk_scores (T, K) fp32",)),
    (routed_experts, dict(topk_scores=Tensor.half), ("topk_scores (T, K) fp32 (torch.topk returns scores, then ids)",)),
    (routed_experts, dict(topk_ids=Tensor.byte), ("topk_ids (T, K) int32 or int64",)),
    (routed_experts, dict(w1=lambda w: w[0]), ("w1 (E, H, D)",)),
    (routed_experts, dict(w2=META), ("must be on one device",)),
    (routed_experts, dict(w2=lambda w: w.mT), ("w2 (E, D, H)",)),
    (routed_experts, dict(w2=Tensor.bfloat16), ("all of one dtype",)),
    (routed_experts, dict(w3=joined), (SHAPES,)),
    (routed_experts, dict(interleaved=True), ("give it with w3 None",)),
    (routed_experts, narrow(72, 128), ("got D 72 and H 128; pad the model with zeros",)),
    (routed_experts, narrow(128, 72), ("got D 128 and H 72; pad the model with zeros",)),
    (routed_experts, dict(activation="relu"), ("activation is 'relu'; set it to one of",)),
    (routed_experts, NO_GATE, ("without a gate, as of 'relu2', w1 must be",)),
    (routed_experts, having(cache_weights=True), ("cache_weights has no effect on routed_experts",)),
    (routed_experts, dict(b1=BIASES["b1"]), ("must be b1 (4, 128), b2 (4, 256), b3 (4, 128); got b1 (4, 128)",)),
    (routed_experts, BIASES | dict(b1=zeros(E, 64)), ("got b1 (4, 64)",)),
    (routed_experts, BIASES | dict(b1=BIASES["b1"].half()), ("all bf16 or all fp32",)),
    (routed_experts, beside(w2=zeros(D + 128, H)), ("w2 (256, H)",)),
    (routed_experts, beside(w3=None, w1=zeros(320, D), w2=zeros(D, 160)), ("w1 (2H, 256) with w3 None",)),
    (routed_experts, beside(w1=zeros(H, D).half()), ("all bf16 or all fp32",)),
    (routed_experts, beside(scores=zeros(T, 1)), ("scores (20,) fp32 or None",)),
    (routed_experts, beside(scores=zeros(T).bfloat16()), ("scores (20,) torch.bfloat16",)),
    (routed_experts, beside(w1=zeros(2 * H, D), w3=None) | WITHOUT | dict(w1=joined, interleaved=True),
     ("unless the routed experts are interleaved",)),
    (routed_experts, NO_GATE | WITHOUT | beside(), ("without a gate, as of 'relu2', w1 (H, 256) with w3 None",)),
    (routed_experts, adapted(A, B.mT), (*ADAPTERS, "got (4, 8, 256) on", "and (4, 8, 128)")),
    (routed_experts, adapted(A[:, :, :128], B), (*ADAPTERS, "got (4, 8, 128)")),
    (routed_experts, adapted(A, B.half()), (*ADAPTERS, "torch.float16")),
    (routed_experts, dict(lora=Lora(w1=Adapter(A, B, float("nan")))), (*ADAPTERS, "a finite scale")),
    (routed_experts, adapted(A.to("meta"), B), (*ADAPTERS, "got (4, 8, 256) on meta")),
    (routed_experts, PADDED | dict(b1=zeros(E, 80), b2=zeros(E, 192), b3=zeros(E, 80)),
     ("b1 (4, 128), b2 (4, 192), b3 (4, 128); got b1 (4, 80)",)),
    (routed_experts, PADDED | adapted(zeros(E, 8, 192), zeros(E, 80, 8)), ADAPTERS),
    (routed_experts, stored(w2=lambda q: Fp8Weight(q.q.detach().requires_grad_(), q.scale)),
     ("w2 is stored in FP8 and requires a gradient", "requires_grad_(False)")),
    (routed_experts, stored(w2=lambda q: Fp8Weight(q.q, recipe.exp2(recipe.exponent(q.scale)).half())),
     ("w2 must be contiguous e4m3", "of_blocks")),
    (routed_experts, stored(w2=lambda q: Fp8Weight(q.q.mT.contiguous().mT, q.scale)), (f"w2 {NEEDS_E4M3}",)),
    (routed_experts, stored(w2=lambda q: Fp8Weight(q.q, q.scale[:, :1])), (f"w2 {NEEDS_E4M3}",)),
    (routed_experts, stored(w2=lambda q: Fp8Weight(q.q.to("meta"), q.scale)), (f"w2 {NEEDS_E4M3}", "on meta")),
    (routed_experts, dict.fromkeys(("w1", "w2", "w3"), META) | dict(
        x=torch.empty(2**21, D, device="meta"), topk_ids=torch.empty(2**21, K, dtype=torch.int64, device="meta"),
        topk_scores=torch.empty(2**21, K, device="meta"),
    ), ("rows for its 4 experts",)),
    (grouped_ffn, dict(x=lambda x: x[None]), ("x must be (M, D), offs (E,)",)),
    (grouped_ffn, dict(x=lambda x: x[:, :128]), ("got (20, 128)",)),
    (grouped_ffn, dict(offs=lambda offs: offs[:1]), ("offs (E,) as w1 (E, H, D)",)),
    (grouped_ffn, dict(offs=Tensor.long), ("use offs.int()",)),
    (grouped_ffn, dict(scores=zeros(T, 1)), ("scores (M,) or None; got (20, 256), (4,), (20, 1)",)),
    (grouped_ffn, having(dispatch="symmetric"), ("dispatch has no effect on grouped_ffn",)),
    (grouped_mm, dict(x=Tensor.float), ("x must be bf16 (M, K)",)),
    (grouped_mm, dict(x=lambda x: x[:1].expand(2**21, D)), ("kernels take at most 2097024",)),
    (grouped_mm, dict(w=lambda w: w.mT), ("as w.transpose(1, 2)",)),
    (grouped_mm, dict(w=lambda w: w[0]), ("w bf16 or fp32 (E, K, N)",)),
    (grouped_mm, dict(w=lambda w: w[:1]), ("offs (E,)",)),
    (grouped_mm, dict(w=lambda w: w[..., :64]), ("K and N must be multiples of 128",)),
    (grouped_mm, dict(w=Tensor.half), ("w bf16 or fp32", "(4, 256, 128) torch.float16")),
    (ffn, dict(w3=lambda w: None), ("w1 and w3 must be (H, D)",)),
    (ffn, dict(w1=lambda w: w[:120], w2=lambda w: w[:, :120], w3=lambda w: w[:120]), ("D and H multiples of 16",)),
    (ffn, dict(x=lambda x: x[..., :128]), ("x is (20, 128) and the weights take 256",)),
    (ffn, dict(x=torch.empty(2**21, D, device="meta")), ("kernels take at most 2097024 rows",)),
    (linear, dict(w=lambda w: w[:112]), ("the weight is (112, 256); both dims must be multiples of 128",)),
    (linear, dict(x=Tensor.half), ("x must be bf16 or fp32",)),
    (RoutedExperts, dict(num_experts=5, ep_group=SimpleNamespace(size=lambda: 2)), ("num_experts = 5 do not divide",)),
    (RoutedExperts, dict(dtype=torch.float16), ("dtype=torch.bfloat16",)),
    (RoutedExperts, with_activation("clamped_swiglu", beta=7.0), ("no parameter 'beta'; it has limit, alpha, offset",)),
    (RoutedExperts, with_activation("clamped_swiglu", limit=0.0),
     ("limit of activation 'clamped_swiglu' is 0.0; set it to a positive number",)),
    (RoutedExperts, with_activation("clamped_swiglu", alpha=float("nan")), ("is nan; set it to a number",)),
    (RoutedExperts, having(fp8_all_gather=True), ("fp8_all_gather has no effect on RoutedExperts",)),
    (Fp8FlowLinear, dict(dtype=torch.float16), ("would be torch.float16",)),
    (Fp8FlowLinear, having(save_h="fp8"), ("save_h has no effect on Fp8FlowLinear",)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("call", "changes", "said"),
    [pytest.param(*row, id=f"{i}-{row[0].__name__}-{'-'.join(row[1])}") for i, row in enumerate(REFUSED)],
)
def test_what_does_not_fit_is_refused(call, changes, said):
    given = arguments(call)
    call(**given)
    for name, change in changes.items():
        given[name] = change(given.get(name)) if callable(change) and not isinstance(change, type) else change
    with refused(*said):
        call(**given)


@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="fake tensors of a second GPU need one, where there is any")
@pytest.mark.parametrize("call", [routed_experts, grouped_mm, ffn, linear])
def test_another_than_the_current_device_is_refused(monkeypatch, call):
    """Kernels would run on the current one, with addresses of the other."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    given = arguments(call)
    with FakeTensorMode(), refused("x is on cuda:1", "call torch.cuda.set_device"):
        there = {n: torch.empty(t.shape, dtype=t.dtype, device="cuda:1") for n, t in given.items() if n != "config"}
        call(**given | there)


@pytest.mark.parametrize(("call", "name"), [(grouped_ffn, n) for n in ("x", "w2", "b1")] + [(grouped_mm, "w")])
def test_dtensors_are_refused(group, call, name):
    given = arguments(call) | (BIASES if call is grouped_ffn else {})
    given[name] = DTensor.from_local(given[name], torch.distributed.init_device_mesh(DEVICE, (1,)))
    with refused("use to_local()"):
        call(**given)


def test_stored_weights_that_require_a_gradient_run_without():
    given = {name: Fp8Weight.quantize(w) if name[0] == "w" else w for name, w in arguments(routed_experts).items()}
    want = routed_experts(**given)
    given["w2"].q.requires_grad_()
    with torch.no_grad():
        assert torch.equal(routed_experts(**given), want)
