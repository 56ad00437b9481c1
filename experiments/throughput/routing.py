"""Random routing that is balanced: how a trained model routes, without the luck of a draw in the comparison."""

import functools
import math

import torch
from torch import Tensor
from torchtitan.models.moe.moe import TokenChoiceTopKRouter


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
