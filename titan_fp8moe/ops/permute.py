"""Ops that route tokens and move rows: into the dispatch payload, into expert order, and back.

On one rank: ``expert_routing``, ``permute_rows``, the FFN, ``unpermute_sum``. With expert parallelism
``dispatch_routing`` and ``pack_dispatch`` come before the all-to-all; the receiver unpacks, does the same, and returns
``pack_combine``'s payload. The backward moves gradients along the same routing.
"""

import torch
from torch import Tensor

from titan_fp8moe import recipe
from titan_fp8moe.kernels import permute as kernels
from titan_fp8moe.kernels import routing
from titan_fp8moe.kernels.sizes import empty_rows
from titan_fp8moe.ops.backend import custom_op

# For whoever converts the arguments that an error names, until nothing is refused and all tokens go to expert 0.
SWAPPED = "topk_ids and topk_scores seem swapped: torch.topk returns (scores, ids), experts take (ids, scores)"


def _check_not_swapped(topk_ids_TK: Tensor, topk_scores_TK: Tensor, num_experts: int) -> None:
    """Raises ValueError for scores that are experts' numbers where all ids are 0, as converted scores are. One score
    for all is that of a router that has collapsed, or of a single token: normalized, and scaled by a whole number."""
    if not topk_scores_TK.numel() or num_experts == 1 or topk_ids_TK.any():
        return
    smallest, largest = topk_scores_TK.aminmax()
    if smallest < largest and 1 < largest < num_experts and torch.equal(topk_scores_TK, topk_scores_TK.round()):
        raise ValueError(f"{SWAPPED}; all ids are 0, and the scores are whole numbers up to {largest:g}")


def _check_ids(topk_ids_TK: Tensor, num_experts: int) -> None:
    wrong = topk_ids_TK[(topk_ids_TK < -1) | (topk_ids_TK >= num_experts)]
    if wrong.numel():
        raise ValueError(
            f"topk_ids has {wrong.unique()[:8].tolist()}, but the experts of all ranks are 0 to {num_experts - 1}, and "
            "-1 is none; correct the router"
        )


def _expert_routing(
    topk_ids_TK: Tensor, topk_scores_TK: Tensor, num_experts: int, capacity: int, check_ids: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """:func:`titan_fp8moe.recipe.expert_routing`. Rows of ids and scores may be strided (views of a payload).

    Args:
        check_ids: refuse ids that are neither -1 nor an expert's, which otherwise get no row. A GPU does not wait for
            the answer: a device-side assertion in the first kernel, as of an index in PyTorch.

    Raises:
        ValueError: from the kernels, unless ids and scores have unit stride along K; elsewhere from ``check_ids``.
    """
    if check_ids:
        _check_ids(topk_ids_TK, num_experts)
        _check_not_swapped(topk_ids_TK, topk_scores_TK, num_experts)
    return recipe.expert_routing(topk_ids_TK, topk_scores_TK, num_experts, capacity)


def _dispatch_routing(
    topk_ids_TK: Tensor, num_ranks: int, num_local: int, signature: int = 0, check_ids: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`titan_fp8moe.recipe.dispatch_routing`; entries of ``token_C`` from C on are undefined.

    Strides, ``check_ids`` and errors are those of :func:`expert_routing`. ``signature`` has 31 bits.
    """
    if check_ids:
        _check_ids(topk_ids_TK, num_ranks * num_local)
    return recipe.dispatch_routing(topk_ids_TK, num_ranks, num_local, signature)


def _permute_rows(
    q_TD: Tensor, scale: Tensor, row_TK: Tensor, token_M: Tensor, offsets_E: Tensor
) -> tuple[Tensor, Tensor]:
    """:func:`titan_fp8moe.recipe.permute_rows`; rows from ``offsets_E[-1]`` on are undefined.

    Args:
        q_TD, scale: rows may be strided (views of a payload), but have unit stride along themselves.
        row_TK, token_M: of :func:`expert_routing`, inverse to each other.
    """
    return recipe.permute_rows(q_TD, scale, token_M)


# --- fakes ------------------------------------------------------------------------------------------------------------


def _fake_expert_routing(topk_ids_TK, topk_scores_TK, num_experts, capacity, check_ids=False):
    score_M = topk_scores_TK.new_empty(capacity)
    return _ints(score_M, num_experts), _ints(score_M, capacity), score_M, _ints(score_M, *topk_ids_TK.shape)


def _fake_dispatch_routing(topk_ids_TK, num_ranks, num_local, signature=0, check_ids=False):
    T, K = topk_ids_TK.shape
    shapes = (T, K), (T * min(K, num_ranks),), (num_ranks, 3 + num_local)
    return tuple(_ints(topk_ids_TK, *shape) for shape in shapes)


def _ints(like: Tensor, *shape: int) -> Tensor:
    return like.new_empty(shape, dtype=torch.int32)


def _fake_permute(q_TD, scale, row_TK, token_M, offsets_E):
    return empty_rows(q_TD, token_M.shape[0], q_TD.shape[1])


def _fake_sum(y_MD, row_TK, out_dtype, addend_RD=None, b2=None, score_M=None, offsets_E=None):
    return y_MD.new_empty(row_TK.shape[0], y_MD.shape[1], dtype=out_dtype)


def _fake_gradients(dx_MD, ds, row_TK, out_dtype, addend_RD=None):
    return _fake_sum(dx_MD, row_TK, out_dtype), ds.new_empty(row_TK.shape)


def _fake_dispatch(q_TD, scale, token_C, sent_TK, topk_ids_TK, topk_scores_TK, num_local):
    width = recipe.dispatch_width(q_TD.shape[1], 0 if topk_ids_TK is None else sent_TK.shape[1])
    return q_TD.new_empty(token_C.shape[0], width, dtype=torch.uint8)


def _fake_combine(y_MD, ds_M, row_CK, b2=None, score_M=None, offsets_E=None):
    width = recipe.combine_width(y_MD.shape[1], 0 if ds_M is None else row_CK.shape[1])
    return y_MD.new_empty(row_CK.shape[0], width, dtype=torch.uint8)


# --- ops --------------------------------------------------------------------------------------------------------------

# Rows of y, dx and ds may be strided: views of a payload.
expert_routing = custom_op(_expert_routing, routing.expert_routing, _fake_expert_routing)
dispatch_routing = custom_op(_dispatch_routing, routing.dispatch_routing, _fake_dispatch_routing)
permute_rows = custom_op(_permute_rows, kernels.permute_rows, _fake_permute)
unpermute_sum = custom_op(recipe.unpermute_sum, kernels.unpermute_sum, _fake_sum)
unpermute_gradients = custom_op(recipe.unpermute_gradients, kernels.unpermute_gradients, _fake_gradients)
pack_dispatch = custom_op(recipe.pack_dispatch, kernels.pack_dispatch, _fake_dispatch)
pack_combine = custom_op(recipe.pack_combine, kernels.pack_combine, _fake_combine)
