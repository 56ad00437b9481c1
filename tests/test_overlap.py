"""Work and memory while tokens are on their way between ranks."""

import contextlib
import functools
import inspect
import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func
from torch._C._distributed_c10d import _get_work_registry_size
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode
from torchtitan.distributed import expert_parallel
from torchtitan.models.moe.moe import MoE, MoEArgs

from tests.variants import small_layer
from titan_fp8moe import ops, recipe, routed_experts
from titan_fp8moe.config import Fp8FlowMoEConfig
from titan_fp8moe.dispatch.all_to_all import AllToAllDispatch
from titan_fp8moe.dispatch.local import LocalDispatch
from titan_fp8moe.dispatch.symmetric import exchange
from titan_fp8moe.dispatch.symmetric.dispatch import SymmetricDispatch
from titan_fp8moe.dispatch.symmetric.workspace import Sizes, Workspace
from titan_fp8moe.layer.ffn import FFN
from titan_fp8moe.torchtitan import parallel
from titan_fp8moe.torchtitan.converter import _SAVED_OPS
from titan_fp8moe.torchtitan.cpu import _histc_with_integers
from titan_fp8moe.torchtitan.modules import Fp8FlowFeedForward, Fp8FlowMoE

PRODUCTS = "grouped_mm", "grouped_mm_wgrad"
VERBS = "send", "receive", "send_back", "finish"


class Watch:
    """The calls of functions, in their order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.seen: list[str] = []
        self._monkeypatch = monkeypatch

    def __call__(self, owner: Any, *names: str) -> None:
        for name in names:
            whole = getattr(owner, name)

            def call(*args, _name=name, _whole=whole, **kwargs):
                self.seen.append(_name)
                return _whole(*args, **kwargs)

            self._monkeypatch.setattr(owner, name, call)

    def take(self) -> str:
        """What has been called since the last time."""
        seen, self.seen[:] = " ".join(self.seen), []
        return seen


@pytest.fixture
def watch(monkeypatch) -> Watch:
    return Watch(monkeypatch)


@pytest.fixture
def mesh(group):
    return init_device_mesh("cpu", (1,))


@pytest.fixture
def layer(mesh, monkeypatch):
    """Its shared experts run in ``meanwhile``, in fp32."""
    # On a CPU also where there is a GPU, and the router's histc not yet patched.
    monkeypatch.setattr(torch, "histc", _histc_with_integers(torch.histc))
    torch.manual_seed(0)
    layer = MoE(MoEArgs(num_experts=4, num_shared_experts=1, top_k=2), dim=128, hidden_dim=128)
    with torch.no_grad():
        layer.init_weights(0.02, torch.device("cpu"))
    Fp8FlowMoE.convert(layer, Fp8FlowMoEConfig())
    layer.experts.set_meshes(mesh, None)
    return layer


@pytest.fixture
def fp8_layer(layer):
    """Its shared experts are in the data flow."""
    layer.fp8_shared = True
    Fp8FlowFeedForward.convert(layer.shared_experts, layer.experts.config)
    return layer


def same(a, b) -> bool:
    return all(torch.equal(s, t) for s, t in zip(a, b, strict=True))


@pytest.fixture
def unwaited():
    """The number of transfers that the test has started and nobody has waited for."""
    before = _get_work_registry_size()
    return lambda: _get_work_registry_size() - before


def gradients(run, layer):
    """Gradients of a step."""
    x = torch.randn(2, 8, 128, generator=torch.Generator().manual_seed(0), requires_grad=True)
    return torch.autograd.grad(run(x).square().sum(), [x, *layer.parameters()])


DISPATCHES = dict(local=LocalDispatch, all_to_all=AllToAllDispatch, symmetric=SymmetricDispatch)
SHARED = "grouped_mm swiglu_quantize grouped_mm"
SHARED_BACKWARD = "quantize_weights grouped_mm swiglu_quantize_backward quantize_weights grouped_mm"
FORWARD = "grouped_mm swiglu_quantize quantize_weights grouped_mm"
WGRADS = "grouped_mm_wgrad grouped_mm_wgrad grouped_mm_wgrad grouped_mm_wgrad"


@pytest.mark.parametrize("dispatch", DISPATCHES)
def test_what_runs_during_transfers(watch, group, unwaited, dispatch):
    """In a forward weights are quantized while tokens travel, or their counts, and shared experts run while sums do. In
    a backward shared experts run while the output's gradient travels, and weight gradients while tokens' gradients
    do. Where nothing travels, tokens' gradients are summed first, whose rows are then freed."""
    config = Fp8FlowMoEConfig(dispatch=dispatch if dispatch == "symmetric" else "all_to_all")
    layer = small_layer("shared", config, None if dispatch == "local" else group)
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
        f"quantize_weights grouped_mm send_back {start}{back}{wait and ' wait'}"
    )


