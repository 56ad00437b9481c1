"""The converter in torchtitan: what it changes in a model, what it refuses, and the remedies it names."""

import copy
import dataclasses
import logging
import math
import pickle
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchao.quantization import quantize_
from torchtitan.models.gpt_oss.model import moe as gpt_oss_moe
from torchtitan.models.moe.moe import FeedForward, GroupedExperts, MoE, TokenReorderer
from torchtitan.protocols import train_spec
from torchtitan.protocols.model_converter import build_model_converters
from torchtitan.protocols.train_spec import get_train_spec

from experiments.reference import relative_error
from tests.jobs import convert, cpu_only, make_config, make_dims, make_model  # noqa: F401
from tests.layer import assert_equal, generations, refused
from tests.patched import undone
from tests.processes import call
from titan_fp8moe import Fp8FlowLinear, Fp8FlowMoEConfig
from titan_fp8moe.activations import ACTIVATIONS
from titan_fp8moe.layer import operands
from titan_fp8moe.torchao import is_moe
from titan_fp8moe.torchtitan import converter, parallel
from titan_fp8moe.torchtitan.converter import Fp8FlowMoEConverter
from titan_fp8moe.torchtitan.job_checks import expert_layout
from titan_fp8moe.torchtitan.modules import FEED_FORWARDS, Fp8FlowGptOssExperts, Fp8FlowGroupedExperts, Fp8FlowMoE
from titan_fp8moe.trainer import preflight


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


def test_converted_layers_can_be_pickled():
    config = make_config("--fp8_flow_moe.cache_weights")
    model = make_model(config, "cpu")
    with torch.no_grad():
        model.init_weights()
    convert(config, model)
    for layer in (model.layers["0"].feed_forward, model.layers["1"].moe):
        other = pickle.loads(pickle.dumps(layer))
        assert [type(module) for module in other.modules()] == [type(module) for module in layer.modules()]
        for name, param in layer.named_parameters():
            assert torch.equal(other.get_parameter(name), param), name


FILTER, LINEARS, GATHER = (f"--fp8_flow_moe.{name}" for name in ("filter_fqns", "linear_fqns", "fp8_all_gather"))
TENSOR_SHARDS = "lower parallelism.tensor_parallel_degree, or raise expert_parallel_degree"
ONE_SHARD = "parallelism.expert_tensor_parallel_degree = 1"


@pytest.mark.parametrize(
    ("flags", "dims", "changes", "said"),
    [
        ([f"{FILTER}=layers.1.,layers.7."], {}, {}, ["filter_fqns has 'layers.7.'", "layers.1.moe, layers.2.moe"]),
        ([f"{LINEARS}=w2"], {}, {}, ["linear_fqns has 'w2', which matches none of", "attention.wo"]),
        ([f"{LINEARS}=attention.wo.", "--model.converters=quantize.linear.float8,fp8_flow_moe"], {}, {},
         ["linear_fqns and model.converters' quantize.linear both convert linears"]),
        ([], {}, {"dim": 200}, ["layers.1.moe: model dim 200"]),
        ([], {}, {"moe_inter_dim": 200}, ["layers.1.moe: expert hidden dim 200"]),
        # 1408 = 88 * 16, which 16 ranks cannot share
        ([], {"tp": 16}, {"moe_inter_dim": 1408}, ["88 per rank", TENSOR_SHARDS]),
        ([], {"dp_shard": 2, "tp": 16, "ep": 2, "etp": 16}, {"moe_inter_dim": 1408}, [f"16; set {ONE_SHARD}"]),
        ([], {"dp_shard": 2, "tp": 16, "ep": 2, "etp": 1}, {"moe_inter_dim": 1408}, []),
        ([], {"dp_shard": 3, "ep": 3}, {}, ["8 experts do not divide over 3"]),
        ([GATHER], {"dp_shard": 6, "ep": 2}, {}, ["8 experts do not divide over 2 expert-parallel x 3 FSDP ranks"]),
        ([GATHER], {"dp_shard": 2, "tp": 2, "ep": 2}, {}, []),
    ],
)  # fmt: skip
def test_checks_the_models_sizes(flags: list[str], dims: dict, changes: dict, said: list[str]):
    """Before it converts any module. tests/test_checks.py has each check's limits."""
    config = make_config(*flags)
    model = make_model(config, **changes)
    with refused(*said):
        Fp8FlowMoEConverter(config, make_dims(**dims)).convert(model)
    assert set(layer_classes(model).values()) == {STOCK if said else CONVERTED}


