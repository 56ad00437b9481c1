"""Compiles a block as one graph up to its routed experts where their all-to-all reads split sizes on the host.

torchtitan 0.3.0 compiles each block whole, around its checkpoint. Experts that sync with the host would break the graph
into pieces. PyTorch 2.14 runs a checkpointed block with pieces eagerly, and per-op checkpointing around compiled pieces
fails: it wants the very same ops again. So per-op checkpointing moves into the graph before the experts, and into that
of shared experts. The routed experts run outside of it and keep by themselves what the policy would keep. Full
checkpointing matches no ops and stays around the block. While ``dispatch = "auto"`` takes symmetric memory, a block is
one graph with its checkpoint. Under a memory budget experts always run outside of the graph.
"""

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

from titan_fp8moe.dispatch import auto
from titan_fp8moe.layer import statistics
from titan_fp8moe.torchtitan03.names import logger
from titan_fp8moe.trainer import compat


def _attention(block: Any, x: Tensor, mask: Any, positions: Tensor | None) -> Tensor:
    return block.attention(x, mask, positions)


def _qwen3_5_attention(block: Any, x: Tensor, mask: Any, positions: Tensor | None) -> Tensor:
    return block.attn(x, *((mask, positions) if block.full_attn else (mask,)))


# Blocks that are x + attention, then x + moe(ffn_norm(x)). By name: qwen3_5 imports packages that others do without.
_ATTENTION = {
    "torchtitan.models.deepseek_v3.model.DeepSeekV3TransformerBlock": _attention,  # kimi_k2_7's too
    "torchtitan.models.qwen3.model.Qwen3TransformerBlock": _attention,
    "torchtitan.models.gpt_oss.model.GptOssTransformerBlock": _attention,
    "torchtitan.models.qwen3_5.model.Qwen35TransformerBlock": _qwen3_5_attention,
}


def _without_checkpoint(function: Callable, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def _attend(
    attention: Callable, block: Any, x: Tensor, masks: Any, positions: Tensor | None = None
) -> tuple[Tensor, ...]:
    """A known block up to its MoE layer: the layer's addend and input."""
    mask = masks[block.attn_mask_key] if isinstance(masks, dict) else masks
    x = x + attention(block, block.attention_norm(x), mask, positions)
    return x, block.ffn_norm(x)


def _attend_and_route(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    """:func:`_attend`, and the router's results."""
    _, block, *_ = args
    x, h = _attend(*args, **kwargs)
    return x, h, *block.moe.route(h)


def has_memory_budget() -> bool:
    """Whether torchtitan has set one for the process. The partitioner takes ops that it does not know for free, and
    would repeat experts in a graph first of all; PyTorch 2.14's fails on their script objects."""
    return torch._functorch.config.activation_memory_budget < 1


def _forward(compiled: Callable, checkpoint: Callable, attention: Callable, block: Any, *args: Any, **kwargs: Any):
    """A known block, with ``compiled`` in the place of :func:`compat.checkpointed`."""
    before = compat.checkpointed if statistics.collecting() else compiled  # a graph counts nothing
    replays = hasattr(block.moe.forward, "replays")  # inside of the layer's forward, on the router
    whole = auto.is_fast() and not has_memory_budget() and _has_shared_experts_inside(block.moe)
    if whole and torch.is_grad_enabled() and not replays:
        return before(checkpoint, type(block).forward, block, *args, **kwargs)
    start = _attend if replays else _attend_and_route
    x, h, *routing = before(checkpoint, start, attention, block, *args, **kwargs)
    return x + block.moe(h, routing=routing)


def _placed(forward: Callable, block: Any, *args: Any, **kwargs: Any) -> Any:
    """Qwen3.5's blocks place their inputs on tensor-parallel ranks, in the forward that ``Module.parallelize`` gave
    them."""
    args, kwargs = block._redistribute_inputs(block.moe.parallel_dims, args, kwargs)
    return block._redistribute_outputs(block.moe.parallel_dims, forward(*args, **kwargs))


def _has_shared_experts_inside(moe: Any) -> bool:
    """Others are graphs of their own."""
    return moe.shared_experts is None or moe.fp8_shared


def compile_before_experts(layer: nn.Module, **options: Any) -> bool:
    """Compiles a block whose experts break graphs, or its checkpoint wrapper, in place.

    Its modules, their names and the hooks on them stay. ``options`` are those of ``torch.compile``.

    Returns:
        False, after a warning, if its class is not known. Nothing is changed then.
    """
    wrapper = cast(Any, layer) if isinstance(layer, CheckpointWrapper) else None
    block: Any = layer if wrapper is None else wrapper._checkpoint_wrapped_module
    name = f"{type(block).__module__}.{type(block).__qualname__}"
    if name not in _ATTENTION:
        _warn_of_pieces(name)
        return False
    compat.raise_recompile_limit()
    checkpoint = _without_checkpoint
    if wrapper is not None and "context_fn" in wrapper.checkpoint_fn.keywords:  # per-op
        checkpoint, wrapper.checkpoint_fn = wrapper.checkpoint_fn, checkpoint
        wrapper.checkpoint_impl = None  # else torchtitan halves the experts' counts, which a graph adds up once
    # An attribute, no wrapper: the block's names stay, and FSDP's hooks run outside the graph.
    compiled = torch.compile(compat.checkpointed, **options)
    forward = functools.partial(_forward, compiled, checkpoint, _ATTENTION[name], block)
    placed = block._parallelized and block._sharding_config is not None
    block.forward = functools.partial(_placed, forward, block) if placed else forward
    shared = block.moe.shared_experts
    if not _has_shared_experts_inside(block.moe):
        shared.forward = functools.partial(compat.checkpointed, checkpoint, shared.forward)
        shared.compile(**options)
    return True


@functools.cache
def _warn_of_pieces(name: str) -> None:
    logger.warning(
        f"FP8-Flow-MoE: fp8_flow_moe does not know {name}, whose graph the all-to-all breaks: it compiles in pieces, "
        "and runs eagerly where it is checkpointed. Choose activation-checkpoint:none, or "
        'fp8_flow_moe.dispatch = "symmetric"'
    )
