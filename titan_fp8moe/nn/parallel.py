"""PyTorch's tools for a model in which experts are spread over ranks, and everything else is replicated.

With ``ep_group`` the weights of :class:`titan_fp8moe.RoutedExperts` are DTensors, sharded by experts, as in torchtitan.
Distributed checkpoints, FSDP and ``deepcopy`` understand them as they are. The functions here serve the tools that take
DTensors or plain tensors, but not both at once. torch refuses other uses of those tools; docs/parallel.md has the
remedies, and a whole training loop.
"""

import weakref
from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """``torch.nn.utils.clip_grad_norm_`` for models with experts of an ``ep_group``.

    The norm counts the experts of all ranks, and replicated parameters once. All ranks get the same norm; so all ranks
    call this with the same parameters.

    Returns:
        The norm of all gradients, a plain tensor.

    Raises:
        RuntimeError: with ``error_if_nonfinite``, for a norm that is NaN or Inf.
    """
    parameters = [parameters] if isinstance(parameters, Tensor) else parameters
    groups = _by_mesh(p for p in parameters if p.grad is not None)
    norms = [get_total_norm([cast(Tensor, p.grad) for p in group], norm_type, foreach=foreach) for group in groups]
    norms = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
    total = get_total_norm(norms, norm_type, error_if_nonfinite)
    for group in groups:
        clip_grads_with_norm_(group, max_norm, total, foreach)
    return total


def parameter_groups(parameters: Iterable[Tensor]) -> list[dict[str, Any]]:
    """Parameter groups for ``torch.optim``: a fused or foreach optimizer takes one kind of tensor per group.

    Example::

        optimizer = torch.optim.AdamW(parameter_groups(model.parameters()), lr=1e-3, fused=True)
    """
    return [{"params": group} for group in _by_mesh(parameters)]


def _by_mesh(parameters: Iterable[Tensor]) -> list[list[Tensor]]:
    """Plain tensors, and the DTensors of each mesh, in the order in which they come."""
    groups: dict[DeviceMesh | None, list[Tensor]] = {}
    for p in parameters:
        groups.setdefault(p.device_mesh if isinstance(p, DTensor) else None, []).append(p)
    return list(groups.values())


def distributed_data_parallel(model: nn.Module, **kwargs: Any) -> DistributedDataParallel:
    """``DistributedDataParallel`` of the replicated parameters, without the experts.

    An expert's gradient is the sum over the tokens of all ranks. Therefore this one sums the replicated gradients too,
    where DDP averages: divide the loss by the number of ranks. Gradients accumulate as under DDP, over backwards inside
    and outside of ``no_sync()``.

    Args:
        kwargs: arguments of ``DistributedDataParallel``. Its process group must be the experts' ``ep_group``.

    Raises:
        ValueError: for another process group: DDP would not reduce the gradients of an expert's replicas.
    """
    experts = {n: p for n, p in model.named_parameters(remove_duplicate=False) if isinstance(p, DTensor)}
    leave_out_of_ddp(model, [*experts])
    ddp = DistributedDataParallel(model, **kwargs)
    ranks = dist.get_process_group_ranks(ddp.process_group)
    for name, param in experts.items():
        trains = param.is_floating_point()  # not if stored in FP8
        if trains and param.device_mesh.mesh.tolist() != ranks:
            raise ValueError(
                f"{name} is spread over {param.device_mesh}, and DDP, with the ranks {ranks}, would not reduce its "
                "replicas' gradients; give DDP the ep_group as process_group, or use fully_shard (docs/parallel.md)"
            )
    _count_ranks(ddp, len(ranks))
    return ddp


def leave_out_of_ddp(model: nn.Module, parameters: list[str]) -> None:
    """Lets DDP neither broadcast nor reduce these parameters of a model that it will wrap."""
    # DDP compares names with f"{module}.{parameter}", which begins with a dot for a parameter of the model itself.
    names = [*parameters, *(f".{p}" for p in parameters), *getattr(model, "_ddp_params_and_buffers_to_ignore", ())]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)


_factors: weakref.WeakKeyDictionary[nn.Module, weakref.finalize] = weakref.WeakKeyDictionary()
"""For each model of a DDP: a call that takes the factors off its gradients."""


