"""The custom ops' contracts with PyTorch: schemas, fakes, tracing. Recipe and kernels have tests of their own."""

import contextlib
import functools
import inspect
import itertools
import math
import re

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from tests.specs import SPECS
from titan_fp8moe import dispatch, ops, recipe, routed_experts
from titan_fp8moe.dispatch import Route
from titan_fp8moe.dispatch.symmetric import exchange, workspace
from titan_fp8moe.kernels import launch, permute, quantize, routing, swiglu, transpose
from titan_fp8moe.kernels.gemm import grouped_mm
from titan_fp8moe.layer.lora import LoraSpec
from titan_fp8moe.layer.operands import WeightCache
from titan_fp8moe.layer.saved import LayerSpec
from titan_fp8moe.layer.weights import ExpertWeights
from titan_fp8moe.spec import BackwardSpec, ExpertSpec, decode, encode

BF16, FP32, INT32 = torch.bfloat16, torch.float32, torch.int32
T, K, M, D, H, E = 20, 2, 256, 512, 128, 2  # no two of them equal but K and E
NAMESPACE = torch.ops.titan_fp8moe
CALLS = vars(ops) | {"quantize_weight": ops.quantize._quantize_weight_op, "join_weight": ops.quantize._join_weight_op}


def rows(M, D):
    """(M, D) e4m3 and column-major scales."""
    q, scale = recipe.quantize_rows(torch.randn(M, D))
    return q, recipe.column_major(scale)


