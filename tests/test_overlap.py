"""Work that runs while tokens are on their way between ranks, by the order in which operators are called."""

import functools
import gc
import time
import weakref
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _get_work_registry_size
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode
from torchtitan.distributed import expert_parallel
from torchtitan.models.moe.moe import MoE, MoEArgs

from titan_fp8moe import ops, recipe, routed_experts
from titan_fp8moe.config import Fp8FlowMoEConfig
from titan_fp8moe.dispatch import Route
from titan_fp8moe.dispatch.all_to_all import GRADIENTS_NEEDED, AllToAllDispatch
from titan_fp8moe.dispatch.symmetric.dispatch import SymmetricDispatch
from titan_fp8moe.layer import experts
from titan_fp8moe.layer.experts import InFlight, Inputs
from titan_fp8moe.layer.saved import LayerSpec
from titan_fp8moe.spec import BackwardSpec, ExpertSpec
from titan_fp8moe.testing import relative_error
from titan_fp8moe.torchtitan import parallel
from titan_fp8moe.torchtitan.converter import _SAVED_OPS
from titan_fp8moe.torchtitan.cpu import _histc_with_integers
from titan_fp8moe.torchtitan.modules import Fp8FlowFeedForward, Fp8FlowMoE

OPS = {
    "all_to_all_single": "start",
    "wait_tensor": "wait",
    "mm": "mm",  # of router and shared experts
    "routed_experts_forward": "experts",
    "routed_experts_finish": "finish",
    "grouped_mm": "grouped_mm",
    "grouped_mm_wgrad": "wgrad",
}


