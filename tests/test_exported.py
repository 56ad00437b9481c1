"""Training through programs of torch.export: refused, whether they were exported with gradients or without. Graphs that
``aot_compile`` saves for another process do train."""

from pathlib import Path

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.distributed.pipelining import SplitPoint, pipeline

from tests.layer import DEVICE, refused
from tests.processes import call
from titan_fp8moe import Fp8FlowLinear, Fp8FlowMoEConfig, RoutedExperts, WeightCache, grouped_ffn, grouped_mm
from titan_fp8moe.layer.group import feed_forward, linear
from titan_fp8moe.layer.weights import ExpertWeights


class Block(torch.nn.Module):
    def __init__(self, linear=False, **settings):
        super().__init__()
        self.router = torch.nn.Linear(128, 4, device=DEVICE)
        self.experts = RoutedExperts(4, 128, 128, config=Fp8FlowMoEConfig(**settings), device=DEVICE)
        self.proj = Fp8FlowLinear(128, 128, device=DEVICE) if linear else torch.nn.Identity()

    def forward(self, x):
        scores, ids = self.router(x).softmax(-1).topk(2)
        return x + self.proj(self.experts(x, ids, scores))


@pytest.mark.parametrize("settings", [{}, dict(cache_weights=True), dict(linear=True)], ids=str)
@pytest.mark.parametrize("strict", [False, True])
def test_programs_run_and_do_not_train(settings, strict):
    block, x = Block(**settings), torch.randn(16, 128, device=DEVICE)
    want = block(x)
    with refused("torch.no_grad()", "lose the gradients", error=Exception):
        torch.export.export(block, (x,), strict=strict)
    with torch.no_grad():
        program = torch.export.export(block, (x,), strict=strict).module()
    assert torch.equal(program(x), want)
    with refused("exported without gradients", error=RuntimeError):
        program(x).square().sum().backward()


class Call(torch.nn.Module):
    def __init__(self, function, *shapes):
        super().__init__()
        self.function = function
        self.weights = torch.nn.ParameterList(torch.randn(shape, device=DEVICE).bfloat16() for shape in shapes)

    def forward(self, x):
        return self.function(x, *[self.weights[i] for i in range(len(self.weights))])  # torch 2.11 unpacks no lists


CONFIG = Fp8FlowMoEConfig()
OTHERS = {
    "ffn": (lambda x, *w: feed_forward(x, ExpertWeights(*w), CONFIG), *[(128, 128)] * 3),
    "linear": (lambda x, w: linear(x, w, CONFIG), (128, 128)),
    "grouped_mm": (lambda x, w: grouped_mm(x, w, x.new_full((1,), 16, dtype=torch.int32)), (1, 128, 128)),
}


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("other", OTHERS)
def test_other_layers_refuse_as_experts_do(other, strict):
    with refused("lose the gradients", error=Exception):
        torch.export.export(Call(*OTHERS[other]), (torch.randn(16, 128, device=DEVICE).bfloat16(),), strict=strict)


def test_the_experts_of_a_pipeline():
    model = torch.nn.Sequential(Block(), Block())
    with pytest.raises(RuntimeError) as raised:
        pipeline(model, mb_args=(torch.randn(16, 128, device=DEVICE),), split_spec={"1": SplitPoint.BEGINNING})
    assert "PipelineStage takes modules" in str(raised.value.__cause__)


def test_frozen_layers_are_exported_as_they_are():
    """Nothing of theirs is lost, whatever the mode."""
    for settings in ({}, dict(linear=True)):
        block, x = Block(**settings).requires_grad_(False), torch.randn(16, 128, device=DEVICE)
        for strict in (False, True):
            assert torch.equal(torch.export.export(block, (x,), strict=strict).module()(x), block(x))


def test_frozen_layers_in_fake_tensor_mode():
    with FakeTensorMode():
        block, x = Block(linear=True).requires_grad_(False), torch.randn(16, 128, device=DEVICE, requires_grad=True)
        block(x).sum().backward()
        assert x.grad.shape == x.shape and block.experts.cache.copies is None


saves_graphs = pytest.mark.skipif(not hasattr(torch.compile(len), "aot_compile"), reason="torch saves no graphs yet")
KEPT = {
    "cached": lambda: RoutedExperts(4, 128, 128, config=Fp8FlowMoEConfig(cache_weights=True), device="cpu"),
    "frozen": lambda: RoutedExperts(4, 128, 128, device="cpu").requires_grad_(False),
    "frozen linear": lambda: Fp8FlowLinear(128, 128, device="cpu").requires_grad_(False),
}


def make_kept(kind: str) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    module, x = KEPT[kind](), torch.randn(64, 128, requires_grad=True)
    return module, (x,) if "linear" in kind else (x, torch.rand(64, 4).topk(2).indices, torch.rand(64, 2))


def save_compiled(kind: str, path: str, run_before: bool) -> None:
    module, args = make_kept(kind)
    if run_before:
        module(*args)
    torch.compile(module, fullgraph=True).forward.aot_compile((args, {})).save_compiled_function(path)


def load_compiled(kind: str, path: str) -> list[bool]:
    """Whether it equals the eager module, before that has run, after it, and with other weights."""
    module, args = make_kept(kind)
    with open(path, "rb") as file:
        loaded = torch.compiler.load_compiled_function(file)
    equal = []
    for _ in range(3):
        outs = loaded(module, *args), module(*args)
        got, want = ([out, *torch.autograd.grad(out.square().sum(), args[0])] for out in outs)
        equal.append(all(map(torch.equal, got, want)))
        if len(equal) == 2:
            with torch.no_grad():
                for param in module.parameters():
                    param.mul_(-0.5)
    return equal


@saves_graphs
@pytest.mark.parametrize("run_before", [False, True], ids=["at once", "run before"])
@pytest.mark.parametrize("kind", KEPT)
def test_saved_graphs_keep_no_weights(tmp_path: Path, kind: str, run_before: bool):
    """The copies would be another process's: its graph quantizes the weights in each call."""
    path = str(tmp_path / "function")
    call(save_compiled, kind, path, run_before)
    assert call(load_compiled, kind, path) == [True] * 3


@saves_graphs
def test_saved_graphs_take_no_cache():
    weights, ends = [torch.randn(4, 128, 128, device=DEVICE) for _ in range(3)], torch.full((4,), 16, device=DEVICE)
    x, cache = torch.randn(16, 128, device=DEVICE), WeightCache()

    def function(x: torch.Tensor) -> torch.Tensor:
        return grouped_ffn(x, *weights, ends.int(), cache=cache)

    with refused("WeightCache", "leave it out", error=Exception):
        torch.compile(function, fullgraph=True).aot_compile(((x,), {}))
