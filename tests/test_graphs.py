"""Layers in graphs: sizes that a graph does not know, such as the number of tokens that a mask selects; fake tensors;
programs of torch.export, which run and do not train; graphs that ``aot_compile`` saves for another process; and CUDA's.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.torch_version import TorchVersion

from tests.layer import DEVICE, assert_equal, gradients, make_layer, refused
from tests.processes import call, run_script
from titan_fp8moe import (
    Fp8FlowLinear,
    Fp8FlowMoEConfig,
    RoutedExperts,
    SharedExperts,
    grouped_ffn,
    grouped_mm,
    routed_experts,
)  # fmt: skip
from titan_fp8moe.layer.group import feed_forward
from titan_fp8moe.layer.weights import ExpertWeights

T, D, E, K = 64, 128, 4, 2
CONFIG = Fp8FlowMoEConfig()


def ends_of(ids: Tensor) -> Tensor:
    return (ids[:, :1] == torch.arange(E, device=DEVICE)).sum(0).cumsum(0, dtype=torch.int32)


class Layer(nn.Module):
    def __init__(self, kind: str, device: str = DEVICE):
        super().__init__()
        self.kind = kind
        if kind in ("routed", "cached", "shared"):
            config = Fp8FlowMoEConfig(cache_weights=kind == "cached")
            self.experts = RoutedExperts(E, D, D, config=config, device=device)
        if kind == "linear":
            self.linear = Fp8FlowLinear(D, D, device=device)
        shapes = dict(shared=[(D, D)] * 3, ffn=[(D, D)] * 3, grouped_mm=[(E, D, D)], grouped_ffn=[(E, D, D)] * 3)
        self.w = nn.ParameterList(torch.randn(s, device=device) * 0.05 for s in shapes.get(kind, ()))

    def forward(self, x: Tensor, ids: Tensor, scores: Tensor) -> Tensor:
        w = [self.w[i] for i in range(len(self.w))]  # torch 2.11 unpacks no lists of parameters
        if self.kind == "ffn":
            return feed_forward(x, ExpertWeights(*w), CONFIG)
        if self.kind == "linear":
            return self.linear(x)
        if self.kind == "grouped_mm":
            return grouped_mm(x.bfloat16(), w[0], offs=ends_of(ids))
        if self.kind == "grouped_ffn":
            return grouped_ffn(x, *w, ends_of(ids), scores=scores[:, 0])
        return self.experts(x, ids, scores, shared=SharedExperts(*w) if self.kind == "shared" else None)


KINDS = ["routed", "shared", "ffn", "linear", "grouped_mm", "grouped_ffn"]


def make_inputs(tokens: int = T) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(tokens, D, device=DEVICE, requires_grad=True)
    return x, torch.rand(tokens, E, device=DEVICE).topk(K).indices, torch.rand(tokens, K, device=DEVICE)


@pytest.mark.parametrize("kind", KINDS)
@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_tokens_selected_by_a_mask(kind: str):
    if kind == "shared" and TorchVersion(torch.__version__) < (2, 13):
        pytest.skip("torch.compile loses the symbols of the rows of shared experts")
    layer, inputs = Layer(kind), make_inputs()

    def select(mask: Tensor, *tensors: Tensor) -> Tensor:
        at = mask.nonzero().squeeze(1)
        return layer(*(t[at] for t in tensors))

    compiled = torch.compile(select, fullgraph=True, backend="aot_eager")
    some = torch.rand(T, device=DEVICE) > 0.5
    for mask in (some, ~some, torch.zeros_like(some), torch.ones_like(some)):
        results = []
        for function in (select, compiled):
            out = function(mask, *inputs)
            results.append([out, *torch.autograd.grad(out.float().square().sum(), [inputs[0], *layer.parameters()])])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


EXPORTED = [(kind, False) for kind in (*KINDS, "cached")] + [("routed", True), ("cached", True)]


@pytest.mark.parametrize("kind, strict", EXPORTED)
def test_export_with_any_number_of_tokens(kind: str, strict: bool):
    """Without gradients, which are refused when the program is exported, or when it runs. Frozen layers lose none."""
    layer = Layer(kind)
    tokens = torch.export.Dim("tokens", min=0, max=4096)
    inputs = tuple(t.detach() for t in make_inputs())
    with refused("lose the gradients", "PipelineStage takes modules", error=Exception):
        torch.export.export(layer, inputs, strict=strict)
    with torch.no_grad():
        program = torch.export.export(layer, inputs, dynamic_shapes=({0: tokens},) * 3, strict=strict).module()
    for count in (0, 1, 3, 128, 200):
        more = tuple(t.detach() for t in make_inputs(count))
        with torch.no_grad():
            assert torch.equal(program(*more), layer(*more))
    if kind in ("routed", "cached"):
        with refused("exported without gradients", error=RuntimeError):
            program(*make_inputs()).square().sum().backward()
    layer.requires_grad_(False)
    assert torch.equal(torch.export.export(layer, inputs, strict=strict).module()(*inputs), layer(*inputs))


def test_fake_tensors():
    """A layer built and run, as estimators of memory do; frozen ones get no copies."""
    with FakeTensorMode():
        for frozen in (False, True):
            layer, (x, ids, scores) = Layer("routed", device="cpu"), (t.detach().cpu() for t in make_inputs())
            layer.requires_grad_(not frozen)
            x.requires_grad_()
            out = layer(x, ids, scores)
            out.sum().backward()
            assert x.grad.shape == x.shape == out.shape and layer.experts.cache.copies is None
        layer.experts.add_lora(rank=16, alpha=16)
        assert layer.experts.lora_A["w1"].shape == (E, 16, D)


# --- saved graphs -----------------------------------------------------------------------------------------------------

SAVED = [("cached", False), ("cached", True), ("routed", True), ("linear", False)]  # and whether it runs before


def make_kept(kind: str) -> tuple[Layer, tuple[Tensor, ...]]:
    """A layer that keeps quantized weights: with a cache, or frozen."""
    torch.manual_seed(0)
    return Layer(kind).requires_grad_(kind == "cached"), make_inputs()


def save_compiled(folder: Path) -> None:
    for kind, run_before in SAVED:
        layer, inputs = make_kept(kind)
        if run_before:
            layer(*inputs)
        graph = torch.compile(layer, fullgraph=True).forward.aot_compile((inputs, {}))
        graph.save_compiled_function(str(folder / f"{kind} {run_before}"))


def load_compiled(folder: Path) -> list[tuple[str, bool, str]]:
    """The cases that differ from the eager layer, before that has run, after it, or with other weights."""
    wrong = []
    for kind, run_before in SAVED:
        layer, inputs = make_kept(kind)
        with open(folder / f"{kind} {run_before}", "rb") as file:
            loaded = torch.compiler.load_compiled_function(file)
        for when in ("before", "after", "other weights"):
            if when == "other weights":
                with torch.no_grad():
                    torch._foreach_mul_([*layer.parameters()], -0.5)
            outs = loaded(layer, *inputs), layer(*inputs)
            got, want = ([out, *torch.autograd.grad(out.square().sum(), inputs[0])] for out in outs)
            if not all(map(torch.equal, got, want)):
                wrong.append((kind, run_before, when))
    return wrong


@pytest.mark.skipif(not hasattr(torch.compile(len), "aot_compile"), reason="torch saves no graphs yet")
def test_saved_graphs_keep_no_weights(tmp_path: Path):
    """The copies would be another process's: its graph quantizes the weights in each call."""
    call(save_compiled, tmp_path)
    assert call(load_compiled, tmp_path) == []


