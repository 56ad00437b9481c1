"""The layer and a training step as CUDA graphs."""

import pytest
import torch

from tests.layer import E, K, T, assert_equal, gradients, make_layer
from tests.processes import run_script
from titan_fp8moe import Fp8FlowMoEConfig, routed_experts


def test_example():
    done = run_script("examples/cuda_graph.py", gpu=torch.cuda.is_available())
    if torch.cuda.is_available():
        assert done.returncode == 0 and "17 replays equal eager steps bit for bit" in done.stdout, done.stderr
    else:
        assert done.returncode == 1 and "CUDA graphs need a GPU" in done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("recompute", ["none", "activation", "experts"])
def test_replays_with_new_routings(recompute):
    """Forward and all gradients, bit for bit, for any distribution of tokens over experts."""
    config = Fp8FlowMoEConfig(recompute=recompute)
    x, scores, ids, weights = make_layer()
    leaves, dout = [t.requires_grad_() for t in (x, scores, *weights)], torch.randn_like(x)

    def layer(x, scores, *weights):
        return routed_experts(x, *weights, ids, scores, config=config)

    def step():
        out = layer(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, dout)]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        results = step()
    spread = torch.rand(T, E, device="cuda").topk(K).indices
    some = spread.masked_fill(torch.rand(T, K, device="cuda") < 0.5, -1)
    for routing in (spread, some, torch.arange(K, device="cuda").expand(T, K)):
        with torch.no_grad():
            ids.copy_(routing)
            for leaf in leaves:
                leaf.copy_(torch.randn_like(leaf) / 8)
        graph.replay()
        assert_equal(results, gradients(layer, leaves, dout))
