"""Extends torchtitan's parallel styles of experts and reorderer to converted layers.

torchtitan's styles shard the experts' parameters and install hooks that dispatch and combine bf16 rows. Of converted
experts they shard the parameters and record the mesh; there are no hooks, since the experts do that themselves in fp8.
The styles are changed where they are defined, so that it does not matter which module has imported them.
``apply_fsdp`` (llama4, shared by the other models) calls ``fully_shard`` by name, which is replaced there. Other
modules are parallelized as before.
"""

import functools
from collections.abc import Callable
from typing import Any, cast

import torch.distributed.fsdp as fsdp
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import distribute_module
from torch.distributed.tensor.parallel import ParallelStyle
from torchtitan.distributed import expert_parallel
from torchtitan.models.gpt_oss.infra.expert_parallel import GptossExpertTensorParallel, GptossTensorParallel
from torchtitan.models.llama4.infra import parallelize as llama4_parallelize

from titan_fp8moe import patches
from titan_fp8moe.dispatch import auto
from titan_fp8moe.torchtitan.modules import Fp8FlowExperts
from titan_fp8moe.trainer.compat import remove_fsdp_hooks

_CHECKED_ON = "torchtitan 0.2.2"
# Over which meshes a style spreads experts, and each expert.
_MESHES: dict[type[ParallelStyle], Callable[[DeviceMesh], tuple[DeviceMesh | None, DeviceMesh | None]]] = {
    expert_parallel.TensorParallel: lambda mesh: (None, mesh),
    expert_parallel.ExpertParallel: lambda mesh: (mesh, None),
    expert_parallel.ExpertTensorParallel: lambda mesh: (mesh["ep"], mesh["etp"]),
    GptossTensorParallel: lambda mesh: (None, mesh),
    GptossExpertTensorParallel: lambda mesh: (mesh["ep"], mesh["etp"]),
}


def _without_hooks(style: type[ParallelStyle], apply: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """The style's ``_apply``, but for converted experts. Subclasses, which have hooks of their own, keep them."""
    meshes = _MESHES[style]

    @functools.wraps(apply)
    def wrapper(self: ParallelStyle, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if type(self) is not style or not isinstance(module, Fp8FlowExperts):
            return apply(self, module, device_mesh)
        module.ep_mesh, module.tp_mesh = meshes(device_mesh)
        return distribute_module(module, device_mesh, cast(Any, self)._partition_fn)

    return wrapper


def _recording_mesh(apply: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """``ReordererSequenceParallel._apply``, which splits tokens over the tensor-parallel ranks; lets the layer know."""

    @functools.wraps(apply)
    def wrapper(self: ParallelStyle, module: Any, device_mesh: DeviceMesh) -> nn.Module:
        module.tp_mesh = device_mesh
        return apply(self, module, device_mesh)

    return wrapper


def fully_shard(module: nn.Module | list[nn.Module], **kwargs: Any) -> Any:
    """FSDP's ``fully_shard``. It leaves converted experts alone for which it has no work, as where expert parallelism
    takes all ranks that FSDP has."""
    if not isinstance(module, Fp8FlowExperts) or module.in_fsdp:
        return fsdp.fully_shard(module, **kwargs)
    sharded = fsdp.fully_shard(module, ignored_params=set(module.parameters()), **kwargs)
    if auto.is_enabled() or not module.config.backend.syncs_host:
        remove_fsdp_hooks(module)  # they have nothing to do, and would break a compiled block
    return sharded


def install() -> None:
    """Changes torchtitan's styles, and gives it this ``fully_shard``."""
    patches.put(llama4_parallelize, "fully_shard", fully_shard, checked_on=_CHECKED_ON)
    for style in _MESHES:
        patches.wrap(style, "_apply", functools.partial(_without_hooks, style), checked_on=_CHECKED_ON)
    patches.wrap(expert_parallel.ReordererSequenceParallel, "_apply", _recording_mesh, checked_on=_CHECKED_ON)
