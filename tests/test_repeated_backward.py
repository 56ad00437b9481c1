"""Backwards that run twice: with a retained graph, and in two parts as pipeline schedules split them."""

import pytest
import torch

from tests.layer import assert_equal
from tests.variants import DENSE, LAYERS, SAVED, Small, small_dense, small_layer
from titan_fp8moe import Fp8FlowMoEConfig


def check(layer: Small) -> None:
    out = layer.run()
    loss = (out * torch.randn_like(out)).sum()
    want = torch.autograd.grad(loss, layer.leaves, retain_graph=True)
    assert_equal(torch.autograd.grad(loss, layer.leaves, retain_graph=True), want)
    dx = torch.autograd.grad(loss, layer.x, retain_graph=True)
    others = torch.autograd.grad(loss, layer.others) if layer.others else ()
    assert_equal([*dx, *others], want)


@pytest.mark.parametrize("dispatch", ["local", "all_to_all", "symmetric"])
@pytest.mark.parametrize("kind", LAYERS)
def test_layers(kind, dispatch, group):
    """All have the same bits: what a backward reads, it neither frees nor changes."""
    group = None if dispatch == "local" else group
    for recompute, save_h in SAVED:
        settings = dict(recompute=recompute, save_h=save_h, dispatch="all_to_all" if group is None else dispatch)
        check(small_layer(kind, Fp8FlowMoEConfig(**settings), group))


@pytest.mark.parametrize("kind", DENSE)
def test_dense_layers(kind):
    for recompute, save_h in SAVED:
        check(small_dense(kind, Fp8FlowMoEConfig(recompute=recompute, save_h=save_h)))
