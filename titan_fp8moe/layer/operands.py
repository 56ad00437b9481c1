"""The GEMM operands that are made of weights, and the quantized copies of weights that a module keeps.

:func:`forward_operands` and :func:`backward_operands` quantize a weight, from the tensor that FSDP has just gathered.
With ``fp8_all_gather`` each rank has quantized its shard before (:mod:`titan_fp8moe.layer.fp8_gather`). A module with a
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

**Threads.** Whoever refreshes copies and reads them holds their lock meanwhile. Compiled code does in a forward only.
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
from titan_fp8moe.layer.weights import ExpertWeights, readable
from titan_fp8moe.ops import Fp8Weight
from titan_fp8moe.ops.backend import custom_op
from titan_fp8moe.recipe import E8M0, FP8, STATE_HEADER, TILE, num_samples, padded
from titan_fp8moe.spec import BackwardSpec

Layouts = Literal["both", "forward"]
Groups = Sequence[Sequence[Tensor]]
"""For each operand the one or two weights (E, N, K) that it is made of."""

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
        key: of the weights that they are of, as far as the host knows.
        ticket: counts refreshes. If it has not moved, a backward's copies are its forward's.
        replayed: a CUDA graph refreshes them, without the host.
    """

    key: list[tuple] | None = None
    ticket: int = 0
    replayed: bool = False
    _storages: list[StorageWeakRef] | None = None  # so that none of the key's addresses is used again
    _stream: "torch.cuda.Stream | None" = None
    _raw_stream: int = -1

    def __init__(self, operands: tuple[KeptOperand, ...], steps: Tensor):
        self.operands, self.steps, self.lock, self._seen = operands, steps, threading.Lock(), threading.local()
        for tensor in (steps, *(t for operand in operands for t in operand if t is not None)):
            torch._dynamo.mark_static_address(tensor, guard=False)  # a CUDA graph of Inductor's would copy it
        _live[operands[0].state.data_ptr()] = self

    def ticket_of_thread(self) -> int:
        """The ticket of this thread's last refresh."""
        return getattr(self._seen, "ticket", -1)

    def pack(self, frozen: bool) -> list[Tensor | None]:
        return [*(t for operand in self.operands for t in operand), None if frozen else self.steps]

    def forget(self) -> None:
        """Lets the next forward quantize the weights anew."""
        self.key = None
        with _disable_current_modes():
            for operand in self.operands:
                operand.state.data[:1].fill_(-1)

    def note(self, groups: Groups) -> bool:
        """Notes a refresh by these weights, on the current stream. Returns whether they are other tensors than those of
        the last one, or have another version."""
        self.ticket += 1
        if (weight := groups[0][0]).is_cuda:
            if torch.cuda.is_current_stream_capturing():
                self.replayed = True
                return False  # the graph would repeat a forced refresh in every replay
            if self._raw_stream != (raw := torch._C._cuda_getCurrentRawStream(weight.get_device())):
                stream = torch.cuda.current_stream(weight.device)
                if self._stream is not None:
                    stream.wait_stream(self._stream)
                self._stream, self._raw_stream = stream, raw
        key = [_identity(w) for group in groups for w in group]
        changed = key != self.key
        if changed:
            self.key = key
            self._storages = [StorageWeakRef(w.untyped_storage()) for group in groups for w in group]
        self._seen.ticket = self.ticket
        return changed


_live: "weakref.WeakValueDictionary[int, Copies]" = weakref.WeakValueDictionary()
"""Copies by the address of their first state: ops get tensors only."""


def _copies_of(state: Tensor) -> Copies | None:
    """The copies of an op's call; None for tensors that are traced, or that an exported program holds."""
    return _live.get(state.data_ptr()) if type(state) is Tensor and not state.is_meta else None


def _identity(tensor: Tensor) -> tuple:
    """Address of the storage's record, view geometry, dtype, version."""
    version = 0 if tensor.is_inference() else tensor._version
    storage = tensor.untyped_storage()._cdata
    return storage, version, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def tensor_key(tensor: Tensor) -> tuple:
    """:func:`_identity` with a reference to the storage, whose address is then not used again."""
    return StorageWeakRef(tensor.untyped_storage()), _identity(tensor)


