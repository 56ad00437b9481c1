"""A token's row depends on the token alone, bit for bit: the layer on its kernels.

Interpreted GEMMs are those in plain Triton. On a Hopper GPU this is the test of the Gluon ones.
"""

import os

import pytest
import torch

from titan_fp8moe import ops, routed_experts

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

T, D, H, E, K = 140, 256, 128, 4, 2


@pytest.fixture
def on_kernels(monkeypatch):
    """Runs the kernels also where they are interpreted."""
    for module in (ops.backend, ops.quantize):
        monkeypatch.setattr(module, "use_kernels", lambda x: True)


@pytest.fixture
def layer(generator):
    def randn(*shape):
        return torch.randn(*shape, generator=generator, device=generator.device)

    ids = torch.rand(T, E, generator=generator, device=generator.device).topk(K, dim=1).indices
    weights = [(randn(E, *shape) * 0.05).bfloat16() for shape in ((H, D), (D, H), (H, D))]
    return randn(T, D).bfloat16(), randn(T, K), ids, randn(T, D).bfloat16(), weights


def rows(layer, tokens):
    """Output, input gradient and score gradients of these tokens alone."""
    *rows, weights = layer
    x, scores, ids, dout = (t[tokens] for t in rows)
    x, scores = x.requires_grad_(), scores.requires_grad_()
    out = routed_experts(x, *weights, ids, scores)
    return [out.detach(), *torch.autograd.grad(out, [x, scores], dout)]


@pytest.mark.parametrize("tokens", [1, 129], ids=lambda n: f"{n} tokens")
def test_rows_do_not_depend_on_the_batch(on_kernels, layer, generator, tokens):
    """Other numbers of tokens and of rows for each expert, in another order."""
    some = torch.randperm(T, generator=generator, device=generator.device)[:tokens]
    whole = rows(layer, torch.arange(T, device=generator.device))
    out, dx, ds = (found[some] for found in whole)
    got_out, got_dx, got_ds = rows(layer, some)
    if not INTERPRETED:
        assert torch.equal(got_out, out) and torch.equal(got_dx, dx) and torch.equal(got_ds, ds)
        return
    # NumPy's products of the same numbers have been seen to differ in their last bit, one of some hundred thousand.
    for got, want, rounding in ((got_out, out, 2**-7), (got_dx, dx, 2**-7), (got_ds, ds, 5e-7)):
        assert (got != want).sum() <= 2
        torch.testing.assert_close(got, want, rtol=rounding, atol=0)
