"""Small layers, one of each kind of ops: other weights, other experts beside them, other forms of the weights."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tests.test_any_layer import PLAIN, Layer, Tensors, as_function
from titan_fp8moe import Fp8FlowMoEConfig

SMALL = PLAIN._replace(tokens=20, dim=384, experts=3, top_k=2)
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "shared": dict(shared="plain"),
    "shared, scored": dict(shared="scored"),
    "biased": dict(biased=True, activation="clamped_swiglu", stored="interleaved"),
    "adapted": dict(frozen=("w1", "w2", "w3"), lora=("w1", "w2")),
    "stored": dict(frozen=("w1", "w2", "w3"), weights="fp8"),
    "kept": dict(entry="RoutedExperts", weights="kept"),
    "ffn": dict(entry="feed_forward", shared="plain", experts=1, top_k=1),
    "linear": dict(entry="linear", experts=1, top_k=1),
    "grouped_mm": dict(entry="grouped_mm", top_k=1, dtype=torch.bfloat16),
}


class Small(NamedTuple):
    """A layer: ``run`` returns its output, which depends on the ``leaves``."""

    x: Tensor
    leaves: list[Tensor]
    run: Callable[[], Tensor]


def small_layer(kind: str, config: Fp8FlowMoEConfig, group: dist.ProcessGroup | None = None) -> Small:
    """A layer whose tokens travel where there is a group."""
    return make(SMALL._replace(**KINDS[kind], config=config, travels=group is not None))


def make(layer: Layer) -> Small:
    tensors = Tensors.of(layer, torch.initial_seed())
    leaves = {name: t.requires_grad_(name not in layer.frozen) for name, t in tensors.leaves.items()}
    run, needed = as_function(layer, leaves), [t for t in leaves.values() if t.requires_grad]
    return Small(leaves["x"], needed, lambda: run(tensors.ids))
