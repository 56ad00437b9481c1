"""Train with torchtitan 0.2.2 on CPUs over gloo: for tests, debugging and stepping through the code.

torchtitan assumes an accelerator in a handful of places, and :func:`enable_cpu_training` replaces exactly these. Data,
tensor, pipeline and expert parallelism, activation checkpointing, compile and checkpoints then work unchanged. These do
not work on a CPU: DualPipeV, context parallelism, ``profiling.enable_profiling``, and ``training.enable_cpu_offload``
in torchtitan's own trainer, which initializes gloo twice.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import CPUOffloadPolicy
from torchtitan.models import attention
from torchtitan.models.llama3.infra import parallelize as llama3_parallelize
from torchtitan.models.moe import kernels

from titan_fp8moe.trainer.cpu import (
    create_block_mask_on_cpu,
    dense_attention,
    disable_gradient_division,
    rebind,
    use_cpu,
)


@functools.cache
def enable_cpu_training() -> None:
    """Make torchtitan use the CPU and gloo. Call before the ``Trainer`` is built; calling again does nothing.

    Raises:
        RuntimeError: the machine has an NVIDIA GPU that PyTorch does not find, and nobody has hidden it.
    """
    use_cpu()
    # The router counts tokens with torch.histc, which has no integer kernel on the CPU.
    torch.histc = _histc_with_integers(torch.histc)
    # Expert parallelism orders tokens with a Triton kernel. torchtitan has a CPU version of it but never selects it.
    rebind("generate_permute_indices", functools.partial(kernels.generate_permute_indices, use_cpu=True))
    disable_division = llama3_parallelize.disable_fsdp_gradient_division
    rebind("disable_fsdp_gradient_division", functools.partial(disable_gradient_division, disable_division))
    attention.FlexAttentionWrapper._compiled_flex_attn = staticmethod(_dense_attention)
    attention._compiled_create_block_mask = create_block_mask_on_cpu
    # Offloaded parameters would be in pinned memory, which needs an accelerator.
    rebind("CPUOffloadPolicy", functools.partial(CPUOffloadPolicy, pin_memory=False))


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
