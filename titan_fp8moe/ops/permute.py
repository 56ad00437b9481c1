"""Moving rows: into the dispatch payload, into expert order, and back."""

import torch
from torch import Tensor

from titan_fp8moe import recipe
from titan_fp8moe.kernels import permute as kernels
from titan_fp8moe.ops.backend import use_kernels
from titan_fp8moe.recipe import E8M0, FP8, TILE


@torch.library.custom_op("titan_fp8moe::expert_layout", mutates_args=())
def expert_layout(
    counts_SE: Tensor, score_R: Tensor, slot_R: Tensor | None, num_slots: int, top_k: int, capacity: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Index maps between arrival and expert order, without asking the device for counts.

    Returns offsets_E (E,), token_M (M,), score_M (M,), row_S (num_slots,); see
    :func:`titan_fp8moe.recipe.expert_layout`. At and past ``offsets_E[-1]``, token_M is -1 and score_M 0.
    """
    impl = kernels if use_kernels(score_R) else recipe
    return impl.expert_layout(counts_SE, score_R, slot_R, num_slots, top_k, capacity)


@expert_layout.register_fake
def _(counts_SE, score_R, slot_R, num_slots, top_k, capacity):
    def ints(n):
        return counts_SE.new_empty(n, dtype=torch.int32)

    return ints(counts_SE.shape[1]), ints(capacity), score_R.new_empty(capacity), ints(num_slots)


@torch.library.custom_op("titan_fp8moe::permute_rows", mutates_args=())
def permute_rows(q_TD: Tensor, scale: Tensor, token_M: Tensor, offsets_E: Tensor) -> tuple[Tensor, Tensor]:
    """fp8 rows and their scales in expert order, padding zeroed; see :func:`titan_fp8moe.recipe.permute_rows`.

    Args:
        q_TD: (T, D) e4m3, rows may be strided (a view of a payload).
        scale: (T, D // 128) e8m0, likewise.

    Returns:
        (M, D) e4m3, (M, D // 128) e8m0 column-major; rows at and past ``offsets_E[-1]`` undefined.
    """
    if use_kernels(q_TD):
        return kernels.permute_rows(q_TD, scale, token_M, offsets_E)
    return recipe.permute_rows(q_TD, scale, token_M)


@permute_rows.register_fake
def _(q_TD, scale, token_M, offsets_E):
    M, D = token_M.shape[0], q_TD.shape[1]
    return q_TD.new_empty(M, D), scale.new_empty(D // TILE, M).t()


@torch.library.custom_op("titan_fp8moe::unpermute_sum", mutates_args=())
def unpermute_sum(y_MD: Tensor, row_TK: Tensor, out_dtype: torch.dtype) -> Tensor:
    """(T, D) sums of each token's rows ``y_MD[row_TK[t, k]]``, fp32, in the order of k; -1 adds nothing.

    ``y_MD`` is bf16 (M, D); its rows may be strided (a view of a payload).
    """
    impl = kernels if use_kernels(y_MD) else recipe
    return impl.unpermute_sum(y_MD, row_TK, out_dtype)


@unpermute_sum.register_fake
def _(y_MD, row_TK, out_dtype):
    return y_MD.new_empty(row_TK.shape[0], y_MD.shape[1], dtype=out_dtype)


# A dispatch payload row is D value bytes, 4 bytes fp32 score, D // 128 scale bytes, padded to 16 bytes.
# A combine payload row is D bf16 values, with a gradient followed by the fp32 score gradient and padding to 16 bytes.


def payload_width(D: int) -> int:
    """Bytes of one row of a dispatch payload."""
    return (D + 4 + D // TILE + 15) // 16 * 16


def unpack_dispatch(payload: Tensor, D: int) -> tuple[Tensor, Tensor, Tensor]:
    """Views of a dispatch payload (R, payload_width(D)) uint8: q (R, D), scale (R, D // 128), score (R,) fp32."""
    scale = payload[:, D + 4 : D + 4 + D // TILE]
    return payload[:, :D].view(FP8), scale.view(E8M0), payload[:, D : D + 4].view(torch.float32).squeeze(1)


@torch.library.custom_op("titan_fp8moe::pack_dispatch", mutates_args=())
def pack_dispatch(q_TD: Tensor, scale: Tensor, score_R: Tensor | None, slot_R: Tensor, top_k: int) -> Tensor:
    """The dispatch payload: row r holds token ``slot_R[r] // top_k`` and, in a forward, ``score_R[r]``.

    Args:
        q_TD: (T, D) e4m3; scale: (T, D // 128) e8m0 row-major.
        slot_R: (R,) int32 slots in send order.

    Returns:
        (R, payload_width(D)) uint8; see :func:`unpack_dispatch`.
    """
    if use_kernels(q_TD):
        return kernels.pack_dispatch(q_TD, scale, score_R, slot_R, top_k, payload_width(q_TD.shape[1]))
    D, R = q_TD.shape[1], slot_R.shape[0]
    payload = torch.zeros(R, payload_width(D), dtype=torch.uint8, device=q_TD.device)
    token_R = slot_R.long() // top_k
    payload[:, :D] = q_TD.view(torch.uint8)[token_R]
    if score_R is not None:
        payload[:, D : D + 4] = score_R.unsqueeze(1).view(torch.uint8)
    payload[:, D + 4 : D + 4 + D // TILE] = scale.view(torch.uint8)[token_R]
    return payload


@pack_dispatch.register_fake
def _(q_TD, scale, score_R, slot_R, top_k):
    return q_TD.new_empty(slot_R.shape[0], payload_width(q_TD.shape[1]), dtype=torch.uint8)


def unpack_combine(payload: Tensor, D: int) -> tuple[Tensor, Tensor | None]:
    """Views of a combine payload: rows (R, D) bf16 and, where it holds them, score gradients (R,) fp32."""
    rows = payload[:, : 2 * D].view(torch.bfloat16)
    if payload.shape[1] == 2 * D:
        return rows, None
    return rows, payload[:, 2 * D : 2 * D + 4].view(torch.float32).squeeze(1)


@torch.library.custom_op("titan_fp8moe::pack_combine", mutates_args=())
def pack_combine(y_MD: Tensor, ds_M: Tensor | None, row_R: Tensor) -> Tensor:
    """The combine payload: rows of ``y_MD`` (M, D) bf16 in the order they arrived, ``y_MD[row_R]``.

    Returns:
        (R, 2 * D) uint8, or (R, 2 * D + 16) with ``ds_M`` (M,) fp32; see :func:`unpack_combine`.
    """
    if use_kernels(y_MD):
        return kernels.pack_combine(y_MD, ds_M, row_R)
    rows = y_MD[row_R.long()].view(torch.uint8)
    if ds_M is None:
        return rows
    ds = ds_M[row_R.long()].unsqueeze(1).view(torch.uint8)
    return torch.cat([rows, ds, ds.new_zeros(ds.shape[0], 12)], 1)


@pack_combine.register_fake
def _(y_MD, ds_M, row_R):
    width = 2 * y_MD.shape[1] + (0 if ds_M is None else 16)
    return y_MD.new_empty(row_R.shape[0], width, dtype=torch.uint8)
