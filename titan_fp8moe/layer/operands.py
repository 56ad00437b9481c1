"""The GEMM operands that are made of weights, and the quantized copies of weights that a module keeps.

:class:`WeightOperands` quantizes a weight inside of an op, from the tensor that FSDP has just gathered. With
``fp8_all_gather`` each rank has quantized its shard before (:mod:`titan_fp8moe.layer.fp8_gather`). A module with a
:class:`WeightCache` (:func:`titan_fp8moe.nn.modules.cache_of`) keeps the copies, for the microbatches of a step, or for
good where weights are frozen. The buffers are made once and refreshed in place, so that graphs find them where they
were.

**Copies have an identity.** Each time that copies are made, they get a new generation. A forward returns the number of
those that it read, and autograd keeps it with an alias of the weights. A backward that finds another number makes the
copies again, of these weights. So a teacher, an EMA or other microbatches may use the module between a forward and its
backward. At worst weights are quantized once more.

**Who decides.** The device compares generations, optimizer steps and samples of the values
(:func:`titan_fp8moe.recipe.seen_weights`), so that replays of CUDA graphs decide anew. The host, where it runs, also
compares the tensors themselves. The samples are there for writes through ``.data``, of which PyTorch counts no version:
other optimizers, EMA swaps and merged adapters write so. Nothing tells of parameters of FSDP either.

**Threads.** An op that refreshes copies holds their lock until it has launched what reads them.
"""

import contextlib
import functools
import sys
import threading
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes

from titan_fp8moe import ops, patches
from titan_fp8moe.kernels.quantize import stored_transposed
from titan_fp8moe.layer.fp8_gather import Fp8GatheredWeight
from titan_fp8moe.layer.weights import ExpertWeights
from titan_fp8moe.ops import Fp8Weight
from titan_fp8moe.recipe import BLOCK, E8M0, FP8, STATE_HEADER, num_samples, padded
from titan_fp8moe.spec import ExpertSpec

Layouts = Literal["both", "forward"]
Group = Sequence[Tensor]
"""The one or two weights (E, N, K) that an operand is made of."""

# --- what is kept -----------------------------------------------------------------------------------------------------


class KeptOperand(NamedTuple):
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


class Copies:
    """One set of buffers.

    Attributes:
        operands: the buffers.
        steps: (1,) int32, the device's count of optimizer steps, which all copies share.
        lock: held while they are refreshed and read.
        keys: for each operand of the weights that it is of, as far as the host knows.
        latest: the result of each operand's last refresh. A backward that has it finds its forward's copies.
        replayed: a CUDA graph refreshes them, without the host.
    """

    replayed: bool = False
    _stream: "torch.cuda.Stream | None" = None

    def __init__(self, operands: tuple[KeptOperand, ...], steps: Tensor, lock: threading.Lock):
        self.operands, self.steps, self.lock = operands, steps, lock
        self.latest: list[Tensor | None] = [None] * len(operands)
        self.keys: list[list[tuple] | None] = [None] * len(operands)
        for tensor in (steps, *(t for operand in operands for t in operand if t is not None)):
            torch._dynamo.mark_static_address(tensor, guard=False)  # a CUDA graph of Inductor's would copy it
        _live[operands[0].state.data_ptr()] = self

    def refresh(self, at: int, group: Group, steps: Tensor | None, generation: Tensor | None = None) -> Tensor:
        """:func:`titan_fp8moe.ops.refresh_weight` of an operand, on the current stream. A forward's is forced where
        these are other tensors than those of the last one, or have another version."""
        key, captured = [tensor_key(w) for w in group], False
        if (weight := group[0]).is_cuda:
            if captured := torch.cuda.is_current_stream_capturing():
                self.replayed = True
            elif self._stream != (stream := torch.cuda.current_stream(weight.device)):
                if self._stream is not None:
                    stream.wait_stream(self._stream)
                self._stream = stream
        force = not captured and key != self.keys[at]  # a graph would repeat a forced refresh in every replay
        made = ops.refresh_weight([*group], *self.operands[at], steps, force, generation)
        self.latest[at] = made
        if not captured:
            self.keys[at] = key
        return made

    def are_of(self, at: int, generation: Tensor) -> bool:
        """Whether this host knows that an operand is still what the forward with this ``generation`` read."""
        latest = self.latest[at]
        if latest is None or self.replayed or latest.data_ptr() != generation.data_ptr():
            return False
        return not (latest.is_cuda and torch.cuda.is_current_stream_capturing())


