"""torchao's ``quantize_`` with this package's config: what it converts, that it is the converter, and its errors."""

import copy

import pytest
import torch
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.quantization import quantize_
from torchtitan.config import ConfigManager
from torchtitan.distributed import ParallelDims
from torchtitan.models.moe.moe import GroupedExperts, MoE, MoEArgs
from torchtitan.protocols.model_converter import build_model_converters
from torchtitan.protocols.train_spec import get_train_spec

import titan_fp8moe.torchtitan  # noqa: F401  registers the flavor `tiny`
from tests.layer import DEVICE
from titan_fp8moe import Fp8FlowLinear, Fp8FlowMoEConfig, RoutedExperts
from titan_fp8moe.torchao import is_moe, linears
from titan_fp8moe.torchtitan.modules import Fp8FlowFeedForward, Fp8FlowMoE

ONE_PROCESS = ParallelDims(dp_replicate=1, dp_shard=1, cp=1, tp=1, pp=1, ep=1, etp=1, world_size=1)


def make_model(*flags: str, convert: bool = False) -> nn.Module:
    config = ConfigManager().parse_args(["--job.config_file", "train_configs/debug.toml", *flags])
    spec = get_train_spec("deepseek_v3")
    args = copy.deepcopy(spec.model_args["tiny"])
    args.update_from_config(config)
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = spec.model_cls(args)
    if convert:
        build_model_converters(config, ONE_PROCESS).convert(model)
    with torch.no_grad():
        model.init_weights(torch.device(DEVICE))
    return model


def step(model: nn.Module) -> dict[str, torch.Tensor]:
    """Logits and all gradients."""
    logits = model(torch.arange(64, device=DEVICE).view(2, 32) * 31 % 2048)
    model.zero_grad()
    logits.square().mean().backward()
    return {"logits": logits.detach()} | {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("setting", ["filter_fqns=shared_experts", "linear_fqns=attention.wo.", ""])
def test_same_as_the_converter(setting):
    name, _, value = setting.partition("=")
    flags = [f"--fp8_flow_moe.{setting}"] if setting else []
    want = step(make_model(*flags, "--fp8_flow_moe.save_h=fp8", convert=True))
    model = make_model()
    plain = step(model)
    filtered = {name: [value]} if name == "filter_fqns" else {}
    quantize_(model, Fp8FlowMoEConfig(save_h="fp8", **filtered), filter_fn=is_moe)
    layers = [module for module in model.modules() if isinstance(module, MoE)]
    assert len(layers) == 2 and all(type(layer) is Fp8FlowMoE for layer in layers)
    assert isinstance(model.layers["0"].feed_forward, Fp8FlowFeedForward)
    if name == "linear_fqns":
        plain = step(model)
        quantize_(model, Fp8FlowMoEConfig(), filter_fn=linears(value))
        assert type(model.layers["1"].attention.wo) is Fp8FlowLinear and type(model.output) is nn.Linear
    got = step(model)
    assert got.keys() == want.keys() and not torch.equal(got["logits"], plain["logits"])
    assert all(torch.equal(got[name], value) for name, value in want.items())


def test_some_layers():
    model = make_model()
    quantize_(model, Fp8FlowMoEConfig(), filter_fn=lambda m, name: is_moe(m, name) and "layers.1." not in name)
    assert type(model.layers["1"].moe) is MoE and type(model.layers["2"].moe) is Fp8FlowMoE


def test_module_of_experts():
    model = nn.ModuleList([RoutedExperts(2, 128, 128), nn.Linear(128, 128)])
    config = Fp8FlowMoEConfig(recompute="experts", cache_weights=True)
    quantize_(model, config, filter_fn=is_moe)
    assert model[0].config is config and model[0].cache.layouts == "both"
    quantize_(model, Fp8FlowMoEConfig(), filter_fn=is_moe)
    assert model[0].config == Fp8FlowMoEConfig() and model[0].cache.layouts == "forward"


@pytest.mark.parametrize("experts_first", [True, False])
def test_with_torchaos_float8_linears(experts_first):
    """torchao's training of linears serves attention; the two do not meet, in either order."""

    def linears(model):
        config = Float8LinearConfig(emulate=True)
        convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: "attention.wo" in name)

    def experts(model):
        quantize_(model, Fp8FlowMoEConfig(), filter_fn=is_moe)

    model, only_linears = make_model(), make_model()
    for convert in (experts, linears) if experts_first else (linears, experts):
        convert(model)
    linears(only_linears)
    assert type(model.layers["1"].attention.wo).__name__ == "Float8Linear"
    assert type(model.layers["1"].moe) is Fp8FlowMoE and model.layers["1"].moe.fp8_shared
    got, other = step(model), step(only_linears)
    assert all(value.isfinite().all() for value in got.values())
    assert not torch.equal(got["logits"], other["logits"])


def test_no_match_is_an_error():
    with pytest.raises(ValueError, match="Sequential has no experts"):
        quantize_(nn.Sequential(nn.Linear(4, 4)), Fp8FlowMoEConfig(), filter_fn=is_moe)


@pytest.mark.parametrize(
    ("filter_fn", "message"),
    [
        (None, "call quantize_ with filter_fn = is_moe"),
        (linears("attention.wo.", "attention.wx"), "'attention.wx', which matches no linear"),
        (linears("router.gate."), "out_features = 8 must be multiples of 128"),
        (lambda module, _: isinstance(module, GroupedExperts), "cannot convert GroupedExperts"),
    ],
)
def test_other_filters_are_named(filter_fn, message):
    options = {} if filter_fn is None else {"filter_fn": filter_fn}
    with pytest.raises(ValueError, match=message):
        quantize_(make_model(), Fp8FlowMoEConfig(), **options)


@pytest.mark.parametrize(
    ("layer", "config", "message"),
    [
        (dict(dim=200), {}, "model dim 200"),
        (dict(hidden_dim=72), {}, "hidden dim 72"),
        ({}, dict(filter_fqns=["layers.1."]), "the config names 'layers.1.'"),
        ({}, dict(linear_fqns=["wo."]), "the config names 'wo.'"),
        ({}, dict(statistics_every=5), "statistics_every has no effect"),
    ],
)
def test_errors(layer, config, message):
    moe = MoE(MoEArgs(num_experts=2), **(dict(dim=128, hidden_dim=128) | layer))
    with pytest.raises(ValueError, match=message):
        quantize_(nn.ModuleList([moe]), Fp8FlowMoEConfig(**config), filter_fn=is_moe)


def test_twice_is_an_error():
    model = nn.ModuleList([MoE(MoEArgs(num_experts=2), dim=128, hidden_dim=128)])
    quantize_(model, Fp8FlowMoEConfig(), filter_fn=is_moe)
    with pytest.raises(ValueError, match="the layer is a Fp8FlowMoE"):
        quantize_(model, Fp8FlowMoEConfig(), filter_fn=is_moe)
