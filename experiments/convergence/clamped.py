"""Routed experts with gpt-oss's activation, ``clamped_swiglu``, in bf16 and in FP8, on one GPU or the CPU.

torchtitan's experts and the converted ones have the same weights, w1 for gates and w3 for ups. Shared experts and
dense FFNs keep SwiGLU.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torchtitan.models.moe.moe import GroupedExperts, MoE
from torchtitan.models.moe.utils import indices_padding_wrapper

from titan_fp8moe.spec import ExpertSpec
from titan_fp8moe.torchtitan.modules import Fp8FlowMoE

ALPHA, OFFSET = 1.702, 1.0  # gpt-oss's
SAMPLE = 256  # tokens of a batch whose gates and ups are counted


def clamped_swiglu(g: Tensor, u: Tensor, limit: float) -> Tensor:
    """The activation in the operations and the dtype of torchtitan's gpt_oss."""
    g, u = g.clamp(max=limit), u.clamp(min=-limit, max=limit)
    return g * torch.sigmoid(ALPHA * g) * (u + OFFSET)


class ClampedExperts(GroupedExperts):
    """torchtitan's experts with the activation replaced: three grouped GEMMs in bf16 without a sync with the host."""

    limit: float

    def forward(self, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        return indices_padding_wrapper(self._run)(self.w1, self.w2, self.w3, x, num_tokens_per_expert)

    def _run(self, w1: Tensor, w2: Tensor, w3: Tensor, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        ends = torch.cumsum(num_tokens_per_expert, dim=0, dtype=torch.int32)

        def product(rows: Tensor, weight: Tensor) -> Tensor:
            return torch._grouped_mm(rows.bfloat16(), weight.bfloat16().transpose(-2, -1), offs=ends)

        a = clamped_swiglu(product(x, w1), product(x, w3), self.limit)
        return product(a, w2).type_as(x)


def clamp(moe: MoE, limit: float) -> None:
    """Replaces the activation of a layer's routed experts, converted or not."""
    if isinstance(moe, Fp8FlowMoE):
        parameters = dict(limit=limit, alpha=ALPHA, offset=OFFSET)
        moe.experts.expert = ExpertSpec.of("clamped_swiglu", parameters, moe.score_before_experts)
        moe.fp8_shared = False  # shared experts in the routed ones' flow would have their activation
    else:
        moe.experts.__class__, moe.experts.limit = ClampedExperts, limit


def adds_shares_to(shares: Tensor, moe: MoE, limit: float) -> Callable:
    """A hook of the layer's router that adds the shares of gates and of ups beyond the limit, for SAMPLE tokens."""

    def hook(router: nn.Module, inputs: tuple, output: tuple[Tensor, Tensor, Tensor]) -> None:
        x_TD, ids_TK = inputs[0][:SAMPLE].bfloat16(), output[1][:SAMPLE]
        token_T1 = torch.arange(len(x_TD), device=x_TD.device).unsqueeze(1)
        g, u = (
            torch.einsum("td,ehd->eth", x_TD, w.bfloat16())[ids_TK, token_T1] for w in (moe.experts.w1, moe.experts.w3)
        )
        shares.add_(torch.stack([(g > limit).float().mean(), (u.abs() > limit).float().mean()]))

    return hook