def _sizes(group: Sequence[Tensor]) -> tuple[Any, ...]:
    """The sizes of an operand's buffers: E, N, K, number of samples, strides of the scales. Scales lie as the weight
    does, so that one which is stored transposed is quantized from where it lies."""
    E, _, K = group[0].shape
    N, K = sum(padded(w.shape[1]) for w in group), padded(K)
    n, k = N // TILE, K // TILE
    strides = (n * k, 1, n) if stored_transposed(group) else (n * k, k, 1)
    return E, N, K, num_samples(group[0]) * len(group), strides


def _empty_operand(sizes: tuple[Any, ...], layouts: Layouts, device: torch.device) -> KeptOperand:
    E, N, K, samples, scale_strides = sizes
    blocks = E, N // TILE, K // TILE
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
        owner: the module; a copy of it that shares this object gets one of its own from :func:`own_cache`.

    Attributes:
        copies: the buffers; None before the first forward.
    """

    _all: ClassVar["weakref.WeakSet[WeightCache]"] = weakref.WeakSet()
    copies: Copies | None = None
    _sizes: list[tuple] | None = None
    _fits: list[tuple] | None = None

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
        return WeightCache(self.layouts, f"{self.kind} of {memo.setdefault('titan_fp8moe', object())}")

    def clear(self) -> None:
        """Lets the next forward quantize the weights anew."""
        if self.copies is not None:
            self.copies.forget()

    @staticmethod
    def clear_all() -> None:
        """As :meth:`clear` for the weights of all layers, frozen ones too."""
        for cache in list(WeightCache._all):
            cache.clear()

    def buffers(self, groups: Groups) -> Copies:
        """The copies for such weights, which :func:`pack` hands to an op. They are made unless they are there.

        Raises:
            RuntimeError: a CUDA graph is being captured, and there are none yet.
        """
        if torch.compiler.is_compiling():
            _allocate_kind(self.kind, [_sizes(group) for group in groups], groups[0][0].device)
        else:
            fits = [(w.shape, w.stride(), w.device) for group in groups for w in group]
            with self._lock:
                if fits != self._fits:
                    self._allocate([_sizes(group) for group in groups], groups[0][0].device)
                    self._fits = fits
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
        self.copies = self._fits = None
        with _disable_current_modes(), torch.inference_mode(False):
            steps = _steps.setdefault(device, torch.zeros(1, dtype=torch.int32, device=device))
            self.copies = Copies(tuple(_empty_operand(size, self.layouts, device) for size in sizes), steps)
        self._sizes = sizes


@torch.compiler.assume_constant_result  # runs once per trace, outside of the graph
def _allocate_kind(kind: str, sizes: list, device: torch.device) -> None:
    """Makes the buffers of all layers of a kind: without them, the first call of each would compile the code again.
    It takes no cache, which would make the code one layer's."""
    for cache in WeightCache._all:
        if cache.kind == kind:
            cache._allocate(sizes, device)


def add_cache(module: Any, layouts: Layouts, kind: str = "", name: str = "cache") -> None:
    """Gives a module a weight cache, its attribute ``name``. Loading a state dict clears it."""
    if name not in vars(module):
        module.register_load_state_dict_post_hook(functools.partial(_clear_cache, name))
    setattr(module, name, WeightCache(layouts, kind, module))


def _clear_cache(name: str, module: Any, _: Any) -> None:
    getattr(module, name).clear()


def own_cache(module: Any, name: str = "cache") -> WeightCache:
    """The module's cache. Copies of a module that share its attributes, such as nn.DataParallel's replicas, get their
    own."""
    cache: WeightCache = getattr(module, name)
    # In compiled code they share one: right, but each quantizes what the other has replaced.
    if not torch.compiler.is_compiling() and (cache.owner is None or cache.owner() is not module):
        cache = WeightCache(cache.layouts, cache.kind, module)
        setattr(module, name, cache)
    return cache


