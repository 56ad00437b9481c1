"""The custom ops' contracts with PyTorch: schemas, fakes, tracing; and that kernels return what references do.

The layers' ops are checked with the arguments that layers call them with.
"""

import inspect
import itertools
import math
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from tests.layer import refused
from tests.specs import SPECS
from tests.variants import DENSE, LAYERS, SAVED, Small, small_layer
from titan_fp8moe import Fp8FlowMoEConfig, ops, recipe, routed_experts
from titan_fp8moe.dispatch import Route
from titan_fp8moe.dispatch.symmetric import workspace
from titan_fp8moe.kernels import launch
from titan_fp8moe.layer.lora import LoraSpec
from titan_fp8moe.layer.operands import WeightCache
from titan_fp8moe.layer.saved import LayerSpec
from titan_fp8moe.layer.weights import Biases
from titan_fp8moe.ops import backend
from titan_fp8moe.spec import BackwardSpec, ExpertSpec, decode, encode

BF16, FP32, INT32 = torch.bfloat16, torch.float32, torch.int32
T, K, M, D, H, E = 20, 2, 256, 512, 128, 2  # no two of them equal but K and E
NAMESPACE = torch.ops.titan_fp8moe

# --- kernels and references -------------------------------------------------------------------------------------------


def with_kernels() -> dict[str, tuple[Callable[..., Any], Callable[..., Any]]]:
    """The functions that have kernels, each as kernel and reference."""
    functions, found = vars(ops) | vars(ops.quantize) | vars(ops.permute), {}
    for name, function in functions.items():
        if name[0] != "_" and inspect.isfunction(function) and "kernel" in function.__code__.co_freevars:
            closure = inspect.getclosurevars(function).nonlocals
            found[name] = closure["kernel"], closure["reference"]
    return found


WITH_KERNELS = with_kernels()


def rows(M, D):
    """(M, D) e4m3 and column-major scales."""
    q, scale = recipe.quantize_rows(torch.randn(M, D))
    return q, recipe.column_major(scale)


