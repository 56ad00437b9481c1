"""Quantized weights that a module keeps, for the microbatches of a step, or for good where weights are frozen.

The buffers are made once and refreshed in place by :func:`titan_fp8moe.ops.refresh_weight`, an op of every forward. The
device decides in it whether the weights have changed. It compares the number of optimizer steps, which a hook of
``torch.optim`` counts, and samples of the values. So the same code serves eager layers, compiled graphs, and CUDA
graphs, whose replays run no Python. The host alone knows of other tensors in the weights' place, and of a version that
has moved. Both force a refresh where Python runs.

The backward reads the buffers without another look: weights do not change between a forward and its backward.
"""

import functools
import weakref
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._python_dispatch import _disable_current_modes

from titan_fp8moe import ops
from titan_fp8moe.kernels.quantize import stored_transposed
from titan_fp8moe.layer.weights import BackwardOperands, ExpertWeights, ForwardOperands, backward_operands, readable
from titan_fp8moe.ops import Fp8Weight
from titan_fp8moe.recipe import E8M0, FP8, TILE, num_samples, padded
from titan_fp8moe.spec import BackwardSpec

Layouts = Literal["both", "forward"]


class CachedOperand(NamedTuple):
    """The buffers of one GEMM operand, as :func:`titan_fp8moe.ops.refresh_weight` takes them."""

    q: Tensor
    q_t: Tensor | None
    scale: Tensor
    state: Tensor

    @property
    def plain(self) -> Fp8Weight:
        return Fp8Weight(self.q, self.scale)

    def transposed(self) -> Fp8Weight:
        """The backward's operand: kept, or made of the forward's by moving bytes."""
        if self.q_t is None:
            return ops.quantize_weight_transposed(self.plain)
        return Fp8Weight(self.q_t, self.scale.transpose(1, 2))


class WeightCache:
    """The quantized weights of a layer, in memory that stays where it is.

    After a step of a ``torch.optim`` optimizer, and after :meth:`clear_all`, every cache is refreshed in its next
    forward. So is a cache whose weights differ in a sample of 1,024 values or more of each weight, at least 32 of each
    expert. Python sees a change by hand of fewer values by the tensor's version. Replays of a CUDA graph, compiled
    graphs and FSDP do not: call :meth:`clear_all` after such a change.

    Args:
        layouts: what is kept. ``both`` takes 2 bytes per parameter. ``forward`` takes 1, and each backward transposes.
        kind: the same for layers that are alike, so that they can share compiled code.

    Attributes:
        operands: the buffers; empty before the first forward.
        steps: (1,) int32, the device's count of optimizer steps, which all caches share.
    """

    _all: ClassVar["weakref.WeakSet[WeightCache]"] = weakref.WeakSet()
    operands: tuple[CachedOperand, ...] = ()
    steps: Tensor | None = None
    key: list[tuple] | None = None

    def __init__(self, layouts: Layouts = "both", kind: str = ""):
        self.layouts, self.kind = layouts, kind or str(id(self))
        self._all.add(self)
        _count_optimizer_steps()

    def __reduce__(self) -> tuple:
        return WeightCache, (self.layouts, self.kind)  # a copied layer has other weights

    def clear(self) -> None:
        """Lets the next forward quantize the weights anew."""
        self.key = None
        with _disable_current_modes():
            for operand in self.operands:
                operand.state.data[:1].fill_(-1)

    @staticmethod
    def clear_all() -> None:
        """As :meth:`clear` for the trained weights of all layers; a step of a ``torch.optim`` optimizer does so."""
        with _disable_current_modes():
            for steps in _steps.values():
                steps.data.add_(1)

    def refresh(self, groups: Sequence[Sequence[Tensor]], frozen: bool) -> list[Tensor]:
        """Brings :attr:`operands` to the weights' present values, one operand for each group of one or two weights.

        Args:
            frozen: no step changes the weights.

        Returns:
            Tensors that an op which reads the operands must take, so that a graph orders it after this.

        Raises:
            RuntimeError: a CUDA graph is being captured, and there are no buffers yet.
        """
        force = self._prepare(groups)
        steps = None if frozen else self.steps
        return [
            ops.refresh_weight(list(group), *operand, steps, force)
            for group, operand in zip(groups, self.operands, strict=True)
        ]

    def _prepare(self, groups: Sequence[Sequence[Tensor]]) -> bool:
        """Makes the buffers if need be. Returns whether the host knows that they must be refreshed."""
        if torch.compiler.is_compiling():
            _allocate_kind(self.kind, [_sizes(group) for group in groups], groups[0][0].device)
            return False
        key = [_cache_key(w) for group in groups for w in group]
        if key == self.key:
            return False
        captured = groups[0][0].is_cuda and torch.cuda.is_current_stream_capturing()
        if captured and self.operands:  # a refresh in the graph would repeat in every replay
            return False
        if captured:
            raise RuntimeError(
                "a layer that keeps quantized weights (fp8_flow_moe.cache_weights, or frozen experts) makes its "
                "buffers in its first call, which cannot be inside of a CUDA graph: run it once before the capture"
            )
        with _disable_current_modes():
            _allocate(self, [_sizes(group) for group in groups], groups[0][0].device)
        self.key = key
        return True


