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
from titan_fp8moe.ops.backend import custom_op, use_kernels
from titan_fp8moe.recipe import E8M0, FP8, TILE
from titan_fp8moe.rows import RowBias


def _ints(like: Tensor, *shape: int) -> Tensor:
    return like.new_empty(shape, dtype=torch.int32)


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


@custom_op
def expert_routing(
    topk_ids_TK: Tensor, topk_scores_TK: Tensor, num_experts: int, capacity: int, check_ids: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """:func:`titan_fp8moe.recipe.expert_routing`. Rows of ids and scores may be strided (views of a payload).

    Args:
        check_ids: refuse ids that are neither -1 nor an expert's, which otherwise get no row. A GPU does not wait for
            the answer: a device-side assertion in the first kernel, as of an index in PyTorch.

    Raises:
        ValueError: from the kernels, unless ids and scores have unit stride along K; elsewhere from ``check_ids``.
    """
    if use_kernels(topk_ids_TK):
        return routing.expert_routing(topk_ids_TK, topk_scores_TK, num_experts, capacity, check_ids)
    if check_ids:
        _check_ids(topk_ids_TK, num_experts)
        _check_not_swapped(topk_ids_TK, topk_scores_TK, num_experts)
    return recipe.expert_routing(topk_ids_TK, topk_scores_TK, num_experts, capacity)


@expert_routing.register_fake
def _(topk_ids_TK, topk_scores_TK, num_experts, capacity, check_ids=False):
    score_M = topk_scores_TK.new_empty(capacity)
    return _ints(score_M, num_experts), _ints(score_M, capacity), score_M, _ints(score_M, *topk_ids_TK.shape)


@custom_op
def dispatch_routing(
    topk_ids_TK: Tensor, num_ranks: int, num_local: int, signature: int = 0, check_ids: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`titan_fp8moe.recipe.dispatch_routing`; entries of ``token_C`` from C on are undefined.

    Strides, ``check_ids`` and errors are those of :func:`expert_routing`. ``signature`` has 31 bits.
    """
    if use_kernels(topk_ids_TK):
        return routing.dispatch_routing(topk_ids_TK, num_ranks, num_local, signature, check_ids)
    if check_ids:
        _check_ids(topk_ids_TK, num_ranks * num_local)
    return recipe.dispatch_routing(topk_ids_TK, num_ranks, num_local, signature)


@dispatch_routing.register_fake
def _(topk_ids_TK, num_ranks, num_local, signature=0, check_ids=False):
    T, K = topk_ids_TK.shape
    shapes = (T, K), (T * min(K, num_ranks),), (num_ranks, 3 + num_local)
    return tuple(_ints(topk_ids_TK, *shape) for shape in shapes)


@custom_op
def permute_rows(
    q_TD: Tensor, scale: Tensor, row_TK: Tensor, token_M: Tensor, offsets_E: Tensor
) -> tuple[Tensor, Tensor]:
    """:func:`titan_fp8moe.recipe.permute_rows`; rows from ``offsets_E[-1]`` on are undefined.

    Args:
        q_TD, scale: rows may be strided (views of a payload).
        row_TK, token_M: of :func:`expert_routing`, inverse to each other.

    Raises:
        ValueError: for another number of tokens in q than in ``row_TK``; from the kernels, unless q and scale have unit
            stride along their rows.
    """
    if q_TD.shape[0] != row_TK.shape[0]:  # the kernel would read past the end of row_TK, and write wherever that says
        raise ValueError(f"q has {q_TD.shape[0]} tokens and row_TK {row_TK.shape[0]}; they must have the same")
    if use_kernels(q_TD):
        return kernels.permute_rows(q_TD, scale, row_TK, token_M, offsets_E)
    return recipe.permute_rows(q_TD, scale, token_M)


@permute_rows.register_fake
def _(q_TD, scale, row_TK, token_M, offsets_E):
    M, D = token_M.shape[0], q_TD.shape[1]
    return q_TD.new_empty(M, D), scale.new_empty(D // TILE, M).t()


def bias_rows(bias: RowBias | None, M: int) -> Tensor | None:
    """:func:`titan_fp8moe.recipe.output_bias`, or None."""
    return None if bias is None else recipe.output_bias(*bias, M)


def row_bias(b2: Tensor | None, score_M: Tensor | None, offsets_E: Tensor | None) -> RowBias | None:
    """The arguments of an op as one."""
    return None if b2 is None or offsets_E is None else RowBias(b2.contiguous(), score_M, offsets_E)


@custom_op
def unpermute_sum(
    y_MD: Tensor,
    row_TK: Tensor,
    out_dtype: torch.dtype,
    addend_RD: Tensor | None = None,
    b2: Tensor | None = None,
    score_M: Tensor | None = None,
    offsets_E: Tensor | None = None,
) -> Tensor:
    """:func:`titan_fp8moe.recipe.unpermute_sum` of ``y_MD`` bf16, whose rows may be strided (a view of a payload).

    Args:
        addend_RD: bf16.
        b2, score_M, offsets_E: a bias of each expert's rows, the fields of :class:`titan_fp8moe.rows.RowBias`.
    """
    bias = row_bias(b2, score_M, offsets_E)
    if use_kernels(y_MD):
        return kernels.unpermute_sum(y_MD, row_TK, out_dtype, addend_RD, bias)
    return recipe.unpermute_sum(y_MD, row_TK, out_dtype, addend_RD, bias_rows(bias, y_MD.shape[0]))


@unpermute_sum.register_fake
def _(y_MD, row_TK, out_dtype, addend_RD=None, b2=None, score_M=None, offsets_E=None):
    return y_MD.new_empty(row_TK.shape[0], y_MD.shape[1], dtype=out_dtype)


@custom_op
def unpermute_gradients(
    dx_MD: Tensor, ds: Tensor, row_TK: Tensor, out_dtype: torch.dtype, addend_RD: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """:func:`unpermute_sum` of a backward, and the score gradients of the routed pairs.

    Args:
        dx_MD: (M, D) bf16 and ds: fp32, (M, 1) with the score gradient of each row or (M, K) with one for each k. Rows
            may be strided (views of a payload).
        row_TK: (T, K) int32: ``row_TK`` of :func:`expert_routing` with (M, 1), ``sent_TK`` of :func:`dispatch_routing`
            with (M, K). In the latter -2 - c stands for row c, whose score gradient counts although the sum has the
            row already. The score gradient at -1 is zero.
        addend_RD: as in :func:`unpermute_sum`.

    Returns:
        (T, D) out_dtype, (T, K) fp32.
    """
    if use_kernels(dx_MD):
        return kernels.unpermute_gradients(dx_MD, ds, row_TK, out_dtype, addend_RD)
    row = torch.where(row_TK < -1, -2 - row_TK, row_TK).long()
    column = torch.arange(row_TK.shape[1], device=ds.device) if ds.shape[1] > 1 else 0
    ds_TK = torch.cat([ds, ds.new_zeros(1, ds.shape[1])])[row, column]  # row -1: the zeros
    return recipe.unpermute_sum(dx_MD, row_TK, out_dtype, addend_RD), ds_TK


@unpermute_gradients.register_fake
def _(dx_MD, ds, row_TK, out_dtype, addend_RD=None):
    return dx_MD.new_empty(row_TK.shape[0], dx_MD.shape[1], dtype=out_dtype), ds.new_empty(row_TK.shape)


# A row of a dispatch payload: D value bytes; in a forward, K int32 local ids and K fp32 scores; D // 128 scale bytes. D
# is padded to a multiple of 128.
# A row of a combine payload: D bf16 values; in a backward, K fp32 score gradients.
# Both rows are padded to 16 bytes.


def _dispatch_width(D: int, top_k: int) -> int:
    return (D + 8 * top_k + D // TILE + 15) // 16 * 16


@custom_op
def pack_dispatch(
    q_TD: Tensor,
    scale: Tensor,
    token_C: Tensor,
    sent_TK: Tensor,
    topk_ids_TK: Tensor | None,
    topk_scores_TK: Tensor | None,
    num_local: int,
) -> Tensor:
    """Packs the dispatched tokens: values and scales; in a forward also each pair's local expert id and score.

    A pair that the destination does not serve gets the id -1 and the score 0.

    Args:
        q_TD: (T, D) e4m3; scale: (T, D // 128) e8m0 row-major.
        token_C, sent_TK: of :func:`dispatch_routing`; token_C cut to the C dispatched tokens, all that sent_TK names.
        topk_ids_TK, topk_scores_TK: as in :func:`expert_routing`, with ids of all ranks' experts; None in a backward.
        num_local: experts on each rank.

    Returns:
        (C, width) uint8; see :func:`unpack_dispatch`.
    """
    C, D = token_C.shape[0], q_TD.shape[1]
    top_k = 0 if topk_ids_TK is None else sent_TK.shape[1]
    width = _dispatch_width(D, top_k)
    if use_kernels(q_TD):
        return kernels.pack_dispatch(q_TD, scale, token_C, sent_TK, topk_ids_TK, topk_scores_TK, num_local, width)
    payload = torch.zeros(C, width, dtype=torch.uint8, device=q_TD.device)
    q, payload_scale, ids_CK, scores_CK = unpack_dispatch(payload, D, top_k)
    token_C = token_C.long()
    q.view(torch.uint8).copy_(q_TD.view(torch.uint8)[token_C])
    payload_scale.view(torch.uint8).copy_(scale.view(torch.uint8)[token_C])
    if topk_ids_TK is not None:
        assert topk_scores_TK is not None
        c, sent_CK = torch.arange(C, device=token_C.device).unsqueeze(1), sent_TK[token_C]
        served = (sent_CK == c) | (sent_CK == -2 - c)
        ids_CK.copy_((topk_ids_TK[token_C] % num_local).masked_fill(~served, -1))
        scores_CK.copy_(topk_scores_TK[token_C].masked_fill(~served, 0))
    return payload


@pack_dispatch.register_fake
def _(q_TD, scale, token_C, sent_TK, topk_ids_TK, topk_scores_TK, num_local):
    width = _dispatch_width(q_TD.shape[1], 0 if topk_ids_TK is None else sent_TK.shape[1])
    return q_TD.new_empty(token_C.shape[0], width, dtype=torch.uint8)


def unpack_dispatch(payload: Tensor, D: int, top_k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Views of a dispatch payload (C, width) uint8; D is padded here, ``top_k`` is 0 in a backward.

    Returns:
        q (C, D) e4m3, scale (C, D // 128) e8m0, topk_ids_CK (C, top_k) int32, topk_scores_CK (C, top_k) fp32.
    """
    D = recipe.padded(D)
    values, ids, scores, scale, _ = payload.split(
        [D, 4 * top_k, 4 * top_k, D // TILE, payload.shape[1] - D - 8 * top_k - D // TILE], dim=1
    )
    return values.view(FP8), scale.view(E8M0), ids.view(torch.int32), scores.view(torch.float32)


@custom_op
def pack_combine(
    y_MD: Tensor,
    ds_M: Tensor | None,
    row_CK: Tensor,
    b2: Tensor | None = None,
    score_M: Tensor | None = None,
    offsets_E: Tensor | None = None,
) -> Tensor:
    """Packs what goes back for each dispatched token: its rows' sum, fp32 in the order of k, rounded to bf16 once.

    With ``ds_M`` also the score gradient of each of its pairs, 0 for a pair that this rank does not serve.

    Args:
        y_MD: (M, D) bf16; ds_M: (M,) fp32, None in a forward.
        row_CK: (C, K) int32, ``row_TK`` of :func:`expert_routing`.
        b2, score_M, offsets_E: as in :func:`unpermute_sum`.

    Returns:
        (C, width) uint8; see :func:`unpack_combine`.
    """
    D, (C, K) = y_MD.shape[1], row_CK.shape
    width = _combine_width(D, K, ds_M is not None)
    bias = row_bias(b2, score_M, offsets_E)
    if use_kernels(y_MD):
        return kernels.pack_combine(y_MD, ds_M, row_CK, width, bias)
    payload = torch.zeros(C, width, dtype=torch.uint8, device=y_MD.device)
    rows, ds_CK = unpack_combine(payload, D, K)
    rows.copy_(recipe.unpermute_sum(y_MD, row_CK, torch.bfloat16, None, bias_rows(bias, y_MD.shape[0])))
    if ds_M is not None:
        assert ds_CK is not None
        ds_CK.copy_(ds_M[row_CK.long().clamp(min=0)].masked_fill(row_CK < 0, 0))
    return payload


def _combine_width(D: int, K: int, with_ds: bool) -> int:
    return (2 * D + (4 * K if with_ds else 0) + 15) // 16 * 16


@pack_combine.register_fake
def _(y_MD, ds_M, row_CK, b2=None, score_M=None, offsets_E=None):
    width = _combine_width(y_MD.shape[1], row_CK.shape[1], ds_M is not None)
    return y_MD.new_empty(row_CK.shape[0], width, dtype=torch.uint8)


def unpack_combine(payload: Tensor, D: int, K: int) -> tuple[Tensor, Tensor | None]:
    """Views of a combine payload: rows (C, D) bf16, and in a backward score gradients (C, K) fp32, else None."""
    rows = payload[:, : 2 * D].view(torch.bfloat16)
    if payload.shape[1] == 2 * D:
        return rows, None
    return rows, payload[:, 2 * D : 2 * D + 4 * K].view(torch.float32)
