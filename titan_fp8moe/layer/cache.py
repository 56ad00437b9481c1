"""A cache of a layer's quantized weights, for the microbatches of a step."""

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import _disable_current_modes

from titan_fp8moe.layer.weights import BackwardOperands, ExpertWeights, backward_operands, both_operands, readable
from titan_fp8moe.spec import BackwardSpec


class WeightCache:
    """A layer's quantized weights, shared by the microbatches of a step.

    Parameter changes cannot be detected reliably: FSDP's parameters have no version, and writes through ``.data`` do
    not bump it. Therefore every step of a ``torch.optim`` optimizer clears all caches. Other tensors in the weights'
    place, and a version that has moved, clear this one; so do copies that hooks of saved tensors give the backward.
    Code that changes weights in another way between two microbatches calls :meth:`clear`.

    A sample of the values reveals weights that changed although nothing cleared the cache. It is compared at the 1st,
    2nd, 4th, 8th... use since the cache was filled: comparisons are few, and no cache stays stale for long.
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
    def get(self, weights: Sequence[Tensor | None], quantize: Callable[..., Any] = both_operands) -> Any:
        """``quantize(*weights)`` for the weights' present values, by default the operands of both directions.

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


# --- operands, from a cache or not ------------------------------------------------------------------------------------


def packed_weights(weights: ExpertWeights[Tensor], cache: WeightCache | None) -> list[Tensor | None]:
    """The weights as a forward's op takes them: themselves, as FSDP gathered them in FP8, or the cache's operands."""
    return readable(weights).pack() if cache is None else cache.get(weights)[0].pack()


def cached_backward_operands(
    weights: ExpertWeights[Tensor], cache: WeightCache | None, backward: BackwardSpec
) -> BackwardOperands:
    """The operands of a backward, from the cache or quantized for it."""
    if cache is not None:
        return cache.get(weights)[1]
    return backward_operands(readable(weights), with_w13=backward.recompute == "experts")
