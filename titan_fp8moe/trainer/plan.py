"""Plans a conversion to FP8, with the reasons why modules stay as they were. Serves both torchtitan adapters.

A converter lists every module that could run in FP8 as a :class:`Part`, before it changes any. The log then tells how
many of each kind are in FP8, and the reasons for the others.
"""

import logging
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from titan_fp8moe.config import Fp8FlowMoEConfig
from titan_fp8moe.trainer import preflight

# Kinds of modules, and what the log calls several. A shared or dense FFN is an attribute of this name in torchtitan.
MOE, SHARED, DENSE, LINEAR = "moe", "shared_experts", "feed_forward", "linear"
KINDS = {MOE: "MoE layers", SHARED: "shared experts", DENSE: "dense FFNs", LINEAR: "linears"}


def plain_name(name: str) -> str:
    """A module's or tensor's name without the wrappers of compile, activation checkpointing and FSDP1."""
    return re.sub(r"\b_(orig_mod|checkpoint_wrapped_module|fsdp_wrapped_module)\.", "", name)


def natural(name: str) -> list[str | int]:
    """A key that sorts layer 2 before layer 10."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


class Part(NamedTuple):
    """A module that could run in FP8, and the reason why it does not. ``module`` is what the adapter converts."""

    name: str
    kind: str
    module: Any
    reason: str | None


def make_plan(
    layers: dict[str, Any],
    ffns: dict[str, Any],
    linears: dict[str, Any],
    config: Fp8FlowMoEConfig,
    *,
    check_layer: Callable[[str, Any], None],
    why_not_ffn: Callable[[Any], str | None],
    check_linear: Callable[[str, Any], None],
) -> list[Part]:
    """Every module that could run in FP8, and why some do not. Checks all of them; changes nothing.

    Args:
        layers, ffns, linears: MoE layers, shared experts and dense FFNs, and linears, by fully qualified names:
            modules, or what else the adapter converts. The last part of an FFN's name says which it is. Linears inside
            of the others are left out.
        check_layer, check_linear: raise ValueError for a MoE layer or a linear that was chosen and cannot run in FP8.
        why_not_ffn: the reason why an FFN stays as it is, or None.

    Raises:
        ValueError: for a model of which nothing could run in FP8, or a string of ``filter_fqns`` or ``linear_fqns``
            without a match.
    """
    if not (layers or ffns or config.linear_fqns):
        raise ValueError(
            "fp8_flow_moe: the model has no MoE layer and no dense FFN; name linears in fp8_flow_moe.linear_fqns, or "
            "remove what converts it: the converter, with_fp8_flow or --module titan_fp8moe.torchtitan03"
        )
    filtered = preflight.matching([*layers, *ffns], config.filter_fqns, setting="fp8_flow_moe.filter_fqns")
    plan = []
    for name, layer in layers.items():
        reason = "fp8_flow_moe.filter_fqns" if name in filtered else None
        if reason is None:
            check_layer(name, layer)
        plan.append(Part(name, MOE, layer, reason))
    for name, ffn in ffns.items():
        reason = "fp8_flow_moe.filter_fqns" if name in filtered else why_not_ffn(ffn)
        plan.append(Part(name, name.split(".")[-1], ffn, reason))
    others = tuple(f"{part.name}." for part in plan)
    outside = [name for name in linears if not name.startswith(others)]
    for name in preflight.matching(outside, config.linear_fqns, setting="fp8_flow_moe.linear_fqns"):
        check_linear(name, linears[name])
        plan.append(Part(name, LINEAR, linears[name], None))
    return plan


announced: list[str] = []
"""The lines that the last conversion has logged, for a dry run."""


def announce(plan: list[Part], config: Fp8FlowMoEConfig, logger: logging.Logger, *ways: str) -> None:
    """Logs how many modules of each kind are in FP8 and why the others are not, the implementation that runs them, and
    ``ways`` of the adapter. Checks the hardware.

    Raises:
        ValueError, RuntimeError: of :func:`titan_fp8moe.trainer.preflight.check_hardware`.
    """
    converts = any(part.reason is None for part in plan)
    backend = preflight.check_hardware() if converts else "nothing to convert"
    announced[:] = _describe(plan, "; ".join((backend, *filter(None, ways), config.describe())))
    for line in announced:
        logger.info(f"FP8-Flow-MoE: {line}")


def _describe(plan: list[Part], details: str) -> Iterator[str]:
    counts = [(kind, sum(part.reason is None for part in plan if part.kind == kind)) for kind in KINDS]
    yield f"{', '.join(f'{n} {KINDS[kind]}' for kind, n in counts)} in FP8; {details}"
    reasons: dict[str, list[str]] = {}
    for part in plan:
        if part.reason is not None:
            reasons.setdefault(part.reason, []).append(part.name)
    for reason, names in reasons.items():
        yield f"not in FP8: {', '.join(names)}: {reason}"