@pytest.mark.parametrize("value", ["", "layers.1.,"])
def test_empty_filter_is_an_error(value):
    """It would match every layer and leave the whole model in bf16."""
    with pytest.raises((ValueError, SystemExit)):
        make_config(f"{FILTER}={value}")


def test_other_layers_are_refused():
    config = make_config()
    for part, base, said in (
        ("", MoE, "layers.1.moe is a Other with GroupedExperts"),
        ("reorderer", TokenReorderer, "layers.1.moe has a Other"),  # a converted layer does not call it
    ):
        model = make_model(config)
        model.layers["1"].moe.get_submodule(part).__class__ = type("Other", (base,), {})
        with refused(said, "leave", "in bf16 with fp8_flow_moe.filter_fqns"):
            convert(config, model)


@pytest.mark.parametrize(
    ("dims", "layout"),
    [
        ({}, (1, 1, 1, 1024)),
        # Tensor-parallel ranks have all tokens; of expert parallelism without etp each sends a part of them.
        ({"tp": 2}, (1, 2, 1, 1024)),
        # The ranks of context parallelism count for FSDP.
        ({"dp_shard": 2, "cp": 2}, (1, 1, 4, 512)),
        ({"dp_shard": 2, "cp": 2, "ep": 2}, (2, 1, 2, 512)),
        # Expert parallelism spans the tensor-parallel ranks. Without etp each of them holds whole experts.
        ({"dp_shard": 4, "tp": 2, "ep": 4}, (4, 1, 2, 1024)),
        ({"dp_shard": 4, "tp": 2, "ep": 4, "etp": 2}, (4, 2, 1, 1024)),
        ({"pp": 2}, (1, 1, 1, 256)),
    ],
)
def test_layout_of_the_experts(dims: dict[str, int], layout: tuple[int, ...]):
    config = make_config("--training.seq_len=256", "--training.local_batch_size=4")
    assert expert_layout(config, make_dims(**dims)) == layout


def test_limits_of_torchtitan(caplog: pytest.LogCaptureFixture):
    ranks = dict(dp_replicate=1, cp=1, pp=1, pp_enabled=False)
    for dims in (
        dict(dp_shard=1, tp=1, ep=2, etp=1),
        dict(dp_shard=2, tp=1, ep=4, etp=1),
        dict(dp_shard=3, tp=2, ep=2, etp=2),
    ):
        with refused(f"expert_parallel_degree = {dims['ep']} ", f"= {dims['dp_shard'] * dims['tp']}; choose degrees"):
            Fp8FlowMoEConverter(make_config(), SimpleNamespace(**ranks, **dims))
    Fp8FlowMoEConverter(make_config(), dataclasses.replace(make_dims(dp_shard=2, tp=2, ep=2), cp=2, world_size=8))
    for shards, warned in ((2, False), (1, True)):
        caplog.clear()
        dims = dataclasses.replace(make_dims(dp_shard=shards), dp_replicate=2, world_size=2 * shards)
        Fp8FlowMoEConverter(make_config(), dims)
        assert ("divides gradients by parallelism.data_parallel_replicate_degree = 2" in caplog.text) == warned


