"""How tokens travel to the ranks of their experts and back.

:class:`~titan_fp8moe.dispatch.base.Dispatch` is the interface. :mod:`~titan_fp8moe.dispatch.local` serves a process
that holds all experts, :mod:`~titan_fp8moe.dispatch.all_to_all` a group of ranks. :func:`begin` picks one for a
forward, :func:`resume` for its backward.
"""

from torch import Tensor

from titan_fp8moe.dispatch.all_to_all import AllToAllDispatch, finish_combine
from titan_fp8moe.dispatch.base import Dispatch, InFlight
from titan_fp8moe.dispatch.local import LocalDispatch

__all__ = ["Dispatch", "InFlight", "begin", "finish_combine", "kind", "resume"]


def kind(group_name: str) -> type[Dispatch]:
    """The implementation for an expert-parallel group; an empty name means that all experts are here."""
    return AllToAllDispatch if group_name else LocalDispatch


def begin(
    topk_ids_TK: Tensor,
    topk_scores_TK: Tensor,
    num_local: int,
    group_name: str,
    num_ranks: int,
    signature: int,
    check_ids: bool,
) -> Dispatch:
    """Starts a forward's dispatch.

    Args:
        topk_ids_TK: (T, K) int32 or int64, the experts of each token; -1 for none.
        topk_scores_TK: (T, K) fp32.
        num_local: experts of this rank.
        group_name: of the expert-parallel process group, empty where all experts are here.
        num_ranks: ranks of that group.
        signature: 31 bits that differ between ranks if their settings do.
        check_ids: refuse ids that are neither -1 nor one of the experts of all ranks.
    """
    if group_name:
        return AllToAllDispatch.begin(
            topk_ids_TK, topk_scores_TK, num_local, group_name, num_ranks, signature, check_ids
        )
    return LocalDispatch((topk_ids_TK, topk_scores_TK, num_local), check_ids)


def resume(state: list[Tensor], group_name: str) -> Dispatch:
    """A backward's dispatch, from the forward's :meth:`Dispatch.state`."""
    return AllToAllDispatch.resume(state, group_name) if group_name else LocalDispatch()
