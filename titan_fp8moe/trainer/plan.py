"""What a converter turns to FP8, and why some modules stay as they were. Serves both torchtitan adapters.

A converter lists every module that could run in FP8 as a :class:`Part`, before it changes any. The log then tells how
many of each kind are in FP8, and the reasons for the others.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

# Kinds of modules, and what the log calls several. A shared or dense FFN is an attribute of this name in torchtitan.
MOE, SHARED, DENSE, LINEAR = "moe", "shared_experts", "feed_forward", "linear"
KINDS = {MOE: "MoE layers", SHARED: "shared experts", DENSE: "dense FFNs", LINEAR: "linears"}


class Part(NamedTuple):
    """A module that could run in FP8, and the reason why it does not. ``module`` is what the adapter converts."""

    name: str
    kind: str
    module: Any
    reason: str | None


def describe(plan: list[Part], details: str) -> Iterator[str]:
    """Lines for the log: how many modules of each kind are in FP8, and why the others are not."""
    counts = [(kind, sum(part.reason is None for part in plan if part.kind == kind)) for kind in KINDS]
    yield f"FP8-Flow-MoE: {', '.join(f'{n} {KINDS[kind]}' for kind, n in counts)} in FP8; {details}"
    reasons: dict[str, list[str]] = {}
    for part in plan:
        if part.reason is not None:
            reasons.setdefault(part.reason, []).append(part.name)
    for reason, names in reasons.items():
        yield f"FP8-Flow-MoE: not in FP8: {', '.join(names)}: {reason}"
