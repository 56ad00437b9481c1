"""The experts are spread over the ranks of one node, which read and write each other's memory.

Tokens and sums are those of :mod:`titan_fp8moe.dispatch.all_to_all`, and so are the results, bit for bit. But a rank
pulls its tokens straight to expert order, and the host neither waits nor learns how many come. All ranks have equally
many tokens, and buffers have room for ``dispatch_capacity`` times the rows of uniform routing.
:func:`titan_fp8moe.check_room` raises if that did not suffice. :mod:`titan_fp8moe.dispatch.symmetric.exchange`
describes the steps.

Rows travel on a stream of their own (:meth:`~titan_fp8moe.dispatch.symmetric.workspace.Workspace.beside`), in
parallel with the layer's computation between two verbs. The dispatch keeps the transfer's tensors until the second
verb, which lets the layer's stream wait. An exchange ends within a layer's forward, and within its backward.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor

from titan_fp8moe import ops
from titan_fp8moe.dispatch.base import Dispatch, Pairs, Pending, Returned, Route, check_rows
from titan_fp8moe.dispatch.symmetric import exchange, kernels, workspace
from titan_fp8moe.dispatch.symmetric.workspace import COMBINE, DISPATCH, Sizes, Workspace, capacities
from titan_fp8moe.kernels.launch import is_tracing
from titan_fp8moe.kernels.sizes import empty_rows
from titan_fp8moe.ops.backend import use_kernels
from titan_fp8moe.recipe import FP8, SCALE_TILE
from titan_fp8moe.rows import Routing, RowBias, Rows


class State(NamedTuple):
    """``sent_TK`` of :func:`titan_fp8moe.recipe.dispatch_routing`; ``arrived_C``, ``pair_CK`` and ``plan`` of
    :mod:`titan_fp8moe.dispatch.symmetric.exchange`."""

    sent_TK: Tensor
    arrived_C: Tensor
    pair_CK: Tensor
    plan: Tensor


class SymmetricDispatch(Dispatch):
    """See :class:`titan_fp8moe.dispatch.base.Dispatch`."""

    State: ClassVar = State
    description: ClassVar = "symmetric memory"
    bounded: ClassVar = True

    state: State
    dim: int
    sent: tuple[Pairs, Tensor, Tensor, Tensor] | None = None  # in a forward: also what dispatch_routing returns
    at: Workspace | None = None  # of the exchange in flight

    def __init__(self, route: Route):
        self.route = route

    @classmethod
    def begin(cls, pairs: Pairs, route: Route, signature: int, check_ids: bool) -> "SymmetricDispatch":
        (T, K), N, E = pairs.topk_ids_TK.shape, route.num_ranks, pairs.num_local
        check_rows("this rank", T * K, capacities(T, K, N, E, route.capacity)[0], E, T * min(K, N))
        self = cls(route)
        self.sent = pairs, *ops.dispatch_routing(pairs.topk_ids_TK, N, E, signature, check_ids)
        return self

    @classmethod
    def resume(cls, state: State, routing: Routing, route: Route, dim: int) -> "SymmetricDispatch":
        self = cls(route)
        self.state, self.routing = state, routing
        if not is_tracing(routing.token_M):  # the second op of a backward may be interrupted before it sends
            self.at = workspace.in_flight(route.group_name)
        return self

    @contextmanager
    def guard(self) -> Iterator[None]:  # pyrefly: ignore[bad-override]
        try:
            yield
        except BaseException:
            if self.at is not None:
                self.at.interrupt()
            raise

    # --- to the experts ---

    def send(self, rows: Rows) -> Pending:
        if self.sent is None:
            return self._send_gradients(rows)
        ((ids_TK, scores_TK, E), sent_TK, token_C, counts_N), (T, D) = self.sent, rows.q.shape
        N, K = self.route.num_ranks, ids_TK.shape[1]
        M, C = capacities(T, K, N, E, self.route.capacity)
        if is_tracing(rows.q):
            q, scale, *results = _arriving(rows, counts_N, scores_TK, M, C)
        else:
            at, impl = self._begin(rows, Sizes(N, T, D, K, E))
            impl.publish(at, *rows, (ids_TK, scores_TK, token_C, counts_N, M, C))
            with at.beside():
                plan = impl.plan(at)
                at.planned()
                offsets_E, token_M, score_M, row_CK, arrived_C, pair_CK = impl.pull_routing(at, plan, M, C)
                q, scale, *tokens = impl.pull_rows(at, plan, arrived_C, row_CK, token_M, offsets_E, True)
            results = [*tokens, offsets_E, token_M, score_M, row_CK, arrived_C, pair_CK, plan]
            at.scratch += [q, scale, *results]
        self.arrived, self.routing = Rows(*results[:2]), Routing(*results[2:6])
        self.state = State(sent_TK, *results[6:])
        return Pending(q, scale)

    def _send_gradients(self, rows: Rows) -> Pending:
        (offsets_E, token_M, _, row_CK), (_, arrived_C, _, plan) = self.routing, self.state
        (T, D), M = rows.q.shape, token_M.shape[0]
        if is_tracing(rows.q):
            return Pending(*empty_rows(rows.q, M, D))
        at, impl = self._begin(rows, Sizes(self.route.num_ranks, T, D, row_CK.shape[1], offsets_E.shape[0]))
        impl.publish(at, *rows, None)
        with at.beside():
            impl.wait(at, DISPATCH)
            q, scale, *_ = impl.pull_rows(at, plan, arrived_C, row_CK, token_M, offsets_E, False)
        at.scratch += [q, scale]
        return Pending(q, scale)

    def _begin(self, rows: Rows, sizes: Sizes) -> tuple[Workspace, ModuleType]:
        self.at = None  # another exchange in flight is not this one's to interrupt
        self.at = workspace.begin(self.route.group_name, sizes, rows.q.device)
        return self.at, _impl(rows.q)

    def receive(self, pending: Pending) -> Rows:
        if self.at is not None:
            self.at.join()
        return Rows(*cast(Any, pending[:2]))

    # --- and back ---

    def returns_gradients(self, needs_dx: bool) -> bool:
        """A rank does not know whether others need gradients, so all ranks always exchange them."""
        return True

    def send_back(self, y_MD: Tensor | None, ds_M: Tensor | None = None, bias: RowBias | None = None) -> Pending:
        y_MD, (_, _, pair_CK, plan) = cast(Tensor, y_MD), self.state
        self.dim = y_MD.shape[1]
        if not is_tracing(y_MD):
            at, impl = cast(Workspace, self.at), _impl(y_MD)
            if bias is not None:  # PyTorch copies on its own stream
                bias = bias._replace(b2_ED=bias.b2_ED.contiguous())
            at.scratch += [y_MD, ds_M, *(bias or ())]
            with at.beside():
                impl.push_sums(at, plan, y_MD, ds_M, self.routing.row_TK, pair_CK, bias)
                impl.wait(at, COMBINE)
        return Pending(None, with_gradients=ds_M is not None)

    def finish(self, pending: Pending, dtype: torch.dtype, addend_RD: Tensor | None) -> Returned:
        at, sent_TK = self.at, self.state.sent_TK
        if at is None:  # traced
            out, scores = sent_TK.new_empty(sent_TK.shape[0], self.dim, dtype=dtype), sent_TK.float()
            return Returned(out, scores if pending.with_gradients else None)
        at.join()
        sums = at.sums(self.dim)
        if pending.with_gradients:
            returned = ops.unpermute_gradients(sums, at.view("score_gradients"), sent_TK, dtype, addend_RD)
        else:
            returned = (ops.unpermute_sum(sums, sent_TK, dtype, addend_RD),)
        at.in_flight = False
        return Returned(*returned)


def _impl(x: Tensor) -> ModuleType:
    return kernels if use_kernels(x) else exchange


def _arriving(rows: Rows, counts_N: Tensor, scores_TK: Tensor, M: int, C: int) -> list[Tensor]:
    """A forward's tensors as PyTorch traces them: q, scale, and what a dispatch keeps, in the order of its records."""
    (_, D), K, (N, columns) = rows.q.shape, scores_TK.shape[1], counts_N.shape
    tokens = rows.q.new_empty(C, D, dtype=FP8), rows.scale.new_empty(C, D // SCALE_TILE)
    routing = counts_N.new_empty(columns - 3), counts_N.new_empty(M), scores_TK.new_empty(M), counts_N.new_empty(C, K)
    state = counts_N.new_empty(C), counts_N.new_empty(C, K, dtype=torch.uint8), counts_N.new_empty(2, N + 1)
    return [*empty_rows(rows.q, M, D), *tokens, *routing, *state]
