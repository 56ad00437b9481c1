"""torchtitan's models without experts: FFNs and named linears in FP8, against fp32 and compiled."""

import copy
import logging

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
from torchtitan.models.llama3.infra.parallelize import parallelize_llama

from experiments.reference import relative_error
from tests.jobs import convert, cpu_only, make_config, make_dims, make_model  # noqa: F401
from tests.layer import refused
from titan_fp8moe import Fp8FlowLinear
from titan_fp8moe.torchtitan.modules import Fp8FlowFeedForward

LINEARS = "--fp8_flow_moe.linear_fqns=attention.wq.,attention.wo."
LLAMA = {"model": "llama3", "flavor": "debugmodel"}


def initialized(model: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device("cpu"))
    return model


def step(model: nn.Module) -> dict[str, torch.Tensor]:
    """The loss and all gradients, without the names of compiled blocks."""
    tokens = torch.randint(2048, (4, 65), generator=torch.Generator().manual_seed(0))
    model.zero_grad()
    loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())
    loss.backward()
    grads = {name.replace("_orig_mod.", ""): p.grad.clone() for name, p in model.named_parameters()}
    return {"loss": loss.detach()} | grads


@pytest.mark.parametrize("model_name", ["llama3", "qwen3"])
def test_gradients_are_fp32s_but_for_fp8_noise(caplog, model_name: str):
    config = make_config("--training.seq_len=64", LINEARS, model=model_name, flavor="debugmodel")
    reference = initialized(make_model(config, "cpu", n_layers=2))
    with caplog.at_level(logging.INFO):
        model = convert(config, copy.deepcopy(reference))
    assert "0 MoE layers, 0 shared experts, 2 dense FFNs, 4 linears in FP8" in caplog.text
    assert sum(isinstance(m, Fp8FlowFeedForward | Fp8FlowLinear) for m in model.modules()) == 6
    got, want = step(model), step(reference)
    assert float(got.pop("loss")) == pytest.approx(float(want.pop("loss")), rel=0.01)
    errors = {name: relative_error(grad, want[name]) for name, grad in got.items()}
    assert max(errors.values()) < 0.15, errors
    converted = [error for name, error in errors.items() if "feed_forward" in name or "wq" in name or "wo" in name]
    assert len(converted) == 10 and min(converted) > 0.01, errors


COUNT = ["--fp8_flow_moe.statistics_every=1000", "--metrics.enable_tensorboard"]


@pytest.mark.parametrize(("flags", "way"), [
    ([], "dense blocks 0, 1 compile as one graph each"),
    (COUNT, "dense blocks 0, 1 compile as one graph up to the FFN: fp8_flow_moe.statistics_every"),
])  # fmt: skip
def test_blocks_compile(caplog, flags: list[str], way: str):
    """All blocks share one graph, whose numbers are eager ones'."""
    torch._dynamo.reset()
    counters.clear()
    config = make_config("--training.seq_len=64", *flags, **LLAMA)
    models = [initialized(convert(config, make_model(config, "cpu", n_layers=2))) for _ in range(2)]
    config.compile.enable, config.compile.backend, config.activation_checkpoint.mode = True, "aot_eager", "none"
    with caplog.at_level(logging.INFO):
        parallelize_llama(models[0], make_dims(), config)
    assert way in caplog.text
    got, want = map(step, models)
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=1e-4, atol=1e-6, msg=name)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


def test_a_model_of_which_nothing_could_be_fp8_is_refused():
    with refused("no MoE layer and no dense FFN; name linears in fp8_flow_moe.linear_fqns"):
        convert(make_config(), nn.ModuleDict({"wq": nn.Linear(128, 128, bias=False)}))
    model = nn.ModuleDict({"wq": nn.Linear(128, 128, bias=False)})
    assert type(convert(make_config("--fp8_flow_moe.linear_fqns=wq."), model)["wq"]) is Fp8FlowLinear
