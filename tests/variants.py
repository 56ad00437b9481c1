"""Small layers of every kind: other weights, other experts beside them, other forms in which weights are kept."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tests.test_any_layer import PLAIN, SHARED, Tensors, as_function
from titan_fp8moe import Fp8FlowMoEConfig

SAVED = (("none", "bf16"), ("none", "fp8"), ("activation", "bf16"), ("activation", "fp8"), ("experts", "bf16"))
"""The settings of ``recompute`` and ``save_h`` that save different tensors."""

SMALL = PLAIN._replace(tokens=20, dim=384, experts=3, top_k=2)
PADDED = dict(dim=144, hidden=80)
FROZEN = dict(frozen=("w1", "w2", "w3"))
BIASED = dict(biased=True, activation="clamped_swiglu", stored="interleaved")
ADAPTED = FROZEN | dict(lora=("w1", "w2"))
KEPT = dict(entry="RoutedExperts", weights="kept")
LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "padded": PADDED,
    "frozen": FROZEN,
    "without a gate": dict(activation="relu2"),
    "fused": dict(stored="fused"),
    "fused and padded": dict(stored="fused") | PADDED,
    "interleaved": dict(stored="interleaved"),
    "transposed": dict(stored="fused", lies="swapped"),
    "biased": BIASED,
    "biased, scored before": BIASED | dict(score_before_experts=True),
    "adapted": ADAPTED,
    "adapted and fused": ADAPTED | dict(stored="fused"),
    "stored": FROZEN | dict(weights="fp8"),
    "kept": KEPT,
    "kept forward": KEPT | dict(weights="kept forward"),
    "kept frozen": KEPT | FROZEN,
    "shared": dict(shared="plain"),
    "shared frozen": dict(shared="plain", frozen=SHARED),
    "shared scored": dict(shared="scored"),
    "shared kept": KEPT | dict(shared="kept"),
    "frozen beside shared": FROZEN | dict(shared="plain"),
}
FFN = dict(entry="feed_forward", shared="plain", experts=1, top_k=1, frozen=("scores", "w1", "w2", "w3"))
LINEAR = dict(entry="linear", experts=1, top_k=1)
GROUPED = dict(entry="grouped_mm", top_k=1, routing="some nowhere", dtype=torch.bfloat16, weight_dtype=torch.bfloat16)
DENSE: dict[str, dict[str, Any]] = {
    "ffn": FFN,
    "ffn padded": FFN | PADDED,
    "ffn frozen": FFN | dict(frozen=(*FFN["frozen"], *SHARED)),
    "ffn kept": FFN | dict(weights="kept"),
    "ffn kept forward": FFN | dict(weights="kept forward"),
    "ffn kept frozen": FFN | dict(weights="kept", frozen=(*FFN["frozen"], *SHARED)),
    "linear": LINEAR,
    "linear frozen": LINEAR | dict(frozen=("w1",)),
    "linear kept": LINEAR | dict(weights="kept"),
    "grouped_mm": GROUPED,
    "grouped_mm transposed": GROUPED | dict(lies="swapped"),
    "grouped_mm frozen": GROUPED | dict(frozen=("w1",)),
}


class Small(NamedTuple):
    """A layer: ``run`` returns its output, which depends on ``x`` and ``others``."""

    x: Tensor
    others: list[Tensor]
    run: Callable[[], Tensor]

    @property
    def leaves(self) -> list[Tensor]:
        return [self.x, *self.others]


def small_layer(kind: str, config: Fp8FlowMoEConfig, group: dist.ProcessGroup | None = None) -> Small:
    """One of LAYERS or DENSE, whose tokens travel where there is a group."""
    layer = SMALL._replace(**(LAYERS | DENSE)[kind], config=config, travels=group is not None)
    tensors = Tensors.of(layer, torch.initial_seed())
    leaves = {name: t.requires_grad_(name not in layer.frozen) for name, t in tensors.leaves.items()}
    run = as_function(layer, leaves)
    x, *others = (t for t in leaves.values() if t.requires_grad)
    return Small(x, others, lambda: run(tensors.ids))