def cases() -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Arguments of the functions that have kernels, by name."""
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
        yield "quantize_weights", (weights, plain, transposed)
        yield "quantize_weights", ([w.mT.contiguous().mT for w in weights[1:]], plain, transposed)
        first, last = (recipe.quantize_weight(w) for w in weights)
        for other in (last, (None, None)):
            yield "join_weights", (*first, *other, plain, transposed)
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
        of_expert = h[:, : expert.rows_per_unit * H].contiguous()
        biases = [torch.randn(E, H) for _ in range(expert.rows_per_unit)] + [None] * (2 - expert.rows_per_unit)
        with_b2 = *biases, torch.randn(E, D), *dy
        for more in ((), biases):
            yield "swiglu_quantize", (of_expert, score_M, offsets_E, expert, expert.score_before_experts, *more)
        yield "swiglu_quantize_backward", (d, of_expert, None, score_M, offsets_E, expert, True)
        yield "swiglu_quantize_backward", (d, *rows(*of_expert.shape), score_M, offsets_E, expert, False)
        for gradients in (False, True):
            args = d, of_expert, None, score_M, offsets_E, expert._replace(biased=True), True, *with_b2
            yield "swiglu_quantize_backward", (*args, gradients)
    for mode in recipe.TRANSPOSE_MODES:
        yield "transpose_pair", (*x, *dy, offsets_E, mode)
        yield "transpose_pair", (*tokens, *dy, offsets_E, mode, token_M)
    for columns in (None, 80):
        yield "grouped_mm", (*x, *recipe.quantize_weight(weights[0]), offsets_E, BF16, columns)
    for parts, rows_, columns in ((1, None, None), (2, None, None), (1, 144, None), (2, None, 144), (2, 80, 144)):
        for layout in recipe.WGRAD_LAYOUTS:
            args = *recipe.transpose_pair(*x, *dy, offsets_E), offsets_E, FP32, parts, rows_, columns, layout
            yield "grouped_mm_wgrad", args
    yield "dequantize_rows", (*x, offsets_E)
    factors = torch.randn(E, 16, D, dtype=BF16), torch.randn(E, 2 * H, 16, dtype=BF16)
    yield "low_rank", (*x, *factors, offsets_E)
    yield "low_rank", (*rows(M, 2 * H), *(f.transpose(1, 2) for f in reversed(factors)), offsets_E)
    yield "low_rank_grads", (*x, *rows(M, 2 * H), *factors, offsets_E)
    pair = [torch.randn(E, H, D) / 16 for _ in range(2)]
    copies = WeightCache().buffers([pair])
    (kept,), seen = copies.operands, torch.ones(2, dtype=INT32)
    yield "refresh_weight", (pair, *kept, None, False, None)
    yield "refresh_weight", (pair, *kept, copies.steps, False, seen)


CASES = [*cases()]


def test_every_function_with_a_kernel_has_a_case():
    assert {name for name, _ in CASES} == WITH_KERNELS.keys()


@pytest.mark.parametrize("name, args", [pytest.param(*case, id=f"{i}-{case[0]}") for i, case in enumerate(CASES)])
def test_kernels_return_what_references_do(name, args):
    """Shapes, strides and dtypes, for which graphs are compiled. The kernels are not launched."""
    on_meta = tree_map_only(Tensor, lambda t: t.to("meta"), args)
    with launch.recording() as launches, torch.no_grad():
        got = getattr(ops, name, None) or getattr(ops.quantize, name)
        got = got(*on_meta)
    assert launches

    def layout(t):
        return t.dtype, t.shape, [stride for stride, size in zip(t.stride(), t.shape, strict=True) if size != 1]

    want = WITH_KERNELS[name][1](*args)
    for g, w in zip(tree_leaves(got), tree_leaves(want), strict=True):
        assert layout(g) == layout(w)


def test_biases_of_gate_and_up_have_equal_strides():
    """Kernels take one pair of strides for the two."""
    b1, b2, b3 = torch.randn(E, H), torch.randn(E, D), torch.randn(H, E).mT
    for biases in (Biases(b1, b2, b3), Biases(b3, b2, b1)):
        gate, up = biases.gate_up(ExpertSpec())
        assert up is not None and gate.stride() == up.stride()


def test_kernels_take_the_references_parameters():
    """Their types stand at the reference alone; names, order and defaults are the same. ``beside`` is the kernels'."""
    for name, signatures in WITH_KERNELS.items():
        got, want = (inspect.signature(function).parameters.values() for function in signatures)
        got = [(p.name, p.default) for p in got if p.name != "beside"]
        assert got == [(p.name, p.default) for p in want], name
    assert len(WITH_KERNELS) == 20


# --- ops --------------------------------------------------------------------------------------------------------------


def check_op(op, args: tuple[Any, ...], *skipped: str) -> None:
    utilities = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if any(t.dtype == recipe.FP8 for t in tree_leaves(args) if isinstance(t, Tensor)):
        # It compares inputs before and after through a product, which PyTorch does not have for float8.
        utilities.remove("test_schema")
    torch.library.opcheck(op, args, test_utils=[name for name in utilities if name not in skipped])


def of_building_blocks() -> Iterator[tuple[str, tuple[Any, ...]]]:
    names = {function.__name__.lstrip("_"): name for name, function in ops.BUILDING_BLOCKS.items()}
    names |= dict(quantize_weights="quantize_weight", swiglu_quantize="swiglu_quantize")
    for name, args in CASES:
        if name == "swiglu_quantize":
            args = (*args[:3], encode(args[3]), args[4]) if len(args) == 5 else None
        if name in names and args is not None:
            yield names[name], args


BLOCKS = [*of_building_blocks()]


