"""How tokens travel to the ranks of their experts and back.

:class:`~titan_fp8moe.dispatch.base.Dispatch` is the interface. :mod:`~titan_fp8moe.dispatch.local` serves a process
that holds all experts, :mod:`~titan_fp8moe.dispatch.all_to_all` and :mod:`~titan_fp8moe.dispatch.symmetric.dispatch` a
group of ranks. :func:`begin` makes one for a forward, :func:`resume` for its backward.

A *route* is the choice among them as a string, which an op can take: of :func:`route`.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from titan_fp8moe.config import Fp8FlowMoEConfig
from titan_fp8moe.dispatch.all_to_all import AllToAllDispatch, finish_combine
from titan_fp8moe.dispatch.base import Dispatch, InFlight
from titan_fp8moe.dispatch.local import LocalDispatch
from titan_fp8moe.dispatch.symmetric.dispatch import SymmetricDispatch

__all__ = ["Dispatch", "InFlight", "begin", "evenly", "finish_combine", "kind", "resume", "route", "uses_symmetric"]

_SYMMETRIC = "symmetric"
_evenly = False


def uses_symmetric(config: Fp8FlowMoEConfig) -> bool:
    """Whether a group's ranks exchange tokens through symmetric memory. ``auto`` is the all-to-all until measurements
    on several GPUs say otherwise."""
    return config.dispatch == "symmetric"


def route(config: Fp8FlowMoEConfig, ep_group: dist.ProcessGroup | None) -> str:
    """The group's name; with symmetric memory ``symmetric:<capacity>:<name>``; empty where all experts are here."""
    if ep_group is None:
        return ""
    name = ep_group.group_name
    return f"{_SYMMETRIC}:{config.dispatch_capacity}:{name}" if uses_symmetric(config) else name


def kind(route: str) -> type[Dispatch]:
    """The implementation for a route."""
    if route.startswith(f"{_SYMMETRIC}:"):
        return SymmetricDispatch
    return AllToAllDispatch if route else LocalDispatch


@contextmanager
def evenly() -> Iterator[None]:
    """Forwards inside this context send their tokens to all experts alike, whatever the router chose: for tokens that
    are made up, all of which it may send to one rank."""
    global _evenly
    outer, _evenly = _evenly, True
    try:
        yield
    finally:
        _evenly = outer


def begin(
    topk_ids_TK: Tensor,
    topk_scores_TK: Tensor,
    num_local: int,
    route: str,
    num_ranks: int,
    signature: int,
    check_ids: bool,
) -> Dispatch:
    """Starts a forward's dispatch.

    Args:
        topk_ids_TK: (T, K) int32 or int64, the experts of each token; -1 for none.
        topk_scores_TK: (T, K) fp32.
        num_local: experts of this rank.
        route: of :func:`route`.
        num_ranks: ranks of the group.
        signature: 31 bits that differ between ranks if their settings do.
        check_ids: refuse ids that are neither -1 nor one of the experts of all ranks.
    """
    if _evenly:
        pairs = torch.arange(topk_ids_TK.numel(), device=topk_ids_TK.device).view(topk_ids_TK.shape)
        topk_ids_TK = torch.where(topk_ids_TK < 0, -1, pairs % (num_local * num_ranks)).to(topk_ids_TK.dtype)
    if not route:
        return LocalDispatch((topk_ids_TK, topk_scores_TK, num_local), check_ids)
    args = topk_ids_TK, topk_scores_TK, num_local
    if kind(route) is SymmetricDispatch:
        _, capacity, group_name = route.split(":", 2)
        return SymmetricDispatch.begin(*args, group_name, num_ranks, signature, check_ids, float(capacity))
    return AllToAllDispatch.begin(*args, route, num_ranks, signature, check_ids)


def resume(state: list[Tensor], route: str) -> Dispatch:
    """A backward's dispatch, from the forward's :meth:`Dispatch.state`."""
    if kind(route) is SymmetricDispatch:
        return SymmetricDispatch.resume(state, route.split(":", 2)[2])
    return AllToAllDispatch.resume(state, route) if route else LocalDispatch()
