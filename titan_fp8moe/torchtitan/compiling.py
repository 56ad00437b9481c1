"""Compiles a converted block as one graph, or as one graph up to its experts where these must run eagerly.

torchtitan 0.2.2 compiles a MoE block by submodules and leaves the experts out, because FSDP's hooks on the experts and
the token exchange break graphs. A converted block without expert parallelism has neither: its routed experts are one
op. With either, the experts stay eager, and all that precedes them is one graph. :func:`install` makes torchtitan's
``apply_compile`` compile blocks in these ways.
"""

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torchtitan.config.job_config import Compile
from torchtitan.models.deepseek_v3.model.model import TransformerBlock as DeepSeekV3Block
from torchtitan.models.llama4.model.model import TransformerBlock as Llama4Block
from torchtitan.models.qwen3.model.model import TransformerBlock as Qwen3Block
from torchtitan.tools.logging import logger

from titan_fp8moe.torchtitan.modules import Fp8FlowMoE

# Per code object, which dense and MoE blocks share: both with and without gradients, for a first batch size, for any
# other and for 1 are 12 graphs. PyTorch's limit of 8 would end the job.
_RECOMPILE_LIMIT = 32

# Blocks that are x + attention(attention_norm(x)), then x + moe(ffn_norm(x)).
_KNOWN_BLOCKS = (DeepSeekV3Block, Llama4Block, Qwen3Block)


def why_eager(moe: Fp8FlowMoE) -> str | None:
    """The reason why this layer's experts cannot be part of a graph, or None if they can."""
    experts = moe.experts
    if experts.ep_mesh is not None:
        return "expert parallelism reads split sizes on the host"
    if experts.config.cache_weights:
        return "fp8_flow_moe.cache_weights"
    if experts.config.fp8_all_gather:
        return "fp8_flow_moe.fp8_all_gather"
    if experts.config.statistics_every:
        return "fp8_flow_moe.statistics_every"
    if torch._functorch.config.activation_memory_budget < 1:
        # The partitioner takes ops that it does not know for free, and would recompute the experts first of all.
        return "activation_checkpoint.mode = memory_budget"
    return None


def why_submodules(block: nn.Module) -> str | None:
    """The reason why this MoE block compiles as torchtitan does it, or None if it is one graph up to its experts."""
    moe: Any = block.moe
    if not isinstance(moe, Fp8FlowMoE):
        return "not converted"
    if moe.experts.tp_mesh is not None or getattr(moe.reorderer, "tp_mesh", None) is not None:
        return "tensor parallelism"
    if why_eager(moe) is not None and type(block) not in _KNOWN_BLOCKS:
        return f"{why_eager(moe)}, in a {type(block).__name__} that is not torchtitan's"
    return None


def _before_experts(block: Any, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """A known block up to its experts: their addend, and their arguments."""
    x = x + block.attention(block.attention_norm(x), *args, **kwargs)
    return x, block.moe.route(block.ffn_norm(x))


def _forward(before: Callable, block: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """A known block, with ``before`` in the place of :func:`_before_experts`."""
    x, routed = before(block, x, *args, **kwargs)
    return x + block.moe.run_experts(*routed).view(x.shape)


def _compile_before_experts(block: Any, backend: str) -> None:
    compiled = functools.partial(torch.compile, backend=backend, fullgraph=True)
    # An attribute, no wrapper: the block's names stay, and FSDP's hooks run outside the graph. A partial is copied with
    # the block, a closure would call the original.
    block.forward = functools.partial(_forward, compiled(_before_experts), block)
    if block.moe.shared_experts is not None and not block.moe.fp8_shared:
        block.moe.shared_experts = compiled(block.moe.shared_experts)


def _by_blocks(apply_compile: Callable[..., None]) -> Callable[..., None]:
    """torchtitan's ``apply_compile``, preceded by the compilation of converted blocks."""

    @functools.wraps(apply_compile)
    def wrapper(model: Any, compile_config: Compile, ep_enabled: bool) -> None:
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _RECOMPILE_LIMIT)
        layers, ways = nn.ModuleDict(), {}
        for name, layer in model.layers.named_children():
            block = layer._checkpoint_wrapped_module if isinstance(layer, CheckpointWrapper) else layer
            if not block.moe_enabled:
                way = "dense blocks {} compile as one graph each"
                layers[name] = layer
            elif (reason := why_submodules(block)) is not None:
                way = f"MoE blocks {{}} compile by submodules: {reason}"
                layers[name] = layer
            elif (reason := why_eager(block.moe)) is not None:
                way = f"MoE blocks {{}} compile as one graph up to the experts: {reason}"
                _compile_before_experts(block, compile_config.backend)
            else:
                way = "MoE blocks {} compile as one graph each"
                layer = torch.compile(layer, backend=compile_config.backend, fullgraph=True)
                model.layers.register_module(name, layer)
            ways.setdefault(way, []).append(name)
        apply_compile(SimpleNamespace(layers=layers), compile_config, ep_enabled)
        for name, layer in layers.named_children():
            model.layers.register_module(name, layer)
        for way, names in ways.items():
            logger.info(f"FP8-Flow-MoE: {way.format(', '.join(names))}")

    return wrapper


def install(module: Any) -> None:
    """Replaces ``apply_compile`` in one of torchtitan's ``parallelize`` modules. Calling again does nothing."""
    if not hasattr(module.apply_compile, "__wrapped__"):
        module.apply_compile = _by_blocks(module.apply_compile)