def cases():
    x, dy, h, d = rows(M, D), rows(M, D), torch.randn(M, 2 * H, dtype=BF16), torch.randn(M, H, dtype=BF16)
    tokens, weights = recipe.quantize_rows(torch.randn(T, D)), [torch.randn(E, 128, D), torch.randn(E, 256, D)]
    offsets_E = torch.tensor([128, 256], dtype=INT32)
    scores_TK, score_M, ids_TK = torch.rand(T, K), torch.rand(M), torch.rand(T, 2 * E).topk(K).indices
    row_TK = torch.randint(-1, M, (T, K), dtype=INT32)
    row_CK, token_M = torch.randint(-1, M, (T, K), dtype=INT32), torch.randint(-1, T, (M,), dtype=INT32)
    sent_TK, token_C, counts_N = recipe.dispatch_routing(ids_TK, 2, E)
    token_C = token_C[: int(counts_N[:, 0].sum())].clone()
    arrived = ops.pack_dispatch(*tokens, token_C, sent_TK, ids_TK, scores_TK, E)
    yield "quantize_rows", (torch.randn(T, D, dtype=BF16),)
    yield "quantize_rows", (torch.randn(128, T).t(),)
    yield "quantize_group", (torch.randn(T, D, dtype=BF16),)
    for op in ("quantize_rows", "quantize_group"):
        yield op, (torch.randn(T, 144, dtype=BF16),)
    for plain, transposed in ((True, False), (False, True), (True, True)):
        yield "quantize_weight", (weights, plain, transposed)
        yield "quantize_weight", ([w.mT.contiguous().mT for w in weights[1:]], plain, transposed)
        first, last = (recipe.quantize_weight(w) for w in weights)
        for other in (last, (None, None)):
            yield "join_weight", (*first, *other, plain, transposed)
    yield "expert_routing", (ids_TK, scores_TK, 2 * E, 1024)
    yield "expert_routing", (*ops.unpack_dispatch(arrived, D, K)[2:], E, 512)
    yield "dispatch_routing", (ids_TK, 2, E)
    yield "permute_rows", (*tokens, row_CK, token_M, offsets_E)
    yield "unpermute_sum", (torch.randn(M, D, dtype=BF16), row_TK, FP32)
    yield "unpermute_sum", (torch.randn(M, D, dtype=BF16), row_TK, BF16, torch.randn(M, D, dtype=BF16))
    for ids_and_scores in ((ids_TK, scores_TK), (None, None)):
        yield "pack_dispatch", (*tokens, token_C, sent_TK, *ids_and_scores, E)
    for ds in (score_M, None):
        yield "pack_combine", (h, ds, row_CK)
    yield "unpermute_gradients", (torch.randn(M, D, dtype=BF16), torch.rand(M, 1), row_TK, BF16)
    C = token_C.shape[0]
    yield "unpermute_gradients", (torch.randn(C, D, dtype=BF16), torch.rand(C, K), sent_TK, FP32)
    for expert in SPECS:
        spec, of_expert = encode(expert), h[:, : expert.rows_per_unit * H].contiguous()
        yield "swiglu_quantize", (of_expert, score_M, offsets_E, spec, expert.score_before_experts)
        yield "swiglu_quantize_backward", (d, of_expert, None, score_M, offsets_E, spec, True)
        yield "swiglu_quantize_backward", (d, *rows(*of_expert.shape), score_M, offsets_E, spec, False)
    for mode in recipe.TRANSPOSE_MODES:
        yield "transpose_pair", (*x, *dy, offsets_E, mode)
        yield "transpose_pair", (*tokens, *dy, offsets_E, mode, token_M)
    for columns in (None, 80):
        yield "grouped_mm", (*x, *recipe.quantize_weight(weights[0]), offsets_E, BF16, columns)
    for parts, rows_, columns in ((1, None, None), (2, None, None), (1, 144, None), (2, None, 144), (2, 80, 144)):
        for layout in recipe.WGRAD_LAYOUTS:
            args = *recipe.transpose_pair(*x, *dy), offsets_E, FP32, parts, rows_, columns, layout
            yield "grouped_mm_wgrad", args
    yield "dequantize_rows", (*x, offsets_E)
    factors = torch.randn(E, 16, D, dtype=BF16), torch.randn(E, 2 * H, 16, dtype=BF16)
    yield "low_rank", (*x, *factors, offsets_E)
    yield "low_rank", (*rows(M, 2 * H), *(f.transpose(1, 2) for f in reversed(factors)), offsets_E)
    yield "low_rank_grads", (*x, *rows(M, 2 * H), *factors, offsets_E)
    experts = [torch.randn(E, *shape) / 16 for shape in ((H, D), (H, D), (D, H))]  # gate, up, down
    gate, up, down = experts
    weights, shared = [gate, down, up], [w[:1].clone() for w in (gate, down, up)]
    flags = torch.zeros(4, 16, dtype=torch.uint8)
    payload = torch.randn(C, D, dtype=BF16).view(torch.uint8)
    q, _, scale, end = recipe.quantize_group(torch.randn(T, D))
    remote = dispatch.Route("all_to_all", 2, 1.0, "0")
    state = sent_TK, torch.zeros(C, dtype=INT32), torch.zeros(2, 2, 3 + E, dtype=INT32)
    for recompute, save_h in (("experts", "bf16"), ("activation", "bf16"), ("none", "fp8")):
        backward = BackwardSpec(recompute, save_h)
        args = torch.randn(T, D), scores_TK, torch.rand(T, E).topk(K).indices, weights
        spec = LayerSpec(dispatch.Route(), ExpertSpec(), backward, shared="", check_ids=True)
        yield "routed_experts_forward", (*args, [], [], None, encode(spec), 0)
        adapters = [torch.randn(E, 4, D), torch.randn(E, H, 4), torch.randn(E, 8, H), torch.randn(E, D, 8)]
        with_lora = spec._replace(lora=LoraSpec(2.0, 0.5, None, fused=False))
        yield "routed_experts_forward", (*args, [], adapters, None, encode(with_lora), 0)
        spec = spec._replace(shared="trained")
        yield "routed_experts_forward", (*args, shared, [], flags, encode(spec), 0)
        frozen = spec._replace(backward=backward._replace(weights="frozen"), shared="frozen")
        yield "routed_experts_forward", (*args, shared, [], flags, encode(frozen), 0)
        spec = spec._replace(route=remote)
        yield "routed_experts_finish", (payload, [*state, q, scale, end], shared, None, encode(spec), D, FP32)
    spec = spec._replace(shared="")
    yield "routed_experts_finish", (payload, [*state], [], None, encode(spec), D, FP32)
    quantized = ExpertWeights(
        *(ops.Fp8Weight(*recipe.quantize_weight(w)) for w in (torch.cat((gate, up), 1)[:1], down[:1]))
    )
    expert = encode(ExpertSpec())
    for recompute, save_h in (("experts", "bf16"), ("activation", "bf16"), ("none", "fp8")):
        backward = encode(BackwardSpec(recompute, save_h))
        yield "feed_forward", (torch.randn(T, D), shared, expert, backward, BF16)
        yield "feed_forward", (torch.randn(T, D), quantized.pack(), expert, backward, FP32)
    copies = WeightCache().buffers([[gate, up]])
    (kept,), seen = copies.operands, torch.ones(2, dtype=torch.int32)
    ops.refresh_weight([gate, up], *kept, None, False, None)  # what changes buffers does not declare it
    yield "refresh_weight", ([gate, up], *kept, None, False, None)
    yield "refresh_weight", ([gate, up], *kept, copies.steps, False, seen)
    yield "refresh_copies", ([gate, up], copies.pack(True), [seen], gate)
    yield "after", (torch.randn(2, 3).t(), [seen])
    yield "linear", (torch.randn(T, D), [shared[0], None, None], BF16)
    copies = WeightCache().buffers([[shared[0]]])
    ops.refresh_weight([shared[0]], *copies.operands[0], None, False, None)
    yield "linear", (torch.randn(T, D), [shared[0], None, None, *copies.pack(True)], FP32)


