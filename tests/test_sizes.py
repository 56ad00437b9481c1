"""Experts whose D and H are no multiples of 128: gathered, compiled, and without copies in every storage."""

import threading

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from experiments.reference import make_layer
from tests.layer import DEVICE, gradients
from tests.test_model_experts import GPT_OSS
from tests.test_weights import gathered
from titan_fp8moe import Fp8FlowMoEConfig, routed_experts
from titan_fp8moe.kernels import launch
from titan_fp8moe.layer.run import Experts, run_layer
from titan_fp8moe.layer.weights import ExpertWeights
from titan_fp8moe.spec import ExpertSpec

T, E, K = 100, 4, 2
SIZES = [(64, 16), (192, 80), (320, 144)]  # D, H; gpt-oss's 2880 is 64 modulo 128, as are 192 and 320
STORAGE = ["apart", "fused", "fused transposed", "interleaved", "interleaved transposed"]
SPEC = ExpertSpec.of("clamped_swiglu", GPT_OSS["activation_parameters"])


def store(how: str, w1: Tensor, w2: Tensor, w3: Tensor) -> list[Tensor | None]:
    """w1, w2 and w3 as a layer takes them."""
    if how == "apart":
        return [w1, w2, w3]
    w13 = torch.stack([w1, w3], 2).flatten(1, 2) if "interleaved" in how else torch.cat([w1, w3], 1)
    weights = [w13, w2]
    if "transposed" in how:
        weights = [w.transpose(1, 2).contiguous().transpose(1, 2) for w in weights]
    return [*weights, None]


def leaves_of(*tensors: Tensor) -> list[Tensor]:
    return [t.detach().clone(memory_format=torch.preserve_format).requires_grad_() for t in tensors]


class Allocations(TorchDispatchMode):
    """The sizes in bytes of bf16 and fp32 tensors that are allocated, of at least ``floor`` values."""

    def __init__(self, floor: int):
        super().__init__()
        self.floor, self.found = floor, []
        self.storages = {}  # kept, so that no address is used again; a tensor that is kept would not become a gradient

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "titan_fp8moe":
            with self:
                return func._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *args, **(kwargs or {}))
        for t in tree_leaves((args, kwargs)):
            if isinstance(t, Tensor):
                self.storages[t.untyped_storage()._cdata] = t.untyped_storage()
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, Tensor) and t.untyped_storage()._cdata not in self.storages:
                self.storages[t.untyped_storage()._cdata] = t.untyped_storage()
                if t.dtype in (torch.bfloat16, torch.float32) and t.numel() >= self.floor:
                    self.found.append((func._opname, t.numel()))
        return out


class Launches(list):
    """Names of the kernels that :mod:`titan_fp8moe.kernels.launch` records. It would keep their tensors."""

    def append(self, recorded):
        super().append(recorded[0].kernel.__name__)


@pytest.mark.parametrize("how", STORAGE)
@pytest.mark.parametrize(("D", "H"), SIZES)
def test_no_temporary_of_a_parameters_size(monkeypatch, D, H, how):
    """Beside the gradients there are quantized weights only, and autograd takes the gradients without a copy. Kernels
    are recorded, not run."""
    experts, tokens = 256, 2

    def meta(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device="meta")

    weights = store(how, meta(experts, H, D), meta(experts, D, H), meta(experts, H, D))
    leaves = [w.detach().requires_grad_() for w in weights if w is not None]
    w1, w2, w3 = leaves if how == "apart" else (*leaves, None)
    ids, scores = torch.empty(tokens, 1, dtype=torch.int64, device="meta"), meta(tokens, 1).float()
    expert = SPEC._replace(interleaved="interleaved" in how)
    launches = Launches()
    monkeypatch.setattr(launch, "_recordings", {threading.get_ident(): launches})
    with Allocations(experts * D * H) as mode:
        layer = Experts(ExpertWeights(w1, w2, w3), Fp8FlowMoEConfig(), expert=expert)
        out = run_layer(meta(tokens, D), ids, scores, layer)
        out.backward(meta(tokens, D))
    assert "wgrad_hopper_kernel" in launches
    assert [w.grad.stride() for w in leaves] == [w.stride() for w in leaves]
    # Gate's and up's gradients are one tensor.
    assert mode.found == [("empty", 2 * experts * H * D), ("empty", experts * D * H)]


def test_weights_gathered_in_fp8():
    """What FSDP gathers is padded; autograd takes it for the parameter."""
    x, scores, ids, weights = make_layer(T, 192, 80, E, K, device=DEVICE)
    results, dout = [], torch.randn_like(x)
    for given in (weights, [gathered(w) for w in weights]):
        leaves = [*leaves_of(x, scores), *(w if w.requires_grad else w.clone().requires_grad_() for w in given)]
        out = routed_experts(leaves[0], *leaves[2:], ids, leaves[1])
        results.append([out.detach(), *torch.autograd.grad(out, leaves, dout)])
    assert all(map(torch.equal, *results))
    weight = gathered(weights[0])
    assert weight.as_strided(weight.shape, weight.stride(), 0).quantized is weight.quantized


def test_compiled():
    """Of a fused w1 and biases."""
    x, scores, ids, weights = make_layer(T, 192, 80, E, K, device=DEVICE)
    w1, w2, _ = store("fused", *weights)
    tensors, dout = (
        (x, scores, w1, w2, torch.randn(E, 160, device=DEVICE), torch.randn(E, 192, device=DEVICE)),
        x.flip(0),
    )

    def layer(x, scores, w1, w2, b1, b2):
        return routed_experts(x, w1, w2, None, ids, scores, b1=b1, b2=b2, **GPT_OSS)

    torch._dynamo.reset()
    got, want = (gradients(run, tensors, dout) for run in (torch.compile(layer, fullgraph=True), layer))
    assert all(map(torch.equal, got, want))


@pytest.mark.parametrize(("D", "H"), [(72, 128), (128, 72)])
def test_other_sizes_are_refused(D, H):
    x, scores, ids, weights = make_layer(4, D, H, E, K, device=DEVICE)
    for how in STORAGE:
        w1, w2, w3 = store(how, *weights)
        with pytest.raises(ValueError, match=f"got D {D} and H {H}; pad the model with zeros"):
            routed_experts(x, w1, w2, w3, ids, scores, interleaved="interleaved" in how)