@pytest.mark.parametrize(
    ("replicas", "shards", "ep", "overrides", "kept", "hooks"),
    [
        (1, 1, 1, [], False, False),
        (2, 1, 1, [], False, True),
        (1, 2, 1, [], False, True),
        (1, 2, 2, [], False, False),
        (2, 2, 2, [], False, True),
        (1, 1, 1, ["--training.enable_cpu_offload"], False, True),
        (1, 1, 1, ["--fault_tolerance.enable"], True, True),
        (1, 1, 1, [f"{FILTER}=layers.1."], True, True),
        (1, 1, 1, ["--training.dtype=bfloat16"], True, True),
    ],
)
def test_fsdp_leaves_experts_alone_where_it_has_no_work(monkeypatch, replicas, shards, ep, overrides, kept, hooks):
    """Parameters on one rank, unless something relies on FSDP (``kept``); and hooks."""
    config, dims, ignored = make_config(*overrides), make_dims(dp_shard=shards, ep=ep), []
    dims.dp_replicate, dims.world_size = replicas, replicas * dims.world_size
    model = convert(config, make_model(config), dims)  # which looks at PyTorch's fully_shard
    if config.training.dtype == "bfloat16":
        model.bfloat16()
    experts = [m for m in model.modules() if isinstance(m, Fp8FlowGroupedExperts)]
    assert {m.placement.in_fsdp for m in experts} == {hooks}
    monkeypatch.setattr(
        parallel.fsdp, "fully_shard", lambda *_, ignored_params=(), **__: ignored.append(ignored_params)
    )
    freed = []
    monkeypatch.setattr(parallel, "remove_fsdp_hooks", freed.append)
    for m in experts:
        parallel.fully_shard(m, mesh=SimpleNamespace(size=lambda: 1))
    assert [len(params) for params in ignored] == [0 if kept else 3] * len(experts) != []
    assert freed == (experts if ep > 1 else [])  # whose dispatch may become part of a graph


@pytest.mark.parametrize(
    ("sizes", "setting", "as_list", "shards", "gathers"),
    [
        ((1,), True, False, True, False),
        ((2,), True, False, True, True),
        ((2, 1), True, False, True, False),  # over replicas alone FSDP gathers nothing
        ((1, 2), True, True, True, True),
        ((2,), False, False, True, False),
        ((2,), True, False, False, False),  # FSDP leaves them alone
    ],
)
def test_experts_are_gathered_in_fp8_where_fsdp_shards_them(sizes, setting, as_list, shards, gathers):
    assert call(_gathered, sizes, setting, as_list, shards) == (gathers, gathers)


def _gathered(sizes: tuple[int, ...], setting: bool, as_list: bool, shards: bool) -> tuple[bool, bool]:
    """Whether a block's experts, and FSDP, know of the gathering once the parameters have memory, as in a trainer."""
    dist.init_process_group("fake", rank=0, world_size=math.prod(sizes), store=FakeStore())
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp_replicate", "fsdp")[-len(sizes) :])
    config = make_config(*[GATHER] * setting)
    model = convert(config, make_model(config))
    block = model.layers["1"].to("meta")
    if shards:
        parallel.fully_shard([model.norm, block] if as_list else block, mesh=mesh)
    block.to_empty(device="cpu")
    experts = block.moe.experts
    return experts.gathers_fp8, hasattr(getattr(experts.w1, "_local_tensor", None), "fsdp_pre_all_gather")


def test_experts_of_several_ranks_are_gathered_in_fp8():
    assert call(_gathered_over_ep) == (True, True)


def _gathered_over_ep() -> tuple[bool, bool]:
    """As :func:`_gathered`, of experts that expert parallelism has sharded before along the same dim."""
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
    config = make_config(GATHER)
    experts = convert(config, make_model(config)).layers["1"].to("meta").moe.experts
    for name, param in [*experts.named_parameters()]:
        experts.register_parameter(name, nn.Parameter(distribute_tensor(param, mesh["ep"], [Shard(0)])))
    parallel.fully_shard(experts, mesh=mesh["efsdp"])
    experts.to_empty(device="cpu")
    return experts.gathers_fp8, hasattr(experts.w1._local_tensor, "fsdp_pre_all_gather")


