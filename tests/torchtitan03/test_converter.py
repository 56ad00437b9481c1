"""The adapter for torchtitan 0.3 without training. What both releases have is ``tests/test_titan_jobs.py``'s."""

import copy
import dataclasses
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from torchtitan.components.lora import LoRAConverter as LinearLoRAConverter
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.config.configs import ParallelismConfig
from torchtitan.config.manager import ConfigManager
from torchtitan.config.override import apply_overrides, derive, override
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models.common.feed_forward import FeedForward, SigmoidGatedFeedForward
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import GroupedExperts, MoE
from torchtitan.models.deepseek_v3 import model_registry
from torchtitan.models.deepseek_v3.config_registry import deepseek_v3_debugmodel
from torchtitan.models.gpt_oss.config_registry import gpt_oss_debugmodel_flex
from torchtitan.protocols.module import Module
from torchtitan.trainer import Trainer

from experiments.reference import make_layer
from tests.layer import refused
from tests.patched import undone
from tests.torchtitan03.jobs import CONFIG, DOORS, FLAG, build, convert, make_job, moes, randomize, start
from titan_fp8moe import SAVED_OPS, Adapter, Lora, record_routing, replay_routing, routed_experts
from titan_fp8moe.config import Fp8FlowMoEConfig
from titan_fp8moe.dispatch import auto
from titan_fp8moe.torchtitan03 import compiling, conversion, modules
from titan_fp8moe.torchtitan03.compiling import compile_before_experts
from titan_fp8moe.torchtitan03.config_registry import with_fp8_flow
from titan_fp8moe.torchtitan03.converter import Fp8FlowConverter
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


def test_a_claimed_config_can_be_copied():
    """As launchers do that send it to other processes; a change of a field goes along."""
    job = make_job(door="converter", save_h="fp8")
    job.model_spec.model.vocab_size = 77
    for how in (copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))):
        model = job.model_spec.model
        job.model_spec.model = copied = how(model)
        assert type(copied).__qualname__ == type(model).__qualname__ and copied.vocab_size == 77
        assert copied.layers[1] is not model.layers[1]
    assert start(job).layers["1"].moe.routed_experts.config == Fp8FlowMoEConfig(save_h="fp8") and not left()


def test_own_trainers_keep_their_settings():
    """A config with the section stays open to other settings; another one is converted at once."""
    OwnFp8, Own = vendors(Fp8FlowTrainer), vendors(Trainer)
    config = with_fp8_flow(derive(deepseek_v3_debugmodel(), OwnFp8.Config, mine=42), Fp8FlowMoEConfig(save_h="fp8"))
    config = with_fp8_flow(config, None)
    assert (type(config)._owner, config.mine, config.fp8_flow_moe.save_h) == (OwnFp8, 42, "fp8")
    own = with_fp8_flow(derive(deepseek_v3_debugmodel(), Own.Config, mine=42), Fp8FlowMoEConfig(save_h="fp8"))
    assert (type(own)._owner, own.mine) == (Own, 42)
    found = [[*job.model_spec.model.traverse(conversion.Fp8FlowClaim.Config)] for job in (config, own)]
    assert not found[0] and [claim.settings.save_h for _, claim, *_ in found[1]] == 5 * ["fp8"]


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


def register_vendors(name: str, kind: type, fqns: list[str] | None = None) -> None:
    """The override ``vendor_NAME``: a class of another package in the place of ``kind``."""

    def replace(config: Any) -> Any:
        return derive(config, vendors(kind).Config)

    replace.__name__ = f"vendor_{name}"
    override(target=kind.Config, fqns=fqns)(replace)


register_vendors("moe", MoE, ["*layers.3.*"])
register_vendors("experts", GroupedExperts)
register_vendors("ffn", FeedForward)
register_vendors("linear", Linear, ["*layers.3.moe.shared_experts.w2", "*layers.0.feed_forward.w1"])


def overridden(job: Any, name: str) -> Any:
    job.override.imports = [name if "." in name else f"{__name__}.vendor_{name}"]
    return job


@pytest.mark.parametrize("name", ["moe", "experts"])
def test_an_override_of_experts_is_an_error(name: str):
    """Whatever part of a claimed layer it replaces; torchtitan refuses two overrides of one layer by itself."""
    with pytest.raises(ValueError, match="both claim node|an ancestor of"):
        convert(make_job({"override.imports": [f"{__name__}.vendor_{name}"]}, door="flag"))
    with pytest.raises(ValueError, match=r"layers.\d.moe has a .*Vendors; leave it in bf16.*override"):
        start(overridden(make_job(door="converter"), name))


@pytest.mark.parametrize("name,part", [("experts", "inner_experts"), ("ffn", "shared_experts"), ("linear", "w[12]")])
def test_an_override_after_the_conversion_is_an_error(name: str, part: str):
    """It would take the layer out of FP8: a second trainer of one config, or a program's own call."""
    job = convert(make_job(door="converter"))
    apply_overrides(overridden(job, name).override, job)
    with pytest.raises(ValueError, match=rf"\w+ has replaced {part} of a Fp8Flow.*fp8_flow_moe had"):
        build(job)


