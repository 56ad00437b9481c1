"""The custom ops' contracts with PyTorch: schemas, fakes, tracing. Layers' ops are checked with layers' arguments."""

import itertools
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tests.layer import Checked, refused
from tests.variants import KINDS, Small, small_layer
from titan_fp8moe import Fp8FlowMoEConfig, ops, recipe
from titan_fp8moe.dispatch import Route
from titan_fp8moe.dispatch.symmetric import workspace
from titan_fp8moe.layer.lora import LoraSpec
from titan_fp8moe.layer.saved import LayerSpec
from titan_fp8moe.layer.weights import Biases
from titan_fp8moe.ops import backend
from titan_fp8moe.spec import BackwardSpec, ExpertSpec, decode, encode

BF16, FP32, INT32 = torch.bfloat16, torch.float32, torch.int32
T, M, D, H, E = 20, 256, 512, 128, 2
NAMESPACE = torch.ops.titan_fp8moe


def test_biases_of_gate_and_up_have_equal_strides():
    """Kernels take one pair of strides for the two."""
    b1, b2, b3 = torch.randn(E, H), torch.randn(E, D), torch.randn(H, E).mT
    for biases in (Biases(b1, b2, b3), Biases(b3, b2, b1)):
        gate, up = biases.gate_up(ExpertSpec())
        assert up is not None and gate.stride() == up.stride()


# --- ops --------------------------------------------------------------------------------------------------------------


def check_op(op, args: tuple[Any, ...]) -> None:
    utilities = ["test_schema", "test_faketensor", "test_aot_dispatch_dynamic"]
    if any(t.dtype == recipe.FP8 for t in tree_leaves(args) if isinstance(t, Tensor)):
        # It compares inputs before and after through a product, which PyTorch does not have for float8.
        utilities.remove("test_schema")
    torch.library.opcheck(op, args, test_utils=utilities)


def rows(M, D):
    """(M, D) e4m3 and column-major scales."""
    q, scale = recipe.quantize_rows(torch.randn(M, D))
    return q, recipe.column_major(scale)


def calls_of_building_blocks() -> Iterator[tuple[str, tuple[Any, ...]]]:
    x, dy, tokens = rows(M, D), rows(M, D), recipe.quantize_rows(torch.randn(T, D))
    weights, offsets_E = [torch.randn(E, 128, D), torch.randn(E, 256, D)], torch.tensor([128, 256], dtype=INT32)
    for x_TD in (torch.randn(T, D, dtype=BF16), torch.randn(128, T).t(), torch.randn(T, 144, dtype=BF16)):
        yield "quantize_rows", (x_TD,)
    for plain, transposed in ((True, False), (False, True), (True, True)):
        yield "quantize_weight", (weights, plain, transposed)
        yield "quantize_weight", ([weights[1].mT.contiguous().mT], plain, transposed)
    for expert, keep_h in itertools.product((ExpertSpec(), ExpertSpec.of("relu2")), (False, True)):
        h = torch.randn(M, expert.rows_per_unit * H, dtype=BF16)
        yield "swiglu_quantize", (h, torch.rand(M), offsets_E, encode(expert), keep_h)
    for mode in recipe.TRANSPOSE_MODES:
        yield "transpose_pair", (*x, *dy, offsets_E, mode)
        yield "transpose_pair", (*tokens, *dy, offsets_E, mode, torch.randint(-1, T, (M,), dtype=INT32))
    for columns in (None, 80):
        yield "grouped_mm", (*x, *recipe.quantize_weight(weights[0]), offsets_E, BF16, columns)
    for sizes, layout in itertools.product(((1, None, None), (2, 80, 144)), recipe.WGRAD_LAYOUTS):
        yield "grouped_mm_wgrad", (*recipe.transpose_pair(*x, *dy, offsets_E), offsets_E, FP32, *sizes, layout)


BLOCKS = [*calls_of_building_blocks()]


@pytest.mark.parametrize("name, args", [pytest.param(*call, id=f"{i}-{call[0]}") for i, call in enumerate(BLOCKS)])
def test_opcheck_of_building_blocks(name, args):
    check_op(getattr(NAMESPACE, name), args)


@pytest.fixture
def endless(monkeypatch):
    """Exchanges begin as often as an op is called, also alone."""
    begin = workspace.Workspace.begin

    def begin_again(self):
        self.in_flight = False
        begin(self)

    monkeypatch.setattr(workspace.Workspace, "begin", begin_again)
    monkeypatch.setattr(workspace, "in_flight", lambda name: workspace._current.get(name))


LAYER_OPS = "routed_experts_forward", "routed_experts_hidden_gradients", "routed_experts_gradients"
DENSE_OPS = {
    "ffn": ("feed_forward", "feed_forward_hidden_gradients", "feed_forward_w13_grad"),
    "linear": ("linear", "linear_backward"),
    "grouped_mm": ("grouped_linear", "grouped_linear_backward"),
}


def check_ops(layer: Small) -> set[str]:
    """Checks each call of a forward and a backward. Returns the ops' names."""
    with Checked(with_fakes=False) as mode:
        layer.run().sum().backward()
    for call in mode.calls:
        check_op(*call)
    return {op._opname for op, _ in mode.calls}


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {"plain", "shared"}))
def test_opcheck_of_layers(kind):
    """A trace for any sizes takes long: tests/test_any_layer.py compares other layers' ops with their fakes alone."""
    assert check_ops(small_layer(kind, Fp8FlowMoEConfig())) == {*DENSE_OPS.get(kind, LAYER_OPS)}


@pytest.mark.parametrize("kind", ["biased", "shared", "kept"])
def test_opcheck_of_layers_that_travel(kind, group, endless):
    assert check_ops(small_layer(kind, Fp8FlowMoEConfig(dispatch="symmetric"), group)) == {*LAYER_OPS}


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
    expert = ExpertSpec("clamped_swiglu", True, (math.inf, 0.1, -1e-300), True, True)
    for lora, flag in itertools.product((None, LoraSpec((2.0, None, 1 / 3), fused=True)), (False, True)):
        route, backward = Route("symmetric", 4, 1.75, '|:,"]\\é'), BackwardSpec("none", "fp8", "bf16", "frozen")
        spec = LayerSpec(route, expert, backward, "trained" * flag, not flag, lora, flag)
        assert repr(decode(LayerSpec, encode(spec))) == repr(spec)


def test_errors_say_what_to_do():
    for dtype in (torch.float16, torch.float64, torch.int32):
        with refused(f"x must be bf16 or fp32, got {dtype}"):
            ops.quantize_rows(torch.zeros(2, 128, dtype=dtype))
    with refused("balanced"):
        ops.transpose_pair(*rows(128, 128), *rows(128, 128), torch.tensor([128], dtype=INT32), "rowwise")
