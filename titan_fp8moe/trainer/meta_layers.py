"""Converted layers of a dry run as they are in training, on meta tensors: what they launch is what a job compiles.

A dry run ends where torchtitan would allocate the model, with parameters sharded as FSDP keeps them. A layer that runs
alone needs them whole, in FSDP's compute dtype. Transfers to other ranks move nothing.
"""

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titan_fp8moe.nn.modules import Fp8FFN, Fp8FlowLinear
from titan_fp8moe.rows import NanFlags

_RANKS_KEEP = {"ep", "tp", "etp"}
"""Mesh dims over which FSDP does not gather."""


class Tokens(NamedTuple):
    """A microbatch on one rank.

    Attributes:
        count: T.
        dtype: of the layers' input.
        compute_dtype: of the parameters that FSDP gathers, or of results under autocast.
        autocast: whether the job runs under autocast, as torchtitan 0.2.2's does without FSDP.
    """

    count: int
    dtype: torch.dtype
    compute_dtype: torch.dtype
    autocast: bool = False

    def rows(self, dim: int) -> Tensor:
        """A layer's input (T, D)."""
        return torch.empty(self.count, dim, dtype=self.dtype, device="meta", requires_grad=True)

    def routing(self, top_k: int) -> tuple[Tensor, Tensor]:
        """A router's ids and scores (T, K)."""
        ids = torch.empty(self.count, top_k, dtype=torch.int64, device="meta")
        return ids, torch.empty(self.count, top_k, dtype=torch.float32, device="meta", requires_grad=True)

    def gather(self, module: nn.Module, fsdp: bool = True) -> None:
        """Replaces the module's parameters by meta tensors as its forward sees them. ``fsdp``: FSDP gathers them."""
        for part in module.modules():
            for name, param in part.named_parameters(recurse=False):
                part.register_parameter(name, self._gathered(param, fsdp))

    def run(self, module: Fp8FFN | Fp8FlowLinear) -> Tensor:
        """The forward of a module that serves every token."""
        self.gather(module)
        watch(module)
        with torch.autocast("cpu", self.compute_dtype, enabled=self.autocast and self.compute_dtype != self.dtype):
            if isinstance(module, Fp8FlowLinear):
                return Fp8FlowLinear.forward(module, self.rows(module.weight.shape[1]))
            return module.run(self.rows(module.w1.weight.shape[1]))

    def _gathered(self, param: nn.Parameter, fsdp: bool) -> nn.Parameter:
        shape, dtype = list(param.shape), param.dtype
        if isinstance(param, DTensor):
            mesh, names = param.device_mesh, param.device_mesh.mesh_dim_names or ()
            for dim, (name, placement) in enumerate(zip(names, param.placements, strict=True)):
                if name in _RANKS_KEEP and placement.is_shard():
                    shape[cast(Any, placement).dim] //= mesh.size(dim)
            if fsdp and not _RANKS_KEEP.issuperset(names):
                dtype = self.compute_dtype
        return nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=param.requires_grad)


def watch(module: Any) -> None:
    """Gives the module flags as the NaN watch does: kernels with flags are others."""
    module.nan_flags = torch.empty(len(NanFlags._fields), 16, dtype=torch.uint8, device="meta")
