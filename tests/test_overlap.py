"""Work and memory while tokens are on their way between ranks."""

import contextlib
import functools
import inspect
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import _get_work_registry_size
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from tests.layer import CastCounter, Lifetimes, assert_equal
from tests.variants import small_layer
from titan_fp8moe import ops, recipe, routed_experts
from titan_fp8moe.config import Fp8FlowMoEConfig
from titan_fp8moe.dispatch.all_to_all import AllToAllDispatch
from titan_fp8moe.dispatch.local import LocalDispatch
from titan_fp8moe.dispatch.symmetric import exchange
from titan_fp8moe.dispatch.symmetric.dispatch import SymmetricDispatch
from titan_fp8moe.dispatch.symmetric.workspace import Workspace
from titan_fp8moe.layer.ffn import FFN
from titan_fp8moe.torchtitan.converter import _SAVED_OPS

PRODUCTS = "grouped_mm", "grouped_mm_wgrad"
VERBS = "send", "receive", "send_back", "finish"


class Watch(list):
    """Names of calls, in their order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self._monkeypatch = monkeypatch

    def __call__(self, owner: Any, *names: str) -> None:
        for name in names:
            whole = getattr(owner, name)

            def call(*args, _name=name, _whole=whole, **kwargs):
                self.append(_name)
                return _whole(*args, **kwargs)

            self._monkeypatch.setattr(owner, name, call)

    def take(self) -> str:
        seen, self[:] = " ".join(self), []
        return seen


@pytest.fixture
def watch(monkeypatch) -> Watch:
    return Watch(monkeypatch)


@pytest.fixture
def unwaited():
    """The number of transfers that the test has started and nobody has waited for."""
    before = _get_work_registry_size()
    return lambda: _get_work_registry_size() - before


def gradients(layer, run=None):
    return torch.autograd.grad((run or layer.run)().square().sum(), layer.leaves)


def shared_layer(dispatch, group):
    """A layer beside shared experts in FP8, whose tokens travel in this way."""
    config = Fp8FlowMoEConfig(dispatch=dispatch if dispatch == "symmetric" else "all_to_all")
    return small_layer("shared", config, None if dispatch == "local" else group)


DISPATCHES = dict(local=LocalDispatch, all_to_all=AllToAllDispatch, symmetric=SymmetricDispatch)
SHARED_BACKWARD = "quantize_weights grouped_mm swiglu_quantize_backward grouped_mm_wgrad quantize_weights grouped_mm"
WGRADS = "grouped_mm_wgrad grouped_mm_wgrad"  # of GEMM 1


@pytest.mark.parametrize("dispatch", DISPATCHES)
def test_what_runs_during_transfers(watch, group, unwaited, dispatch):
    """In a forward weights are quantized while tokens travel, or their counts, and shared experts run while sums do. In
    a backward shared experts run while the output's gradient travels, and the gradients of w1 and w3 while tokens'
    gradients do. Where nothing travels, tokens' gradients are summed first, whose rows are then freed."""
    layer = shared_layer(dispatch, group)
    watch(DISPATCHES[dispatch], *VERBS)
    watch(ops, *PRODUCTS, "swiglu_quantize", "swiglu_quantize_backward", "start_all_to_all", "wait")
    watch(ops.quantize, "quantize_weights")
    start, wait = ("start_all_to_all ", "wait ") if dispatch == "all_to_all" else ("", "")
    quantized = "quantize_weights quantize_weights"
    tokens = f"{quantized} send {start}receive {wait}" if start else f"send {quantized} receive "
    out = layer.run()
    assert not unwaited()
    assert watch.take() == (
        f"{start}{wait}{tokens}grouped_mm swiglu_quantize grouped_mm send_back {start}"
        f"{quantized} grouped_mm swiglu_quantize grouped_mm finish{wait and ' wait'}"
    )
    out.sum().backward()
    assert not unwaited()
    back = f"{WGRADS} finish" if dispatch != "local" else f"finish {WGRADS}"
    assert watch.take() == (
        f"send {start}{SHARED_BACKWARD} quantize_weights receive {wait}grouped_mm swiglu_quantize_backward "
        f"grouped_mm_wgrad quantize_weights grouped_mm send_back {start}{back}{wait and ' wait'}"
    )