# --- CUDA graphs ------------------------------------------------------------------------------------------------------


def test_example_of_a_cuda_graph():
    done = run_script("examples/cuda_graph.py", gpu=torch.cuda.is_available())
    if torch.cuda.is_available():
        assert done.returncode == 0 and "17 replays equal eager steps bit for bit" in done.stdout, done.stderr
    else:
        assert done.returncode == 1 and "CUDA graphs need a GPU" in done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", ["none", "activation", "experts"])
def test_replays_with_new_routings(recompute):
    """Forward and all gradients, bit for bit, for any distribution of tokens over experts."""
    config = Fp8FlowMoEConfig(recompute=recompute)
    x, scores, ids, weights = make_layer()
    leaves, dout = [x, scores, *weights], torch.randn_like(x)

    def step():
        layer = lambda x, scores, *weights: routed_experts(x, *weights, ids, scores, config=config)  # noqa: E731
        return gradients(layer, leaves, dout)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        results = step()
    spread = torch.rand(len(x), weights[0].shape[0], device="cuda").topk(ids.shape[1]).indices
    some = spread.masked_fill(torch.rand_like(scores) < 0.5, -1)
    for routing in (spread, some, torch.zeros_like(ids)):
        ids.copy_(routing)
        for leaf in leaves:
            leaf.copy_(torch.randn_like(leaf) / 8)
        graph.replay()
        assert_equal(results, step())
