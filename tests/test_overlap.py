"""Work and memory while tokens are on their way between ranks."""

import contextlib
import functools
import gc
import operator
import time
import weakref
from collections import Counter
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func
from torch._C._distributed_c10d import _get_work_registry_size
from torch._dynamo.backends.common import aot_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode
from torchtitan.distributed import expert_parallel
from torchtitan.models.moe.moe import MoE, MoEArgs

from experiments.reference import relative_error
from titan_fp8moe import SharedExperts, ops, recipe, routed_experts
from titan_fp8moe.config import Fp8FlowMoEConfig
from titan_fp8moe.dispatch import Route
from titan_fp8moe.dispatch.all_to_all import AllToAllDispatch
from titan_fp8moe.dispatch.base import GRADIENTS_NEEDED
from titan_fp8moe.dispatch.symmetric import exchange
from titan_fp8moe.dispatch.symmetric import ops as symmetric_ops
from titan_fp8moe.dispatch.symmetric.workspace import Sizes, Workspace
from titan_fp8moe.layer import experts
from titan_fp8moe.layer.experts import InFlight, Inputs
from titan_fp8moe.layer.saved import LayerSpec
from titan_fp8moe.spec import BackwardSpec, ExpertSpec
from titan_fp8moe.torchtitan import parallel
from titan_fp8moe.torchtitan.converter import _SAVED_OPS
from titan_fp8moe.torchtitan.cpu import _histc_with_integers
from titan_fp8moe.torchtitan.modules import Fp8FlowFeedForward, Fp8FlowMoE

OPS = {
    "all_to_all_single": "start",
    "routed_experts_forward": "start",  # and leaves it running
    "wait_tensor": "wait",
    "routed_experts_finish": "wait",
}


class Order(TorchDispatchMode):
    """Counts transfers, and the products that run during each."""

    def __init__(self):
        super().__init__()
        self.started, self.during, self.running = 0, [], None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kind = OPS.get(func._opname)
        if kind == "start":
            self.started, self.running = self.started + 1, 0
        elif kind == "wait" and self.running is not None:
            self.during.append(self.running)
            self.running = None
        elif self.running is not None:
            self.running += func._opname in ("mm", "grouped_mm", "grouped_mm_wgrad")
        return func(*args, **(kwargs or {}))


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


@pytest.fixture(autouse=True)
def in_flight(monkeypatch):
    """The carriers, of layers that are still alive, that hold a transfer or a gradient."""
    carriers = weakref.WeakSet()

    def make(device, shared):
        carriers.add(carrier := InFlight(device, shared))
        return carrier

    monkeypatch.setattr(experts, "in_flight_eagerly", make)
    return lambda: [c for c in carriers if c.started is not None]


@pytest.fixture
def unwaited():
    """The number of transfers that the test has started and nobody has waited for."""
    before = _get_work_registry_size()
    return lambda: _get_work_registry_size() - before


def gradients(run, layer):
    """Gradients of a step, and the transfers in forward and backward."""
    x = torch.randn(2, 8, 128, generator=torch.Generator().manual_seed(0), requires_grad=True)
    with Order() as forward:
        out = run(x)
    with Order() as backward:
        grads = torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])
    return grads, forward, backward


