"""Runs the Hopper GEMMs' Gluon kernels on a CPU, since Gluon has no interpreter.

Gluon functions become plain Python on what :func:`emulate` substitutes for ``gluon.language``. A CTA's partitions are
threads. Scalars and tensors are :class:`Value`; shared memory and descriptors are views of torch tensors.

Asynchronous operations happen at the worst time that the kernel's synchronization allows:

* A TMA load overwrites its stage as soon as it is started.
* A WGMMA reads its operands only when it is waited for.
* A TMA store reads its staging buffer only when that is waited for.

A stage or buffer that is released too early thus gives a wrong result. Use of an accumulator whose WGMMA is in flight
raises, and so do partitions that all wait for each other.

Not emulated: warps within a partition, layouts, the precision of the tensor cores.
"""

import inspect
import operator
import threading
from collections.abc import Callable
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from titan_fp8moe.kernels.gemm import forward, grouped_mm, hopper, wgrad
from titan_fp8moe.kernels.gemm import launch as gemm_launch
from titan_fp8moe.recipe import BLOCK

TORCH_DTYPE = {str(theirs): ours for ours, theirs in gemm_launch.GLUON_DTYPE.items()}
TORCH_DTYPE |= {"int32": torch.int32, "int64": torch.int64}


# --- values and memory ------------------------------------------------------------------------------------------------


class Value:
    """A scalar or tensor."""

    type = SimpleNamespace(layout=None)

    def __init__(self, tensor: Any):
        self.tensor = torch.as_tensor(tensor)

    def to(self, dtype: Any, bitcast: bool = False) -> "Value":
        dtype = TORCH_DTYPE[str(dtype)]
        return Value(self.tensor.view(dtype) if bitcast else self.tensor.to(dtype))

    def __getitem__(self, index: Any) -> "Value":
        return Value(self.tensor[index])

    def __bool__(self) -> bool:
        return bool(self.tensor)

    def __index__(self) -> int:
        return int(self.tensor)


def unwrap(x: Any) -> Any:
    if isinstance(x, Product):
        raise RuntimeError("an accumulator is read while its WGMMA is in flight")
    return x.tensor if isinstance(x, Value) else x


def _define(name: str, reflected: str = "") -> None:
    function = getattr(operator, name)
    setattr(Value, f"__{name.strip('_')}__", lambda self, other: Value(function(self.tensor, unwrap(other))))
    if reflected:
        setattr(Value, f"__{reflected}__", lambda self, other: Value(function(unwrap(other), self.tensor)))


for _name in ("add", "sub", "mul", "floordiv", "mod", "and_", "xor", "lshift"):
    _define(_name, "r" + _name.strip("_"))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    _define(_name)


class Pointer:
    """To elements of a tensor's memory, which may be strided."""

    def __init__(self, memory: Tensor, offset: Any = 0):
        self.memory, self.offset = memory, offset

    @classmethod
    def to(cls, x: Tensor) -> "Pointer":
        if x.dtype.itemsize == 1:
            x = x.view(torch.uint8)
        length = x.untyped_storage().nbytes() // x.dtype.itemsize - x.storage_offset()
        return cls(x.as_strided((length,), (1,), x.storage_offset()))

    def __add__(self, offset: Any) -> "Pointer":
        return Pointer(self.memory, self.offset + offset)

    def __sub__(self, offset: Any) -> "Pointer":
        return Pointer(self.memory, self.offset - offset)

    def places(self, mask: Any) -> tuple[Tensor, Tensor]:
        offset = torch.as_tensor(unwrap(self.offset)).long()
        mask = torch.as_tensor(unwrap(mask)).expand(offset.shape)
        assert ((offset >= 0) & (offset < len(self.memory)) | ~mask).all(), "out of bounds"
        return offset, mask

    def load(self, mask: Any = True, other: Any = 0) -> Value:
        offset, mask = self.places(mask)
        loaded = self.memory[offset.where(mask, 0)]
        return Value(loaded.where(mask, torch.as_tensor(other, dtype=loaded.dtype)))


class Shared:
    """A view of shared memory."""

    def __init__(self, tensor: Tensor):
        self.tensor, self.shape = tensor, tensor.shape

    def index(self, i: Any) -> "Shared":
        assert int(i) >= 0, "before the buffer"  # torch would count from its end
        return Shared(self.tensor[int(i)])

    def slice(self, start: int, length: int) -> "Shared":
        return Shared(self.tensor[start : start + length])

    def reshape(self, shape: list[int]) -> "Shared":
        return Shared(self.tensor.view(shape))

    def permute(self, order: tuple[int, ...]) -> "Shared":
        return Shared(self.tensor.permute(order))

    def load(self, layout: Any) -> Value:
        return Value(self.tensor.clone())

    def store(self, value: Value) -> None:
        self.tensor.copy_(value.tensor)
        thread.unfenced = True


# --- asynchronous operations ------------------------------------------------------------------------------------------

thread = threading.local()  # of a partition: WGMMAs and stores in flight, and whether a store awaits a fence


