"""All experts are in this process: tokens stay where they are, and no host-device sync is needed."""

from typing import ClassVar, NamedTuple, cast

import torch
from torch import Tensor

from titan_fp8moe import ops
from titan_fp8moe.dispatch.base import Dispatch, Pairs, Pending, Returned, Route, check_rows, in_expert_order
from titan_fp8moe.recipe import row_capacity
from titan_fp8moe.rows import Routing, RowBias, Rows


class State(NamedTuple):
    """Empty: the backward needs the routing only."""


class LocalDispatch(Dispatch):
    """See :class:`titan_fp8moe.dispatch.base.Dispatch`."""

    State: ClassVar = State
    travels: ClassVar = False

    state: State = State()
    pairs: Pairs | None = None  # in a forward
    check_ids: bool
    bias: RowBias | None = None

    @classmethod
    def begin(cls, pairs: Pairs, route: Route, signature: int, check_ids: bool) -> "LocalDispatch":
        self = cls()
        self.pairs, self.check_ids = pairs, check_ids
        return self

    @classmethod
    def resume(cls, state: State, routing: Routing, route: Route, dim: int) -> "LocalDispatch":
        self = cls()
        self.routing = routing
        return self

    def send(self, rows: Rows) -> Pending:
        return Pending(*rows)

    def receive(self, pending: Pending) -> Rows:
        rows = Rows(cast(Tensor, pending.rows), cast(Tensor, pending.extra))
        if self.pairs is not None:
            ids_TK, scores_TK, E = self.pairs
            capacity = row_capacity(ids_TK.numel(), E)
            check_rows("this rank", ids_TK.numel(), capacity, E)
            self.routing = Routing(*ops.expert_routing(ids_TK, scores_TK, E, capacity, self.check_ids))
            self.arrived = rows
        return in_expert_order(rows, self.routing)

    def returns_gradients(self, needs_dx: bool) -> bool:
        return needs_dx

    def send_back(self, y_MD: Tensor | None, ds_M: Tensor | None = None, bias: RowBias | None = None) -> Pending:
        self.bias = bias
        return Pending(y_MD, ds_M)

    def finish(self, pending: Pending, dtype: torch.dtype, addend_RD: Tensor | None) -> Returned:
        rows_MD, ds_M, _ = pending
        row_TK = self.routing.row_TK
        if ds_M is None:
            return Returned(ops.unpermute_sum(cast(Tensor, rows_MD), row_TK, dtype, addend_RD, *(self.bias or ())))
        if rows_MD is None:
            return Returned(None, ds_M[row_TK.clamp(min=0)].masked_fill(row_TK < 0, 0))
        return Returned(*ops.unpermute_gradients(rows_MD, ds_M.unsqueeze(1), row_TK, dtype, addend_RD))
