"""Row movement: into dispatch payloads, into expert order, and back. Bytes are copied; only combining adds.

:mod:`titan_fp8moe.kernels.routing` computes the row maps. Grids follow from shapes, and CTAs past ``offsets_E[-1]``
return. No kernel is specialized on the number of tokens, since it changes from step to step.
"""

import torch
import triton
import triton.language as tl

from titan_fp8moe.kernels.launch import Kernel
from titan_fp8moe.kernels.routing import expert_of, row_stride
from titan_fp8moe.kernels.sizes import cdiv, empty_rows, next_power_of_2
from titan_fp8moe.recipe import ROW_ALIGN, SCALE_TILE, combine_width, dispatch_width

TOKENS, COLUMNS = 16, 256  # tokens, and bytes of each, that a CTA reads once and keeps in registers
WARPS = 8
PACK_ROWS = 32  # rows of a dispatch payload whose tails a CTA writes
SUM_COLUMNS = 1024  # columns of a token that a CTA sums
SUM_WARPS = 4


# --- to expert order --------------------------------------------------------------------------------------------------


@triton.jit
def _place_scales(scale, scale_stride, row, token, out, out_scale, M, D: tl.constexpr, ROWS: tl.constexpr,
                  COLUMNS: tl.constexpr, PAD_TILES: tl.constexpr):  # fmt: skip
    """Writes the scales of these rows, (D // 128, M) bytes; a padding row gets zeros, and scales of byte 1."""
    tile = tl.arange(0, PAD_TILES)[None, :]
    in_row = tile < D // 128
    real = (token >= 0)[:, None]
    byte = tl.load(scale + token[:, None] * scale_stride + tile, mask=real & in_row, other=1)
    tl.store(out_scale + tile * M + row[:, None], byte, mask=in_row)
    if tl.min(token, axis=0) < 0:
        zero = tl.zeros((ROWS, COLUMNS), tl.uint8)
        for first in range(0, D, COLUMNS):
            column = (first + tl.arange(0, COLUMNS))[None, :]
            tl.store(out + row.to(tl.int64)[:, None] * D + column, zero, mask=(token < 0)[:, None] & (column < D))


@triton.jit
def _place_values(cta, q, q_stride, row_TK, out, T, K: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
                  TOKENS: tl.constexpr, COLUMNS: tl.constexpr):  # fmt: skip
    """Copies COLUMNS bytes of TOKENS tokens to each token's rows of ``out``, which lie WIDTH bytes apart."""
    blocks: tl.constexpr = (D + COLUMNS - 1) // COLUMNS
    token = cta // blocks * TOKENS + tl.arange(0, TOKENS)
    column = cta % blocks * COLUMNS + tl.arange(0, COLUMNS)
    mask = (token < T)[:, None] & (column < D)[None, :]
    at = token.to(tl.int64)[:, None] * q_stride + column[None, :]
    # No other CTA reads these bytes, so L2 may drop them first.
    values = tl.load(q + at, mask=mask, other=0, eviction_policy="evict_first")
    for k in tl.static_range(K):
        # Negative for a pair without a row, and in sent_TK for further pairs on a rank, which gets the token once.
        row = tl.load(row_TK + token * K + k, mask=token < T, other=-1).to(tl.int64)
        tl.store(out + row[:, None] * WIDTH + column[None, :], values, mask=(row >= 0)[:, None] & (column < D)[None, :])


