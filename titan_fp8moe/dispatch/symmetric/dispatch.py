"""The experts are spread over the ranks of one node, which read and write each other's memory.

Tokens and sums are those of :mod:`titan_fp8moe.dispatch.all_to_all`, and so are the results, bit for bit. But a rank
pulls its tokens straight to expert order, and the host neither waits nor learns how many come. All ranks have equally
many tokens, and buffers have room for ``dispatch_capacity`` times what uniform routing brings.
:func:`titan_fp8moe.check_room` raises if that did not suffice. A layer's exchange ends within its forward, and within
its backward.
"""

from typing import ClassVar, NamedTuple, cast

import torch
from torch import Tensor

from titan_fp8moe import ops
from titan_fp8moe.dispatch.base import Pairs, Pending, Returned, Route, check_rows
from titan_fp8moe.dispatch.symmetric.ops import (
    symmetric_dispatch,
    symmetric_dispatch_gradients,
    symmetric_finish_combine,
    symmetric_start_combine,
)
from titan_fp8moe.dispatch.symmetric.workspace import capacities, own
from titan_fp8moe.rows import Routing, RowBias, Rows


class State(NamedTuple):
    """``sent_TK`` of :func:`titan_fp8moe.recipe.dispatch_routing`; ``plan``, ``arrived_C`` and ``pair_CK`` of
    :func:`titan_fp8moe.dispatch.symmetric.ops.symmetric_dispatch`."""

    sent_TK: Tensor
    plan: Tensor
    arrived_C: Tensor
    pair_CK: Tensor


class Sent(NamedTuple):
    """A forward before it has received: the router's choice, and all of ``dispatch_routing``."""

    pairs: Pairs
    sent_TK: Tensor
    token_C: Tensor
    counts_N: Tensor


class SymmetricDispatch:
    """See :class:`titan_fp8moe.dispatch.base.Dispatch`."""

    State: ClassVar = State
    Tokens: ClassVar = Rows
    description: ClassVar = "symmetric memory"
    travels: ClassVar = True
    overlaps: ClassVar = False
    syncs_host: ClassVar = False
    single_node: ClassVar = True
    bounded: ClassVar = True

    state: State
    routing: Routing
    kept: Rows
    dim: int
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
        """Starts nothing yet: one op of :meth:`receive` is the whole exchange, up to its rows."""
        return Pending(*rows)

    def receive(self, pending: Pending) -> Rows:
        q, scale, name = cast(Tensor, pending.rows), cast(Tensor, pending.extra), self.route.group_name
        if self.sent is None:
            routing, (_, plan, arrived_C, _) = self.routing, self.state
            args = plan, arrived_C, routing.row_TK, routing.token_M, routing.offsets_E, name
            rows = symmetric_dispatch_gradients(q, scale, *args)
            own(name, self)
            return Rows(*rows)
        (ids_TK, scores_TK, _), sent_TK, token_C, counts_N = self.sent
        x, x_scale, token_q, token_scale, *routing, plan, arrived_C, pair_CK = symmetric_dispatch(
            q, scale, ids_TK, scores_TK, token_C, counts_N, self.route.capacity, name
        )
        own(name, self)
        self.state = State(sent_TK, plan, arrived_C, pair_CK)
        self.routing, self.kept = Routing(*routing), Rows(token_q, token_scale)
        return Rows(x, x_scale)

    @staticmethod
    def kept_rows(kept: Rows, dim: int, top_k: int) -> Rows:
        return kept

    # --- and back ---

    def returns_gradients(self, needs_dx: bool) -> bool:
        """A rank does not know whether others need gradients, so all ranks always exchange them."""
        return True

    def send_back(self, y_MD: Tensor | None, ds_M: Tensor | None = None, bias: RowBias | None = None) -> Pending:
        _, plan, _, pair_CK = self.state
        args = self.routing.row_TK, pair_CK, plan, self.route.group_name, *(bias or ())
        y_MD = cast(Tensor, y_MD)
        self.dim = y_MD.shape[1]
        return Pending(symmetric_start_combine(y_MD, ds_M, *args), with_gradients=ds_M is not None)

    def finish(self, pending: Pending, dtype: torch.dtype, addend_RD: Tensor | None) -> Returned:
        started, with_gradients = cast(Tensor, pending.rows), pending.with_gradients
        rows, ds = symmetric_finish_combine(
            started, self.state.sent_TK, self.dim, dtype, addend_RD, with_gradients, self.route.group_name
        )
        return Returned(rows, ds if with_gradients else None)
