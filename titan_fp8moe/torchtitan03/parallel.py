"""Four of torchtitan's steps, changed for converted layers: which parameters FSDP manages, which of them train, what
selective checkpointing keeps, how blocks compile.

Experts for which FSDP has no work (:func:`titan_fp8moe.trainer.preflight.fsdp_has_work`) leave it after it has sharded
them. Their parameters stay the DTensors that FSDP made, so that clipping, optimizers and checkpoints see the same types
as ever.

torchtitan 0.3.0 lets frozen parameters train: with ``spmd_backend = "spmd_types"``, its default, it replaces each by a
parameter that requires a gradient. So LoRA would train its base.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from titan_fp8moe import SAVED_OPS, patches
from titan_fp8moe.torchtitan03 import names as tt
from titan_fp8moe.torchtitan03.compiling import compile_before_experts, has_memory_budget
from titan_fp8moe.torchtitan03.modules import Fp8FlowMoE
from titan_fp8moe.trainer.compat import leave_fsdp


def fully_shard(module: nn.Module | list[nn.Module], **kwargs: Any) -> Any:
    """FSDP's ``fully_shard``; experts leave it again that are not ``in_fsdp``, in an experiment also torchtitan's."""
    sharded = torch_fully_shard(module, **kwargs)
    for part in module if isinstance(module, list) else [module]:
        if getattr(part, "moe_enabled", False):
            outside = [m for m in part.modules() if not getattr(m, "in_fsdp", True)]
            leave_fsdp(part, [param for m in outside for param in m.parameters()])
    return sharded


def install() -> None:
    """Gives torchtitan this ``fully_shard``, keeps frozen parameters frozen and the results of this package's ops, and
    compiles blocks with an all-to-all up to it."""
    patches.put(tt.fsdp, "fully_shard", fully_shard, checked_on="torchtitan 0.3.0")
    patches.wrap(tt.Module, "_spmd_distribute_state", _keeping_frozen, checked_on="torchtitan 0.3.0")
    patches.wrap(tt.SelectiveAC, "get_save_ops", _with_ours, checked_on="torchtitan 0.3.0")
    patches.wrap(nn.Module, "compile", _up_to_the_experts, checked_on="torch 2.14.1")


def _keeping_frozen(distribute: Callable[..., None]) -> Callable[..., None]:
    def distribute_(self: tt.Module, dims: Any, name: str, tensor: Tensor, layout: Any, *, is_param: bool) -> None:
        distribute(self, dims, name, tensor, layout, is_param=is_param)
        if is_param:
            self._parameters[name].requires_grad_(tensor.requires_grad)

    return distribute_


def _with_ours(save_ops: Callable[[Any], set]) -> Callable[[Any], set]:
    return lambda self: save_ops(self) | {*SAVED_OPS}


def _up_to_the_experts(compile_module: Callable[..., None]) -> Callable[..., None]:
    def compile_(self: nn.Module, **options: Any) -> None:
        # torchtitan asks for one graph, which split sizes, read on the host, do not allow.
        layers = [module for module in self.modules() if isinstance(module, Fp8FlowMoE)]
        if not any(has_memory_budget() or layer.breaks_graphs for layer in layers):
            compile_module(self, **options)
        elif not compile_before_experts(self, **options):
            compile_module(self, **options | {"fullgraph": False})

    return compile_
