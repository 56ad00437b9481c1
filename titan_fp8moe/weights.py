"""FSDP's all-gather of the experts' weights in FP8: each rank quantizes the experts of its shard, once for all ranks.

FSDP2 asks a parameter's local tensor for what to gather, and what to make of it, where that tensor has the methods
``fsdp_pre_all_gather`` and ``fsdp_post_all_gather``. Here each 128x128 block travels as 16384 e4m3 values and a scale
byte: half of what bf16 takes, and half the memory while the weights are whole. What was gathered is what the GEMMs
multiply with (torch.distributed.fsdp, all-gather extensions; torchao does the same for its float8 linear layers).

A block must lie on one rank, so FSDP has to shard whole experts: along dim 0, evenly.
"""

import functools
import weakref
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook

from titan_fp8moe import ops
from titan_fp8moe.ops import QuantizedWeight
from titan_fp8moe.recipe import E8M0, FP8


class ExpertWeights(NamedTuple):
    """gate (E, H, D), down (E, D, H), up (E, H, D), bf16 or fp32, under torchtitan's names; or all quantized."""

    w1_EHD: Tensor | QuantizedWeight
    w2_EDH: Tensor | QuantizedWeight
    w3_EHD: Tensor | QuantizedWeight


class WeightCache:
    """A layer's quantized weights, shared by the microbatches of a step.

    Nothing tells for sure that a parameter has changed: FSDP's have no version, and a change through ``.data`` moves
    none. So every step of an optimizer of ``torch.optim`` clears all caches; other tensors in the weights' place, and a
    version that has moved, clear this one. Who changes weights otherwise between two microbatches calls :meth:`clear`.
    """

    _all: "weakref.WeakSet[WeightCache]" = weakref.WeakSet()

    def __init__(self):
        self.clear()
        self._all.add(self)
        _clear_after_optimizer_steps()

    def __reduce__(self) -> tuple:
        return WeightCache, ()  # a copy is of other weights

    def clear(self) -> None:
        self.operands = self.identity = None

    @torch.compiler.disable(reason="a graph does not know whether weights have changed; do without the cache")
    def get(self, weights: ExpertWeights) -> tuple[tuple[QuantizedWeight, ...], tuple[QuantizedWeight, ...]]:
        """The forward's two operands and, transposed, the backward's two, of these values of the weights."""
        identity = [_identity(w) for w in weights]
        if identity != self.identity:
            self.clear()  # before there are new ones
            w1, w2, w3 = weights
            (w13, w13_t), (w2, w2_t) = ops.quantize_weight_both(w1, w3), ops.quantize_weight_both(w2)
            self.operands, self.identity = ((w13, w2), (w13_t, w2_t)), identity
        return self.operands


def _identity(weight: Tensor) -> tuple:
    """What differs between tensors, and mostly between values of one. A reference to the storage, whose address another
    could otherwise get; FSDP empties and refills one."""
    place = weight.storage_offset(), weight.shape, weight.stride(), weight.dtype
    return StorageWeakRef(weight.untyped_storage()), place, weight._version


@functools.cache
def _clear_after_optimizer_steps() -> None:
    def clear_all(*_: Any) -> None:
        for cache in WeightCache._all:
            cache.clear()

    register_optimizer_step_post_hook(clear_all)


def quantize_weights(
    weights: ExpertWeights, cache: WeightCache | None = None
) -> tuple[QuantizedWeight, QuantizedWeight]:
    """The operands of the forward's GEMMs: gate and up in one, (E, 2H, D), and down, (E, D, H)."""
    if cache is not None:
        return cache.get(weights)[0]
    w1, w2, w3 = weights
    return ops.quantize_weight(w1, w3), ops.quantize_weight(w2)


