"""The experts' weights: what the GEMMs read of them, a cache of it, and FSDP's all-gather in FP8.

A weight is quantized in each direction from the parameter that FSDP has just gathered, and no quantized copy outlives
the direction. :class:`WeightCache` keeps one for the microbatches of a step. With :class:`Fp8AllGather` each rank of
FSDP quantizes the experts of its shard, and FSDP gathers the FP8 values.
"""

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import _disable_current_modes

from titan_fp8moe import ops
from titan_fp8moe.ops import QuantizedWeight
from titan_fp8moe.recipe import E8M0, FP8

Weight = Tensor | QuantizedWeight
"""What the ops read: bf16 or fp32 values, or values that are quantized already."""

W_co = TypeVar("W_co", bound=Weight, covariant=True)


class ExpertWeights(NamedTuple, Generic[W_co]):
    """The weights of this rank's E experts, all bf16, all fp32, or all quantized.

    Attributes:
        w1: the gate projection (E, H, D); with ``w3`` None gate and up in one, (E, 2H, D), gate first.
        w2: the down projection (E, D, H).
        w3: the up projection (E, H, D), or None.
    """

    w1: W_co
    w2: W_co
    w3: W_co | None

    @property
    def gate_up(self) -> tuple[W_co, ...]:
        """What GEMM 1's operand is made of."""
        return (self.w1,) if self.w3 is None else (self.w1, self.w3)

    def pack(self) -> tuple[list[Tensor], list[Tensor]]:
        """Values, and scales where the weights are quantized: what an op takes."""
        weights: list[Any] = [*self.gate_up, self.w2]
        if isinstance(self.w1, QuantizedWeight):
            return [w.q for w in weights], [w.scale for w in weights]
        return weights, []

    @classmethod
    def unpack(cls, values: list[Tensor], scales: list[Tensor]) -> "ExpertWeights[Weight]":
        """The inverse of :meth:`pack`."""
        weights: Sequence[Weight] = (
            [QuantizedWeight(*pair) for pair in zip(values, scales, strict=True)] if scales else values
        )
        return cls(weights[0], weights[-1], weights[1] if len(weights) == 3 else None)


def quantize_weights(weights: ExpertWeights[Weight]) -> ExpertWeights[QuantizedWeight]:
    """The forward's operands, gate and up in one: (E, 2H, D) and (E, D, H). Quantized weights are only joined."""
    return ExpertWeights(ops.quantize_weight(*weights.gate_up), ops.quantize_weight(weights.w2), None)


def one_expert(w1: Tensor, w2: Tensor, w3: Tensor) -> ExpertWeights[Tensor]:
    """The matrices of an FFN, (H, D), (D, H) and (H, D), as the weights of one expert."""
    return ExpertWeights(w1.unsqueeze(0), w2.unsqueeze(0), w3.unsqueeze(0))


def forward_operands(weights: ExpertWeights[Tensor], cache: "WeightCache | None") -> tuple[list[Tensor], list[Tensor]]:
    """What a forward's op takes of the weights: themselves, what FSDP gathered in FP8, or the cache's operands."""
    return (readable(weights) if cache is None else cache.get(weights)[0]).pack()


class BackwardOperands(NamedTuple):
    """What the GEMMs of a backward read.

    Attributes:
        w13: gate and up as in the forward, (E, 2H, D), if the backward recomputes GEMM 1; else None.
        w13_t: gate and up transposed, (E, D, 2H).
        w2_t: down transposed, (E, H, D).
    """

    w13: QuantizedWeight | None
    w13_t: QuantizedWeight
    w2_t: QuantizedWeight


def quantize_weights_transposed(weights: ExpertWeights[Weight], with_w13: bool) -> BackwardOperands:
    """The backward's operands; ``w13`` from the same read of the weights if ``with_w13``."""
    w13 = None
    if with_w13:
        w13, w13_t = ops.quantize_weight_both(*weights.gate_up)
    else:
        w13_t = ops.quantize_weight_transposed(*weights.gate_up)
    return BackwardOperands(w13, w13_t, ops.quantize_weight_transposed(weights.w2))


