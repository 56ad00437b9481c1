"""The adapter to Transformers: every experts class of its registry, whole models, and what trains them.

References are Transformers' own experts, eager and in fp32, unless a test says otherwise.
"""

import contextlib
import copy
import functools
import importlib
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from accelerate import hooks
from packaging.version import parse
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torchao.quantization import quantize_
from transformers.integrations import finegrained_fp8, moe

from experiments.reference import relative_error
from tests.layer import DEVICE, CastCounter, assert_equal, refused
from titan_fp8moe import Fp8FlowMoEConfig, Fp8Weight, recipe
from titan_fp8moe import transformers as adapter
from titan_fp8moe.export_fp8 import fp8_tensors
from titan_fp8moe.torchao import is_moe

T, D, H, E, K = 96, 256, 128, 6, 2
VOCABULARY = 128
# FP8 noise is 0.065, of the few score gradients up to 0.09, of clamped values up to 0.13. Gate and up exchanged, or a
# missing score, give 0.7.
ONE_LAYER = 0.16


@pytest.fixture(autouse=True)
def registered():
    adapter.register()


# --- experts classes --------------------------------------------------------------------------------------------------


def experts_classes() -> list[tuple[str, str]]:
    """(module, class) of each user of the registry, read from the sources of Transformers."""
    found = []
    for path in sorted((Path(transformers.__file__).parent / "models").glob("*/modeling_*.py")):
        names = re.findall(r"^@use_experts_implementation.*\nclass (\w+)", path.read_text(), re.MULTILINE)
        found += [(f"transformers.models.{path.parent.name}.{path.stem}", name) for name in names]
    return found


CLASSES = experts_classes()
assert {"Qwen3MoeExperts", "DeepseekV3Experts", "MixtralExperts"} <= {name for _, name in CLASSES}
# Before, torch.compile passes no modules to functions whose result is a constant of the graph.
MODULES_IN_GRAPHS = parse(torch.__version__).release >= (2, 13)
# Not what the recipe serves, whatever the model's config. Some are newer than Transformers 5.17.
REFUSED = {"MuseSparkExperts": "its experts' outputs are normalized"}
PADDED = ("AriaExperts", "GptOssExperts", "NemotronHExperts", "OpenAIPrivacyFilterExperts", "Qwen3MoeExperts")
RELU2, GELU = dict(mlp_hidden_act="relu2"), dict(hidden_activation="gelu_pytorch_tanh")
# What a family has in the place of silu.
ACTIVATION = {"NemotronHExperts": RELU2, "Gemma4TextExperts": GELU, "DiffusionGemmaTextExperts": GELU}


def make_config(implementation: str = "eager", **changes: Any) -> SimpleNamespace:
    """What the experts of any family read of their config, under all the names that it has."""
    values = dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), E)
    values |= dict.fromkeys(("moe_intermediate_size", "intermediate_size", "expert_ffn_hidden_size"), H)
    values |= dict.fromkeys(("hidden_act", "hidden_activation", "mlp_hidden_act"), "silu")
    values |= dict(hidden_size=D, swiglu_limit=2.0, swiglu_alpha=1.7, moe_latent_size=None, num_experts_per_tok=K)
    values |= dict(moe_hidden_size=D, mlp_gate_softcap=3.0, mlp_up_softcap=1.5, post_norm_eps=1e-6)
    return SimpleNamespace(**values | changes, _experts_implementation=implementation)


def make_experts(module: str, name: str, **changes: Any) -> torch.nn.Module:
    experts = getattr(importlib.import_module(module), name)(make_config(**changes)).to(DEVICE)
    for param in experts.parameters():
        torch.nn.init.normal_(param, std=0.05)
    return experts


def qwen3_experts(**changes: Any) -> torch.nn.Module:
    return make_experts("transformers.models.qwen3_moe.modeling_qwen3_moe", "Qwen3MoeExperts", **changes)


