"""One MoE layer in any precision, from first principles: what the package's layer is compared with."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def moe_layer(
    x_TD: Tensor, scores_TK: Tensor, experts_TK: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, score_before_experts: bool
) -> Tensor:
    """Sum over a token's experts of score * W2 (silu(W1 x) * (W3 x)), or of the experts applied to score * x."""
    out = torch.zeros_like(x_TD)
    for e in range(w1.shape[0]):
        token, k = (experts_TK == e).nonzero(as_tuple=True)
        score = scores_TK[token, k].unsqueeze(1).to(x_TD.dtype)
        x = x_TD[token] * score if score_before_experts else x_TD[token]
        y = (F.silu(x @ w1[e].T) * (x @ w3[e].T)) @ w2[e].T
        out = out.index_add(0, token, y if score_before_experts else y * score)
    return out


def in_model(moe: nn.Module) -> nn.Module:
    """A model of one block with this layer, as torchtitan's parallelize functions take it."""
    block, model = nn.Module(), nn.Module()
    block.moe, block.moe_enabled = moe, True
    model.layers = nn.ModuleDict({"0": block})
    return model


def relative_error(out: Tensor, ref: Tensor) -> float:
    """||out - ref|| / ||ref|| in float64; NaN never compares as small."""
    return float((out.double() - ref.double()).norm() / ref.double().norm())
