"""Memory that the expert-parallel ranks of one node share: its layout, its owners, and what they report.

Each rank has a workspace of equal size, which all ranks can address: peer memory over NVLink on GPUs, shared files on a
CPU. :mod:`titan_fp8moe.dispatch.symmetric.exchange` describes what is written there and when. A workspace serves all
layers of its sizes, since a layer's exchange ends before the next begins. It lives until its group is destroyed, or
until one for more tokens takes its place, unless a CUDA graph holds its addresses.

Private interfaces of PyTorch that this file uses are in CONTRIBUTING.md's table. A backend's ``options._timeout`` was
checked with 2.13, symmetric memory with 2.11.
"""

import atexit
import contextlib
import functools
import math
import os
import socket
import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from titan_fp8moe import patches
from titan_fp8moe.kernels import launch
from titan_fp8moe.recipe import E8M0, FP8, SCALE_TILE, larger, row_capacity, smaller

DISPATCH, COMBINE = range(2)
"""The two times per exchange at which ranks wait for each other."""

ROWS, TOKENS, UNLIKE, LATE = range(4)
"""The rows of :attr:`Workspace.report`."""

_ALIGNMENT = 256


class NoRoom(RuntimeError):
    """A rank had too little room in symmetric memory; no weight has been changed since."""