def symmetric_cases(group_name: str):
    """A group of one rank. Each case has what the one before leaves in the workspace."""
    tokens, ids_TK, scores_TK = (
        recipe.quantize_rows(torch.randn(T, D)),
        torch.rand(T, E).topk(K).indices,
        torch.rand(T, K),
    )
    sent_TK, token_C, counts_N = recipe.dispatch_routing(ids_TK, 1, E)
    dispatched = (*tokens, ids_TK, scores_TK, token_C, counts_N, 1.0, group_name)
    yield "symmetric_dispatch", dispatched
    x, x_scale, *arrived = NAMESPACE.symmetric_dispatch(*dispatched)
    _, _, offsets_E, token_M, _, row_CK, arrived_C, pair_CK, plan = arrived
    yield "symmetric_arrived", (x_scale, [x, *arrived], group_name)
    yield "symmetric_dispatch_gradients", (*tokens, plan, arrived_C, row_CK, token_M, offsets_E, group_name)
    for ds_M in (None, torch.rand(x.shape[0])):
        start = (torch.randn(x.shape, dtype=BF16), ds_M, row_CK, pair_CK, plan, group_name)
        yield "symmetric_start_combine", start
        for addend in (None, torch.randn(T, D, dtype=BF16)):
            started = NAMESPACE.symmetric_start_combine(*start)
            yield "symmetric_finish_combine", (started, sent_TK, D, FP32, addend, ds_M is not None, [x], group_name)