class Order(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._opname in OPS:
            self.names.append(OPS[func._opname])
        return func(*args, **(kwargs or {}))


@pytest.fixture
def mesh(group):
    return init_device_mesh("cpu", (1,))


@pytest.fixture
def layer(mesh, monkeypatch):
    # On a CPU also where there is a GPU, and the router's histc not yet patched.
    monkeypatch.setattr(torch, "histc", _histc_with_integers(torch.histc))
    torch.manual_seed(0)
    layer = MoE(MoEArgs(num_experts=4, num_shared_experts=1, top_k=2), dim=128, hidden_dim=128)
    with torch.no_grad():
        layer.init_weights(0.02, torch.device("cpu"))
    Fp8FlowMoE.convert(layer, Fp8FlowMoEConfig())
    layer.experts.set_meshes(mesh, None)
    return layer


@pytest.fixture(autouse=True)
def in_flight(monkeypatch):
    """The carriers, of layers that are still alive, that hold a transfer or a gradient."""
    carriers = weakref.WeakSet()

    def make(device):
        carriers.add(carrier := InFlight(device))
        return carrier

    monkeypatch.setattr(experts, "_in_flight", make)
    return lambda: [c for c in carriers if c.pending is not None or c.shared_dx_RD is not None]


@pytest.fixture
def unwaited():
    """The number of transfers that the test has started and nobody has waited for."""
    before = _get_work_registry_size()
    return lambda: _get_work_registry_size() - before


def gradients(run, layer):
    """Gradients of a step, and the order of its operators in forward and backward."""
    x = torch.randn(2, 8, 128, generator=torch.Generator().manual_seed(0), requires_grad=True)
    with Order() as forward:
        out = run(x)
    with Order() as backward:
        grads = torch.autograd.grad(out.square().sum(), [x, *layer.parameters()])
    return grads, forward.names, backward.names


def beside(names):
    """The operators that run during each transfer, counted. The op of the experts starts one that another finishes."""
    transfers, running = [], None
    for name in names:
        if name in ("start", "experts"):
            running = Counter()
        elif running is not None and name in ("wait", "finish"):
            transfers.append(running)
            running = None
        elif running is not None:
            running[name] += 1
    return transfers


def test_shared_experts_run_beside_combine_and_dispatch(layer):
    _, forward, backward = gradients(layer, layer)
    assert beside(forward) == [Counter(mm=3)] and forward.count("mm") == 1 + 3  # the router's is before
    # Two matrix products for each of the three of the shared experts, and none of the router's.
    assert beside(backward) == [Counter(mm=6), Counter(wgrad=2)] and backward.count("mm") == 6 + 2


def test_fp8_shared_experts_run_beside_combine_and_dispatch(layer):
    """Their forward is in the op that ends the combine; their backward follows the start of the dispatch."""
    layer.fp8_shared = True
    Fp8FlowFeedForward.convert(layer.shared_experts, layer.experts.config)
    grads, forward, backward = gradients(layer, layer)
    assert beside(forward) == [Counter()] and forward.count("mm") == 1
    assert beside(backward) == [Counter(grouped_mm=2, wgrad=2), Counter(wgrad=2)] and backward.count("mm") == 2
    layer.fp8_shared = False
    for got, want in zip(grads, gradients(layer, layer)[0], strict=True):
        assert relative_error(got, want) < 0.1


@pytest.mark.parametrize("fp8_shared", [False, True])
@pytest.mark.parametrize("others_need", [False, True])
def test_gradients_return_if_any_rank_needs_them(layer, monkeypatch, fp8_shared, others_need):
    """With frozen tokens and router, all ranks do without, or none."""
    if fp8_shared:
        layer.fp8_shared = True
        Fp8FlowFeedForward.convert(layer.shared_experts, layer.experts.config)
    agree = AllToAllDispatch._agree

    def with_needs_of_others(self, *args):
        self.state.counts[1, :, -1] |= others_need
        agree(self, *args)

    monkeypatch.setattr(AllToAllDispatch, "_agree", with_needs_of_others)
    x = torch.randn(2, 8, 128, generator=torch.Generator().manual_seed(0), requires_grad=True)
    params = [p for name, p in layer.named_parameters() if "router" not in name]
    want = torch.autograd.grad(layer(x).square().sum(), params)
    layer.router.requires_grad_(False)
    out = layer(x.detach())
    with Order() as backward:
        got = torch.autograd.grad(out.square().sum(), params)
    assert backward.names.count("start") == 1 + others_need
    assert backward.names.count("grouped_mm") == 1 + others_need + fp8_shared
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


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


def test_symmetric_ranks_always_return_gradients():
    """Each would wait for the others, and does not know whether they need any."""
    assert SymmetricDispatch(Route("symmetric")).returns_gradients(False)


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


def test_no_transfer_is_left_where_only_shared_experts_train(layer):
    layer.fp8_shared = True
    Fp8FlowFeedForward.convert(layer.shared_experts, layer.experts.config)
    params = list(layer.shared_experts.parameters())
    x = torch.randn(2, 8, 128, generator=torch.Generator().manual_seed(0))
    want = torch.autograd.grad(layer(x).square().sum(), params)
    layer.requires_grad_(False)
    layer.shared_experts.requires_grad_(True)
    out = layer(x)
    with Order() as backward:
        got = torch.autograd.grad(out.square().sum(), params)
    assert backward.names.count("start") == backward.names.count("wait") == 1
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_no_transfer_is_left_where_only_gradients_of_shared_experts_are_asked_for(layer, unwaited, in_flight):
    """Unlike needs_input_grad, the graph does not show it."""
    layer.fp8_shared = True
    Fp8FlowFeedForward.convert(layer.shared_experts, layer.experts.config)
    shared = list(layer.shared_experts.parameters())
    x = torch.randn(2, 8, 128, requires_grad=True)
    loss = layer(x).square().sum()
    got = torch.autograd.grad(loss, shared, retain_graph=True)
    assert not unwaited() and not in_flight()
    got += torch.autograd.grad(loss, [x, *layer.experts.parameters()], retain_graph=True)
    assert not unwaited()
    want = torch.autograd.grad(loss, [*shared, x, *layer.experts.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_flops_of_shared_experts_are_counted(layer):
    layer.fp8_shared = True
    Fp8FlowFeedForward.convert(layer.shared_experts, layer.experts.config)
    with FlopCounterMode(display=False) as flops:
        layer(torch.randn(2, 8, 128))
    counts = {str(op): count for op, count in flops.get_flop_counts()["Global"].items()}
    assert counts["titan_fp8moe.routed_experts_finish"] == 2 * 128 * 3 * 128 * 128


def test_checkpointing_by_op_moves_no_token_again(layer):
    contexts = functools.partial(create_selective_checkpoint_contexts, list(_SAVED_OPS))
    by_op = functools.partial(checkpoint, layer, use_reentrant=False, context_fn=contexts)
    want, _, _ = gradients(layer, layer)
    got, _, backward = gradients(by_op, layer)
    assert backward.count("start") == 2 and "experts" not in backward
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("kept", [[], ["forward"], ["finish"]], ids=str)
def test_checkpointing_that_keeps_half_a_layer(layer, unwaited, kept):
    """A policy may name one of the two ops. The repeated forward's transfer is waited for, or the error names both."""
    saved = [getattr(torch.ops.titan_fp8moe, f"routed_experts_{name}").default for name in kept]
    contexts = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.topk.default, *saved])
    by_op = functools.partial(checkpoint, layer, use_reentrant=False, context_fn=contexts)
    if kept == ["forward"]:
        with pytest.raises(RuntimeError, match="routed_experts_forward.*routed_experts_finish.*SAVED_OPS"):
            gradients(by_op, layer)
        return
    want, got = gradients(layer, layer)[0], gradients(by_op, layer)[0]
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert not unwaited()


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
    for got, want in zip(*outs, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("exchanged", [True, False])
@pytest.mark.parametrize("recompute", ["activation", "experts"])
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
    with pytest.raises(RuntimeError, match="a parallel style that fp8_flow_moe does not know"):
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
    monkeypatch.setattr(experts, "_in_flight", lambda device: InFlight(torch.device("cuda")))
    layer(torch.randn(2, 8, 128))
    layer.shared_experts.register_forward_hook(lambda *_: current.insert(0, "b"))
    with pytest.raises(RuntimeError, match="let meanwhile.. restore the current stream"):
        layer(torch.randn(2, 8, 128))


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
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
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
    contexts = functools.partial(create_selective_checkpoint_contexts, list(_SAVED_OPS))
    out = checkpoint(layer, torch.randn(2, 8, 128), use_reentrant=False, context_fn=contexts)
    assert len(payloads) == 1 and payloads[0].untyped_storage().size() == 0
    out.sum().backward()


def test_under_compile(layer):
    """The exchange stays eager, and what is around it may be compiled."""
    want, *_ = gradients(layer, layer)
    x = torch.randn(2, 8, 128, generator=torch.Generator().manual_seed(0), requires_grad=True)
    out = torch.compile(layer, backend="aot_eager")(x)
    for a, b in zip(torch.autograd.grad(out.square().sum(), [x, *layer.parameters()]), want, strict=True):
        torch.testing.assert_close(a, b)