def make_inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(T, D, device=DEVICE, dtype=dtype)
    scores, ids = torch.randn(T, E, device=DEVICE).softmax(-1).to(dtype).topk(K)
    return x, ids, scores


def step(experts: torch.nn.Module, implementation: str, inputs: tuple[Tensor, Tensor, Tensor], dout: Tensor):
    """Output and gradients of x, scores and the parameters that are trained."""
    experts.config._experts_implementation = implementation
    x, ids, scores = inputs[0].clone().requires_grad_(), inputs[1], inputs[2].clone().requires_grad_()
    out = experts(x, ids, scores)
    trained = [p for p in experts.parameters() if p.requires_grad]
    return [out.detach(), *torch.autograd.grad(out, [x, scores, *trained], dout)]


def assert_near_eager(experts: torch.nn.Module, x: Tensor) -> None:
    """Output and gradients of x, scores and parameters, which lie as the parameters do."""
    inputs, dout = (x, *make_inputs()[1:]), torch.randn_like(x)
    want, got = (step(experts, implementation, inputs, dout) for implementation in ("eager", "fp8_flow"))
    errors = [relative_error(a, b) for a, b in zip(got, want, strict=True)]
    assert all(0.01 < error < ONE_LAYER for error in errors), errors
    for param, grad in zip(experts.parameters(), got[3:], strict=True):
        assert grad.shape == param.shape and (grad.dim() < 3 or grad.is_contiguous())


@pytest.mark.parametrize("module,name", CLASSES, ids=[name for _, name in CLASSES])
def test_every_class_of_the_registry(module: str, name: str):
    """In FP8 near its own eager forward, or refused for what it is; each layout with padded sizes too."""
    experts = make_experts(module, name, **ACTIVATION.get(name, {}))
    if name in REFUSED:
        experts.config._experts_implementation = "fp8_flow"
        with pytest.raises(ValueError, match=f"{name} cannot run as fp8_flow: .*{REFUSED[name]}.*grouped_mm"):
            experts(*make_inputs())
        return
    assert_near_eager(experts, make_inputs()[0])
    if name in PADDED:
        sizes = dict.fromkeys(("moe_intermediate_size", "intermediate_size", "expert_ffn_hidden_size"), 144)
        experts = make_experts(module, name, hidden_size=192, **sizes, **ACTIVATION.get(name, {}))
        assert_near_eager(experts, torch.randn(T, 192, device=DEVICE))


def changed(experts: Any, **attributes: Any) -> torch.nn.Module:
    for name, value in attributes.items():
        setattr(experts, name, value)
    return experts


def gpt_oss_experts(limit: Any) -> torch.nn.Module:
    return changed(make_experts("transformers.models.gpt_oss.modeling_gpt_oss", "GptOssExperts"), limit=limit)


class Swish(torch.nn.Module):
    """silu where beta is 1."""

    def __init__(self, beta: Any = 1.0):
        super().__init__()
        self.beta = beta

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.beta * x)


@pytest.mark.parametrize("mode", [torch.device("meta"), FakeTensorMode(), torch.autocast("cpu", torch.bfloat16)])
def test_gates_are_found_by_their_values(mode: Any):
    """Those of a user's own activations, and each layer's limits, whatever the defaults, and below modes."""
    nemotron = make_experts("transformers.models.nemotron_h.modeling_nemotron_h", "NemotronHExperts", **RELU2)
    swish = changed(qwen3_experts(), act_fn=Swish())
    model = torch.nn.ModuleList([swish, nemotron, gpt_oss_experts(0.3), gpt_oss_experts(3.0)])
    for experts in model:
        experts.config._experts_implementation = "fp8_flow"
    torch.set_default_dtype(torch.bfloat16)
    try:
        with mode:
            assert adapter.converted(model) == ["0", "1", "2", "3"]
    finally:
        torch.set_default_dtype(torch.float32)
    assert [experts.fp8_flow_expert.activation for experts in model] == ["swiglu", "relu2", *["clamped_swiglu"] * 2]
    assert [experts.fp8_flow_expert.parameters for experts in model[2:]] == [(limit, 1.7, 1.0) for limit in (0.3, 3.0)]