def test_shared_experts_run_during_transfers(layer, request):
    """In FP8 their forward is in the op that ends the combine; their gradients are those of fp32, but for noise."""
    want, forward, backward = gradients(layer, layer)
    assert forward.during == [3] and backward.during == [6, 2]  # w1, w2 and w3; then weights' gradients of the experts
    got, _, backward = gradients(request.getfixturevalue("fp8_layer"), layer)
    assert backward.during == [4, 2]
    assert all(relative_error(a, b) < 0.1 for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize(("routed", "others_need"), [(True, True), (True, False), (False, False)])
def test_gradients_return_if_any_rank_needs_them(fp8_layer, monkeypatch, routed, others_need):
    """With frozen tokens and router, all ranks do without, or none. ``routed``: the routed experts train."""
    layer, agree = fp8_layer, AllToAllDispatch._agree

    def with_needs_of_others(self, *args):
        self.state.counts[1, :, -1] |= others_need
        agree(self, *args)

    monkeypatch.setattr(AllToAllDispatch, "_agree", with_needs_of_others)
    x = torch.randn(2, 8, 128, requires_grad=True)
    layer.router.requires_grad_(False)
    layer.experts.requires_grad_(routed)
    params = [p for p in layer.parameters() if p.requires_grad]
    want = torch.autograd.grad(layer(x).square().sum(), params)
    out = layer(x.detach())
    with Order() as backward:
        got = torch.autograd.grad(out.square().sum(), params)
    assert backward.started == len(backward.during) == 1 + others_need
    assert same(got, want)


def test_ranks_tell_each_other_settings_and_needs():
    """A difference in what ranks must have in common changes the signature by more than the bit of the needs."""
    spec = LayerSpec(Route("all_to_all", 2), ExpertSpec(), BackwardSpec(), "", True)
    inputs = Inputs(torch.empty(3, 256), topk_ids=torch.zeros(3, 2))

    def signature(spec=spec, inputs=inputs, **needs):
        return experts._signature(spec, inputs, Inputs(**needs))

    assert signature() | GRADIENTS_NEEDED == signature(x=True) == signature(topk_scores=True) != signature()
    others = [
        *(signature(spec._replace(expert=expert)) for expert in (ExpertSpec("other"), ExpertSpec("swiglu", True))),
        *(signature(spec._replace(backward=BackwardSpec(**{name: "other"}))) for name in BackwardSpec._fields),
        signature(spec._replace(shared=True)),
        signature(inputs=inputs._replace(x=torch.empty(3, 128))),
        signature(inputs=inputs._replace(x=torch.empty(3, 256).bfloat16())),
        signature(inputs=inputs._replace(topk_ids=torch.zeros(3, 1))),
    ]
    assert len({number >> 1 for number in (signature(), *others)}) == 1 + len(others)
    assert all(0 <= number < 2**31 for number in others)


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


def test_no_transfer_is_left_where_only_gradients_of_shared_experts_are_asked_for(fp8_layer, unwaited, in_flight):
    """Unlike needs_input_grad, the graph does not show it."""
    shared = list(fp8_layer.shared_experts.parameters())
    x = torch.randn(2, 8, 128, requires_grad=True)
    loss = fp8_layer(x).square().sum()
    got = torch.autograd.grad(loss, shared, retain_graph=True)
    assert not unwaited() and not in_flight()
    got += torch.autograd.grad(loss, [x, *fp8_layer.experts.parameters()], retain_graph=True)
    assert not unwaited() and not in_flight()
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


def test_checkpointing_by_op_moves_no_token_again(layer):
    want, _, plain = gradients(layer, layer)
    got, _, backward = gradients(by_op(layer, _SAVED_OPS), layer)
    assert backward.started == plain.started == 2 and same(got, want)


@pytest.mark.parametrize("kept", [[], ["forward"], ["finish"]], ids=str)
def test_checkpointing_that_keeps_half_a_layer(layer, unwaited, kept):
    """A policy may name one of the two ops. The repeated forward's transfer is waited for, or the error names both."""
    saved = [getattr(torch.ops.titan_fp8moe, f"routed_experts_{name}").default for name in kept]
    some = by_op(layer, [torch.ops.aten.topk.default, *saved])
    if kept == ["forward"]:
        with pytest.raises(RuntimeError, match="SAVED_OPS"):
            gradients(some, layer)
        return
    assert same(gradients(some, layer)[0], gradients(layer, layer)[0]) and not unwaited()


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


def test_symmetric_transfers_run_beside_the_layer(group, monkeypatch):
    """What is in brackets runs on the transfers' stream."""
    seen: list[str] = []
    watched = {
        exchange: ("publish", "plan", "wait", "pull_routing", "pull_rows", "push_sums"),
        Workspace: ("planned", "join"),
        ops: ("grouped_mm", "grouped_mm_wgrad"),
        symmetric_ops: ("unpermute_sum", "unpermute_gradients"),
    }

    def watch(owner, name, call):
        monkeypatch.setattr(owner, name, lambda *args, **kwargs: seen.append(name) or call(*args, **kwargs))

    @contextlib.contextmanager
    def beside(_):
        seen.append("[")
        yield
        seen.append("]")

    for owner, names in watched.items():
        for name in names:
            watch(owner, name, getattr(owner, name))
    monkeypatch.setattr(Workspace, "beside", beside)
    weights = [torch.randn(4, 128, 128).requires_grad_() for _ in range(3)]
    scores, ids = torch.rand(8, 4).topk(2)
    config = Fp8FlowMoEConfig(dispatch="symmetric")
    routed_experts(torch.randn(8, 128), *weights, ids, scores, config=config, ep_group=group).sum().backward()
    assert " ".join(seen) == (
        "publish [ plan wait planned pull_routing pull_rows ] join grouped_mm grouped_mm "
        "[ push_sums wait ] join unpermute_sum "
        "publish [ wait pull_rows ] join grouped_mm grouped_mm "
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


def test_rows_from_shared_memory_are_freed(mesh, monkeypatch):
    """Rows in expert order after GEMM 1, as with an all-to-all: nothing holds them until the sums travel."""
    rows, alive, gemm = [], [], ops.grouped_mm

    def watched(q, *args):
        alive.append([not ref.expired() for ref in rows])
        rows.append(StorageWeakRef(q.untyped_storage()))
        return gemm(q, *args)

    monkeypatch.setattr(ops, "grouped_mm", watched)
    scores, ids = torch.rand(8, 4).topk(2)
    weights = [torch.randn(4, 128, 128) for _ in range(3)]
    config = Fp8FlowMoEConfig(dispatch="symmetric")
    routed_experts(torch.randn(8, 128), *weights, ids, scores, config=config, ep_group=mesh.get_group())
    assert alive == [[], [False]]


def test_one_graph_is_refused_with_the_reason(mesh):
    def layer(x, *weights_and_routing):
        return routed_experts(x, *weights_and_routing, ep_group=mesh.get_group())

    scores, ids = torch.rand(8, 4).topk(2)
    weights = [torch.randn(4, 128, 128) for _ in range(3)]
    with pytest.raises(torch._dynamo.exc.Unsupported, match='dispatch = "symmetric" can be part of a graph'):
        torch.compile(layer, backend="eager", fullgraph=True)(torch.randn(8, 128), *weights, ids, scores)


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


def test_two_forwards_before_their_backwards(layer, in_flight):
    """As in a pipeline: each layer's backward gets its own gradients, in whatever order."""
    x = torch.randn(2, 8, 128)
    want = torch.autograd.grad(layer(x).square().sum() + layer(-x).sum(), [*layer.parameters()])
    first, second = layer(x).square().sum(), layer(-x).sum()
    grads = [torch.autograd.grad(loss, [*layer.parameters()]) for loss in (first, second)]
    assert not in_flight()
    for total, *parts in zip(want, *grads, strict=True):
        torch.testing.assert_close(sum(parts), total)


def test_a_stream_that_meanwhile_leaves_behind_is_refused(layer, monkeypatch):
    """Both nodes of the layer must run on one stream; the streams here are made up."""
    current = ["a"]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(device=device, name=current[0]))
    monkeypatch.setattr(experts, "in_flight_eagerly", lambda _, shared: InFlight(torch.device("cuda"), shared))
    layer(torch.randn(2, 8, 128))
    layer.shared_experts.register_forward_hook(lambda *_: current.insert(0, "b"))
    with pytest.raises(RuntimeError, match="let meanwhile.. restore the current stream"):
        layer(torch.randn(2, 8, 128))


def needs(graph: torch.fx.Graph) -> list[tuple[str, Counter[str]]]:
    """The name of each op, and how many of each other it needs."""

    def name(node: torch.fx.Node) -> str:
        return getattr(node.target, "_opname", "")

    before: dict[torch.fx.Node, set[torch.fx.Node]] = {}
    for node in graph.nodes:
        before[node] = set().union(*({n, *before[n]} for n in node.all_input_nodes))
    return [(name(node), Counter(map(name, nodes))) for node, nodes in before.items()]


def test_a_compiled_graph_computes_beside_symmetric_transfers(group):
    """Whatever reorders operators: shared experts' backward begins after the gradients are sent and ends before they
    are waited for, and weight gradients are made before the sums are. What a transfer reads and writes outlives it."""
    graphs = []

    def keep(module, _):
        graphs.append(module.graph)
        return make_boxed_func(module.forward)

    weights = [torch.randn(4, 128, 128).requires_grad_() for _ in range(3)]
    shared = SharedExperts(*(torch.randn(128, 128).requires_grad_() for _ in range(3)))
    config = Fp8FlowMoEConfig(dispatch="symmetric")

    def layer(x, ids, scores):
        return routed_experts(x, *weights, ids, scores, config=config, ep_group=group, shared=shared)

    pairs = torch.rand(64, 4).topk(2)
    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep)
    x = torch.randn(64, 128).requires_grad_()
    torch.compile(layer, backend=backend)(x, pairs.indices, pairs.values).sum().backward()
    backward = dict(found := needs(graphs[1]))
    assert backward["symmetric_arrived"]["swiglu_quantize_backward"] == 1
    assert backward["symmetric_finish_combine"]["grouped_mm_wgrad"] == 4
    assert [before["symmetric_dispatch_gradients"] for op, before in found if op == "swiglu_quantize_backward"] == [
        1,
        1,
    ]
    nodes = {getattr(node.target, "_opname", ""): node for node in graphs[1].nodes}
    sent, summed = nodes["symmetric_dispatch_gradients"], nodes["symmetric_start_combine"]
    rows = [node for node in sent.users if node.target is operator.getitem]
    assert {*rows, *sent.args[2:-1]} <= {*nodes["symmetric_arrived"].all_input_nodes}
    assert {*summed.all_input_nodes} <= {*nodes["symmetric_finish_combine"].all_input_nodes}


