"""Ways to convert, overrides and refusals of the adapter for torchtitan 0.3, without training. What both releases have
is ``tests/test_titan_jobs.py``'s."""

import copy
import dataclasses
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torchtitan.components.lora import LoRAConverter as LinearLoRAConverter
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.config.configs import ParallelismConfig
from torchtitan.config.manager import ConfigManager
from torchtitan.config.override import apply_overrides, derive, override
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.experiments.graph_trainer.configs import to_graph_trainer_config
from torchtitan.experiments.graph_trainer.deepseek_v3 import model_registry as graph_model_registry
from torchtitan.models.common.feed_forward import FeedForward, SigmoidGatedFeedForward
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import GroupedExperts, MoE, RoutedExperts
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher
from torchtitan.models.deepseek_v3 import model_registry
from torchtitan.models.deepseek_v3.config_registry import deepseek_v3_debugmodel
from torchtitan.models.gpt_oss.config_registry import gpt_oss_debugmodel_flex
from torchtitan.trainer import Trainer

from experiments.reference import make_layer
from tests.layer import refused
from tests.torchtitan03.jobs import CONFIG, DOORS, FLAG, build, convert, make_job, moes, set_all, start
from titan_fp8moe import SAVED_OPS, Adapter, Lora, routed_experts
from titan_fp8moe.config import Fp8FlowMoEConfig
from titan_fp8moe.dispatch import auto
from titan_fp8moe.torchtitan03 import conversion, modules
from titan_fp8moe.torchtitan03.config_registry import with_fp8_flow
from titan_fp8moe.torchtitan03.converter import Fp8FlowConverter
from titan_fp8moe.torchtitan03.cpu import _grouped_mm
from titan_fp8moe.torchtitan03.lora import LoRAConverter
from titan_fp8moe.torchtitan03.metrics import Fp8FlowMetrics
from titan_fp8moe.torchtitan03.trainer import Fp8FlowTrainer
from titan_fp8moe.trainer import plan

EP2, TP2, PP2 = ({f"parallelism.{kind}_parallel_degree": 2} for kind in ("expert", "tensor", "pipeline"))
ALL = "5 MoE layers, 5 shared experts, 1 dense FFNs, 0 linears"


def left() -> dict[str, str]:
    """What the last conversion has left in bf16, and why."""
    found = (line.removeprefix("not in FP8: ").split(": ", 1) for line in plan.announced[1:])
    return {name: why for names_, why in found for name in names_.split(", ")}


def vendors(kind: type) -> type:
    """A class of another package, with a setting of its own."""

    class Vendors(kind):
        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config(kind.Config):
            mine: int = 7

    return Vendors


# --- ways to convert --------------------------------------------------------------------------------------------------


def test_options_of_the_command_line():
    args = ["--fp8_flow_moe.save_h", "fp8", "--fp8_flow_moe.filter_fqns", "layers.1.,shared_experts"]
    config = ConfigManager().parse_args([*CONFIG, *args, "activation-checkpoint:full"])
    assert type(config) is Fp8FlowTrainer.Config and isinstance(config.activation_checkpoint, FullAC.Config)
    assert config.fp8_flow_moe == Fp8FlowMoEConfig(save_h="fp8", filter_fqns=["layers.1.", "shared_experts"])
    assert config.to_dict()["fp8_flow_moe"]["save_h"] == "fp8"


def test_the_config_of_another_model():
    start(ConfigManager().parse_args([*CONFIG[:-1], "qwen3_30b_a3b", "--training.disable_cuda_graphs"]))
    assert plan.announced[0].startswith("48 MoE layers, 0 shared experts, 0 dense") and not left()


@pytest.mark.parametrize("door", DOORS)
def test_ways_to_convert(door: str):
    """All serve one trainer, whose job decides how. A copy made before serves another."""
    job = make_job(door=door)
    another, override_config = copy.deepcopy(job), job.override
    start(job).verify_module_protocol()
    assert {*SAVED_OPS, torch.ops.aten.topk.default} <= job.activation_checkpoint.build(dump_folder="").get_save_ops()
    job.override = override_config  # which a Fp8FlowTrainer leaves as it is
    with refused("converts torchtitan's MoE, but layers.1.moe has a Fp8FlowMoE"):
        start(job)
    convert(another)


