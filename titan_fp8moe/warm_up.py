"""Compiles a share of a layer's kernels into Triton's cache. :mod:`titan_fp8moe.kernels.warm_up` starts such processes.

They need no GPU. Each runs the layer's forward and backward on meta tensors and collects their launches. The kernels
that exchange rows with other ranks are left out. They are small.
"""

import json
import sys
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from titan_fp8moe.config import RECIPE, Fp8FlowMoEConfig
from titan_fp8moe.kernels import launch
from titan_fp8moe.layer.experts import Layer, apply_experts
from titan_fp8moe.layer.saved import LayerSpec
from titan_fp8moe.layer.weights import Biases, ExpertWeights
from titan_fp8moe.recipe import E8M0, FP8

HOPPER = GPUTarget("cuda", 90, 32)


def launches_of(work: dict[str, Any]) -> list[tuple[launch.Kernel, tuple[Any, ...], dict[str, Any]]]:
    """The launches of a layer that compile to different kernels, those of GEMMs first."""

    def make(tensor: tuple[list[int], str] | None) -> Any:
        if tensor is None:
            return None
        shape, dtype = tensor[0], getattr(torch, tensor[1])
        if dtype == FP8:  # weights that are quantized already
            dtype = torch.bfloat16
        return torch.empty(shape, dtype=dtype, device="meta", requires_grad=dtype.is_floating_point)

    x, ids, nan_flags, *tensors = map(make, work["tensors"])
    names, count, D = ExpertWeights._fields, work["weights"], x.shape[1]
    weights = ExpertWeights(*tensors[: len(names)])
    if weights.w1.shape[2] != D:  # quantized ones are padded
        w1, w2 = weights.w1.detach()[:, :, :D].contiguous(), weights.w2.detach()[:, :D].contiguous()
        weights = ExpertWeights(w1.requires_grad_(), w2.requires_grad_())
    shared: Any = None
    if tensors[count:]:
        shared = ExpertWeights(
            *(None if w is None else w.detach()[0].requires_grad_() for w in tensors[count:][: len(names)])
        )
    spec = LayerSpec.decode(work["layer"])
    config = Fp8FlowMoEConfig(**{name: getattr(spec.backward, name) for name in RECIPE})
    frozen = spec.backward.weights == "frozen"
    layer = Layer(config, expert=spec.expert, frozen=frozen, shared_frozen=spec.shared == "frozen")
    if spec.expert.biased:
        E, D = weights.w2.shape[:2]
        rows = weights.w1.shape[1]
        b1, b2 = (torch.empty(E, n, dtype=weights.w1.dtype, device="meta", requires_grad=True) for n in (rows, D))
        layer = layer._replace(biases=Biases(b1, b2, None if weights.w3 is None else b1))
    scores = torch.empty(ids.shape, device="meta", requires_grad=True)
    unique: dict[tuple, Any] = {}
    with launch.recording() as recorded:
        out = apply_experts(x, weights, ids, scores, layer, shared=shared, nan_flags=nan_flags)
        out.backward(torch.empty_like(out))
    for kernel, tensors, constants in recorded:
        args = tuple(_Pointer(arg) if isinstance(arg, Tensor) else arg for arg in tensors)
        unique.setdefault((id(kernel), *kernel._key(0, args, constants)[0]), (kernel, args, constants))
    return sorted(unique.values(), key=lambda item: "gemm" not in item[0].kernel.__module__)


class _Pointer:
    """In the place of a meta tensor, whose ``data_ptr()`` is 0 whatever its offset. Allocations are aligned."""

    def __init__(self, x: Tensor):
        self.dtype = torch.uint8 if x.dtype == E8M0 else x.dtype
        self._offset = int(x.storage_offset()) * x.itemsize

    def data_ptr(self) -> int:
        return self._offset

    def get_device(self) -> int:
        return 0


def compile_share(work: dict[str, Any]) -> list[str]:
    """Compiles every n-th launch into Triton's cache, and returns the kernels' names."""
    no_gpu: Any = SimpleNamespace(
        get_current_device=lambda: 0, get_current_stream=lambda device: 0, get_current_target=lambda: HOPPER
    )
    driver.set_active(no_gpu)
    index, processes = work["share"]
    share = launches_of(work)[index::processes]
    for kernel, args, constants in share:
        kernel.compile(args, constants)
    return [kernel.kernel.__name__ for kernel, *_ in share]


if __name__ == "__main__":
    compile_share(json.loads(sys.argv[1]))