_live: "weakref.WeakValueDictionary[int, Copies]" = weakref.WeakValueDictionary()
"""Copies by the address of their first state: ops get tensors only."""


def _copies_of(state: Tensor) -> Copies | None:
    """The copies of an op's call; None for tensors that are traced, or that an exported program holds."""
    return _live.get(state.data_ptr()) if type(state) is Tensor and not state.is_meta else None


def tensor_key(tensor: Tensor) -> tuple:
    """The storage, whose address is not used again while the key lives; version, view geometry, dtype."""
    version = 0 if tensor.is_inference() else tensor._version
    storage = StorageWeakRef(tensor.untyped_storage())
    return storage, version, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def _sizes(group: Group) -> tuple[Any, ...]:
    """The sizes of an operand's buffers: E, N, K, number of samples, strides of the scales. Scales lie as the weight
    does, so that one which is stored transposed is quantized from where it lies."""
    E, _, K = group[0].shape
    N, K = sum(padded(w.shape[1]) for w in group), padded(K)
    n, k = N // BLOCK, K // BLOCK
    strides = (n * k, 1, n) if stored_transposed(group) else (n * k, k, 1)
    return E, N, K, num_samples(group[0]) * len(group), strides


def _empty_operand(sizes: tuple[Any, ...], layouts: Layouts, device: torch.device) -> KeptOperand:
    E, N, K, samples, scale_strides = sizes
    blocks = E, N // BLOCK, K // BLOCK
    state = torch.zeros(STATE_HEADER + samples, dtype=torch.int32, device=device)
    state[0] = -1
    return KeptOperand(
        torch.empty(E, N, K, dtype=FP8, device=device),
        torch.empty(E, K, N, dtype=FP8, device=device) if layouts == "both" else None,
        torch.empty_strided(blocks, scale_strides, dtype=E8M0, device=device),
        state,
    )


# --- who keeps it -----------------------------------------------------------------------------------------------------


class WeightCache:
    """The quantized weights of a module, in memory that stays where it is.

    After a step of a ``torch.optim`` optimizer every cache of trained weights is refreshed in its next forward, and
    after :meth:`clear_all` every cache. So is a cache of other tensors or of another version, and one whose weights
    differ in a sample of 1,024 values or more of each weight, at least 32 of each expert. The sample alone shows a
    change of few values through ``.data``, and in replays of a CUDA graph or under FSDP any change by hand: call
    :meth:`clear_all` after it.

    Args:
        layouts: what is kept. ``both`` takes 2 bytes per parameter. ``forward`` takes 1, and each backward transposes.
        kind: the same for layers that are alike, so that they can share compiled code.
        owner: the module that :func:`own_cache` gives it to.

    Attributes:
        copies: the buffers; None before the first forward.
    """

    _all: ClassVar["weakref.WeakSet[WeightCache]"] = weakref.WeakSet()
    copies: Copies | None = None
    _sizes: list[tuple] | None = None

    def __init__(self, layouts: Layouts = "both", kind: str = "", owner: nn.Module | None = None):
        self.layouts, self.kind = layouts, kind or str(id(self))
        self.owner = None if owner is None else weakref.ref(owner)
        self._lock = threading.Lock()
        self._all.add(self)
        register = "torch.optim.optimizer:register_optimizer_step_post_hook"
        patches.hook(register, after_optimizer_step, checked_on="torch 2.11.0 to 2.15.0")

    def __reduce__(self) -> tuple:
        return WeightCache, (self.layouts, self.kind)  # a copied layer has other weights

    def __deepcopy__(self, memo: dict) -> "WeightCache":
        # The layers of a copied model are a kind of their own: one that never runs, such as an EMA, gets no buffers.
        return WeightCache(self.layouts, f"{self.kind} copied")

    def clear(self) -> None:
        """Lets the next forward quantize the weights anew."""
        if (copies := self.copies) is not None:
            copies.keys = [None] * len(copies.operands)
            with _disable_current_modes():
                for operand in copies.operands:
                    operand.state.data[:1].fill_(-1)

    @staticmethod
    def clear_all() -> None:
        """As :meth:`clear` for the weights of all layers, frozen ones too."""
        for cache in list(WeightCache._all):
            cache.clear()

    def buffers(self, groups: Sequence[Group]) -> Copies:
        """The copies for such weights, made unless they are there.

        Raises:
            RuntimeError: a CUDA graph is being captured, and there are none yet.
        """
        sizes, device = [_sizes(group) for group in groups], groups[0][0].device
        if torch.compiler.is_compiling():
            _allocate_kind(self.kind, sizes, device)
        else:
            with self._lock:
                self._allocate(sizes, device)
        return cast(Copies, self.copies)

    def _allocate(self, sizes: list[tuple], device: torch.device) -> None:
        """Makes the buffers, unless they are there. Those of before live as long as a backward may read them."""
        if self.copies is not None and self._sizes == sizes and self.copies.steps.device == device:
            return
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "a layer that keeps quantized weights (fp8_flow_moe.cache_weights, or frozen experts) makes its "
                "buffers in its first call, which cannot be inside of a CUDA graph: run it once before the capture"
            )
        self.copies = None
        with _disable_current_modes(), torch.inference_mode(False):
            steps = _steps.setdefault(device, torch.zeros(1, dtype=torch.int32, device=device))
            operands = tuple(_empty_operand(size, self.layouts, device) for size in sizes)
            self.copies, self._sizes = Copies(operands, steps, self._lock), sizes