def quantize_weights_both(
    w1: Tensor, w2: Tensor, w3: Tensor | None
) -> tuple[ExpertWeights[QuantizedWeight], BackwardOperands]:
    """The operands of both directions, from one read of the weights."""
    w13, w13_t = ops.quantize_weight_both(*ExpertWeights(w1, w2, w3).gate_up)
    w2_q, w2_t = ops.quantize_weight_both(w2)
    return ExpertWeights(w13, w2_q, None), BackwardOperands(w13, w13_t, w2_t)


# --- cache ------------------------------------------------------------------------------------------------------------


class WeightCache:
    """A layer's quantized weights, shared by the microbatches of a step.

    Parameter changes cannot be detected reliably: FSDP's parameters have no version, and writes through ``.data`` do
    not bump it. Therefore every step of a ``torch.optim`` optimizer clears all caches. Other tensors in the weights'
    place, and a version that has moved, clear this one; so do copies that hooks of saved tensors give the backward.
    Code that changes weights in another way between two microbatches calls :meth:`clear`.

    A sample of the values tells when nothing did. It is compared at a cache's 1st, 2nd, 4th, 8th... use since it was
    filled, so that the comparisons of a step are few and no cache stays stale for long.
    """

    _all: ClassVar["weakref.WeakSet[WeightCache]"] = weakref.WeakSet()
    key: list[tuple] | None
    operands: Any
    uses: int
    sample: Tensor | None
    changed: Tensor | None  # on the host; the device writes it when it gets there

    def __init__(self):
        self.clear()
        self._all.add(self)
        _clear_after_optimizer_steps()

    def __reduce__(self) -> tuple:
        return WeightCache, ()  # a copied layer has other weights

    def clear(self) -> None:
        self.operands = self.key = self.sample = self.changed = None
        self.uses = 0

    @classmethod
    def clear_all(cls) -> None:
        """Clears the caches of all layers, as the step of a ``torch.optim`` optimizer does."""
        for cache in cls._all:
            cache.clear()

    @torch.compiler.disable(reason="a graph cannot see whether weights have changed; do without the cache")
    def get(self, weights: Sequence[Tensor | None], quantize: Callable[..., Any] = quantize_weights_both) -> Any:
        """``quantize(*weights)``, by default the operands of both directions, for the weights' present values.

        Raises:
            RuntimeError: the weights had changed at an earlier use, and nothing had cleared the cache; or a CUDA graph
                is being captured.
        """
        tensors = [w for w in weights if w is not None]
        if tensors[0].is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "fp8_flow_moe.cache_weights inside a CUDA graph would replay the quantized weights of the capture; set "
                "it to false"
            )
        key = [_cache_key(w) for w in tensors]
        if self.operands is None or key != self.key:
            self.clear()  # frees the old operands before the new ones are made
            self.operands, self.key, self.sample = quantize(*weights), key, _sample(tensors)
        else:
            with _disable_current_modes():  # per-op checkpointing expects the ops of the use before
                self._notice_change(tensors)
        return self.operands

    def _notice_change(self, tensors: Sequence[Tensor]) -> None:
        self.uses += 1
        if self.uses & (self.uses - 1) == 0:
            sample = _sample(tensors)
            if self.changed is None:
                self.changed = torch.zeros((), dtype=torch.bool, pin_memory=sample.is_cuda)
            self.changed.copy_((sample != cast(Tensor, self.sample)).any(), non_blocking=True)
        if self.changed is not None and self.changed.item():
            raise RuntimeError(
                "weights have changed since fp8_flow_moe.cache_weights quantized them, and no step of an optimizer "
                "of torch.optim was seen: the layer trains on stale weights; call "
                "titan_fp8moe.WeightCache.clear_all() after each optimizer step, or set cache_weights to "
                "false"
            )


def _cache_key(weight: Tensor) -> tuple:
    """Storage, view geometry, dtype, version. A reference to the storage, not its address, which can be reused."""
    view = weight.storage_offset(), weight.shape, weight.stride(), weight.dtype
    return StorageWeakRef(weight.untyped_storage()), view, weight._version


