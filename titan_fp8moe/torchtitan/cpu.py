"""Train with torchtitan 0.2.2 on CPUs over gloo: for tests, debugging and stepping through the code.

torchtitan assumes an accelerator in a handful of places, and :func:`enable_cpu_training` replaces exactly these. Data,
tensor, pipeline and expert parallelism, activation checkpointing, compile and checkpoints then work unchanged. These do
not work on a CPU: DualPipeV, context parallelism, the backward of flex attention, ``profiling.enable_profiling``, and
``training.enable_cpu_offload`` in torchtitan's own trainer, which initializes gloo twice.
"""

import functools
import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule
from torchtitan.models.llama3.infra import parallelize as llama3_parallelize
from torchtitan.models.moe import kernels
from torchtitan.tools.logging import logger


@functools.cache
def enable_cpu_training() -> None:
    """Make torchtitan use the CPU and gloo. Call before the ``Trainer`` is built; calling again does nothing.

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
    _rebind("device_type", "cpu")
    _rebind("device_module", device_module)
    _rebind("get_device_info", lambda: ("cpu", device_module))
    # torchtitan would compute MFU against an A100; infinite peak FLOPS make it 0.
    _rebind("get_peak_flops", lambda device_name: float("inf"))
    # The router counts tokens with torch.histc, which has no integer kernel on the CPU.
    torch.histc = _histc_with_integers(torch.histc)
    # Expert parallelism orders tokens with a Triton kernel. torchtitan has a CPU version of it but never selects it.
    _rebind("generate_permute_indices", functools.partial(kernels.generate_permute_indices, use_cpu=True))
    # FSDP scales gradients inside the reduction (PREMUL_SUM), which gloo lacks.
    disable_division = llama3_parallelize.disable_fsdp_gradient_division
    _rebind("disable_fsdp_gradient_division", functools.partial(_disable_gradient_division, disable_division))
    # Offloaded parameters would be in pinned memory, which needs an accelerator.
    _rebind("CPUOffloadPolicy", functools.partial(CPUOffloadPolicy, pin_memory=False))


def _has_nvidia_gpu() -> bool:
    """Whether there is the driver's device, or an NVIDIA display controller on the PCI bus."""
    if list(Path("/dev").glob("nvidia[0-9]*")):
        return True
    for device in Path("/sys/bus/pci/devices").glob("*"):
        try:
            vendor, kind = (device / "vendor").read_text(), (device / "class").read_text()
        except OSError:
            continue
        if vendor.strip() == "0x10de" and kind.startswith("0x03"):
            return True
    return False


def _rebind(name: str, value: Any) -> None:
    """Replace ``name`` in every loaded torchtitan module that has it; modules loaded later import the replacement."""
    loaded = [module for path, module in sys.modules.items() if path.split(".")[0] == "torchtitan"]
    having = [module for module in loaded if name in vars(module)]
    if not having:
        raise RuntimeError(f"torchtitan has no {name} to replace for training on a CPU; install torchtitan 0.2.2")
    for module in having:
        setattr(module, name, value)


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


def _histc_with_integers(float_histc: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``torch.histc`` that also takes integers on the CPU and, as on CUDA, returns their dtype."""

    def histc(input: Tensor, bins: int = 100, min: int = 0, max: int = 0, **kwargs: Any) -> Tensor:
        if input.device.type != "cpu" or input.is_floating_point():
            return float_histc(input, bins, min, max, **kwargs)
        return float_histc(input.float(), bins, min, max).to(input.dtype)

    return histc


def _disable_gradient_division(disable_division: Callable[[torch.nn.Module], None], model: torch.nn.Module) -> None:
    """torchtitan's ``disable_fsdp_gradient_division``, with plain sums for the reduction."""
    disable_division(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
