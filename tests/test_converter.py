"""The converter in torchtitan: what it changes in a model, what it refuses, and the remedies it names."""

import contextlib
import copy
import dataclasses
import logging
import math
import pickle
import re
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.torch_version import TorchVersion
from torchtitan.models.gpt_oss.model import moe as gpt_oss_moe
from torchtitan.models.moe.moe import FeedForward, GroupedExperts, MoE
from torchtitan.protocols import model_converter, train_spec
from torchtitan.protocols.model_converter import build_model_converters
from torchtitan.protocols.train_spec import get_train_spec

from tests.jobs import convert, cpu_only, make_config, make_dims, make_model  # noqa: F401
from titan_fp8moe.activations import ACTIVATIONS
from titan_fp8moe.kernels.sizes import MAX_ROWS
from titan_fp8moe.layer import cache as cache_module
from titan_fp8moe.ops import backend, self_check
from titan_fp8moe.testing import relative_error
from titan_fp8moe.torchtitan import converter, parallel
from titan_fp8moe.torchtitan.converter import Fp8FlowMoEConverter
from titan_fp8moe.torchtitan.job_checks import expert_layout
from titan_fp8moe.torchtitan.modules import FEED_FORWARDS, Fp8FlowGptOssExperts, Fp8FlowGroupedExperts, Fp8FlowMoE


def layer_classes(model: nn.Module) -> dict[str, tuple[type, type]]:
    return {name: (type(m), type(m.experts)) for name, m in model.named_modules() if isinstance(m, MoE)}


STOCK, CONVERTED = (MoE, GroupedExperts), (Fp8FlowMoE, Fp8FlowGroupedExperts)


def test_changes_classes_and_nothing_else():
    config = make_config()
    model = make_model(config)
    classes = {name: type(module) for name, module in model.named_modules()}
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    state = {key: (value.shape, value.dtype) for key, value in model.state_dict().items()}

    convert(config, model)
    changed = {name: type(m) for name, m in model.named_modules() if type(m) is not classes.pop(name)}
    assert not classes, "modules are gone"
    ffn = FEED_FORWARDS[FeedForward]
    assert changed == {
        "layers.0.feed_forward": ffn,
        "layers.1.moe": Fp8FlowMoE,
        "layers.1.moe.experts": Fp8FlowGroupedExperts,
        "layers.1.moe.shared_experts": ffn,
        "layers.2.moe": Fp8FlowMoE,
        "layers.2.moe.experts": Fp8FlowGroupedExperts,
        "layers.2.moe.shared_experts": ffn,
    }
    after = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert list(after) == list(tensors) and all(after[name] is tensors[name] for name in tensors)
    assert {key: (value.shape, value.dtype) for key, value in model.state_dict().items()} == state


@pytest.mark.parametrize("flags", [[], ["--fp8_flow_moe.cache_weights"]])
def test_converted_layers_can_be_pickled(flags):
    config = make_config(*flags)
    model = make_model(config, "cpu")
    with torch.no_grad():
        model.init_weights()
    convert(config, model)
    for layer in (model.layers["0"].feed_forward, model.layers["1"].moe):
        other = pickle.loads(pickle.dumps(layer))
        assert [type(module) for module in other.modules()] == [type(module) for module in layer.modules()]
        for name, param in layer.named_parameters():
            assert torch.equal(other.get_parameter(name), param), name


def test_filter_fqns_leaves_layers_in_bf16(caplog: pytest.LogCaptureFixture):
    config = make_config("--fp8_flow_moe.filter_fqns=layers.1.,layers.3.moe.")
    with caplog.at_level(logging.INFO):
        model = convert(config, make_model(config, n_layers=12))
    expected = {f"layers.{i}.moe": STOCK if i in (1, 3) else CONVERTED for i in range(1, 12)}
    assert layer_classes(model) == expected  # layers.11 among the converted
    assert "9 MoE layers, 9 shared experts, 1 dense FFNs" in caplog.text
    stay = "layers.1.moe, layers.3.moe, layers.1.moe.shared_experts, layers.3.moe.shared_experts"
    assert f"not in FP8: {stay}: fp8_flow_moe.filter_fqns" in caplog.text


