"""The experts are spread over a process group: tokens travel in all-to-alls of FP8 payloads.

A token goes once to each rank that holds experts of it, and one bf16 row comes back, the fp32 sum of these experts'
outputs. Each layer syncs once with the GPU, to read the all-to-all's split sizes and to size the buffers for what
arrives. The layer quantizes tokens and weights meanwhile.
"""

from typing import ClassVar, cast

import torch
from torch import Tensor

from titan_fp8moe import ops
from titan_fp8moe.dispatch import base
from titan_fp8moe.dispatch.base import Arrived, InFlight
from titan_fp8moe.recipe import TILE, row_capacity
from titan_fp8moe.rows import Routing, Rows

GRADIENTS_NEEDED = 1
"""The bit of the signature in which ranks may differ: the rank needs gradients of the layer's input or scores."""


class AllToAllDispatch:
    """See :class:`titan_fp8moe.dispatch.base.Dispatch`. Made by :meth:`begin` in a forward, :meth:`resume` in a
    backward.

    Attributes:
        sent_TK, token_C: of :func:`titan_fp8moe.recipe.dispatch_routing`.
        counts: (2, N, 3 + E) int32 on the host: the dispatch counts of what this rank sends to each rank, and of what
            it receives from each.
    """

    STATE: ClassVar = ("sent_TK", "token_C", "counts")
    ROWS: ClassVar = ("payload",)
    asynchronous: ClassVar = True
    permutes: ClassVar = False
    local: ClassVar = False

    pairs: tuple[Tensor, Tensor, int]  # in a forward, as are the next two
    counts_copied: torch.cuda.Event | None
    signature: int
    gradients_needed: bool  # in a backward

    def __init__(self, sent_TK: Tensor, token_C: Tensor, group_name: str):
        self.sent_TK, self.token_C, self.group_name = sent_TK, token_C, group_name

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
    ) -> "AllToAllDispatch":
        """Starts the exchange of the dispatch counts; :meth:`dispatch` waits for it."""
        sent_TK, token_C, counts_N = ops.dispatch_routing(topk_ids_TK, num_ranks, num_local, signature, check_ids)
        self = cls(sent_TK, token_C, group_name)
        self.pairs, self.signature = (topk_ids_TK, topk_scores_TK, num_local), signature
        one_each = [1] * num_ranks
        received_N = ops.wait(ops.start_all_to_all(counts_N.view(torch.uint8), one_each, one_each, group_name))
        self.counts = torch.stack([counts_N, received_N.view(torch.int32)]).to("cpu", non_blocking=True)
        self.counts_copied = torch.cuda.Event() if counts_N.is_cuda else None
        if self.counts_copied is not None:
            self.counts_copied.record()
        return self

    @classmethod
    def resume(cls, state: list[Tensor], group_name: str) -> "AllToAllDispatch":
        sent_TK, token_C, counts = state
        self = cls(sent_TK, token_C, group_name)
        self._read(counts)
        self.gradients_needed = any(common & GRADIENTS_NEEDED for common in counts[1, :, -1].tolist())
        return self

    def _read(self, counts: Tensor) -> None:
        self.counts = counts
        self.send_splits, self.receive_splits = counts[:, :, 0].tolist()
        self.token_C = self.token_C[: sum(self.send_splits)]

    # --- forward ---

    def dispatch(self, q: Tensor, scale: Tensor) -> Arrived:
        topk_ids_TK, topk_scores_TK, E = self.pairs
        if self.counts_copied is not None:
            self.counts_copied.synchronize()  # the layer's one host-device sync
        self._read(self.counts)
        received_N = self.counts[1].tolist()
        self._agree(received_N, E, topk_ids_TK.device)
        _, capacity = _arriving_rows(received_N)
        payload = ops.wait(self._send(q, scale, topk_ids_TK, topk_scores_TK, E))
        q, scale, topk_ids_CK, topk_scores_CK = ops.unpack_dispatch(payload, q.shape[1], topk_ids_TK.shape[1])
        routing = Routing(*ops.expert_routing(topk_ids_CK, topk_scores_CK, E, capacity))
        return Arrived(Rows(q, scale), routing, [payload])

    def _agree(self, received_N: list[list[int]], num_local: int, device: torch.device) -> None:
        """Raises on all ranks alike: where one alone does, the others wait for it until the collective times out.

        Raises:
            ValueError: ranks have different settings, or a rank has too many rows.
        """
        mine = self.signature | GRADIENTS_NEEDED
        if others := [rank for rank, counts in enumerate(received_N) if counts[-1] | GRADIENTS_NEEDED != mine]:
            raise ValueError(
                f"ranks {others} of the expert-parallel group call this layer with another top_k, model dim, dtype or "
                "other settings of fp8_flow_moe than this rank; make them the same on all ranks"
            )
        # All ranks know how many pairs they have together. Only if one could get too many of them do they tell each
        # other what each has.
        if row_capacity(sum(counts[-2] for counts in received_N), num_local) <= base.MAX_ROWS:
            return
        rows = torch.tensor([*_arriving_rows(received_N), sum(self.send_splits)], dtype=torch.int32, device=device)
        one_each = [1] * len(received_N)
        sent_N = rows.expand(len(one_each), 3).contiguous().view(torch.uint8)
        rows_N = ops.wait(ops.start_all_to_all(sent_N, one_each, one_each, self.group_name)).view(torch.int32)
        for rank, (rows, capacity, num_sent) in enumerate(rows_N.tolist()):
            base.check_rows(f"rank {rank} of the expert-parallel group", rows, capacity, num_local, num_sent)

    def _send(
        self, q: Tensor, scale: Tensor, topk_ids_TK: Tensor | None, topk_scores_TK: Tensor | None, num_local: int
    ) -> Tensor:
        """Sends quantized tokens (T, D), in a forward with their routed pairs. The result needs ``ops.wait``."""
        payload = ops.pack_dispatch(q, scale, self.token_C, self.sent_TK, topk_ids_TK, topk_scores_TK, num_local)
        return ops.start_all_to_all(payload, self.receive_splits, self.send_splits, self.group_name)

    def state(self) -> list[Tensor]:
        return [self.sent_TK, self.token_C, self.counts]

    def before_combine(self, y_MD: Tensor, routing: Routing) -> None:
        raise NotImplementedError("an asynchronous dispatch sends in start_combine")

    def start_combine(self, y_MD: Tensor, routing: Routing, dtype: torch.dtype, addend_RD: Tensor | None) -> Tensor:
        return self._send_back(y_MD, None, routing)

    def _send_back(self, y_MD: Tensor, ds_M: Tensor | None, routing: Routing) -> Tensor:
        payload = ops.pack_combine(y_MD, ds_M, routing.row_TK)
        return ops.start_all_to_all(payload, self.send_splits, self.receive_splits, self.group_name)

    # --- backward ---

    @staticmethod
    def arrived_rows(kept: list[Tensor], D: int, top_k: int) -> Rows:
        (payload,) = kept
        return Rows(*ops.unpack_dispatch(payload, D, top_k)[:2])

    def send_gradients(self, q: Tensor, scale: Tensor, in_flight: InFlight) -> None:
        """Sends the output's quantized gradient (T, D) the way its tokens went."""
        in_flight.payload = self._send(q, scale, None, None, self.counts.shape[2] - 3)

    def receive_gradients(self, dout: Rows | None, in_flight: InFlight | None, routing: Routing, D: int) -> Rows:
        payload = ops.wait(cast(InFlight, in_flight).take())
        return Rows(*ops.unpack_dispatch(payload, D, 0)[:2])

    def start_return(
        self, dx_MD: Tensor | None, ds_M: Tensor, routing: Routing, dtype: torch.dtype, addend_RD: Tensor | None
    ) -> Tensor:
        return self._send_back(cast(Tensor, dx_MD), ds_M, routing)

    def finish_return(
        self, pending: Tensor, D: int, dtype: torch.dtype, addend_RD: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        rows, ds = ops.unpack_combine(ops.wait(pending), D, self.sent_TK.shape[1])
        # A backward's payload holds score gradients.
        return ops.unpermute_gradients(rows, cast(Tensor, ds), self.sent_TK, dtype, addend_RD)


def finish_combine(payload: Tensor, sent_TK: Tensor, D: int, dtype: torch.dtype, addend_RD: Tensor | None) -> Tensor:
    """The output (T, D) of :meth:`AllToAllDispatch.start_combine`'s payload: each token's rows and its row of
    ``addend_RD``, summed in fp32."""
    rows, _ = ops.unpack_combine(ops.wait(payload), D, 0)
    return ops.unpermute_sum(rows, sent_TK, dtype, addend_RD)


def _arriving_rows(counts_N: list[list[int]]) -> tuple[int, int]:
    """Rows that arrive, by dispatch counts (N, 3 + E), and the same with each expert's padded to a multiple of 128: at
    least 128, so that no buffer is empty."""
    # In Python: torch's operators take longer on so few numbers.
    rows_E = [sum(rows) for rows in zip(*(counts[1:-2] for counts in counts_N), strict=True)]
    return sum(rows_E), max(sum(-(-rows // TILE) for rows in rows_E) * TILE, TILE)
