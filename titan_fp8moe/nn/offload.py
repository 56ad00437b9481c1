"""Frozen FP8 experts in host memory: :func:`offload_experts`."""

import functools
import os
import re
import sys
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titan_fp8moe.layer.host import HostExperts, HostLayer, pinned_like
from titan_fp8moe.nn.modules import Fp8RoutedExperts
from titan_fp8moe.nn.parallel import leave_out_of_ddp, local_of, sharded_by_fsdp
from titan_fp8moe.recipe import FP8

GIB = 2**30


@torch.no_grad()
def offload_experts(model: nn.Module, device: torch.device | str | None = None) -> None:
    """Keeps a model's experts that are stored in FP8 in host memory, and copies them to the device layer by layer,
    ahead of their use, in the forward and again in the backward. Output and gradients stay the same, bit for bit.

    The device holds two layers' experts at a time; everything else of the model is moved there. Call it at the end:
    after adapters are added, before the optimizer is made. A model may come from the CPU, whose memory then has one
    layer twice at most, or from the device. Each rank of an ``ep_group`` offloads its own experts, and DDP leaves them
    out. Change experts by ``load_state_dict``. Other writes in place need ``torch.cuda.synchronize()`` first, and those
    through ``.data`` may not be seen. ``model.to()``, which trainers call, leaves them where they are.

    It takes :class:`titan_fp8moe.nn.modules.Fp8RoutedExperts`, and Transformers' experts stored in FP8 that run as
    ``fp8_flow``. A copy of the model is not offloaded. ``torch.compile`` breaks its graphs at such layers.

    Args:
        device: where the model runs; by default the current GPU, or a CPU where there is none.

    Raises:
        ValueError: for a model without such experts, or one that FSDP shards.
        MemoryError: if the host has too little memory, before any is taken.

    Example::

        model = AutoModelForCausalLM.from_pretrained(OUT, dtype=torch.bfloat16, experts_implementation="fp8_flow")
        offload_experts(model.requires_grad_(False))
    """
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    found = {module: names for module in model.modules() if (names := _stored(module))}
    _check(model, found)
    weights: list[list[Tensor]] = []
    for done, (module, names) in enumerate(found.items(), 1):
        weights.append([_pinned(getattr(module, name)) for name in names])
        gib = sum(q.nbytes for layer in weights for q in layer) / GIB
        end = "\n" if done == len(found) else ""
        line = f"\roffload_experts: {done} of {len(found)} layers, {gib:.1f} GiB in host memory"
        print(line, end=end, file=sys.stderr, flush=True)
    experts = HostExperts(weights, device)
    for index, (module, names) in enumerate(found.items()):
        cast(Any, module).fp8_host = HostLayer(experts, index)
        module.register_load_state_dict_pre_hook(_await_copies)
        module._apply = functools.partial(_apply_to_others, module, names)
    nn.Module.to(model, device)
    # DDP takes parameters on one kind of device. It would also send rank 0's experts to all ranks.
    own = {param for module in found for param in module.parameters(recurse=False)}
    leave_out_of_ddp(model, [n for n, param in model.named_parameters(remove_duplicate=False) if param in own])


def _pinned(param: nn.Parameter) -> Tensor:
    """A parameter's values, of a DTensor this rank's, which are in page-locked memory from now on."""
    q = local_of(param)
    if not q.is_pinned():
        q = pinned_like(q).copy_(q)
        if isinstance(param, DTensor):  # which has a device of its own
            here = torch.empty_like(param.detach(), device="cpu")
            local_of(here).data = q
            torch.utils.swap_tensors(param, nn.Parameter(here, requires_grad=False))
        else:
            param.data = q
    return local_of(param).detach().view(FP8)


def _apply_to_others(module: nn.Module, names: list[str], *args: Any, **kwargs: Any) -> nn.Module:
    """``nn.Module._apply``, which serves ``to()`` and casts, without the values that are in host memory."""
    kept = {name: module._parameters[name] for name in names if vars(module).get("fp8_host") is not None}
    module._parameters.update(dict.fromkeys(kept))
    try:
        return type(module)._apply(module, *args, **kwargs)
    finally:
        module._parameters.update(kept)


def _await_copies(module: nn.Module, *_: Any) -> None:
    """Before values in host memory are replaced, which forwards that the device has not reached yet will read."""
    if (host := vars(module).get("fp8_host")) is not None:
        host.experts.runtime.synchronize(host.experts.device)


def _stored(module: nn.Module) -> list[str]:
    """Names of the experts' matrices stored in FP8 that a module has itself: GEMM 1's and GEMM 2's."""
    if isinstance(module, Fp8RoutedExperts):
        return module.fp8_matrices()
    names = [name for name, p in module.named_parameters(recurse=False) if p.dtype == FP8 and p.dim() == 3]
    implementation = getattr(getattr(module, "config", None), "_experts_implementation", None)
    if names and implementation != "fp8_flow":
        raise ValueError(
            f"{type(module).__name__} would run as {implementation}, which cannot read host memory; call "
            'titan_fp8moe.transformers.register() and model.set_experts_implementation("fp8_flow") first'
        )
    return names


def _check(model: nn.Module, found: dict[nn.Module, list[str]]) -> None:
    if not found:
        raise ValueError(
            f"{type(model).__name__} has no experts stored in FP8 to offload; make them with RoutedExperts.from_fp8, "
            "or load a checkpoint that titan_fp8moe.export_fp8 wrote"
        )
    params = [(getattr(module, name), module) for module, names in found.items() for name in names]
    if any(sharded_by_fsdp(param, getattr(module, "ep_group", None)) for param, module in params):
        raise ValueError("FSDP shards these experts; leave them out of fully_shard, so that each rank offloads its own")
    weights = [[local_of(getattr(module, name)) for name in names] for module, names in found.items()]
    there = sum(q.nbytes for layer in weights for q in layer if q.device.type != "cpu")
    # Of layers that are in host memory already, one at a time is there twice.
    again = max(sum(q.nbytes for q in layer if q.device.type == "cpu" and not q.is_pinned()) for layer in weights)
    needed = (there + again) * int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if needed > (available := _available_bytes()):
        raise MemoryError(
            f"offload_experts needs {needed:,} bytes ({needed / GIB:.1f} GiB) of host memory, and {available:,} "
            f"({available / GIB:.1f} GiB) are available; use a larger machine or fewer ranks on it"
        )


def _available_bytes() -> int:
    found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    limit = Path("/sys/fs/cgroup/memory.max")  # of a container
    limits = [int(text) for text in [limit.read_text().strip()] if text.isdigit()] if limit.exists() else []
    return min([int(cast(Any, found)[1]) * 1024, *limits])
