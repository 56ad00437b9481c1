"""The strongest bf16 here: torchtitan's MoE layer with one grouped GEMM for gate and up, without padding or scatters.

:func:`fused_experts` is the routed part in fifteen lines of PyTorch, to be compiled. torchtitan's experts run three
grouped GEMMs on padded groups, scatter their output twice and multiply it by the scores in a batched matmul. The router
of all variants is balanced and random: how a trained model routes, without the luck of a draw.
"""

import functools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchtitan.models.moe.moe import MoE, TokenChoiceTopKRouter

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
    """Sums score * expert(x) over each token's experts: (T, D) fp32.

    ``x_TD`` is bf16, and so are w13 (E, 2H, D), gate and up, and w2 (E, D, H). Scores are fp32. ``activate`` maps h
    (M, 2H) to (M, H). Biases (E, 2H) and (E, D) get gradients by GEMMs: the compiler's indexed sums are atomic.
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


@torch.library.custom_op("titan_fp8moe_throughput::balanced_random_experts", mutates_args=())
def balanced_random_experts(num_tokens: int, top_k: int, num_experts: int, device: torch.device) -> Tensor:
    """(num_tokens, top_k) int64: every token's experts are a uniform draw of distinct ones; over each
    lcm(top_k, num_experts) / top_k tokens all experts are chosen equally often. The same at each call, so that
    activation checkpointing recomputes it.

    An op, because the compiler would hash in 32 bits.
    """
    return _draw(num_tokens, top_k, num_experts, device).clone()


@functools.cache  # launching its 23 kernels would be a measurable part of a layer's CPU time
def _draw(num_tokens: int, top_k: int, num_experts: int, device: torch.device) -> Tensor:
    # torchtitan's round robin gives a token consecutive experts, which share a rank. Here each such run of tokens
    # renames the experts by a permutation of its own, which comes from a hash.
    pairs = torch.arange(num_tokens * top_k, device=device)
    period = math.lcm(top_k, num_experts)
    num_runs = -(-num_tokens * top_k // period)
    key = torch.arange(num_runs * num_experts, device=device) + 1
    for factor, shift in ((0x9E3779B1, 15), (0x85EBCA77, 13), (0xC2B2AE3D, 16)):
        key = (key * factor) & 0xFFFFFFFF
        key = key ^ (key >> shift)
    expert_of = key.view(num_runs, num_experts).argsort(dim=1)
    return expert_of[pairs // period, pairs % num_experts].view(num_tokens, top_k)


@balanced_random_experts.register_fake
def _(num_tokens, top_k, num_experts, device):
    return torch.empty(num_tokens, top_k, dtype=torch.int64, device=device)


class BalancedRandomRouter(TokenChoiceTopKRouter):
    """torchtitan's router whose forced balance (``debug.moe_force_load_balance``) assigns experts at random."""

    def _debug_force_load_balance_routing(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        topk_ids_TK = balanced_random_experts(scores.shape[0], self.top_k, self.num_experts, scores.device)
        return topk_ids_TK, scores.gather(1, topk_ids_TK)
