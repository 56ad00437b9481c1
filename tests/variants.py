"""Small layers of every kind: other weights, other experts beside them, other forms in which weights are kept."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from titan_fp8moe import Adapter, Fp8FlowMoEConfig, Fp8Weight, Lora
from titan_fp8moe.layer.group import feed_forward, linear
from titan_fp8moe.layer.operands import WeightCache
from titan_fp8moe.layer.run import Experts, Shared, run_layer
from titan_fp8moe.layer.weights import Biases, ExpertWeights
from titan_fp8moe.nn.grouped_mm import grouped_mm
from titan_fp8moe.spec import ExpertSpec

T, K, E = 20, 2, 3

SAVED = (("none", "bf16"), ("none", "fp8"), ("activation", "bf16"), ("activation", "fp8"), ("experts", "bf16"))
"""The settings of ``recompute`` and ``save_h`` that save different tensors."""


class Small(NamedTuple):
    """A layer: ``run`` returns its output, which depends on ``x`` and ``others``."""

    x: Tensor
    others: list[Tensor]
    run: Callable[[], Tensor]

    @property
    def leaves(self) -> list[Tensor]:
        return [self.x, *self.others]


def _parameter(*shape: int) -> Tensor:
    return (torch.randn(*shape) / 8).requires_grad_()


def _frozen(weights: ExpertWeights[Any]) -> ExpertWeights[Any]:
    return ExpertWeights(*(w.detach() for w in weights))


LAYERS = (
    "plain", "padded", "frozen", "without a gate", "fused", "fused and padded", "interleaved", "transposed",
    "biased", "biased, scored before", "adapted", "adapted and fused", "stored", "kept", "kept forward", "kept frozen",
    "shared", "shared frozen", "shared scored", "shared kept", "frozen beside shared",
)  # fmt: skip


def small_layer(kind: str, config: Fp8FlowMoEConfig, group: dist.ProcessGroup | None = None) -> Small:
    """A layer of such experts, whose tokens travel where there is a group."""
    D, H = (144, 80) if "padded" in kind else (384, 128)
    x, logits = torch.randn(T, D, requires_grad=True), torch.rand(T, E)
    scores, ids = logits.topk(K)
    scores = scores.requires_grad_()
    weights: ExpertWeights[Any] = ExpertWeights(_parameter(E, H, D), _parameter(E, D, H), _parameter(E, H, D))
    expert, options, more = ExpertSpec(), dict[str, Any](), list[Tensor]()
    if "fused" in kind or "interleaved" in kind or "biased" in kind:
        weights = ExpertWeights(_parameter(E, 2 * H, D), weights.w2)
    if kind == "transposed":
        weights = ExpertWeights(*(_parameter(E, n, k).transpose(1, 2) for n, k in ((D, 2 * H), (H, D))))
        weights = ExpertWeights(*(w.detach().requires_grad_() for w in weights[:2]))
    if kind == "without a gate":
        expert, weights = ExpertSpec.of("relu2"), ExpertWeights(weights.w1, weights.w2)
    if "biased" in kind:
        expert = ExpertSpec.of("clamped_swiglu", dict(limit=1.5, alpha=1.7, offset=1.0), "before" in kind)
        expert = expert._replace(interleaved=True)
        biases = Biases(_parameter(E, 2 * H), _parameter(E, D), None)
        options, more = dict(biases=biases), list(biases[:2])
    if kind == "interleaved":
        expert = ExpertSpec(interleaved=True)
    if "adapted" in kind:
        weights, r = _frozen(weights) if weights.w3 is not None else ExpertWeights(*map(Tensor.detach, weights[:2])), 8
        adapters = [Adapter(_parameter(E, r, w.shape[2]), _parameter(E, w.shape[1], r), 0.5) for w in weights[:2]]
        more = [t for adapter in adapters for t in adapter[:2]]
        options = dict(lora=Lora(*adapters), frozen=True)
    if "stored" in kind:
        weights = ExpertWeights(*map(Fp8Weight.quantize, weights))
    if kind in ("stored", "frozen", "kept frozen", "frozen beside shared"):
        weights = weights if kind == "stored" else _frozen(weights)
        options["frozen"] = True
    if "kept" in kind:
        options["cache"] = WeightCache("forward" if "forward" in kind else "both")
    shared = None
    if "shared" in kind:
        matrices = ExpertWeights(_parameter(H, D), _parameter(D, H), _parameter(H, D))
        if kind == "shared frozen":
            matrices = _frozen(matrices)
        of_shared = torch.rand(T, requires_grad=True) if "scored" in kind else None
        cache = WeightCache() if "kept" in kind else None
        shared = Shared(matrices, cache, kind == "shared frozen", of_shared)
        more += [t for t in (*matrices, of_shared) if t is not None]
    leaves = [t for t in (*weights, *more) if isinstance(t, Tensor) and t.requires_grad]
    experts = Experts(weights, config, group, expert, **options)
    return Small(x, [scores, *leaves], lambda: run_layer(x, ids, scores, experts, shared))


DENSE = (
    "ffn", "ffn padded", "ffn frozen", "ffn kept", "ffn kept forward", "ffn kept frozen", "linear", "linear frozen",
    "linear kept", "grouped_mm", "grouped_mm transposed", "grouped_mm frozen",
)  # fmt: skip


def small_dense(kind: str, config: Fp8FlowMoEConfig) -> Small:
    """A dense FFN, a linear, or a grouped GEMM."""
    D, H = (144, 80) if "padded" in kind else (256, 128)
    x, frozen = torch.randn(T, D), "frozen" in kind
    cache = WeightCache("forward" if "forward" in kind else "both") if "kept" in kind else None
    if kind.startswith("ffn"):
        weights = ExpertWeights(_parameter(H, D), _parameter(D, H), _parameter(H, D))
        weights = _frozen(weights) if frozen else weights
        others, run = list(weights), lambda: feed_forward(x, weights, config, cache, frozen=frozen)
    elif kind.startswith("linear"):
        w = _parameter(H, D).requires_grad_(not frozen)
        others, run = [w], lambda: linear(x, w, config, cache, frozen=frozen)
    else:
        x, w = x.bfloat16(), _parameter(E, H, D).detach().bfloat16()
        w = (w.transpose(1, 2) if "transposed" in kind else w.transpose(1, 2).contiguous()).requires_grad_(not frozen)
        offs = torch.tensor([7, 7, T - 2], dtype=torch.int32)
        others, run = [w], lambda: grouped_mm(x, w, offs)
    x.requires_grad_()
    return Small(x, [] if frozen else others, run)
