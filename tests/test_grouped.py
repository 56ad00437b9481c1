"""The public grouped_ffn and grouped_mm: numbers, groups of every size, rows behind the last one, compilation, caches.
tests/test_any_layer.py has all forms of grouped_ffn, tests/test_refusals.py what both refuse."""

import re
import sys
import types
import warnings

import pytest
import torch
from torch.distributed.tensor import DTensor

from experiments import reference
from experiments.reference import relative_error
from tests.layer import DEVICE, assert_equal, generations, gradients
from tests.processes import ROOT
from titan_fp8moe import Fp8Weight, WeightCache, grouped_ffn, grouped_mm, recipe
from titan_fp8moe.nn import grouped_mm as grouped_mm_module

K, N, D, H = 256, 128, 256, 128
BF16 = torch.bfloat16
# FP8's rounding: the relative error of a product of two quantized normal operands is 3.7%.
TOLERANCE = 0.045


def ends_of(sizes):
    return torch.tensor(sizes, device=DEVICE).cumsum(0).int()


def product(sizes, unused=0, transposed=True, dtype=BF16):
    """x, w, offs and the output's gradient of a grouped GEMM; ``unused`` rows follow the last group."""
    x, dy = (torch.randn(sum(sizes) + unused, dim, device=DEVICE, dtype=BF16) for dim in (K, N))
    w = torch.randn(len(sizes), *((N, K) if transposed else (K, N)), device=DEVICE, dtype=dtype) * 0.05
    return x.requires_grad_(), (w.transpose(1, 2) if transposed else w).detach().requires_grad_(), ends_of(sizes), dy


def exact(x, w, offs, dy):
    """Output and gradients in float64; zeros for rows at and past offs[-1]."""
    x, w, dy = (t.detach().double() for t in (x, w, dy))
    y, dx, dw, start = torch.zeros_like(dy), torch.zeros_like(x), torch.zeros_like(w), 0
    for e, end in enumerate(offs.tolist()):
        rows = slice(start, end)
        y[rows], dx[rows], dw[e] = x[rows] @ w[e], dy[rows] @ w[e].T, x[rows].T @ dy[rows]
        start = end
    return y, dx, dw


def step(x, w, offs, dy, function=grouped_mm):
    y = function(x, w, offs)
    return y.detach(), *torch.autograd.grad(y, (x, w), dy)


def ffn(sizes=(0, 1, 129, 0, 128, 40), behind=70, dtype=torch.float32, dims=(D, H)):
    """x, [w1, w2, w3], offs and the output's gradient of a grouped FFN."""
    x, _, _, weights = reference.make_layer(sum(sizes) + behind, *dims, len(sizes), 1, dtype, DEVICE)
    return x, weights, ends_of(sizes), torch.randn_like(x)


# --- grouped_mm -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize(
    ("sizes", "unused"), [([0, 1, 129, 0, 128, 40], 0), ([0, 0, 300], 70), ([5, 0, 0], 3), ([0, 0], 9), ([0], 0)]
)
def test_against_float64(sizes, unused, transposed):
    args = product(sizes, unused, transposed)
    for got, want in zip(step(*args), exact(*args), strict=True):
        assert got.dtype == BF16 and got.shape == want.shape
        assert not got[(want == 0).all(-1)].any()  # unused rows and empty experts are zeros, not what memory held
        if want.any():
            assert relative_error(got, want) < TOLERANCE
    x, w, offs, dy = args
    if sum(sizes):  # of the recipe's values, which the tolerance of FP8 alone would not show
        x_8, w_8 = recipe.dequantize(*recipe.quantize_rows(x)), recipe.dequantize(*recipe.quantize_weight(w))
        assert relative_error(grouped_mm(x, w, offs).detach(), exact(x_8, w_8, offs, dy)[0]) < 3e-3


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_only_needed_gradients(dtype):
    """fp32 weights have gradients that are not rounded."""
    x, w, offs, dy = product([3, 200], dtype=dtype)
    _, dx, dw = step(x, w, offs, dy)
    assert dw.dtype == dtype and (dtype == torch.float32) != torch.equal(dw, dw.bfloat16().to(dtype))
    assert torch.equal(torch.autograd.grad(grouped_mm(x.detach(), w, offs), w, dy)[0], dw)
    assert torch.equal(torch.autograd.grad(grouped_mm(x, w.detach(), offs), x, dy)[0], dx)
    with torch.no_grad():
        assert not grouped_mm(x, w, offs).requires_grad


