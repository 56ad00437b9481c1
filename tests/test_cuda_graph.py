"""The layer and a training step as CUDA graphs."""

import pytest
import torch

from tests.layer import assert_equal, make_layer, run
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
    x, scores, chosen, params = make_layer()
    leaves = [t.detach().clone().requires_grad_() for t in (x, scores, *params)]
    dout, ids = torch.randn_like(x), chosen.clone()

    def step():
        out = routed_experts(leaves[0], *leaves[2:], ids, leaves[1], config=config)
        return [out.detach(), *torch.autograd.grad(out, leaves, dout)]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        results = step()
    torch.manual_seed(0)
    E, (T, K) = params[0].shape[0], chosen.shape
    routings = [torch.rand(T, E, device="cuda").topk(K).indices, torch.arange(K, device="cuda").expand(T, K)]
    routings.append(routings[0].masked_fill(torch.rand(T, K, device="cuda") < 0.5, -1))
    for routing in routings:
        with torch.no_grad():
            ids.copy_(routing)
            for leaf in leaves:
                leaf.copy_(torch.randn_like(leaf) / 8)
        graph.replay()
        assert_equal(results, run(leaves[0], leaves[1], ids, leaves[2:], dout, config))
