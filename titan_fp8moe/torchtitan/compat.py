"""Corrections to PyTorch 2.11 to 2.13 that torchtitan 0.2.2 needs on every device."""

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.utils.checkpoint
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.pipelining import PipelineStage
from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode_temporarily

from titan_fp8moe import statistics

_SELECTIVE_MODES = (torch.utils.checkpoint._CachingTorchDispatchMode, torch.utils.checkpoint._CachedTorchDispatchMode)


@functools.cache
def fix_selective_checkpointing() -> None:
    """Make per-op activation checkpointing work with expert parallelism. Calling again does nothing.

    torchtitan makes the routed experts an FSDP module of their own inside the checkpointed block. Selective
    checkpointing matches forward and recomputation call by call, but the experts' all-gather is prefetched outside the
    block in the forward and issued inside it in the recomputation, so the backward fails: "encountered during backward
    but not found in storage". Here it ignores the profiler's ranges and sees nothing of what FSDP does to unshard; none
    of it is an activation.
    """
    for name in ("_record_function_enter", "_record_function_enter_new", "_record_function_exit"):
        op = getattr(torch.ops.profiler, name)
        torch.utils.checkpoint.SAC_IGNORED_OPS.update(getattr(op, overload) for overload in op.overloads())

    def unseen(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if isinstance(_get_current_dispatch_mode(), _SELECTIVE_MODES):
                with _pop_mode_temporarily():
                    return method(*args, **kwargs)
            return method(*args, **kwargs)

        return wrapper

    FSDPParamGroup.unshard = unseen(FSDPParamGroup.unshard)
    FSDPParamGroup.wait_for_unshard = unseen(FSDPParamGroup.wait_for_unshard)


@contextmanager
def kept_token_counts(modules: Iterable[nn.Module]) -> Iterator[None]:
    """What runs in this context does not count for the load balancing of these modules' routers."""
    counts = [b for m in modules for name, b in m.named_buffers() if name.endswith("tokens_per_expert")]
    saved = [count.clone() for count in counts]
    try:
        yield
    finally:
        for count, value in zip(counts, saved, strict=True):
            count.copy_(value)


@functools.cache
def fix_pipeline_counts() -> None:
    """Keep made-up tokens out of the routers' load balancing and the statistics. Calling again does nothing.

    Before the first step, and again after each validation, PyTorch 2.12 and 2.13 run each pipeline stage forward and
    backward on uninitialized tensors to learn shapes, and the backward runs a checkpointed block's forward again. The
    MoE layers take what they see for tokens, and the next optimizer step moves expert_bias by them. (2.11 runs the
    forward only, without gradients, where converted layers do not count.)
    """

    def keeping_counts(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def wrapper(self: PipelineStage, *args: Any, **kwargs: Any) -> Any:
            with statistics.paused(), kept_token_counts([self.submod]):
                return method(self, *args, **kwargs)

        return wrapper

    for name in ("_forward_metadata_inference", "_backward_metadata_inference"):
        if hasattr(PipelineStage, name):
            setattr(PipelineStage, name, keeping_counts(getattr(PipelineStage, name)))
