"""What FP8 does to the operands of a backward, and the transposes to the weight gradients of the routed experts.

A block is the 128 rows of an expert that share a scale once they are transposed. Token scales of x and dy are
anti-correlated in it if no row is large in both. A block's gap is ``max e_x + max e_dy - max (e_x + e_dy)`` in binades,
e being a row's largest tile exponent. Without balance a transpose lowers the rows that matter most to dW by as much.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from experiments.ablations import requantized_pair
from titan_fp8moe import ops, recipe
from titan_fp8moe.layer import statistics
from titan_fp8moe.layer.statistics import Operand
from titan_fp8moe.recipe import MIN_EXPONENT, TILE
from titan_fp8moe.rows import Rows

TRANSPOSES = ("balanced", "scaling_aware", "requantize")


@contextmanager
def looking() -> Iterator[list[dict]]:
    """Looks at the backwards inside this context.

    Yields a list that gets an entry for each layer of routed experts, in the order of the backward: ``dW1,3`` and
    ``dW2``, each with the gaps of its blocks (:func:`gaps`) and the transposes' errors (:func:`transpose_errors`). What
    :mod:`titan_fp8moe.layer.statistics` counted meanwhile is for :func:`titan_fp8moe.layer.statistics.take`.
    """
    layers: list[dict] = []
    record = statistics.record

    def look(
        pairs: Sequence[tuple[Operand, Operand]],
        weights: Sequence,
        offsets_E: Tensor,
        token_M: Tensor | None,
        wgrad: str,
    ) -> None:
        record(pairs, weights, offsets_E, token_M, wgrad)
        if token_M is not None:  # routed experts, not an FFN of all tokens
            named = zip(("dW1,3", "dW2"), pairs, strict=True)
            layers.append({name: _look(left.rows, right.rows, offsets_E) for name, (left, right) in named})

    statistics.record = look
    statistics.collect()
    try:
        yield layers
    finally:
        statistics.record = record


@torch.no_grad()
def _look(x: Rows, dy: Rows, offsets_E: Tensor) -> dict[str, float]:
    end = int(offsets_E[-1])
    return gaps(x.scale[:end], dy.scale[:end]) | transpose_errors(x, dy, offsets_E)


def gaps(x_scale: Tensor, dy_scale: Tensor) -> dict[str, float]:
    """How far token scales are anti-correlated, from (M, D // 128) and (M, N // 128) e8m0 scales in expert order.

    Returns the blocks' mean and largest gap, the share of blocks with a gap over 2, and the correlation of e_x and e_dy
    within blocks, 0 if either is the same in all rows. Rows of zeros, and blocks of them, do not count.
    """
    e_x, e_dy = (recipe.exponent(scale).amax(1).view(-1, TILE).double() for scale in (x_scale, dy_scale))
    live = (e_x > MIN_EXPONENT) & (e_dy > MIN_EXPONENT)
    e_x, e_dy, live = (t[live.any(1)] for t in (e_x, e_dy, live))

    def largest(e: Tensor) -> Tensor:
        return e.masked_fill(~live, -torch.inf).amax(1)

    gap = largest(e_x) + largest(e_dy) - largest(e_x + e_dy)

    def centred(e: Tensor) -> Tensor:
        e = e.masked_fill(~live, 0)
        return (e - e.sum(1, keepdim=True) / live.sum(1, keepdim=True))[live]

    c_x, c_dy = centred(e_x), centred(e_dy)
    norm = (c_x.square().sum() * c_dy.square().sum()).sqrt()
    return {
        "gap": gap.mean().item(),
        "largest_gap": gap.max().item(),
        "gap_over_2": (gap > 2).double().mean().item(),
        "correlation": ((c_x * c_dy).sum() / norm).item() if norm else 0.0,
    }


def transpose_errors(x: Rows, dy: Rows, offsets_E: Tensor) -> dict[str, float]:
    """||dW - ref|| / ||ref|| by mode of the transpose; ref is the float64 product of the operands before it."""
    wrong = dict.fromkeys(TRANSPOSES, 0.0)
    size = 0.0
    grads = {}
    for mode in TRANSPOSES:
        transpose = requantized_pair if mode == "requantize" else ops.transpose_pair
        with torch.compiler.set_stance("force_eager"):  # a few calls are not worth a compilation
            x_t, x_t_scale, dy_t, dy_t_scale = transpose(*x, *dy, offsets_E, mode)
        grads[mode] = ops.grouped_mm_wgrad(dy_t, dy_t_scale, x_t, x_t_scale, offsets_E, torch.float32)
    start = 0
    for e, end in enumerate(offsets_E.tolist()):
        if end == start:
            continue
        x64, dy64 = (recipe.dequantize(q[start:end], scale[start:end], torch.float64) for q, scale in (x, dy))
        ref = dy64.T @ x64
        size += ref.square().sum().item()
        for mode, dw in grads.items():
            wrong[mode] += (dw[e].double() - ref).square().sum().item()
        start = end
    return {mode: (square / size) ** 0.5 for mode, square in wrong.items()}
