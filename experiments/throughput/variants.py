"""The models whose MoE layers scripts measure, and a layer as one graph."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

_V2, _V3 = dict(score_func="softmax"), dict(score_func="sigmoid", route_norm=True, route_scale=2.5)
_QWEN3 = dict(score_func="softmax", route_norm=True)


class Model(NamedTuple):
    """A model's MoE layers; ``experts`` is the number per GPU that is measured, ``router`` arguments of MoEArgs."""

    D: int
    H: int
    top_k: int
    shared: int
    experts: int
    router: dict[str, Any]


MODELS = {
    "671B": Model(7168, 2048, 8, 1, 64, _V3),
    "16B": Model(2048, 1408, 6, 2, 64, _V2),
    "Kimi-K2": Model(7168, 2048, 8, 1, 48, _V3),
    "GLM-4.5-Air": Model(4096, 1408, 8, 1, 128, _V3),
    "Qwen3-235B": Model(4096, 1536, 8, 0, 32, _QWEN3),
    "Qwen3-30B": Model(2048, 768, 8, 0, 128, _QWEN3),
    "tiny": Model(256, 128, 3, 1, 6, _V3),  # for tests
}


def compile_whole(moe: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The layer as one graph, of a code object of its own: torch.compile would try the other variants' graphs first."""
    torch._dynamo.config.capture_scalar_outputs = True  # as torchtitan's apply_compile

    def call(x: Tensor) -> Tensor:
        return moe(x)

    call.__code__ = call.__code__.replace()
    return torch.compile(call, fullgraph=True)