@pytest.mark.parametrize("value", ["", "layers.1.,"])
def test_empty_filter_is_an_error(value):
    """It would match every layer and leave the whole model in bf16."""
    with pytest.raises((ValueError, SystemExit)):
        make_config(f"--fp8_flow_moe.filter_fqns={value}")


def test_unmatched_filter_is_an_error_and_converts_nothing():
    config = make_config("--fp8_flow_moe.filter_fqns=layers.1.,layers.7.")
    model = make_model(config)
    with pytest.raises(ValueError, match=r"filter_fqns has 'layers\.7\.'.*layers\.1\.moe, layers\.2\.moe"):
        convert(config, model)
    assert set(layer_classes(model).values()) == {STOCK}


@pytest.mark.parametrize(
    "dims",
    [
        pytest.param({"tp": 16}, id="tp16"),
        pytest.param({"dp_shard": 2, "tp": 16, "ep": 2, "etp": 16}, id="tp16-ep2-etp16"),
    ],
)
def test_hidden_dim_per_rank_must_fit(dims: dict[str, int]):
    """The 16B model's experts have hidden dim 1408 = 88 * 16, which 16 ranks cannot share."""
    config = make_config(flavor="16B")
    model = make_model(config)
    remedy = r"set parallelism\.expert_tensor_parallel_degree = 1$"
    if "ep" not in dims:
        remedy = r"lower parallelism\.tensor_parallel_degree, or raise expert_parallel_degree and " + remedy
    with pytest.raises(ValueError, match="88 per rank.*16; " + remedy):
        convert(config, model, make_dims(**dims))
    assert set(layer_classes(model).values()) == {STOCK}
    # The remedy works.
    convert(config, model, make_dims(dp_shard=2, tp=16, ep=2, etp=1))
    assert set(layer_classes(model).values()) == {CONVERTED}


def test_padded_experts_of_a_rank_are_gathered_in_fp8():
    """1408 is 11 tiles, and half of it is not whole."""
    config = make_config("--fp8_flow_moe.fp8_all_gather", flavor="16B")
    for tp in (1, 2):
        model = make_model(config)
        convert(config, model, make_dims(dp_shard=2, tp=tp))
        assert set(layer_classes(model).values()) == {CONVERTED}


def test_expert_degrees_must_divide_the_ranks():
    config = make_config()
    for dims, ranks in (({"dp_shard": 2, "ep": 4}, 2), ({"dp_shard": 3, "tp": 2, "ep": 2, "etp": 2}, 6)):
        dims = SimpleNamespace(**dict(dp_replicate=1, dp_shard=1, cp=1, tp=1, etp=1, pp_enabled=False) | dims)
        with pytest.raises(
            ValueError, match=rf"expert_parallel_degree = {dims.ep} .* degree = {ranks}; choose degrees"
        ):
            Fp8FlowMoEConverter(config, dims)


def test_cache_of_what_fsdp_shards_is_warned_of(caplog: pytest.LogCaptureFixture):
    config = make_config("--fp8_flow_moe.cache_weights")
    for dims, warned in (({"dp_shard": 4, "ep": 2}, True), ({"dp_shard": 4, "ep": 4}, False)):
        caplog.clear()
        Fp8FlowMoEConverter(config, make_dims(**dims))
        assert ("cache_weights keeps quantized weights unsharded" in caplog.text) == warned


def test_model_dim_must_fit():
    config = make_config()
    with pytest.raises(ValueError, match=r"layers\.1\.moe: model dim 200 is not a multiple of 16"):
        convert(config, make_model(config, dim=200))


def test_hidden_dim_must_fit():
    config = make_config()
    with pytest.raises(ValueError, match=r"layers\.1\.moe: expert hidden dim 200 is not a.*filter_fqns"):
        convert(config, make_model(config, moe_inter_dim=200))