@pytest.mark.gpu
def test_streams_of_a_layer(tmp_path):
    """On another than the default stream it computes the same; one that ``meanwhile`` leaves behind is refused."""
    dist.init_process_group("nccl", f"file://{tmp_path}/store", rank=0, world_size=1)
    x, ids, scores = torch.randn(64, 128).cuda(), torch.randint(4, (64, 2)).cuda(), torch.rand(64, 2).cuda()
    weights = [torch.randn(4, 128, 128).cuda() for _ in range(3)]
    default, side = torch.cuda.current_stream(), torch.cuda.Stream()

    def layer(meanwhile=None):
        leaf = x.clone().requires_grad_()
        out = routed_experts(leaf, *weights, ids, scores, ep_group=dist.group.WORLD, meanwhile=meanwhile)
        return out.detach(), *torch.autograd.grad(out.square().sum(), leaf)

    try:
        want = layer()
        side.wait_stream(default)
        with torch.cuda.stream(side):
            got = layer()
        torch.cuda.synchronize()
        assert same(got, want)
        with pytest.raises(RuntimeError, match="restore the current stream"):
            layer(lambda: torch.cuda.set_stream(side) or x)
    finally:
        torch.cuda.set_stream(default)
        dist.destroy_process_group()


def test_an_error_in_between_leaves_nothing(layer, in_flight):
    """Gradients in flight that nobody fetches are gone when the graph is."""

    def fail(*args):
        assert in_flight()
        raise torch.OutOfMemoryError

    out = layer(torch.randn(2, 8, 128, requires_grad=True))
    layer.shared_experts.w2.weight.register_hook(fail)
    with pytest.raises(torch.OutOfMemoryError):
        out.sum().backward()
    out = None
    torch.ones(1, requires_grad=True).sum().backward()  # autograd lets go of a failed backward at the next one
    gc.collect()
    assert not in_flight()


def test_a_combined_payload_is_freed(layer, monkeypatch):
    """Per-op checkpointing keeps the forward op's results, but not the memory of the payload among them."""
    payloads, finish = [], experts._finish_op

    def watched(payload, *args):
        payloads.append(payload)
        return finish(payload, *args)

    monkeypatch.setattr(experts, "_finish_op", watched)
    out = by_op(layer, _SAVED_OPS)(torch.randn(2, 8, 128))
    assert len(payloads) == 1 and payloads[0].untyped_storage().size() == 0
    out.sum().backward()


def test_under_compile(layer):
    """The exchange stays eager, and what is around it may be compiled."""
    want, *_ = gradients(layer, layer)
    x = torch.randn(2, 8, 128, generator=torch.Generator().manual_seed(0), requires_grad=True)
    out = torch.compile(layer, backend="aot_eager")(x)
    for a, b in zip(torch.autograd.grad(out.square().sum(), [x, *layer.parameters()]), want, strict=True):
        torch.testing.assert_close(a, b)