def kind_of(module: nn.Module, layouts: Layouts) -> str:
    """The ``kind`` of the cache of a module's weights."""
    return f"{type(module).__qualname__} {layouts} {[tuple(param.shape) for param in module.parameters()]}"


_steps: dict[torch.device, Tensor] = {}


@torch.compiler.disable
def after_optimizer_step(*_: Any) -> None:
    """Lets the next forward of each layer quantize its weights anew, unless they are frozen."""
    with _disable_current_modes():
        for steps in _steps.values():
            steps.data.add_(1)


# --- a forward's operands ---------------------------------------------------------------------------------------------


class Generations(NamedTuple):
    """The results of :func:`titan_fp8moe.ops.refresh_weight` for each operand, (2,) int32; None where there are no
    copies."""

    w13: Any = None
    w2: Any = None

    @property
    def there(self) -> list[Tensor]:
        return [generation for generation in self if generation is not None]


_COUNT = len(ExpertWeights._fields)
_UNLOCKED = contextlib.nullcontext()


def _groups_of(weights: ExpertWeights[Any]) -> Groups:
    return (weights.gate_up,) if weights.w2 is None else (weights.gate_up, (weights.w2,))


def usable(cache: WeightCache | None, weight: Tensor) -> WeightCache | None:
    """The cache, but none for fake weights, such as those of torch.export: buffers are real."""
    return None if cache is None or isinstance(weight, FakeTensor) else cache


def aliases(tensors: Iterable[Tensor | None]) -> list[Tensor | None]:
    """The tensors as they are now, for autograd to keep: a parameter would have its new ``.data`` in the backward.
    DeepSpeed's ZeRO-3 replaces ``.data`` to free and refill a parameter: there the parameter is kept."""
    if not torch.compiler.is_compiling() and "deepspeed" in sys.modules:
        return [t if t is None or hasattr(t, "ds_tensor") else t.detach() for t in tensors]
    return [t if t is None else t.detach() for t in tensors]


class Packed(NamedTuple):
    """Weights as a forward's op takes them, followed by copies if there are any; or as FSDP gathered them in FP8."""

    tensors: list[Tensor | None]
    copies: Copies | None = None
    frozen: bool = False

    def read(self) -> "Read | None":
        """Call it after the forward, in its thread."""
        if self.copies is None:
            return None
        ticket = -1 if torch.compiler.is_compiling() else self.copies.ticket_of_thread()
        return Read(self.copies, self.frozen, ticket)


def pack(weights: ExpertWeights[Any], cache: WeightCache | None, frozen: bool) -> Packed:
    """``weights``: of one or of several experts; a linear's is w1."""
    if cache is None:
        return Packed(readable(weights).pack())
    copies = cache.buffers(_groups_of(weights))
    return Packed([*weights, *copies.pack(frozen)], copies, frozen)


def forward_operands(packed: list[Tensor | None]) -> tuple[list[Fp8Weight], Generations]:
    """The operands of :class:`Packed` weights, and the generations of copies. Call it in :func:`held`.

    The operands are w13 (E, 2H, D), gate and up in one, or up alone without a gate, and w2 (E, D, H).
    """
    if len(packed) <= 2 * _COUNT:
        return [ops.quantize_weight(*group) for group in _groups_of(ExpertWeights.unpack(packed))], Generations()
    weights, buffers = ExpertWeights(*cast(Any, packed[:_COUNT])), packed[_COUNT:]
    operands = _operands(buffers)
    generations = _refreshed(_groups_of(weights), operands, buffers[-1])
    return [operand.plain for operand in operands], Generations(*generations)


def _operands(buffers: list[Any]) -> list[KeptOperand]:
    """The operands in a list of :meth:`Copies.pack`, which ends with the steps."""
    size = len(KeptOperand._fields)
    return [KeptOperand(*buffers[at : at + size]) for at in range(0, len(buffers) - 1, size)]


def held(packed: list[Tensor | None]) -> Any:
    """The context in which an op reads packed weights: the lock of the copies, if there are any."""
    if len(packed) <= 2 * _COUNT:
        return _UNLOCKED
    copies = _copies_of(cast(Tensor, packed[_COUNT + KeptOperand._fields.index("state")]))
    return _UNLOCKED if copies is None else copies.lock


