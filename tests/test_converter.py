"""The converter in torchtitan 0.2.2, and the corrections that come with it. ``test_titan_jobs.py`` trains."""

import copy
import dataclasses
import functools
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torchao.quantization import quantize_
from torchtitan.components.validate import Validator
from torchtitan.config import ConfigManager
from torchtitan.models.moe.moe import MoE
from torchtitan.protocols.model_converter import build_model_converters
from torchtitan.protocols.train_spec import get_train_spec

from experiments.reference import relative_error
from tests.distributed.conftest import case_dir  # noqa: F401  a fixture
from tests.jobs import CUSTOM_MODULE, convert, cpu_only, fp8_flags, make_config, make_dims, make_model  # noqa: F401
from tests.layer import generations, refused
from tests.patched import undone
from tests.test_doctor import gpu  # noqa: F401  a fixture
from tests.test_titan_jobs import VALIDATION, logged, train
from titan_fp8moe import Fp8FlowLinear, Fp8FlowMoEConfig, RoutedExperts, patches
from titan_fp8moe.dispatch.symmetric.workspace import ROWS, Sizes, Workspace
from titan_fp8moe.kernels import warm_up
from titan_fp8moe.torchao import is_moe
from titan_fp8moe.torchtitan import converter, meta
from titan_fp8moe.torchtitan.converter import Fp8FlowMoEConverter
from titan_fp8moe.torchtitan.flavors import MoEValidator
from titan_fp8moe.torchtitan.modules import Fp8FlowMoE
from titan_fp8moe.trainer import compat
from titan_fp8moe.trainer.experts import Fp8FFN


def test_wrong_settings_of_a_file_and_of_the_command_line(tmp_path: Path):
    """tests/test_refusals.py has each setting's."""
    (tmp_path / "wrong.toml").write_text('[fp8_flow_moe]\nwgrad = "blanced"\n')
    with refused("fp8_flow_moe.wgrad is 'blanced'; set it to one of 'balanced'"):
        ConfigManager().parse_args([CUSTOM_MODULE, f"--job.config_file={tmp_path}/wrong.toml"])
    for wrong in ("wgrad=fp8", "filter_fqns=", "filter_fqns=layers.1.,"):  # the empty one would match every layer
        with pytest.raises((ValueError, SystemExit)):
            make_config(f"--fp8_flow_moe.{wrong}")


def test_converted_layers_can_be_pickled(monkeypatch: pytest.MonkeyPatch):
    """Their kernels compile meanwhile, with the ptxas that a job has."""
    begun: list[str] = []
    for name in ("use_inductors_ptxas", "begin"):
        monkeypatch.setattr(warm_up, name, functools.partial(begun.append, name))
    config = make_config("--fp8_flow_moe.cache_weights")
    model = make_model(config, "cpu")
    with torch.no_grad():
        model.init_weights()
    convert(config, model)
    assert begun == ["use_inductors_ptxas", "begin"]
    for layer in (model.layers["0"].feed_forward, model.layers["1"].moe):
        other = pickle.loads(pickle.dumps(layer))
        assert [type(module) for module in other.modules()] == [type(module) for module in layer.modules()]
        for name, param in layer.named_parameters():
            assert torch.equal(other.get_parameter(name), param), name


def test_other_layers_are_refused():
    for part, said in (("", "Other, GroupedExperts, TokenReorderer"), ("reorderer", "MoE, GroupedExperts, Other")):
        model = make_model(config := make_config())
        other = model.layers["1"].moe.get_submodule(part)
        other.__class__ = type("Other", (type(other),), {})
        with refused(f"layers.1.moe has {said}", "leave", "in bf16 with fp8_flow_moe.filter_fqns"):
            convert(config, model)
    model = nn.ModuleDict({"wq": nn.Linear(128, 128, bias=False)})
    with refused("no MoE layer and no dense FFN; name linears in fp8_flow_moe.linear_fqns"):
        convert(make_config(), model)
    assert type(convert(make_config("--fp8_flow_moe.linear_fqns=wq."), model)["wq"]) is Fp8FlowLinear


