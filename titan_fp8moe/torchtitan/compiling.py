"""Compiles a converted block as one graph, or as one graph up to its FFN where that must run eagerly.

torchtitan 0.2.2 compiles a MoE block by submodules and leaves the experts out, because FSDP's hooks on the experts and
the token exchange break graphs. A converted block has neither without expert parallelism, nor where its ranks dispatch
over symmetric memory and FSDP leaves the experts alone: its routed experts are one op. With either, the experts stay
eager, and all that precedes them is one graph. So is what precedes a dense FFN that looks at its weights outside of
graphs. :func:`install` makes torchtitan's ``apply_compile`` compile blocks in these ways.
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
from torchtitan.models.llama3.model.model import TransformerBlock as Llama3Block
from torchtitan.models.llama4.model.model import TransformerBlock as Llama4Block
from torchtitan.models.qwen3.model.model import TransformerBlock as Qwen3Block
from torchtitan.tools.logging import logger

from titan_fp8moe import patches
from titan_fp8moe.config import Fp8FlowMoEConfig
from titan_fp8moe.dispatch import auto
from titan_fp8moe.torchtitan.modules import Fp8FlowFeedForward, Fp8FlowMoE
from titan_fp8moe.trainer import compat

# Blocks that are x + attention(attention_norm(x)), then x + FFN(ffn_norm(x)), the FFN being moe or feed_forward.
_KNOWN_BLOCKS = (DeepSeekV3Block, Llama3Block, Llama4Block, Qwen3Block)


def _has_moe(block: Any) -> bool:
    return getattr(block, "moe_enabled", False)  # llama3's blocks do not say


def why_eager(block: Any, syncs_host: bool | None = None) -> str | None:
    """The reason why this block's converted FFN cannot be part of a graph, or None if it can. ``syncs_host``: whether
    its dispatch does; by default as now."""
    if not _has_moe(block):
        ffn = getattr(block, "feed_forward", None)  # other models' blocks have other names
        return _why_settings_need_eager(ffn.config) if isinstance(ffn, Fp8FlowFeedForward) else None
    experts = block.moe.experts
    if experts.ep_mesh is not None and (experts.config.backend.syncs_host if syncs_host is None else syncs_host):
        return "expert parallelism reads split sizes on the host"
    if experts.ep_mesh is not None and experts.in_fsdp:
        return "FSDP's hooks on the experts"
    if experts.config.fp8_all_gather:
        return "fp8_flow_moe.fp8_all_gather"
    return _why_settings_need_eager(experts.config)


def _why_settings_need_eager(config: Fp8FlowMoEConfig) -> str | None:
    if config.statistics_every:
        return "fp8_flow_moe.statistics_every"
    if torch._functorch.config.activation_memory_budget < 1:
        # The partitioner takes ops that it does not know for free, and would recompute the FFN first of all.
        return "activation_checkpoint.mode = memory_budget"
    return None


def why_submodules(block: Any) -> str | None:
    """The reason why this block compiles as torchtitan does it, or None if it is one graph, or one up to its FFN."""
    if _has_moe(block):
        if not isinstance(getattr(block, "moe", None), Fp8FlowMoE):
            return "not converted"
        if block.moe.experts.tp_mesh is not None or getattr(block.moe.reorderer, "tp_mesh", None) is not None:
            return "tensor parallelism"
    if (reason := why_eager(block)) is not None and type(block) not in _KNOWN_BLOCKS:
        return f"{reason}, in a {type(block).__name__} that is not torchtitan's"
    return None


def _before_ffn(block: Any, x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
    """A known block up to its FFN: its addend, and its arguments."""
    x = x + block.attention(block.attention_norm(x), *args, **kwargs)
    h = block.ffn_norm(x)
    return x, block.moe.route(h) if _has_moe(block) else (h,)


def _forward(before: Callable, block: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """A known block, with ``before`` in the place of :func:`_before_ffn`."""
    x, inputs = before(block, x, *args, **kwargs)
    run = block.moe.run_experts if _has_moe(block) else block.feed_forward
    return x + run(*inputs).view(x.shape)


def _compile_before_ffn(block: Any, compiled: Callable) -> None:
    # An attribute, no wrapper: the block's names stay, and FSDP's hooks run outside the graph. A partial is copied with
    # the block, a closure would call the original.
    block.forward = functools.partial(_forward, compiled(_before_ffn), block)
    if _has_moe(block) and block.moe.shared_experts is not None and not block.moe.fp8_shared:
        block.moe.shared_experts = compiled(block.moe.shared_experts)


def _takes_turns(block: Any) -> bool:
    """Whether this block's dispatch may go over to symmetric memory, with which it is one graph."""
    if not (_has_moe(block) and auto.is_enabled() and type(block) in _KNOWN_BLOCKS):
        return False
    experts = block.moe.experts
    return experts.ep_mesh is not None and experts.config.dispatch == "auto" and why_eager(block, False) is None


def _take_turns(layer: Any, block: Any, compiled: Callable) -> None:
    """Lets a block that :func:`_compile_before_ffn` has compiled, or its checkpoint wrapper, also run as one graph. All
    blocks share it: a graph that looked at ``block.forward``, which each has of its own, would be compiled for each."""
    if layer is block:
        whole = functools.partial(compiled(type(block).forward), block)
    else:
        whole = functools.partial(compiled(compat.checkpointed), layer.checkpoint_fn, type(block).forward, block)
    layer.forward = functools.partial(_turn, whole, layer.forward)


def _turn(over_symmetric: Callable, over_all_to_all: Callable, *args: Any, **kwargs: Any) -> Any:
    forward = over_symmetric if auto.is_fast() and torch.is_grad_enabled() else over_all_to_all
    return forward(*args, **kwargs)


def _by_blocks(apply_compile: Callable[..., None]) -> Callable[..., None]:
    """torchtitan's ``apply_compile``, preceded by the compilation of converted blocks."""

    @functools.wraps(apply_compile)
    def wrapper(model: Any, compile_config: Compile, *args: Any, **kwargs: Any) -> None:
        compat.raise_recompile_limit()
        compiled = functools.partial(torch.compile, backend=compile_config.backend, fullgraph=True)
        layers, ways = nn.ModuleDict(), {}
        for name, layer in model.layers.named_children():
            block = layer._checkpoint_wrapped_module if isinstance(layer, CheckpointWrapper) else layer
            kind = "MoE" if _has_moe(block) else "dense"
            if (reason := why_submodules(block)) is not None:
                how = "compile by submodules" if kind == "MoE" else "stay eager"
                way = f"{kind} blocks {{}} {how}: {reason}"
                layers[name] = layer  # of MoE blocks torchtitan compiles parts in place
            elif (reason := why_eager(block)) is not None:
                way = f"{kind} blocks {{}} compile as one graph up to the FFN: {reason}"
                _compile_before_ffn(block, compiled)
                if _takes_turns(block):
                    way += "; and as one graph each, once that is over symmetric memory"
                    _take_turns(layer, block, compiled)
            else:
                way = f"{kind} blocks {{}} compile as one graph each"
                model.layers.register_module(name, compiled(layer))
            ways.setdefault(way, []).append(name)
        apply_compile(SimpleNamespace(layers=layers), compile_config, *args, **kwargs)
        for way, names in ways.items():
            logger.info(f"FP8-Flow-MoE: {way.format(', '.join(names))}")

    return wrapper


def install(module: Any) -> None:
    """Replaces ``apply_compile`` in one of torchtitan's ``parallelize`` modules."""
    patches.wrap(module, "apply_compile", _by_blocks, checked_on="torchtitan 0.2.2")