class Partitions:
    """Threads of a launch, which synchronize through barriers. They detect a deadlock: all that still run wait."""

    def __init__(self):
        self.changed = threading.Condition()
        self.running = self.waiting = 0
        self.errors: list[BaseException] = []

    def run(self, functions: list[Callable]) -> None:
        def body(function: Callable) -> None:
            thread.products, thread.stores, thread.unfenced = [], [], False
            try:
                function()
                assert not thread.products, "a WGMMA is in flight at the end"
                assert not thread.stores, "a store is in flight at the end"
            except BaseException as error:  # for the thread that waits for this one
                self.errors.append(error)
            self.update(lambda: setattr(self, "running", self.running - 1))

        threads = [threading.Thread(target=body, args=(function,)) for function in functions]
        self.running += len(threads)
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        if self.errors:
            raise self.errors[0]

    def update(self, change: Callable[[], None]) -> None:
        with self.changed:
            change()
            self.waiting = 0  # all look again
            self.changed.notify_all()

    def wait(self, ready: Callable[[], bool]) -> None:
        with self.changed:
            while not ready():
                self.waiting += 1
                if self.waiting >= self.running or self.errors:
                    raise RuntimeError("all partitions wait")  # which ends the others too
                self.changed.wait()


class Barrier:
    """An mbarrier. The phase before the first counts as complete."""

    def __init__(self, partitions: Partitions):
        self.partitions = partitions
        self.phase = self.bytes = 0

    def init(self, count: int) -> None:
        self.count = self.pending = count

    def _change(self, arrivals: int, transferred: int) -> None:
        def change() -> None:
            self.pending -= arrivals
            self.bytes += transferred
            assert self.pending >= 0, "more arrivals than the barrier waits for"
            if self.pending == self.bytes == 0:
                self.phase, self.pending = 1 - self.phase, self.count

        self.partitions.update(change)

    def arrive(self) -> None:
        self._change(1, 0)

    def expect(self, size: int, pred: Any = True) -> None:
        if pred:
            self._change(1, size)

    def complete(self, size: int) -> None:
        self._change(0, -size)

    def wait(self, phase: Any) -> None:
        phase = int(phase)
        self.partitions.wait(lambda: self.phase != phase)


class Product:
    """The result of a WGMMA, in registers. It reads its operands when it, or a later one, is waited for."""

    def __init__(self, a: Shared, b: Shared):
        self.operands, self.value = (a, b), None

    def complete(self) -> None:
        a, b = (x.tensor.float() for x in self.operands)
        self.value = Value(a @ b)


def warpgroup_mma(a: Shared, b: Shared, acc: Any, use_acc: Any, is_async: bool) -> Product:
    unwrap(acc)  # its registers are the result's
    assert is_async and not use_acc
    product = Product(a, b)
    thread.products.append(product)
    return product


def warpgroup_mma_wait(pendings: int, deps: list) -> Any:
    while len(thread.products) > pendings:
        thread.products.pop(0).complete()
    (product,) = deps
    return product if product.value is None else product.value


def load_tile(desc: SimpleNamespace, place: list, barrier: Barrier, smem: Shared, pred: Any = True) -> None:
    if not pred:
        return
    row, column = map(int, place)
    tile = desc.matrix[row : row + BLOCK, column : column + BLOCK].view(torch.uint8)
    smem.tensor.view(torch.uint8).zero_()[: tile.shape[0], : tile.shape[1]] = tile
    barrier.complete(BLOCK * BLOCK)