@pytest.mark.parametrize("dispatch", DISPATCHES)
def test_checkpointing_by_op_repeats_none_and_moves_no_token_again(group, watch, unwaited, dispatch):
    """A policy may keep others than the layer's ops. The repeated forward's transfers are waited for."""
    layer = shared_layer(dispatch, group)
    watch(DISPATCHES[dispatch], *VERBS)
    functions = [name for name, function in vars(ops).items() if inspect.isfunction(function) and name != "emulate"]
    watch(ops, *functions)
    watch(ops.quantize, "quantize_weights")
    want, plain = gradients(layer), watch.take()

    def keeping(*kept):
        contexts = functools.partial(create_selective_checkpoint_contexts, list(kept))
        return gradients(layer, lambda: checkpoint(layer.run, use_reentrant=False, context_fn=contexts))

    assert_equal(keeping(*_SAVED_OPS), want)
    assert watch.take() == plain and not unwaited()
    assert_equal(keeping(torch.ops.aten.topk.default), want)
    assert not unwaited()
    transfers = [calls.count("start_all_to_all") for calls in (plain, watch.take())]
    assert transfers == ([5, 8] if dispatch == "all_to_all" else [0, 0])


@pytest.mark.parametrize("recompute", ["activation", "experts"])
def test_tokens_are_kept_as_they_arrived(group, recompute):
    """Not once for each of their experts."""
    layer, saved = small_layer("plain", Fp8FlowMoEConfig(dispatch="all_to_all", recompute=recompute), group), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        layer.run().sum().backward()
    width = layer.x.shape[1] + 2 * (4 + 4) + 16  # two positions and scores, scales padded to 16 bytes
    assert [t.shape for t in saved if t.dtype in (torch.uint8, recipe.FP8)] == [(len(layer.x), width)]


@pytest.mark.parametrize("counts, rows", [((129, 0, 71, 0), 384), ((128, 128, 0, 256), 512), ((0, 0, 0, 0), 128)])
def test_rows_are_for_what_arrives(group, counts, rows):
    """Not for the most padding that these rows could need: 640, 896 and 128."""
    chosen = torch.cat([torch.arange(4).repeat_interleave(torch.tensor(counts)), torch.tensor([-1])]).unsqueeze(1)
    x, scores = torch.randn(len(chosen), 128, requires_grad=True), torch.rand(len(chosen), 1)
    with CastCounter() as forward:
        out = routed_experts(x, *torch.randn(3, 4, 128, 128), chosen, scores, ep_group=group)
    with CastCounter() as backward:
        out.sum().backward()
    for counter in (forward, backward):
        assert counter.ops["permute_rows"] == 1 and counter.args["permute_rows"][3].shape[0] == rows


def test_symmetric_transfers_run_beside_the_layer(group, monkeypatch, watch):
    """What is in brackets runs on the transfers' stream."""
    watch(exchange, "publish", "plan", "wait", "pull_routing", "pull_rows", "push_sums")
    watch(Workspace, "planned", "join")
    watch(ops, *PRODUCTS, "unpermute_sum", "unpermute_gradients")
    watch(ops.quantize, "quantize_weights")

    @contextlib.contextmanager
    def beside(_):
        watch.append("[")
        yield
        watch.append("]")

    monkeypatch.setattr(Workspace, "beside", beside)
    out = small_layer("plain", Fp8FlowMoEConfig(dispatch="symmetric"), group).run()
    assert watch.take() == (
        "publish [ plan wait planned pull_routing pull_rows ] quantize_weights quantize_weights join "
        "grouped_mm grouped_mm [ push_sums wait ] join unpermute_sum"
    )
    out.sum().backward()
    assert watch.take() == (
        "publish [ wait pull_rows ] quantize_weights join grouped_mm grouped_mm_wgrad quantize_weights grouped_mm "
        "[ push_sums wait ] grouped_mm_wgrad join unpermute_gradients"
    )