def test_own_rows_are_freed_once_sent(layer, monkeypatch):
    own, alive, quantize, gemm = [], [], ops.quantize_rows, ops.grouped_mm

    def quantize_rows(*args):
        out = quantize(*args)
        own.append(StorageWeakRef(out[0].untyped_storage()))
        return out

    monkeypatch.setattr(ops, "quantize_rows", quantize_rows)
    monkeypatch.setattr(ops, "grouped_mm", lambda *args: alive.append(not own[-1].expired()) or gemm(*args))
    layer(torch.randn(2, 8, 128, requires_grad=True)).sum().backward()
    assert alive == [False] * 4


def test_no_transfer_is_left_where_only_gradients_of_shared_experts_are_asked_for(fp8_layer, unwaited):
    """Unlike needs_input_grad, the graph does not show it."""
    shared = list(fp8_layer.shared_experts.parameters())
    x = torch.randn(2, 8, 128, requires_grad=True)
    loss = fp8_layer(x).square().sum()
    got = torch.autograd.grad(loss, shared, retain_graph=True)
    assert not unwaited()
    got += torch.autograd.grad(loss, [x, *fp8_layer.experts.parameters()], retain_graph=True)
    assert not unwaited()
    assert same(got, torch.autograd.grad(loss, [*shared, x, *fp8_layer.experts.parameters()]))


def test_flops_of_shared_experts_are_counted(fp8_layer):
    def counted() -> int:
        with FlopCounterMode(display=False) as flops:
            fp8_layer(torch.randn(2, 8, 128))
        return {str(op): n for op, n in flops.get_flop_counts()["Global"].items()}[
            "titan_fp8moe.routed_experts_forward"
        ]

    both, fp8_layer.fp8_shared = counted(), False
    assert both - counted() == 2 * 128 * 3 * 128 * 128


def by_op(layer, ops):
    contexts = functools.partial(create_selective_checkpoint_contexts, list(ops))
    return functools.partial(checkpoint, layer, use_reentrant=False, context_fn=contexts)


@pytest.mark.parametrize("shared", ["bf16", "fp8"])
@pytest.mark.parametrize("dispatch", DISPATCHES)
def test_checkpointing_by_op_repeats_none_and_moves_no_token_again(request, watch, unwaited, dispatch, shared):
    layer = request.getfixturevalue("layer" if shared == "bf16" else "fp8_layer")
    layer.experts.config.dispatch = dispatch if dispatch == "symmetric" else "all_to_all"
    layer.experts.set_meshes(None if dispatch == "local" else layer.experts.ep_mesh, None)
    watch(DISPATCHES[dispatch], *VERBS)
    functions = [name for name, function in vars(ops).items() if inspect.isfunction(function) and name != "emulate"]
    watch(ops, *functions)
    watch(ops.quantize, "quantize_weights")
    want, plain = gradients(layer, layer), watch.take()
    got = gradients(by_op(layer, _SAVED_OPS), layer)
    assert watch.take() == plain and same(got, want) and not unwaited()


def test_checkpointing_that_keeps_none_of_a_layers_ops(layer, watch, unwaited):
    """A policy may keep others. The repeated forward's transfers are waited for."""
    watch(ops, "start_all_to_all")
    want, plain = gradients(layer, layer), len(watch.take().split())
    got = gradients(by_op(layer, [torch.ops.aten.topk.default]), layer)
    assert same(got, want) and not unwaited() and (plain, len(watch.seen)) == (5, 8)