def test_train_spec_can_be_ones_own(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(train_spec, "_extra_train_specs", dict(train_spec._extra_train_specs))
    own = dataclasses.replace(get_train_spec("deepseek_v3"), build_validator_fn=None)
    train_spec.register_train_spec("deepseek_v3", own)
    assert get_train_spec("deepseek_v3") is own


def test_hardware_is_checked_where_something_is_converted(monkeypatch: pytest.MonkeyPatch):
    """tests/test_doctor.py has what the check finds."""

    def fail() -> str:
        raise ValueError("no such kernels")

    monkeypatch.setattr(converter.preflight, "check_hardware", fail)
    config = make_config()
    model = make_model(config)
    with refused("no such kernels"):
        convert(config, model)
    assert set(layer_classes(model).values()) == {STOCK}
    bf16 = make_config(FILTER, "layers")
    convert(bf16, make_model(bf16))


def test_dispatch(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    """The log says how tokens travel; symmetric memory is of one node."""
    caplog.set_level(logging.INFO)
    for dispatch, used in (("auto", "all-to-all"), ("symmetric", "symmetric memory")):
        config = make_config(f"--fp8_flow_moe.dispatch={dispatch}")
        convert(config, make_model(config), make_dims(dp_shard=2, ep=2))
        assert f"dispatch over {used}" in caplog.text
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with refused("lower parallelism.expert_parallel_degree, or set fp8_flow_moe.dispatch"):
        Fp8FlowMoEConverter(config, make_dims(dp_shard=4, ep=4))
    Fp8FlowMoEConverter(config, make_dims(dp_shard=4, ep=2))


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
    printed = caplog.messages[-1]
    (summary,) = [line for line in caplog.messages if "in FP8;" in line]
    assert summary == (
        "FP8-Flow-MoE: 2 MoE layers, 2 shared experts, 1 dense FFNs, 0 linears in FP8; plain PyTorch reference on the "
        f"CPU; {SETTINGS}"
    )
    experts = f"num_experts=8, dim=256, hidden_dim=256, {SETTINGS}"
    assert printed.count(f"(experts): Fp8FlowGroupedExperts({experts})") == 2


@pytest.mark.parametrize(
    ("flags", "tp", "layers", "fp8", "stay"),
    [
        ([], 1, "12", "12", ""),
        ([f"{FILTER}=layers.1.moe.shared"], 1, "12", "2", "layers.1.moe.shared_experts: fp8_flow_moe.filter_fqns"),
        ([f"{FILTER}=layers.1."], 1, "2", "2", "layers.1.moe, layers.1.moe.shared_experts: fp8_flow_moe.filter_fqns"),
        (["--model.converters=quantize.linear.float8,fp8_flow_moe"], 1, "12", "", "quantize.linear"),
        ([], 32, "12", "", "hidden dim 256 / 32 none of 16"),
    ],
)
def test_which_layers_and_shared_experts_are_fp8(caplog, flags, tp, layers, fp8, stay):
    """Filters match both by name; what cannot be FP8 stays as it was, and the log says why."""
    config, dims = make_config(*flags), make_dims(dp_shard=4, tp=tp, ep=4) if tp > 1 else make_dims()
    model = make_model(config)
    with caplog.at_level(logging.INFO):
        Fp8FlowMoEConverter(config, dims).convert(model)
    for name, block in list(model.layers.items())[1:]:
        assert isinstance(block.moe, Fp8FlowMoE) == (name in layers)
        assert getattr(block.moe, "fp8_shared", False) == (name in fp8)
    assert f"{len(layers)} MoE layers, {len(fp8)} shared experts, " in caplog.text and stay in caplog.text


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
    moe_args = get_train_spec(model_name).model_args[flavor].moe_args
    moe_args = dataclasses.replace(moe_args, num_experts=8, top_k=min(moe_args.top_k, 2))
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
    spec = model.layers["0"].moe.experts.expert
    gate, up = 8 * torch.randn(2, 64, 32)
    got = ACTIVATIONS[spec.activation].forward(gate, up, *spec.parameters)
    torch.testing.assert_close(got, gpt_oss_moe.swiglu(torch.stack((gate, up), -1).flatten(1), limit=5.0))
    assert spec.interleaved


def test_torchaos_quantize_gives_the_same_layers():
    """The bits of the converter with the same layers, shared experts included."""
    job = make_config("--fp8_flow_moe.filter_fqns=feed_forward")
    model = make_model(job, "cpu", n_layers=2)
    with torch.no_grad():
        model.init_weights()
    converted, results = copy.deepcopy(model), []
    quantize_(converted, Fp8FlowMoEConfig(), filter_fn=is_moe)
    assert converted.layers["1"].moe.fp8_shared
    tokens = torch.randint(0, 100, (2, 32))
    for m in (converted, convert(job, copy.deepcopy(model)), model):
        out = m(tokens)
        out.logsumexp(-1).mean().backward()
        results.append([out.detach(), *(p.grad for p in m.parameters())])
    assert_equal(*results[:2])
    assert not torch.equal(results[0][0], results[2][0])
    with refused("the layer is a Fp8FlowMoE"):
        quantize_(converted, Fp8FlowMoEConfig(), filter_fn=is_moe)


@pytest.mark.parametrize("change", ["optimizer's step", "checkpoint"])
def test_cached_weights_are_never_stale(monkeypatch, change):
    """Two microbatches share the quantized weights, then the weights change. All results equal those without the cache,
    also where parameters have no versions, as under FSDP. tests/test_cache.py has other changes."""
    monkeypatch.setattr(operands, "tensor_key", lambda weight: 0)
    tokens, results = torch.randint(0, 100, (2, 32)), []
    for flags in (["--fp8_flow_moe.cache_weights"], []):
        config = make_config(*flags)
        torch.manual_seed(0)
        model = make_model(config, "cpu", n_layers=2)
        with torch.no_grad():
            model.init_weights()
        convert(config, model)
        for _ in range(2):
            model(tokens).logsumexp(-1).mean().backward()
        before = [p.detach().clone() for p in model.parameters()]
        if change == "checkpoint":
            model.load_state_dict({n: t + 0.05 if ".w" in n else t.clone() for n, t in model.state_dict().items()})
        else:
            torch.optim.SGD(model.parameters(), lr=10.0).step()
        assert not all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        model.zero_grad()
        out = model(tokens)
        out.logsumexp(-1).mean().backward()
        results.append([out.detach(), *[p.grad for p in model.parameters()]])
    assert_equal(*results)


def test_caches_are_cleared_by_any_container_of_optimizers():
    """torchtitan calls the converter after each step, whatever class the optimizers are of."""
    linear, x = Fp8FlowLinear(128, 128, config=Fp8FlowMoEConfig(cache_weights=True)), torch.randn(2, 128)
    linear(x), linear(x)
    assert generations(linear.cache) == [1]
    build_model_converters(make_config("--fp8_flow_moe.cache_weights"), make_dims()).post_optimizer_hook([])
    linear(x)
    assert generations(linear.cache) == [2]


@pytest.mark.parametrize("filters, changes", [([], 1), (["--fp8_flow_moe.filter_fqns=layers"], 0)])
def test_nothing_is_changed_where_nothing_is_converted(monkeypatch, caplog, filters, changes):
    """What is changed is logged once."""
    done = []
    monkeypatch.setattr(converter.compat, "fix_selective_checkpointing", lambda: done.append(1))
    config = make_config(*filters)
    models = [make_model(config), make_model(config)]
    with undone(), preflight.for_other_machines(), caplog.at_level(logging.INFO):
        converter.register()
        for model in models:
            convert(config, model)
    assert len(done) == 2 * changes
    (said,) = [line for line in caplog.messages if "in this process of torchtitan" in line] or [""]
    for name in ("TensorParallel._apply", "ReordererSequenceParallel._apply", ", fully_shard,"):
        assert (name in said) == changes
