"""The public grouped_ffn: its numbers and gradients, groups of every size, rows behind the last one, and errors."""

import re
import sys
import types

import pytest
import torch
from torch.distributed.tensor import DTensor

from experiments import reference
from experiments.reference import relative_error
from tests.layer import DEVICE, CastCounter, D, H, assert_equal, generations, gradients
from tests.processes import ROOT
from titan_fp8moe import (
    Fp8FlowMoEConfig,
    Fp8Weight,
    WeightCache,
    grouped_ffn,
    recipe,
)

SIZES = [0, 1, 129, 0, 128, 40]
BEHIND = 70
OAI = dict(activation="clamped_swiglu", activation_parameters=dict(limit=7, alpha=1.702, offset=1))


def inputs(sizes=tuple(SIZES), behind=BEHIND, dtype=torch.float32, fused=False, dims=(D, H)):
    """x, [w1, w2, w3], offs and the output's gradient; ``behind`` rows follow the last group."""
    (dim, hidden), M, E = dims, sum(sizes) + behind, len(sizes)
    x, _, _, (w1, w2, w3) = reference.make_layer(M, dim, hidden, E, 1, dtype, DEVICE)
    offs = torch.tensor(sizes, device=DEVICE).cumsum(0).int()
    weights = [torch.cat([w1, w3], 1), w2, None] if fused else [w1, w2, w3]
    return x, weights, offs, torch.randn_like(x)


def ids_of(offs, rows):
    """The same rows as tokens with one expert each, -1 behind the last group."""
    counts = torch.diff(offs, prepend=offs.new_zeros(1)).tolist()
    ids = [e for e, count in enumerate(counts) for _ in range(count)]
    return torch.tensor(ids + [-1] * (rows - len(ids)), device=DEVICE).unsqueeze(1)


def step(x, weights, offs, dy, scores=None, **options):
    """The output, and the gradients of x, of the weights that there are and of any scores."""
    leaves = [x, *(w for w in weights if w is not None), *([] if scores is None else [scores])]

    def layer(x, *rest):
        given = [*rest[: len(leaves) - 1], None][:3] if scores is None else [*rest[:-1], None][:3]
        return grouped_ffn(x, *given, offs, scores=None if scores is None else rest[-1], **options)

    return gradients(layer, leaves, dy)


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


@pytest.mark.parametrize("layouts", ["both", "forward"])
def test_cache(layouts):
    """Weights are quantized once for the microbatches of a step, and again after it; nothing else changes."""
    x, weights, offs, dy = inputs(dtype=torch.bfloat16)
    want, cache = step(x, weights, offs, dy), WeightCache(layouts)
    leaves = [w.clone().requires_grad_() for w in weights]
    optimizer = torch.optim.SGD(leaves, lr=1.0)
    for microbatch in range(2):
        y = grouped_ffn(x, *leaves, offs, cache=cache)
        assert_equal([y.detach(), *torch.autograd.grad(y, leaves, dy)], [want[0], *want[2:]])
        assert generations(cache) == [1, 1], microbatch
    for leaf in leaves:
        leaf.grad = torch.ones_like(leaf)
    optimizer.step()
    assert torch.equal(grouped_ffn(x, *leaves, offs, cache=cache), grouped_ffn(x, *leaves, offs))
    assert generations(cache) == [2, 2]


def test_compiles_into_one_graph():
    """Other group sizes compile nothing; one more number of rows makes it dynamic."""
    torch._dynamo.reset()
    compiled = torch.compile(lambda *a, **k: grouped_ffn(*a, **k).relu(), fullgraph=True, backend="aot_eager")
    counts = []
    for sizes in ([3, 97], [100, 0], [60, 70], [10, 140]):
        x, weights, offs, dy = inputs(sizes, 5)
        scores = torch.rand(x.shape[0], device=DEVICE)
        results = []
        for function in (compiled, lambda *a, **k: grouped_ffn(*a, **k).relu()):
            leaves = [t.clone().requires_grad_() for t in (x, *weights, scores)]
            y = function(*leaves[:4], offs, scores=leaves[4])
            results.append([y.detach(), *torch.autograd.grad(y, leaves, dy)])
        assert_equal(*results)
        counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert counts[1] == counts[0] and counts[3] == counts[2] <= counts[0] + 1


def test_wrong_ends_touch_no_other_memory(monkeypatch):
    """Where they are not checked, rows beyond x are never read and no group is negative."""
    monkeypatch.setattr("titan_fp8moe.nn.grouped_ffn.check_ends", lambda *_: None)
    x, weights, _, dy = inputs([3, 200], 0)
    for ends in ([500, 900], [150, 20], [-5, 203]):
        offs = torch.tensor(ends, dtype=torch.int32, device=DEVICE)
        assert all(t.isfinite().all() for t in step(x, weights, offs, dy))


def test_one_cast_in_each_direction():
    x, weights, offs, dy = inputs()
    leaves = [t.requires_grad_() for t in (x, *weights)]
    with CastCounter() as counter:
        grouped_ffn(*leaves, offs).backward(dy)
    assert counter.ops["quantize_rows"] == 2 and not counter.stray_casts


