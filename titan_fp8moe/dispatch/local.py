"""All experts are in this process: tokens stay where they are, and no host-device sync is needed."""

from typing import ClassVar, cast

import torch
from torch import Tensor

from titan_fp8moe import ops
from titan_fp8moe.dispatch.base import Arrived, InFlight, check_rows
from titan_fp8moe.recipe import row_capacity
from titan_fp8moe.rows import Routing, Rows


class LocalDispatch:
    """See :class:`titan_fp8moe.dispatch.base.Dispatch`. A backward's dispatch needs no routed pairs."""

    STATE: ClassVar = ()
    ROWS: ClassVar = ("token_q", "token_scale")
    asynchronous: ClassVar = False
    permutes: ClassVar = False
    local: ClassVar = True
    gradients_needed: bool = True

    pairs: tuple[Tensor, Tensor, int]  # in a forward

    def __init__(self, pairs: tuple[Tensor, Tensor, int] | None = None, check_ids: bool = False):
        """``pairs``: topk_ids_TK, topk_scores_TK and the number of experts."""
        self.check_ids = check_ids
        if pairs is not None:
            self.pairs = pairs

    def dispatch(self, q: Tensor, scale: Tensor) -> Arrived:
        topk_ids_TK, topk_scores_TK, E = self.pairs
        capacity = row_capacity(topk_ids_TK.numel(), E)
        check_rows("this rank", topk_ids_TK.numel(), capacity, E)
        routing = Routing(*ops.expert_routing(topk_ids_TK, topk_scores_TK, E, capacity, self.check_ids))
        return Arrived(Rows(q, scale), routing, [q, scale])

    def state(self) -> list[Tensor]:
        return []

    def before_combine(self, y_MD: Tensor, routing: Routing) -> None:
        pass

    def start_combine(self, y_MD: Tensor, routing: Routing, dtype: torch.dtype, addend_RD: Tensor | None) -> Tensor:
        return ops.unpermute_sum(y_MD, routing.row_TK, dtype, addend_RD)

    @staticmethod
    def arrived_rows(kept: list[Tensor], D: int, top_k: int) -> Rows:
        return Rows(*kept)

    def receive_gradients(self, dout: Rows | None, in_flight: InFlight | None, routing: Routing, D: int) -> Rows:
        return cast(Rows, dout)

    def start_return(
        self, dx_MD: Tensor | None, ds_M: Tensor, routing: Routing, dtype: torch.dtype, addend_RD: Tensor | None
    ) -> tuple[Tensor | None, Tensor]:
        if dx_MD is None:
            return None, ds_M[routing.row_TK.clamp(min=0)].masked_fill(routing.row_TK < 0, 0)
        return ops.unpermute_gradients(dx_MD, ds_M.unsqueeze(1), routing.row_TK, dtype, addend_RD)

    def finish_return(
        self, pending: tuple[Tensor | None, Tensor], D: int, dtype: torch.dtype, addend_RD: Tensor | None
    ) -> tuple[Tensor | None, Tensor]:
        return pending
