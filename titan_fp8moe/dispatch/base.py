"""The interface of a dispatch, and what its implementations share.

A forward calls ``dispatch`` and ``start_combine``; a backward ``receive_gradients``, ``start_return`` and
``finish_return``. Between a start and its finish the layer computes what does not depend on the rows. An asynchronous
dispatch also has ``send_gradients``, with which the backward begins, and :func:`finish_combine`, with which the forward
ends: they run in autograd nodes of their own, so that work of the caller overlaps with the transfers.
"""

from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from titan_fp8moe.kernels.sizes import MAX_ROWS
from titan_fp8moe.rows import Routing, Rows


class Arrived(NamedTuple):
    """Tokens at the rank of their experts.

    Attributes:
        rows: one quantized row per token, not yet in expert order; with :attr:`Dispatch.permutes` in expert order.
        routing: of the local experts.
        kept: the tensors of one row per token, named by :attr:`Dispatch.ROWS`.
    """

    rows: Rows
    routing: Routing
    kept: list[Tensor]


class Dispatch(Protocol):
    """Movement of one layer's tokens, in its forward or in its backward.

    Attributes:
        STATE: names of the tensors of :meth:`state`, from which a backward's dispatch is made.
        ROWS: names of the tensors of :attr:`Arrived.kept`.
        asynchronous: whether :meth:`start_combine` returns a payload in flight instead of the output.
        permutes: whether rows arrive in expert order, in :meth:`dispatch` and :meth:`receive_gradients`.
        local: whether the tokens that arrive are this rank's, which shared experts can read too.
        gradients_needed: of a dispatch between ranks, whether any rank needs gradients of its input or scores. Else no
            rank calls :meth:`start_return`.
    """

    STATE: ClassVar[tuple[str, ...]]
    ROWS: ClassVar[tuple[str, ...]]
    asynchronous: ClassVar[bool]
    permutes: ClassVar[bool]
    local: ClassVar[bool]
    gradients_needed: bool

    def dispatch(self, q: Tensor, scale: Tensor) -> Arrived:
        """Brings quantized tokens, (T, D) e4m3 and (T, D // 128) e8m0, to the ranks of their experts."""
        ...

    def state(self) -> list[Tensor]:
        """After :meth:`dispatch`: what a backward needs of it."""
        ...

    def before_combine(self, y_MD: Tensor, routing: Routing) -> None:
        """Of a dispatch that is not asynchronous: what can begin before the shared experts' output is known, which
        :meth:`start_combine` adds."""
        ...

    def start_combine(self, y_MD: Tensor, routing: Routing, dtype: torch.dtype, addend_RD: Tensor | None) -> Tensor:
        """Sums rows (M, D) bf16 over each token's local experts. Returns the output (T, D), with ``addend_RD`` added,
        or a payload in flight; its ``addend_RD`` is an argument of :func:`finish_combine`."""
        ...

    @staticmethod
    def arrived_rows(kept: list[Tensor], D: int, top_k: int) -> Rows:
        """One row per token that arrived in the forward, from :attr:`Arrived.kept`."""
        ...

    def receive_gradients(self, dout: Rows | None, in_flight: "InFlight | None", routing: Routing, D: int) -> Rows:
        """The quantized gradient of the output, in the form of the forward's :attr:`Arrived.rows`. ``dout`` is that of
        this rank's tokens, or None where it is in flight."""
        ...

    def start_return(
        self, dx_MD: Tensor | None, ds_M: Tensor, routing: Routing, dtype: torch.dtype, addend_RD: Tensor | None
    ) -> Any:
        """Starts to return the rows' gradients: of the input, (M, D) bf16, and of the scores, (M,) fp32. The first is
        None where nobody needs it, which a dispatch between ranks does not allow."""
        ...

    def finish_return(
        self, pending: Any, D: int, dtype: torch.dtype, addend_RD: Tensor | None
    ) -> tuple[Tensor | None, Tensor]:
        """The tokens' gradients, (T, D) in ``dtype`` or None as the rows', and the scores', (T, K) fp32. ``addend_RD``
        is added to the tokens' gradients here, unless :meth:`start_return` has done so."""
        ...


class InFlight:
    """Carries what the autograd node that begins the backward has for the node that ends it: the payload in flight, and
    the shared experts' input gradient if that node needs it (``needs_dx``).

    The payload is no gradient: autograd would check its shape and cast it. The input gradient joins a sum.
    """

    stream: "torch.cuda.Stream | None"
    needs_dx: bool = True
    payload: Tensor | None = None
    shared_dx_RD: Tensor | None = None

    def __init__(self, device: torch.device):
        self.stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    def check_stream(self) -> None:
        """Raises RuntimeError where another stream is current than when the layer began. Autograd knows nothing of the
        payloads, and so would not let one stream wait for the other, in either direction."""
        if self.stream is not None and self.stream != torch.cuda.current_stream(self.stream.device):
            raise RuntimeError(
                "the CUDA stream has changed while tokens travelled; let meanwhile() restore the current stream "
                "(with torch.cuda.stream(...)) before it returns"
            )

    def take(self) -> Tensor:
        payload, self.payload = self.payload, None
        if payload is None:
            raise RuntimeError("the experts' backward ran without the dispatch of its gradients; was it run twice?")
        return payload


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