def store_slice(desc: SimpleNamespace, place: list, buffer: Shared) -> None:
    assert not thread.unfenced, "TMA may not see what was stored: fence_async_shared is missing"
    *expert, row, column = map(int, place)
    matrix = desc.matrix[expert[0]] if expert else desc.matrix
    out = matrix[row : row + 64, column : column + 64]
    # TMA drops columns past the end, and rows where it knows an expert's last: those that pad a weight's last tile.
    for first, size, known in ((row, matrix.shape[0], bool(expert)), (column, matrix.shape[1], True)):
        assert first < -(-size // 256) * 256 and (known or first + 64 <= size), "out of bounds"
    thread.stores.append(lambda: out.copy_(buffer.tensor.view(64, 64)[: out.shape[0], : out.shape[1]]))


def store_wait(pendings: int) -> None:
    while len(thread.stores) > pendings:
        thread.stores.pop(0)()


# --- kernels ----------------------------------------------------------------------------------------------------------


def language_of(partitions: Partitions, num_ctas: int) -> tuple[SimpleNamespace, SimpleNamespace]:
    atomics = threading.Lock()

    def atomic_add(pointer: Pointer, value: Value, mask: Value, sem: str) -> Value:
        offset, mask = pointer.places(mask)
        with atomics:
            old = pointer.memory[offset]
            pointer.memory.index_add_(0, offset[mask], value.tensor[mask])
        return Value(old)

    def allocate(dtype: Any, shape: list[int], layout: Any) -> Any:
        if layout is Barrier:
            barriers = [Barrier(partitions) for _ in range(shape[0])]
            return SimpleNamespace(index=lambda i: barriers[int(i)])
        tensor = torch.empty(shape, dtype=TORCH_DTYPE[str(dtype)])
        tensor.view(torch.uint8).fill_(0xFF)  # NaN in fp8, bf16 and fp32
        return Shared(tensor)

    def elementwise(function: Callable) -> Callable:
        return lambda *args: Value(function(*(torch.as_tensor(unwrap(x)) for x in args)))

    def full(shape: list[int], value: Any, dtype: Any, layout: Any = None) -> Value:
        return Value(torch.full(shape, int(value), dtype=TORCH_DTYPE[str(dtype)]))

    def store(pointer: Pointer, value: Any) -> None:
        pointer.memory[int(pointer.offset)] = value

    language = SimpleNamespace(
        **{name: getattr(gl, name) for name in ("constexpr", "int32", "int64", "float32")},
        **dict.fromkeys(("BlockedLayout", "SliceLayout", "SwizzledSharedLayout"), lambda *args: None),
        num_programs=lambda axis: num_ctas,
        num_warps=lambda: 4,
        static_range=range,
        arange=lambda start, end, layout: Value(torch.arange(start, end)),
        zeros=lambda shape, dtype, layout: full(shape, 0, dtype),
        zeros_like=lambda x: Value(torch.zeros_like(x.tensor)),
        full=full,
        sum=lambda x, axis: Value(x.tensor.sum(axis)),
        **{name: elementwise(getattr(torch, name)) for name in ("where", "minimum", "maximum")},
        load=lambda pointer, mask=True, other=0: pointer.load(mask, other),
        store=store,
        atomic_add=atomic_add,
        allocate_shared_memory=allocate,
        warp_specialize=lambda parts, warps, registers: thread.partitions.extend(parts),
        inline_asm_elementwise=lambda asm, constraints, args, dtype, is_pure, pack: args[0],
    )
    operations = {name: getattr(Barrier, name) for name in ("init", "wait", "arrive", "expect")}
    return language, SimpleNamespace(MBarrierLayout=lambda: Barrier, **operations)


class EmulatedKernel:
    """Launched like a kernel. It runs as ``num_ctas`` concurrent CTAs, whatever the grid."""

    def __init__(self, function: Callable, num_ctas: int):
        self.function, self.num_ctas = function, num_ctas

    def __getitem__(self, grid: tuple[int]) -> Callable:
        return self.launch

    def launch(self, *args: Any, num_warps: int, maxnreg: int, **constants: Any) -> None:
        def seen(arg: Any) -> Any:
            if isinstance(arg, TensorDescriptor):
                matrix, dtype = arg.base.as_strided(arg.shape, arg.strides), gemm_launch.GLUON_DTYPE[arg.base.dtype]
                return SimpleNamespace(matrix=matrix, dtype=dtype, layout=arg.layout, block_shape=arg.block_shape)
            return Pointer.to(arg) if isinstance(arg, Tensor) else arg

        counter = inspect.signature(self.function).bind(*args, **constants).arguments["tile_counter"]
        args = tuple(map(seen, args))
        partitions = Partitions()
        language, mbarrier = language_of(partitions, self.num_ctas)
        with patched(**NEW, gl=language, mbarrier=mbarrier):
            thread.partitions = []
            for _ in range(self.num_ctas):
                self.function(*args, **constants)
            partitions.run([lambda f=f, args=args: f(*args) for f, args in thread.partitions])
        assert counter == 0, "the launch did not reset the counter for the next one"


NEW = {
    "tma": SimpleNamespace(store_wait=store_wait),
    "tma_load": load_tile,
    "tma_store": store_slice,
    "warpgroup_mma": warpgroup_mma,
    "warpgroup_mma_wait": warpgroup_mma_wait,
    "fence_async_shared": lambda: setattr(thread, "unfenced", False),
    "partition_barrier": lambda: None,
}


def _python_class(aggregate: type) -> type:
    """The class that became a Gluon aggregate, with Python methods."""
    members = vars(aggregate.__wrapped__).items()
    return type(aggregate.__name__, (), {name: getattr(x, "fn", x) for name, x in members if callable(x)})


@contextmanager
def patched(**new: Any):
    """Lets the kernels' modules run as Python, without Gluon's wrappers; ``new`` replaces names that they import."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        for module in (hopper, forward, wgrad):
            for name, old in vars(module).items():
                if isinstance(old, gl.constexpr):
                    value = old.value
                elif hasattr(old, "__triton_aggregate__"):
                    value = _python_class(old)
                else:
                    value = new.get(name, getattr(old, "fn", old))
                monkeypatch.setattr(module, name, value)
        yield


@contextmanager
def emulate(num_ctas: int):
    """Makes :mod:`titan_fp8moe.kernels.gemm.grouped_mm` pick the Hopper kernels and run them as ``num_ctas`` CTAs."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(grouped_mm, "is_hopper", lambda x: True)
        for module, name in ((forward, "grouped_mm_hopper_kernel"), (wgrad, "wgrad_hopper_kernel")):
            monkeypatch.setattr(module, name, EmulatedKernel(getattr(module, name).kernel.fn, num_ctas))
        yield