def _refreshed(
    groups: Groups, operands: list[KeptOperand], steps: Tensor | None, generations: Sequence[Tensor | None] = ()
) -> list[Tensor]:
    """Refreshes copies by :func:`titan_fp8moe.ops.refresh_weight`, for a forward, or for its backward if there are
    ``generations``. Returns the generations afterwards."""
    copies = _copies_of(operands[0].state)
    force = copies is not None and copies.note(groups)
    return [
        ops.refresh_weight([*group], *operand, steps, force, generation)
        for group, operand, generation in zip(groups, operands, generations or (None,) * len(operands), strict=True)
    ]


def _refresh_copies(
    weights: list[Tensor], buffers: list[Tensor | None], generations: list[Tensor], dout: Tensor
) -> list[Tensor]:
    """:func:`_refreshed` for a backward.

    Args:
        weights: of one operand or two, of which the last is of one weight.
        buffers: of :meth:`Copies.pack`.
        dout: any gradient that it is given, so that a graph's partitioner cannot move this to the forward.
    """
    operands = _operands(buffers)
    groups = [weights] if len(operands) == 1 else [weights[:-1], weights[-1:]]
    return _refreshed(groups, operands, buffers[-1], generations)


# An op of its own, since a compiled backward reaches the host's knowledge of copies through it alone.
_refresh = custom_op(_refresh_copies)

# --- a backward's operands --------------------------------------------------------------------------------------------


class BackwardOperands(NamedTuple):
    """Operands of a backward.

    Attributes:
        w13: gate and up as in the forward, (E, 2H, D), if the backward computes GEMM 1 again; else None.
        w13_t: gate and up transposed, (E, D, 2H); or a linear's weight.
        w2_t: down transposed, (E, H, D).
    """

    w13: Fp8Weight | None
    w13_t: Fp8Weight
    w2_t: Any = None  # of an FFN an Fp8Weight


class Read(NamedTuple):
    """The copies that a forward has read. With the generations, which autograd saves, its backward finds them again.

    Attributes:
        frozen: no step changes the weights.
        ticket: of this thread's last refresh, the forward's.
    """

    copies: Copies
    frozen: bool
    ticket: int

    def operands(self, groups: Groups, generations: Sequence[Tensor], dout: Tensor) -> list[KeptOperand]:
        """The forward's operands: those that the copies hold, or made again of the weights. ``dout``: any gradient."""
        copies, compiling = self.copies, torch.compiler.is_compiling()
        if not compiling and copies.ticket == self.ticket and not copies.replayed:
            return [*copies.operands]
        made = _refresh([w for group in groups for w in group], copies.pack(self.frozen), [*generations], dout)
        if not compiling:
            return [*copies.operands]
        # No schema tells that the op has written: what reads the copies gets other scales.
        return [o._replace(scale=ops.after(o.scale, made)) for o in copies.operands]


def held_by(read: Read | None) -> Any:
    """The context in which a backward reads operands: the lock of the copies, if there are any."""
    return _UNLOCKED if read is None or torch.compiler.is_compiling() else read.copies.lock


def backward_operands(
    weights: ExpertWeights[Any], read: Read | None, generations: Sequence[Tensor], backward: BackwardSpec, dout: Tensor
) -> BackwardOperands:
    """The operands of a backward: the copies that the forward has read, or quantized for it. ``w13`` comes from the
    same read of the weights. Call it in :func:`held_by`.

    Args:
        weights: as the forward saw them.
        dout: any gradient that the backward is given.
    """
    if read is not None:
        kept = read.operands(_groups_of(weights), generations, dout)
        return BackwardOperands(kept[0].plain, *(operand.transposed() for operand in kept))
    values, w13 = readable(weights), None
    if backward.recompute == "experts":
        w13, w13_t = ops.quantize_weight_both(*values.gate_up)
    else:
        w13_t = ops.quantize_weight_transposed(*values.gate_up)
    return BackwardOperands(w13, w13_t, None if values.w2 is None else ops.quantize_weight_transposed(values.w2))
