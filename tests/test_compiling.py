"""Converted blocks as one graph: which ones, their numbers, and how often they compile."""

import logging
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torchtitan.config import ConfigManager
from torchtitan.distributed import ParallelDims
from torchtitan.models.deepseek_v3.infra import parallelize
from torchtitan.protocols.model_converter import build_model_converters
from torchtitan.protocols.train_spec import get_train_spec

import titan_fp8moe.torchtitan  # noqa: F401  registers the flavor `tiny`
from tests.layer import DEVICE
from titan_fp8moe.torchtitan import compiling
from titan_fp8moe.torchtitan.modules import Fp8FlowMoE

ONE_PROCESS = ParallelDims(dp_replicate=1, dp_shard=1, cp=1, tp=1, pp=1, ep=1, etp=1, world_size=1)
TOKENS = 64


def make_model(*flags: str, backend: str | None = None) -> nn.Module:
    """The tiny DeepSeek-V3, converted; with ``backend`` as torchtitan checkpoints and compiles it."""
    config = ConfigManager().parse_args(
        ["--job.config_file", "train_configs/debug.toml", f"--training.seq_len={TOKENS}", *flags]
    )
    spec = get_train_spec("deepseek_v3")
    args = spec.model_args["tiny"]
    args.update_from_config(config)
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = spec.model_cls(args)
    build_model_converters(config, ONE_PROCESS).convert(model)
    if backend is not None:
        config.compile.enable, config.compile.backend, config.compile.components = True, backend, ["model"]
        parallelize.parallelize_deepseekv3(model, ONE_PROCESS, config)
    with torch.no_grad():
        model.init_weights(torch.device(DEVICE))
    return model


def step(model: nn.Module, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """The loss and every gradient, by the parameters' plain names; then the tokens that each expert counted."""
    model.zero_grad()
    loss = model(tokens.to(DEVICE)).logsumexp(-1).square().mean()
    loss.backward()
    names = {
        name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", ""): p
        for name, p in model.named_parameters()
    }
    counts = [layer.moe.tokens_per_expert.clone() for layer in model.layers.values() if layer.moe_enabled]
    return {"loss": loss.detach(), "counts": torch.stack(counts)} | {name: p.grad.clone() for name, p in names.items()}


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_same_numbers_and_no_recompilation(mode):
    """Under every kind of checkpointing; new tokens and routings compile nothing."""
    torch._dynamo.reset()
    flags = [f"--activation_checkpoint.mode={mode}"]
    eager, compiled = make_model(*flags), make_model(*flags, backend="aot_eager")
    counters.clear()
    for i in range(3):
        tokens = torch.randint(0, 2048, (2, TOKENS), generator=torch.Generator().manual_seed(i))
        want, got = step(eager, tokens), step(compiled, tokens)
        # Eagerly, full checkpointing would count a token twice; a graph counts it once.
        assert torch.equal(got.pop("counts"), want.pop("counts"))
        for name, value in want.items():
            torch.testing.assert_close(got[name], value, rtol=1e-4, atol=1e-6, msg=name)
        if i == 0:
            compilations = counters["stats"]["unique_graphs"]
    assert counters["stats"]["unique_graphs"] == compilations
    assert not counters["graph_break"]


def test_blocks_with_inductor():
    """The real backend, forward and backward, once."""
    torch._dynamo.reset()
    eager, compiled = make_model(), make_model(backend="inductor")
    tokens = torch.randint(0, 2048, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    want, got = step(eager, tokens), step(compiled, tokens)
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=1e-2, atol=1e-4, msg=name)


@pytest.mark.parametrize(
    "flag", ["--fp8_flow_moe.cache_weights", "--fp8_flow_moe.filter_fqns=layers.1."], ids=["cache", "filter"]
)
def test_log_names_blocks_and_reasons(flag, caplog):
    with caplog.at_level(logging.INFO):
        model = make_model(flag, backend="eager")
    whole = {name for name, block in model.layers.items() if type(block).__name__ == "OptimizedModule"}
    if "cache" in flag:
        assert whole == {"0"} and "blocks 1, 2 compile by submodules: fp8_flow_moe.cache_weights" in caplog.text
    else:
        assert whole == {"0", "2"} and "MoE blocks 2 compile as one graph" in caplog.text
        assert "MoE blocks 1 compile by submodules: not converted" in caplog.text


def test_reasons():
    layer = make_model().layers["1"].moe
    assert isinstance(layer, Fp8FlowMoE) and compiling.why_not_one_graph(layer) is None
    assert compiling.why_not_one_graph(SimpleNamespace()) == "not converted"
    layer.experts.set_meshes(SimpleNamespace(), None)
    assert "split sizes" in compiling.why_not_one_graph(layer)
    layer.experts.set_meshes(None, SimpleNamespace())
    assert compiling.why_not_one_graph(layer) == "tensor parallelism"
