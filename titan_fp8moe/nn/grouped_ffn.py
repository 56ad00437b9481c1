"""The experts' FFN on rows that are in expert order already, for models whose own dispatch hands over rows and counts.

    forward   x --quantize--> pad groups to 128 rows --FFN--> y, without padding
    backward  dy --quantize--> pad --FFN backward--> dx, without padding; dW

It is the layer of :func:`titan_fp8moe.routed_experts` with one routed pair per row. Rows keep their order, but they
move: the tiles of a GEMM have one expert each, so groups begin at multiples of 128 rows. FP8 rows move in, bf16 rows
back out.
"""

from typing import Any

import torch
from torch import Tensor

from titan_fp8moe.config import RECIPE, Fp8FlowMoEConfig, require_config
from titan_fp8moe.layer.lora import Lora
from titan_fp8moe.layer.operands import WeightCache
from titan_fp8moe.layer.run import experts_of, run_layer
from titan_fp8moe.layer.weights import ExpertWeights
from titan_fp8moe.nn.grouped_mm import check_ends, check_plain, expert_of_rows
from titan_fp8moe.ops import Fp8Weight
from titan_fp8moe.spec import ExpertSpec


def grouped_ffn(
    x: Tensor,
    w1: Tensor | Fp8Weight,
    w2: Tensor | Fp8Weight,
    w3: Tensor | Fp8Weight | None,
    offs: Tensor,
    *,
    scores: Tensor | None = None,
    config: Fp8FlowMoEConfig | None = None,
    cache: WeightCache | None = None,
    score_before_experts: bool = False,
    activation: str = "swiglu",
    activation_parameters: dict[str, float] | None = None,
    b1: Tensor | None = None,
    b2: Tensor | None = None,
    b3: Tensor | None = None,
    interleaved: bool = False,
    lora: Lora | None = None,
) -> Tensor:
    """score * (W2 activation(W1 x + b1, W3 x + b3) + b2) of each row, in FP8, with the weights of the expert whose
    group holds the row. Three ``torch._grouped_mm`` and an activation in one, with two casts: of x and of the output's
    gradient.

    Differentiable once in ``x``, ``scores``, the weights, biases and adapters. Nothing waits for the GPU, and
    ``torch.compile`` takes it into one graph.

    Args:
        x: (M, D) bf16 or fp32, rows sorted by expert.
        w1, w2, w3: gate (E, H, D), down (E, D, H) and up (E, H, D), in all forms that
            :func:`titan_fp8moe.routed_experts` takes: fused, without a gate, transposed, or stored in FP8.
        offs: (E,) int32, the end of each expert's rows in x. Groups may be empty and of any size.
        scores: (M,) fp32, by which each row's output is multiplied; None for 1.
        config: the recipe's settings, :data:`titan_fp8moe.config.RECIPE`; by default ``Fp8FlowMoEConfig()``.
        cache: keeps quantized copies of the weights, as ``cache_weights`` does for modules; one
            ``WeightCache(kind=NAME)`` for each layer, with one name for layers that are alike. Weights stored in FP8
            need none.
        score_before_experts, activation, activation_parameters, b1, b2, b3, interleaved, lora: as of
            :func:`titan_fp8moe.routed_experts`.

    Returns:
        (M, D) in the dtype of ``x``. Rows at and past ``offs[-1]`` are zeros, and so are their gradients, whatever x,
        scores and the output's gradient hold there.

    Raises:
        ValueError: for other shapes, dtypes or devices, DTensors, or more rows than the kernels take. On a CPU also for
            ``offs`` that decrease or exceed M. A GPU does not check them, which would take kernels of its own.
        RuntimeError: in torch.export with gradients.

    Example::

        y = grouped_ffn(x, w1, w2, w3, counts.cumsum(0, dtype=torch.int32))
    """
    if config is not None:
        require_config(config, "grouped_ffn", *RECIPE)
    weights: ExpertWeights[Any] = ExpertWeights(w1, w2, w3)
    biases = b1, b2, b3
    given = [t for t in (x, offs, scores) if t is not None]
    parameters = [t for t in (*weights, *biases) if t is not None]
    check_plain("grouped_ffn", "x, offs, scores, weights and biases", *given, *parameters)
    if x.dim() != 2 or offs.shape != w1.shape[:1] or (scores is not None and scores.shape != x.shape[:1]):
        shapes = ", ".join(str(tuple(t.shape)) for t in given)
        raise ValueError(
            f"grouped_ffn: x must be (M, D), offs (E,) as w1 (E, H, D), and scores (M,) or None; got {shapes} with w1 "
            f"{tuple(w1.shape)}"
        )
    check_ends("grouped_ffn", offs, x.shape[0])
    expert = ExpertSpec.of(activation, activation_parameters, score_before_experts)._replace(interleaved=interleaved)
    experts = experts_of(weights, config, expert, biases, lora)
    if cache is not None and not isinstance(w1, Fp8Weight):
        # Without gradients the local tensor of a DTensor that is trained requires none.
        experts = experts._replace(cache=cache, frozen=experts.frozen and torch.is_grad_enabled())
    expert_M1 = expert_of_rows(offs, x.shape[0])
    scores_M1 = torch.ones_like(expert_M1, dtype=torch.float32) if scores is None else scores.unsqueeze(1)
    return run_layer(x, expert_M1, scores_M1, experts._replace(check_ids=False))
