"""Frozen FP8 weights in host memory, copied to the device a layer at a time, ahead of their use.

All layers share two buffers of the largest layer's size. When a layer asks for its weights, the copy of the layer that
will ask next begins on a stream of its own, into the buffer that the layer before has left::

    compute   layer 0 ──────── layer 1 ──────── layer 2 ──────── ...
    copies    1 into B ─────── 2 into A ─────── 3 into B ─────── ...

Two events order each buffer. A layer waits for ``ready`` before it reads, and a copy for ``free`` before it writes. The
host waits for neither. The next layer is a guess, upwards in a forward and downwards in a backward. A wrong one costs
a late copy, never a wrong value. Autograd keeps no weights: a backward asks again. Threads take turns, a layer each.
"""

import contextlib
import functools
import mmap
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from titan_fp8moe.layer.operands import tensor_key
from titan_fp8moe.layer.weights import ExpertWeights
from titan_fp8moe.ops import Fp8Weight

NUM_BUFFERS = 2


class _Pages(mmap.mmap):
    """Memory of this process alone, which the GPU reads by itself, until the last tensor over it is gone."""

    unlock: Callable[[], object] | None = None

    def __del__(self) -> None:
        if self.unlock is not None:
            self.unlock()


def pinned_like(tensor: Tensor) -> Tensor:
    """An empty tensor of this shape in page-locked memory. PyTorch's own would be rounded up to a power of two bytes.
    Without a GPU its memory is ordinary."""
    pages = _Pages(-1, tensor.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    flat = torch.frombuffer(pages, dtype=torch.uint8)
    with contextlib.suppress(OSError):  # kernels without them
        pages.madvise(mmap.MADV_HUGEPAGE)
    if torch.cuda.is_available():
        pages.madvise(mmap.MADV_DONTFORK)  # a forked data loader would copy all of it
        runtime: Any = torch.cuda.cudart()
        torch.cuda.check_error(runtime.cudaHostRegister(flat.data_ptr(), tensor.nbytes, 0))
        pages.unlock = functools.partial(runtime.cudaHostUnregister, flat.data_ptr())
    return flat.view(tensor.dtype).view(tensor.shape)


class _Buffer:
    """Memory for one layer on the device.

    Attributes:
        holds: which values are there, or on their way.
        ready, free: events behind the last copy into it, and behind its last reader.
    """

    holds: Any = None

    def __init__(self, nbytes: int, device: torch.device, runtime: Any):
        self.bytes = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.ready, self.free = runtime.Event(), runtime.Event()

    def views(self, values: list[Tensor]) -> list[Tensor]:
        """A layer's values as they lie here."""
        parts = self.bytes[: _nbytes(values)].split([q.nbytes for q in values])
        return [part.view(q.dtype).view(q.shape) for part, q in zip(parts, values, strict=True)]


def _nbytes(values: list[Tensor]) -> int:
    return sum(q.nbytes for q in values)


class HostExperts:
    """The experts of a model's layers.

    Args:
        values: w1's and w2's of each layer in host memory, in the order of the forward.
        device: where they are used. Their scales are there.
    """

    def __init__(self, values: list[list[Tensor]], device: torch.device):
        self.values, self.device, self.runtime = values, device, torch.get_device_module(device)
        self.stream = self.runtime.Stream(device)
        size = max(map(_nbytes, values))
        with self.runtime.stream(self.stream):  # once freed, the memory is the stream's again, behind its last copy
            self.buffers = [_Buffer(size, device, self.runtime) for _ in range(NUM_BUFFERS)]  # first: longest unused
        self._last, self._step = 0, 1
        self.lock = threading.RLock()

    def take(self, at: int) -> _Buffer:
        """The buffer with a layer's values, for the current stream. Begins the copy of the layer that is likely next.
        ``free`` must be recorded behind the last read."""
        last = len(self.values) - 1
        if at in (0, last):
            self._step = 1 if at == 0 else -1
        elif at != self._last:  # checkpointing asks for a layer twice in a row
            self._step = 1 if at > self._last else -1
        self._last = at
        buffer = self._copied(self.values[at])
        if 0 <= at + self._step <= last:
            self._copied(self.values[at + self._step])
        self.runtime.current_stream(self.device).wait_event(buffer.ready)
        return buffer

    def _copied(self, values: list[Tensor]) -> _Buffer:
        """The buffer that holds these values, or will."""
        key = [tensor_key(q) for q in values]  # with their versions
        buffer = next((b for b in self.buffers if b.holds == key), self.buffers[0])
        self.buffers = [*(b for b in self.buffers if b is not buffer), buffer]
        if buffer.holds != key:
            buffer.holds = None  # until the copy is issued, which may be interrupted
            self.stream.wait_event(buffer.free)
            with self.runtime.stream(self.stream), torch.no_grad():
                for there, here in zip(buffer.views(values), values, strict=True):
                    there.copy_(here, non_blocking=True)
                buffer.ready.record(self.stream)
            buffer.holds = key
        return buffer


class HostWeights(ExpertWeights[Fp8Weight]):
    """A layer's w1 and w2, whose values are in host memory and whose scales are on the device."""

    layer: "HostLayer"

    @contextlib.contextmanager
    def on_device(self) -> Iterator[ExpertWeights[Fp8Weight]]:
        """Yields the weights in a buffer, for the current stream, on which the reads end with the context."""
        w1, w2, _ = self
        experts, index = self.layer.experts, self.layer.index
        with experts.lock:
            values = experts.values[index] = [w1.q, w2.q]
            buffer = experts.take(index)
            q1, q2 = buffer.views(values)
            try:
                yield ExpertWeights(Fp8Weight(q1, w1.scale), Fp8Weight(q2, w2.scale))
            finally:
                stream = experts.runtime.current_stream(experts.device)
                stream.wait_event(buffer.free)  # readers on other streams
                buffer.free.record(stream)

    def for_backward(self) -> tuple[list[Any], ExpertWeights[Fp8Weight] | None]:
        """Autograd keeps parts without values, whose versions it checks. The buffer will hold other layers, and hooks
        of saved tensors would copy the host's."""
        aliases = self.layer.weights([Fp8Weight(w.q.detach(), w.scale.detach()) for w in self[:2]])
        return [t[:0] for w in self[:2] for t in w], aliases


class HostLayer:
    """One layer of :class:`HostExperts`, as its module keeps it. A copied or saved module has None instead."""

    def __init__(self, experts: HostExperts, index: int):
        self.experts, self.index = experts, index

    def __reduce__(self) -> tuple:
        return type(None), ()

    def weights(self, given: Sequence[Any]) -> HostWeights:
        """w1 and w2, as the module has them in host memory."""
        if torch.compiler.is_exporting():
            raise RuntimeError("torch.export cannot copy experts from host memory; export before offload_experts")
        weights = HostWeights(*given[:2])
        weights.layer = self
        return weights