@torch.compiler.assume_constant_result  # runs once per trace, outside of the graph
def _allocate_kind(kind: str, sizes: list, device: torch.device) -> None:
    """Makes the buffers of all layers of a kind: without them, the first call of each would compile the code again.
    It takes no cache, which would make the code one layer's."""
    for cache in WeightCache._all:
        if cache.kind == kind:
            cache._allocate(sizes, device)


def add_cache(module: Any, layouts: Layouts, name: str = "cache") -> None:
    """Gives a module, whose parameters are set, a weight cache: its attribute ``name``. Loading a state dict clears
    it."""
    if name not in vars(module):
        module.register_load_state_dict_post_hook(functools.partial(_clear_cache, name))
    shapes = [tuple(param.shape) for param in module.parameters()]
    setattr(module, name, WeightCache(layouts, f"{type(module).__qualname__} {layouts} {shapes}", module))


def _clear_cache(name: str, module: Any, _: Any) -> None:
    getattr(module, name).clear()


def own_cache(module: Any, name: str = "cache") -> WeightCache | None:
    """The module's cache; None for copies that share its attributes, such as nn.DataParallel's replicas, which keep
    nothing."""
    cache: WeightCache = getattr(module, name)
    if torch.compiler.is_compiling():  # they share one: right, but each quantizes what the other has replaced
        return cache
    if cache.owner is None or cache.owner() is None:
        cache.owner = weakref.ref(module)  # a deep copy
    return cache if cache.owner() is module else None


@torch.compiler.assume_constant_result  # runs once per trace, outside of the graph
def _is_for_another_process() -> bool:
    """Whether aot_compile traces, whose graphs are saved. The buffers that its guards name are this process's. It sets
    this while it traces, by torch 2.13 and 2.14."""
    return torch._functorch.config.strict_autograd_cache


_steps: dict[torch.device, Tensor] = {}


@torch.compiler.disable
def after_optimizer_step(*_: Any) -> None:
    """Lets the next forward of each layer quantize its weights anew, unless they are frozen."""
    with _disable_current_modes():
        for steps in _steps.values():
            steps.data.add_(1)


# --- weights in an op -------------------------------------------------------------------------------------------------


SWIGLU = ExpertSpec()  # also of linears, which read no field of it
W13, W2 = 0, 1
"""The places of an FFN's operands."""
_COUNT = len(ExpertWeights._fields)
_UNLOCKED = contextlib.nullcontext()


def groups_of(weights: ExpertWeights, expert: ExpertSpec) -> tuple[tuple[Any, ...], ...]:
    """The weights that each operand is made of: gate and up, and down. A linear has w1 alone. Gate and up of one w1 are
    two views where the operand has padding behind each of them."""
    w1, w2, w3 = weights
    gate_up = (w1,) if w3 is None else (w1, w3)
    if w2 is None:
        return (gate_up,)
    if w3 is None and expert.gated and not expert.interleaved and w1.shape[1] % (2 * BLOCK):
        gate_up = w1.chunk(2, 1)
    return gate_up, (w2,)


def copies_for(cache: WeightCache | None, weights: ExpertWeights, expert: ExpertSpec) -> Copies | None:
    """The cache's copies for these weights of experts; none without a cache, or for fake weights, such as those of
    torch.export: buffers are real. Nor do graphs that another process will run have any."""
    if cache is None or isinstance(weights.w1, FakeTensor):
        return None
    if torch.compiler.is_compiling() and _is_for_another_process():
        return None
    return cache.buffers(groups_of(weights, expert))