@pytest.mark.parametrize("recompute", ["activation", "experts"])
def test_tokens_are_kept_as_they_arrived(layer, recompute):
    """Not once for each of their experts."""
    layer.experts.config.recompute = recompute
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        layer(torch.randn(2, 8, 128)).sum().backward()
    width = 128 + 2 * (4 + 4) + 16  # two positions and scores, a scale padded to 16 bytes
    assert [t.shape for t in saved if t.dtype in (torch.uint8, recipe.FP8)] == [(16, width)]


@pytest.mark.parametrize("counts, rows", [((129, 0, 71, 0), 384), ((128, 128, 0, 256), 512), ((0, 0, 0, 0), 128)])
def test_rows_are_for_what_arrives(mesh, monkeypatch, counts, rows):
    """Not for the most padding that these rows could need: 640, 896 and 128."""
    sizes, permute = [], ops.permute_rows
    monkeypatch.setattr(ops, "permute_rows", lambda *args: sizes.append(args[3].shape[0]) or permute(*args))
    chosen = torch.repeat_interleave(torch.arange(4), torch.tensor(counts)).unsqueeze(1)
    if not len(chosen):
        chosen = torch.full((5, 1), -1)
    x, scores = torch.randn(len(chosen), 128).bfloat16(), torch.rand(len(chosen), 1)
    weights = [torch.randn(4, 128, 128) / 8 for _ in range(3)]
    outs = []
    for group in (mesh.get_group(), None):
        leaf = x.clone().requires_grad_()
        out = routed_experts(leaf, *weights, chosen, scores, ep_group=group)
        out.backward(x)
        outs.append((out.detach(), leaf.grad))
    assert sizes[:2] == [rows, rows]
    assert same(*outs)


def test_symmetric_transfers_run_beside_the_layer(group, monkeypatch, watch):
    """What is in brackets runs on the transfers' stream."""
    watch(exchange, "publish", "plan", "wait", "pull_routing", "pull_rows", "push_sums")
    watch(Workspace, "planned", "join")
    watch(ops, *PRODUCTS, "unpermute_sum", "unpermute_gradients")
    watch(ops.quantize, "quantize_weights")

    @contextlib.contextmanager
    def beside(_):
        watch.seen.append("[")
        yield
        watch.seen.append("]")

    monkeypatch.setattr(Workspace, "beside", beside)
    out = small_layer("plain", Fp8FlowMoEConfig(dispatch="symmetric"), group).run()
    assert watch.take() == (
        "publish [ plan wait planned pull_routing pull_rows ] quantize_weights quantize_weights join "
        "grouped_mm grouped_mm [ push_sums wait ] join unpermute_sum"
    )
    out.sum().backward()
    assert watch.take() == (
        "publish [ wait pull_rows ] quantize_weights join grouped_mm quantize_weights grouped_mm "
        "[ push_sums wait ] grouped_mm_wgrad grouped_mm_wgrad join unpermute_gradients"
    )


def test_results_of_a_transfer_are_not_filled():
    """That would run on the layer's stream, after the transfer on another has begun to write them."""
    sizes = Sizes(1, 1, 128, 1, 1)
    at = Workspace(sizes, 0, [torch.zeros(sizes.nbytes, dtype=torch.uint8)], lambda: 1.0)
    at.stream = at._forked = at._moved = mock.Mock()
    torch.use_deterministic_algorithms(True)
    try:
        with at.beside():
            assert not torch.utils.deterministic.fill_uninitialized_memory
        assert torch.utils.deterministic.fill_uninitialized_memory
    finally:
        torch.use_deterministic_algorithms(False)


def test_rows_from_shared_memory_are_freed(group, monkeypatch):
    """Rows in expert order after GEMM 1, as with an all-to-all: nothing holds them until the sums travel."""
    rows, alive, gemm = [], [], ops.grouped_mm

    def watched(q, *args):
        alive.append([not ref.expired() for ref in rows])
        rows.append(StorageWeakRef(q.untyped_storage()))
        return gemm(q, *args)

    monkeypatch.setattr(ops, "grouped_mm", watched)
    small_layer("plain", Fp8FlowMoEConfig(dispatch="symmetric"), group).run()
    assert alive == [[], [False]]


