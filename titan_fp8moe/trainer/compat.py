"""Corrections to PyTorch 2.11 to 2.15 that torchtitan needs on every device.

They reach into PyTorch's private interfaces, all listed here. A correction that misses one of its interfaces raises
RuntimeError when it is installed. Installed again it does nothing.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast
from unittest import mock

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from titan_fp8moe import dispatch, patches
from titan_fp8moe.layer import statistics

_CHECKED_ON = "torch 2.11.0, 2.12.1, 2.13.0, 2.14.1, 2.15.0"
# Per code object, which all blocks share. Both with and without gradients, for a first batch size, for any other and
# for 1 are 12 graphs of two kinds of blocks. dispatch = "auto" adds one of each for every size of its buffers.
_RECOMPILE_LIMIT = 32
# Private interfaces of PyTorch: modules or classes, and their attributes, or both as module:attribute.
_CHECKPOINT = "torch.utils.checkpoint"
_SELECTIVE_MODES, _IGNORED_OPS = ("_CachingTorchDispatchMode", "_CachedTorchDispatchMode"), "SAC_IGNORED_OPS"
_PROFILER_OPS = "_record_function_enter", "_record_function_enter_new", "_record_function_exit"  # of ops.profiler
_CURRENT_MODE = "torch.utils._python_dispatch:_get_current_dispatch_mode"
_WITHOUT_MODE = "torch.utils._python_dispatch:_pop_mode_temporarily"
_PARAM_GROUP = "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup"
_UNSHARD = "unshard", "wait_for_unshard"
_TAGS = "torch._higher_order_ops.wrap:TagActivationCheckpoint"  # 2.11.0's has tag_nodes, 2.13.0's has not
_STAGE = "torch.distributed.pipelining:PipelineStage"
_METADATA_INFERENCE = "_forward_metadata_inference", "_backward_metadata_inference"  # of 2.12.1 to 2.15.0
_SHAPE_INFERENCE = ("_shape_inference",)  # of 2.11.0
# Of the state of an FSDP module, torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState.
_HOOK_HANDLES = ("_pre_forward_hook_handle", "_post_forward_hook_handle")
_GROUPS = "_fsdp_param_groups"  # of 2.14.1 and 2.15.0; a group has fsdp_params, each with a sharded_param


def _resolve(interface: str) -> Any:
    return patches.resolve(interface, _CHECKED_ON)


def _wrap(owner: str, names: tuple[str, ...], wrapper: Callable[[Any], Any]) -> None:
    for name in names:
        patches.wrap(owner, name, wrapper, checked_on=_CHECKED_ON)


def fix_selective_checkpointing() -> None:
    """Make per-op activation checkpointing work with expert parallelism.

    torchtitan makes the routed experts an FSDP module of their own inside the checkpointed block. Selective
    checkpointing matches the ops of the forward and of the recomputation one by one. But FSDP prefetches the experts'
    all-gather outside the block in the forward, and issues it inside the block in the recomputation. The backward then
    fails: "encountered during backward but not found in storage", on PyTorch 2.13 to 2.15 where a MoE layer stays bf16.
    With this correction selective checkpointing ignores the profiler's ranges, and does not see the ops with which FSDP
    unshards. None of them makes an activation.
    """
    modes = tuple(_resolve(f"{_CHECKPOINT}:{mode}") for mode in _SELECTIVE_MODES)
    current_mode, without_mode = _resolve(_CURRENT_MODE), _resolve(_WITHOUT_MODE)
    packets = [_resolve(f"torch:ops.profiler.{name}") for name in _PROFILER_OPS]
    profiler_ops = {getattr(op, name) for op in packets for name in op.overloads()}

    def unseen(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if isinstance(current_mode(), modes):
                with without_mode():
                    return method(*args, **kwargs)
            return method(*args, **kwargs)

        return wrapper

    _wrap(_PARAM_GROUP, _UNSHARD, unseen)
    patches.wrap(_CHECKPOINT, _IGNORED_OPS, lambda ops: ops | profiler_ops, checked_on=_CHECKED_ON)


def fix_full_checkpointing() -> None:
    """Make compiled blocks recompute the FP8 layer under full checkpointing.

    PyTorch 2.11 tags a checkpointed block's ops for recomputation in its outermost graph only. An autograd.Function's
    forward is a graph inside that one, and everything that it saves was kept. Newer versions tag what runs.
    """

    def tagging(original: Callable[[Any, bool], Any]) -> Any:
        def tag_nodes(gmod: Any, is_sac: bool) -> Any:
            for node in original(gmod, is_sac).graph.nodes:
                if node.target is torch.ops.higher_order.autograd_function_apply and not is_sac:
                    for inner in getattr(gmod, node.args[0].target).graph.nodes:  # the forward's, no backward's
                        inner.meta.update(recompute=node.meta["recompute"], ac_graph_id=node.meta["ac_graph_id"])
            return gmod

        return staticmethod(tag_nodes)

    if hasattr(_resolve(_TAGS), "tag_nodes"):
        patches.wrap(_TAGS, "tag_nodes", tagging, checked_on="torch 2.11.0")


def checkpointed(checkpoint: Callable, function: Callable, *args: Any, **kwargs: Any) -> Any:
    """A frame around a checkpoint, which torch.compile needs: PyTorch's own frames it skips."""
    return checkpoint(function, *args, **kwargs)