def test_rows_of_a_microbatch_must_fit():
    """The check assumes that every rank gets as many rows; the kernels check the real number in each step."""
    model = make_model(make_config())
    top_k = model.layers["1"].moe.router.top_k
    config = make_config(f"--training.seq_len={MAX_ROWS // top_k}", "--training.local_batch_size=2")
    for dims, fits in ((make_dims(), False), (make_dims(dp_shard=2, tp=2), True)):
        with contextlib.nullcontext() if fits else pytest.raises(ValueError, match="lower training.local_batch_size"):
            convert(config, make_model(config), dims)
    for size, fits in ((2, False), (1, True)):  # the layers of a pipeline see microbatches
        config.parallelism.pipeline_parallel_microbatch_size = size
        with contextlib.nullcontext() if fits else pytest.raises(ValueError, match="lower training.local_batch_size"):
            convert(config, make_model(config), make_dims(pp=2))


@pytest.mark.parametrize(
    ("dims", "layout"),
    [
        ({}, (1, 1, 1, 1024)),
        ({"tp": 2}, (1, 2, 1, 512)),
        # The ranks of context parallelism count for FSDP.
        ({"dp_shard": 2, "cp": 2}, (1, 1, 4, 512)),
        ({"dp_shard": 2, "cp": 2, "ep": 2}, (2, 1, 2, 512)),
        # Expert parallelism spans the tensor-parallel ranks. Without etp each of them holds whole experts.
        ({"dp_shard": 4, "tp": 2, "ep": 4}, (4, 1, 2, 512)),
        ({"dp_shard": 4, "tp": 2, "ep": 4, "etp": 2}, (4, 2, 1, 512)),
        ({"pp": 2}, (1, 1, 1, 256)),
    ],
)
def test_layout_of_the_experts(dims: dict[str, int], layout: tuple[int, ...]):
    config = make_config("--training.seq_len=256", "--training.local_batch_size=4")
    assert expert_layout(config, make_dims(**dims)) == layout