@Kernel
@triton.jit(do_not_specialize=["T"])
def _permute_kernel(
    q, q_stride, scale, scale_stride, row_TK, token_M, offsets_E, out, out_scale, T, M, K: tl.constexpr,
    D: tl.constexpr, E: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    PAD_TILES: tl.constexpr,
):  # fmt: skip
    """The first M / ROWS CTAs write scales and padding; each other CTA writes COLUMNS bytes of TOKENS tokens.

    So each token is read once, and the writes, nearly all of the traffic, are contiguous.
    """
    q, out = q.to(tl.pointer_type(tl.uint8)), out.to(tl.pointer_type(tl.uint8))
    cta = tl.program_id(0)
    if cta < M // ROWS:
        row = cta * ROWS + tl.arange(0, ROWS)
        if cta * ROWS < tl.load(offsets_E + E - 1):
            token = tl.load(token_M + row).to(tl.int64)
            _place_scales(scale, scale_stride, row, token, out, out_scale, M, D, ROWS, COLUMNS, PAD_TILES)
    else:
        _place_values(cta - M // ROWS, q, q_stride, row_TK, out, T, K, D, D, TOKENS, COLUMNS)


def permute_rows(q_TD, scale, row_TK, token_M, offsets_E):
    """Kernel of :func:`titan_fp8moe.ops.permute_rows`; rows from ``offsets_E[-1]`` on stay unwritten."""
    D, (T, K), M = q_TD.shape[1], row_TK.shape, token_M.shape[0]  # q may have more rows
    (q_stride, q_unit), (scale_stride, scale_unit) = q_TD.stride(), scale.stride()
    assert q_unit == 1 and (scale_unit == 1 or scale.shape[1] == 1)
    out, out_scale = empty_rows(q_TD, M, D)
    _permute_kernel[(M // ROW_ALIGN + cdiv(T, TOKENS) * cdiv(D, COLUMNS),)](
        q_TD, q_stride, scale, scale_stride, row_TK, token_M, offsets_E, out, out_scale, T, M, K=K, D=D,
        E=offsets_E.shape[0], TOKENS=TOKENS, ROWS=ROW_ALIGN, COLUMNS=COLUMNS,
        PAD_TILES=next_power_of_2(D // SCALE_TILE), num_warps=WARPS,
    )  # fmt: skip
    return out, out_scale


# --- payloads ---------------------------------------------------------------------------------------------------------


@triton.jit
def _byte_of(word, column):
    """Byte ``column % 4``, little-endian, of int32 ``word``. The mask drops the sign bits that >> shifts in."""
    return (word >> (8 * (column & 3))) & 0xFF


@Kernel
@triton.jit(do_not_specialize=["ids_stride", "scores_stride", "T", "C"])
def _pack_dispatch_kernel(
    q, scale, token_C, sent_TK, ids, ids_stride, scores, scores_stride, payload, T, C, NUM_LOCAL: tl.constexpr,
    K: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, TAIL: tl.constexpr, TOKENS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The first CTAs write tails, the bytes that follow a row's D values: ids and scores, unless they are None, and
    scales. Each other CTA writes COLUMNS bytes of TOKENS tokens, as in :func:`_permute_kernel`."""
    q = q.to(tl.pointer_type(tl.uint8))
    cta, tail_ctas = tl.program_id(0), tl.cdiv(C, ROWS)
    if cta >= tail_ctas:
        _place_values(cta - tail_ctas, q, D, sent_TK, payload, T, K, D, WIDTH, TOKENS, COLUMNS)
        return

    c = cta * ROWS + tl.arange(0, ROWS)
    inside = (c < C)[:, None]
    token = tl.load(token_C + c, mask=c < C, other=0).to(tl.int64)[:, None]
    tail = tl.arange(0, TAIL)[None, :]
    WORDS: tl.constexpr = 0 if ids is None else 2 * K
    tile = tail - 4 * WORDS
    has_scale = inside & (tile >= 0) & (tile < D // 128)
    byte = tl.load(scale + token * (D // 128) + tile, mask=has_scale, other=0).to(tl.int32)
    if ids is not None:
        is_id, is_word, k = tail < 4 * K, inside & (tail < 4 * WORDS), tail // 4 % K
        # A token's row for a rank has all K words. A pair is in the row that sent_TK names, as c or, for a further pair
        # on that rank, as -2 - c. The other pairs' words are id -1 and score 0.
        carrier = tl.load(sent_TK + token * K + k, mask=is_word, other=-1)
        served = is_word & ((carrier == c[:, None]) | (carrier == -2 - c[:, None]))
        expert = tl.load(ids + token * ids_stride + k, mask=served & is_id, other=0).to(tl.int32)
        score = tl.load(scores + token * scores_stride + k, mask=served & (is_id == 0), other=0.0)
        local_id = tl.where(served, expert % NUM_LOCAL, -1)
        word = tl.where(is_id, local_id, score.to(tl.int32, bitcast=True))
        byte = tl.where(is_word, _byte_of(word, tail), byte)
    to = payload + c.to(tl.int64)[:, None] * WIDTH + D
    tl.store(to + tail, byte.to(tl.uint8), mask=inside & (tail < WIDTH - D))


def pack_dispatch(q_TD, scale, token_C, sent_TK, topk_ids_TK, topk_scores_TK, num_local):
    """Kernel of :func:`titan_fp8moe.recipe.pack_dispatch`."""
    assert q_TD.is_contiguous() and scale.is_contiguous()
    (T, D), C, K = q_TD.shape, token_C.shape[0], sent_TK.shape[1]
    width = dispatch_width(D, 0 if topk_ids_TK is None else K)
    ids_stride = scores_stride = 0
    if topk_ids_TK is not None:
        ids_stride = row_stride("topk_ids_TK", topk_ids_TK)
        scores_stride = row_stride("topk_scores_TK", topk_scores_TK)
    payload = torch.empty(C, width, dtype=torch.uint8, device=q_TD.device)
    _pack_dispatch_kernel[(cdiv(C, PACK_ROWS) + cdiv(T, TOKENS) * cdiv(D, COLUMNS),)](
        q_TD, scale, token_C, sent_TK, topk_ids_TK, ids_stride, topk_scores_TK, scores_stride, payload, T, C,
        NUM_LOCAL=num_local, K=K, D=D, WIDTH=width, TAIL=next_power_of_2(width - D), TOKENS=TOKENS,
        ROWS=PACK_ROWS, COLUMNS=COLUMNS, num_warps=WARPS,
    )  # fmt: skip
    return payload


# --- sums -------------------------------------------------------------------------------------------------------------


@triton.jit
def load_output_bias(b2, score, offsets_E, row, column, in_row, D: tl.constexpr, E: tl.constexpr):
    """Score times b2 (E, D) of a row's expert, fp32 zeros for a negative row. ``score`` None: 1."""
    expert = expert_of(offsets_E, tl.maximum(row, 0), E).to(tl.int64)
    bias = tl.load(b2 + expert * D + column, mask=in_row & (row >= 0), other=0.0).to(tl.float32)
    return bias if score is None else bias * tl.load(score + row, mask=row >= 0, other=0.0)


@triton.jit
def _unpermute_sum_kernel(
    y, row_TK, addend, ds, out, out_ds, b2, score, offsets_E, E: tl.constexpr, STRIDE: tl.constexpr,
    DS_STRIDE: tl.constexpr, DS_PER_PAIR: tl.constexpr, OUT_STRIDE: tl.constexpr, OUT_DS_STRIDE: tl.constexpr,
    WORDS: tl.constexpr, D: tl.constexpr, K: tl.constexpr, PAD_WORDS: tl.constexpr, COLUMNS: tl.constexpr,
    FEW: tl.constexpr,
):  # fmt: skip
    """Each CTA sums one column block of one token, in the order of k, then that of ``addend`` (R, D) unless it is None.
    With ``b2`` each row also has its expert's, times its score.

    All K loads are independent. With FEW, most rows are missing; branches skip them, since adding their zeros would
    take longer than moving the bytes. With ``ds`` the first block also writes WORDS words: the score gradients of the
    token's K pairs, then zeros.

    Row strides are constexprs because a payload's need not be a multiple of 16 elements. As arguments they would hide
    from the compiler that rows are 16-byte aligned. The grid is flat because its second dim ends at 65535.
    """
    blocks: tl.constexpr = (D + COLUMNS - 1) // COLUMNS
    token = (tl.program_id(0) // blocks).to(tl.int64)
    column = tl.program_id(0) % blocks * COLUMNS + tl.arange(0, COLUMNS)
    in_row = column < D
    total = tl.zeros((COLUMNS,), tl.float32)
    for k in tl.static_range(K):
        row = tl.load(row_TK + token * K + k).to(tl.int64)
        if FEW:
            if row >= 0:
                addends = tl.load(y + row * STRIDE + column, mask=in_row, other=0.0).to(tl.float32)
                if b2 is not None:
                    addends += load_output_bias(b2, score, offsets_E, row, column, in_row, D, E)
                total += addends
        else:
            addends = tl.load(y + row * STRIDE + column, mask=in_row & (row >= 0), other=0.0).to(tl.float32)
            if b2 is not None:
                addends += load_output_bias(b2, score, offsets_E, row, column, in_row, D, E)
            total += addends
    if addend is not None:
        total += tl.load(addend + token * D + column, mask=in_row, other=0.0).to(tl.float32)
    tl.store(out + token * OUT_STRIDE + column, total, mask=in_row)

    if ds is not None:  # noqa: SIM102  decided when the kernel is compiled
        if tl.program_id(0) % blocks == 0:
            word = tl.arange(0, PAD_WORDS)
            row_of = tl.load(row_TK + token * K + word, mask=word < K, other=-1).to(tl.int64)
            # -2 - c stands for row c, which has been added already but holds this pair's gradient too.
            at = tl.where(row_of < -1, -2 - row_of, row_of) * DS_STRIDE
            if DS_PER_PAIR:
                at += word
            value = tl.load(ds + at, mask=row_of != -1, other=0.0)
            tl.store(out_ds + token * OUT_DS_STRIDE + word, value, mask=word < WORDS)


_sum = Kernel(_unpermute_sum_kernel, b2=None, score=None, offsets_E=None, E=None)
_biased_sum = Kernel(_unpermute_sum_kernel, enable_fp_fusion=False)  # score * bias is rounded, as the specification's


def _unpermute_sum(y_MD, ds, row_TK, addend_RD, out, out_ds, few=False, b2=None, score_M=None, offsets_E=None):
    """Launches the kernel. ``ds`` is (M, 1), or (M, K) with a column for each k; ``out_ds`` is (T, K) or wider, with
    zeros behind the K columns."""
    stride, unit = y_MD.stride()
    assert unit == 1 and row_TK.is_contiguous() and (addend_RD is None or addend_RD.is_contiguous())
    (T, K), D = row_TK.shape, y_MD.shape[1]
    ds_stride, per_pair = (0, False) if ds is None else (ds.stride()[0], ds.shape[1] > 1)
    out_ds_stride, words = (0, 0) if out_ds is None else (out_ds.stride()[0], out_ds.shape[1])
    kernel, biases, constants = _sum, (), {}
    if b2 is not None:
        kernel, biases, constants = _biased_sum, (b2.contiguous(), score_M, offsets_E), dict(E=b2.shape[0])
    kernel[(cdiv(D, SUM_COLUMNS) * T,)](
        y_MD, row_TK, addend_RD, ds, out, out_ds, *biases, STRIDE=stride, DS_STRIDE=ds_stride,
        DS_PER_PAIR=per_pair, OUT_STRIDE=out.stride()[0], OUT_DS_STRIDE=out_ds_stride, WORDS=words, D=D, K=K,
        PAD_WORDS=next_power_of_2(max(words, 1)), COLUMNS=SUM_COLUMNS, FEW=few, num_warps=SUM_WARPS, **constants,
    )  # fmt: skip


def unpermute_sum(y_MD, row_TK, out_dtype, addend_RD=None, b2=None, score_M=None, offsets_E=None):
    """Kernel of :func:`titan_fp8moe.recipe.unpermute_sum`. ``row_TK`` and ``addend_RD`` are contiguous."""
    out = torch.empty(row_TK.shape[0], y_MD.shape[1], dtype=out_dtype, device=y_MD.device)
    _unpermute_sum(y_MD, None, row_TK, addend_RD, out, None, False, b2, score_M, offsets_E)
    return out


def unpermute_gradients(dx_MD, ds, row_TK, out_dtype, addend_RD=None):
    """Kernel of :func:`titan_fp8moe.recipe.unpermute_gradients`: sum and score gradients in one launch."""
    out = torch.empty(row_TK.shape[0], dx_MD.shape[1], dtype=out_dtype, device=dx_MD.device)
    out_ds = torch.empty(row_TK.shape, dtype=torch.float32, device=dx_MD.device)
    _unpermute_sum(dx_MD, ds, row_TK, addend_RD, out, out_ds)
    return out, out_ds


def pack_combine(y_MD, ds_M, row_CK, b2=None, score_M=None, offsets_E=None):
    """Kernel of :func:`titan_fp8moe.recipe.pack_combine`."""
    (C, K), D = row_CK.shape, y_MD.shape[1]
    payload = torch.empty(C, combine_width(D, 0 if ds_M is None else K), dtype=torch.uint8, device=y_MD.device)
    ds, out_ds = (None, None) if ds_M is None else (ds_M.unsqueeze(1), payload.view(torch.float32)[:, D // 2 :])
    # This rank serves one or two of a dispatched token's top_k pairs.
    _unpermute_sum(y_MD, ds, row_CK, None, payload.view(y_MD.dtype), out_ds, True, b2, score_M, offsets_E)
    return payload
