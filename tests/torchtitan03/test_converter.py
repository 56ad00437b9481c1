"""Options, plans and refusals of the adapter for torchtitan 0.3, without training."""

import copy
import dataclasses
import logging
import pickle
import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torchtitan.components.lora import LoRAConverter as LinearLoRAConverter
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.config.configs import ParallelismConfig
from torchtitan.config.manager import ConfigManager
from torchtitan.config.override import apply_overrides, derive, override
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.experiments.graph_trainer.configs import to_graph_trainer_config
from torchtitan.experiments.graph_trainer.deepseek_v3 import model_registry as graph_model_registry
from torchtitan.models.common.attention import VarlenAttention
from torchtitan.models.common.feed_forward import FeedForward, SigmoidGatedFeedForward
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import GroupedExperts, MoE, RoutedExperts
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher, DeepEPTokenDispatcher
from torchtitan.models.deepseek_v3 import model_registry
from torchtitan.models.deepseek_v3.config_registry import deepseek_v3_debugmodel
from torchtitan.models.gpt_oss import moe as gpt_oss_moe
from torchtitan.models.gpt_oss.config_registry import gpt_oss_debugmodel_flex
from torchtitan.trainer import Trainer

from experiments.reference import make_layer
from titan_fp8moe import SAVED_OPS, Adapter, Lora, routed_experts
from titan_fp8moe.activations import ACTIVATIONS
from titan_fp8moe.config import Fp8FlowMoEConfig
from titan_fp8moe.dispatch import auto
from titan_fp8moe.torchtitan03 import conversion, parallel
from titan_fp8moe.torchtitan03.config_registry import with_fp8_flow
from titan_fp8moe.torchtitan03.converter import Fp8FlowConverter
from titan_fp8moe.torchtitan03.cpu import _grouped_mm
from titan_fp8moe.torchtitan03.lora import LoRAConverter
from titan_fp8moe.torchtitan03.metrics import Fp8FlowMetrics
from titan_fp8moe.torchtitan03.modules import (
    Fp8FlowDispatcher,
    Fp8FlowFeedForward,
    Fp8FlowGroupedExperts,
    Fp8FlowLinear03,
    Fp8FlowMoE,
    Fp8FlowRoutedExperts,
)
from titan_fp8moe.torchtitan03.trainer import Fp8FlowTrainer, overriding
from titan_fp8moe.trainer import cpu
from titan_fp8moe.trainer.plan import MOE, Part, announce

CONFIG = ["--module", "titan_fp8moe.torchtitan03", "--config", "deepseek_v3_debugmodel"]


FLAG = "titan_fp8moe.torchtitan03.fp8_flow_moe"


def make_job(change: Callable[[Any], None] = lambda job: None, **fp8: Any) -> Fp8FlowTrainer.Config:
    job = with_fp8_flow(deepseek_v3_debugmodel(), Fp8FlowMoEConfig(**fp8))
    job.training.disable_cuda_graphs = True
    change(job)
    return job


def flagged(*imports: Any, converters: list[Any] | None = None, **fp8: Any) -> Trainer.Config:
    """torchtitan's own job with the override of this package, and with others."""
    job = deepseek_v3_debugmodel()
    job.training.disable_cuda_graphs = True
    job.model_spec = model_registry("debugmodel", converters=converters or [])
    job.override.imports = [*imports, (FLAG, fp8)]
    return job


def convert(job: Trainer.Config, ranks: int = 1) -> list[Part]:
    """Does what a trainer does before it builds the model. Returns the plan."""
    if isinstance(job, Fp8FlowTrainer.Config):
        job.override = overriding(job).override
    with patch.dict("os.environ", WORLD_SIZE=str(ranks)), patch.object(conversion, "announce") as announced:
        announced.side_effect = announce
        job.model_spec.model.update_from_config(config=job)
        if job.override.imports:
            apply_overrides(job.override, job)
        job._validate_cuda_graphs()
    return announced.call_args.args[0] if announced.called else []


def start(job: Trainer.Config) -> torch.nn.Module:
    convert(job)
    return build(job)


DOORS = "section", "flag", "converter"


