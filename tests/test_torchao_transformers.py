"""torchao's ``quantize_`` on a Transformers model: the registered implementation, on layers that a filter names."""

import pytest
import torch

pytest.importorskip("torchao")
transformers = pytest.importorskip("transformers", minversion="5.0")
adapter = pytest.importorskip("titan_fp8moe.transformers")

from torchao.quantization import quantize_  # noqa: E402

from titan_fp8moe import Fp8FlowMoEConfig  # noqa: E402
from titan_fp8moe.torchao import is_moe  # noqa: E402


def make_model(**changes):
    sizes = dict(vocab_size=256, hidden_size=128, intermediate_size=128, moe_intermediate_size=128, head_dim=32)
    heads = dict(num_attention_heads=4, num_key_value_heads=4, num_experts=4, num_experts_per_tok=2)
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(**(sizes | heads | {"num_hidden_layers": 2} | changes))
    return transformers.AutoModelForCausalLM.from_config(config)


def step(model):
    tokens = torch.arange(32).view(2, 16) * 7 % 256
    loss = model(tokens, labels=tokens).loss
    loss.backward()
    return [loss.detach(), *(param.grad for param in model.parameters())]


def test_same_as_the_registry():
    config = Fp8FlowMoEConfig(save_h="fp8")
    adapter.register(config)
    registered, plain, model = make_model(), make_model(), make_model()
    registered.set_experts_implementation(adapter.NAME)
    quantize_(model, config, filter_fn=is_moe)
    want = step(registered)
    assert not torch.equal(want[0], step(plain)[0])
    for a, b in zip(step(model), want, strict=True):
        assert torch.equal(a, b)


def test_some_layers():
    model = make_model()
    quantize_(model, Fp8FlowMoEConfig(), filter_fn=lambda m, name: is_moe(m, name) and "layers.0." not in name)
    assert adapter.converted(model) == ["model.layers.1.mlp.experts"]


def test_unsupported_experts_are_named():
    with pytest.raises(ValueError, match="Qwen3MoeExperts: its gate is none of"):
        quantize_(make_model(hidden_act="gelu"), Fp8FlowMoEConfig(), filter_fn=is_moe)