def _count_ranks(ddp: DistributedDataParallel, ranks: int) -> None:
    """Makes DDP's averages sums. Each backward's gradients count as often as there are ranks before they accumulate.

    To sum in DDP's hook would be wrong. The hook gets what has accumulated, and would sum again what an earlier
    backward has summed; an average of averages changes nothing.
    """
    model, ignored = cast(nn.Module, ddp.module), ddp.parameters_to_ignore
    if model in _factors:  # wrapped before
        _factors[model]()
    reduced = [p for name, p in model.named_parameters() if p.requires_grad and name not in ignored]
    handles = [p.register_hook(lambda grad: grad * ranks) for p in reduced]
    _factors[model] = weakref.finalize(ddp, lambda: [handle.remove() for handle in handles])


# --- for RoutedExperts ------------------------------------------------------------------------------------------------


def mesh_of(ep_group: dist.ProcessGroup | DeviceMesh, device: torch.device) -> DeviceMesh:
    """The mesh over which a module's experts are spread. Meshes of one group are equal, and none equals a caller's
    ``mesh["ep"]``. FSDP needs the one that is part of a larger mesh, and torch takes equal meshes for one."""
    if isinstance(ep_group, DeviceMesh):
        return ep_group
    # For the meta device a guess, which follow_device corrects.
    device_type = ("cuda" if torch.cuda.is_available() else "cpu") if device.type == "meta" else device.type
    return DeviceMesh.from_group(ep_group, device_type, mesh_dim_names=("ep_group",))


def spread(local: Tensor, mesh: DeviceMesh) -> DTensor:
    """This rank's experts (E, ...) as a part of the experts of all ranks, without communication."""
    if local.storage_offset():  # torch can neither copy nor save such a DTensor
        local = local.clone()
    return DTensor.from_local(local, mesh, (Shard(0),), run_check=False)


def local_of(tensor: Any) -> Any:
    """This rank's part of a DTensor; another tensor, or None, as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def sharded_by_fsdp(weight: Any, ep_group: dist.ProcessGroup | None) -> bool:
    return isinstance(weight, DTensor) and (ep_group is None or weight.device_mesh.ndim > 1)


def uniform_by_expert_(weights: Sequence[Tensor], bounds: Sequence[float], spread: bool) -> None:
    """Fills weights (E, N, K) uniformly within their ± ``bounds``. One seed draws the same experts whether they are
    ``spread`` over ranks or not, for any number of ranks."""
    first, local = weights[0], [w.detach() for w in weights]
    if isinstance(local_of(first), FakeTensor):  # without values
        return
    if not spread and isinstance(first, DTensor):  # FSDP's, sharded along any dim
        for weight, bound in zip(weights, bounds, strict=True):
            nn.init.uniform_(weight, -bound, bound)
        return
    experts = torch.arange(len(first), device=first.device)
    if isinstance(first, DTensor):
        experts = distribute_tensor(experts, first.device_mesh, first.placements, src_data_rank=None).to_local()
        local = [cast(DTensor, w).to_local() for w in local]
    seed = int(torch.randint(2**48, (), device="cpu"))  # on every rank, which stay alike in what they draw next
    generator = torch.Generator(first.device)
    for i, expert in enumerate(experts.tolist()):
        generator.manual_seed(seed + expert)
        for weight, bound in zip(local, bounds, strict=True):
            nn.init.uniform_(weight[i], -bound, bound, generator)


def follow_device(weight: DTensor, group: dist.ProcessGroup) -> None:
    """Gives a weight that has moved to another device a mesh of that device, if it had a mesh of the group alone."""
    mesh, local = weight.device_mesh, weight.to_local().detach()
    if local.is_meta or mesh.device_type == local.device.type or mesh != mesh_of(group, torch.device(mesh.device_type)):
        return
    mesh = mesh_of(group, local.device)
    moved = nn.Parameter(spread(local, mesh), weight.requires_grad)
    if isinstance(weight.grad, DTensor):
        moved.grad = spread(weight.grad.to_local(), mesh)
    torch.utils.swap_tensors(weight, moved)  # optimizers keep the object


def group_of(weight: DTensor) -> dist.ProcessGroup:
    """The group of a weight that was copied, or unpickled.

    Raises:
        RuntimeError: if this process was another rank of the group.
    """
    mesh = weight.device_mesh
    ep = mesh.ndim - 1  # FSDP puts its dims first
    group = mesh.get_group(ep)
    if (group.size(), group.rank()) != (mesh.size(ep), cast(list, mesh.get_coordinate())[ep]):
        raise RuntimeError(
            f"the experts were pickled by rank {mesh.get_coordinate()} of {mesh}, and here the group has rank "
            f"{group.rank()} of {group.size()}; save state dicts with torch.distributed.checkpoint"
        )
    return group
