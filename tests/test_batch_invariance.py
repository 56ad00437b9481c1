"""A token's row depends on the token alone: the reference, bit for bit, and what does not hold.

RL scores a token in another batch than it was sampled in. tests/kernels/test_layer.py has the kernels' test,
tests/distributed/test_rows.py the ranks'.
"""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from experiments.reference import relative_error
from tests.layer import DEVICE, D, E, H, T, apply_layer, make_layer
from titan_fp8moe import Fp8FlowMoEConfig, RoutedExperts
from titan_fp8moe.layer.group import linear
from titan_fp8moe.layer.weights import ExpertWeights

CONFIG = Fp8FlowMoEConfig()
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


class Layer(NamedTuple):
    """Tokens with the gradients of their outputs, and weights."""

    x: Tensor
    scores: Tensor
    ids: Tensor
    dout: Tensor
    weights: list[Tensor]
    shared: ExpertWeights

    def of(self, tokens: Tensor) -> "Layer":
        return self._replace(x=self.x[tokens], scores=self.scores[tokens], ids=self.ids[tokens], dout=self.dout[tokens])

    def step(self) -> tuple[list[Tensor], list[Tensor]]:
        """Rows, which are output, input gradient and score gradients; and the weights' gradients."""
        x, scores, *weights = (t.detach().clone().requires_grad_() for t in (self.x, self.scores, *self.weights))
        out = apply_layer(x, ExpertWeights(*weights), self.ids, scores, config=CONFIG, shared=self.shared)
        dx, ds, *dw = torch.autograd.grad(out, [x, scores, *weights], self.dout)
        return [out.detach(), dx, ds], dw


def magnitudes() -> Tensor:
    """(T, 1) powers of two: a scale that tokens share would be seen."""
    return torch.exp2(torch.randint(-4, 5, (T, 1), device=DEVICE).float())


def make(dtype: torch.dtype) -> Layer:
    x, scores, ids, weights = make_layer(dtype=dtype)
    x = x * magnitudes().to(dtype)
    shared = ExpertWeights(*(torch.randn(shape, device=DEVICE) * 0.05 for shape in ((H, D), (D, H), (H, D))))
    return Layer(x, scores, ids, torch.randn_like(x), weights, shared)


def assert_rows(got: list[Tensor], want: list[Tensor], tokens: Tensor) -> None:
    for name, a, b in zip(("output", "input gradient", "score gradients"), got, want, strict=True):
        assert torch.equal(a, b[tokens]), name


def test_compiled():
    experts, (x, scores, ids, _) = RoutedExperts(E, D, H, device=DEVICE), make_layer()
    compiled = torch.compile(experts, fullgraph=True, backend="aot_eager")
    want = experts(x, ids, scores)
    for tokens in (T, 5):
        assert torch.equal(compiled(x[:tokens], ids[:tokens], scores[:tokens]), want[:tokens])


def test_linear():
    w, x = torch.randn(2 * H, D, device=DEVICE), torch.randn(T, D, device=DEVICE) * magnitudes()
    some = torch.randperm(T, device=DEVICE)[:9]
    assert torch.equal(linear(x[some], w, CONFIG, None, None), linear(x, w, CONFIG, None, None)[some])


def test_weight_gradients_depend_on_the_order():
    """128 tokens share a scale there, and sums are in the order of the tokens."""
    layer, order = make(torch.float32), torch.randperm(T, device=DEVICE)
    for a, b in zip(layer.of(order).step()[1], layer.step()[1], strict=True):
        assert 0 < relative_error(a, b) < 0.02


@DTYPES
def test_ranks_round_their_parts(dtype: torch.dtype):
    """tests/distributed/test_rows.py has these bits from ranks. A token with all experts on one rank keeps its own."""
    layer = make(dtype)
    whole, parts = layer._replace(shared=None).step()[0][0], []
    for rank in range(2):
        elsewhere = layer.ids // (E // 2) != rank
        part = layer._replace(shared=None, ids=layer.ids.masked_fill(elsewhere, -1), x=layer.x.float())
        parts.append(part._replace(dout=part.x).step()[0][0].bfloat16().float())
    spread = (parts[0] + parts[1]).to(dtype)
    assert 0 < relative_error(spread, whole) < 3e-3
    bound = 2**-8 * (parts[0].abs() + parts[1].abs() + (whole.abs() if dtype == torch.bfloat16 else 0))
    assert ((spread - whole).abs() <= bound).all()
    one_rank = (layer.ids // (E // 2)).float().var(1) == 0
    assert one_rank.any() and torch.equal(spread[one_rank].bfloat16(), whole[one_rank].bfloat16())