@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="fake tensors of a second GPU need one, where there is any")
def test_kernels_run_on_the_device_of_the_tokens(monkeypatch: pytest.MonkeyPatch):
    """``device_map`` spreads layers over GPUs, and the current one stays the first."""
    current, context = [0], contextlib.ExitStack()
    context.callback(current.append, 0)
    monkeypatch.setattr(torch.cuda, "device", lambda device: current.append(device.index) or context)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current[-1])
    for index in range(2):
        experts = qwen3_experts(implementation="fp8_flow")
        with FakeTensorMode(), torch.no_grad():
            for name, param in [*experts.named_parameters()]:
                there = torch.empty(param.shape, device=f"cuda:{index}")
                setattr(experts, name, torch.nn.Parameter(there, requires_grad=False))
            experts(*(t.to(f"cuda:{index}") for t in make_inputs()))  # refused but on the current device
    assert current == [0, 1, 0]


def test_unsupported_experts_can_stay_as_they_were():
    """With one message, which does not break a graph. No engine gets FP8 of them."""
    adapter.register(unsupported="keep")
    adapter._warn_once.cache_clear()
    model, inputs = make_model(hidden_act="gelu", num_hidden_layers=1).bfloat16(), make_inputs(torch.bfloat16)
    experts = model.model.layers[0].mlp.experts
    model.set_experts_implementation("grouped_mm")
    want = experts(*inputs)
    model.set_experts_implementation("fp8_flow")
    compiled = torch.compile(experts, fullgraph=MODULES_IN_GRAPHS, backend="aot_eager")
    with pytest.warns(UserWarning, match="it stays on grouped_mm") as seen:
        assert_equal([compiled(*inputs), experts(*inputs)], [want, want])
    assert len([w for w in seen if "fp8_flow" in str(w.message)]) == 1
    with pytest.warns(UserWarning, match="does not run in FP8: its gate is none of"):
        assert fp8_layers(model) == set()


def fp8_experts(scale: float = 1.0) -> tuple[torch.nn.Module, torch.nn.Module]:
    """Experts that Transformers stores in FP8, and the same dequantized."""
    wrap = moe.use_experts_implementation(experts_interface=finegrained_fp8.ALL_FP8_EXPERTS_FUNCTIONS)
    cls = wrap(type("Quantized", (finegrained_fp8.FP8Experts,), {}))
    config = make_config("fp8_flow", mlp_gate_softcap=None, swiglu_alpha=None, swiglu_limit=None)
    experts = cls(config, block_size=(128, 128)).to(DEVICE)
    plain = qwen3_experts(implementation="fp8_flow").bfloat16()
    for name, param in plain.named_parameters():
        weight = Fp8Weight.quantize(param)
        getattr(experts, name).data.copy_(weight.q)
        getattr(experts, f"{name}_scale_inv").data.copy_(recipe.exp2(recipe.exponent(weight.scale)) * scale)
        param.data.copy_(weight.dequantize())
    return experts, plain


