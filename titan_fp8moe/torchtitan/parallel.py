"""What torchtitan does to experts and reorderer to parallelize them, extended to converted layers.

torchtitan's ``apply_moe_ep_tp`` (llama4, shared by deepseek_v3 and qwen3) creates its styles by name. The subclasses
here take those names. For converted experts they shard the parameters as torchtitan does and record the mesh; the hooks
that would dispatch and combine bf16 rows are left out, since the experts do that themselves in fp8. ``apply_fsdp``
calls ``fully_shard`` by name, too. Other modules are parallelized as before.
"""

from typing import Any

import torch
import torch.distributed.fsdp as fsdp
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import distribute_module
from torchtitan.distributed import expert_parallel
from torchtitan.models.llama4.infra import parallelize as llama4_parallelize

from titan_fp8moe.torchtitan.modules import Fp8FlowGroupedExperts


class _FlowStyle:
    """Mixin: ``_apply`` that installs no hooks on converted experts."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, Fp8FlowGroupedExperts):
            return super()._apply(module, device_mesh)
        module.set_meshes(*self._meshes(device_mesh))
        return distribute_module(module, device_mesh, self._partition_fn)


class TensorParallel(_FlowStyle, expert_parallel.TensorParallel):
    """Every expert's hidden dim over the tensor-parallel ranks."""

    @staticmethod
    def _meshes(mesh: DeviceMesh) -> tuple[DeviceMesh | None, DeviceMesh | None]:
        return None, mesh


class ExpertParallel(_FlowStyle, expert_parallel.ExpertParallel):
    """Experts over ranks."""

    @staticmethod
    def _meshes(mesh: DeviceMesh) -> tuple[DeviceMesh | None, DeviceMesh | None]:
        return mesh, None


class ExpertTensorParallel(_FlowStyle, expert_parallel.ExpertTensorParallel):
    """Experts over ranks, and every expert's hidden dim over the tensor-parallel ranks."""

    @staticmethod
    def _meshes(mesh: DeviceMesh) -> tuple[DeviceMesh | None, DeviceMesh | None]:
        return mesh["ep"], mesh["etp"]


class ReordererSequenceParallel(expert_parallel.ReordererSequenceParallel):
    """Splits tokens over the tensor-parallel ranks, and lets the layer know that it does."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.tp_mesh = device_mesh
        return super()._apply(module, device_mesh)


def fully_shard(module: nn.Module | list[nn.Module], *, mesh: DeviceMesh, **kwargs: Any) -> nn.Module:
    """FSDP's ``fully_shard``, for converted experts. It leaves alone parameters that it would shard over one rank, and
    gathers those that it shards in FP8 if ``fp8_all_gather`` says so.

    One rank is what remains where expert parallelism takes all ranks that FSDP has. There is nothing to gather or
    reduce then, but FSDP would cast the parameters to bf16 and copy them twice a step, and copy the gradients twice.
    Quantization reads fp32 as well, and the weight gradients come in the parameters' dtype. Parameters in bf16 stay
    with FSDP, which adds up the gradients of microbatches in fp32; and so do those of which something else than FSDP's
    arithmetic is expected (``keep_fsdp``).
    """
    if (
        isinstance(module, Fp8FlowGroupedExperts)
        and mesh.size() == 1
        and not module.keep_fsdp
        and module.w1.dtype == torch.float32
        and "offload_policy" not in kwargs
    ):
        kwargs["ignored_params"] = set(module.parameters())
    # Without expert parallelism the experts are sharded with their block.
    inside = [m for part in (module if isinstance(module, list) else [module]) for m in part.modules()]
    experts = [m for m in inside if isinstance(m, Fp8FlowGroupedExperts) and m.config.fp8_all_gather]
    before = [m.w1 for m in experts]
    sharded = fsdp.fully_shard(module, mesh=mesh, **kwargs)
    for m, w1 in zip(experts, before, strict=True):
        if m.w1 is not w1:
            m.gather_in_fp8()
    return sharded


def install() -> None:
    """Gives torchtitan these styles and this ``fully_shard``. Calling again does nothing new."""
    for it in (TensorParallel, ExpertParallel, ExpertTensorParallel, ReordererSequenceParallel, fully_shard):
        setattr(llama4_parallelize, it.__name__, it)
