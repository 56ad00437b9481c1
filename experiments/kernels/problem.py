"""Routed experts as this folder's scripts compare them: inputs, and steps of forward and backward.

All candidates get the same tokens, routing, scores and bf16 weights, and return gradients of all but the routing.
Routing is random: each expert has about the same number of rows.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from experiments.records import DEVICE
from experiments.reference import require_agreement
from experiments.throughput.layer import MODELS, compile_whole
from titan_fp8moe import Fp8FlowMoEConfig, RoutedExperts, WeightCache

BF16 = torch.bfloat16
UNIT = "ms forward + backward"
Step = Callable[[], list[Tensor]]


class Sizes(NamedTuple):
    """Model dim, hidden dim, experts, and experts of a token."""

    D: int
    H: int
    E: int
    K: int

    def rows(self, tokens: int) -> str:
        """Of a record's shape."""
        return f"{tokens} tokens, {tokens * self.K // self.E} rows per expert"


def layer_of(model: str, tokens: int) -> tuple[Sizes, str]:
    """A model's sizes and a record's shape."""
    D, H, K, _, E, _ = MODELS[model]
    return Sizes(D, H, E, K), f"{model}, {E} experts per GPU, {tokens} tokens"


def leaf(*shape: int, std: float = 1.0) -> Tensor:
    return (torch.randn(shape, device=DEVICE) * std).to(BF16).requires_grad_()


def step_of(call: Callable[[Tensor], Tensor], x: Tensor, leaves: list[Tensor], dout: Tensor) -> Step:
    """Forward and backward: the output, then the gradients of x and ``leaves``."""

    def step() -> list[Tensor]:
        out = call(x)
        return [out.detach(), *torch.autograd.grad(out, [x, *leaves], dout)]

    return step


def compiled_step(call: Callable[[Tensor], Tensor], x: Tensor, leaves: list[Tensor], dout: Tensor) -> Step:
    """:func:`step_of` as one graph."""
    torch._dynamo.reset()
    return step_of(compile_whole(call), x, leaves, dout)


class Inputs:
    """Tokens with a random choice of experts, and the gradient of the output."""

    def __init__(self, sizes: Sizes, tokens: int):
        self.sizes = sizes
        self.x, self.dout = leaf(tokens, sizes.D), leaf(tokens, sizes.D).detach()
        self.ids = torch.rand(tokens, sizes.E, device=DEVICE).topk(sizes.K, sorted=False).indices
        self.scores = torch.rand(tokens, sizes.K, device=DEVICE).requires_grad_()


class Problem(Inputs):
    """Inputs and weights of routed experts, and ours."""

    def __init__(self, sizes: Sizes, tokens: int):
        super().__init__(sizes, tokens)
        self.experts = RoutedExperts(sizes.E, sizes.D, sizes.H, device=DEVICE, dtype=BF16)

    def ours(self, kept: str = "", microbatches: int = 0) -> Step:
        """A forward and backward, or so many behind a change of the weights. ``kept``: which of their layouts."""
        config = Fp8FlowMoEConfig(cache_weights=bool(kept), cache_layouts=kept or "both")
        D, H, E, _ = self.sizes
        module = RoutedExperts(E, D, H, config=config, device="meta", dtype=BF16)
        module.w1, module.w2, module.w3 = weights = [*self.experts.parameters()]
        once = step_of(lambda x: module(x, self.ids, self.scores), self.x, [self.scores, *weights], self.dout)

        def step() -> list[Tensor]:
            WeightCache.clear_all()
            for _ in range(microbatches):
                results = once()
            return results

        return step if microbatches else once

    def fused_weights(self) -> list[Tensor]:
        """w1 and w3 as one, and w2."""
        w1, w2, w3 = (w.detach() for w in self.experts.parameters())
        return [torch.cat((w1, w3), 1).requires_grad_(), w2.clone().requires_grad_()]


def require_same(ours: list[Tensor], theirs: list[Tensor]) -> None:
    """:func:`require_agreement` where ``theirs`` are output, dx, dscores, dw1 and dw3 as one, and dw2."""
    out, dx, dscores, dw1, dw2, dw3 = ours
    *others, their_dw13, their_dw2 = theirs
    require_agreement((out, dx, dscores, dw2, dw1, dw3), (*others, their_dw2, *their_dw13.chunk(2, 1)))
