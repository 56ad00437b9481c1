"""FSDP's all-gather of the experts' weights in FP8.

A parameter's local tensor may have the methods fsdp_pre_all_gather and fsdp_post_all_gather. FSDP2 then asks the first
for the tensors to gather, and gives them to the second (torch.distributed.fsdp, all-gather extensions; torchao's float8
linears use them too).

Each rank quantizes the experts of its shard. A 128x128 block travels as 16384 e4m3 values and a scale byte: half of
bf16's bytes on the wire and while the weights are whole. A block must lie on one rank, so FSDP has to shard whole
experts: along dim 0, evenly.
"""

import weakref
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titan_fp8moe import ops
from titan_fp8moe.ops import Fp8Weight
from titan_fp8moe.recipe import E8M0, FP8

# FSDP, nn.Parameter and DTensor call these on a whole parameter.
_ALIASES = {getattr(torch.ops.aten, name).default for name in ("alias", "as_strided", "detach", "view")}


class Fp8GatheredWeight(Tensor):
    """A weight (E, N, K) that FSDP gathered in FP8: what autograd takes for the parameter, in its gradient's dtype.

    It holds no values in that dtype, so every operator but an alias of the whole raises NotImplementedError.

    Attributes:
        quantized: the values, with N and K padded, in memory that FSDP frees and fills.
    """

    quantized: Fp8Weight

    @staticmethod
    def __new__(cls, quantized: Fp8Weight, shape: tuple[int, int], dtype: torch.dtype) -> "Fp8GatheredWeight":
        q = quantized.q
        self = Tensor._make_wrapper_subclass(cls, (q.shape[0], *shape), dtype=dtype, device=q.device)
        self.quantized = quantized
        return self

    def stand_in(self) -> Tensor:
        """A plain tensor of this shape and dtype, without memory to speak of."""
        return self.quantized.scale.new_empty((), dtype=self.dtype).expand(self.shape)

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyrefly: ignore[bad-override] # as torch prescribes

    @classmethod
    # pyrefly: ignore[bad-override] # in PyTorch's stub, a method that binds func
    def __torch_dispatch__(cls, func: Any, _: Any, args: tuple = (), kwargs: dict | None = None) -> Tensor:
        weight, *arguments = args
        whole = [weight.shape, weight.stride(), 0]
        got = [tuple(a) if isinstance(a, list | tuple) else a or 0 for a in arguments]
        if func in _ALIASES and not kwargs and got == whole[: len(got)]:
            return cls(weight.quantized, weight.shape[1:], weight.dtype)
        raise NotImplementedError(
            f"{func}: only experts read weights gathered in FP8; elsewhere set fp8_flow_moe.fp8_all_gather = false"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Fp8GatheredWeight({tuple(self.shape)}, {self.dtype})"


class Fp8AllGather(nn.Module):
    """Mixin of a module of experts whose parameters FSDP may gather in FP8."""

    gathers_fp8: bool = False

    def gather_in_fp8(self) -> None:
        """Lets FSDP gather the module's own weights in FP8. Call it after ``fully_shard``, which must have sharded them
        along dim 0."""
        self.gathers_fp8 = True
        for param in self.parameters(recurse=False):
            if param.ndim == 3:  # not a bias
                local: Any = cast(DTensor, param)._local_tensor  # FSDP looks at it; to_local() may return a view of it
                local.fsdp_pre_all_gather = _PreAllGather(local)
                local.fsdp_post_all_gather = _post_all_gather

    def _apply(self, *args: Any, **kwargs: Any) -> Self:
        super()._apply(*args, **kwargs)
        if self.gathers_fp8:  # the parameters' local tensors are new ones, as when they leave the meta device
            self.gather_in_fp8()
        return self

    def local_weights(self, *params: nn.Parameter | None) -> list[Any]:
        """The parameters as this rank's plain tensors; None for None.

        Raises:
            RuntimeError: if FSDP was to gather them in FP8 and has not.
        """
        weights = [w.to_local() if isinstance(w, DTensor) else w for w in params]
        if self.gathers_fp8 and not isinstance(weights[0], Fp8GatheredWeight):
            raise RuntimeError(
                "FSDP has not gathered the experts' weights in FP8: their tensors were replaced after fully_shard; "
                "load into the parameters as they are (no assign=True), or set fp8_flow_moe.fp8_all_gather = false"
            )
        return weights


class _PreAllGather:
    """FSDP's method of a shard; it does not keep the shard alive. A copy of the shard, also a pickled one, gets a copy
    without a shard: FSDP does not gather copies."""

    def __init__(self, shard: Tensor | None = None):
        self.shard = (lambda: None) if shard is None else weakref.ref(shard)

    def __reduce__(self) -> tuple:
        return _PreAllGather, ()

    def __call__(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, Tensor], tuple[int, int]]:
        shard = cast(Tensor, self.shard())
        q, scale = ops.quantize_weight(shard)
        return (q.view(torch.uint8), scale.view(torch.uint8)), (shard.shape[1], shard.shape[2])


def _post_all_gather(
    gathered: tuple[Tensor, Tensor], shape: tuple[int, int], dtype: torch.dtype, *, out: Tensor | None = None
) -> tuple[Tensor, tuple] | None:
    if out is not None:  # the first time's result: FSDP frees and fills the memory that it views
        return None
    q, scale = gathered
    return Fp8GatheredWeight(Fp8Weight(q.view(FP8), scale.view(E8M0)), shape, dtype), ()
