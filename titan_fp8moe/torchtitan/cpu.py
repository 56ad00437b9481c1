"""Train with torchtitan 0.2.2 on CPUs over gloo: for tests, debugging and stepping through the code.

torchtitan assumes an accelerator in a handful of places, and :func:`enable_cpu_training` replaces exactly these. Data,
tensor, pipeline and expert parallelism, activation checkpointing, compile and checkpoints then work unchanged. These do
not work on a CPU: DualPipeV with its overlap, context parallelism, ``profiling.enable_profiling`` and
``enable_memory_snapshot``, ``training.gc_debug``, ``checkpoint.async_mode = "async_with_pinned_mem"``, and
``training.enable_cpu_offload`` in torchtitan's own trainer, which initializes gloo twice.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torchtitan.models import attention
from torchtitan.models.llama3.infra import parallelize as _llama3  # noqa: F401  use_cpu changes what is loaded
from torchtitan.models.moe import kernels as _kernels  # noqa: F401

from titan_fp8moe import patches
from titan_fp8moe.trainer.cpu import dense_attention, rebind, replace_flex_attention, use_cpu


def enable_cpu_training() -> None:
    """Make torchtitan use the CPU and gloo. Call before the ``Trainer`` is built.

    Raises:
        RuntimeError: the machine has an NVIDIA GPU that PyTorch does not find, and nobody has hidden it.
    """
    use_cpu()
    # The router counts tokens with torch.histc, which has no integer kernel on the CPU.
    patches.wrap(torch, "histc", _histc_with_integers, checked_on="torch 2.11.0, 2.13.0")
    # Expert parallelism orders tokens with a Triton kernel. torchtitan has a CPU version of it but never selects it.
    rebind("generate_permute_indices", lambda original: functools.partial(original, use_cpu=True))
    replace_flex_attention(attention, attention.FlexAttentionWrapper, _dense_attention)
    # Offloaded parameters would be in pinned memory, which needs an accelerator.
    rebind("CPUOffloadPolicy", lambda original: functools.partial(original, pin_memory=False))


def _dense_attention(
    q: Tensor, k: Tensor, v: Tensor, *, block_mask: Any, scale: float, enable_gqa: bool, return_lse: bool
) -> Any:
    out, lse = dense_attention(q, k, v, block_mask, scale, enable_gqa, return_lse)
    return (out, lse) if return_lse else out


def _histc_with_integers(float_histc: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``torch.histc`` that also takes integers on the CPU and, as on CUDA, returns their dtype."""

    def histc(input: Tensor, bins: int = 100, min: int = 0, max: int = 0, **kwargs: Any) -> Tensor:
        if input.device.type != "cpu" or input.is_floating_point():
            return float_histc(input, bins, min, max, **kwargs)
        return float_histc(input.float(), bins, min, max).to(input.dtype)

    return histc
