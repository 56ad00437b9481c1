"""The whole layer on its kernels: what is launched, and that it gives what the reference gives. Then the package's own
comparison of kernels with the specification, which runs them all."""

import sys
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from experiments.reference import relative_error
from tests.kernels.conftest import INTERPRETED
from tests.test_any_layer import OF_ROWS, PLAIN, Tensors, as_function, ours, steps, wanted
from titan_fp8moe import ops
from titan_fp8moe.activations import ACTIVATIONS
from titan_fp8moe.config import Fp8FlowMoEConfig
from titan_fp8moe.dispatch.symmetric import kernels as symmetric_kernels
from titan_fp8moe.kernels import launch, swiglu
from titan_fp8moe.kernels.gemm import grouped_mm
from titan_fp8moe.kernels.launch import Kernel, _probe_kernel
from titan_fp8moe.ops import self_check

BF16 = dict(tokens=210, dtype=torch.bfloat16, weight_dtype=torch.bfloat16, experts=4, top_k=1, routing="some nowhere")
ROUTED = dict(tokens=70, top_k=2, routing="random")
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


@pytest.mark.parametrize("recompute", ["none", "activation", "experts"])
@pytest.mark.parametrize("exchanged", [False, True])
def test_nothing_but_kernels(monkeypatch, request, seed, recompute, exchanged):
    """No copy, fill, cast or concatenation between the kernels; under expert parallelism counts and all-to-alls."""
    monkeypatch.undo()  # memory need not be poisoned here
    monkeypatch.setattr(grouped_mm, "is_hopper", lambda x: True)  # other GPUs' kernels would not be recorded
    if exchanged:
        request.getfixturevalue("group")
    config = Fp8FlowMoEConfig(recompute=recompute, save_h="fp8")
    layer = PLAIN._replace(**BF16 | ROUTED, travels=exchanged, config=config)
    leaves, ids, dout = Tensors.of(layer, seed)
    leaves = {name: t.to("meta").requires_grad_() for name, t in leaves.items()}
    run, ids, dout = as_function(layer, leaves), ids.to("meta"), dout.to("meta")
    with launch.recording(), DeviceWork() as work:
        torch.autograd.grad(run(ids), leaves.values(), dout)
    gemms = 7 if recompute == "experts" else 6  # each makes a tile counter here, which a GPU keeps
    expected = Counter(all_to_all_single=5, wait_tensor=5, stack=1, ones_like=1)
    assert Counter(work.names) == Counter(zeros=gemms) + (expected if exchanged else Counter())


PADDED = ROUTED | dict(dim=192, hidden=80, biased=True, activation="clamped_swiglu")
FFN = dict(entry="feed_forward", shared="plain", experts=1, frozen=("scores", "w1", "w2", "w3"))  # without scores
LAYERS = {
    "routed_experts": ROUTED,
    "padded, transposed": PADDED | dict(stored="fused", lies="swapped"),
    "padded, interleaved": PADDED | dict(stored="interleaved"),
    "grouped_mm, transposed": dict(entry="grouped_mm", lies="swapped"),
    "feed_forward": FFN,
    "feed_forward, FP8 h": FFN | dict(config=Fp8FlowMoEConfig(save_h="fp8")),
    "grouped_ffn, recomputed": dict(entry="grouped_ffn", config=Fp8FlowMoEConfig(recompute="experts")),
}


@pytest.mark.skipif(not INTERPRETED, reason="tests/test_any_layer.py compares the kernels on a GPU")
@pytest.mark.parametrize("name", LAYERS)
def test_kernels_give_the_reference(monkeypatch, seed, name):
    """bf16 rounding of the GEMMs' results, and the few FP8 codes it moves. Rows at the end may hold NaN."""
    layer = PLAIN._replace(**BF16 | LAYERS[name])
    tensors = Tensors.of(layer, seed)
    want = wanted(layer, tensors)
    monkeypatch.setattr(ops.backend, "use_kernels", lambda x: True)
    if layer.entry in OF_ROWS:
        tensors = tensors.poisoned((tensors.ids[:, 0] < 0).nonzero()[:, 0])
    for name, got in ours(layer, tensors).items():
        assert relative_error(got, want[name]) < 5e-3, name
        if layer.lies == "rows" or name in ("w1", "w2"):
            assert steps(got) == steps(tensors.leaves.get(name, got)), name


def test_the_probe_stores_its_arguments(device, monkeypatch):
    """On a GPU, where its launches decide whether others are fast, launched here and by Triton."""
    monkeypatch.setattr(launch, "_fast", None)
    assert INTERPRETED or launch._is_fast()
    for fast in (True, False):
        monkeypatch.setattr(launch, "_fast", fast)
        assert launch.launch_probe(device).tolist() == [3, 5, 1, 48, 7, 2**40 + 1, 9, 2]


def test_every_kernel_is_run_and_agrees(monkeypatch):
    """Without a GPU the interpreter's kernels stand for it; Gluon's have no interpreter."""
    launched, launch_kernel = set(), Kernel._launch
    monkeypatch.setattr(Kernel, "_launch", lambda k, *args, **kw: launched.add(k) or launch_kernel(k, *args, **kw))
    if INTERPRETED:
        on, run = [], self_check.run
        monkeypatch.setattr(ops.backend, "use_kernels", lambda x: bool(on))

        def run_here(case, device):
            on[:] = [True] * (device == "cuda")
            return run(case, "cpu")

        monkeypatch.setattr(self_check, "run", run_here)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert self_check.self_check() == []
    modules = [m for name, m in sys.modules.items() if ".kernels" in name and name.startswith("titan_fp8moe.")]
    modules.remove(symmetric_kernels)  # other ranks take part in them
    kernels = {value for module in modules for value in vars(module).values() if isinstance(value, Kernel)}
    kernels |= {kernel(name, False, False) for name in ACTIVATIONS for kernel in (swiglu._forward, swiglu._backward)}
    absent = {kernel.kernel.__name__ for kernel in kernels - launched - {_probe_kernel}}
    assert absent == ({"grouped_mm_hopper_kernel", "wgrad_hopper_kernel"} if INTERPRETED else set())
