"""Converted blocks as one graph: which ones, their numbers, and how often they compile."""

import copy
import functools
import logging
from types import SimpleNamespace

import pytest
import torch
import torch._functorch.config
import torch._inductor.config
from torch import nn
from torch._dynamo.utils import counters
from torchtitan.models.moe import MoE
from torchtitan.protocols.train_spec import get_train_spec

from experiments.reference import relative_error
from tests import jobs
from tests.layer import DEVICE
from titan_fp8moe.config import Fp8FlowMoEConfig
from titan_fp8moe.torchtitan import compiling
from titan_fp8moe.trainer.plan import plain_name

TOKENS = 64


def make_model(*flags: str, backend: str | None = None, model: str = "deepseek_v3", flavor: str = "tiny") -> nn.Module:
    """A model, converted; with ``backend`` as torchtitan checkpoints and compiles it."""
    flags = "--job.config_file=train_configs/debug.toml", f"--training.seq_len={TOKENS}", *flags
    config = jobs.make_config(*flags, model=model, flavor=flavor)
    torch.manual_seed(0)
    made = jobs.convert(config, jobs.make_model(config, DEVICE))
    if backend is not None:
        config.compile.enable, config.compile.backend, config.compile.components = True, backend, ["model"]
        get_train_spec(model).parallelize_fn(made, jobs.make_dims(), config)
    with torch.no_grad():
        made.init_weights(torch.device(DEVICE))
    return made


class Passes(nn.Module):
    """In the place of attention, which is torchtitan's and takes most of a compilation."""

    def forward(self, x: torch.Tensor, *_: object) -> torch.Tensor:
        return x


def without_attention(model: nn.Module) -> nn.Module:
    for block in model.layers.values():
        block.attention = Passes()
    return model


def step(model: nn.Module, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """The loss and every gradient, by the parameters' plain names; then the tokens that each expert counted."""
    model.zero_grad()
    loss = model(tokens.to(DEVICE)).logsumexp(-1).square().mean()
    loss.backward()
    names = {plain_name(name): p for name, p in model.named_parameters()}
    counts = torch.stack([m.tokens_per_expert for m in model.modules() if isinstance(m, MoE)] or [torch.zeros(1)])
    return {"loss": loss.detach(), "counts": counts} | {name: p.grad.clone() for name, p in names.items()}


def tokens_of(batch: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 2048, (batch, TOKENS), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(autouse=True)
def fresh_compiler():
    """No graphs of other tests; torchtitan sets the budget for the process."""
    torch._dynamo.reset()
    counters.clear()
    with torch._functorch.config.patch(activation_memory_budget=1.0):
        yield


@functools.cache
def eager_steps() -> list[dict[str, torch.Tensor]]:
    model = make_model()
    return [step(model, tokens_of(2, i)) for i in range(2)]


def num_graphs() -> int:
    assert not counters["graph_break"]
    return counters["stats"]["unique_graphs"]


CACHE = ["--fp8_flow_moe.cache_weights"]
EAGER_FFNS = ["--fp8_flow_moe.statistics_every=1000", "--metrics.enable_tensorboard"]


@pytest.mark.parametrize(
    ("mode", "flags", "counts_per_token"),
    # Checkpointing recomputes what precedes an eager FFN. torchtitan halves the counts of checkpointed blocks.
    [("selective", CACHE, 1), ("full", [], 1), ("selective", EAGER_FFNS, 2)],
)
def test_same_numbers_and_no_recompilation(mode, flags, counts_per_token):
    """Under both kinds of checkpointing; new tokens and routings compile nothing."""
    flags = [*flags, "--activation_checkpoint.selective_ac_option=op", f"--activation_checkpoint.mode={mode}"]
    compiled = make_model(*flags, backend="aot_eager")
    for i, want in enumerate(eager_steps()):
        got = step(compiled, tokens_of(2, i))
        assert torch.equal(got.pop("counts"), want["counts"] * counts_per_token)
        for name, value in got.items():
            torch.testing.assert_close(value, want[name], rtol=1e-4, atol=1e-6, msg=name)
        assert len(got) == len(want) - 1 and num_graphs() == 2  # of dense and of MoE blocks


def test_what_compiles_again():
    """Both kinds of blocks: once for a second batch size, any third uses that; once more for 1; all without gradients.
    The sum is past PyTorch's limit for one function."""
    model, compiled = without_attention(make_model(backend="eager")), []
    for batch, validates in [(2, False), (2, True), (3, False), (4, False), (1, False), (3, True), (2, False)]:
        model.train(not validates)
        if validates:
            with torch.no_grad():
                model(tokens_of(batch, batch).to(DEVICE))
        else:
            step(model, tokens_of(batch, batch))
        compiled.append(num_graphs())
    assert compiled == [2, 4, 6, 6, 8, 10, 10]


def test_blocks_with_inductor():
    """The real backend without checkpointing, forward and backward, before and after weights change."""
    models = make_model(), make_model(*CACHE, "--activation_checkpoint.mode=none", backend="inductor")
    eager, compiled = map(without_attention, models)
    for _ in range(2):
        want = step(eager, tokens_of(1, 0))
        with torch._inductor.config.patch({"cpp.simdlen": 1}):  # it would ask g++ for each kind of vectors
            got = step(compiled, tokens_of(1, 0))
        for name, value in want.items():
            assert relative_error(got[name], value) < 0.02, name
        for param in (param for model in models for param in model.parameters()):
            param.data.mul_(1.25)


@pytest.mark.parametrize(("flags", "way"), [
    ([], "dense blocks 0, 1, 2, 3, 4, 5 compile as one graph each"),
    (EAGER_FFNS, "dense blocks 0, 1, 2, 3, 4, 5 compile as one graph up to the FFN: fp8_flow_moe.statistics_every"),
])  # fmt: skip
def test_blocks_of_a_dense_model(caplog, flags: list[str], way: str):
    """All share one graph, whose numbers are eager ones'."""
    flags, llama3 = [*flags, "--activation_checkpoint.mode=none"], dict(model="llama3", flavor="debugmodel")
    with caplog.at_level(logging.INFO):
        models = make_model(*flags, **llama3), make_model(*flags, backend="aot_eager", **llama3)
    assert way in caplog.text
    want, got = (step(model, tokens_of(2, 0)) for model in models)
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=1e-4, atol=1e-6, msg=name)
    assert num_graphs() == 1


def test_reasons():
    """Those that no layout of tests/distributed has."""
    block = make_model().layers["1"]
    experts = block.moe.experts
    experts.ep_mesh = SimpleNamespace()
    experts.config, experts.in_fsdp = Fp8FlowMoEConfig(dispatch="symmetric"), True
    assert compiling.why_eager(block) == "FSDP's hooks on the experts" and compiling.why_submodules(block) is None
    block.__class__ = type("OwnBlock", (type(block),), {})
    assert "in a OwnBlock that is not torchtitan's" in compiling.why_submodules(block)
    experts.ep_mesh, experts.tp_mesh = None, SimpleNamespace()
    assert compiling.why_submodules(block) == "tensor parallelism"


def test_copies_run_their_own_weights():
    model = make_model(*CACHE, backend="eager")
    copied, tokens = copy.deepcopy(model.layers["1"]), torch.randn(1, TOKENS, 256, device=DEVICE)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
        assert torch.equal(copied(tokens, model.freqs_cis, None), tokens)
