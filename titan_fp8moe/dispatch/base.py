"""The interface of a dispatch: how tokens reach the ranks of their experts, and how sums come back.

Four verbs serve both directions. In a forward tokens go, and sums of outputs come back. In a backward gradients of the
output go, and gradients of tokens and scores come back::

    send ──► receive ── experts ──► send_back ──► finish

``send`` and ``send_back`` start a transfer and return a :class:`Pending`, which ``receive`` and ``finish`` complete.
Between the two the layer computes what does not depend on the rows in flight. No transfer outlives the op that starts
it.

A new backend is one file with a class like :class:`Dispatch`, a line in :data:`titan_fp8moe.dispatch.BACKENDS`, and a
name in the setting ``dispatch``.
"""

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from titan_fp8moe import ops
from titan_fp8moe.kernels.sizes import MAX_ROWS
from titan_fp8moe.rows import Routing, RowBias, Rows

GRADIENTS_NEEDED = 1
"""The bit of a signature in which ranks may differ: the rank needs gradients of the layer's input or scores."""


class Route(NamedTuple):
    """Over which ranks a layer's tokens travel, and how; by default they stay.

    Attributes:
        backend: a key of :data:`titan_fp8moe.dispatch.BACKENDS`.
        num_ranks: ranks that share the experts.
        capacity: room of a bounded backend, as a multiple of what uniform routing needs.
        group_name: of the process group.
    """

    backend: str = "local"
    num_ranks: int = 1
    capacity: float = 1.0
    group_name: str = ""


class Pairs(NamedTuple):
    """The router's choice: ``topk_ids_TK`` (T, K) int32 or int64 with -1 for none, ``topk_scores_TK`` (T, K) fp32, and
    ``num_local``, the experts of this rank."""

    topk_ids_TK: Tensor
    topk_scores_TK: Tensor
    num_local: int


class Pending(NamedTuple):
    """A transfer that has been started, or the tensors themselves where they stay. Only the backend that made it reads
    the fields; the layer drops it after ``receive`` or ``finish``.

    Attributes:
        rows: the payload in flight, which :func:`titan_fp8moe.ops.wait` waits for, or rows that stay; None for
            gradients of tokens that nobody needs, and where peers read the rows.
        extra: what goes with the rows: scales of quantized rows, or gradients of scores.
        with_gradients: whether gradients of scores come back too.
    """

    rows: Tensor | None
    extra: Tensor | None = None
    with_gradients: bool = False


class Returned(NamedTuple):
    """``rows_TD`` (T, D), the tokens' sums or gradients, None if nobody needs them; ``ds_TK`` (T, K) fp32, the scores'
    gradients in a backward."""

    rows_TD: Tensor | None
    ds_TK: Tensor | None = None


class Dispatch(Protocol):
    """Movement of one layer's tokens, in its forward or in its backward. A backend that inherits from it states what
    differs from the defaults.

    Attributes:
        State: the record of tensors that a forward keeps, and from which its backward's dispatch is resumed.
        Arrived: the record of one row per token that arrived, of which the weight gradients are made.
        description: for logs.
        travels: whether tokens leave the rank. If not, nothing is in flight, and arriving tokens are the rank's own.
        syncs_host: whether the host waits for the device, which keeps a layer out of compiled and CUDA graphs.
        bounded: whether buffers have a fixed size; :func:`titan_fp8moe.check_room` then raises if it did not suffice.
        guard: makes the context of an op's verbs. If an error ends the op between two, it ends the transfer in flight.
        state, routing, arrived: of the experts of this rank; in a forward, after :meth:`receive`.

    In a backward one op sends and receives, the next sends back and finishes, each with an instance of its own.
    """

    State: ClassVar[type]
    Arrived: ClassVar[type] = Rows
    description: ClassVar[str]
    travels: ClassVar[bool] = True
    syncs_host: ClassVar[bool] = False
    bounded: ClassVar[bool] = False
    guard: Callable[..., AbstractContextManager[Any]] = contextlib.nullcontext

    state: Any
    routing: Routing
    arrived: Any

    @classmethod
    def begin(cls, pairs: Pairs, route: Route, signature: int, check_ids: bool) -> "Dispatch":
        """Starts a forward's dispatch.

        Args:
            signature: 31 bits that differ between ranks if their settings do, apart from :data:`GRADIENTS_NEEDED`.
            check_ids: refuse ids that are neither -1 nor one of the experts of all ranks.
        """

    @classmethod
    def resume(cls, state: Any, routing: Routing, route: Route, dim: int) -> "Dispatch":
        """Continues a forward's dispatch in its backward, from its ``state`` and ``routing``. ``dim`` is D."""

    def send(self, rows: Rows) -> Pending:
        """Starts to bring quantized tokens, (T, D) e4m3 and (T, D // 128) e8m0, to the ranks of their experts."""

    def receive(self, pending: Pending) -> Rows:
        """The rows of this rank's experts, (M, D) in expert order."""

    def arrived_rows(self, arrived: Any) -> Rows:
        """In a backward one quantized row per token that arrived in the forward, from its ``arrived``."""
        return arrived

    def returns_gradients(self, needs_dx: bool) -> bool:
        """Whether a backward computes and returns gradients of tokens: ``needs_dx`` on one rank, else alike on all."""

    def send_back(self, y_MD: Tensor | None, ds_M: Tensor | None = None, bias: RowBias | None = None) -> Pending:
        """Starts to return rows (M, D) bf16, and in a backward the gradients of their scores (M,) fp32. Each token's
        rows are summed in fp32, in a forward with ``bias``."""

    def finish(self, pending: Pending, dtype: torch.dtype, addend_RD: Tensor | None) -> Returned:
        """Each token's sum over its experts and its row of ``addend_RD``, in fp32 and rounded to ``dtype`` once."""


def in_expert_order(rows: Rows, routing: Routing) -> Rows:
    """Rows of one per token as (M, D) in expert order."""
    return Rows(*ops.permute_rows(*rows, routing.row_TK, routing.token_M, routing.offsets_E))


def check_rows(who: str, rows: int, capacity: int, num_experts: int, num_sent: int = 0) -> None:
    """Raises ValueError if a rank has more rows than the kernels' grids hold.

    Args:
        who: the rank, for the message.
        rows: routed pairs that the rank's ``num_experts`` experts serve; ``capacity`` with padding.
        num_sent: tokens that the rank dispatches.
    """
    if max(capacity, num_sent) > MAX_ROWS:
        raise ValueError(
            f"{who} has {rows} rows for its {num_experts} experts and dispatches {num_sent} tokens, but kernels "
            f"take at most {MAX_ROWS}, padding included; use fewer tokens per microbatch or more expert-parallel ranks"
        )
