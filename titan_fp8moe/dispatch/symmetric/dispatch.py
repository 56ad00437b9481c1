"""The experts are spread over the ranks of one node, which read and write each other's memory.

Tokens and sums are those of :mod:`titan_fp8moe.dispatch.all_to_all`, and so are the results, bit for bit. But a rank
pulls its tokens straight to expert order, and the host neither waits nor learns how many come. All ranks have equally
many tokens, and buffers have room for ``dispatch_capacity`` times what uniform routing brings.
:func:`titan_fp8moe.check_room` raises if that did not suffice. A layer's exchange ends
within its forward, and within its backward.
"""

from typing import ClassVar, cast

import torch
from torch import Tensor

from titan_fp8moe import ops
from titan_fp8moe.dispatch.base import Arrived, InFlight, check_rows
from titan_fp8moe.dispatch.symmetric import ops as symmetric_ops
from titan_fp8moe.dispatch.symmetric.workspace import capacities
from titan_fp8moe.rows import Routing, Rows


class SymmetricDispatch:
    """See :class:`titan_fp8moe.dispatch.base.Dispatch`. Made by :meth:`begin` in a forward, :meth:`resume` in a
    backward.

    Attributes:
        sent_TK: of :func:`titan_fp8moe.recipe.dispatch_routing`.
        plan, arrived_C, pair_CK: of :func:`titan_fp8moe.symmetric_ops.symmetric_dispatch`.
    """

    STATE: ClassVar = ("sent_TK", "plan", "arrived_C", "pair_CK")
    ROWS: ClassVar = ("token_q", "token_scale")
    asynchronous: ClassVar = False
    permutes: ClassVar = True
    local: ClassVar = False
    gradients_needed: bool = True  # or not: ranks that do not learn it always exchange gradients

    pairs: tuple[Tensor, Tensor, float]  # in a forward, as are the next three
    token_C: Tensor
    counts_N: Tensor
    started: Tensor
    plan: Tensor
    arrived_C: Tensor
    pair_CK: Tensor

    def __init__(self, sent_TK: Tensor, group_name: str):
        self.sent_TK, self.group_name = sent_TK, group_name

    @classmethod
    def begin(
        cls,
        topk_ids_TK: Tensor,
        topk_scores_TK: Tensor,
        num_local: int,
        group_name: str,
        num_ranks: int,
        signature: int,
        check_ids: bool,
        capacity: float,
    ) -> "SymmetricDispatch":
        (T, K), P = topk_ids_TK.shape, topk_ids_TK.shape[0] * min(topk_ids_TK.shape[1], num_ranks)
        check_rows("this rank", T * K, capacities(T, K, num_ranks, num_local, capacity)[0], num_local, P)
        sent_TK, token_C, counts_N = ops.dispatch_routing(topk_ids_TK, num_ranks, num_local, signature, check_ids)
        self = cls(sent_TK, group_name)
        self.pairs, self.token_C, self.counts_N = (topk_ids_TK, topk_scores_TK, capacity), token_C, counts_N
        return self

    @classmethod
    def resume(cls, state: list[Tensor], group_name: str) -> "SymmetricDispatch":
        self = cls(state[0], group_name)
        self.plan, self.arrived_C, self.pair_CK = state[1:]
        return self

    def state(self) -> list[Tensor]:
        return [self.sent_TK, self.plan, self.arrived_C, self.pair_CK]

    # --- forward ---

    def dispatch(self, q: Tensor, scale: Tensor) -> Arrived:
        topk_ids_TK, topk_scores_TK, capacity = self.pairs
        x, x_scale, token_q, token_scale, *routing, self.plan, self.arrived_C, self.pair_CK = (
            symmetric_ops.symmetric_dispatch(
                q, scale, topk_ids_TK, topk_scores_TK, self.token_C, self.counts_N, capacity, self.group_name
            )
        )
        return Arrived(Rows(x, x_scale), Routing(*routing), [token_q, token_scale])

    def before_combine(self, y_MD: Tensor, routing: Routing) -> None:
        self.started = self._send_back(y_MD, None, routing)

    def start_combine(self, y_MD: Tensor, routing: Routing, dtype: torch.dtype, addend_RD: Tensor | None) -> Tensor:
        return self._return(self.started, y_MD.shape[1], dtype, addend_RD, False)[0]

    def _send_back(self, y_MD: Tensor, ds_M: Tensor | None, routing: Routing) -> Tensor:
        return symmetric_ops.symmetric_start_combine(
            y_MD, ds_M, routing.row_TK, self.pair_CK, self.plan, self.group_name
        )

    def _return(
        self, started: Tensor, D: int, dtype: torch.dtype, addend_RD: Tensor | None, with_gradients: bool
    ) -> tuple[Tensor, Tensor]:
        return symmetric_ops.symmetric_finish_combine(
            started, self.sent_TK, D, dtype, addend_RD, with_gradients, self.group_name
        )

    # --- backward ---

    @staticmethod
    def arrived_rows(kept: list[Tensor], D: int, top_k: int) -> Rows:
        return Rows(*kept)

    def receive_gradients(self, dout: Rows | None, in_flight: InFlight | None, routing: Routing, D: int) -> Rows:
        q, scale = cast(Rows, dout)
        return Rows(
            *symmetric_ops.symmetric_dispatch_gradients(
                q, scale, self.plan, self.arrived_C, routing.row_TK, routing.token_M, routing.offsets_E, self.group_name
            )
        )

    def start_return(
        self, dx_MD: Tensor | None, ds_M: Tensor, routing: Routing, dtype: torch.dtype, addend_RD: Tensor | None
    ) -> Tensor:
        return self._send_back(cast(Tensor, dx_MD), ds_M, routing)

    def finish_return(
        self, pending: Tensor, D: int, dtype: torch.dtype, addend_RD: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return self._return(pending, D, dtype, addend_RD, True)