def test_a_strided_bias_is_copied_before_its_transfer(group, monkeypatch):
    """Which has a stream of its own, while PyTorch copies on that of the layer."""
    strides, push = [], exchange.push_sums
    monkeypatch.setattr(exchange, "push_sums", lambda *args: strides.append(args[-1].b2_ED.stride()) or push(*args))
    x, ids, biases = torch.randn(9, 128), torch.randint(0, 4, (9, 1)), torch.randn(4, 128, 2)
    weights, config = torch.randn(3, 4, 128, 128), Fp8FlowMoEConfig(dispatch="symmetric", dispatch_capacity=2)
    b1, b2 = biases.unbind(2)
    routed_experts(x, *weights, ids, torch.rand(9, 1), config=config, ep_group=group, b1=b1, b2=b2, b3=b1)
    assert strides == [(128, 1)]


def test_rows_from_shared_memory_are_freed(group, monkeypatch):
    """Rows in expert order after GEMM 1, as with an all-to-all: nothing holds them until the sums travel."""
    lifetimes = Lifetimes(monkeypatch, ["grouped_mm"])
    lifetimes.watch("grouped_mm", 0)
    small_layer("plain", Fp8FlowMoEConfig(dispatch="symmetric"), group).run()
    assert lifetimes.calls == [[[]], [[False]]]


def test_one_graph_is_refused_with_the_reason(group):
    run = small_layer("plain", Fp8FlowMoEConfig(dispatch="all_to_all"), group).run
    with pytest.raises(torch._dynamo.exc.Unsupported, match='dispatch = "symmetric" can be part of a graph'):
        torch.compile(run, backend="eager", fullgraph=True)()


@pytest.mark.parametrize(("recompute", "exchanged"), [("activation", True), ("experts", True), ("experts", False)])
def test_rows_that_are_not_kept_are_freed(group, monkeypatch, recompute, exchanged):
    """Rows in expert order after GEMM 1, in the forward and where the backward repeats it; arrived gradients before the
    first GEMM after them, their rows after w2's gradient. Arrived tokens are kept, but not the rank's own once they are
    sent."""
    with pytest.raises(torch._dynamo.exc.Unsupported):  # Python's calls keep their arguments after that
        torch.compile(torch._dynamo.graph_break, backend="eager", fullgraph=True)()
    config = Fp8FlowMoEConfig(recompute=recompute, dispatch="all_to_all")
    layer = small_layer("plain", config, group if exchanged else None)
    again = recompute == "experts"  # GEMM 1 in the backward, before the gradients arrive
    # Of each GEMM which of the rows that arrived are there, of those in expert order, and of those that were quantized.
    own, kept, freed = not exchanged, [True] * (1 + again), [False] * (1 + again)
    forward = [[[True], [True], [own]], [[True], [False], [own]]]
    backward = [[[*kept, False], [*freed, first], [own, False]] for first in (True, True, False, False)]
    expected = forward + again * [[[True, True], [False, True], [own, own]]] + backward
    lifetimes = Lifetimes(monkeypatch, PRODUCTS, expected)
    lifetimes.watch("permute_rows", 0)
    lifetimes.watch("permute_rows")
    lifetimes.watch("quantize_rows")
    layer.run().sum().backward()
    assert lifetimes.calls == expected


FAILING = [("symmetric", FFN, "product", call) for call in range(8)]  # of the forward's four and the backward's
FAILING += [("all_to_all", ops.quantize, "quantize_weights", 0)]
FAILING += [("all_to_all", ops, f"swiglu_quantize{of}", 0) for of in ("", "_backward")]
FAILING += [("all_to_all", ops, "grouped_mm_wgrad", 0)]


@pytest.mark.parametrize(("dispatch", "owner", "name", "call"), FAILING)
def test_after_an_error_inside_of_an_op(group, monkeypatch, unwaited, dispatch, owner, name, call):
    """Between any two verbs, on whichever side of a transfer. The next steps are right, and leave no transfer."""
    layer, whole, calls = shared_layer(dispatch, group), getattr(owner, name), []
    want = gradients(layer)

    def broken(*args):
        calls.append(None)
        if len(calls) == 1 + call:
            raise torch.OutOfMemoryError
        return whole(*args)

    monkeypatch.setattr(owner, name, broken)
    with pytest.raises(torch.OutOfMemoryError):
        gradients(layer)
    left = unwaited()  # PyTorch keeps an all-to-all that nobody has waited for: other ranks may not have begun it
    assert left <= (dispatch == "all_to_all")
    for _ in range(2):
        assert_equal(gradients(layer), want)
        assert unwaited() == left
