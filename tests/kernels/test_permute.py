"""Row movements against the recipe and the ops' reference, bit by bit."""

import pytest
import torch

from tests.kernels.compare import assert_same_bits, column_major_scale, fp8_rows, randint, randn
from titan_fp8moe import ops, recipe
from titan_fp8moe.kernels import permute
from titan_fp8moe.ops.permute import payload_width

COUNTS = {
    "even": [[3, 4, 5], [6, 1, 2]],
    "empty experts": [[0, 129, 0, 0], [0, 0, 0, 7]],
    "one expert takes all": [[0, 300, 0]],
    "one row, 129 rows": [[1, 129]],
    "nothing": [[0, 0], [0, 0]],
    "exact tiles": [[128, 256, 0]],
    "more experts than rows": [[0] * 37 + [1] + [0] * 200 + [1, 1]],
    "last run empty": [[5, 2], [4, 0]],
    "one run": [[1]],
}


def layout_inputs(generator, counts):
    counts_SE = torch.tensor(counts, dtype=torch.int32, device=generator.device)
    R = int(counts_SE.sum())
    return counts_SE, randn(generator, R), recipe.row_capacity(R, counts_SE.shape[1])


def permutation(generator, n, R):
    """R different ones of n slots, in random order."""
    return torch.randperm(n, generator=generator, device=generator.device)[:R].to(torch.int32)


@pytest.mark.parametrize("absent", [None, 0, 25], ids=["no slots", "all slots", "absent slots"])
@pytest.mark.parametrize("name", COUNTS)
def test_expert_layout(generator, name, absent):
    counts_SE, score_R, capacity = layout_inputs(generator, COUNTS[name])
    R, top_k = score_R.shape[0], 4
    num_slots = R + (absent or 0)
    slot_R = None if absent is None else permutation(generator, num_slots, R)
    args = (counts_SE, score_R, slot_R, num_slots, top_k, capacity + 128)
    for got, want in zip(permute.expert_layout(*args), recipe.expert_layout(*args), strict=True):
        assert_same_bits(got, want)


def test_expert_layout_many_runs_and_strided_score(generator):
    counts_SE = randint(generator, -6, 4, 32, 256).clamp(min=0).to(torch.int32)
    R = int(counts_SE.sum())
    score_R = randn(generator, R, 3)[:, 1]
    args = (counts_SE, score_R, None, R + 3, 1, recipe.row_capacity(R, 256))
    for got, want in zip(permute.expert_layout(*args), recipe.expert_layout(*args), strict=True):
        assert_same_bits(got, want)


def layout(generator, name, top_k, num_slots):
    counts_SE, score_R, capacity = layout_inputs(generator, COUNTS[name])
    slot_R = permutation(generator, num_slots, score_R.shape[0])
    return recipe.expert_layout(counts_SE, score_R, slot_R, num_slots, top_k, capacity)


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("from_payload", [False, True])
def test_permute_rows(generator, name, from_payload):
    T, D, top_k = 150, 1408, 3
    offsets_E, token_M, _, _ = layout(generator, name, top_k, T * top_k)
    q, scale = fp8_rows(generator, T, D), column_major_scale(generator, T, D).contiguous()
    if from_payload:
        payload = randint(generator, 0, 256, T, payload_width(D)).to(torch.uint8)
        q, scale, _ = ops.unpack_dispatch(payload, D)
    got_q, got_scale = permute.permute_rows(q, scale, token_M, offsets_E)
    end = int(offsets_E[-1])
    want_q, want_scale = recipe.permute_rows(q, scale, token_M)
    assert_same_bits(got_q[:end], want_q[:end])
    assert_same_bits(got_scale[:end], want_scale[:end])
    assert got_scale.stride() == (1, token_M.shape[0])
    assert (got_q[end:].view(torch.uint8) == 0xA5).all()


def test_permute_no_tokens(generator):
    offsets_E, token_M, _, _ = layout(generator, "nothing", 1, 0)
    q, scale = fp8_rows(generator, 0, 256), column_major_scale(generator, 0, 256)
    got, _ = permute.permute_rows(q, scale, token_M, offsets_E)
    assert got.shape == (128, 256)


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("K", [1, 8])
@pytest.mark.parametrize("strided", [False, True])
def test_unpermute_sum(generator, K, out_dtype, strided):
    M, D, T = 64, 1408, 19
    y = randn(generator, M, D + 8).bfloat16()
    y = y[:, :D] if strided else y[:, :D].contiguous()
    y[3, 5:8] = torch.tensor([float("inf"), float("nan"), -0.0])
    row_TK = randint(generator, -1, M, T, K).to(torch.int32)
    row_TK[0], row_TK[1], row_TK[2] = -1, 3, 4
    got, want = (impl.unpermute_sum(y, row_TK, out_dtype) for impl in (permute, recipe))
    assert torch.equal(got.isnan(), want.isnan())
    assert_same_bits(got.nan_to_num(7.0), want.nan_to_num(7.0))
    assert permute.unpermute_sum(y, row_TK[:0], out_dtype).shape == (0, D)


@pytest.mark.parametrize("D", [128, 1408, 2048])
@pytest.mark.parametrize("R", [0, 1, 45])
@pytest.mark.parametrize("with_score", [True, False])
def test_pack_dispatch(generator, D, R, with_score):
    T, top_k = 30, 2
    q, scale = fp8_rows(generator, T, D), column_major_scale(generator, T, D).contiguous()
    slot_R = permutation(generator, T * top_k, R)
    score_R = randn(generator, R) if with_score else None
    width = payload_width(D)
    got = permute.pack_dispatch(q, scale, score_R, slot_R, top_k, width)
    want = torch.zeros(R, width, dtype=torch.uint8, device=q.device)
    views = ops.unpack_dispatch(want, D)
    token_R = (slot_R // top_k).long()
    views[0].view(torch.uint8).copy_(q.view(torch.uint8)[token_R])
    views[1].view(torch.uint8).copy_(scale.view(torch.uint8)[token_R])
    if with_score:
        views[2].copy_(score_R)
    assert_same_bits(got, want)


@pytest.mark.parametrize("D", [128, 1408])
@pytest.mark.parametrize("R", [0, 1, 45])
@pytest.mark.parametrize("with_ds", [True, False])
def test_pack_combine(generator, D, R, with_ds):
    M = 128
    y, ds = randn(generator, M, D).bfloat16(), randn(generator, M)
    row_R = permutation(generator, M, R)
    got, got_ds = ops.unpack_combine(payload := permute.pack_combine(y, ds if with_ds else None, row_R), D)
    assert_same_bits(got, y[row_R.long()])
    if with_ds:
        assert_same_bits(got_ds, ds[row_R.long()])
        assert (payload[:, 2 * D + 4 :] == 0).all()
    else:
        assert got_ds is None