def through(door: str, converters: Sequence[Any] = (), **fp8: Any) -> Trainer.Config:
    """A job by one of the ways to convert its model."""
    if door == "section":
        return make_job(**fp8)
    return flagged(converters=[*converters], **fp8) if door == "flag" else by_registry(*converters, **fp8)


def test_options_of_the_command_line():
    args = ["--fp8_flow_moe.save_h", "fp8", "--fp8_flow_moe.filter_fqns", "layers.1.,shared_experts"]
    config = ConfigManager().parse_args([*CONFIG, *args, "activation-checkpoint:full"])
    assert type(config) is Fp8FlowTrainer.Config and isinstance(config.activation_checkpoint, FullAC.Config)
    assert config.fp8_flow_moe == Fp8FlowMoEConfig(save_h="fp8", filter_fqns=["layers.1.", "shared_experts"])
    assert config.to_dict()["fp8_flow_moe"]["save_h"] == "fp8"


@pytest.mark.parametrize("fast", [True, False])
def test_a_rank_on_a_cpu_without_fast_bf16_computes_in_float32(monkeypatch, fast: bool):
    """In the configs of torchtitan, unless the command line names a precision."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.distributed, "is_torchelastic_launched", lambda: True)
    monkeypatch.setattr(cpu, "has_fast_bf16", lambda: fast)
    cpu.compute_dtype.cache_clear()
    try:
        default = ConfigManager().parse_args(CONFIG)
        named = ConfigManager().parse_args([*CONFIG, "--training.mixed_precision_param=bfloat16"])
    finally:
        cpu.compute_dtype.cache_clear()
    assert default.training.mixed_precision_param == ("bfloat16" if fast else "float32")
    assert named.training.mixed_precision_param == "bfloat16"


def test_products_in_float32_are_those_of_bf16():
    """The same operands, and one rounding of the result."""
    x, w = torch.randn(48, 128).bfloat16().requires_grad_(), torch.randn(3, 64, 128).bfloat16().requires_grad_()
    offs = torch.tensor([8, 8, 48], dtype=torch.int32)
    results = []
    for product in (lambda: _grouped_mm(None, A=x, B_t=w.mT, offs=offs), lambda: torch._grouped_mm(x, w.mT, offs=offs)):
        y = product()
        y.float().square().sum().backward()
        results.append((y, x.grad, w.grad))
        x.grad = w.grad = None
    for got, want in zip(*results, strict=True):
        assert got.dtype == torch.bfloat16
        torch.testing.assert_close(got, want, rtol=2**-7, atol=2**-7 * float(want.detach().abs().max()))


@pytest.mark.parametrize("door", DOORS)
def test_what_is_converted(caplog, door: str):
    job = through(door, filter_fqns=["layers.1.", "layers.2.moe.shared_experts"], linear_fqns=["attention.wo."])
    before = [(name, tuple(p.shape)) for name, p in build(deepseek_v3_debugmodel()).state_dict().items()]
    with caplog.at_level(logging.INFO):
        convert(job)
    assert "4 MoE layers, 3 shared experts, 1 dense FFNs, 6 linears in FP8" in caplog.text
    assert "fp8_flow_moe.filter_fqns" in caplog.text
    model = build(job)
    model.verify_module_protocol()
    assert [(name, tuple(p.shape)) for name, p in model.state_dict().items()] == before
    kinds = {name: type(module) for name, module in model.named_modules()}
    assert kinds["layers.0.feed_forward"] is kinds["layers.3.moe.shared_experts"] is Fp8FlowFeedForward
    assert kinds["layers.2.moe"] is Fp8FlowMoE and kinds["layers.0.attention.wo"] is Fp8FlowLinear03
    assert kinds["layers.1.moe"] is not Fp8FlowMoE and kinds["layers.1.moe.shared_experts"] is not Fp8FlowFeedForward
    assert [model.layers[i].moe.fp8_shared for i in "23"] == [False, True]


@pytest.mark.parametrize("name, layers", [("qwen3_30b_a3b", 48), ("gpt_oss_120b", 36)])
def test_the_configs_of_other_models(name: str, layers: int):
    config = ConfigManager().parse_args(["--module", "titan_fp8moe.torchtitan03", "--config", name])
    before = [(name, tuple(p.shape)) for name, p in build(config).state_dict().items()]
    config.training.disable_cuda_graphs = True
    plan = convert(config)
    assert [(part.kind, part.reason) for part in plan] == layers * [(MOE, None)]
    assert [(name, tuple(p.shape)) for name, p in build(config).state_dict().items()] == before


def test_a_model_names_the_package_that_it_lacks(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision", None)
    for config in ("kimi_k2_5", "qwen35_35b_a3b"):
        with pytest.raises(ImportError, match="torchvision|fla"):
            ConfigManager().parse_args(["--module", "titan_fp8moe.torchtitan03", "--config", config])


def test_the_activation_of_gpt_oss():
    job = with_fp8_flow(gpt_oss_debugmodel_flex())
    job.training.disable_cuda_graphs = True
    del job.model_spec.model.layers[1:]
    job.model_spec.model.layers[0].moe.routed_experts.inner_experts.swiglu_limit = 5.0
    convert(job)
    spec = build(job).layers["0"].moe.routed_experts.inner_experts.expert
    gate, up = 8 * torch.randn(2, 64, 32)
    got = ACTIVATIONS[spec.activation].forward(gate, up, *spec.parameters)
    torch.testing.assert_close(got, gpt_oss_moe.swiglu(torch.stack((gate, up), -1).flatten(1), limit=5.0))
    assert spec.interleaved


def build(job: Any) -> torch.nn.Module:
    with torch.device("meta"):
        return job.model_spec.model.build()


@pytest.mark.parametrize("how", ["pickle", "deepcopy"])
def test_a_claimed_config_can_be_copied(how: str):
    """As launchers do that send it to other processes; a change of a field goes along."""
    job = by_registry(save_h="fp8")
    model = job.model_spec.model
    model.vocab_size = 77
    for _ in range(2):  # a copy of a copy too
        copied = pickle.loads(pickle.dumps(model)) if how == "pickle" else copy.deepcopy(model)
        assert type(copied).__qualname__ == type(model).__qualname__ and copied.vocab_size == 77
        assert copied.layers[1] is not model.layers[1]
        model = copied
    job.model_spec.model = model
    plan = convert(job)
    assert len(plan) == 11 and build(job).layers["1"].moe.routed_experts.config == Fp8FlowMoEConfig(save_h="fp8")


def vendors(kind: type) -> type:
    """A class of another package in the place of ``kind``."""

    class Vendors(kind):
        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config(kind.Config):
            pass

    return Vendors


VendorMoE, VendorRoutedExperts, VendorExperts = map(vendors, (MoE, RoutedExperts, GroupedExperts))
VendorDispatcher, VendorLinear, VendorFFN = map(vendors, (AllToAllTokenDispatcher, Linear, FeedForward))


@override(target=MoE.Config, fqns=["*layers.3.*"])
def vendor_moe(config: Any) -> Any:
    return derive(config, VendorMoE.Config)


@override(target=MoE.Config)
def vendor_moes(config: Any) -> Any:
    return derive(config, VendorMoE.Config)


@override(target=RoutedExperts.Config)
def vendor_routed_experts(config: Any) -> Any:
    return derive(config, VendorRoutedExperts.Config)


@override(target=GroupedExperts.Config)
def vendor_experts(config: Any) -> Any:
    return derive(config, VendorExperts.Config)


@override(target=AllToAllTokenDispatcher.Config)
def vendor_dispatcher(config: Any) -> Any:
    return derive(config, VendorDispatcher.Config)


@override(target=Linear.Config, fqns=["*layers.3.moe.shared_experts.w2", "*layers.0.feed_forward.w1"])
def vendor_linear(config: Any) -> Any:
    return derive(config, VendorLinear.Config)


@pytest.mark.parametrize("name", ["moe", "moes", "routed_experts", "experts", "dispatcher"])
def test_an_override_of_experts_is_an_error(name: str):
    """Whatever part of a claimed layer it replaces; torchtitan refuses two overrides of one layer by itself."""
    vendor = f"{__name__}.vendor_{name}"
    with pytest.raises(ValueError, match="both claim node|an ancestor of"):
        convert(flagged(vendor))
    job = by_registry()
    job.override.imports = [vendor]
    with pytest.raises(ValueError, match=r"layers.\d.moe has a .*Vendors; leave it in bf16.*override"):
        start(job)


@override(target=FeedForward.Config)
def vendor_ffn(config: Any) -> Any:
    return derive(config, VendorFFN.Config)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("routed_experts", "routed_experts"),
        ("experts", "inner_experts"),
        ("ffn", "shared_experts"),
        ("linear", "w[12]"),
    ],
)
def test_an_override_after_the_conversion_is_an_error(name: str, part: str):
    """It would take the layer out of FP8, or not be called: a second trainer of one config, or a program's own call."""
    job = by_registry()
    convert(job)
    job.override.imports = [f"{__name__}.vendor_{name}"]
    apply_overrides(job.override, job)
    with pytest.raises(ValueError, match=rf"Vendors has replaced {part} of a Fp8Flow\w+ after fp8_flow_moe had conv"):
        build(job)