@pytest.fixture
def group_of_one(monkeypatch):
    """A gloo group of this process, whose exchanges may begin and end as often as opcheck calls an op."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    begin, wait = workspace.Workspace.begin, exchange.wait

    def begin_again(self):
        self.in_flight = False
        begin(self)

    def wait_again(at, channel):
        exchange.arrive(at, channel)
        wait(at, channel)

    monkeypatch.setattr(workspace.Workspace, "begin", begin_again)
    monkeypatch.setattr(workspace, "current", lambda name: workspace._current[name])
    monkeypatch.setattr(exchange, "wait", wait_again)
    yield torch.distributed.group.WORLD.group_name
    torch.distributed.destroy_process_group()


def test_opcheck_of_symmetric_ops(group_of_one):
    names = set()
    for name, args in symmetric_cases(group_of_one):
        test_opcheck(name, args)
        names.add(name)
    defined = {name.split("::")[1] for name in torch._C._dispatch_get_all_op_names() if "titan_fp8moe::" in name}
    assert names | {name for name, _ in cases()} == defined, "an op without a case"


@pytest.mark.parametrize("name, args", [pytest.param(*case, id=f"{i}-{case[0]}") for i, case in enumerate(cases())])
def test_opcheck(name, args):
    utilities = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if any(t.dtype == recipe.FP8 for t in tree_leaves(args) if isinstance(t, torch.Tensor)):
        # It compares inputs before and after through a product, which PyTorch does not have for float8.
        utilities.remove("test_schema")
    torch.library.opcheck(getattr(NAMESPACE, name), args, test_utils=utilities)


CALLS.pop("after")  # has no kernel
OF_KERNELS = [pytest.param(*case, id=f"{i}-{case[0]}") for i, case in enumerate(cases()) if case[0] in CALLS]


@pytest.mark.parametrize("name, args", OF_KERNELS)
def test_kernels_return_what_fakes_do(name, args):
    """Shapes, strides and dtypes, for which graphs are compiled. The kernels are not launched."""
    args = tree_map_only(torch.Tensor, lambda t: t.to("meta"), args)
    with launch.recording() as launches, torch.no_grad():
        got = CALLS[name](*args)
    assert launches

    def layout(t):
        return t.dtype, t.shape, [stride for stride, size in zip(t.stride(), t.shape, strict=True) if size != 1]

    for g, w in zip(tree_leaves(got), tree_leaves(getattr(NAMESPACE, name)(*args)), strict=True):
        assert layout(g) == layout(w)


class Watcher(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_specifications_cross_an_op():
    """Every field with its type, also a group whose name has the separators, and numbers that JSON does not have."""
    experts = ExpertSpec(), ExpertSpec("clamped_swiglu", True, (math.inf, 0.1, -1e-300), True, True)
    loras = None, LoraSpec(2.0, None, 1 / 3, fused=True)
    for name, expert, lora, flag in itertools.product(("", '|:,"]\\é'), experts, loras, (False, True)):
        route = Route("symmetric", 4, 1.75, name)
        backward = BackwardSpec("none", "fp8", "bf16", "frozen")
        spec = LayerSpec(route, expert, backward, "trained" * flag, not flag, lora, flag)
        got = decode(LayerSpec, encode(spec))
        assert repr(got) == repr(spec)


def test_a_compiled_function_encodes():
    spec = LayerSpec(
        Route(), ExpertSpec("clamped_swiglu", True, (7.0,)), BackwardSpec(), "", True, LoraSpec(1.0, None, None, False)
    )

    def length(x):
        return x * len(encode(spec)), spec.expert.gated

    for function in (length, torch.compile(length, backend="eager", fullgraph=True)):
        assert function(torch.ones(()))[0] == len(encode(spec))


def test_dispatched_only_where_somebody_watches():
    x, got = torch.randn(4, 128), []
    for args, options in (((x,), {}), ((), {"x_TD": x})):
        for watcher in (contextlib.nullcontext(), Watcher()):
            with watcher, torch.profiler.profile() as profiler:  # a profiler does not count as one
                got.append(ops.quantize_rows(*args, **options))
            dispatched = any(event.key == "titan_fp8moe::quantize_rows" for event in profiler.key_averages())
            assert dispatched == isinstance(watcher, Watcher)
    for direct, *others in zip(*got, strict=True):
        assert all(torch.equal(direct.view(torch.uint8), other.view(torch.uint8)) for other in others)


class Wrapper(torch.Tensor):
    """Without data, as a DTensor is."""

    @staticmethod
    def __new__(cls, *shape):
        return torch.Tensor._make_wrapper_subclass(cls, shape)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(func._opname)


def test_other_tensors_get_the_op():
    """Which they can refuse; a kernel would read memory that is not there."""
    with pytest.raises(NotImplementedError, match="quantize_rows"):
        ops.quantize_rows(Wrapper(4, 256))
    with pytest.raises(NotImplementedError, match="quantize_weight"):
        ops.quantize_weight(Wrapper(2, 128, 256))


def test_flops_of_gemms_are_those_of_the_buffer():
    """Whatever rows are in use, here half of them: the counter does not know the group ends."""
    N, offsets_E = 384, torch.tensor([128, M // 2], dtype=INT32)
    dy, x, w = rows(M, N), rows(M, D), recipe.quantize_weight(torch.randn(E, N, D))
    dyT_xT = recipe.transpose_pair(*x, *dy)
    with FlopCounterMode(display=False) as counter:
        ops.grouped_mm(*x, *w, offsets_E, BF16)
        ops.grouped_mm_wgrad(*dyT_xT[2:], *dyT_xT[:2], offsets_E, out_dtype=BF16)
    counts = counter.get_flop_counts()["Global"]
    assert counts == dict.fromkeys((NAMESPACE.grouped_mm, NAMESPACE.grouped_mm_wgrad), 2 * M * N * D)


def test_errors_say_what_to_do():
    def refused(message, call, *args, **options):
        with pytest.raises(ValueError, match=re.escape(message)):
            call(*args, **options)

    for dtype in (torch.float16, torch.float64, torch.int32):
        refused(f"x must be bf16 or fp32, got {dtype}", ops.quantize_rows, torch.zeros(2, 128, dtype=dtype))
    w = torch.randn(2, 128, 128)
    for other in (w[:1], torch.randn(2, 128, 256), w.bfloat16()):
        refused("use w.bfloat16", ops.quantize_weight, w, other)
    refused("one or two weights, got 3", ops.quantize_weight, w, w, w)
    refused("torch.float16", ops.quantize_weight_both, w.half())
    operands, one_group = recipe.transpose_pair(*rows(M, 384), *rows(M, 128)), torch.tensor([M], dtype=INT32)
    refused("2 weights need a multiple of 256", ops.grouped_mm_wgrad, *operands, one_group, FP32, 2)
    for name, most in (("rows", 384), ("columns", 128)):
        for size in (0, most + 1, 60):
            message = f"{name} is {size}; it must be in 1..{most}"
            refused(message, ops.grouped_mm_wgrad, *operands, one_group, BF16, **{name: size})
    refused("balanced", ops.transpose_pair, *rows(128, 128), *rows(128, 128), one_group, "rowwise")


def test_kernels_take_the_references_parameters():
    """Their types stand at the reference alone; names, order and defaults are the same. ``beside`` is the kernels'."""
    checked = 0
    for module in (grouped_mm, permute, quantize, routing, swiglu, transpose):
        for name, kernel in vars(module).items():
            if inspect.isfunction(kernel) and kernel.__module__ == module.__name__ and name in CALLS:
                got, want = (inspect.signature(f).parameters.values() for f in (kernel, CALLS[name]))
                got = [(p.name, p.default) for p in got if p.name != "beside"]
                assert got == [(p.name, p.default) for p in want], name
                checked += 1
    assert checked == 18


def test_the_layer_has_shapes_without_memory():
    """On the meta device each op is its fake."""
    meta = functools.partial(torch.empty, device="meta", requires_grad=True)
    x, score, weights = meta(T, D), meta(T, K), [meta(E, *shape) for shape in ((H, D), (D, H), (H, D))]
    out = routed_experts(x, *weights, torch.empty(T, K, dtype=torch.int64, device="meta"), score)
    out.sum().backward()
    assert out.is_meta and all(t.grad.is_meta and t.grad.shape == t.shape for t in (x, score, *weights))