def test_limits_of_torchtitan(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    with pytest.raises(ValueError, match=r"at least two ranks of FSDP.*raise parallelism\.data_parallel_shard_degree"):
        Fp8FlowMoEConverter(make_config(), make_dims(tp=2, ep=2))
    compiled = make_config("--compile.enable")
    for version, works in (("2.11.0", True), ("2.12.1", False)):
        monkeypatch.setattr(torch, "__version__", TorchVersion(version))
        with contextlib.nullcontext() if works else pytest.raises(ValueError, match=r"set compile\.enable = false"):
            Fp8FlowMoEConverter(compiled, make_dims(tp=2))
        Fp8FlowMoEConverter(make_config("--compile.enable", "--compile.components=loss"), make_dims(tp=2))
    for shards, warned in ((2, False), (1, True)):
        caplog.clear()
        dims = dataclasses.replace(make_dims(dp_shard=shards), dp_replicate=2, world_size=2 * shards)
        Fp8FlowMoEConverter(make_config(), dims)
        assert ("divides gradients by parallelism.data_parallel_replicate_degree = 2" in caplog.text) == warned


def test_settings_without_effect_are_warned_of(caplog: pytest.LogCaptureFixture):
    for flags, message in (
        (["--fp8_flow_moe.recompute=experts", "--fp8_flow_moe.save_h=fp8"], "save_h has no effect with"),
        (
            ["--fp8_flow_moe.statistics_every=1", "--fp8_flow_moe.filter_fqns", "layers"],
            "statistics_every has no effect",
        ),
    ):
        config = make_config(*flags, "--metrics.enable_tensorboard")
        convert(config, make_model(config))
        assert message in caplog.text


def test_whole_experts_are_gathered_in_fp8():
    """Of 8 experts, FSDP may shard the 4 of one of 2 expert-parallel ranks over 4 but not 3, and all 8 over 8 but not
    16."""
    config = make_config("--fp8_flow_moe.fp8_all_gather")
    for dims in ({"dp_shard": 8, "ep": 2}, {"dp_shard": 2, "tp": 2, "ep": 2}, {"dp_shard": 8}):
        convert(config, make_model(config), make_dims(**dims))
    for dims, shards in (
        ({"dp_shard": 6, "ep": 2}, "2 expert-parallel x 3"),
        ({"dp_shard": 16, "ep": 2}, "2 expert-parallel x 8"),
        ({"dp_shard": 16}, "1 expert-parallel x 16"),
    ):
        remedy = r"set it to false, or raise parallelism\.data_parallel_replicate_degree"
        with pytest.raises(ValueError, match=rf"8 experts do not divide over {shards} FSDP ranks; {remedy}"):
            convert(config, make_model(config), make_dims(**dims))


def test_experts_must_divide_over_ranks():
    config = make_config()
    with pytest.raises(
        ValueError, match=r"layers\.1\.moe: 8 experts .* 3 .*; choose a parallelism\.expert_parallel_degree that"
    ):
        convert(config, make_model(config), make_dims(dp_shard=3, ep=3))


def test_model_without_moe():
    config = make_config(model="llama3", flavor="debugmodel")
    with pytest.raises(ValueError, match="the model has no MoE layer; remove the converter"):
        convert(config, make_model(config))


def test_other_kinds_of_moe_are_refused():
    class Other(MoE):
        pass

    model = make_model(config := make_config())
    model.layers["1"].moe.__class__ = Other
    message = r"layers\.1\.moe is a Other with GroupedExperts; leave it in bf16 with fp8_flow_moe\.filter_fqns"
    with pytest.raises(ValueError, match=message):
        convert(config, model)


@pytest.mark.parametrize(
    "overrides",
    [[], ["--fp8_flow_moe.filter_fqns=layers.1."], ["--fault_tolerance.enable"], ["--training.dtype=bfloat16"]],
)
def test_experts_are_kept_from_fsdp_only_where_nothing_relies_on_it(
    monkeypatch: pytest.MonkeyPatch, overrides: list[str]
):
    config, ignored = make_config(*overrides), []
    model = convert(config, make_model(config))  # which looks at PyTorch's fully_shard
    monkeypatch.setattr(
        parallel.fsdp, "fully_shard", lambda *args, ignored_params=(), **_: ignored.append(ignored_params)
    )
    if config.training.dtype == "bfloat16":
        model.bfloat16()
    experts = [m for m in model.modules() if isinstance(m, Fp8FlowGroupedExperts)]
    for m in experts:
        parallel.fully_shard(m, mesh=SimpleNamespace(size=lambda dim=None: 1, ndim=1))
    assert [len(params) for params in ignored] == [0 if overrides else 3] * len(experts) != []


@pytest.mark.parametrize(
    ("replicas", "shards", "ep", "overrides", "hooks"),
    [
        (1, 1, 1, [], False),
        (2, 1, 1, [], True),
        (1, 2, 1, [], True),
        (1, 2, 2, [], False),
        (2, 2, 2, [], True),
        (1, 1, 1, ["--training.enable_cpu_offload"], True),
        (1, 1, 1, ["--fault_tolerance.enable"], True),
    ],
)
def test_fsdp_has_hooks_on_experts_where_it_has_work(replicas, shards, ep, overrides, hooks):
    config, dims = make_config(*overrides), make_dims(dp_shard=shards, ep=ep)
    dims.dp_replicate, dims.world_size = replicas, replicas * dims.world_size
    model = convert(config, make_model(config), dims)
    assert {m.in_fsdp for m in model.modules() if isinstance(m, Fp8FlowGroupedExperts)} == {hooks}


def test_linears_inside_of_experts_and_ffns_are_none_of_linear_fqns():
    config = make_config("--fp8_flow_moe.linear_fqns=w2")
    with pytest.raises(ValueError, match="linear_fqns has 'w2', which matches none of .*attention.wo.*correct or"):
        convert(config, make_model(config))


def test_linears_are_not_converted_twice():
    config = make_config(
        "--model.converters=quantize.linear.float8,fp8_flow_moe", "--fp8_flow_moe.linear_fqns=attention.wo."
    )
    with pytest.raises(ValueError, match="linear_fqns and model.converters' quantize.linear both convert linears"):
        Fp8FlowMoEConverter(config, make_dims()).convert(make_model(config))


class Mesh(NamedTuple):
    """The sizes of a DeviceMesh: replicas, then shards."""

    sizes: tuple[int, ...]

    @property
    def ndim(self) -> int:
        return len(self.sizes)

    def size(self, dim: int | None = None) -> int:
        return math.prod(self.sizes) if dim is None else self.sizes[dim]


@pytest.mark.parametrize(("sizes", "gathers"), [((1,), False), ((2,), True), ((2, 1), False), ((1, 2), True)])
@pytest.mark.parametrize("setting", [True, False])
@pytest.mark.parametrize("as_list", [True, False])
def test_experts_are_gathered_in_fp8_where_fsdp_shards_them(monkeypatch, sizes, gathers, setting, as_list):
    """Over replicas alone FSDP gathers nothing."""
    config = make_config(*["--fp8_flow_moe.fp8_all_gather"] * setting)
    model = convert(config, make_model(config))
    block, gathered = model.layers["1"], []
    monkeypatch.setattr(Fp8FlowGroupedExperts, "gather_in_fp8", lambda self: gathered.append(self))

    def shard(module, **kwargs):
        block.moe.experts.w1 = nn.Parameter(block.moe.experts.w1)  # FSDP replaces what it shards

    monkeypatch.setattr(parallel.fsdp, "fully_shard", shard)
    parallel.fully_shard([model.norm, block] if as_list else block, mesh=Mesh(sizes))
    assert gathered == [block.moe.experts] * (gathers and setting)


def test_experts_that_fsdp_leaves_alone_are_not_gathered_in_fp8(monkeypatch):
    config, gathered = make_config("--fp8_flow_moe.fp8_all_gather"), []
    model = convert(config, make_model(config))
    monkeypatch.setattr(Fp8FlowGroupedExperts, "gather_in_fp8", lambda self: gathered.append(self))
    monkeypatch.setattr(parallel.fsdp, "fully_shard", lambda *args, **kwargs: None)
    parallel.fully_shard(model.layers["1"], mesh=Mesh((2,)))
    assert gathered == []


def test_train_spec_can_be_ones_own(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(train_spec, "_extra_train_specs", dict(train_spec._extra_train_specs))
    own = dataclasses.replace(get_train_spec("deepseek_v3"), build_validator_fn=None)
    train_spec.register_train_spec("deepseek_v3", own)
    assert get_train_spec("deepseek_v3") is own


def test_another_reorderer_is_refused():
    """A converted layer does not call its reorderer."""
    config = make_config()
    model = make_model(config)
    layer = next(module for module in model.modules() if isinstance(module, MoE))
    layer.reorderer.__class__ = type("OtherReorderer", (type(layer.reorderer),), {})
    with pytest.raises(ValueError, match=r"sorts routed pairs itself.* a OtherReorderer, .*; leave the layer in bf16"):
        convert(config, model)


def pretend_gpu(monkeypatch: pytest.MonkeyPatch, name: str, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: name)
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.11.0"))
    monkeypatch.setattr(self_check.triton, "__version__", "3.6.0")
    monkeypatch.setattr(self_check, "self_check", lambda: ["grouped_mm"])
    monkeypatch.setattr(backend, "_gate", self_check.require_checked)


@pytest.mark.parametrize(("name", "capability"), [("Ampere", (8, 0)), ("Ada", (8, 9)), ("Blackwell", (10, 0))])
def test_other_gpus_only_when_asked_to_emulate(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str, capability: tuple[int, int]
):
    pretend_gpu(monkeypatch, name, capability)
    version = f"{capability[0]}\\.{capability[1]}"
    error, message = (ValueError, "8.9 or later") if capability == (8, 0) else (RuntimeError, "differ .*grouped_mm")
    match = rf"(?s){message}.*TITAN_FP8MOE_EMULATE=1"
    with pytest.raises(error, match=match) as raised:
        convert(make_config(), make_model(make_config()))
    assert re.search(rf"{name} \({version}\)", str(raised.value))
    bf16 = make_config("--fp8_flow_moe.filter_fqns", "layers")
    convert(bf16, make_model(bf16))

    on_gpu = SimpleNamespace(is_cuda=True)
    monkeypatch.setattr(backend, "_emulating", True)  # as TITAN_FP8MOE_EMULATE=1 does
    with caplog.at_level(logging.INFO):
        convert(make_config(), make_model(make_config()))
    assert not backend.use_kernels(on_gpu)
    assert f"plain PyTorch reference on {name} (TITAN_FP8MOE_EMULATE)" in caplog.text


def test_hopper_runs_the_kernels(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    pretend_gpu(monkeypatch, "Hopper", (9, 0))
    config = make_config()
    with caplog.at_level(logging.INFO):
        convert(config, make_model(config))
    assert backend.use_kernels(SimpleNamespace(is_cuda=True))
    assert "Triton kernels on Hopper" in caplog.text


SETTINGS = (
    "wgrad=scaling_aware, save_h=fp8, recompute=none, dispatch=auto, dispatch_capacity=1.5, cache_weights=False, "
    "cache_layouts=both, fp8_all_gather=False, statistics_every=0"
)


def test_what_is_logged_and_printed(caplog: pytest.LogCaptureFixture):
    config = make_config(
        "--fp8_flow_moe.wgrad=scaling_aware", "--fp8_flow_moe.save_h=fp8", "--fp8_flow_moe.recompute=none"
    )
    config.model.print_after_conversion = True
    model = make_model(config)
    caplog.clear()
    with caplog.at_level(logging.INFO):
        convert(config, model)
    *_, summary, printed = caplog.messages
    assert summary == (
        "FP8-Flow-MoE: 2 MoE layers, 2 shared experts, 1 dense FFNs, 0 linears in FP8; plain PyTorch reference on the "
        f"CPU; {SETTINGS}"
    )
    experts = f"num_experts=8, dim=256, hidden_dim=256, {SETTINGS}"
    assert printed.count(f"(experts): Fp8FlowGroupedExperts({experts})") == 2


@pytest.mark.parametrize(
    ("flags", "tp", "fp8", "why"),
    [
        ([], 1, ["1", "2"], ""),
        (["--fp8_flow_moe.filter_fqns=layers.1.moe.shared"], 1, ["2"], "filter_fqns"),
        (["--fp8_flow_moe.filter_fqns=shared_experts"], 1, [], "filter_fqns"),
        (["--fp8_flow_moe.filter_fqns=layers.1."], 1, ["2"], ""),
        (["--model.converters=quantize.linear.float8,fp8_flow_moe"], 1, [], "quantize.linear"),
        ([], 32, [], "hidden dim 256 / 32 none of 16"),
    ],
)
def test_which_shared_experts_are_fp8(caplog, flags, tp, fp8, why):
    """Filters match them by name too; what cannot be FP8 stays as it was, and the log says why."""
    config, dims = make_config(*flags), make_dims(dp_shard=4, tp=tp, ep=4) if tp > 1 else make_dims()
    model = make_model(config)
    converter = Fp8FlowMoEConverter(config, dims)
    with caplog.at_level(logging.INFO):
        converter.convert(model)
    blocks = {name: getattr(block, "moe", None) for name, block in model.layers.items()}
    layers = {name: moe for name, moe in blocks.items() if isinstance(moe, Fp8FlowMoE)}
    assert [name for name, layer in layers.items() if layer.fp8_shared] == fp8
    assert f"{len(fp8)} shared experts, " in caplog.text
    assert why in caplog.text


@pytest.mark.parametrize(
    ("model_name", "flavor", "experts_class", "changes"),
    [
        ("llama4", "debugmodel", Fp8FlowGroupedExperts, {}),
        ("qwen3", "debugmodel_moe", Fp8FlowGroupedExperts, {}),
        ("gpt_oss", "debugmodel", Fp8FlowGptOssExperts, dict(vocab_size=2048, moe_inter_dim=272)),
    ],
)
def test_other_models_train_as_in_fp32(model_name: str, flavor: str, experts_class: type, changes: dict[str, int]):
    """The same weights with and without the converter: loss and gradients up to fp8 noise."""
    torch.manual_seed(0)
    config = make_config("--training.seq_len=64", model=model_name, flavor=flavor)
    # Two layers only: FP8 noise sends a few tokens to other experts in each further layer. Few experts save time.
    moe_args = dataclasses.replace(get_train_spec(model_name).model_args[flavor].moe_args, num_experts=16)
    reference = make_model(config, device="cpu", n_layers=2, moe_args=moe_args, **changes).float()
    for moe in (m for m in reference.modules() if isinstance(m, MoE)):
        assert moe.score_before_experts == (model_name == "llama4")
        moe.experts.use_grouped_mm = False  # that path is bf16, also of fp32 weights
    with torch.no_grad():
        reference.init_weights(buffer_device=torch.device("cpu"))
    model = convert(config, copy.deepcopy(reference))
    assert set(layer_classes(model).values()) == {(Fp8FlowMoE, experts_class)}

    tokens = torch.randint(2048, (4, 65))
    masks = [model.get_attention_masks(tokens[:, :-1], None)] if model_name == "gpt_oss" else []
    losses = []
    for m in (reference, model):
        loss = F.cross_entropy(m(tokens[:, :-1], *masks).flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        losses.append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=0.01)
    expected = dict(reference.named_parameters())
    errors = {name: relative_error(p.grad, expected[name].grad) for name, p in model.named_parameters()}
    assert all(math.isfinite(error) for error in errors.values()), errors
    experts = {name: error for name, error in errors.items() if ".experts." in name}
    assert experts and max(experts.values()) < 0.15, experts
    assert min(experts.values()) > 0.01, "the experts were not quantized"


def test_the_activation_of_gpt_oss():
    config = make_config(model="gpt_oss", flavor="debugmodel")
    model = convert(config, make_model(config, n_layers=1, swiglu_limit=5.0))
    spec = model.layers["0"].moe.experts.expert()
    gate, up = 8 * torch.randn(2, 64, 32)
    got = ACTIVATIONS[spec.activation].forward(gate, up, *spec.parameters)
    torch.testing.assert_close(got, gpt_oss_moe.swiglu(torch.stack((gate, up), -1).flatten(1), limit=5.0))
    assert spec.interleaved


def _optimizer_step(model, changed, optimizer):
    optimizer.step()


def _checkpoint_load(model, changed, optimizer):
    model.load_state_dict(changed)


def _copy_after_a_step(model, changed, optimizer):
    optimizer.step()
    for name, p in model.named_parameters():
        p.data.copy_(changed[name])


def _copy_within_a_step(model, changed, optimizer):
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(changed[name])


@pytest.mark.parametrize(
    "change, versions",
    [
        (_optimizer_step, False),
        (_checkpoint_load, False),
        (_copy_after_a_step, False),
        (_copy_within_a_step, True),
    ],
)
def test_cached_weights_are_never_stale(monkeypatch, change, versions):
    """Two microbatches share the quantized weights, then the weights change as trainers change them. All results equal
    those without the cache, also where parameters have no ``versions``, as under FSDP."""
    if not versions:
        monkeypatch.setattr(cache_module, "_cache_key", lambda weight: 0)
    tokens = torch.randint(0, 100, (2, 32))
    results = []
    for flags in (["--fp8_flow_moe.cache_weights"], []):
        config = make_config(*flags)
        torch.manual_seed(0)
        model = make_model(config, "cpu")
        with torch.no_grad():
            model.init_weights()
        build_model_converters(config, make_dims()).convert(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=10.0)
        for _ in range(2):
            model(tokens).logsumexp(-1).mean().backward()
        changed = {name: t + 0.05 if ".w" in name else t.clone() for name, t in model.state_dict().items()}
        before = [p.detach().clone() for p in model.parameters()]
        change(model, changed, optimizer)
        assert not all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        optimizer.zero_grad()
        out = model(tokens)
        out.logsumexp(-1).mean().backward()
        results.append([out.detach(), *[p.grad for p in model.parameters()]])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def test_caches_are_cleared_by_any_container_of_optimizers():
    """torchtitan calls the converter after each step, whatever class the optimizers are of."""
    cache, weights = cache_module.WeightCache(), [[torch.randn(1, 128, 128)]]
    cache.refresh(weights, frozen=False)
    assert not any(cache.refresh(weights, frozen=False))
    build_model_converters(make_config("--fp8_flow_moe.cache_weights"), make_dims()).post_optimizer_hook([])
    assert all(cache.refresh(weights, frozen=False))


@pytest.mark.parametrize(
    "overrides, warned",
    [
        (["--model.converters="], False),
        (["--model.converters=", "--fp8_flow_moe.save_h=fp8", "--fp8_flow_moe.cache_weights"], True),
        (["--model.converters=quantize.linear.float8", "--fp8_flow_moe.save_h=fp8"], True),
        (["--fp8_flow_moe.save_h=fp8"], False),
    ],
)
def test_settings_without_the_converter_are_warned_of(monkeypatch, caplog, overrides, warned):
    """They would train in bf16 without a word."""
    monkeypatch.setitem(model_converter._registry_model_converter_cls, "quantize.linear.float8", lambda *_: None)
    config = make_config(*overrides)
    config.model.converters = [name for name in config.model.converters if name]
    with caplog.at_level(logging.WARNING):
        build_model_converters(config, make_dims())
    assert ("[fp8_flow_moe] sets save_h" in caplog.text) == warned
    assert ("the experts train in bf16" in caplog.text) == warned


@pytest.mark.parametrize("filters, changes", [([], 1), (["--fp8_flow_moe.filter_fqns=layers"], 0)])
def test_nothing_is_changed_where_nothing_is_converted(monkeypatch, caplog, filters, changes):
    """What is changed is logged once."""
    done = []
    monkeypatch.setattr(converter.compat, "fix_selective_checkpointing", lambda: done.append(1))
    converter._log_changes.cache_clear()
    config = make_config(*filters)
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            convert(config, make_model(config))
    assert len(done) == 2 * changes
    assert caplog.text.count("FP8-Flow-MoE changes in this process: torchtitan's TensorParallel") == changes


@pytest.mark.parametrize(("dispatch", "used"), [("auto", "all-to-all"), ("symmetric", "symmetric memory")])
def test_log_says_how_tokens_travel(caplog: pytest.LogCaptureFixture, dispatch: str, used: str):
    config = make_config(f"--fp8_flow_moe.dispatch={dispatch}")
    with caplog.at_level(logging.INFO):
        convert(config, make_model(config), make_dims(dp_shard=2, ep=2))
    assert f"dispatch over {used}" in caplog.text


def test_symmetric_dispatch_between_nodes_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="lower parallelism.expert_parallel_degree, or set fp8_flow_moe.dispatch"):
        Fp8FlowMoEConverter(make_config("--fp8_flow_moe.dispatch=symmetric"), make_dims(dp_shard=4, ep=4))
    Fp8FlowMoEConverter(make_config("--fp8_flow_moe.dispatch=symmetric"), make_dims(dp_shard=4, ep=2))