@pytest.mark.parametrize("name", ["layers.0.feed_forward", "layers.3.moe"])
def test_an_override_of_a_whole_part_after_the_conversion_is_an_error(name: str):
    """Of a dense FFN or a MoE layer, whose owner is torchtitan's: the first step finds it."""
    job = by_registry()
    convert(job)
    model = job.model_spec.model
    layer, part = model.layers[int(name.split(".")[1])], name.split(".")[2]
    if part == "moe":
        job.override.imports = [f"{__name__}.vendor_moe"]
        apply_overrides(job.override, job)
    else:
        layer.feed_forward = derive(layer.feed_forward, FeedForward.Config)
    metrics = SimpleNamespace(config=job.metrics, model_parts=[build(job)])
    with pytest.raises(ValueError, match=rf"\w+ has replaced {name} after fp8_flow_moe had"):
        Fp8FlowMetrics._watch(metrics)


def test_an_override_of_a_linear_leaves_its_ffn_in_bf16():
    """FP8 would multiply by the weight, whatever else the linear does."""
    job = by_registry()
    job.override.imports = [f"{__name__}.vendor_linear"]
    left = {part.name: part.reason for part in convert(job) if part.reason is not None}
    assert left.keys() == {"layers.0.feed_forward", "layers.3.moe.shared_experts"}
    assert left["layers.3.moe.shared_experts"] == "FeedForward of Linear, vendors.<locals>.Vendors, Linear"
    build(job)


