"""The experts are spread over a process group: tokens travel in all-to-alls of FP8 payloads.

A token goes once to each rank that holds experts of it, and one bf16 row comes back, the fp32 sum of these experts'
outputs. Each layer syncs once with the GPU, to read the all-to-all's split sizes and to size the buffers for what
arrives. The layer quantizes tokens and weights meanwhile.
"""

import functools
from typing import ClassVar, NamedTuple, cast

import torch
from torch import Tensor

from titan_fp8moe import ops
from titan_fp8moe.dispatch import auto, base
from titan_fp8moe.dispatch.base import GRADIENTS_NEEDED, Pairs, Pending, Returned, Route, in_expert_order
from titan_fp8moe.dispatch.symmetric.workspace import capacities
from titan_fp8moe.recipe import ROW_ALIGN, row_capacity
from titan_fp8moe.rows import Routing, RowBias, Rows


class State(NamedTuple):
    """``sent_TK`` and ``token_C`` of :func:`titan_fp8moe.recipe.dispatch_routing`; ``counts`` (2, N, 3 + E) int32 on
    the host, the dispatch counts that this rank sends to each rank, and receives from each."""

    sent_TK: Tensor
    token_C: Tensor
    counts: Tensor


class Arrived(NamedTuple):
    """``payload`` (C, ...) uint8, as it arrived."""

    payload: Tensor


