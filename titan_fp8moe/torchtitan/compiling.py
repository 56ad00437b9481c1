"""Compiles a converted block as one graph wherever nothing in it waits for the host.

torchtitan 0.2.2 compiles a MoE block by submodules and leaves the experts out, because FSDP's hooks on the experts and
the token exchange break graphs. A converted block without expert parallelism has neither: its routed experts are one
op. :func:`install` makes torchtitan's ``apply_compile`` compile such blocks whole.
"""

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torchtitan.config.job_config import Compile
from torchtitan.tools.logging import logger

from titan_fp8moe.torchtitan.modules import Fp8FlowMoE


def why_not_one_graph(moe: nn.Module) -> str | None:
    """The reason why this block's MoE layer cannot be part of a graph, or None if it can."""
    if not isinstance(moe, Fp8FlowMoE):
        return "not converted"
    experts = moe.experts
    if experts.ep_mesh is not None:
        return "expert parallelism reads split sizes on the host"
    if experts.tp_mesh is not None or getattr(moe.reorderer, "tp_mesh", None) is not None:
        return "tensor parallelism"
    if experts.config.cache_weights:
        return "fp8_flow_moe.cache_weights"
    if experts.config.fp8_all_gather:
        return "fp8_flow_moe.fp8_all_gather"
    if experts.config.statistics_every:
        return "fp8_flow_moe.statistics_every"
    return None


def _whole_blocks(apply_compile: Callable[..., None]) -> Callable[..., None]:
    """torchtitan's ``apply_compile``, preceded by the compilation of whole blocks."""

    @functools.wraps(apply_compile)
    def wrapper(model: Any, compile_config: Compile, ep_enabled: bool) -> None:
        layers, reasons = nn.ModuleDict(), {}
        for name, block in model.layers.named_children():
            reason = why_not_one_graph(block.moe) if block.moe_enabled else "dense"
            if reason is None:
                block = torch.compile(block, backend=compile_config.backend, fullgraph=True)
                model.layers.register_module(name, block)
            else:
                layers[name] = block
            reasons.setdefault(reason, []).append(name)
        apply_compile(SimpleNamespace(layers=layers), compile_config, ep_enabled)
        for name, block in layers.named_children():
            model.layers.register_module(name, block)
        for reason, names in reasons.items():
            if reason is None:
                logger.info(f"FP8-Flow-MoE: MoE blocks {', '.join(names)} compile as one graph each")
            elif reason != "dense":
                logger.info(f"FP8-Flow-MoE: MoE blocks {', '.join(names)} compile by submodules: {reason}")

    return wrapper


def install(module: Any) -> None:
    """Replaces ``apply_compile`` in one of torchtitan's ``parallelize`` modules. Calling again does nothing."""
    if not hasattr(module.apply_compile, "__wrapped__"):
        module.apply_compile = _whole_blocks(module.apply_compile)