# --- both -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [grouped_mm, grouped_ffn])
def test_compiles_into_one_graph(function):
    """Other group sizes compile nothing; one more number of rows makes it dynamic."""
    torch._dynamo.reset()

    def eager(*args):
        return function(*args).relu()

    compiled, counts = torch.compile(eager, fullgraph=True, backend="aot_eager"), []
    for sizes in ([3, 97], [100, 0], [60, 70], [10, 140]):
        if function is grouped_mm:
            x, w, offs, dy = product(sizes)
            leaves, rest = [x, w], (offs,)
        else:
            x, weights, offs, dy = ffn(sizes, 5)
            leaves, rest = [x, *weights], (offs,)
        assert_equal(*(gradients(lambda *a, call=call: call(*a, *rest), leaves, dy) for call in (compiled, eager)))  # noqa: B023
        counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert counts[1] == counts[0] and counts[3] == counts[2] <= counts[0] + 1


@pytest.mark.parametrize("function", [grouped_mm, grouped_ffn])
def test_wrong_ends_touch_no_other_memory(function, monkeypatch):
    """Where they are not checked, as on a GPU, rows beyond x are never read and no group is negative."""
    for module in (grouped_mm_module, sys.modules["titan_fp8moe.nn.grouped_ffn"]):
        monkeypatch.setattr(module, "check_ends", lambda *_: None)
    x, w, _, dy = product([3, 200])
    rows, weights, _, d_rows = ffn([3, 200], 0)
    for ends in ([500, 900], [150, 20], [-5, 203]):
        offs = torch.tensor(ends, dtype=torch.int32, device=DEVICE)
        if function is grouped_mm:
            results = step(x, w, offs, dy)
        else:
            results = gradients(lambda x, *w, offs=offs: grouped_ffn(x, *w, offs), [rows, *weights], d_rows)
        assert all(t.isfinite().all() for t in results)


