"""Train with torchtitan 0.3.0 on CPUs over gloo: for tests, debugging and stepping through the code."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput

from titan_fp8moe import patches
from titan_fp8moe.torchtitan03 import names as tt
from titan_fp8moe.trainer.cpu import dense_attention, has_fast_bf16, replace_flex_attention, use_cpu

_CHECKED_ON = "torchtitan 0.3.0"


def enable_cpu_training() -> None:
    """Make torchtitan use the CPU and gloo. Call before the ``Trainer`` is built.

    Raises:
        RuntimeError: the machine has an NVIDIA GPU that PyTorch does not find, and nobody has hidden it.
    """
    use_cpu()
    replace_flex_attention(tt.attention, tt.attention.FlexAttention, _dense_attention)
    if not has_fast_bf16():
        patches.put(tt.moe.GroupedExperts, "_grouped_mm", _grouped_mm, checked_on=_CHECKED_ON)
    patches.wrap(tt.GptOssGroupedExperts, "forward", _in_dtype, checked_on=_CHECKED_ON)
    # The all-to-all of bf16 layers: spmd_types exchanges lists of tensors, which gloo wants all of one size.
    patches.put(tt.token_dispatcher, "get_spmd_backend", lambda: "partial_dtensor", checked_on=_CHECKED_ON)


def _grouped_mm(self: tt.moe.GroupedExperts, *, A: Tensor, B_t: Tensor, offs: Tensor) -> Tensor:
    """Multiplies in fp32 the operands that torchtitan has rounded to bf16, whatever ``mixed_precision_param`` says."""
    return torch._grouped_mm(A.float(), B_t.float(), offs=offs).to(A.dtype)


def _in_dtype(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """gpt-oss's experts with results in the dtype of their rows, as others have them; torchtitan's are always bf16."""
    return lambda self, x_RD, counts_E: forward(self, x_RD, counts_E).type_as(x_RD)


def _dense_attention(
    q: Tensor, k: Tensor, v: Tensor, *, block_mask: Any, scale: float, enable_gqa: bool, return_aux: Any, **unused: Any
) -> tuple[Tensor, AuxOutput]:
    out, lse = dense_attention(q, k, v, block_mask, scale, enable_gqa, return_aux.lse)
    return out, AuxOutput(lse=lse)