def test_an_override_of_a_linear_leaves_its_ffn_in_bf16():
    """FP8 would multiply by the weight, whatever else the linear does. The experts of its layer are in FP8."""
    model = start(overridden(make_job(door="converter"), "linear"))
    assert left().keys() == {"layers.0.feed_forward", "layers.3.moe.shared_experts"}
    assert "Vendors" in left()["layers.3.moe.shared_experts"] and not model.layers["3"].moe.fp8_shared
    start(overridden(make_job(door="converter"), "torchtitan.overrides.fused_swiglu.fused_swiglu"))
    assert {*left().values()} == {"FusedSwiGLU of Linear, Linear, Linear"} and len(left()) == 6


def test_models_that_are_refused():
    """With two settings, in two entries, without a MoE layer, or without a job, as of torchtitan's RL trainer."""
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
    job = make_job()
    del job.model_spec.model.layers[1:]
    with refused("the model has no MoE layer; choose"):
        convert(job)
    job = make_job(door="flag")
    apply_overrides(job.override, job.model_spec.model)
    with refused("has met no job", "name Fp8FlowConverter among", error=RuntimeError):
        build(job)


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


@pytest.mark.parametrize("door", DOORS[1:])
@pytest.mark.parametrize("converter,experts", [(LinearLoRAConverter, 0), (LoRAConverter, 0), (LoRAConverter, 1)])
def test_lora(door: str, converter: Any, experts: int):
    """Its adapters train, in bf16 where FP8 would see their base alone."""
    adapters = converter.Config(rank=4, target_modules=["wo", "w2", *["inner_experts"] * experts])
    model = start(make_job(door=door, others=[adapters], linear_fqns=["attention.wo.", "attention.wkv_b."]))
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained and all("lora_" in name for name in trained)
    assert sum(name.startswith("layers.2.moe.routed_experts.inner_experts.lora_") for name in trained) == 6 * experts
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


class Experts(nn.Module):
    shared_experts = None

    def route(self, h: Tensor) -> tuple[Tensor]:
        return (h,)

    def forward(self, h: Tensor, routing: tuple[Tensor] | None = None) -> Tensor:
        return h * auto.room()


class Block(Module):
    def __init__(self, mask: str):
        super().__init__()
        self.mask, self.moe, self.ffn_norm = mask, Experts(), nn.Linear(4, 4)
        self.attention_norm = nn.Identity()

    def forward(self, x: Tensor, masks: None) -> Tensor:
        return x + self.moe(self.ffn_norm(x))


def test_all_sizes_of_the_buffers_have_graphs(monkeypatch, caplog):
    """Of steps over both ways and a validation, with two masks as gpt_oss has. Blocks with the same mask share one, and
    unknown ones have none."""
    assert not compile_before_experts(unknown := nn.Linear(1, 1), backend="eager") and "forward" not in vars(unknown)
    assert "does not know torch.nn.modules.linear.Linear" in caplog.text
    attention = lambda block, x, *_: x if block.mask == "sliding" else 2 * x  # noqa: E731
    monkeypatch.setitem(compiling._ATTENTION, f"{__name__}.Block", attention)
    torch._dynamo.reset()
    counters.clear()
    with undone():
        blocks = []
        for mask in 3 * ("sliding", "full"):
            own = lambda: create_selective_checkpoint_contexts([torch.ops.aten.addmm.default])  # noqa: E731  one per layer
            blocks.append(checkpoint_wrapper(Block(mask), early_stop=False, context_fn=own))
            assert compile_before_experts(blocks[-1], backend="eager", fullgraph=True)
        for room in ("", *map(str, auto.ROOMS)):
            monkeypatch.setattr(auto._state, "room", room)
            for block in blocks:
                block(torch.ones(2, 4, requires_grad=True), None).sum().backward()
                with torch.no_grad():
                    block(torch.ones(2, 4), None)
        assert counters["stats"]["unique_graphs"] == 2 * 2 + len(auto.ROOMS)


@pytest.mark.parametrize("policy", [None, SelectiveAC, FullAC])
def test_routing_replay_of_compiled_blocks(policy: type | None):
    """Outside of a replay the router is in the graph. Only full checkpointing counts its experts twice."""
    torch._dynamo.reset()
    plain = randomize(start(make_job()).layers["3"])
    plain.attention.forward = lambda x, *_: x  # of a kind that needs a mask
    moe, forward = plain.moe, plain.forward
    block = policy(policy.Config())._wrap_block(plain) if policy else plain
    assert compile_before_experts(block, backend="aot_eager")
    E, K = moe.router.num_experts, moe.router.top_k
    x, ids = torch.randn(2, 64, moe.router.gate.weight.shape[1]), torch.rand(2, 64, 1, E).topk(K).indices
    with record_routing(moe) as routing:
        own = block(x, None)
    with replay_routing(moe, routing.routed_experts()):
        torch.testing.assert_close(block(x, None), own)
    results = []
    for run, counted in ((forward, 1), (block, 2 if policy is FullAC else 1)):
        moe.tokens_per_expert_E.zero_()
        with replay_routing(moe, ids):
            out = run(x, None)
            results.append([out, *torch.autograd.grad(out.square().sum(), list(moe.parameters()))])
        assert torch.equal(moe.tokens_per_expert_E.long(), counted * ids.flatten().bincount(minlength=E))
    torch.testing.assert_close(*results)