@pytest.mark.parametrize("function", [grouped_mm, grouped_ffn])
@pytest.mark.skipif(DEVICE == "cuda", reason="nothing waits for the GPU")
def test_counts_in_place_of_ends(function):
    x, w, *_ = product([16] * 4)
    args = (x, w) if function is grouped_mm else (ffn([16] * 4, 0)[0], *ffn([16] * 4, 0)[1])

    def call(*offs):
        return function(*args, torch.tensor(offs, dtype=torch.int32))

    for offs in ([30, 4, 10, 20], [10, 20, 30, 65], [-1, 20, 30, 64]):
        with pytest.raises(ValueError, match=rf"{function.__name__}: .*counts\.cumsum\(0"):
            call(*offs)
    with pytest.warns(UserWarning, match=r"counts\.cumsum\(0") as warned:
        call(16, 16, 16, 16)
    assert warned[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for offs in ([16, 32, 48, 64], [0, 0, 0, 64], [1, 2, 3, 4]):
            call(*offs)


@pytest.mark.gpu
@pytest.mark.parametrize("function", [grouped_mm, grouped_ffn])
def test_model_size_without_waiting_for_the_gpu(function):
    """Experts of the 16B model with groups of any size: FP8's errors, and no host-device sync."""
    sizes = torch.randint(0, 700, (64,)).tolist()
    sizes[7], sizes[8] = 0, 1
    if function is grouped_mm:
        offs = ends_of(sizes)
        x, dy = (torch.randn(sum(sizes), dim, device=DEVICE, dtype=BF16) for dim in (2048, 1408))
        leaves = [x, (torch.randn(64, 1408, 2048, device=DEVICE, dtype=BF16) * 0.02).transpose(1, 2)]
        want = exact(*leaves, offs, dy)
    else:
        x, weights, offs, dy = ffn(sizes, 300, BF16, (2048, 1408))
        leaves, ones = [t.bfloat16() for t in (x, *weights)], torch.ones(len(x), 1, device=DEVICE)
        ids = [e for e, size in enumerate(sizes) for _ in range(size)] + [-1] * 300
        ids = torch.tensor(ids, device=DEVICE).unsqueeze(1)
        floats = [t.float() for t in leaves]
        want = gradients(lambda x, *weights: reference.moe_layer(x, ones, ids, *weights, False), floats, dy)

    def run():
        return gradients(lambda *leaves: function(*leaves, offs), leaves, dy)

    run()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for mine, true in zip(got, want, strict=True):
        assert relative_error(mine, true) < (TOLERANCE if function is grouped_mm else 0.1)


# --- grouped_ffn ------------------------------------------------------------------------------------------------------


class StandIn(torch.nn.Module):
    """NeMo Automodel's GroupedExpertsDeepEP on one rank, and its token dispatcher."""

    def __init__(self, w13, w2, mesh):
        super().__init__()
        self.config = types.SimpleNamespace(expert_activation="swiglu", expert_bias=False)
        self.gate_and_up_projs, self.down_projs = (
            torch.nn.Parameter(DTensor.from_local(w.transpose(1, 2).contiguous(), mesh)) for w in (w13, w2)
        )
        self.token_dispatcher = self

    def token_permutation2(self, hidden_states, num_local_tokens, token_probs, token_indices):
        assert num_local_tokens == len(hidden_states)
        experts = self.down_projs.shape[0]
        order = token_indices.flatten().masked_fill(token_indices.flatten() < 0, experts).argsort(stable=True)
        self.order = order[: int((token_indices >= 0).sum())]
        self.token, self.tokens = self.order // token_indices.shape[1], num_local_tokens
        counts = torch.bincount(token_indices[token_indices >= 0], minlength=experts)
        return hidden_states[self.token], counts, token_probs.flatten()[self.order]

    def token_unpermutation(self, rows):
        return torch.zeros(self.tokens, rows.shape[1]).index_add(0, self.token, rows)


def test_the_documented_class_for_nemo_automodel(group, monkeypatch):
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    x, scores, ids, (w1, w2, w3) = reference.make_layer(200, D, H, 6, 2)
    module = types.ModuleType("nemo_automodel.components.moe.experts")
    module.GroupedExpertsDeepEP = StandIn
    monkeypatch.setitem(sys.modules, module.__name__, module)
    experts = StandIn(torch.cat([w1, w3], 1), w2, mesh)
    page = (ROOT / "docs/own-dispatch.md").read_text()
    (code,) = [c for c in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "Automodel" in c or "DeepEP" in c]
    exec(code, dict(torch=torch, grouped_ffn=grouped_ffn, model=torch.nn.ModuleList([experts])))
    mask = torch.arange(200) < 150
    y = experts(x, mask, scores, ids)
    y.backward(dy := torch.randn_like(y))
    leaves = [w.double().requires_grad_() for w in (w1, w2, w3)]
    hidden = ids.masked_fill(~mask.unsqueeze(1), -1)
    want = reference.moe_layer(x.double(), scores.double(), hidden, *leaves, False)
    dw1, dw2, dw3 = torch.autograd.grad(want, leaves, dy.double())
    grads = [p.grad.to_local().transpose(1, 2) for p in (experts.gate_and_up_projs, experts.down_projs)]
    for mine, true in zip([y, *grads], [want, torch.cat([dw1, dw3], 1), dw2], strict=True):
        assert relative_error(mine.detach(), true.detach()) < 0.1


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("layouts", ["both", "forward"])
def test_cache(layouts, compiled):
    """Weights are quantized once for the microbatches of a step, and again after it; nothing else changes."""
    torch._dynamo.reset()
    x, weights, offs, dy = ffn(dtype=BF16)
    leaves, cache = [w.clone().requires_grad_() for w in weights], WeightCache(layouts)

    def run(x):
        return grouped_ffn(x, *leaves, offs, cache=cache)

    run = torch.compile(run, fullgraph=True, backend="aot_eager") if compiled else run
    optimizer = torch.optim.SGD(leaves, lr=1.0)
    for generation in (1, 2):
        want = grouped_ffn(x, *leaves, offs)
        want = [want.detach(), *torch.autograd.grad(want, leaves, dy)]
        for _ in range(2):  # microbatches
            y = run(x)
            assert_equal([y.detach(), *torch.autograd.grad(y, leaves, dy)], want)
            assert generations(cache) == [generation] * 2
        for leaf in leaves:
            leaf.grad = torch.ones_like(leaf)
        optimizer.step()


@pytest.mark.parametrize("spread", [False, True], ids=["frozen", "DTensors without gradients"])
def test_clear_all_reaches_weights_without_a_module(group, spread):
    """Without gradients the local tensor of a DTensor requires none, and yet it is trained."""
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    x, weights, offs, _ = ffn()
    x, offs, weights = x.cpu(), offs.cpu(), [w.cpu() for w in weights]
    parameters = [torch.nn.Parameter(DTensor.from_local(w, mesh)) for w in weights]
    cache = WeightCache()

    @torch.no_grad()
    def run(cache=None):
        given = (w.to_local() for w in parameters) if spread else weights
        return grouped_ffn(x, *given, offs, cache=cache)

    assert torch.equal(run(cache), run())
    weights[0].data[2, 3, 5] += 100  # between the samples
    assert not torch.equal(run(cache), run())
    WeightCache.clear_all()
    assert torch.equal(run(cache), run())


def test_no_cache_of_stored_weights():
    x, weights, offs, _ = ffn(dtype=BF16)
    stored, cache = [Fp8Weight.quantize(w) for w in weights], WeightCache()
    assert torch.equal(grouped_ffn(x, *stored, offs, cache=cache), grouped_ffn(x, *stored, offs))
    assert cache.copies is None
