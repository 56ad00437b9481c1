"""Lets torchtitan run on CPUs over gloo, in every release that has an adapter here: for tests and debugging.

torchtitan assumes an accelerator in a handful of places. The adapters replace exactly these, with :func:`use_cpu` and
what their release needs besides.
"""

import functools
import logging
import os
import re
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.nn.attention.flex_attention import create_block_mask

from titan_fp8moe import patches

logger = logging.getLogger(__name__)

_CHECKED_ON = "torchtitan 0.2.2, 0.3.0"
# A CUDA build of PyTorch makes masks for GPUs where there is none.
create_block_mask_on_cpu = functools.partial(create_block_mask, device="cpu")


def use_cpu() -> None:
    """Make torchtitan use the CPU and gloo in this process.

    Raises:
        RuntimeError: the machine has an NVIDIA GPU that PyTorch does not find, and nobody has hidden it.
    """
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    if torch.version.cuda and not hidden and _has_nvidia_gpu():
        raise RuntimeError(
            "this machine has an NVIDIA GPU, but PyTorch finds none: see whether nvidia-smi works and the driver fits "
            f"CUDA {torch.version.cuda}; set CUDA_VISIBLE_DEVICES= (empty) to train on the CPU"
        )
    logger.warning("FP8-Flow-MoE: PyTorch finds no GPU, so torchtitan uses the CPU and gloo in this process")
    # Modules import these names from torchtitan.tools.utils; without an accelerator they stand for CUDA.
    device_module = _cpu_device_module()
    rebind("device_type", lambda _: "cpu")
    rebind("device_module", lambda _: device_module)
    rebind("get_device_info", lambda _: lambda: ("cpu", device_module))
    # torchtitan would compute MFU against an A100; infinite peak FLOPS make it 0.
    rebind("get_peak_flops", lambda _: lambda device_name: float("inf"))
    rebind("disable_fsdp_gradient_division", lambda original: functools.partial(disable_gradient_division, original))


def dense_attention(
    q: Tensor, k: Tensor, v: Tensor, block_mask: Any, scale: float, enable_gqa: bool, with_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """Stands in for flex attention, which has no backward on the CPU. Returns log-sum-exps ``with_lse``."""
    b, i, j = (torch.arange(n, device=q.device) for n in (q.shape[0], q.shape[2], k.shape[2]))
    mask = block_mask.mask_mod(b.view(-1, 1, 1, 1), 0, i.view(-1, 1), j)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=enable_gqa)
    if not with_lse:
        return out, None
    logits = q.float() @ k.float().repeat_interleave(q.shape[1] // k.shape[1], 1).mT * scale
    return out, logits.masked_fill(~mask, -torch.inf).logsumexp(-1)


def has_fast_bf16() -> bool:
    """Whether oneDNN multiplies bf16 matrices on this CPU. Without it, bf16 takes ten times as long as fp32."""
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()


@functools.cache
def compute_dtype() -> Literal["bfloat16", "float32"]:
    """The default of ``training.mixed_precision_param``: float32 in a rank on a CPU without fast bf16.

    torchrun starts the ranks. In other processes, such as a dry run, the default describes a job on GPUs.
    """
    if torch.cuda.is_available() or not dist.is_torchelastic_launched() or has_fast_bf16():
        return "bfloat16"
    logger.warning("FP8-Flow-MoE: this CPU is slow in bf16, so training.mixed_precision_param defaults to float32")
    return "float32"


def rebind(name: str, wrapper: Callable[[Any], Any]) -> None:
    """Wrap ``name`` in every loaded torchtitan module that has it. Modules loaded later import the replacement."""
    loaded = [module for path, module in sys.modules.items() if path.split(".")[0] == "torchtitan"]
    for module in [module for module in loaded if name in vars(module)]:
        patches.wrap(module, name, wrapper, checked_on=_CHECKED_ON)


def replace_flex_attention(attention: ModuleType, flex: type, attend: Callable[..., Any]) -> None:
    """Lets torchtitan's class ``flex`` call ``attend``, and its file ``attention`` make masks without compiling, which
    takes longer than training. Where ``debug.deterministic`` is set, ``set_determinism`` compiles flex attention anew;
    what it leaves is replaced again."""
    patches.put(attention, "_compiled_create_block_mask", create_block_mask_on_cpu, checked_on=_CHECKED_ON)
    put = functools.partial(patches.put, flex, "_compiled_flex_attn", staticmethod(attend), checked_on=_CHECKED_ON)

    def keeping(set_determinism: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(set_determinism)
        def wrapper(*args: Any, **kwargs: Any) -> None:
            set_determinism(*args, **kwargs)
            put()

        return wrapper

    put()
    rebind("set_determinism", keeping)


def disable_gradient_division(disable_division: Callable[[torch.nn.Module], None], model: torch.nn.Module) -> None:
    """torchtitan's ``disable_fsdp_gradient_division``, with plain sums for the reduction: FSDP scales gradients inside
    it (PREMUL_SUM), which gloo lacks."""
    disable_division(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)


def _has_nvidia_gpu() -> bool:
    """Whether there is the driver's device, or an NVIDIA display controller on the PCI bus."""
    on_bus = [path.read_text() for path in Path("/sys/bus/pci/devices").glob("*/modalias")]
    return any(Path("/dev").glob("nvidia[0-9]*")) or any(re.match("pci:v000010DE.*bc03", alias) for alias in on_bus)


def _cpu_device_module() -> SimpleNamespace:
    """``torch.cpu`` with the queries that torchtitan makes of ``torch.cuda``. Memory is the peak resident set size."""

    def memory_stats(device: torch.device | None = None) -> dict[str, int]:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {"active_bytes.all.peak": peak, "reserved_bytes.all.peak": peak}

    total_memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    queries = {
        "current_device": lambda: 0,  # torch.cpu returns "cpu", but the device_ids of a barrier must be integers
        "get_device_name": lambda device=None: "CPU",
        "get_device_properties": lambda device=None: SimpleNamespace(total_memory=total_memory),
        "memory_stats": memory_stats,
        "reset_peak_memory_stats": lambda device=None: None,  # the system keeps one peak, for the whole process
        "empty_cache": lambda: None,
    }
    return SimpleNamespace(**vars(torch.cpu) | queries)
