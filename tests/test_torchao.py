"""torchao's ``quantize_`` with this package's config: what it converts, and its errors."""

import pytest
from torch import nn
from torchao.quantization import Int8WeightOnlyConfig, quantize_

from tests.jobs import make_config, make_model
from tests.layer import refused
from titan_fp8moe import Fp8FlowLinear, Fp8FlowMoEConfig, RoutedExperts
from titan_fp8moe.torchao import is_moe, linears


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.wo = nn.Linear(128, 128, bias=False)
        self.experts = RoutedExperts(4, 128, 128)


def test_experts_and_linears():
    model, config = Model(), Fp8FlowMoEConfig(save_h="fp8", recompute="none")
    quantize_(model, config, filter_fn=is_moe)
    assert model.experts.config is config and type(model.wo) is nn.Linear
    quantize_(model, config, filter_fn=linears("wo"))
    assert type(model.wo) is Fp8FlowLinear and model.wo.config is config


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


PLAIN = nn.Linear(128, 128, bias=False)
REFUSALS = [
    (lambda: nn.Sequential(Fp8FlowLinear(128, 128)), {}, {}, "Sequential has no linear, but for its output"),
    (Model, {}, {}, "Model has MoE layers, and torchao's default filter"),
    (Model, {}, dict(filter_fn=linears("wo", "wx")), "linears has 'wx', which matches none of"),
    (Model, {}, dict(filter_fn=lambda module, _: isinstance(module, Model)), "only an nn.Linear without a bias"),
    (Model, dict(filter_fqns=["layers.1."]), dict(filter_fn=is_moe), "filter_fqns has no effect on modules that"),
    (lambda: nn.Sequential(PLAIN), {}, dict(filter_fn=is_moe), "Sequential has no experts"),
    (lambda: nn.Sequential(PLAIN, nn.Linear(128, 128)), {}, {}, "without a bias"),
    (lambda: nn.Sequential(PLAIN, nn.Linear(128, 128, bias=False).half()), {}, {}, "bf16 or fp32"),
    (lambda: nn.Sequential(PLAIN, nn.Linear(128, 8, bias=False)), {}, {}, "multiples of 128"),
]


@pytest.mark.parametrize(("make", "settings", "options", "said"), REFUSALS)
def test_a_refusal_converts_nothing(make, settings, options, said):
    model = make()
    before = [type(module) for module in model.modules()]
    with refused(said):
        quantize_(model, Fp8FlowMoEConfig(**settings), **options)
    assert [type(module) for module in model.modules()] == before