def test_degrees_that_torchtitan_gets_wrong_are_warned_of(caplog: pytest.LogCaptureFixture):
    for shards, warned in ((2, False), (1, True)):
        caplog.clear()
        dims = dataclasses.replace(make_dims(dp_shard=shards), dp_replicate=2, world_size=2 * shards)
        Fp8FlowMoEConverter(make_config(), dims)
        assert ("parallelism.data_parallel_replicate_degree = 2" in caplog.text) == warned
        assert "pipeline" not in caplog.text
    Fp8FlowMoEConverter(make_config(), dataclasses.replace(make_dims(dp_shard=1), pp=2, world_size=2))
    assert "sums over a step's tokens, which training.max_norm clips" in caplog.text


def test_hardware_is_checked_where_something_is_converted(gpu):  # noqa: F811
    """Nowhere else anything is changed either. tests/test_doctor.py has what the check finds."""
    gpu(((8, 0), "2.11", "3.6"))
    for flags, said in (([], ["compute capability 8.9 or later"]), (["--fp8_flow_moe.filter_fqns=layers"], [])):
        model = make_model(config := make_config(*flags))
        with undone():
            converter.register()
            before = patches.listed()
            with refused(*said):
                convert(config, model)
            assert patches.listed() == before
        assert not any(isinstance(module, Fp8FlowMoE) for module in model.modules())


def test_caches_are_cleared_by_any_container_of_optimizers():
    """torchtitan calls the converter after each step, whatever class the optimizers are of."""
    linear, x = Fp8FlowLinear(128, 128, config=Fp8FlowMoEConfig(cache_weights=True)), torch.randn(2, 128)
    for generation in (1, 2):
        linear(x), linear(x)
        assert generations(linear.cache) == [generation]
        build_model_converters(make_config("--fp8_flow_moe.cache_weights"), make_dims()).post_optimizer_hook([])


LINEARS = "--fp8_flow_moe.linear_fqns=attention.wq.,attention.wo."
EXPERTS, DENSE = (".experts.",), (".feed_forward.", ".wq.", ".wo.")


@pytest.mark.parametrize(("model_name", "flavor", "flags", "changes", "parts"), [
    ("llama4", "debugmodel", [], {}, EXPERTS),
    ("qwen3", "debugmodel_moe", [], {}, EXPERTS),
    ("gpt_oss", "debugmodel", [], dict(vocab_size=2048, moe_inter_dim=272, swiglu_limit=0.3), EXPERTS),
    ("llama3", "debugmodel", [LINEARS], {}, DENSE),
    ("qwen3", "debugmodel", [LINEARS], {}, DENSE),
])  # fmt: skip
def test_other_models_train_as_in_fp32(model_name, flavor, flags, changes, parts):
    torch.manual_seed(0)
    config = make_config("--training.seq_len=64", *flags, model=model_name, flavor=flavor)
    # Two layers only: FP8 noise sends a few tokens to other experts in each further layer. Few experts save time.
    args = get_train_spec(model_name).model_args[flavor]
    if hasattr(args, "moe_args"):
        few = dataclasses.replace(args.moe_args, num_experts=8, top_k=min(args.moe_args.top_k, 2))
        changes = changes | dict(moe_args=few)
    reference = make_model(config, device="cpu", n_layers=2, **changes).float()
    for moe in (m for m in reference.modules() if isinstance(m, MoE)):
        assert moe.score_before_experts == (model_name == "llama4")
        moe.experts.use_grouped_mm = False  # that path is bf16, also of fp32 weights
    with torch.no_grad():
        reference.init_weights(buffer_device=torch.device("cpu"))
    model = convert(config, copy.deepcopy(reference))
    if parts is DENSE:
        assert sum(isinstance(m, Fp8FFN | Fp8FlowLinear) for m in model.modules()) == 2 * 3
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
    assert all(math.isfinite(error) and (error < 0.15 or parts is EXPERTS) for error in errors.values()), errors
    converted = [error for name, error in errors.items() if any(part in name for part in parts)]
    assert converted and min(converted) > 0.01 and max(converted) < 0.15, errors