def quantize_weights_transposed(
    weights: ExpertWeights, cache: WeightCache | None, recompute_h: bool
) -> tuple[QuantizedWeight | None, QuantizedWeight, QuantizedWeight]:
    """The operands of the backward's GEMMs: gate and up as in the forward if h is to be recomputed; gate and up
    transposed, (E, D, 2H); down transposed, (E, H, D)."""
    if cache is not None:
        (w13, _), transposed = cache.get(weights)
        return w13 if recompute_h else None, *transposed
    w1, w2, w3 = weights
    w13, w13_t = ops.quantize_weight_both(w1, w3) if recompute_h else (None, ops.quantize_weight_transposed(w1, w3))
    return w13, w13_t, ops.quantize_weight_transposed(w2)


# --- FSDP's all-gather in FP8 ---

# What FSDP, nn.Parameter and DTensor call on a whole parameter.
_ALIASES = {getattr(torch.ops.aten, name).default for name in ("alias", "as_strided", "detach", "view")}


class Fp8GatheredWeight(Tensor):
    """A weight (E, N, K) that was gathered in FP8: what autograd takes for the parameter, in the dtype of its gradient.

    It holds no values in that dtype, so no operator but a renaming of the whole can read it.

    Attributes:
        quantized: the values, in memory that FSDP frees and fills.
    """

    quantized: QuantizedWeight

    @staticmethod
    def __new__(cls, quantized: QuantizedWeight, dtype: torch.dtype) -> "Fp8GatheredWeight":
        q = quantized.q
        self = Tensor._make_wrapper_subclass(cls, q.shape, dtype=dtype, device=q.device)
        self.quantized = quantized
        return self

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, _: Any, args: tuple = (), kwargs: dict | None = None) -> Tensor:
        weight, *rest = args
        whole = [weight.shape, weight.stride(), 0]
        given = [tuple(r) if isinstance(r, list | tuple) else r or 0 for r in rest]
        if func in _ALIASES and not kwargs and given == whole[: len(rest)]:
            return cls(weight.quantized, weight.dtype)
        raise NotImplementedError(
            f"{func}: expert weights that were gathered in FP8 are read by the experts alone; use the sharded "
            "parameters for anything else, or set fp8_flow_moe.fp8_all_gather = false"
        )

    def __repr__(self) -> str:
        return f"Fp8GatheredWeight({tuple(self.shape)}, {self.dtype})"


def gather_in_fp8(param: DTensor) -> None:
    """Lets FSDP gather ``param``, sharded by experts, in FP8. To be repeated when its local tensor is another one."""
    local = param._local_tensor  # FSDP looks at this tensor; to_local() may return a view of it
    local.fsdp_pre_all_gather = _PreAllGather(local)
    local.fsdp_post_all_gather = _post_all_gather


class _PreAllGather:
    """FSDP's method of a shard, which is not kept alive by it. A copy of the shard, also a pickled one, has a copy of
    this, which is of no shard: copies are not FSDP's to gather."""

    def __init__(self, shard: Tensor | None = None):
        self.shard = (lambda: None) if shard is None else weakref.ref(shard)

    def __reduce__(self) -> tuple:
        return _PreAllGather, ()

    def __call__(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, Tensor], None]:
        if (shard := self.shard()) is None:
            raise RuntimeError("this is a copy of a parameter that FSDP gathers in FP8, which FSDP cannot gather")
        q, scale = ops.quantize_weight(shard)
        return (q.view(torch.uint8), scale.view(torch.uint8)), None


def _post_all_gather(
    gathered: tuple[Tensor, Tensor], metadata: None, dtype: torch.dtype, *, out: Tensor | None = None
) -> tuple[Tensor, tuple] | None:
    q, scale = gathered
    if out is None:
        # FSDP frees what it gathers into; nothing else is allocated here.
        return Fp8GatheredWeight(QuantizedWeight(q.view(FP8), scale.view(E8M0)), dtype), ()
    weight = out._local_tensor if isinstance(out, DTensor) else out
    if weight.quantized.q.data_ptr() != q.data_ptr():
        raise RuntimeError(
            "FSDP has gathered expert weights into other memory than the time before, which this version of PyTorch is "
            "not expected to do; set fp8_flow_moe.fp8_all_gather = false"
        )
    return None
