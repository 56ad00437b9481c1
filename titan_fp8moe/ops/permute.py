"""Moving rows: into the dispatch payload, into expert order, and back."""

import torch
from torch import Tensor

from titan_fp8moe import recipe
from titan_fp8moe.kernels import permute as kernels
from titan_fp8moe.kernels import routing
from titan_fp8moe.ops.backend import custom_op, use_kernels
from titan_fp8moe.recipe import E8M0, FP8, TILE


def _ints(like: Tensor, *shape: int) -> Tensor:
    return like.new_empty(shape, dtype=torch.int32)


@custom_op
def expert_layout(
    expert_TK: Tensor, score_TK: Tensor, num_experts: int, capacity: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Index maps between tokens and rows in expert order, without asking the device for counts.

    Returns offsets_E (num_experts,), token_M (M,), score_M (M,), row_TK (T, K); see
    :func:`titan_fp8moe.recipe.expert_layout`. At and past ``offsets_E[-1]``, token_M is -1 and score_M 0.
    """
    impl = routing if use_kernels(expert_TK) else recipe
    return impl.expert_layout(expert_TK, score_TK, num_experts, capacity)


@expert_layout.register_fake
def _(expert_TK, score_TK, num_experts, capacity):
    maps = _ints(score_TK, num_experts), _ints(score_TK, capacity), score_TK.new_empty(capacity)
    return *maps, _ints(score_TK, *expert_TK.shape)


@custom_op
def dispatch_layout(expert_TK: Tensor, num_ranks: int, num_local: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What this rank sends to which, without asking the device for counts.

    Returns position_TK, copy_TK (T, K), token_C (T * min(K, num_ranks),), whose entries past the last copy are
    undefined, and message_N (num_ranks, 2 + num_local); see :func:`titan_fp8moe.recipe.dispatch_layout`.
    """
    impl = routing if use_kernels(expert_TK) else recipe
    return impl.dispatch_layout(expert_TK, num_ranks, num_local)


@dispatch_layout.register_fake
def _(expert_TK, num_ranks, num_local):
    (T, K), maps = expert_TK.shape, (_ints(expert_TK, *expert_TK.shape) for _ in range(2))
    return *maps, _ints(expert_TK, T * min(K, num_ranks)), _ints(expert_TK, num_ranks, 2 + num_local)


@custom_op
def arrival_layout(
    received_N: Tensor, position_CK: Tensor, score_CK: Tensor, num_rows: int, capacity: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """:func:`expert_layout` of arrived copies; position_CK and score_CK may be views of a payload.

    Returns offsets_E (E,), token_M (M,), score_M (M,), row_CK (C, top_k), row_R (num_rows,); see
    :func:`titan_fp8moe.recipe.arrival_layout`. At and past ``offsets_E[-1]``, token_M is -1 and score_M 0.
    """
    impl = routing if use_kernels(received_N) else recipe
    return impl.arrival_layout(received_N, position_CK, score_CK, num_rows, capacity)


@arrival_layout.register_fake
def _(received_N, position_CK, score_CK, num_rows, capacity):
    maps = _ints(received_N, received_N.shape[1] - 2), _ints(received_N, capacity), score_CK.new_empty(capacity)
    return *maps, _ints(received_N, *position_CK.shape), _ints(received_N, num_rows)


@custom_op
def permute_rows(
    q_TD: Tensor, scale: Tensor, row_TK: Tensor, token_M: Tensor, offsets_E: Tensor
) -> tuple[Tensor, Tensor]:
    """fp8 rows and their scales in expert order, padding zeroed; see :func:`titan_fp8moe.recipe.permute_rows`.

    Args:
        q_TD: (T, D) e4m3, rows may be strided (a view of a payload).
        scale: (T, D // 128) e8m0, likewise.
        row_TK: (T, K) and token_M: (M,) int32, inverse to each other, of :func:`expert_layout`.

    Returns:
        (M, D) e4m3, (M, D // 128) e8m0 column-major; rows at and past ``offsets_E[-1]`` undefined.
    """
    if use_kernels(q_TD):
        return kernels.permute_rows(q_TD, scale, row_TK, token_M, offsets_E)
    return recipe.permute_rows(q_TD, scale, token_M)


@permute_rows.register_fake
def _(q_TD, scale, row_TK, token_M, offsets_E):
    M, D = token_M.shape[0], q_TD.shape[1]
    return q_TD.new_empty(M, D), scale.new_empty(D // TILE, M).t()


@custom_op
def unpermute_sum(y_MD: Tensor, row_TK: Tensor, out_dtype: torch.dtype) -> Tensor:
    """(T, D) sums of each token's rows ``y_MD[row_TK[t, k]]``, fp32, in the order of k; negative rows add nothing.

    ``y_MD`` is bf16 (M, D); its rows may be strided (a view of a payload).
    """
    impl = kernels if use_kernels(y_MD) else recipe
    return impl.unpermute_sum(y_MD, row_TK, out_dtype)


@unpermute_sum.register_fake
def _(y_MD, row_TK, out_dtype):
    return y_MD.new_empty(row_TK.shape[0], y_MD.shape[1], dtype=out_dtype)


@custom_op
def unpermute_gradients(dx_MD: Tensor, ds: Tensor, row_TK: Tensor, out_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What a backward hands back: the sums of each token's rows, (T, D), and the slots' score gradients, (T, K) fp32.

    Args:
        dx_MD: (M, D) bf16, summed as by :func:`unpermute_sum`; rows may be strided, as those of ``ds`` (views of a
            payload).
        ds: (M, 1) fp32, a row's score gradient; or (M, K), one for each k.
        row_TK: (T, K) int32, each slot's row. -2 - m stands for row m as in
            :func:`titan_fp8moe.recipe.dispatch_layout`, which the sum has already and whose score gradient is the
            slot's; -1 for a slot that has none, whose gradient is zero.
    """
    if use_kernels(dx_MD):
        return kernels.unpermute_gradients(dx_MD, ds, row_TK, out_dtype)
    row = torch.where(row_TK < -1, -2 - row_TK, row_TK).long()
    column = torch.arange(row_TK.shape[1], device=ds.device) if ds.shape[1] > 1 else 0
    ds_TK = torch.cat([ds, ds.new_zeros(1, ds.shape[1])])[row, column]  # row -1: the zeros
    return recipe.unpermute_sum(dx_MD, row_TK, out_dtype), ds_TK


@unpermute_gradients.register_fake
def _(dx_MD, ds, row_TK, out_dtype):
    return dx_MD.new_empty(row_TK.shape[0], dx_MD.shape[1], dtype=out_dtype), ds.new_empty(row_TK.shape)


# A dispatch payload row is D value bytes; in a forward, top_k int32 positions and top_k fp32 scores; D // 128 scale
# bytes. A combine payload row is D bf16 values and, in a backward, fp32 score gradients. Both are padded to 16 bytes.


def _dispatch_width(D: int, top_k: int) -> int:
    return (D + 8 * top_k + D // TILE + 15) // 16 * 16


@custom_op
def pack_dispatch(
    q_TD: Tensor, scale: Tensor, token_C: Tensor, copy_TK: Tensor, position_TK: Tensor | None, score_TK: Tensor | None
) -> Tensor:
    """The dispatch payload: row c holds token ``token_C[c]`` and, in a forward, the positions and scores of its slots.

    Args:
        q_TD: (T, D) e4m3; scale: (T, D // 128) e8m0 row-major.
        token_C, copy_TK: of :func:`dispatch_layout`; token_C cut to the copies there are.
        position_TK: of the same; score_TK: (T, K) fp32. Both None in a backward.

    Returns:
        (C, width) uint8; see :func:`unpack_dispatch`.
    """
    C, D = token_C.shape[0], q_TD.shape[1]
    top_k = 0 if score_TK is None else copy_TK.shape[1]
    if use_kernels(q_TD):
        width = _dispatch_width(D, top_k)
        return kernels.pack_dispatch(q_TD, scale, token_C, copy_TK, position_TK, score_TK, width)
    payload = torch.zeros(C, _dispatch_width(D, top_k), dtype=torch.uint8, device=q_TD.device)
    q, payload_scale, position_CK, score_CK = unpack_dispatch(payload, D, top_k)
    token_C = token_C.long()
    q.view(torch.uint8).copy_(q_TD.view(torch.uint8)[token_C])
    payload_scale.view(torch.uint8).copy_(scale.view(torch.uint8)[token_C])
    if score_TK is not None:
        copies = torch.arange(C, device=token_C.device).unsqueeze(1)
        carrier_CK = copy_TK[token_C]
        served = (carrier_CK == copies) | (carrier_CK == -2 - copies)
        position_CK.copy_(position_TK[token_C].masked_fill(~served, -1))
        score_CK.copy_(score_TK[token_C].masked_fill(~served, 0))
    return payload


@pack_dispatch.register_fake
def _(q_TD, scale, token_C, copy_TK, position_TK, score_TK):
    width = _dispatch_width(q_TD.shape[1], 0 if score_TK is None else copy_TK.shape[1])
    return q_TD.new_empty(token_C.shape[0], width, dtype=torch.uint8)


def unpack_dispatch(payload: Tensor, D: int, top_k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Views of a dispatch payload (C, width) uint8: q (C, D) e4m3, scale (C, D // 128) e8m0, position (C, top_k) int32,
    score (C, top_k) fp32; with ``top_k`` 0 of a backward's."""
    values, position, score, scale, _ = payload.split(
        [D, 4 * top_k, 4 * top_k, D // TILE, payload.shape[1] - D - 8 * top_k - D // TILE], dim=1
    )
    return values.view(FP8), scale.view(E8M0), position.view(torch.int32), score.view(torch.float32)


@custom_op
def pack_combine(y_MD: Tensor, ds_M: Tensor | None, row_CK: Tensor) -> Tensor:
    """The combine payload: sums of the rows of each copy, fp32 in the order of k, rounded to bf16 once; with ``ds_M``
    (M,) fp32 also the score gradient of each of the rows.

    Args:
        y_MD: (M, D) bf16.
        row_CK: (C, K) int32, of :func:`arrival_layout`; -1 for a slot that is not served here.

    Returns:
        (C, width) uint8; see :func:`unpack_combine`.
    """
    D, (C, K) = y_MD.shape[1], row_CK.shape
    width = _combine_width(D, K, ds_M is not None)
    if use_kernels(y_MD):
        return kernels.pack_combine(y_MD, ds_M, row_CK, width)
    payload = torch.zeros(C, width, dtype=torch.uint8, device=y_MD.device)
    rows, ds_CK = unpack_combine(payload, D, K)
    rows.copy_(recipe.unpermute_sum(y_MD, row_CK, torch.bfloat16))
    if ds_M is not None:
        ds_CK.copy_(ds_M[row_CK.long().clamp(min=0)].masked_fill(row_CK < 0, 0))
    return payload


def _combine_width(D: int, K: int, with_ds: bool) -> int:
    return (2 * D + (4 * K if with_ds else 0) + 15) // 16 * 16


@pack_combine.register_fake
def _(y_MD, ds_M, row_CK):
    width = _combine_width(y_MD.shape[1], row_CK.shape[1], ds_M is not None)
    return y_MD.new_empty(row_CK.shape[0], width, dtype=torch.uint8)


def unpack_combine(payload: Tensor, D: int, K: int) -> tuple[Tensor, Tensor | None]:
    """Views of a combine payload: rows (C, D) bf16 and, where it holds them, score gradients (C, K) fp32."""
    rows = payload[:, : 2 * D].view(torch.bfloat16)
    if payload.shape[1] == 2 * D:
        return rows, None
    return rows, payload[:, 2 * D : 2 * D + 4 * K].view(torch.float32)