def _sample(weights: Sequence[Tensor]) -> Tensor:
    """Bits of some 100 values of each expert's weights (E, N, K)."""
    steps = ((w.detach(), w.shape[1] // 8 | 1, w.shape[2] // 8 | 1) for w in weights)
    sample = torch.cat([w[:, ::row, ::column].flatten() for w, row, column in steps])
    return sample.view(torch.int16 if sample.dtype == torch.bfloat16 else torch.int32)


@functools.cache
def _clear_after_optimizer_steps() -> None:
    register_optimizer_step_post_hook(lambda *_: WeightCache.clear_all())


# --- FSDP's all-gather in FP8 -----------------------------------------------------------------------------------------
#
# FSDP2 asks a parameter's local tensor for what to gather, and what to make of it, where that tensor has the methods
# fsdp_pre_all_gather and fsdp_post_all_gather (torch.distributed.fsdp, all-gather extensions; torchao's float8 linears
# use them too). Each 128x128 block travels as 16384 e4m3 values and a scale byte: half of bf16's bytes on the wire and
# while the weights are whole. A block must lie on one rank, so FSDP has to shard whole experts: along dim 0, evenly.

# What FSDP, nn.Parameter and DTensor call on a whole parameter.
_ALIASES = {getattr(torch.ops.aten, name).default for name in ("alias", "as_strided", "detach", "view")}


class Fp8GatheredWeight(Tensor):
    """A weight (E, N, K) that FSDP gathered in FP8: what autograd takes for the parameter, in its gradient's dtype.

    It holds no values in that dtype, so every operator but an alias of the whole raises NotImplementedError.

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

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyrefly: ignore[bad-override] # as torch prescribes

    @classmethod
    # pyrefly: ignore[bad-override] # in PyTorch's stub, a method that binds func
    def __torch_dispatch__(cls, func: Any, _: Any, args: tuple = (), kwargs: dict | None = None) -> Tensor:
        weight, *arguments = args
        whole = [weight.shape, weight.stride(), 0]
        got = [tuple(a) if isinstance(a, list | tuple) else a or 0 for a in arguments]
        if func in _ALIASES and not kwargs and got == whole[: len(got)]:
            return cls(weight.quantized, weight.dtype)
        raise NotImplementedError(
            f"{func}: only the experts read weights that were gathered in FP8; use the sharded parameters for anything "
            "else, or set fp8_flow_moe.fp8_all_gather = false"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Fp8GatheredWeight({tuple(self.shape)}, {self.dtype})"


def readable(weights: ExpertWeights[Tensor]) -> ExpertWeights[Weight]:
    """The weights themselves, or the values that FSDP gathered in FP8."""
    values: Any = (w.quantized if isinstance(w, Fp8GatheredWeight) else w for w in weights)
    return ExpertWeights(*values)


class Fp8AllGather(nn.Module):
    """Mixin of a module of experts whose parameters FSDP may gather in FP8."""

    gathers_fp8: bool = False

    def gather_in_fp8(self) -> None:
        """Lets FSDP gather the parameters in FP8. Call it after ``fully_shard``, which must have sharded them along
        dim 0."""
        self.gathers_fp8 = True
        for param in self.parameters():
            gather_in_fp8(cast(DTensor, param))  # a DTensor since fully_shard

    def _apply(self, *args: Any, **kwargs: Any) -> "Fp8AllGather":
        super()._apply(*args, **kwargs)
        if self.gathers_fp8:  # the parameters' local tensors are new ones, as when they leave the meta device
            self.gather_in_fp8()
        return self

    def local_weights(self, *params: nn.Parameter) -> list[Tensor]:
        """The parameters as this rank's plain tensors.

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


def gather_in_fp8(param: DTensor) -> None:
    """Lets FSDP gather ``param``, sharded by experts, in FP8. Repeat it when the local tensor is replaced."""
    local: Any = param._local_tensor  # FSDP looks at this tensor; to_local() may return a view of it
    local.fsdp_pre_all_gather = _PreAllGather(local)
    local.fsdp_post_all_gather = _post_all_gather


class _PreAllGather:
    """FSDP's method of a shard; it does not keep the shard alive. A copy of the shard, also a pickled one, gets a copy
    without a shard: FSDP does not gather copies."""

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
    weight = cast(Fp8GatheredWeight, out._local_tensor if isinstance(out, DTensor) else out)
    if weight.quantized.q.data_ptr() != q.data_ptr():
        raise RuntimeError(
            "FSDP has gathered expert weights into other memory than the time before, which this version of PyTorch is "
            "not expected to do; set fp8_flow_moe.fp8_all_gather = false"
        )
    return None
