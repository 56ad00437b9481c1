"""FLOPs of the layers' ops, for torch.utils.flop_counter.

All GEMMs count, for all rows of their buffers, padding included. A formula gets shapes in the place of an op's tensors.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

import titan_fp8moe.layer.experts  # noqa: F401  defines the ops, with those of group.py
from titan_fp8moe.layer.saved import Inputs, LayerSpec, gradients_flags, halfway_flags, saved_flags, unpack
from titan_fp8moe.layer.weights import ExpertWeights
from titan_fp8moe.recipe import group_rows, padded, row_capacity
from titan_fp8moe.spec import BackwardSpec, decode


def _product_flops(rows: int, weights: Sequence[torch.Size | None]) -> int:
    """FLOPs of the product of ``rows`` rows with each of the packed weights (E, N, K), whose padding counts."""
    shapes = [shape for shape in weights[: len(ExpertWeights._fields)] if shape is not None]
    return sum(2 * rows * padded(shape[1]) * padded(shape[2]) for shape in shapes)


def _gate_up(weights: Sequence[torch.Size | None]) -> list[torch.Size | None]:
    """The shapes of GEMM 1's weights, of the packed weights'."""
    return [weights[0], weights[2]]


@register_flop_formula([torch.ops.titan_fp8moe.feed_forward, torch.ops.titan_fp8moe.linear])
def _group_flops(x_shape, weights, *_: Any, **__: Any) -> int:
    """FLOPs of all GEMMs, padding included."""
    return _product_flops(group_rows(x_shape[0]), weights)


def _hidden_flops(
    rows: int, weights: Sequence[torch.Size | None], backward: BackwardSpec, with_dw2: bool, with_dx: bool = False
) -> int:
    """FLOPs of the first half of an FFN's backward; with one group of rows it may make the input's gradient too."""
    of_w13 = with_dx + (not backward.keeps_h)
    return (1 + with_dw2) * _product_flops(rows, weights[1:2]) + of_w13 * _product_flops(rows, _gate_up(weights))


@register_flop_formula(torch.ops.titan_fp8moe.feed_forward_hidden_gradients)
def _ffn_hidden_flops(dy_shape, saved, needs, dtype, weights, nan_flags, backward, **_: Any) -> int:
    needs_dx, needs_dw2 = needs
    return _hidden_flops(group_rows(dy_shape[0]), weights, decode(BackwardSpec, backward), needs_dw2, needs_dx)


@register_flop_formula(torch.ops.titan_fp8moe.feed_forward_w13_grad)
def _ffn_wgrad_flops(halfway, saved, weights, backward, **_: Any) -> int:
    return _product_flops(halfway[0][0], _gate_up(weights))  # dh comes first


@register_flop_formula(torch.ops.titan_fp8moe.linear_backward)
def _linear_flops(dy_shape, saved, needs, dtype, weights, *_: Any, **__: Any) -> int:
    return sum(needs) * _product_flops(group_rows(dy_shape[0]), weights)


@register_flop_formula(torch.ops.titan_fp8moe.routed_experts_forward)
def _forward_flops(
    x, scores, topk_ids, shared_scores, needs_grad, weights, shared_weights, biases, adapters, *_: Any, **__: Any
) -> int:
    """FLOPs of the layer's GEMMs, for the rows that buffers hold without expert parallelism, padding included."""
    (T, K), E = topk_ids, weights[0][0]
    rows = row_capacity(T * K, E)
    of_lora = sum(2 * rows * N * K for _, N, K in adapters)
    return _product_flops(rows, weights) + _product_flops(group_rows(T), shared_weights) + of_lora


@register_flop_formula(torch.ops.titan_fp8moe.routed_experts_hidden_gradients)
def _layer_hidden_flops(
    dout, saved, needs, weights, shared_weights, biases, adapters, nan_flags, layer, **_: Any
) -> int:
    spec = decode(LayerSpec, layer)
    needed, rows = Inputs.of(needs, spec.expert.biased), unpack(saved_flags(spec), iter(saved)).routing.token_M[0]
    flops = _hidden_flops(rows, weights, spec.backward, needed.weights.w2)
    if spec.shared:
        of_group = spec.shared_backward, needed.shared.w2, needed.x
        flops += _hidden_flops(group_rows(dout[0]), shared_weights, *of_group)
    return flops


@register_flop_formula(torch.ops.titan_fp8moe.routed_experts_gradients)
def _gradients_flops(
    halfway, saved, needs, dim, dtype, weights, shared_weights, biases, adapters, layer, out_shape
) -> int:
    spec = decode(LayerSpec, layer)
    needed = Inputs.of(needs, spec.expert.biased)
    routed, shared = unpack(halfway_flags(spec, needed.x, any(needed.biases or ())), iter(halfway))
    _, last = gradients_flags(needed, spec.lora)
    products = needed.x + last.weights.w13
    flops = products * _product_flops(routed.dh.q[0], _gate_up(weights))
    return flops + (last.shared.w13 * _product_flops(shared.dh.q[0], _gate_up(shared_weights)) if shared else 0)
