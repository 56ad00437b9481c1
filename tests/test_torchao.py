"""torchao's ``quantize_`` with this package's config: what it converts, and its errors."""

import copy

import pytest
import torch
from torch import nn
from torchao.quantization import Int8WeightOnlyConfig, quantize_

from tests.jobs import make_config, make_model
from tests.layer import DEVICE, assert_equal, refused
from titan_fp8moe import Fp8FlowLinear, Fp8FlowMoEConfig, RoutedExperts
from titan_fp8moe.torchao import is_moe, linears
from titan_fp8moe.trainer.experts import Fp8FFN


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.wo = nn.Linear(128, 128, bias=False, device=DEVICE)
        self.experts = RoutedExperts(4, 128, 128, device=DEVICE)

    def forward(self, x: torch.Tensor, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return self.experts(self.wo(x), ids, scores)


def step(model: nn.Module) -> list[torch.Tensor]:
    """The output and all gradients."""
    torch.manual_seed(0)
    x, ids, scores = torch.randn(64, 128), torch.randint(4, (64, 2)), torch.rand(64, 2)
    out = model(x.to(DEVICE), ids.to(DEVICE), scores.to(DEVICE))
    return [out.detach(), *torch.autograd.grad(out.square().mean(), [*model.parameters()])]


def test_experts_and_linears():
    """The same numbers as with the settings given at once."""
    model, config = Model(), Fp8FlowMoEConfig(save_h="fp8", recompute="none")
    want = copy.deepcopy(model)
    want.experts.configure(config)
    Fp8FlowLinear.convert(want.wo, config)
    quantize_(model, config, filter_fn=is_moe)
    assert model.experts.config is config and type(model.wo) is nn.Linear
    quantize_(model, config, filter_fn=linears("wo"))
    assert type(model.wo) is Fp8FlowLinear
    assert_equal(step(model), step(want))


@pytest.mark.parametrize("options", [{}, {"filter_fn": None}], ids=["default", "None"])
def test_without_a_filter_a_dense_model_has_fp8_linears_but_the_output(options):
    model = make_model(make_config(model="llama3", flavor="debugmodel"))
    quantize_(model, Fp8FlowMoEConfig(), **options)
    assert {name for name, m in model.named_modules() if type(m) is nn.Linear} == {"output"}
    assert sum(type(m) is Fp8FlowLinear for m in model.modules()) == 7 * 6


def test_other_configs_keep_torchaos_filter():
    model = nn.ModuleDict({"experts": RoutedExperts(2, 128, 128), "wo": nn.Linear(128, 128)})
    quantize_(model, Int8WeightOnlyConfig(version=2))
    assert type(model["wo"].weight) is not nn.Parameter


def test_other_settings_later():
    model = nn.ModuleList([RoutedExperts(2, 128, 128), nn.Linear(128, 128)])
    for config, layouts in ((Fp8FlowMoEConfig(cache_weights=True), "both"), (Fp8FlowMoEConfig(), "forward")):
        quantize_(model, config, filter_fn=is_moe)
        assert model[0].config is config and model[0].cache.layouts == layouts


CONFIG = Fp8FlowMoEConfig
REFUSALS = [
    (lambda: nn.Sequential(Fp8FlowLinear(128, 128)), CONFIG(), {}, "Sequential has no linear, but for its output"),
    (Model, CONFIG(), {}, "Model has MoE layers, and torchao's default filter"),
    (Model, CONFIG(), dict(filter_fn=linears("wo", "wx")), "linears has 'wx', which matches none of"),
    (Model, CONFIG(), dict(filter_fn=lambda module, _: isinstance(module, Model)), "only an nn.Linear without a bias"),
    (Model, CONFIG(filter_fqns=["layers.1."]), dict(filter_fn=is_moe), "filter_fqns has no effect on modules that"),
    (lambda: nn.Sequential(nn.Linear(4, 4)), CONFIG(), dict(filter_fn=is_moe), "Sequential has no experts"),
]


@pytest.mark.parametrize(("model", "config", "options", "said"), REFUSALS)
def test_refusals(model, config, options, said):
    with refused(said):
        quantize_(model(), config, **options)


@pytest.mark.parametrize(("linear", "said"), [
    (nn.Linear(128, 128), "without a bias"), (nn.Linear(128, 128, bias=False).half(), "bf16 or fp32"),
    (nn.Linear(128, 8, bias=False), "multiples of 128"),
])  # fmt: skip
def test_a_refusal_converts_nothing(linear, said):
    model = nn.Sequential(nn.Linear(128, 128, bias=False), linear)
    with refused(said):
        quantize_(model, Fp8FlowMoEConfig())
    with refused(said):
        Fp8FlowLinear.convert(linear, Fp8FlowMoEConfig())
    assert {type(module) for module in model} == {nn.Linear}


def test_adapters_of_an_ffn_are_refused():
    """An FP8 FFN reads the weights of its linears, and would not call what PEFT puts in their place."""
    model = make_model(make_config(), device="cpu")
    quantize_(model, Fp8FlowMoEConfig(), filter_fn=is_moe)
    ffn = next(module for module in model.modules() if isinstance(module, Fp8FFN))
    plain, adapted = ffn.w1, nn.Module()
    adapted.weight = plain.weight
    for changed in (adapted, nn.Linear(plain.in_features, plain.out_features)):
        ffn.w1 = changed
        with refused(f"{type(changed).__name__} adds nothing in an FP8 FFN"):
            ffn.run(torch.randn(4, plain.in_features))