@pytest.mark.skipif(DEVICE == "cuda", reason="nothing waits for the GPU")
def test_counts_in_place_of_ends():
    x, weights, _, _ = inputs([16] * 4, 0)
    for ends in ([30, 4, 10, 20], [10, 20, 30, 65], [-1, 20, 30, 64]):
        with pytest.raises(ValueError, match=r"grouped_ffn: .*counts\.cumsum\(0"):
            grouped_ffn(x, *weights, torch.tensor(ends, dtype=torch.int32))
    with pytest.warns(UserWarning, match=r"counts\.cumsum\(0") as warned:
        grouped_ffn(x, *weights, torch.tensor([16] * 4, dtype=torch.int32))
    assert warned[0].filename == __file__


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("x", lambda x: x.half(), "use x.bfloat16()"),
        ("x", lambda x: x[None], "x must be (M, D), offs (E,)"),
        ("x", lambda x: x[:, :128], "got (20, 128)"),
        ("w1", lambda w: w.transpose(1, 2), "w1 (E, H, D)"),
        ("w2", lambda w: w.transpose(1, 2), "w2 (E, D, H)"),
        ("offs", lambda offs: offs[:1], "offs (E,) as w1 (E, H, D)"),
        ("offs", lambda offs: offs.long(), "use offs.int()"),
        ("offs", lambda offs: offs.to("meta"), "must be on one device"),
        ("scores", lambda _: torch.ones(20, 1), "scores (M,) or None; got (20, 256), (2,), (20, 1)"),
        ("config", lambda _: Fp8FlowMoEConfig(dispatch="symmetric"), "dispatch has no effect on grouped_ffn"),
        ("config", lambda _: Fp8FlowMoEConfig(cache_weights=True), "cache_weights has no effect on grouped_ffn"),
        ("activation", lambda _: "gelu", "set it to one of"),
    ],
)
def test_errors(name, change, message):
    x, weights, offs, _ = inputs([8, 12], 0)
    given = dict(x=x, offs=offs) | dict(zip(("w1", "w2", "w3"), weights, strict=True))
    given[name] = change(given.get(name))
    with pytest.raises(ValueError, match=re.escape(message)):
        grouped_ffn(**given)


@pytest.mark.parametrize("name", ["x", "w2", "b1"])
def test_dtensors_are_refused(group, name):
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    x, weights, offs, _ = inputs([4], 0)
    given = dict(x=x, w1=weights[0], w2=weights[1], w3=weights[2], offs=offs)
    given |= dict(b1=torch.zeros(1, H), b2=torch.zeros(1, D), b3=torch.zeros(1, H))
    given[name] = DTensor.from_local(given[name], mesh)
    with pytest.raises(ValueError, match=r"use to_local\(\)"):
        grouped_ffn(**given)


@pytest.mark.gpu
def test_model_size_without_waiting_for_the_gpu():
    """Experts of the 16B model with groups of any size: FP8's errors, and no host-device sync."""
    sizes = torch.randint(0, 700, (64,)).tolist()
    sizes[7], sizes[8] = 0, 1
    x, weights, offs, dy = inputs(sizes, 300, torch.bfloat16, dims=(2048, 1408))
    leaves = [t.bfloat16().requires_grad_() for t in (x, *weights)]

    def run():
        y = grouped_ffn(*leaves, offs)
        return [y.detach(), *torch.autograd.grad(y, leaves, dy)]

    run()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    ids, ones = ids_of(offs, len(x)), torch.ones(len(x), 1, device=DEVICE)
    floats = [t.float() for t in leaves]
    want = gradients(lambda x, *weights: reference.moe_layer(x, ones, ids, *weights, False), floats, dy)
    for mine, true in zip(got, want, strict=True):
        assert relative_error(mine, true) < 0.1


def test_cache_of_local_tensors_without_gradients(group):
    """There the local tensor of a DTensor requires no gradient, and yet it is trained: clear_all() must reach it."""
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    x, weights, offs, _ = inputs()
    x, offs, weights = x.cpu(), offs.cpu(), [w.cpu() for w in weights]
    spread = [torch.nn.Parameter(DTensor.from_local(w, mesh)) for w in weights]
    cache = WeightCache()

    @torch.no_grad()
    def run(cache=None):
        return grouped_ffn(x, *(w.to_local() for w in spread), offs, cache=cache)

    assert torch.equal(run(cache), run())
    weights[0].data[2, 3, 5] += 100  # between the samples
    assert not torch.equal(run(cache), run())
    WeightCache.clear_all()
    assert torch.equal(run(cache), run())


def test_cache_compiles():
    torch._dynamo.reset()
    x, weights, offs, dy = inputs(dtype=torch.bfloat16)
    leaves, cache = [w.requires_grad_() for w in weights], WeightCache()
    compiled = torch.compile(lambda x: grouped_ffn(x, *leaves, offs, cache=cache), fullgraph=True, backend="aot_eager")
    want = grouped_ffn(x, *leaves, offs)
    for _ in range(2):
        got = compiled(x)
        assert_equal(torch.autograd.grad(got, leaves, dy), torch.autograd.grad(want, leaves, dy, retain_graph=True))
    assert generations(cache) == [1, 1]


def test_no_cache_of_stored_weights():
    x, weights, offs, _ = inputs(dtype=torch.bfloat16)
    stored, cache = [Fp8Weight(*recipe.quantize_weight(w)) for w in weights], WeightCache()
    assert torch.equal(grouped_ffn(x, *stored, offs, cache=cache), grouped_ffn(x, *stored, offs))
    assert cache.copies is None
