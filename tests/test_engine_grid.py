"""How far the layer is from a rollout engine that serves the same FP8 weights: vLLM's arithmetic, from its sources.

It quantizes rows in 1x128 groups with a scale of amax / 448, which DeepGEMM's E8M0 mode rounds up to a power of two.
SiLU and product are rounded to bf16. Scores multiply GEMM 2's results, here its operand before it is quantized.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.reference import LayerInputs, make_layer, relative_error
from titan_fp8moe import recipe, routed_experts

T, D, H, E, K = 256, 512, 256, 8, 2


def rounded(x: Tensor, power_of_two: bool) -> Tensor:
    """The engine's operand, dequantized."""
    groups = x.float().unflatten(-1, (-1, 128))
    scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-10) / 448
    if power_of_two:
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    return ((groups / scale).clamp(-448, 448).to(recipe.FP8).float() * scale).flatten(-2)


def engine(layer: LayerInputs, power_of_two: bool, as_here: bool = False) -> Tensor:
    """The engine's layer; ``as_here`` applies scores where the recipe does, and leaves the activation in fp32."""
    x, scores, ids, weights = layer
    w1, w2, w3 = (recipe.dequantize(*recipe.quantize_weight(w)) for w in weights)
    x, out = rounded(x, power_of_two), torch.zeros(x.shape)
    for e in range(E):
        token, k = (ids == e).nonzero(as_tuple=True)
        score = scores[token, k].unsqueeze(1)
        gate, up = ((x[token] @ w[e].T).bfloat16() for w in (w1, w3))
        a = F.silu(gate.float()) * up.float() * score if as_here else F.silu(gate.float()).bfloat16() * up
        y = rounded(a, power_of_two) @ w2[e].T
        out.index_add_(0, token, (y if as_here else y * score).bfloat16().float())
    return out.bfloat16()


def test_distance():
    """With power-of-two scales half of FP8's own error remains: of the scores' place. fp32 scales are another grid."""
    layer = make_layer(T, D, H, E, K, torch.bfloat16)
    x, scores, ids, weights = layer = layer._replace(weights=[w.bfloat16() for w in layer.weights])
    got = routed_experts(x, *weights, ids, scores)
    assert 0.030 < relative_error(engine(layer, True), got) < 0.045
    assert 0.057 < relative_error(engine(layer, False), got) < 0.071
    assert relative_error(engine(layer, True, as_here=True), got) < 1e-3