def test_one_graph_is_refused_with_the_reason(group):
    run = small_layer("plain", Fp8FlowMoEConfig(dispatch="all_to_all"), group).run
    with pytest.raises(torch._dynamo.exc.Unsupported, match='dispatch = "symmetric" can be part of a graph'):
        torch.compile(run, backend="eager", fullgraph=True)()


@pytest.mark.parametrize(("recompute", "exchanged"), [("activation", True), ("experts", True), ("experts", False)])
def test_rows_that_are_not_kept_are_freed(layer, monkeypatch, recompute, exchanged):
    """Rows in expert order after GEMM 1, in the forward and where the backward repeats it; arrived gradients before the
    first GEMM after them. Arrived tokens are kept."""
    with pytest.raises(torch._dynamo.exc.Unsupported):  # Python's calls keep their arguments after that
        torch.compile(torch._dynamo.graph_break, backend="eager", fullgraph=True)()
    layer.experts.config.recompute = recompute
    layer.experts.set_meshes(layer.experts.ep_mesh if exchanged else None, None)
    permute, gemm, wgrad = ops.permute_rows, ops.grouped_mm, ops.grouped_mm_wgrad
    again = recompute == "experts"  # GEMM 1 in the backward, before the gradients arrive
    # Of each call which of the rows that arrived are there, and which of those in expert order.
    forward = [[[True], [True]], [[True], [False]]]
    kept, freed = [True] * (1 + again), [False] * (1 + again)
    backward = [[[*kept, False], [*freed, True]]] * 4
    expected = forward + again * [[[True, True], [False, True]]] + backward
    arrived, permuted, calls = [], [], []

    def permute_rows(q, *args):
        out = permute(q, *args)
        arrived.append(StorageWeakRef(q.untyped_storage()))
        permuted.append(StorageWeakRef(out[0].untyped_storage()))
        return out

    def watched(op):
        def call(*args):
            deadline = time.monotonic() + 5
            while True:  # gloo's thread may own what has arrived for some milliseconds more
                alive = [[not ref.expired() for ref in refs] for refs in (arrived, permuted)]
                if alive in expected[len(calls) :][:1] or time.monotonic() > deadline:
                    break
                time.sleep(0.001)
            calls.append(alive)
            return op(*args)

        return call

    monkeypatch.setattr(ops, "permute_rows", permute_rows)
    monkeypatch.setattr(ops, "grouped_mm", watched(gemm))
    monkeypatch.setattr(ops, "grouped_mm_wgrad", watched(wgrad))
    layer(torch.randn(2, 8, 128, requires_grad=True)).sum().backward()
    assert calls == expected


def test_styles_of_any_module_know_converted_experts(layer, mesh):
    """A model's own parallelization may import torchtitan's styles from where they are defined; what a style of its own
    has sharded is not taken for whole."""
    parallel.install()
    layer.experts.set_meshes(None, None)
    expert_parallel.TensorParallel()._apply(layer.experts, mesh)
    assert layer.experts.tp_mesh is mesh and not layer.experts._forward_pre_hooks
    layer.experts.set_meshes(None, None)
    with pytest.raises(RuntimeError, match="does not know"):
        layer(torch.randn(2, 8, 128))


def test_two_forwards_before_their_backwards(layer, unwaited):
    """As in a pipeline: each layer's backward gets its own gradients, in whatever order."""
    x = torch.randn(2, 8, 128)
    want = torch.autograd.grad(layer(x).square().sum() + layer(-x).sum(), [*layer.parameters()])
    first, second = layer(x).square().sum(), layer(-x).sum()
    grads = [torch.autograd.grad(loss, [*layer.parameters()]) for loss in (first, second)]
    assert not unwaited()
    for total, *parts in zip(want, *grads, strict=True):
        torch.testing.assert_close(sum(parts), total)


