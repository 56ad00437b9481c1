"""A reference MoE layer and its random inputs, for tests and experiments."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class LayerInputs(NamedTuple):
    """Random inputs of an MoE layer."""

    x_TD: Tensor
    topk_scores_TK: Tensor  # fp32 in [0, 1)
    topk_ids_TK: Tensor  # int64, K different experts for each token
    weights: list[Tensor]  # w1 (E, H, D), w2 (E, D, H) and w3 (E, H, D), fp32


def make_layer(
    tokens: int,
    dim: int,
    hidden: int,
    experts: int,
    top_k: int,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    std: float = 0.05,
) -> LayerInputs:
    """Inputs of a layer: ``x_TD`` is normal in ``dtype``, weights are normal with standard deviation ``std``."""
    x_TD = torch.randn(tokens, dim, device=device, dtype=dtype)
    topk_scores_TK = torch.rand(tokens, top_k, dtype=torch.float32, device=device)
    topk_ids_TK = torch.rand(tokens, experts, dtype=torch.float32, device=device).topk(top_k, dim=1).indices
    shapes = (hidden, dim), (dim, hidden), (hidden, dim)
    weights = [torch.randn(experts, *shape, dtype=torch.float32, device=device) * std for shape in shapes]
    return LayerInputs(x_TD, topk_scores_TK, topk_ids_TK, weights)


def moe_layer(
    x_TD: Tensor,
    topk_scores_TK: Tensor,
    topk_ids_TK: Tensor,
    w1: Tensor,
    w2: Tensor,
    w3: Tensor,
    score_before_experts: bool,
) -> Tensor:
    """The routed experts from first principles, differentiable, in the precision of ``x_TD``.

    Sums score * W2 (silu(W1 x) * (W3 x)) over a token's experts, or with ``score_before_experts`` the experts applied
    to score * x. Shapes are those of :class:`LayerInputs`; returns (T, D).
    """
    out_TD = torch.zeros_like(x_TD)
    for e in range(w1.shape[0]):
        token, k = (topk_ids_TK == e).nonzero(as_tuple=True)
        score = topk_scores_TK[token, k].unsqueeze(1).to(x_TD.dtype)
        x = x_TD[token] * score if score_before_experts else x_TD[token]
        y = (F.silu(x @ w1[e].T) * (x @ w3[e].T)) @ w2[e].T
        out_TD = out_TD.index_add(0, token, y if score_before_experts else y * score)
    return out_TD


def relative_error(out: Tensor, ref: Tensor) -> float:
    """||out - ref|| / ||ref|| in float64; NaN if either has one, which no threshold accepts."""
    return float((out.double() - ref.double()).norm() / ref.double().norm())


def require_agreement(mine: Iterable[Tensor], others: Iterable[Tensor]) -> None:
    """Raises RuntimeError if a :func:`relative_error` of ours to a peer's results is 0.15 or more: FP8 explains 0.1."""
    apart = max(relative_error(a, b) for a, b in zip(mine, others, strict=True))
    if not apart < 0.15:
        raise RuntimeError(f"the peer's results differ from ours by {apart:.2f}")