class Sizes(NamedTuple):
    """The sizes that a workspace is made for: N ranks, T tokens of each, D, K, and E experts on each rank. D is a
    quantized token's, a multiple of 128."""

    num_ranks: int
    tokens: int
    dim: int
    top_k: int
    num_local: int

    @property
    def sent(self) -> int:
        """P: the most tokens that a rank dispatches, a token counting once per rank that serves it."""
        return self.tokens * min(self.top_k, self.num_ranks)

    @functools.cache  # noqa: B019  as small as the tuple
    def sections(self) -> dict[str, tuple[int, tuple[int, ...], torch.dtype]]:
        """The parts of a workspace, as offset in bytes, a multiple of 256, shape and dtype. Ranks publish them for
        others to read, or write them for others.

        * ``q``, ``scale``: quantized tokens; ``ids``, ``scores``: (T, K), their routed pairs.
        * ``token``: (P,), ``token_C`` of :func:`titan_fp8moe.recipe.dispatch_routing`.
        * ``counts``: (N, 3 + E), its ``counts_N``. ``capacity``: (2,), the rows and dispatched tokens that this rank
          can take.
        * ``sums`` (P, D) and ``score_gradients`` (P, K): what comes back for each dispatched token. See
          :meth:`Workspace.sums`.
        * ``arrivals``: (2, N), how often each rank has arrived at DISPATCH and COMBINE.
        """
        N, T, D, K, E = self
        shapes = {
            "arrivals": ((2, N), torch.int32),
            "capacity": ((2,), torch.int32),
            "counts": ((N, 3 + E), torch.int32),
            "token": ((self.sent,), torch.int32),
            "ids": ((T, K), torch.int32),
            "scores": ((T, K), torch.float32),
            "scale": ((T, D // SCALE_TILE), E8M0),
            "q": ((T, D), FP8),
            "score_gradients": ((self.sent, K), torch.float32),
            "sums": ((self.sent, D), torch.bfloat16),
        }
        sections, offset = {}, 0
        for name, (shape, dtype) in shapes.items():
            sections[name] = offset, shape, dtype
            offset += -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
        return sections

    @property
    def nbytes(self) -> int:
        offset, shape, dtype = self.sections()["sums"]
        return max(offset + math.prod(shape) * dtype.itemsize, 1)


def capacities(tokens: int, top_k: int, num_ranks: int, num_local: int, factor: float) -> tuple[int, int]:
    """How many rows, and how many dispatched tokens, a rank has room for.

    With ``factor`` 1 that is what uniform routing brings on average, with ``num_ranks`` the most that can come.

    Returns:
        M, a multiple of 128 with the padding of every expert, and C.
    """
    # Integers, so that a symbolic number of tokens stays one.
    share = 1 - (1 - 1 / num_ranks) ** top_k  # of all tokens, those with an expert on one rank
    pairs = smaller(-(-tokens * math.ceil(1000 * factor * top_k) // 1000), num_ranks * tokens * top_k)
    dispatched = smaller(-(-tokens * math.ceil(1000 * factor * num_ranks * share) // 1000), num_ranks * tokens)
    return row_capacity(pairs, num_local), larger(dispatched, 1)


class Workspace:
    """One rank's view of the memory of all ranks.

    Args:
        sizes: equal on all ranks.
        rank: this rank's place in the group.
        peers: (nbytes,) uint8 for each rank, this one included, zeroed before any rank arrives.
        timeout_s: returns the seconds that a rank may be late.

    Attributes:
        addresses: (N + 1,) int64 on the device: where each rank's memory begins, then ``report``.
        rounds: (2,) int32 on the device, how often this rank has waited. The device counts, so that a CUDA graph can
            repeat it.
        overflow: (1,) int32 on the device, set by the first exchange that some rank has no room for, or for which ranks
            have different settings. All ranks find it in the same exchange. They move no rows from then on, and every
            sum is NaN.
        report: (4, N) int32 in memory that host and device address, zeros as long as all is well. For each rank it
            holds the ROWS and TOKENS that the rank would have needed. It also holds 1 for UNLIKE settings of the ranks,
            and 1 if this rank has waited for the rank too long (LATE).
        in_flight: whether a dispatch has begun whose combine has not ended.
        interrupted: whether an error has ended the op in which it was.
        captured: whether a CUDA graph holds addresses of it.
        mapped: what keeps ``peers`` mapped.
        barrier: waits for all ranks and their devices.
        stream: of the transfers; None on a CPU.
        done: (1,) int32, how many CTAs of a kernel that arrives have ended.
        scratch: memory that a transfer uses, until it ends.
    """

    _all: ClassVar[weakref.WeakSet] = weakref.WeakSet()

    def __init__(self, sizes: Sizes, rank: int, peers: list[Tensor], timeout_s: Callable[[], float]):
        self.sizes, self.rank, self.peers, self.timeout_s = sizes, rank, peers, timeout_s
        self.memory, device = peers[rank], peers[rank].device
        self.report = torch.zeros(4, sizes.num_ranks, dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda")
        pointers = [memory.data_ptr() for memory in (*peers, self.report)]
        self.addresses = torch.tensor(pointers, dtype=torch.int64, device=device)
        self.rounds = torch.zeros(2, dtype=torch.int32, device=device)
        self.overflow, self.done = (torch.zeros(1, dtype=torch.int32, device=device) for _ in range(2))
        self.stream = _transfers(device) if device.type == "cuda" else None
        self._last: torch.cuda.Stream | None = None  # of the exchange before
        self.scratch: list[Tensor | None] = []
        if device.type == "cuda":
            self._forked, self._moved = torch.cuda.Event(), torch.cuda.Event()
        self.in_flight = self.interrupted = self.captured = False
        self.mapped: Any = None
        self.barrier: Callable[[], None] = lambda: None
        self._views: dict[tuple[str, int], Tensor] = {}
        self._planned = [torch.cuda.Event()] if device.type == "cuda" else []  # one of eager steps, others of graphs
        Workspace._all.add(self)
        _watch_process()

    def view(self, name: str, rank: int | None = None) -> Tensor:
        """A section of ``rank``'s memory, by default of this rank's."""
        key = name, self.rank if rank is None else rank
        if key not in self._views:
            offset, shape, dtype = self.sizes.sections()[name]
            with torch.inference_mode(False):  # else no training step could use it
                memory = self.peers[key[1]][offset : offset + math.prod(shape) * dtype.itemsize]
                self._views[key] = memory.view(dtype).view(shape)
        return self._views[key]

    def sums(self, dim: int, rank: int | None = None) -> Tensor:
        """(P, dim), a rank's ``sums`` in a layer whose D is ``dim``: contiguous at the beginning of the section."""
        sums = self.view("sums", rank)
        return sums if dim == self.sizes.dim else sums.view(-1)[: sums.shape[0] * dim].view(-1, dim)

    def offset(self, name: str) -> int:
        return self.sizes.sections()[name][0]

    def begin(self) -> None:
        """Before an exchange, which waits for one on another stream. Raises RuntimeError if another is in flight, or if
        a rank has been late."""
        self.check_arrivals()
        if self.in_flight:
            self._end_interrupted()
        self.in_flight, self.interrupted = True, False
        if _is_capturing(self.memory.device):
            self.captured = True
        elif self.stream is not None:
            current = torch.cuda.current_stream(self.memory.device)
            if self._last is not None and self._last != current:  # peers may still pull what it has published
                current.wait_stream(self._last)
            self._last = current

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """Kernels that are launched in this context run after what the current stream has been given so far, and beside
        what it is given until :meth:`join`. Their memory is the current stream's, and the caller keeps it until then.
        ``torch.use_deterministic_algorithms`` does not fill it: the fill would run after the fork, over results."""
        if self.stream is None:
            yield
            return
        self._forked.record()
        self.stream.wait_event(self._forked)
        deterministic: Any = torch.utils.deterministic
        fills, deterministic.fill_uninitialized_memory = deterministic.fill_uninitialized_memory, False
        try:
            with launch.on_stream(self.stream):
                yield
        finally:
            deterministic.fill_uninitialized_memory = fills
            self._moved.record(self.stream)

    def join(self) -> None:
        """Lets the current stream wait for what :meth:`beside` has launched."""
        if self.stream is not None:
            torch.cuda.current_stream(self.memory.device).wait_event(self._moved)
        self.scratch = []

    def _end_interrupted(self) -> None:
        """Ends the exchange in flight. All ranks do it together, where an error interrupted all of them. Raises
        RuntimeError if none did."""
        if not self.interrupted or _is_capturing(self.memory.device):
            raise RuntimeError(
                'dispatch = "symmetric": an exchange of this group has not ended; two layers are in flight at once, on '
                "two streams or threads, an error came between two ops, or Inductor has put another layer between the "
                "two ops of a backward (then set torch._inductor.config.reorder_for_peak_memory = False). Or use "
                'dispatch = "all_to_all"'
            )
        # Ranks may have arrived for a combine that nobody waits for.
        self.barrier()
        self.view("arrivals").zero_()
        self.rounds.zero_()
        self.done.zero_()
        self.barrier()

    def interrupt(self) -> None:
        """An error ends the op in which the exchange is. Its transfer ends before its memory."""
        self.join()
        self.interrupted = True

    def planned(self) -> None:
        """After the device has been asked whether all ranks have room: :meth:`error` can wait for that."""
        if not self._planned:
            return
        if torch.cuda.is_current_stream_capturing():
            # An external event becomes a node of the graph: each launch of a replay records it anew. Each node has its
            # own, since CUDA does not say for which of several nodes an event stands.
            self._planned.append(torch.cuda.Event(external=True))
            self._planned[-1].record(self.stream)
        else:
            self._planned[0].record(self.stream)

    def lateness(self) -> str | None:
        """A message about the ranks that have not arrived in time, or None."""
        late = [n for n, was_late in enumerate(self.report[LATE].tolist()) if was_late]
        if not late:
            return None
        return (
            f'dispatch = "symmetric": rank {self.rank} of the expert-parallel group has waited '
            f"{self.timeout_s():.0f} s, the timeout of the process group, for ranks {late}. They have died, raised an "
            "error, run other layers or numbers of tokens than this rank, or are slow (then raise the timeout: "
            "dist.init_process_group; torchtitan: comm.train_timeout_seconds)"
        )

    def check_arrivals(self) -> None:
        """Raises RuntimeError if a rank has not arrived in time. On a GPU the kernel that waited has trapped."""
        if (message := self.lateness()) is not None:
            raise RuntimeError(message)

    def error(self) -> RuntimeError | None:
        """NoRoom if a rank had too little room, RuntimeError if it had other settings than another, in a forward that
        has been launched, also by a replay. Forgets it then."""
        for event in self._planned:
            if not event.query():
                event.synchronize()
        rows, tokens, unlike = self.report[:LATE].amax(1).tolist()
        if rows or unlike:
            self.report[:LATE] = 0
            self.overflow.zero_()
        if unlike:
            return RuntimeError(
                'dispatch = "symmetric": the ranks of an expert-parallel group call a layer with another dtype or '
                "other settings of fp8_flow_moe. Outputs are NaN since then; make them the same on all ranks"
            )
        if rows:
            return NoRoom(
                f'dispatch = "symmetric": a rank would have needed {rows} rows and {tokens} dispatched tokens, more '
                "than dispatch_capacity leaves room for. Outputs are NaN since then, and no weight has been changed. "
                "Continue from a checkpoint with a larger dispatch_capacity (the number of expert-parallel ranks "
                'always suffices) or with dispatch = "all_to_all"'
            )
        return None


@functools.cache
def _transfers(device: torch.device) -> torch.cuda.Stream:
    """The stream of all workspaces' transfers. A GEMM has one CTA for each SM: those of a transfer go first, or it
    would begin when the GEMM ends."""
    return torch.cuda.Stream(device, priority=-1)


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def check_room() -> None:
    """Raises :class:`NoRoom`, a RuntimeError, if a rank had too little room in a forward since the last call.

    Every ``torch.optim`` optimizer calls this before a step. Call it where no such optimizer runs: in evaluation, in a
    CUDA graph that contains the optimizer, or with another optimizer. It waits for the last forward, in a replay too,
    and not for backwards.
    """
    if errors := [error for workspace in list(Workspace._all) if (error := workspace.error())]:
        raise errors[0]


def _check_room_before_a_step(*_: Any) -> None:
    if not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        check_room()


def _watch_process() -> None:
    """From the first workspace on, checks the room before optimizer steps, and explains traps at the exit."""
    step = "torch.optim.optimizer:register_optimizer_step_pre_hook"
    patches.hook(step, _check_room_before_a_step, checked_on="torch 2.11 to 2.15")
    atexit.unregister(_explain_traps)  # of the workspace before
    atexit.register(_explain_traps)


def _explain_traps() -> None:
    """Says why a kernel has trapped: CUDA's own error, which the process ends with, does not."""
    for workspace in list(Workspace._all):
        if workspace.memory.is_cuda and (message := workspace.lateness()) is not None:
            print(message, file=sys.stderr)


# --- one workspace per group and sizes --------------------------------------------------------------------------------

# By group, since a later one may get the name of a group that has been destroyed.
_workspaces: weakref.WeakKeyDictionary[dist.ProcessGroup, list[Workspace]] = weakref.WeakKeyDictionary()
_current: weakref.WeakValueDictionary[str, Workspace] = weakref.WeakValueDictionary()
_on_meta: list[Workspace] = []  # the last one


def begin(group_name: str, sizes: Sizes, device: torch.device) -> Workspace:
    """The workspace in which an exchange begins.

    All ranks make it together, at the first exchange of these dims or of more tokens than before. That synchronizes.
    Ranks have equal numbers of tokens, else one makes a workspace while another exchanges.

    Raises:
        ValueError: for ranks on several nodes, or ranks that make a workspace of different ``sizes``.
        RuntimeError: in a capture of a CUDA graph, if there is no workspace yet; those of :meth:`Workspace.begin`.
    """
    if device.type == "meta":  # kernels are compiled ahead, for timeouts that take more than 32 bits in nanoseconds
        peers = [torch.empty(sizes.nbytes, dtype=torch.uint8, device=device)] * sizes.num_ranks
        _current[group_name] = workspace = Workspace(sizes, 0, peers, lambda: 1e3)
        _on_meta[:] = [workspace]
        workspace.begin()
        return workspace
    group = cast(Any, distributed_c10d)._resolve_process_group(group_name)
    workspaces = _workspaces.setdefault(group, [])
    workspace = next((w for w in workspaces if _fits(w, sizes)), None)
    if workspace is None:
        if _is_capturing(device):
            raise RuntimeError(
                f'dispatch = "symmetric" has no workspace yet for {sizes}, and cannot make one while a CUDA graph is '
                "captured; run a step with these sizes first"
            )
        with torch.inference_mode(False):
            workspace = _create(group, sizes, device)
        # It takes the place of smaller ones: to make it, all ranks have waited for their devices.
        kept = [w for w in workspaces if w.captured or w.in_flight or not _fits(w, sizes._replace(tokens=0))]
        workspaces[:] = sorted([*kept, workspace], key=lambda w: w.sizes.tokens)
    workspace.begin()
    _current[group_name] = workspace
    return workspace


def _fits(workspace: Workspace, sizes: Sizes) -> bool:
    has = workspace.sizes
    return has.tokens >= sizes.tokens and has._replace(tokens=0) == sizes._replace(tokens=0)


def in_flight(group_name: str) -> Workspace | None:
    """The workspace of the exchange in flight, if there is one."""
    workspace = _current.get(group_name)
    return workspace if workspace is not None and workspace.in_flight else None


def _create(group: Any, sizes: Sizes, device: torch.device) -> Workspace:
    path = f"/dev/shm/titan_fp8moe_{os.getpid()}_{group.group_name}"  # there while this function runs
    said: list[Any] = [None] * group.size()
    dist.all_gather_object(said, (socket.gethostname(), sizes, path), group)
    hosts, all_sizes, paths = zip(*said, strict=True)
    if len(set(hosts)) > 1:
        raise ValueError(
            f'dispatch = "symmetric" needs all expert-parallel ranks on one node, got {", ".join(sorted(set(hosts)))}; '
            'use dispatch = "all_to_all", or a smaller expert-parallel degree'
        )
    if len(set(all_sizes)) > 1:
        raise ValueError(
            'dispatch = "symmetric": the ranks of a group must have equal numbers of tokens and layers of equal sizes, '
            f'got {all_sizes}; use dispatch = "all_to_all", or pad the tokens'
        )
    if device.type == "cuda":
        memory, mapped = _peer_memory(group, sizes.nbytes, device)
    else:
        memory, mapped = _shared_files(group, paths, sizes.nbytes, device), None
    backend = group._get_backend(device)
    workspace = Workspace(sizes, group.rank(), memory, lambda: backend.options._timeout.total_seconds())
    whole = weakref.ref(group)
    workspace.mapped, workspace.barrier = mapped, lambda: _barrier(whole(), device)
    return workspace


def _peer_memory(group: Any, nbytes: int, device: torch.device) -> tuple[list[Tensor], Any]:
    """The ranks' memory, and what must live as long: the buffers do not keep it, and are unmapped when it is freed."""
    from torch.distributed import _symmetric_memory

    memory = _symmetric_memory.empty(nbytes, dtype=torch.uint8, device=device)
    handle = _symmetric_memory.rendezvous(memory, group.group_name)
    peers = [handle.get_buffer(n, (nbytes,), torch.uint8) for n in range(group.size())]
    peers[group.rank()].zero_()
    _barrier(group, device)
    return peers, (memory, handle)


def _shared_files(group: Any, paths: tuple[str, ...], nbytes: int, device: torch.device) -> list[Tensor]:
    def map_file(path: str) -> Tensor:
        return torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)

    map_file(paths[group.rank()]).zero_()
    _barrier(group, device)
    peers = [map_file(path) for path in paths]
    _barrier(group, device)
    os.unlink(paths[group.rank()])
    return peers


def _barrier(group: Any, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.all_gather_object([None] * group.size(), None, group)