@pytest.mark.parametrize("how", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_claimed_config_can_be_copied(how: Any):
    """As launchers do that send it to other processes; a change of a field goes along."""
    job = make_job(door="converter", save_h="fp8")
    model = job.model_spec.model
    model.vocab_size = 77
    for _ in range(2):  # a copy of a copy too
        copied = how(model)
        assert type(copied).__qualname__ == type(model).__qualname__ and copied.vocab_size == 77
        assert copied.layers[1] is not model.layers[1]
        model = copied
    job.model_spec.model = model
    assert start(job).layers["1"].moe.routed_experts.config == Fp8FlowMoEConfig(save_h="fp8") and not left()


def test_own_trainers_keep_their_settings():
    """A config with the section stays open to other settings; another one is converted at once."""
    OwnFp8, Own = vendors(Fp8FlowTrainer), vendors(Trainer)
    config = derive(deepseek_v3_debugmodel(), OwnFp8.Config, mine=42)
    for fp8 in (Fp8FlowMoEConfig(save_h="fp8", filter_fqns=["layers.1."]), None):
        config = with_fp8_flow(config, fp8)
        assert (type(config)._owner, config.mine, config.fp8_flow_moe.save_h) == (OwnFp8, 42, "fp8")
        own = with_fp8_flow(derive(deepseek_v3_debugmodel(), Own.Config, mine=42), fp8)
        assert (type(own)._owner, own.mine) == (Own, 42)
        for job, claimed in ((config, []), (own, 5 * [fp8 or Fp8FlowMoEConfig()])):
            found = job.model_spec.model.traverse(conversion.Fp8FlowClaim.Config)
            assert [claim.settings for _, claim, *_ in found] == claimed


def test_a_claimed_model_in_another_config():
    """torchtitan's function for the graph trainer copies the fields, claims among them."""
    job = to_graph_trainer_config(make_job(door="converter"), graph_model_registry)
    start(set_all(job, {"training.disable_cuda_graphs": True}))
    assert plan.announced[0].startswith(ALL)


def test_whatever_cannot_attach_says_so(caplog):
    Metrics = vendors(MetricsProcessor)
    for config, kind in ((MetricsProcessor.Config(), Fp8FlowMetrics), (Metrics.Config(), Metrics)):
        job = convert(make_job({"metrics": config}, door="converter"))
        assert type(job.metrics) is kind.Config and ("are off" in caplog.text) == (kind is Metrics)
    job = make_job(door="converter")
    job.model_spec.model.update_from_config(config=SimpleNamespace(parallelism=ParallelismConfig()))  # a generator's
    moe = build(job).layers["2"].moe
    assert isinstance(moe, modules.Fp8FlowMoE)
    assert moe.routed_experts.inner_experts.in_fsdp  # FSDP may have work
    assert "SimpleNamespace is not a Trainer.Config: off are the checks of the job" in caplog.text


# --- overrides --------------------------------------------------------------------------------------------------------


def register_vendors(name: str, kind: type, fqns: list[str] | None = None) -> None:
    """The override ``vendor_NAME``: a class of another package in the place of ``kind``."""

    def replace(config: Any) -> Any:
        return derive(config, vendors(kind).Config)

    replace.__name__ = f"vendor_{name}"
    override(target=kind.Config, fqns=fqns)(replace)


register_vendors("moe", MoE, ["*layers.3.*"])
register_vendors("moes", MoE)
register_vendors("routed_experts", RoutedExperts)
register_vendors("experts", GroupedExperts)
register_vendors("dispatcher", AllToAllTokenDispatcher)
register_vendors("ffn", FeedForward)
register_vendors("linear", Linear, ["*layers.3.moe.shared_experts.w2", "*layers.0.feed_forward.w1"])


def overridden(job: Any, name: str) -> Any:
    job.override.imports = [name if "." in name else f"{__name__}.vendor_{name}"]
    return job


@pytest.mark.parametrize("name", ["moe", "moes", "routed_experts", "experts", "dispatcher"])
def test_an_override_of_experts_is_an_error(name: str):
    """Whatever part of a claimed layer it replaces; torchtitan refuses two overrides of one layer by itself."""
    with pytest.raises(ValueError, match="both claim node|an ancestor of"):
        convert(make_job({"override.imports": [f"{__name__}.vendor_{name}"]}, door="flag"))
    with pytest.raises(ValueError, match=r"layers.\d.moe has a .*Vendors; leave it in bf16.*override"):
        start(overridden(make_job(door="converter"), name))


@pytest.mark.parametrize(("name", "part"), [
    ("routed_experts", "routed_experts of a Fp8Flow"), ("experts", "inner_experts of a Fp8Flow"),
    ("ffn", "shared_experts of a Fp8Flow"), ("linear", "w[12] of a Fp8Flow"),
    (None, "layers.0.feed_forward after"),  # whose owner is torchtitan's: the first step finds it
])  # fmt: skip
def test_an_override_after_the_conversion_is_an_error(name: str | None, part: str):
    """It would take the layer out of FP8, or not be called: a second trainer of one config, or a program's own call."""
    job = convert(make_job(door="converter"))
    layers = job.model_spec.model.layers
    if name is None:
        layers[0].feed_forward = derive(layers[0].feed_forward, FeedForward.Config)
    else:
        apply_overrides(overridden(job, name).override, job)
    with pytest.raises(ValueError, match=rf"\w+ has replaced {part}.*fp8_flow_moe had"):
        Fp8FlowMetrics._watch(SimpleNamespace(config=job.metrics, model_parts=[build(job)]))


def test_an_override_of_a_linear_leaves_its_ffn_in_bf16():
    """FP8 would multiply by the weight, whatever else the linear does. The experts of its layer are in FP8."""
    model = start(overridden(make_job(door="converter"), "linear"))
    assert left().keys() == {"layers.0.feed_forward", "layers.3.moe.shared_experts"}
    assert "Vendors" in left()["layers.3.moe.shared_experts"] and not model.layers["3"].moe.fp8_shared
    model = start(overridden(make_job(door="converter"), "torchtitan.overrides.fused_swiglu.fused_swiglu"))
    assert {*left().values()} == {"FusedSwiGLU of Linear, Linear, Linear"} and len(left()) == 6
    assert type(model.layers["1"].moe) is modules.Fp8FlowMoE


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_claims_that_met_no_job_are_refused():
    """torchtitan's RL trainer applies overrides to a model alone."""
    job = make_job(door="flag")
    apply_overrides(job.override, job.model_spec.model)
    with refused("has met no job", "name Fp8FlowConverter among", error=RuntimeError):
        build(job)


def test_two_settings_are_refused():
    with refused("was converted with", "configure one of the two"):
        make_job(door="converter", others=[Fp8FlowConverter.Config(save_h="fp8")])
    job = make_job(door="converter", others=[Fp8FlowConverter.Config()])
    job.override.imports = [(FLAG, {"save_h": "fp8"})]
    with refused("was converted with", "configure one of the two"):
        convert(job)
    job.override.imports = [(FLAG, {})]
    convert(job)
    assert plan.announced[0].startswith(ALL)
    with refused("named by two entries"):
        convert(make_job({"override.imports": [FLAG]}))


def test_a_model_without_moe_layers_is_refused():
    job = make_job()
    del job.model_spec.model.layers[1:]
    with refused("the model has no MoE layer; choose"):
        convert(job)


def test_ffns_under_tensor_parallelism():
    """Under EP too shared experts have rows, and so flags, of their own. Gated ones stay in bf16."""
    job = make_job(TP2 | EP2)
    moe = moes(job)[1]
    moe.shared_experts = derive(moe.shared_experts, SigmoidGatedFeedForward.Config, gate=moe.shared_experts.w1)
    convert(job, 2)
    ((name, reason),) = left().items()
    assert name == "layers.2.moe.shared_experts" and "tensor parallelism places the gate" in reason
    assert [moe.fp8_shared for moe in moes(job)] == 5 * [False] and "layers.1.moe.shared_experts" in job.metrics.watched
    job = convert(make_job(TP2), 2)
    assert [moe.fp8_shared for moe in moes(job)] == 5 * [True]
    assert not any("shared" in name for name in job.metrics.watched)


IN_ALL = dict(dispatch="symmetric", filter_fqns=["shared_experts"])
SYNCS, NOT_OURS = ["CUDA graphs exclude", "disable_cuda_graphs = true"], ["Unsupported token dispatcher: AllToAll"]
CUDA_GRAPHS: list[tuple] = [  # the way to convert, settings of the job and of fp8_flow_moe, what is said first and then
    ("section", {}, {}, [], []),
    ("section", EP2, {}, [], SYNCS),
    ("section", EP2, IN_ALL, [], []),
    ("section", EP2, IN_ALL | {"filter_fqns": ["layers.1."]}, [], NOT_OURS),
    ("section", PP2, {}, [], ["do not support pipeline parallelism yet"]),
    ("flag", EP2, IN_ALL, NOT_OURS, []),  # torchtitan checks before it looks for overrides
    ("converter", EP2, {}, [], SYNCS),
    ("converter", EP2, IN_ALL, [], []),
]


@pytest.mark.parametrize("room", ["", "1.25"])  # auto went over to symmetric memory in a job before
@pytest.mark.parametrize(("door", "settings", "fp8", "parsing", "converting"), CUDA_GRAPHS)
def test_cuda_graphs_need_dispatch_without_host_syncs(monkeypatch, room, door, settings, fp8, parsing, converting):
    """torchtitan refuses them for bf16 layers, and the job's checks for converted ones. Its check passes until layers
    are converted, since these have none of its dispatchers."""
    monkeypatch.setattr(auto._state, "room", room)
    job = make_job(settings | {"training.disable_cuda_graphs": False}, door=door, **fp8)
    with refused(*parsing):
        job._validate_cuda_graphs()
    if not parsing:
        with refused(*converting):
            convert(job, 2 if settings else 1)
            job._validate_cuda_graphs()


# --- LoRA -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("door", DOORS[1:])
@pytest.mark.parametrize(("converter", "experts"), [
    (LinearLoRAConverter, False), (LoRAConverter, False), (LoRAConverter, True),
])  # fmt: skip
def test_lora(door: str, converter: Any, experts: bool):
    """Its adapters train, in bf16 where FP8 would see their base alone."""
    adapters = converter.Config(rank=4, target_modules=["wo", "w2", *["inner_experts"] * experts])
    model = start(make_job(door=door, others=[adapters], linear_fqns=["attention.wo.", "attention.wkv_b."]))
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained and all("lora_" in name for name in trained)
    of_experts = {name for name in trained if name.startswith("layers.2.moe.routed")}
    prefix = "layers.2.moe.routed_experts.inner_experts.lora"
    assert of_experts == ({f"{prefix}_{f}.w{i}" for f in "ab" for i in (1, 2, 3)} if experts else set())
    attention = model.layers["2"].attention
    assert isinstance(attention.wo, modules.Fp8FlowLinear03) and attention.wo.lora_a.weight.shape[0] == 4
    assert type(attention.wkv_b) is modules.Fp8FlowLinear03 and not model.layers["2"].moe.fp8_shared
    assert type(model.layers["0"].feed_forward) is FeedForward
    assert {*left().values()} == {"FeedForward of Linear, LoRALinear, Linear"}
    with pytest.raises(ValueError, match="Fp8FlowConverter.Config|must be applied before LoRAConverter"):
        model_registry("debugmodel", converters=[LinearLoRAConverter.Config(), Fp8FlowConverter.Config()])


def test_adapters_run_beside_the_experts():
    """As :func:`titan_fp8moe.routed_experts` runs them, scaled by alpha / rank."""
    E, D, H, K = 4, 128, 256, 2
    inner = modules.Fp8FlowGroupedExperts.Config(dim=D, hidden_dim=H, num_experts=E, lora_rank=4, lora_alpha=8)
    dispatcher = modules.Fp8FlowDispatcher.Config()
    layer = modules.Fp8FlowRoutedExperts.Config(inner_experts=inner, token_dispatcher=dispatcher).build()
    experts = layer.inner_experts
    for param in layer.parameters():
        nn.init.normal_(param, std=0.1)
    x, scores, ids, _ = make_layer(60, D, H, E, K)
    lora = {n: Adapter(getattr(experts.lora_a, n), getattr(experts.lora_b, n), 2.0) for n in ("w1", "w2", "w3")}
    want = routed_experts(x, experts.w1_EFD, experts.w2_EDF, experts.w3_EFD, ids, scores, lora=Lora(**lora))
    assert torch.equal(layer(x[None], scores[None], ids[None], None)[0], want)
    experts.lora_a.init_states(), experts.lora_b.init_states()
    assert 0.5 < experts.lora_a.w2.abs().max() * H**0.5 <= 1 and not experts.lora_b.w2.any()


@pytest.mark.parametrize("door", DOORS[1:])
def test_adapters_of_experts_that_cannot_have_them(door: str):
    adapters = LoRAConverter.Config(target_modules=["inner_experts"])
    with refused("no adapters run beside bf16 experts: convert all MoE layers"):
        start(make_job(door=door, others=[adapters], filter_fqns=["layers.1."]))
    with refused("set parallelism.expert_parallel_degree > 1"):
        convert(make_job(TP2, door=door, others=[adapters]), 2)
    with refused("inner_experts is a GptOssGroupedExperts, beside which no adapters"):
        LoRAConverter.Config().build().convert(gpt_oss_debugmodel_flex().model_spec.model)


# --- numbers ----------------------------------------------------------------------------------------------------------


def test_products_in_float32_are_those_of_bf16():
    """The same operands, and one rounding of the result."""
    x, w = torch.randn(48, 128).bfloat16().requires_grad_(), torch.randn(3, 64, 128).bfloat16().requires_grad_()
    offs = torch.tensor([8, 8, 48], dtype=torch.int32)
    results = []
    for y in (_grouped_mm(None, A=x, B_t=w.mT, offs=offs), torch._grouped_mm(x, w.mT, offs=offs)):
        results.append((y, *torch.autograd.grad(y.float().square().sum(), (x, w))))
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=2**-7, atol=2**-7 * float(want.detach().abs().max()))