def aliases(tensors: Iterable[Tensor | None]) -> list[Tensor | None]:
    """The tensors as they are now, for autograd to keep: a parameter would have its new ``.data`` in the backward.
    DeepSpeed's ZeRO-3 replaces ``.data`` to free and refill a parameter: there the parameter is kept."""
    if not torch.compiler.is_compiling() and "deepspeed" in sys.modules:
        return [t if t is None or hasattr(t, "ds_tensor") else t.detach() for t in tensors]
    return [t if t is None else t.detach() for t in tensors]


def pack_weights(weights: ExpertWeights, copies: Copies | None, frozen: bool) -> list[Tensor | None]:
    """Weights as an op takes them, of one or of several experts; a linear's is w1. The list holds

    * the weights; where there are copies, followed by their buffers and the count of optimizer steps, None if frozen;
    * or values and scales of weights that are stored in FP8;
    * or, of those that FSDP gathered in FP8, stand-ins with the parameters' shapes, then values and scales.
    """
    if copies is not None:
        buffers = (t for operand in copies.operands for t in operand)
        return [*weights, *buffers, None if frozen else copies.steps]
    if not isinstance(weights.w1, Fp8GatheredWeight):
        return weights.pack() if isinstance(weights.w1, Fp8Weight) else [*weights]
    stand_ins = (None if w is None else w.stand_in() for w in weights)
    values = ExpertWeights(*(None if w is None else w.quantized for w in weights))
    return [*stand_ins, *values.pack()]


class WeightOperands:
    """The operands that an op makes of its weights.

    Args:
        packed: of :func:`pack_weights`.

    Attributes:
        like: tensors with the parameters' shapes, dtypes and strides.
        groups: for each operand its weights, or quantized weights; gate and up apart where the operand pads them so.
        kept: the buffers of copies, if there are any.
        held: the context in which operands are made and read: the lock of the copies, if there are any.
    """

    def __init__(self, packed: list[Tensor | None], expert: ExpertSpec = SWIGLU):
        self.like: ExpertWeights = ExpertWeights(*packed[:_COUNT])
        self.kept: list[KeptOperand] = []
        self.copies: Copies | None = None
        self.held: Any = _UNLOCKED
        values = self.like
        # 3 are plain weights, 6 stored in FP8, 9 gathered in FP8.
        if len(packed) not in (_COUNT, 2 * _COUNT, 3 * _COUNT):
            *buffers, self.steps = cast(list[Any], packed[_COUNT:])
            size = len(KeptOperand._fields)
            self.kept = [KeptOperand(*buffers[at : at + size]) for at in range(0, len(buffers), size)]
            if (copies := _copies_of(self.kept[0].state)) is not None:
                self.copies, self.held = copies, copies.lock
        elif len(packed) > _COUNT:
            values = ExpertWeights.unpack(packed[-2 * _COUNT :])
        self.groups = groups_of(values, expert)

    def of_forward(self) -> tuple[list[Fp8Weight], list[Tensor] | None]:
        """w13 (E, 2H, D), gate and up in one, or up alone without a gate, and w2 (E, D, H), unless there is none. And
        the generation of each one's copies, (2,) int32, if these are kept."""
        if not self.kept:
            return [ops.quantize_weight(*group) for group in self.groups], None
        made = [self._refresh(at) for at in range(len(self.kept))]
        return [operand.plain for operand in self.kept], made

    def plain(self, at: int, generations: list[Tensor] | None) -> Fp8Weight:
        """An operand once more, for a backward: that of the forward with these ``generations``."""
        if generations is None:
            return ops.quantize_weight(*self.groups[at])
        return self._kept(at, generations[at]).plain

    def transposed(self, at: int, generations: list[Tensor] | None) -> Fp8Weight:
        """A backward's operand, the transpose of :meth:`plain`."""
        if generations is None:
            return ops.quantize_weight_transposed(*self.groups[at])
        return self._kept(at, generations[at]).transposed()

    def _kept(self, at: int, generation: Tensor) -> KeptOperand:
        if self.copies is None or not self.copies.are_of(at, generation):
            self._refresh(at, generation)
        return self.kept[at]

    def _refresh(self, at: int, generation: Tensor | None = None) -> Tensor:
        if self.copies is not None:
            return self.copies.refresh(at, self.groups[at], self.steps, generation)
        return ops.refresh_weight([*self.groups[at]], *self.kept[at], self.steps, False, generation)