def _cache_key(weight: Tensor) -> tuple:
    """Storage, view geometry, dtype, version. A reference to the storage, not its address, which can be reused."""
    view = weight.storage_offset(), weight.shape, weight.stride(), weight.dtype
    version = 0 if weight.is_inference() else weight._version
    return StorageWeakRef(weight.untyped_storage()), view, version


class _Sizes(NamedTuple):
    """The sizes of an operand's buffers: shape (E, N, K), number of samples, strides of the scales. Scales lie as the
    weight does, so that one which is stored transposed is quantized from where it lies."""

    shape: tuple[int, int, int]
    samples: int
    scale_strides: tuple[int, int, int]


def _sizes(group: Sequence[Tensor]) -> _Sizes:
    E, _, K = group[0].shape
    N, K = sum(padded(w.shape[1]) for w in group), padded(K)
    n, k = N // TILE, K // TILE
    strides = (n * k, 1, n) if stored_transposed(group) else (n * k, k, 1)
    return _Sizes((E, N, K), num_samples(group[0]) * len(group), strides)


@torch.compiler.assume_constant_result  # runs once per trace, outside of the graph
def _allocate_kind(kind: str, sizes: list, device: torch.device) -> None:
    """Makes the buffers of all layers of a kind: without them, the first call of each would compile the code again.
    It takes no cache, which would make the code one layer's."""
    for cache in WeightCache._all:
        if cache.kind == kind:
            _allocate(cache, sizes, device)


def kind_of(module: nn.Module, layouts: Layouts) -> str:
    """The ``kind`` of the cache of a module's weights."""
    return f"{type(module).__qualname__} {layouts} {[tuple(param.shape) for param in module.parameters()]}"


def _allocate(cache: WeightCache, sizes: list[_Sizes], device: torch.device) -> None:
    """Makes the buffers of a cache, unless they are there. The memory of others is freed before, and what they held is
    quantized anew."""
    there: list[Any] = [(tuple(o.q.shape), o.state.numel() - 1, o.scale.stride()) for o in cache.operands]
    if there == sizes and cache.operands[0].q.device == device:
        return
    cache.operands, cache.key = (), None
    with torch.inference_mode(False):
        cache.steps = _steps.setdefault(device, torch.zeros(1, dtype=torch.int32, device=device))
        cache.operands = tuple(_empty_operand(size, cache.layouts, device) for size in sizes)
    for tensor in (cache.steps, *(t for operand in cache.operands for t in operand if t is not None)):
        torch._dynamo.mark_static_address(tensor, guard=False)  # a CUDA graph of Inductor's would copy it


def _empty_operand(sizes: _Sizes, layouts: Layouts, device: torch.device) -> CachedOperand:
    E, N, K = sizes.shape
    blocks = E, N // TILE, K // TILE
    return CachedOperand(
        torch.empty(E, N, K, dtype=FP8, device=device),
        torch.empty(E, K, N, dtype=FP8, device=device) if layouts == "both" else None,
        torch.empty_strided(blocks, sizes.scale_strides, dtype=E8M0, device=device),
        torch.full((1 + sizes.samples,), -1, dtype=torch.int32, device=device),
    )


_steps: dict[torch.device, Tensor] = {}


@functools.cache
def _count_optimizer_steps() -> None:
    register_optimizer_step_post_hook(_after_optimizer_step)


@torch.compiler.disable
def _after_optimizer_step(*_: Any) -> None:
    WeightCache.clear_all()


# --- operands, from a cache or not ------------------------------------------------------------------------------------


def packed_weights(weights: ExpertWeights[Any], cache: WeightCache | None, frozen: bool) -> list[Tensor | None]:
    """The weights as a forward's op takes them: themselves, as FSDP gathered them in FP8, or the cache's operands."""
    if cache is None:
        return readable(weights).pack()
    refreshed = cache.refresh((weights.gate_up, (weights.w2,)), frozen)
    w13, w2 = cache.operands
    return [*ForwardOperands(w13.plain, w2.plain).pack(), *refreshed]


def cached_backward_operands(
    weights: ExpertWeights[Any], cache: WeightCache | None, backward: BackwardSpec
) -> BackwardOperands:
    """The operands of a backward, from the cache or quantized for it."""
    if cache is None:
        return backward_operands(readable(weights), with_w13=backward.recompute == "experts")
    w13, w2 = cache.operands
    return BackwardOperands(w13.plain, w13.transposed(), w2.transposed())