@pytest.mark.parametrize("name, args", [pytest.param(*case, id=f"{i}-{case[0]}") for i, case in enumerate(BLOCKS)])
def test_opcheck_of_building_blocks(name, args):
    check_op(getattr(NAMESPACE, name), args)


class Captured(TorchDispatchMode):
    """The calls of this package's ops. Asserts that no result shares memory with an argument or another result."""

    def __init__(self):
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace != "titan_fp8moe":
            return func(*args, **(kwargs or {}))
        # Lists are copied, which the caller may empty.
        self.calls.append((func, tree_map_only(Tensor, Tensor.detach, args)))
        given = {t.untyped_storage()._cdata for t in tree_leaves(args) if isinstance(t, Tensor)}
        results = func(*args, **(kwargs or {}))
        made = [t.untyped_storage()._cdata for t in tree_leaves(results) if isinstance(t, Tensor)]
        assert not given & {*made}, f"{func} returns an argument"
        assert len({*made}) == len(made), f"{func} returns a tensor twice"
        return results


_checked: set[str] = set()


def check_calls(layer: Small, *skipped: str) -> Counter[str]:
    """Checks the calls of a forward and a backward, of several where they need fewer gradients, that are unlike all
    others so far. Returns how many there are of each op."""
    subsets = [layer.leaves, [layer.x], layer.others] if layer.others else [[layer.x]]
    with Captured() as watching:
        for some in subsets:
            for leaf in layer.leaves:
                leaf.requires_grad_(any(leaf is other for other in some))
            layer.run().sum().backward()
    for op, args in watching.calls:
        like = tree_map_only(Tensor, lambda t: (tuple(t.shape), t.stride(), t.dtype), args)
        key = repr((op, skipped, like))
        if key not in _checked:
            _checked.add(key)
            check_op(op, args, *skipped)
    return Counter(op._opname for op, _ in watching.calls)


TRACING = "test_aot_dispatch_dynamic"  # takes as long as all else together, 30 times
LAYER_OPS = "routed_experts_forward", "routed_experts_hidden_gradients", "routed_experts_gradients"
DENSE_OPS = {
    "ffn": ("feed_forward", "feed_forward_hidden_gradients", "feed_forward_w13_grad"),
    "linear": ("linear", "linear_backward"),
    "grouped_mm": ("grouped_linear", "grouped_linear_backward"),
}
DEFAULT = "activation", "bf16"


def check(kind: str, settings: tuple[str, str], *skipped: str, group: Any = None, **options: Any) -> None:
    """A layer of this kind. ``options``: other settings."""
    config = Fp8FlowMoEConfig(recompute=settings[0], save_h=settings[1], **options)
    if kind in LAYERS:
        assert check_calls(small_layer(kind, config, group), *skipped) == dict.fromkeys(LAYER_OPS, 3)
    else:
        assert {*check_calls(small_layer(kind, config), *skipped)} <= {*DENSE_OPS[kind.split()[0]]}


TRACED = "biased", "shared scored", "adapted", "stored", "kept", "ffn", "linear", "grouped_mm"
KINDS = pytest.mark.parametrize("kind", [*LAYERS, *DENSE])
SETTINGS = pytest.mark.parametrize("settings", SAVED, ids="-".join)


@SETTINGS
@KINDS
def test_opcheck_of_layers(kind, settings):
    check(kind, settings, TRACING)


@pytest.mark.parametrize("kind", TRACED)
def test_opcheck_of_traced_layers(kind):
    check(kind, DEFAULT)


@pytest.mark.slow
@SETTINGS
@KINDS
def test_opcheck_of_all_traced_layers(kind, settings):
    check(kind, settings)


@pytest.fixture
def endless(monkeypatch):
    """Exchanges begin as often as an op is called, also alone."""
    begin = workspace.Workspace.begin

    def begin_again(self):
        self.in_flight = False
        begin(self)

    monkeypatch.setattr(workspace.Workspace, "begin", begin_again)
    monkeypatch.setattr(workspace, "in_flight", lambda name: workspace._current.get(name))


