"""The public grouped_ffn and grouped_mm: compilation, wrong ends, syncs, caches. tests/test_any_layer.py has
numbers, tests/test_refusals.py what both refuse."""

import re
import sys
import types
import warnings

import pytest
import torch
from torch.distributed.tensor import DTensor

from experiments import reference
from experiments.reference import relative_error
from tests.layer import DEVICE, assert_equal, gradients
from tests.processes import ROOT
from titan_fp8moe import Fp8Weight, WeightCache, grouped_ffn, grouped_mm, routed_experts
from titan_fp8moe.nn import grouped_mm as grouped_mm_module

D, H = 256, 128
FUNCTIONS = pytest.mark.parametrize("function", [grouped_mm, grouped_ffn])


def case(function, sizes, behind=0):
    """x and weights, offs, and the output's gradient; ``behind`` rows follow the last group."""
    x, _, _, weights = reference.make_layer(sum(sizes) + behind, D, H, len(sizes), 1, torch.bfloat16, DEVICE)
    if function is grouped_mm:
        weights = [weights[0].transpose(1, 2)]
    offs = torch.tensor(sizes, device=DEVICE).cumsum(0).int()
    return [x, *weights], offs, torch.randn(len(x), H if function is grouped_mm else D, device=DEVICE)


# --- both -------------------------------------------------------------------------------------------------------------


@FUNCTIONS
def test_compiles_into_one_graph(function):
    """Other group sizes compile nothing; one more number of rows makes it dynamic."""
    torch._dynamo.reset()

    def eager(*args):
        return function(*args).relu()

    compiled, counts = torch.compile(eager, fullgraph=True, backend="aot_eager"), []
    for sizes in ([3, 97], [100, 0], [60, 70], [10, 140]):
        leaves, offs, dy = case(function, sizes, 5)
        assert_equal(*(gradients(lambda *a, call=call: call(*a, offs), leaves, dy) for call in (compiled, eager)))  # noqa: B023
        counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert counts[1] == counts[0] and counts[3] == counts[2] <= counts[0] + 1


@FUNCTIONS
def test_wrong_ends_touch_no_other_memory(function, monkeypatch):
    """Where they are not checked, as on a GPU, rows beyond x are never read and no group is negative."""
    for module in (grouped_mm_module, sys.modules["titan_fp8moe.nn.grouped_ffn"]):
        monkeypatch.setattr(module, "check_ends", lambda *_: None)
    leaves, _, dy = case(function, [3, 200])
    for ends in ([500, 900], [150, 20], [-5, 203]):
        offs = torch.tensor(ends, dtype=torch.int32, device=DEVICE)
        assert all(t.isfinite().all() for t in gradients(lambda *t, offs=offs: function(*t, offs), leaves, dy))


@FUNCTIONS
@pytest.mark.skipif(DEVICE == "cuda", reason="nothing waits for the GPU")
def test_counts_in_place_of_ends(function):
    args, _, _ = case(function, [16] * 4)

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
@FUNCTIONS
def test_nothing_waits_for_the_gpu(function):
    leaves, offs, dy = case(function, [3, 200])
    for mode in ("default", "error"):  # the first call compiles
        torch.cuda.set_sync_debug_mode(mode)
        try:
            gradients(lambda *leaves: function(*leaves, offs), leaves, dy)
        finally:
            torch.cuda.set_sync_debug_mode("default")


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
        pairs = [(token_indices == e).nonzero() for e in range(len(self.down_projs))]
        self.token, k = torch.cat(pairs).unbind(1)
        return hidden_states[self.token], torch.tensor([*map(len, pairs)]), token_probs[self.token, k]

    def token_unpermutation(self, rows):
        return torch.zeros(200, D).index_add(0, self.token, rows)


def test_the_documented_class_for_nemo_automodel(group, monkeypatch):
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    x, scores, ids, (w1, w2, w3) = reference.make_layer(200, D, H, 6, 2)
    module = types.ModuleType("nemo_automodel.components.moe.experts")
    module.GroupedExpertsDeepEP = StandIn
    monkeypatch.setitem(sys.modules, module.__name__, module)
    w13 = torch.cat([w1, w3], 1)
    experts = StandIn(w13, w2, mesh)
    page = (ROOT / "docs/own-dispatch.md").read_text()
    (code,) = [c for c in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "Automodel" in c or "DeepEP" in c]
    exec(code, dict(torch=torch, grouped_ffn=grouped_ffn, model=torch.nn.ModuleList([experts])))
    mask = torch.arange(200) < 150
    y = experts(x, mask, scores, ids)
    y.backward(dy := torch.randn_like(y))
    got = y.detach(), *(p.grad.to_local().transpose(1, 2) for p in (experts.gate_and_up_projs, experts.down_projs))
    hidden = ids.masked_fill(~mask.unsqueeze(1), -1)
    want = gradients(lambda w13, w2: routed_experts(x, w13, w2, None, hidden, scores), (w13, w2), dy)
    assert all(relative_error(a, b) < 5e-3 for a, b in zip(got, want, strict=True))


def test_no_cache_of_stored_weights():
    (x, *weights), offs, _ = case(grouped_ffn, [0, 1, 129, 40], 70)
    stored, cache = [Fp8Weight.quantize(w) for w in weights], WeightCache()
    assert torch.equal(grouped_ffn(x, *stored, offs, cache=cache), grouped_ffn(x, *stored, offs))
    assert cache.copies is None