def test_attention_of_other_kinds():
    """torchtitan's fused MLA by its own override, whose linears are converted too, and varlen."""
    job = flagged("torchtitan.overrides.fused_mla.fused_mla", linear_fqns=["attention.wo."])
    for layer in job.model_spec.model.layers[1:]:
        layer.attention.inner_attention = VarlenAttention.Config()
    model = start(job)
    assert {type(layer.attention).__name__ for layer in model.layers.values()} == {"FusedMLAAttention"}
    assert {type(layer.attention.wo) for layer in model.layers.values()} == {Fp8FlowLinear03}
    assert isinstance(model.layers["1"].attention.inner_attention, VarlenAttention)
    assert isinstance(model.layers["1"].moe, Fp8FlowMoE)


def test_claims_that_met_no_job_are_refused():
    """torchtitan's RL trainer applies overrides to a model alone."""
    job = flagged()
    apply_overrides(job.override, job.model_spec.model)
    with pytest.raises(RuntimeError, match="has met no job.*name Fp8FlowConverter among"):
        build(job)


def test_two_settings_are_refused():
    with pytest.raises(ValueError, match="was converted with .*configure one of the two"):
        by_registry(Fp8FlowConverter.Config(save_h="fp8"))
    job = by_registry(Fp8FlowConverter.Config())
    job.override.imports = [(FLAG, {"save_h": "fp8"})]
    with pytest.raises(ValueError, match="was converted with .*configure one of the two"):
        convert(job)
    job.override.imports = [(FLAG, {})]
    assert len(convert(job)) == 11
    job = make_job()
    job.override.imports = [FLAG]
    with pytest.raises(ValueError, match="named by two entries"):
        convert(job)


