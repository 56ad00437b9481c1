"""Runs a layer's forward and backward on meta tensors like those of an op's call, which may be fake ones.

:mod:`titan_fp8moe.kernels.warm_up` compiles what they launch. Transfers to other ranks move nothing. Adapters' GEMMs,
which are small, are left out.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from titan_fp8moe.layer.saved import Inputs, LayerSpec
from titan_fp8moe.layer.weights import NO_WEIGHTS, Biases, ExpertWeights
from titan_fp8moe.recipe import FP8
from titan_fp8moe.spec import BackwardSpec


def like(tensor: Tensor | None) -> Tensor | None:
    """A tensor of that shape and dtype; bf16 in the place of a weight that is quantized already."""
    if tensor is None:
        return None
    dtype = torch.bfloat16 if tensor.dtype == FP8 else tensor.dtype
    strides = tensor.stride()
    return torch.empty_strided(tensor.shape, strides, dtype=dtype, device="meta").requires_grad_(
        dtype.is_floating_point
    )


def _weights(packed: list[Tensor | None], trained: bool) -> ExpertWeights[Any]:
    weights: ExpertWeights[Any] = ExpertWeights(*map(like, packed[: len(ExpertWeights._fields)]))
    return ExpertWeights(*(None if w is None else w.detach().requires_grad_(trained) for w in weights))


def _one_expert(packed: list[Tensor | None], trained: bool) -> ExpertWeights[Any]:
    """The weights without their dim of one expert."""
    weights = _weights(packed, trained)
    return ExpertWeights(*(None if w is None else w.detach()[0].requires_grad_(trained) for w in weights))


def _backward(out: Tensor) -> None:
    out.backward(torch.empty_like(out))


def experts(
    run: Callable[[Inputs, LayerSpec], Tensor],
    x_TD: Tensor,
    topk_ids_TK: Tensor,
    nan_flags: Tensor | None,
    weights: list[Tensor | None],
    shared_weights: list[Tensor | None],
    spec: LayerSpec,
) -> None:
    """Calls ``run`` with tensors like the op's."""
    D, fp32 = x_TD.shape[1], dict[str, Any](dtype=torch.float32, device="meta", requires_grad=True)
    biases, shared_scores, trained = None, None, spec.backward.weights != "frozen"
    if stored := len(weights) == 2 * len(ExpertWeights._fields):  # in FP8: values and scales
        trained = False
        on_meta = [None if t is None else torch.empty_like(t, device="meta") for t in weights]
        routed = ExpertWeights.unpack(on_meta)
    else:
        routed = _weights(weights, trained)
    if spec.expert.biased:
        (E, rows, _), dtype = routed.w1.shape, torch.bfloat16 if stored else routed.w1.dtype
        b1, b2 = (torch.empty(E, n, dtype=dtype, device="meta", requires_grad=True) for n in (rows, D))
        biases = Biases(b1, b2, None if routed.w3 is None else b1)
    if spec.shared_scored:
        shared_scores = torch.empty(x_TD.shape[0], **fp32)
    shared = _one_expert(shared_weights, spec.shared == "trained") if shared_weights else NO_WEIGHTS
    backward = spec.backward._replace(weights="trained" if trained else "frozen")
    spec = spec._replace(backward=backward, lora=None, kept=False, shared_kept=False)
    scores, flags = torch.empty(topk_ids_TK.shape, **fp32), like(nan_flags)
    inputs = Inputs(like(x_TD), scores, like(topk_ids_TK), flags, shared_scores, routed, shared, biases)
    _backward(run(inputs, spec))


def ffn(
    run: Callable[..., Tensor],
    x_TD: Tensor,
    weights: list[Tensor | None],
    nan_flags: Tensor | None,
    backward: BackwardSpec,
    dtype: torch.dtype,
) -> None:
    """Calls ``run``, the autograd function, with tensors like the op's, whose weights have a dim of one expert."""
    trained = backward.weights == "trained"
    matrices = _one_expert(weights, trained)
    if matrices.w3 is None:  # quantized ones have gate and up in one
        w1, w3 = (w.detach().requires_grad_(trained) for w in matrices.w1.chunk(2))
        matrices = matrices._replace(w1=w1, w3=w3)
    _backward(run(like(x_TD), *matrices, like(nan_flags), backward, None, dtype))