def test_torchaos_quantize_gives_the_same_layers():
    job = make_config("--fp8_flow_moe.filter_fqns=feed_forward")
    converted = make_model(job)
    quantize_(converted, Fp8FlowMoEConfig(), filter_fn=is_moe)
    for got, want in zip(converted.modules(), convert(job, make_model(job)).modules(), strict=True):
        assert type(got) is type(want) and getattr(got, "fp8_shared", None) == getattr(want, "fp8_shared", None)
    with refused("the layer has Fp8FlowMoE, Fp8FlowGroupedExperts"):
        quantize_(converted, Fp8FlowMoEConfig(), filter_fn=is_moe)


@pytest.mark.parametrize("dims, autocast", [(dict(), True), (dict(dp_shard=2), False), (dict(tp=2), False)])
def test_one_gpu_trains_under_autocast(dims, autocast):
    assert meta.tokens_of(make_config(), make_dims(**dims)).autocast == autocast


def test_selective_checkpointing_sees_no_range_of_the_profiler():
    """A recomputation may have others."""
    asked = []

    def policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        asked.append(str(op))
        return CheckpointPolicy.PREFER_RECOMPUTE

    with undone():
        compat.fix_selective_checkpointing()
        contexts = functools.partial(create_selective_checkpoint_contexts, policy)
        block = torch.profiler.record_function("range")(torch.sin)
        checkpoint(block, torch.ones(2, requires_grad=True), use_reentrant=False, context_fn=contexts)
    assert "aten.sin.default" in asked and "profiler" not in "".join(asked)


def test_a_compiled_checkpoint_keeps_its_inputs_only():
    """PyTorch 2.11 kept all that an autograd.Function saves."""
    compat.fix_full_checkpointing()
    block = checkpoint_wrapper(RoutedExperts(4, 128, 128), preserve_rng_state=False)
    x, scores = torch.randn(256, 128, requires_grad=True), torch.rand(256, 2, requires_grad=True)
    inputs = x, torch.randint(4, (256, 2)), scores
    kept, saved = {t.untyped_storage().data_ptr() for t in (*inputs, *block.parameters())}, []
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        out = compiled(*inputs)
    out.sum().backward()
    assert x.grad is not None and saved and kept.issuperset(tensor.untyped_storage().data_ptr() for tensor in saved)


def test_llama4_validates(case_dir: Path, tmp_path: Path):  # noqa: F811
    """torchtitan's own validator gives its attention masks that it refuses."""
    flags = "--model.name=llama4", "--model.flavor=debugmodel", *fp8_flags(), *VALIDATION
    assert logged(train(case_dir, tmp_path, 2, *flags, ep=1), "validate step")


def test_validation_leaves_load_balancing_alone(monkeypatch: pytest.MonkeyPatch):
    """And ends with an error where rows had no room: after the last step no optimizer would say so."""
    model = nn.Module()
    model.register_buffer("tokens_per_expert", torch.arange(8.0))
    monkeypatch.setattr(Validator, "validate", lambda *_: model.tokens_per_expert.add_(1))
    sizes = Sizes(1, 1, 128, 1, 1)
    at = Workspace(sizes, 0, [torch.zeros(sizes.nbytes, dtype=torch.uint8)], lambda: 1.0)
    at.report[ROWS] = 999
    with pytest.raises(RuntimeError, match="larger dispatch_capacity"):
        MoEValidator.validate(object.__new__(MoEValidator), [model], step=1)
    assert torch.equal(model.tokens_per_expert, torch.arange(8.0))
