"""The experts are spread over the ranks of one node, which read and write each other's memory.

Tokens and sums are those of :mod:`titan_fp8moe.dispatch.all_to_all`, and so are the results, bit for bit. But a rank
pulls its tokens straight to expert order, and the host neither waits nor learns how many come. All ranks have equally
many tokens, and buffers have room for ``dispatch_capacity`` times the rows of uniform routing.
:func:`titan_fp8moe.check_room` raises if that did not suffice.

Rows travel on a stream of their own (:meth:`~titan_fp8moe.dispatch.symmetric.workspace.Workspace.beside`), in
parallel with the layer's computation between two verbs. The dispatch keeps the transfer's tensors until the second
verb, which lets the layer's stream wait. An exchange ends within a layer's forward, and within its backward.
"""

from typing import ClassVar, NamedTuple, cast

import torch
from torch import Tensor

from titan_fp8moe import ops
from titan_fp8moe.dispatch.base import Dispatch, Pairs, Pending, Returned, Route, check_rows
from titan_fp8moe.dispatch.symmetric.ops import (
    symmetric_arrived,
    symmetric_dispatch,
    symmetric_dispatch_gradients,
    symmetric_finish_combine,
    symmetric_start_combine,
)
from titan_fp8moe.dispatch.symmetric.workspace import capacities, current, own
from titan_fp8moe.ops.backend import intercepted
from titan_fp8moe.rows import Routing, RowBias, Rows


class State(NamedTuple):
    """``sent_TK`` of :func:`titan_fp8moe.recipe.dispatch_routing`; ``arrived_C``, ``pair_CK`` and ``plan`` of
    :func:`titan_fp8moe.dispatch.symmetric.ops.symmetric_dispatch`."""

    sent_TK: Tensor
    arrived_C: Tensor
    pair_CK: Tensor
    plan: Tensor


class Sent(NamedTuple):
    """A forward before it has received: the router's choice, and all of ``dispatch_routing``."""

    pairs: Pairs
    sent_TK: Tensor
    token_C: Tensor
    counts_N: Tensor


class SymmetricDispatch(Dispatch):
    """See :class:`titan_fp8moe.dispatch.base.Dispatch`."""

    State: ClassVar = State
    Tokens: ClassVar = Rows
    description: ClassVar = "symmetric memory"
    single_node: ClassVar = True
    bounded: ClassVar = True

    state: State
    routing: Routing
    kept: Rows
    dim: int
    transfer: list[Tensor]  # tensors that the transfer in flight reads and writes, kept until it has ended
    sent: Sent | None = None  # in a forward

    def __init__(self, route: Route):
        self.route = route

    @classmethod
    def begin(cls, pairs: Pairs, route: Route, signature: int, check_ids: bool) -> "SymmetricDispatch":
        (T, K), N, E = pairs.topk_ids_TK.shape, route.num_ranks, pairs.num_local
        check_rows("this rank", T * K, capacities(T, K, N, E, route.capacity)[0], E, T * min(K, N))
        self = cls(route)
        self.sent = Sent(pairs, *ops.dispatch_routing(pairs.topk_ids_TK, N, E, signature, check_ids))
        return self

    @classmethod
    def resume(cls, state: State, routing: Routing | None, route: Route, dim: int) -> "SymmetricDispatch":
        self = cls(route)
        self.state, self.routing = state, cast(Routing, routing)
        return self

    # --- to the experts ---

    def send(self, rows: Rows) -> Pending:
        name = self.route.group_name
        if self.sent is None:
            routing, state = self.routing, self.state
            plan = state.plan, state.arrived_C, routing.row_TK, routing.token_M, routing.offsets_E
            q, scale = symmetric_dispatch_gradients(*rows, *plan, name)
            self.transfer = [q, scale, *plan]
        else:
            (ids_TK, scores_TK, _), sent_TK, token_C, counts_N = self.sent
            pairs = ids_TK, scores_TK, token_C, counts_N
            q, scale, *results = symmetric_dispatch(*rows, *pairs, self.route.capacity, name)
            token_q, token_scale, offsets_E, token_M, score_M, row_CK, *state = results
            self.transfer = [q, scale, *results]
            self.state, self.kept = State(sent_TK, *state), Rows(token_q, token_scale)
            self.routing = Routing(offsets_E, token_M, score_M, row_CK)
        own(name, self)
        return Pending(q, scale)

    def receive(self, pending: Pending, beside: list[Tensor]) -> Rows:
        q, scale = cast(Tensor, pending.rows), cast(Tensor, pending.extra)
        transfer, self.transfer = self.transfer, []
        if intercepted():
            scale = symmetric_arrived(scale, [*transfer, *beside], self.route.group_name)
        else:  # without a copy of the scales
            current(self.route.group_name).join()
        return Rows(q, scale)

    @staticmethod
    def kept_rows(kept: Rows, dim: int, top_k: int) -> Rows:
        return kept

    # --- and back ---

    def returns_gradients(self, needs_dx: bool) -> bool:
        """A rank does not know whether others need gradients, so all ranks always exchange them."""
        return True

    def send_back(self, y_MD: Tensor | None, ds_M: Tensor | None = None, bias: RowBias | None = None) -> Pending:
        y_MD, state = cast(Tensor, y_MD), self.state
        self.dim = y_MD.shape[1]
        tensors = y_MD, ds_M, self.routing.row_TK, state.pair_CK, state.plan
        self.transfer = [t for t in (*tensors, *(bias or ())) if t is not None]
        started = symmetric_start_combine(*tensors, self.route.group_name, *(bias or ()))
        return Pending(started, with_gradients=ds_M is not None)

    def finish(self, pending: Pending, dtype: torch.dtype, addend_RD: Tensor | None, beside: list[Tensor]) -> Returned:
        started, with_gradients = cast(Tensor, pending.rows), pending.with_gradients
        rows, ds = symmetric_finish_combine(
            started,
            self.state.sent_TK,
            self.dim,
            dtype,
            addend_RD,
            with_gradients,
            [*self.transfer, *beside],
            self.route.group_name,
        )
        return Returned(rows, ds if with_gradients else None)