@pytest.mark.parametrize("compiled", [False, True])
def test_weights_stored_in_fp8(compiled: bool):
    """As dequantized experts, bit for bit, also in one graph; no weight is quantized, and e8m0 scales are the same."""
    (experts, plain), inputs, dout = fp8_experts(), make_inputs(torch.bfloat16), torch.randn(T, D, device=DEVICE)
    with pytest.raises(ValueError, match=r"freeze it with requires_grad_\(False\)"):
        experts(*inputs)
    experts.requires_grad_(False), plain.requires_grad_(False)
    want = step(plain, "fp8_flow", inputs, dout.bfloat16())
    if compiled:
        if not MODULES_IN_GRAPHS:
            pytest.skip("torch before 2.13 does not compile them")
        torch._dynamo.reset()
        experts.compile(backend="aot_eager", fullgraph=True)
    counter = CastCounter()
    with contextlib.nullcontext() if compiled else counter:  # graphs exclude such modes
        got = step(experts, "fp8_flow", inputs, dout.bfloat16())
    assert_equal(got, want)
    assert not counter.ops.keys() & {"quantize_weights", "grouped_mm_wgrad", "transpose_pair"}
    assert not counter.stray_casts
    for name in ("gate_up_proj_scale_inv", "down_proj_scale_inv") * (not compiled):
        exponents = (getattr(experts, name).detach().view(torch.int32) >> 23).to(torch.uint8)
        setattr(experts, name, torch.nn.Parameter(exponents, requires_grad=False))
    with warnings.catch_warnings(action="error"):  # scores in bf16 pass without one
        assert_equal(step(experts, "fp8_flow", inputs, dout.bfloat16()), want)


def test_scales_that_are_no_powers_of_two():
    """They are read as they are, or weights and scales replaced once."""
    (experts, plain), inputs = fp8_experts(1.3), make_inputs(torch.bfloat16)

    def codes() -> Tensor:
        return experts.down_proj.view(torch.uint8).clone()

    with torch.no_grad():
        before, exact = codes(), experts(*inputs)
        assert torch.equal(codes(), before)
        adapter.register(scales="round")
        got, rounded = experts(*inputs), codes()
        assert not torch.equal(rounded, before)
        assert torch.equal(experts(*inputs), got) and torch.equal(codes(), rounded)
        assert torch.equal(copy.deepcopy(experts)(*inputs), got)
        for param in plain.parameters():
            param.mul_(1.3)
        assert all(relative_error(out, plain(*inputs)) < ONE_LAYER for out in (exact, got))


TRAINED, NO_GATE = torch.nn.Parameter(torch.ones(())), "its gate is none of swiglu"
REFUSALS: list[tuple[Callable[[], torch.nn.Module], str]] = [
    (lambda: qwen3_experts(hidden_act="gelu"), NO_GATE),
    (lambda: changed(qwen3_experts(), act_fn=Swish(TRAINED)), NO_GATE),
    (lambda: gpt_oss_experts(torch.tensor(2.0)), NO_GATE),  # it may change
    (lambda: qwen3_experts(moe_intermediate_size=200), "its dims 256 and 200 are not both multiples of 16"),
    (lambda: qwen3_experts().half(), "its weights are torch.float16; load them in bfloat16"),
    (lambda: fp8_experts()[0].bfloat16(), "its FP8 weights were cast to torch.bfloat16 without their scales"),
    (lambda: changed(fp8_experts()[0], block_size=(64, 128)), "scales per block (64, 128), not per 128x128"),
]


@pytest.mark.parametrize(("make", "why"), REFUSALS)
def test_unsupported_experts_are_refused(make: Callable[[], torch.nn.Module], why: str):
    """Where they run and where a model is asked."""
    experts = make()
    experts.config._experts_implementation = "fp8_flow"
    with refused(f"{type(experts).__name__} cannot run as fp8_flow: ", why, "grouped_mm", 'unsupported="keep"'):
        experts(*make_inputs())
    with refused(f"{type(experts).__name__}: ", why, "; use model.set_experts_implementation"):
        adapter.converted(torch.nn.Sequential(experts))


def test_registrations_that_are_refused(monkeypatch: pytest.MonkeyPatch):
    """A later version may describe experts by more, as 5.23 does by a norm that 5.17 has not."""
    with refused("statistics_every has no effect"):
        adapter.register(Fp8FlowMoEConfig(statistics_every=5))
    monkeypatch.setattr(adapter, "use_experts_implementation", lambda *, has_gate=True, has_router=False: None)
    with refused("has_router, which", "install a version", error=RuntimeError):
        adapter.register()