@pytest.mark.parametrize("door", DOORS)
def test_selective_checkpointing_keeps_the_experts_results(door: str):
    job = through(door)
    assert type(job.activation_checkpoint) is SelectiveAC.Config
    convert(job)
    kept = job.activation_checkpoint.build(dump_folder="").get_save_ops()
    assert {*SAVED_OPS, torch.ops.aten.topk.default} <= kept


def set_(path: str, value: Any) -> Callable[[Any], None]:
    def change(job: Any) -> None:
        *parts, name = path.split(".")
        for part in parts:
            job = getattr(job, part)
        setattr(job, name, value)

    return change


def each_moe(change: Callable[[Any], None]) -> Callable[[Any], None]:
    return lambda job: [change(layer.moe) for layer in job.model_spec.model.layers if layer.moe is not None]


def deep_ep(layer: Any) -> None:
    routed = layer.routed_experts
    routed.token_dispatcher = derive(routed.token_dispatcher, DeepEPTokenDispatcher.Config)


def both(*changes: Callable[[Any], None]) -> Callable[[Any], None]:
    return lambda job: [change(job) for change in changes]


class OwnPolicy(SelectiveAC):
    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        pass

    def get_save_ops(self) -> set:
        return {torch.ops.aten.mm.default}


COMPILE = set_("compile.enable", True)
PP2 = set_("parallelism.pipeline_parallel_degree", 2)
EP2 = set_("parallelism.expert_parallel_degree", 2)
TP2 = set_("parallelism.tensor_parallel_degree", 2)
GRAPHS = set_("training.disable_cuda_graphs", False)
NOTHING = both()
GATHER, STATISTICS = {"fp8_all_gather": True}, {"statistics_every": 5}


@pytest.mark.parametrize(
    "change, fp8, ranks, said",
    [
        (both(GRAPHS, set_("metrics.enable_tensorboard", True)), STATISTICS, 1, "training.disable_cuda_graphs = true"),
        (COMPILE, GATHER, 1, "fp8_all_gather works outside of graphs"),
        (set_("activation_checkpoint", OwnPolicy.Config()), {}, 1, "OwnPolicy recomputes the experts"),
        (set_("training.enable_cpu_offload", True), GATHER, 1, "training.enable_cpu_offload stores"),
        (set_("parallelism.spmd_backend", "full_dtensor"), {}, 1, "use 'spmd_types' or 'partial_dtensor'"),
        (both(PP2, set_("parallelism.pipeline_parallel_schedule", "ZBVZeroBubble")), {}, 2, "may split the backward"),
        (both(PP2, set_("parallelism.pipeline_parallel_schedule_csv", "a.csv")), {}, 2, "schedule_csv = 'a.csv'"),
        (set_("parallelism.expert_parallel_degree", 3), {}, 4, "degree = 3 does not divide"),
        (set_("parallelism.expert_parallel_degree", 16), {}, 16, "8 experts do not divide over 16"),
        (set_("parallelism.data_parallel_shard_degree", 16), GATHER, 16, "8 experts do not divide"),
        (both(EP2, each_moe(deep_ep)), {}, 2, "layers.1.moe has a DeepEPTokenDispatcher; leave it in bf16.*backend"),
        (each_moe(set_("routed_experts.inner_experts.dim", 200)), {}, 1, "model dim 200 is not a multiple"),
        (
            lambda job: job.model_spec.model.layers.__delitem__(slice(1, None)),
            {},
            1,
            "the model has no MoE layer; choose",
        ),
        (NOTHING, {"filter_fqns": ["layers.77."]}, 1, "matches none of layers.1.moe"),
        (NOTHING, {"linear_fqns": ["attention.wkv_a."]}, 1, "attention.wkv_a is 576x256"),
        (
            set_("parallelism.tensor_parallel_degree", 4),
            {"linear_fqns": ["attention.wo."]},
            4,
            "attention.wo is 256x2048 over 4 tensor-parallel ranks",
        ),
        (both(set_("validator.enable", True), set_("parallelism.context_parallel_degree", 2)), {}, 2, "is untested"),
        (EP2, {"dispatch": "symmetric"}, 2, "needs all expert-parallel ranks on one node"),
    ],
)
def test_jobs_that_cannot_work_are_refused(monkeypatch, change, fp8, ranks, said):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    with pytest.raises(ValueError, match=said):
        convert(make_job(change, **fp8), ranks)


