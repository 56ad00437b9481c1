"""PEFT's adapters of Transformers' experts, beside their FP8 weights. The reference is PEFT's own forward, in fp32."""

from types import MethodType
from typing import Any

import peft
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity
from transformers import GptOssConfig, GptOssForCausalLM, Llama4ForCausalLM, Llama4TextConfig
from transformers.integrations import moe

from experiments.reference import relative_error
from tests.layer import DEVICE, CastCounter, assert_equal
from tests.patched import undone
from tests.test_transformers import SMALL, E, fp8_experts, loss_and_grads, make_inputs, make_model, make_tokens
from titan_fp8moe import transformers as adapter
from titan_fp8moe.export_fp8 import fp8_tensors
from titan_fp8moe.peft import _hand_over, take_over

BOTH = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@pytest.fixture(autouse=True)
def registered():
    with undone():
        adapter.register()
        yield


def lora_config(parameters: list[str] = BOTH, r: int = 8, lora_alpha: int = 16) -> Any:
    return peft.LoraConfig(r=r, lora_alpha=lora_alpha, target_modules=[], target_parameters=parameters)


def fill(model: Any) -> Any:
    """With adapters that change something; PEFT begins with B = 0."""
    for name, param in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(param, std=0.05)
    return model


def make_adapted(parameters: list[str] = BOTH) -> Any:
    return fill(peft.get_peft_model(make_model(num_hidden_layers=1), lora_config(parameters)))


def make_gpt_oss() -> Any:
    """Its weights are transposed, and square."""
    sizes = dict(hidden_size=128, intermediate_size=128, num_local_experts=4, num_experts_per_tok=2, head_dim=32)
    config = GptOssConfig(**sizes, num_hidden_layers=1, vocab_size=512, pad_token_id=0)
    return fill(peft.get_peft_model(GptOssForCausalLM(config), lora_config()))


def use(model: Any, implementation: str) -> Any:
    model.get_base_model().set_experts_implementation(implementation)
    return model


@torch.no_grad()
def logits(model: Any, tokens: Tensor, implementation: str = "fp8_flow") -> Tensor:
    return use(model, implementation)(input_ids=tokens).logits


@pytest.mark.parametrize("parameters", [BOTH, BOTH[:1], BOTH[1:], None], ids=["both", "gate_up", "down", "gpt-oss"])
def test_loss_and_gradients(parameters: list[str] | None):
    model, tokens = make_adapted(parameters) if parameters else make_gpt_oss(), make_tokens()
    parameters = parameters or BOTH
    want_loss, want = loss_and_grads(use(model, "eager"), tokens)
    with CastCounter() as counter:
        loss, grads = loss_and_grads(use(model, "fp8_flow"), tokens)
    assert loss == pytest.approx(want_loss, rel=5e-3) and len(want) == 2 * len(parameters)
    assert all("lora_" in name for name in grads)
    assert min(float(cosine_similarity(grads[n].flatten(), want[n].flatten(), 0)) for n in want) > 0.995
    assert counter.ops["low_rank_grads"] == len(parameters) and not counter.ops["grouped_mm_wgrad"]


def test_checkpointing_and_compile():
    model, tokens = use(make_adapted(), "fp8_flow"), make_tokens()
    _, want = loss_and_grads(model, tokens)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    _, got = loss_and_grads(model, tokens, compiled)
    assert all(relative_error(got[name], want[name]) < 1e-2 for name in want)
    model.train()
    model.get_base_model().gradient_checkpointing_enable()
    model.enable_input_require_grads()
    _, got = loss_and_grads(model, tokens)
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_several_active_adapters():
    """As one, whose rank is the sum; PEFT would add their products to the weights."""
    model, tokens = make_adapted(), make_tokens()
    one = logits(model, tokens)
    model.add_adapter("second", lora_config(r=4, lora_alpha=12))
    fill(model)
    model.base_model.set_adapter(["default", "second"])
    got, want = logits(model, tokens), logits(model, tokens, "eager")
    assert relative_error(got, want) < 0.1 < relative_error(one, want)


def test_a_trained_copy_of_the_experts():
    """It has a config of its own, which a later choice for the model does not reach."""
    saved = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["experts"])
    early, late = (make_model(num_hidden_layers=1, experts_implementation=name) for name in ("fp8_flow", "eager"))
    early, late = peft.get_peft_model(early, saved), use(peft.get_peft_model(late, saved), "fp8_flow")
    (name,) = adapter.converted(early)
    early(input_ids=make_tokens()).logits.sum().backward()
    assert name.endswith(".modules_to_save.default") and early.get_submodule(name).down_proj.grad.any()
    with pytest.raises(ValueError, match="before PEFT copies modules_to_save"):
        adapter.converted(late)
    with pytest.raises(ValueError, match="is an adapter or the weight below one"):
        next(fp8_tensors(early))


def test_replicas_have_their_own_adapters():
    """nn.DataParallel's share the attributes of their module, and run at the same time."""
    model, tokens = use(make_adapted(BOTH[:1]), "fp8_flow"), make_tokens()
    logits(model, tokens)
    wrapper = model.get_base_model().model.layers[0].mlp.experts
    first, second = (wrapper.get_base_layer()._replicate_for_data_parallel() for _ in range(2))
    with _hand_over(wrapper, first, ["default"]), _hand_over(wrapper, second, ["default"]):
        assert take_over(second) and take_over(first) and not take_over(second)


def test_experts_of_another_package_do_not_lose_adapters():
    """As under Liger: the forward that takes no adapters would leave them out."""
    model = use(make_adapted(), "fp8_flow")
    experts = model.get_base_model().model.layers[0].mlp.experts.get_base_layer()
    experts.forward = MethodType(moe.grouped_mm_experts_forward, experts)
    with pytest.raises(ValueError, match="forward of Qwen3MoeExperts has run without PEFT's adapters"):
        logits(model, make_tokens())
    assert not any("layers.0." in name for name in adapter.fp8_matrices(model))
    del experts.forward
    logits(model, make_tokens())


def test_weights_stored_in_fp8():
    """As bf16 experts of the same values, bit for bit. PEFT alone would add in bf16 and round to FP8 without scales."""
    outs, inputs = [], make_inputs(torch.bfloat16)
    stored, plain = (torch.nn.ModuleDict({"experts": experts.requires_grad_(False)}) for experts in fp8_experts())
    for model in (stored, plain):
        peft.inject_adapter_in_model(lora_config(["experts.gate_up_proj", "experts.down_proj"]), model)
        torch.manual_seed(0)
        adapters = [p for name, p in model.named_parameters() if "lora_" in name]
        for p in adapters:
            p.data = 0.05 * torch.randn(p.shape, device=DEVICE)
        out = model["experts"](*inputs)
        outs.append([out.detach(), *torch.autograd.grad(out.float().square().sum(), adapters)])
    assert_equal(*outs)
    assert outs[0][1].any()
    with pytest.raises(RuntimeError, match=r"Float8|add"):  # PEFT would add to codes without their scales
        stored["experts"].merge()


def test_experts_that_choose_no_implementation():
    """As Llama 4's: they run as before, with PEFT's own forward."""
    config = Llama4TextConfig(**SMALL | dict(num_hidden_layers=1, intermediate_size_mlp=128, num_local_experts=E))
    parameters = ["feed_forward.experts.gate_up_proj"]
    model = peft.get_peft_model(Llama4ForCausalLM(config).to(DEVICE), lora_config(parameters))
    before = model(input_ids=make_tokens()[:1]).logits
    fill(model)
    assert not torch.equal(model(input_ids=make_tokens()[:1]).logits, before)
