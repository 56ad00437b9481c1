"""The strongest bf16 here: torchtitan's MoE layer with one grouped GEMM for gate and up, without padding or scatters.

:func:`fused_experts` is the routed part in fifteen lines of PyTorch, to be compiled. torchtitan's experts run three
grouped GEMMs on padded groups, scatter their output twice and multiply it by the scores in a batched matmul.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchtitan.models.moe.moe import MoE

BF16 = torch.bfloat16


def swiglu(h: Tensor) -> Tensor:
    gate, up = h.chunk(2, 1)
    return F.silu(gate) * up


def fused_experts(
    x_TD: Tensor,
    w13: Tensor,
    w2: Tensor,
    topk_ids_TK: Tensor,
    topk_scores_TK: Tensor,
    activate: Callable[[Tensor], Tensor] = swiglu,
    biases: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Sums score * expert(x) over each token's experts.

    Args:
        x_TD: (T, D) bf16.
        w13: (E, 2H, D) bf16, gate and up.
        w2: (E, D, H) bf16.
        topk_ids_TK: (T, K) experts.
        topk_scores_TK: (T, K) fp32.
        activate: maps h (M, 2H) to GEMM 2's operand (M, H).
        biases: (E, 2H) and (E, D) bf16. Their gradients are GEMMs: the compiler's indexed sums are atomic.

    Returns:
        (T, D) fp32.
    """
    ids, order = topk_ids_TK.flatten().short().sort(stable=True)  # two bytes: a quarter of the radix sort's passes
    experts = torch.arange(w2.shape[0], dtype=ids.dtype, device=ids.device)
    offsets_E = torch.searchsorted(ids, experts, right=True, out_int32=True)
    token = order // topk_ids_TK.shape[1]
    x_MD = x_TD.float()[token].to(BF16)  # fp32: the backward adds a token's gradients in it; one kernel when compiled
    h = torch._grouped_mm(x_MD, w13.transpose(1, 2), offs=offsets_E)
    if biases is not None:
        one_hot_ME = (ids.unsqueeze(1) == experts).to(BF16)
        h = h + one_hot_ME @ biases[0]
    y_MD = torch._grouped_mm(activate(h), w2.transpose(1, 2), offs=offsets_E)
    if biases is not None:
        y_MD = y_MD + one_hot_ME @ biases[1]
    y_MD = y_MD.float() * topk_scores_TK.flatten()[order].unsqueeze(1)
    return torch.zeros(x_TD.shape, device=x_TD.device).index_add(0, token, y_MD)


class FusedMoE(MoE):
    """torchtitan's MoE around :func:`fused_experts`: same router, shared experts and parameters.

    Without padding ``tokens_per_expert`` is all that the router's counts are for. One expert-parallel rank only.
    """

    w13: Tensor | None = None
    """Gate and up of parameters that are bf16 already, as one; of fp32 parameters the cast joins them for free."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, S, D) -> (B, S, D)."""
        x_TD = x.view(-1, x.shape[-1])
        scores_TK, ids_TK, counts_E = self.router(x_TD, self.expert_bias)
        with torch.no_grad():
            self.tokens_per_expert.add_(counts_E)
        experts = self.experts
        w13 = torch.cat((experts.w1.to(BF16), experts.w3.to(BF16)), 1) if self.w13 is None else self.w13
        out_TD = fused_experts(x_TD.to(BF16), w13, experts.w2.to(BF16), ids_TK, scores_TK)
        if self.shared_experts is not None:
            out_TD = out_TD + self.shared_experts(x_TD)
        return out_TD.to(x.dtype).view(x.shape)


def moes(model: nn.Module) -> list[MoE]:
    return [module for module in model.modules() if isinstance(module, MoE)]
