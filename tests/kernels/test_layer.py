"""The whole layer on its kernels: what is launched, and that it gives what the reference gives."""

import contextlib
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from experiments.reference import relative_error
from tests.kernels.conftest import INTERPRETED
from tests.layer import DEVICE
from tests.test_any_layer import OF_ROWS, PLAIN, Tensors, as_function, ours, steps, wanted
from titan_fp8moe import ops
from titan_fp8moe.config import Fp8FlowMoEConfig

BF16 = dict(tokens=210, dtype=torch.bfloat16, weight_dtype=torch.bfloat16, experts=4, top_k=1, routing="some nowhere")
ROUTED = BF16 | dict(tokens=140, top_k=2, routing="random")
# They allocate, or look at a tensor in another way.
NO_DEVICE_WORK = {
    "empty", "new_empty", "empty_strided", "view", "_unsafe_view", "reshape", "slice", "select", "unsqueeze", "t",
    "transpose", "split", "split_with_sizes", "unbind", "as_strided", "detach", "alias", "_reshape_alias",
    "resolve_conj", "resolve_neg",
}  # fmt: skip


class DeviceWork(TorchDispatchMode):
    """Names the operators, inside this package's ops as well, that make the device do something."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "titan_fp8moe":
            with self:
                return func._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *args, **(kwargs or {}))
        if func._opname not in NO_DEVICE_WORK:
            self.names.append(func._opname)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def on_kernels(monkeypatch):
    """Runs the kernels also where they are interpreted; the interpreter's own tensor operations do not show."""
    monkeypatch.setattr(ops.backend, "use_kernels", lambda x: True)
    if INTERPRETED:
        from triton.runtime.interpreter import GridExecutor

        launch = GridExecutor.__call__

        def hidden(self, *args, **kwargs):
            with _disable_current_modes():
                return launch(self, *args, **kwargs)

        monkeypatch.setattr(GridExecutor, "__call__", hidden)


@pytest.fixture
def on_routing_kernels(on_kernels, monkeypatch):
    """Where kernels are interpreted, those whose results are numbers only are not run; the host reads of others."""
    if INTERPRETED:
        from triton.runtime.interpreter import GridExecutor

        launch = GridExecutor.__call__

        def routing(self, *args, **kwargs):
            if self.fn.__module__.endswith((".routing", ".permute")):
                launch(self, *args, **kwargs)

        monkeypatch.setattr(GridExecutor, "__call__", routing)


@pytest.mark.parametrize("recompute", ["none", "activation", "experts"])
@pytest.mark.parametrize("exchanged", [False, True])
def test_nothing_but_kernels(monkeypatch, request, seed, recompute, exchanged):
    """No copy, fill, cast or concatenation between the kernels, forward and backward. With expert parallelism there are
    the counts for the host beside them, and the four all-to-alls."""
    monkeypatch.undo()  # memory need not be poisoned here
    request.getfixturevalue("on_routing_kernels")
    if exchanged:
        request.getfixturevalue("group")
    config = Fp8FlowMoEConfig(recompute=recompute, save_h="fp8")
    layer = PLAIN._replace(**ROUTED, travels=exchanged, config=config)
    tensors = Tensors.of(layer, seed)
    leaves = {name: t.to(DEVICE).requires_grad_() for name, t in tensors.leaves.items()}
    run, ids, dout, work = as_function(layer, leaves), tensors.ids.to(DEVICE), tensors.dout.to(DEVICE), DeviceWork()
    # A process's first GEMM on a GPU makes the tile counters.
    for mode in (work,) if INTERPRETED else (contextlib.nullcontext(), work):
        with mode:
            torch.autograd.grad(run(ids), leaves.values(), dout)
    expected = Counter(all_to_all_single=5, wait_tensor=5, stack=1, to=1)
    assert Counter(work.names) == (expected if exchanged else Counter())


PADDED = dict(tokens=70, dim=192, hidden=80, top_k=2, biased=True, activation="clamped_swiglu", routing="random")
LAYERS = {
    "routed_experts": dict(tokens=70, top_k=2, routing="random"),
    "padded": PADDED,
    "padded, transposed": PADDED | dict(stored="fused", lies="swapped"),
    "padded, interleaved": PADDED | dict(stored="interleaved"),
    "grouped_mm": dict(entry="grouped_mm"),
    "grouped_mm, transposed": dict(entry="grouped_mm", lies="swapped"),
    "grouped_ffn": dict(entry="grouped_ffn"),
    "grouped_ffn, recomputed": dict(entry="grouped_ffn", config=Fp8FlowMoEConfig(recompute="experts")),
}


@pytest.mark.skipif(not INTERPRETED, reason="tests/test_any_layer.py compares the kernels on a GPU")
@pytest.mark.parametrize("name", LAYERS)
def test_kernels_give_the_reference(request, seed, name):
    """bf16 rounding of the GEMMs' results, and the few FP8 codes it moves. Rows at the end may hold NaN."""
    layer = PLAIN._replace(**BF16 | LAYERS[name])
    tensors = Tensors.of(layer, seed)
    want = wanted(layer, tensors)
    request.getfixturevalue("on_kernels")
    if layer.entry in OF_ROWS:
        tensors = tensors.poisoned((tensors.ids[:, 0] < 0).nonzero()[:, 0])
    for name, got in ours(layer, tensors).items():
        assert relative_error(got, want[name]) < 5e-3, name
        if layer.lies == "rows" or name in ("w1", "w2"):
            assert steps(got) == steps(tensors.leaves.get(name, got)), name


@pytest.mark.skipif(not INTERPRETED, reason="tests/test_any_layer.py compares rows on a GPU")
def test_rows_do_not_depend_on_the_batch(on_kernels, seed):
    """Other numbers of tokens and of rows for each expert, in another order."""
    layer = PLAIN._replace(**ROUTED)
    tensors = Tensors.of(layer, seed)
    want = ours(layer, tensors)
    for tokens in (1, 129):
        some = torch.randperm(layer.tokens)[:tokens]
        got = ours(layer, tensors.rows(some))
        # NumPy's products of the same numbers have been seen to differ in their last bit, one of some hundred thousand.
        # The scores' gradients are sums of products, which may cancel.
        for name, rounding in dict(out=2**-7, x=2**-7, scores=1e-5).items():
            assert (got[name] != want[name][some]).sum() <= 2
            torch.testing.assert_close(got[name], want[name][some], rtol=rounding, atol=0)