class AllToAllDispatch(base.Dispatch):
    """See :class:`titan_fp8moe.dispatch.base.Dispatch`."""

    State: ClassVar = State
    Arrived: ClassVar = Arrived
    description: ClassVar = "all-to-all"
    syncs_host: ClassVar = True

    dim: int  # D; in a forward padded, until send_back
    pairs: Pairs | None = None  # in a forward, as is the next
    counts_copied: torch.Event | None

    def __init__(self, state: State, route: Route):
        self.state, self.route = state, route

    @classmethod
    def begin(cls, pairs: Pairs, route: Route, signature: int, check_ids: bool) -> "AllToAllDispatch":
        """Starts the exchange of the dispatch counts; :meth:`send` waits for it."""
        sent_TK, token_C, counts_N = ops.dispatch_routing(
            pairs.topk_ids_TK, route.num_ranks, pairs.num_local, signature, check_ids
        )
        counts = torch.stack([counts_N, _exchanged(counts_N, route)])
        counts = _any_counts(counts) if counts.is_meta else counts.to("cpu", non_blocking=True)
        self = cls(State(sent_TK, token_C, counts), route)
        self.pairs = pairs
        self.counts_copied = torch.cuda.current_stream().record_event() if counts_N.is_cuda else None
        return self

    @classmethod
    def resume(cls, state: State, routing: Routing, route: Route, dim: int) -> "AllToAllDispatch":
        self = cls(state, route)
        self.dim, self.routing = dim, routing
        return self

    @functools.cached_property
    def splits(self) -> tuple[list[int], list[int]]:
        """How many tokens this rank sends to each rank, and receives from each."""
        send_splits, receive_splits = self.state.counts[:, :, 0].tolist()
        return send_splits, receive_splits

    # --- to the experts ---

    def send(self, rows: Rows) -> Pending:
        if self.pairs is not None:
            self.dim = rows.q.shape[1]  # padded already
            if self.counts_copied is not None:
                self.counts_copied.synchronize()  # the layer's one host-device sync
            self._agree()
            self.state = self.state._replace(token_C=self.state.token_C[: sum(self.splits[0])])
        ids_TK, scores_TK, num_local = self.pairs or (None, None, self.state.counts.shape[2] - 3)
        sent_TK, token_C, _ = self.state
        send_splits, receive_splits = self.splits
        payload = ops.pack_dispatch(*rows, token_C, sent_TK, ids_TK, scores_TK, num_local)
        return Pending(ops.start_all_to_all(payload, receive_splits, send_splits, self.route.group_name))

    def receive(self, pending: Pending) -> Rows:
        payload = ops.wait(cast(Tensor, pending.rows))
        if self.pairs is None:
            return in_expert_order(Rows(*ops.unpack_dispatch(payload, self.dim, 0)[:2]), self.routing)
        ids_TK, _, E = self.pairs
        _, capacity = _arriving_rows(self.state.counts[1].tolist())
        if auto.is_enabled():
            (T, K), N = ids_TK.shape, self.route.num_ranks
            auto.note((capacity, sum(self.splits[1])), N, functools.partial(capacities, T, K, N, E))
        q, scale, ids_CK, scores_CK = ops.unpack_dispatch(payload, self.dim, ids_TK.shape[1])
        self.routing = Routing(*ops.expert_routing(ids_CK, scores_CK, E, capacity))
        self.arrived = Arrived(payload)
        return in_expert_order(Rows(q, scale), self.routing)

    def _agree(self) -> None:
        """Raises on all ranks alike: where one alone does, the others wait for it until the collective times out.

        Raises:
            ValueError: ranks have different settings, or a rank has too many rows.
        """
        ids_TK, _, num_local = cast(Pairs, self.pairs)
        (sent, *_), received_N = self.state.counts.tolist()
        mine = sent[-1] | GRADIENTS_NEEDED
        if others := [rank for rank, counts in enumerate(received_N) if counts[-1] | GRADIENTS_NEEDED != mine]:
            raise ValueError(
                f"ranks {others} of the expert-parallel group call this layer with another top_k, model dim, dtype or "
                "other settings of fp8_flow_moe than this rank; make them the same on all ranks"
            )
        # All ranks know the sum of their routed pairs. They exchange each rank's number only if one could get too many.
        if row_capacity(sum(counts[-2] for counts in received_N), num_local) <= base.MAX_ROWS:
            return
        own = torch.tensor([*_arriving_rows(received_N), sum(self.splits[0])], dtype=torch.int32, device=ids_TK.device)
        rows_N = _exchanged(own.expand(len(received_N), 3).contiguous(), self.route)
        for rank, (rows, capacity, num_sent) in enumerate(rows_N.tolist()):
            base.check_rows(f"rank {rank} of the expert-parallel group", rows, capacity, num_local, num_sent)

    def arrived_rows(self, arrived: Arrived) -> Rows:
        return Rows(*ops.unpack_dispatch(arrived.payload, self.dim, self.routing.row_TK.shape[1])[:2])

    # --- and back ---

    def returns_gradients(self, needs_dx: bool) -> bool:
        """All ranks exchange gradients, or none: the forward's dispatch counts say which ranks need them."""
        return any(common & GRADIENTS_NEEDED for common in self.state.counts[1, :, -1].tolist())

    def send_back(self, y_MD: Tensor | None, ds_M: Tensor | None = None, bias: RowBias | None = None) -> Pending:
        self.dim = cast(Tensor, y_MD).shape[1]
        payload = ops.pack_combine(cast(Tensor, y_MD), ds_M, self.routing.row_TK, *(bias or ()))
        payload = ops.start_all_to_all(payload, *self.splits, self.route.group_name)
        return Pending(payload, with_gradients=ds_M is not None)

    def finish(self, pending: Pending, dtype: torch.dtype, addend_RD: Tensor | None) -> Returned:
        payload, sent_TK = ops.wait(cast(Tensor, pending.rows)), self.state.sent_TK
        rows, ds = ops.unpack_combine(payload, self.dim, sent_TK.shape[1] if pending.with_gradients else 0)
        if not pending.with_gradients:
            return Returned(ops.unpermute_sum(rows, sent_TK, dtype, addend_RD))
        return Returned(*ops.unpermute_gradients(rows, cast(Tensor, ds), sent_TK, dtype, addend_RD))


def _exchanged(rows_N: Tensor, route: Route) -> Tensor:
    """A row of int32 from each rank, for one to each."""
    one_each = [1] * route.num_ranks
    received = ops.wait(ops.start_all_to_all(rows_N.view(torch.uint8), one_each, one_each, route.group_name))
    return received.view(torch.int32)


def _any_counts(counts: Tensor) -> Tensor:
    """Dispatch counts in the place of meta ones: kernels are compiled ahead, and none depends on them."""
    return torch.ones_like(counts, device="cpu")


def _arriving_rows(counts_N: list[list[int]]) -> tuple[int, int]:
    """Rows that arrive, by dispatch counts (N, 3 + E), and the same with each expert's padded to a multiple of 128. The
    second is at least 128, so that no buffer is empty."""
    # In Python: torch's operators take longer on so few numbers.
    rows_E = [sum(rows) for rows in zip(*(counts[1:-2] for counts in counts_N), strict=True)]
    return sum(rows_E), max(sum(-(-rows // ROW_ALIGN) for rows in rows_E) * ROW_ALIGN, ROW_ALIGN)