def raise_recompile_limit() -> None:
    """Lets PyTorch compile blocks for all that they differ in. Its limit of 8 would end the job."""
    limit = max(torch._dynamo.config.recompile_limit, _RECOMPILE_LIMIT)
    patches.put(torch._dynamo.config, "recompile_limit", limit, checked_on=_CHECKED_ON)


@contextmanager
def kept_buffers(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Restores these modules' buffers at the end, the routers' token counts among them, and their NaN flags."""
    parts: list[Any] = [part for module in modules for part in module.modules()]
    flags = [part.nan_flags for part in parts if getattr(part, "nan_flags", None) is not None]
    buffers = [buffer for module in modules for buffer in module.buffers()]
    # Of a DTensor its local part: nothing here may communicate, since stages have different buffers.
    buffers = [buffer._local_tensor if isinstance(buffer, DTensor) else buffer for buffer in buffers]
    saved = [(tensor.data, tensor.clone()) for tensor in (*flags, *buffers)]
    try:
        yield
    finally:
        for tensor, value in saved:  # .data: autograd may have saved a buffer, and would object to a new version
            tensor.copy_(value)


def fix_shape_inference() -> None:
    """Let pipeline stages infer shapes without a trace.

    To learn shapes, each stage runs on zeros (PyTorch 2.11) or uninitialized memory, before the first step and after
    each validation. PyTorch 2.12 to 2.15 run the backward too, which repeats the forward of a checkpointed block. The
    MoE layers would count these rows as tokens, by which the next optimizer step moves expert_bias. They would find
    NaNs, and their router would send equal rows to one rank, which may have no room for all of them.
    """

    def without_a_trace(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
            with statistics.paused(), dispatch.evenly(), kept_buffers([self.submod]):
                return method(self, *args, **kwargs)

        return wrapper

    _wrap(_STAGE, _SHAPE_INFERENCE if torch.__version__ < "2.12" else _METADATA_INFERENCE, without_a_trace)


@contextmanager
def uncompiled(model_parts: Iterable[nn.Module]) -> Iterator[None]:
    """Calls modules eagerly that ``Module.compile`` has compiled."""
    with ExitStack() as stack:
        for module in [m for part in model_parts for m in part.modules() if m._compiled_call_impl is not None]:
            stack.enter_context(mock.patch.object(module, "_compiled_call_impl", None))
        yield


def remove_fsdp_hooks(module: nn.Module) -> None:
    """Ends FSDP's work around the calls of a module none of whose parameters it manages."""
    for name in _HOOK_HANDLES:
        getattr(cast(Any, module)._get_fsdp_state(), name).remove()


def leave_fsdp(module: nn.Module, params: list[nn.Parameter]) -> None:
    """Ends FSDP's work on some sharded parameters of ``module``, right after ``fully_shard``. They stay DTensors.

    Raises:
        RuntimeError: FSDP does not manage all of them.
    """
    groups: list[Any] = getattr(cast(Any, module)._get_fsdp_state(), _GROUPS)
    leaving, left = {id(param) for param in params}, 0
    for group in groups:
        stay = [p for p in group.fsdp_params if id(p.sharded_param) not in leaving]
        left += len(group.fsdp_params) - len(stay)
        group.fsdp_params = stay
    if left != len(leaving):
        raise RuntimeError(f"FSDP of PyTorch {torch.__version__} manages other parameters than 2.14's and 2.15's")
    groups[:] = [group for group in groups if group.fsdp_params]