def test_ffns_under_tensor_parallelism():
    """Under EP too shared experts have rows, and so flags, of their own. Gated ones stay in bf16."""

    def gate(job: Any) -> None:
        moe = moe_of(job)
        moe.shared_experts = derive(moe.shared_experts, SigmoidGatedFeedForward.Config, gate=moe.shared_experts.w1)

    job = make_job(both(set_("parallelism.tensor_parallel_degree", 2), EP2, gate))
    (part,) = [part for part in convert(job, 2) if part.reason is not None]
    assert part.name == "layers.2.moe.shared_experts" and "tensor parallelism places the gate" in part.reason
    assert [moe.fp8_shared for moe in moes(job)] == 5 * [False] and "layers.1.moe.shared_experts" in job.metrics.watched
    job = make_job(set_("parallelism.tensor_parallel_degree", 2))
    convert(job, 2)
    assert [moe.fp8_shared for moe in moes(job)] == 5 * [True]
    assert not any("shared" in name for name in job.metrics.watched)


def moes(job: Any) -> list[Any]:
    return [layer.moe for layer in job.model_spec.model.layers if layer.moe is not None]


def moe_of(job: Any) -> Any:
    return job.model_spec.model.layers[2].moe


def test_cuda_graphs_need_dispatch_without_host_syncs():
    """torchtitan refuses them for bf16 layers, and the job's checks for converted ones."""
    job = make_job(GRAPHS)
    assert all(part.reason is None for part in convert(job))
    for room in ("", "1.25"):  # auto went over to symmetric memory in a job before
        auto._state.room = room
        with pytest.raises(ValueError, match="disable_cuda_graphs.*symmetric"):
            convert(make_job(both(EP2, GRAPHS)), 2)
    job = make_job(both(EP2, GRAPHS), dispatch="symmetric", filter_fqns=["shared_experts"])
    job._validate_cuda_graphs()  # as torchtitan does when it parses
    assert [part.reason is None for part in convert(job, 2) if part.kind == MOE] == 5 * [True]
    job._validate_cuda_graphs()  # again, of the converted model
    with pytest.raises(ValueError, match="Unsupported token dispatcher: AllToAllTokenDispatcher"):
        convert(make_job(both(EP2, GRAPHS), dispatch="symmetric", filter_fqns=["layers.1."]), 2)
    with pytest.raises(ValueError, match="do not support pipeline parallelism yet"):
        convert(make_job(both(PP2, GRAPHS)), 2)
    job = flagged(dispatch="symmetric")
    both(EP2, GRAPHS)(job)
    with pytest.raises(ValueError, match="Unsupported token dispatcher"):  # before torchtitan looks for overrides
        job._validate_cuda_graphs()