def test_evaluation_keeps_no_copy_of_trained_experts():
    """Also of transposed ones: without gradients a transpose requires none."""
    experts = changed(gpt_oss_experts(7.0), config=make_config("fp8_flow"))
    with torch.no_grad():
        experts(*make_inputs())
    assert "fp8_flow_cache" not in vars(experts)


# --- models -----------------------------------------------------------------------------------------------------------

SMALL = dict(
    vocab_size=VOCABULARY, hidden_size=D, intermediate_size=H, moe_intermediate_size=H, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=64, num_experts_per_tok=K, max_position_embeddings=128,
    pad_token_id=0, bos_token_id=1, eos_token_id=2, initializer_range=0.05, attention_dropout=0.0, num_experts=E,
)  # fmt: skip


def make_model(**changes: Any) -> Any:
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**SMALL | changes)).to(DEVICE)


def make_tokens(batch: int = 2, length: int = 48) -> Tensor:
    return torch.randint(3, VOCABULARY, (batch, length), device=DEVICE)


def loss_and_grads(model: Any, tokens: Tensor, call: Callable | None = None) -> tuple[float, dict[str, Tensor]]:
    model.zero_grad()
    loss = (model if call is None else call)(input_ids=tokens, labels=tokens).loss
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_a_model_in_which_nothing_runs_in_fp8_is_named():
    with refused("Linear run in FP8: the model's code has no"):
        adapter.converted(torch.nn.Linear(D, D))
    with refused('and model.set_experts_implementation("fp8_flow")'):
        adapter.converted(make_model())


def other_experts(experts: Any, *inputs: Tensor) -> Tensor:
    """Another package's forward."""
    return moe.grouped_mm_experts_forward(experts, *inputs)


def other_layer(layer: Any, x: Tensor) -> Tensor:
    _, scores, ids = layer.gate(x.flatten(0, 1))
    return other_experts(layer.experts, x.flatten(0, 1), ids, scores).view(x.shape)


def hooked(module: Any) -> None:
    hooks.add_hook_to_module(module, hooks.ModelHook())


def bind(module: Any, forward: Callable) -> None:  # as Liger and the library kernels do
    module.forward = MethodType(forward, module)


OTHERS = {
    "experts": lambda layer: bind(layer.experts, other_experts),
    "below accelerate's hook": lambda layer: (bind(layer.experts, other_experts), hooked(layer.experts)),
    "layer": lambda layer: bind(layer, other_layer),
    "class": lambda layer: setattr(type(layer), "forward", functools.wraps(type(layer).forward)(other_layer)),
}
WRAPPERS = {
    "accelerate's hook": lambda layer: hooked(layer.experts),
    "the layer's hook": lambda layer: (hooked(layer.experts), hooked(layer)),
    "compile": lambda layer: setattr(layer.experts, "forward", torch.compile(layer.experts.forward, backend="eager")),
}


def fp8_layers(model: torch.nn.Module, **options: Any) -> set[str]:
    """The layers of which an engine would get FP8."""
    sent = [(name, tensor.dtype) for bucket in fp8_tensors(model, **options) for name, tensor in bucket.items()]
    return {name.split(".")[2] for name, dtype in sent if dtype == recipe.FP8}


@pytest.mark.parametrize("change", [*OTHERS, *WRAPPERS])
def test_what_runs_in_fp8_is_what_a_forward_calls(monkeypatch: pytest.MonkeyPatch, change: str):
    """Experts of another package are named. A model of which it runs all leaves in bf16, unless asked for."""
    model = make_model(experts_implementation="fp8_flow")
    layers = [block.mlp for block in model.model.layers]
    monkeypatch.setattr(type(layers[0]), "forward", type(layers[0]).forward)  # put back after the test
    names = [f"model.layers.{at}.mlp.experts" for at in range(2)]
    for at, layer in enumerate(layers):
        (OTHERS | WRAPPERS)[change](layer)
        with CastCounter() as counter:
            loss_and_grads(model, make_tokens())
        left = names if change in WRAPPERS else [] if change == "class" else names[at + 1 :]
        assert counter.ops["grouped_mm"] == 4 * len(left)
        if left:
            assert adapter.converted(model) == left and fp8_layers(model) == {name.split(".")[2] for name in left}
            continue
        why = "has replaced the forward of Qwen3Moe(Experts|SparseMoeBlock); switch that off"
        with pytest.raises(ValueError, match=f"run in FP8: Qwen3MoeExperts: {__name__} {why}"):
            adapter.converted(model)
        adapter._warn_once.cache_clear()
        with pytest.warns(UserWarning, match=f"^Qwen3MoeExperts does not run in FP8: {__name__} {why}"):
            assert fp8_layers(model) == set()
        assert fp8_layers(model, quantize=[".experts."]) == {"0", "1"}