@pytest.mark.parametrize("dispatch", ["symmetric", "all_to_all"])
@pytest.mark.parametrize("kind", ["plain", "biased", "shared", "frozen", "kept"])
def test_opcheck_of_layers_that_travel(kind, dispatch, group, endless):
    """The all-to-all reads sizes on the host, and so is no part of a graph."""
    for settings in SAVED:
        skipped = [] if settings == DEFAULT else [TRACING]
        skipped = ["test_faketensor", TRACING] if dispatch == "all_to_all" else skipped
        check(kind, settings, *skipped, group=group, dispatch=dispatch)


def test_every_op_has_a_case():
    defined = {name.split("::")[1] for name in torch._C._dispatch_get_all_op_names() if "titan_fp8moe::" in name}
    assert defined == {*LAYER_OPS, *itertools.chain(*DENSE_OPS.values()), *(name for name, _ in BLOCKS)}


def test_graphs_in_inductors_cache_name_the_sources(tmp_path: Path):
    package = Path(backend.__file__).parents[1]
    copied = Path(shutil.copytree(package, tmp_path / "copy"))
    assert torch.compiler.config.cache_key_tag.endswith(f"titan_fp8moe-{backend.digest(copied)}")
    with (copied / "layer/saved.py").open("a") as file:
        file.write("\n")
    assert backend.digest(copied) != backend.digest(package)


def test_specifications_cross_an_op():
    """Every field with its type, also a group whose name has the separators, and numbers that JSON does not have."""
    experts = ExpertSpec(), ExpertSpec("clamped_swiglu", True, (math.inf, 0.1, -1e-300), True, True)
    loras = None, LoraSpec((2.0, None, 1 / 3), fused=True)
    for name, expert, lora, flag in itertools.product(("", '|:,"]\\é'), experts, loras, (False, True)):
        route = Route("symmetric", 4, 1.75, name)
        backward = BackwardSpec("none", "fp8", "bf16", "frozen")
        spec = LayerSpec(route, expert, backward, "trained" * flag, not flag, lora, flag)
        got = decode(LayerSpec, encode(spec))
        assert repr(got) == repr(spec)


class Wrapper(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError(func._opname)


def test_other_tensors_get_the_op():
    """Which they can refuse; a kernel would read memory that is not there."""
    with pytest.raises(NotImplementedError, match="quantize_rows"):
        NAMESPACE.quantize_rows(torch.randn(4, 256).as_subclass(Wrapper))
    weights = [torch.randn(E, *shape) for shape in ((H, D), (D, H), (H, D))]
    ids, scores = torch.zeros(4, 1, dtype=torch.int64), torch.rand(4, 1)
    with pytest.raises(NotImplementedError, match="routed_experts_forward"):
        routed_experts(torch.randn(4, D).as_subclass(Wrapper), *weights, ids, scores)


def test_errors_say_what_to_do():
    for dtype in (torch.float16, torch.float64, torch.int32):
        with refused(f"x must be bf16 or fp32, got {dtype}"):
            ops.quantize_rows(torch.zeros(2, 128, dtype=dtype))
    one_group = torch.tensor([M], dtype=INT32)
    operands = recipe.transpose_pair(*rows(M, 384), *rows(M, 128), one_group)
    with refused("2 weights need a multiple of 256"):
        ops.grouped_mm_wgrad(*operands, one_group, FP32, 2)
    for name, size in itertools.product(("rows", "columns"), (0, 385, 60)):
        most = 384 if name == "rows" else 128
        with refused(f"{name} is {size}; it must be in 1..{most}"):
            ops.grouped_mm_wgrad(*operands, one_group, BF16, **{name: size})
    with refused("balanced"):
        ops.transpose_pair(*rows(128, 128), *rows(128, 128), one_group, "rowwise")