class Own(Trainer):
    """A user's trainer with a setting of its own."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        mine: int = 7


class OwnFp8(Fp8FlowTrainer):
    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(Fp8FlowTrainer.Config):
        mine: int = 7


def test_own_trainers_keep_their_settings():
    """A config with the section stays open to other settings; another one is converted at once."""
    config = derive(deepseek_v3_debugmodel(), OwnFp8.Config, mine=42)
    for fp8, save_h in ((Fp8FlowMoEConfig(save_h="fp8"), "fp8"), (None, "fp8")):
        config = with_fp8_flow(config, fp8)
        assert (type(config)._owner, config.mine, config.fp8_flow_moe.save_h) == (OwnFp8, 42, save_h)
        assert claims(config) == []
        own = with_fp8_flow(derive(deepseek_v3_debugmodel(), Own.Config, mine=42), fp8)
        assert (type(own)._owner, own.mine) == (Own, 42)
        assert [c.settings for c in claims(own)] == 5 * [fp8 or Fp8FlowMoEConfig()]


def claims(job: Any) -> list[Any]:
    return [config for _, config, *_ in job.model_spec.model.traverse(conversion.Fp8FlowClaim.Config)]


def by_registry(*converters: Any, **fp8: Any) -> Trainer.Config:
    job = deepseek_v3_debugmodel()
    job.training.disable_cuda_graphs = True
    job.model_spec = model_registry("debugmodel", converters=[Fp8FlowConverter.Config(**fp8), *converters])
    return job


def test_the_converter_has_all_settings():
    want = Fp8FlowMoEConfig(save_h="fp8", filter_fqns=["layers.1."], linear_fqns=["attention.wo."])
    assert [c.settings for c in claims(by_registry(**vars(want)))] == 5 * [want]
    with pytest.raises(ValueError, match="save_h is 'fp4'; set it to one of"):
        Fp8FlowConverter.Config(save_h="fp4")


@pytest.mark.parametrize("door", ["flag", "converter"])
@pytest.mark.parametrize(
    ("converter", "experts"), [(LinearLoRAConverter, False), (LoRAConverter, False), (LoRAConverter, True)]
)
def test_lora(door: str, converter: Any, experts: bool):
    """Its adapters train, in bf16 where FP8 would see their base alone."""
    targets = ["wo", "w2"]
    if experts:
        targets.append("inner_experts")
    job = through(
        door, [converter.Config(rank=4, target_modules=targets)], linear_fqns=["attention.wo.", "attention.wkv_b."]
    )
    plan = convert(job)
    model = build(job)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained and all("lora_" in name for name in trained)
    of_experts = {name for name in trained if ".layers.2.moe.routed" in f".{name}"}
    prefix = "layers.2.moe.routed_experts.inner_experts.lora"
    assert of_experts == ({f"{prefix}_{f}.w{i}" for f in "ab" for i in (1, 2, 3)} if experts else set())
    attention = model.layers["2"].attention
    assert isinstance(attention.wo, Fp8FlowLinear03) and attention.wo.lora_a.weight.shape[0] == 4
    assert type(attention.wkv_b) is Fp8FlowLinear03 and not model.layers["2"].moe.fp8_shared
    assert type(model.layers["0"].feed_forward) is FeedForward
    assert {part.reason for part in plan} == {None, "FeedForward of Linear, LoRALinear, Linear"}
    with pytest.raises(ValueError, match="Fp8FlowConverter.Config|must be applied before LoRAConverter"):
        model_registry("debugmodel", converters=[LinearLoRAConverter.Config(), Fp8FlowConverter.Config()])


def test_adapters_run_beside_the_experts():
    """As :func:`titan_fp8moe.routed_experts` runs them, scaled by alpha / rank."""
    E, D, H, K = 4, 128, 256, 2
    inner = Fp8FlowGroupedExperts.Config(dim=D, hidden_dim=H, num_experts=E, lora_rank=4, lora_alpha=8)
    layer = Fp8FlowRoutedExperts.Config(inner_experts=inner, token_dispatcher=Fp8FlowDispatcher.Config()).build()
    experts = layer.inner_experts
    for param in layer.parameters():
        torch.nn.init.normal_(param, std=0.1)
    x, scores, ids, _ = make_layer(60, D, H, E, K)
    names = ("w1", "w2", "w3")
    lora = Lora(**{n: Adapter(getattr(experts.lora_a, n), getattr(experts.lora_b, n), 2.0) for n in names})
    want = routed_experts(x, experts.w1_EFD, experts.w2_EDF, experts.w3_EFD, ids, scores, lora=lora)
    assert torch.equal(layer(x[None], scores[None], ids[None], None)[0], want)
    experts.lora_a.init_states(), experts.lora_b.init_states()
    assert 0.5 < experts.lora_a.w2.abs().max() * H**0.5 <= 1 and not experts.lora_b.w2.any()


@pytest.mark.parametrize("door", ["flag", "converter"])
def test_adapters_of_experts_that_cannot_have_them(door: str):
    adapters = LoRAConverter.Config(target_modules=["inner_experts"])
    job = through(door, [adapters], filter_fqns=["layers.1."])
    convert(job)
    with pytest.raises(ValueError, match="no adapters run beside bf16 experts: convert all MoE layers"):
        build(job)
    job = through(door, [adapters])
    job.parallelism.tensor_parallel_degree = 2
    with pytest.raises(ValueError, match="set parallelism.expert_parallel_degree > 1"):
        convert(job, 2)
    with pytest.raises(ValueError, match="inner_experts is a GptOssGroupedExperts, beside which no adapters"):
        LoRAConverter.Config().build().convert(gpt_oss_debugmodel_flex().model_spec.model)


@pytest.mark.parametrize("door", DOORS)
def test_a_config_serves_one_trainer(door: str):
    """Whose job decides how it is converted. A copy made before serves another one."""
    job = through(door)
    another, override_config = copy.deepcopy(job), job.override
    convert(job)
    job.override = override_config  # which a Fp8FlowTrainer leaves as it is
    with pytest.raises(ValueError, match="converts torchtitan's MoE, but layers.1.moe has a Fp8FlowMoE"):
        start(job)
    convert(another)


def test_a_claimed_model_in_another_config():
    """torchtitan's function for the graph trainer copies the fields, claims among them."""
    for job in (
        to_graph_trainer_config(by_registry(), graph_model_registry),
        with_fp8_flow(to_graph_trainer_config(deepseek_v3_debugmodel(), graph_model_registry)),
    ):
        job.training.disable_cuda_graphs = True
        assert len(convert(job)) == 11
        build(job)