def ops_of(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    """This package's ops."""
    return [node for node in graph.nodes if getattr(node.target, "namespace", "") == "titan_fp8moe"]


@pytest.mark.parametrize("save_h", ["bf16", "fp8"])
@pytest.mark.parametrize("dispatch", ["local", "symmetric"])
@pytest.mark.parametrize("kind", ["plain", "shared", "kept"])
def test_a_compiled_backward_has_two_ops_and_frees_h_between_them(group, kind, dispatch, save_h):
    graphs = []

    def keep(module, _):
        graphs.append(module.graph)
        return make_boxed_func(module.forward)

    config = Fp8FlowMoEConfig(dispatch="symmetric", save_h=save_h)
    layer = small_layer(kind, config, group if dispatch == "symmetric" else None)
    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    torch.compile(layer.run, backend=backend, fullgraph=True)().sum().backward()
    forward, backward = graphs
    assert [node.target._opname for node in ops_of(forward)] == ["routed_experts_forward"]
    first, second = ops_of(backward)
    assert first.target._opname == "routed_experts_hidden_gradients"
    assert second.target._opname == "routed_experts_gradients"
    freed = {*first.all_input_nodes} - {*second.all_input_nodes}
    hidden = [n for n in freed if n.meta["val"].dim() == 2 and n.meta["val"].shape[1] == 2 * 128]
    assert [n.meta["val"].dtype for n in hidden] == [recipe.FP8 if save_h == "fp8" else torch.bfloat16] * (
        2 if kind == "shared" else 1
    )
    assert all(n.op == "placeholder" for n in hidden)


@pytest.mark.gpu
def test_streams_of_a_layer(tmp_path):
    """On another than the default stream it computes the same."""
    dist.init_process_group("nccl", f"file://{tmp_path}/store", rank=0, world_size=1)
    x, ids, scores = torch.randn(64, 128).cuda(), torch.randint(4, (64, 2)).cuda(), torch.rand(64, 2).cuda()
    weights = [torch.randn(4, 128, 128).cuda() for _ in range(3)]
    default, side = torch.cuda.current_stream(), torch.cuda.Stream()

    def layer():
        leaf = x.clone().requires_grad_()
        out = routed_experts(leaf, *weights, ids, scores, ep_group=dist.group.WORLD)
        return out.detach(), *torch.autograd.grad(out.square().sum(), leaf)

    try:
        want = layer()
        side.wait_stream(default)
        with torch.cuda.stream(side):
            got = layer()
        torch.cuda.synchronize()
        assert same(got, want)
    finally:
        torch.cuda.set_stream(default)
        dist.destroy_process_group()


ERRORS = [("symmetric", FFN, "product", call) for call in range(8)]  # of the forward's four and the backward's
ERRORS += [(dispatch, ops.quantize, "quantize_weights", 0) for dispatch in DISPATCHES]
ERRORS += [
    (dispatch, ops, name, 0)
    for dispatch in DISPATCHES
    for name in ("swiglu_quantize", "swiglu_quantize_backward", "grouped_mm_wgrad")
]


@pytest.mark.parametrize(("dispatch", "owner", "name", "call"), ERRORS)
def test_after_an_error_inside_of_an_op(fp8_layer, monkeypatch, unwaited, dispatch, owner, name, call):
    """Between any two verbs, on whichever side of a transfer. The next steps are right, and leave no transfer."""
    layer, whole, calls = fp8_layer, getattr(owner, name), []
    layer.experts.config.dispatch = dispatch if dispatch == "symmetric" else "all_to_all"
    layer.experts.set_meshes(None if dispatch == "local" else layer.experts.ep_mesh, None)
    want = gradients(layer, layer)

    def broken(*args):
        calls.append(None)
        if len(calls) == 1 + call:
            raise torch.OutOfMemoryError
        return whole(*args)

    monkeypatch.setattr(owner, name, broken)
    with pytest.raises(torch.OutOfMemoryError):
        gradients(layer, layer)
    left = unwaited()  # PyTorch keeps an all-to-all that nobody has waited for: other ranks may not have begun it
    assert left <= (dispatch == "all_to_all")
    for _ in range(2):
        assert same(gradients(layer, layer), want) and unwaited() == left
