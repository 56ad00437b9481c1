"""Ops that route tokens and move rows: into the dispatch payload, into expert order, and back.

On one rank: ``expert_routing``, ``permute_rows``, the FFN, ``unpermute_sum``. With expert parallelism
``dispatch_routing`` and ``pack_dispatch`` come before the all-to-all; the receiver unpacks, does the same, and returns
``pack_combine``'s payload. The backward moves gradients along the same routing.
"""

from torch import Tensor

from titan_fp8moe import recipe
from titan_fp8moe.kernels import permute as kernels
from titan_fp8moe.kernels import routing
from titan_fp8moe.ops.backend import with_kernel


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


# --- with their kernels -----------------------------------------------------------------------------------------------

# Rows of y, dx and ds may be strided: views of a payload.
expert_routing = with_kernel(_expert_routing, routing.expert_routing)
dispatch_routing = with_kernel(_dispatch_routing, routing.dispatch_routing)
permute_rows = with_kernel(_permute_rows, kernels.permute_rows)
unpermute_sum = with_kernel(recipe.unpermute_sum, kernels.unpermute_sum)
unpermute_gradients = with_kernel(recipe.unpermute_gradients, kernels.unpermute_gradients)
pack_dispatch = with_kernel(recipe.pack_dispatch, kernels.pack_dispatch)
pack_combine = with_kernel(recipe.pack_combine, kernels.pack_combine)
