"""Runs a layer's forward and backward on meta tensors like those of an op's call, which may be fake ones.

:mod:`titan_fp8moe.kernels.warm_up` compiles what they launch. Transfers to other ranks move nothing. Adapters' GEMMs,
which are small, are left out.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from titan_fp8moe import ops
from titan_fp8moe.config import RECIPE, Fp8FlowMoEConfig
from titan_fp8moe.dispatch.all_to_all import AllToAllDispatch
from titan_fp8moe.dispatch.base import Pending
from titan_fp8moe.layer import statistics
from titan_fp8moe.layer.saved import Inputs, LayerSpec
from titan_fp8moe.layer.weights import NO_WEIGHTS, Biases, ExpertWeights
from titan_fp8moe.recipe import FP8
from titan_fp8moe.rows import GroupRows, NanFlags
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


def _weights(packed: list[Tensor | None], D: int) -> ExpertWeights[Any]:
    weights: ExpertWeights[Any] = ExpertWeights(*map(like, packed[: len(ExpertWeights._fields)]))
    if weights.w1.shape[2] == D:
        return weights
    # Quantized ones are padded.
    cut = weights.w1[:, :, :D], weights.w2[:, :D], None if weights.w3 is None else weights.w3[:, :, :D]
    return ExpertWeights(*(None if w is None else w.detach().contiguous().requires_grad_() for w in cut))


def _one_expert(packed: list[Tensor | None], D: int) -> ExpertWeights[Any]:
    """The weights without their dim of one expert."""
    return ExpertWeights(*(None if w is None else w.detach()[0].requires_grad_() for w in _weights(packed, D)))


def _backward(out: Tensor) -> None:
    out.backward(torch.empty_like(out))


@statistics.paused()
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
    routed, biases, shared_scores = _weights(weights, D), None, None
    if spec.expert.biased:
        (E, rows, _), dtype = routed.w1.shape, routed.w1.dtype
        b1, b2 = (torch.empty(E, n, dtype=dtype, device="meta", requires_grad=True) for n in (rows, D))
        biases = Biases(b1, b2, None if routed.w3 is None else b1)
    if spec.shared and not shared_weights:
        _rows_of_shared(x_TD, topk_ids_TK, nan_flags, spec)
    elif spec.shared_scored:
        shared_scores = torch.empty(x_TD.shape[0], **fp32)
    shared = _one_expert(shared_weights, D) if shared_weights else NO_WEIGHTS
    trained = spec.backward.weights == "adapted"
    backward = spec.backward._replace(weights="trained") if trained else spec.backward
    spec = spec._replace(
        backward=backward,
        shared=spec.shared if shared_weights else "",
        lora=None,
        shared_scored=shared_scores is not None,
        kept=False,
        shared_kept=False,
    )
    scores, flags = torch.empty(topk_ids_TK.shape, **fp32), like(nan_flags)
    inputs = Inputs(like(x_TD), scores, like(topk_ids_TK), flags, shared_scores, routed, shared, biases)
    _backward(run(inputs, spec))


def _rows_of_shared(x_TD: Tensor, topk_ids_TK: Tensor, nan_flags: Tensor | None, spec: LayerSpec) -> None:
    """Shared experts of a dispatch that overlaps have an op of their own, :func:`shared`. But it is the layer that
    quantizes their rows as one group, and that adds their results to its sums."""
    ops.quantize_group(torch.empty(x_TD.shape, dtype=x_TD.dtype, device="meta"), NanFlags.of(like(nan_flags)).x)
    sent_TK = torch.empty(topk_ids_TK.shape, dtype=torch.int32, device="meta")
    tokens = spec.dispatch.resume(AllToAllDispatch.State(sent_TK, sent_TK, sent_TK), None, spec.route, x_TD.shape[1])
    rows_TD = torch.empty(x_TD.shape, dtype=torch.bfloat16, device="meta")
    for ds_T in (None, rows_TD.new_empty(rows_TD.shape[0], dtype=torch.float32)):
        payload = ops.pack_combine(rows_TD, ds_T, sent_TK)
        tokens.finish(Pending(payload, with_gradients=ds_T is not None), x_TD.dtype, rows_TD, [])


@statistics.paused()
def shared(
    run: Callable[..., None],
    rows: GroupRows,
    weights: list[Tensor | None],
    nan_flags: Tensor | None,
    spec: LayerSpec,
    dim: int,
) -> None:
    """Calls ``run`` with tensors like those with which a dispatch that overlaps runs shared experts: rows, weights
    without their dim of one expert, and flags."""
    found = (
        None if t is None else torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in rows
    )
    with torch.no_grad():
        run(GroupRows(*cast(Any, found)), _one_expert(weights, dim), like(nan_flags), spec, dim)


@statistics.paused()
def ffn(
    feed_forward: Callable[..., Tensor],
    x_TD: Tensor,
    weights: list[Tensor | None],
    nan_flags: Tensor | None,
    backward: BackwardSpec,
    dtype: torch.dtype,
) -> None:
    """Runs ``feed_forward`` with tensors like the op's, whose weights have a dim of one expert, for a result in
    ``dtype``."""
    frozen = backward.weights == "frozen"
    matrices = _one_expert(weights, x_TD.shape[1])
    if matrices.w3 is None:  # quantized ones have gate and up in one
        w1, w3 = (w.detach().requires_grad_() for w in matrices.w1.chunk(2))
        matrices = matrices._replace(w1=w1, w3=w3)
    inputs = like(x_TD), matrices, Fp8FlowMoEConfig(**{name: getattr(backward, name) for name in RECIPE})
    with torch.autocast("cpu", dtype, enabled=dtype != x_TD.dtype):
        out = feed_forward(*inputs, nan_flags=like(nan_flags), frozen=frozen)
    _backward(out)