def test_plain_trainers_need_dispatch_without_host_syncs_for_cuda_graphs():
    """torchtitan's check passes until layers are converted, since these have none of its dispatchers."""
    for dispatch in ("auto", "symmetric"):
        job = by_registry(dispatch=dispatch)
        job = derive(job, Trainer.Config, training=dataclasses.replace(job.training, disable_cuda_graphs=False))
        EP2(job)
        job._validate_cuda_graphs()
        if dispatch == "symmetric":
            convert(job, 2)
            continue
        with pytest.raises(ValueError, match="CUDA graphs exclude fp8_flow_moe.dispatch = .auto., which reads"):
            convert(job, 2)


def test_whatever_cannot_attach_says_so(caplog):
    class Metrics(MetricsProcessor):
        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config(MetricsProcessor.Config):
            pass

    job = by_registry()
    convert(job)
    assert type(job.metrics) is Fp8FlowMetrics.Config and "are off" not in caplog.text
    job = by_registry()
    job.metrics = Metrics.Config()
    convert(job)
    assert type(job.metrics) is Metrics.Config
    job = by_registry()
    job.model_spec.model.update_from_config(config=Inference())
    assert isinstance(build(job).layers["2"].moe, Fp8FlowMoE)
    assert "Inference is not a Trainer.Config: off are the checks of the job" in caplog.text
    assert build(job).layers["2"].moe.routed_experts.inner_experts.placement.in_fsdp  # FSDP may have work


@dataclasses.dataclass
class Inference:
    """Like that of torchtitan's generator, which only has this."""

    parallelism: ParallelismConfig = dataclasses.field(default_factory=ParallelismConfig)


@pytest.mark.parametrize(
    "change, ranks, outside",
    [
        (NOTHING, 1, True),
        (EP2, 2, True),
        (PP2, 2, True),
        (NOTHING, 2, False),
        (EP2, 4, False),
        (set_("parallelism.data_parallel_replicate_degree", 2), 2, False),
        (set_("training.dtype", "bfloat16"), 1, False),
        (set_("training.enable_cpu_offload", True), 1, False),
    ],
    ids=["one", "ep2", "pp2", "fsdp2", "ep2_fsdp2", "hsdp", "bf16", "offload"],
)
def test_experts_leave_fsdp_where_it_has_nothing_to_do(change, ranks: int, outside: bool):
    job = make_job(change)
    convert(job, ranks)
    assert build(job).layers["2"].moe.routed_experts.inner_experts.placement.in_fsdp != outside


def test_torchft_needs_fsdp():
    job = make_job()
    assert not parallel.fsdp_has_work(job)
    assert parallel.fsdp_has_work(SimpleNamespace(training=job.training, fault_tolerance=SimpleNamespace(enable=True)))
