"""How tokens travel to the ranks of their experts and back; :mod:`~titan_fp8moe.dispatch.base` has the interface.

:mod:`~titan_fp8moe.dispatch.local` serves a process that holds all experts, the others a group of ranks. :func:`begin`
makes a forward's dispatch. ``BACKENDS[route.backend].resume`` continues it in the backward.
:mod:`~titan_fp8moe.dispatch.auto` chooses between steps where the setting is ``auto``.
"""

from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch

from titan_fp8moe.dispatch import auto
from titan_fp8moe.dispatch.all_to_all import AllToAllDispatch
from titan_fp8moe.dispatch.base import Dispatch, Pairs, Route
from titan_fp8moe.dispatch.local import LocalDispatch
from titan_fp8moe.dispatch.symmetric.dispatch import SymmetricDispatch

__all__ = ["BACKENDS", "Dispatch", "Pairs", "Route", "auto", "begin", "evenly"]

BACKENDS: dict[str, type[Dispatch]] = {
    "local": LocalDispatch,
    "all_to_all": AllToAllDispatch,
    "symmetric": SymmetricDispatch,
}
"""By name. All but ``local`` serve a group of ranks; the setting ``dispatch`` has their names."""

_evenly = False


def evenly() -> AbstractContextManager[Any]:
    """Spreads the tokens of forwards inside this context over all experts alike, whatever the router chose. A router
    may send random tokens, as of a profile, all to one rank."""
    return mock.patch(f"{__name__}._evenly", True)


def begin(pairs: Pairs, route: Route, signature: int, check_ids: bool) -> Dispatch:
    """Starts a forward's dispatch; see :meth:`titan_fp8moe.dispatch.base.Dispatch.begin`."""
    if _evenly:
        ids_TK, num_experts = pairs.topk_ids_TK, pairs.num_local * route.num_ranks
        number_TK = torch.arange(ids_TK.numel(), device=ids_TK.device).view(ids_TK.shape)
        ids_TK = torch.where(ids_TK < 0, -1, number_TK % num_experts).to(ids_TK.dtype)
        pairs = pairs._replace(topk_ids_TK=ids_TK)
    return BACKENDS[route.backend].begin(pairs, route, signature, check_ids)