def test_partitioned_parameters():
    """DeepSpeed's ZeRO-3 leaves empty tensors with their shapes; of flattened parameters nothing is known."""
    model = make_model(experts_implementation="fp8_flow")
    want, weights = adapter.converted(model), [p for n, p in model.named_parameters() if "experts." in n]
    for weight in weights:
        weight.ds_shape, weight.data = weight.shape, weight.new_empty(0)
    assert len(want) == 2 and adapter.converted(model) == want
    for weight in weights:
        del weight.ds_shape
    with pytest.raises(ValueError, match=r"down_proj has the shape \(0,\); ask before FSDP1"):
        adapter.converted(model)


def test_dynamic_shapes():
    """``dynamic=True`` makes symbols of all numbers, as of these experts' limit."""
    experts, inputs = changed(gpt_oss_experts(7.0), config=make_config("fp8_flow")), make_inputs()
    want = experts(*inputs)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(experts, dynamic=True, fullgraph=True, backend="aot_eager")(*inputs), want)


@pytest.mark.parametrize("frozen", [False, True])
def test_kept_weights_in_a_compiled_model(frozen: bool):
    """One graph, whose buffers are those of all experts; a state dict that is loaded is seen."""
    model = make_model(experts_implementation="fp8_flow", num_hidden_layers=1 if frozen else 2)
    tokens = make_tokens(length=16)
    experts = [module for module in model.modules() if hasattr(module, "is_concatenated")]
    states = [{name: value * factor for name, value in model.state_dict().items()} for factor in (1.0, 1.25)]
    want = [model.load_state_dict(state) and loss_and_grads(model, tokens) for state in states]
    adapter.register(Fp8FlowMoEConfig(cache_weights=not frozen))
    for module in experts:
        module.requires_grad_(not frozen)
    if not MODULES_IN_GRAPHS:
        model(tokens)  # makes the buffers
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for state, (want_loss, want_grads) in zip(states, want, strict=True):
        model.load_state_dict(state)
        for _ in range(2):
            loss, grads = loss_and_grads(model, tokens, compiled)
            assert loss == pytest.approx(want_loss, rel=1e-3)
            assert all(relative_error(grad, want_grads[name]) < 0.05 for name, grad in grads.items())
    assert [m.fp8_flow_cache.layouts for m in experts] == ["forward" if frozen else "both"] * len(experts)
    assert len({m.fp8_flow_cache.kind for m in experts}) == 1  # or each layer, compiled alone, would have a graph


def test_quantize_of_torchao():
    """As the registry; what does not fit is refused."""
    config, tokens = Fp8FlowMoEConfig(save_h="fp8"), make_tokens()
    adapter.register(config)
    registered, model = make_model(experts_implementation="fp8_flow"), make_model()
    model.load_state_dict(registered.state_dict())
    quantize_(model, config, filter_fn=is_moe)
    (want_loss, want), (loss, grads) = (loss_and_grads(m, tokens) for m in (registered, model))
    assert loss == want_loss and all(torch.equal(grads[name], want[name]) for name in want)
    with refused("Qwen3MoeExperts: its gate is none of"):
        quantize_(make_model(hidden_act="gelu"), config, filter_fn=is_moe)
