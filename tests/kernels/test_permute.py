"""Row movements against the recipe and the ops' reference, bit by bit."""

import pytest
import torch

from tests.kernels.compare import assert_same_bits, column_major_scale, fp8_rows, randint, randn
from titan_fp8moe import ops, recipe
from titan_fp8moe.kernels import permute

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


@pytest.mark.parametrize("absent", [0, 7])
@pytest.mark.parametrize(
    "dtypes", [(torch.int32, torch.int32), (torch.int64, torch.int64), (torch.float32, torch.int64)]
)
@pytest.mark.parametrize("name", COUNTS)
def test_expert_layout(generator, name, dtypes, absent):
    counts_SE, score_R, capacity = layout_inputs(generator, COUNTS[name])
    R, top_k = score_R.shape[0], 4
    num_tokens = -(-R // top_k) + absent
    slot_R = permutation(generator, num_tokens * top_k, R)
    args = (counts_SE.to(dtypes[0]), score_R, slot_R.to(dtypes[1]), num_tokens, top_k, capacity + 128)
    for got, want in zip(permute.expert_layout(*args), recipe.expert_layout(*args), strict=True):
        assert_same_bits(got, want)


def test_expert_layout_many_runs(generator):
    counts_SE = randint(generator, -6, 4, 32, 256).clamp(min=0).to(torch.int32)
    R = int(counts_SE.sum())
    slot_R = permutation(generator, R, R)
    args = (counts_SE, randn(generator, R), slot_R, R, 1, recipe.row_capacity(R, 256))
    for got, want in zip(permute.expert_layout(*args), recipe.expert_layout(*args), strict=True):
        assert_same_bits(got, want)


def layout(generator, name, top_k, num_tokens):
    counts_SE, score_R, capacity = layout_inputs(generator, COUNTS[name])
    slot_R = permutation(generator, num_tokens * top_k, score_R.shape[0])
    return recipe.expert_layout(counts_SE, score_R, slot_R, num_tokens, top_k, capacity)


def sorted_slots(generator, tokens, top_k, ranks, experts, part):
    """Slots sorted by expert and their counts (ranks, experts), as a router gives them: ``part`` of the tokens, and of
    the experts only every third where there are many, so that some ranks get none."""
    chosen = torch.rand(tokens, ranks * experts, generator=generator, device=generator.device)
    if ranks * experts > 3 * top_k:
        chosen[:, torch.arange(ranks * experts) % 3 > 0] -= 1
    chosen = chosen.topk(top_k).indices.flatten()
    slots = chosen.argsort(stable=True)
    slots = slots[slots // top_k < part * tokens]
    counts = torch.bincount(chosen[slots], minlength=ranks * experts).view(ranks, experts)
    return slots, counts


EXCHANGES = {  # tokens, top_k, ranks, experts per rank, part of the tokens
    "two ranks": (300, 3, 2, 4, 1),
    "one rank": (70, 2, 1, 8, 1),
    "an expert per rank": (129, 4, 33, 1, 1),
    "many ranks": (100, 8, 200, 1, 1),
    "half of the tokens": (150, 3, 4, 2, 0.5),
    "no token": (0, 2, 4, 2, 1),
    "one token": (1, 8, 4, 64, 1),
    "top 1": (40, 1, 3, 5, 1),
}


@pytest.mark.parametrize("programs", [2, permute.COPY_PROGRAMS])
@pytest.mark.parametrize("name", EXCHANGES)
def test_dispatch_layout(generator, name, programs, monkeypatch):
    """Also with several blocks of tokens for a program, as with many tokens and ranks."""
    monkeypatch.setattr(permute, "COPY_PROGRAMS", programs)
    tokens, top_k, ranks, experts, part = EXCHANGES[name]
    slots, counts = sorted_slots(generator, *EXCHANGES[name])
    for dtype in (torch.int64, torch.float32):
        got = permute.dispatch_layout(slots, counts.to(dtype), tokens, top_k)
        want = recipe.dispatch_layout(slots, counts.to(dtype), tokens, top_k)
        C = int(want[3][:, 0].sum())
        for i in (0, 1, 3):
            assert_same_bits(got[i], want[i])
        assert_same_bits(got[2][:C], want[2][:C])


@pytest.mark.parametrize("name", EXCHANGES)
def test_copies_carry_each_slot_once(generator, name):
    """From first principles: what a rank packs for the others, token by token and slot by slot."""
    tokens, top_k, ranks, experts, part = EXCHANGES[name]
    slots, counts = sorted_slots(generator, *EXCHANGES[name])
    D, score_S = 128, randn(generator, slots.shape[0])
    q, scale = fp8_rows(generator, tokens, D), column_major_scale(generator, tokens, D).contiguous()
    position_TK, copy_TK, token_C, message = permute.dispatch_layout(slots, counts, tokens, top_k)
    token_C = token_C[: int(message[:, 0].sum())]
    width = ops.pack_dispatch(q, scale, token_C, copy_TK, position_TK, score_S).shape[1]
    payload = permute.pack_dispatch(q, scale, token_C, copy_TK, position_TK, score_S, width)
    got_q, got_scale, position_CK, score_CK = ops.unpack_dispatch(payload, D, top_k)
    expected, first, copy = [], 0, 0
    for n in range(ranks):
        end = first + int(counts[n].sum())
        on_rank = {int(slot): first + i for i, slot in enumerate(slots[first:end])}
        assert message[n].tolist() == [len({s // top_k for s in on_rank}), first, *counts[n].tolist()]
        for token in sorted({s // top_k for s in on_rank}):
            positions = [on_rank.get(token * top_k + k, -1) for k in range(top_k)]
            assert position_CK[copy].tolist() == positions
            assert score_CK[copy].tolist() == [float(score_S[p]) if p >= 0 else 0.0 for p in positions]
            assert int(token_C[copy]) == token
            copy, _ = copy + 1, expected.append(token)
        first = end
    assert copy == token_C.shape[0]
    index = torch.tensor(expected, dtype=torch.int64, device=q.device)
    assert_same_bits(got_q.contiguous(), q[index])
    assert_same_bits(got_scale.contiguous(), scale[index])
    gradients = permute.pack_dispatch(q, scale, token_C, copy_TK, None, None, (D + 1 + 15) // 16 * 16)
    got_q, got_scale, _, _ = ops.unpack_dispatch(gradients, D, 0)
    assert_same_bits(got_q.contiguous(), q[index])
    assert_same_bits(got_scale.contiguous(), scale[index])


@pytest.mark.parametrize("name", EXCHANGES)
def test_arrival_layout(generator, name):
    """What the ranks would send to rank 1 (0, where there is one), each with tokens of its own."""
    tokens, top_k, ranks, experts, part = EXCHANGES[name]
    me, D = min(1, ranks - 1), 128
    messages, payloads = [], []
    for n in range(ranks):
        own = max(tokens - 40 * n, 0)
        slots, counts = sorted_slots(generator, own, *EXCHANGES[name][1:])
        q, scale = fp8_rows(generator, own, D), column_major_scale(generator, own, D).contiguous()
        position_TK, copy_TK, token_C, message = recipe.dispatch_layout(slots, counts, own, top_k)
        payload = ops.pack_dispatch(
            q, scale, token_C[: int(message[:, 0].sum())], copy_TK, position_TK, randn(generator, slots.shape[0])
        )
        payloads.append(payload.split(message[:, 0].tolist())[me])
        messages.append(message[me])
    received, payload = torch.stack(messages), torch.cat(payloads)
    _, _, position_CK, score_CK = ops.unpack_dispatch(payload, D, top_k)
    R = int(received[:, 2:].sum())
    args = (received, position_CK, score_CK, R, recipe.row_capacity(R, experts))
    for got, want in zip(permute.arrival_layout(*args), recipe.arrival_layout(*args), strict=True):
        assert_same_bits(got, want)


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("from_payload", [False, True])
def test_permute_rows(generator, name, from_payload):
    T, D, top_k = 150, 1408, 3
    offsets_E, token_M, _, row_TK = layout(generator, name, top_k, T)
    q, scale = fp8_rows(generator, T, D), column_major_scale(generator, T, D).contiguous()
    if from_payload:
        payload = randint(generator, 0, 256, T, D + 8 * top_k + 24).to(torch.uint8)
        q, scale, _, _ = ops.unpack_dispatch(payload, D, top_k)
    got_q, got_scale = permute.permute_rows(q, scale, row_TK, token_M, offsets_E)
    end = int(offsets_E[-1])
    want_q, want_scale = recipe.permute_rows(q, scale, token_M)
    assert_same_bits(got_q[:end], want_q[:end])
    assert_same_bits(got_scale[:end], want_scale[:end])
    assert got_scale.stride() == (1, token_M.shape[0])
    assert (got_q[end:].view(torch.uint8) == 0xA5).all()


def test_permute_no_tokens(generator):
    offsets_E, token_M, _, row_TK = layout(generator, "nothing", 1, 0)
    q, scale = fp8_rows(generator, 0, 256), column_major_scale(generator, 0, 256)
    got, _ = permute.permute_rows(q, scale, row_TK, token_M, offsets_E)
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


@pytest.mark.parametrize("D", [128, 1408])
@pytest.mark.parametrize("C", [0, 1, 45])
@pytest.mark.parametrize("K", [1, 6])
@pytest.mark.parametrize("with_ds", [True, False])
def test_pack_combine(generator, D, C, K, with_ds):
    M = 128
    y, ds = randn(generator, M, D).bfloat16(), randn(generator, M)
    row_CK = randint(generator, -1, M, C, K).to(torch.int32)
    width = ops.pack_combine(y, ds if with_ds else None, row_CK).shape[1]
    payload = permute.pack_combine(y, ds if with_ds else None, row_CK, width)
    got, got_ds = ops.unpack_combine(payload, D, K)
    assert_same_bits(got.contiguous(), recipe.unpermute_sum(y, row_CK, torch.bfloat16))
    if with_ds:
        want_ds = torch.cat([ds, ds.new_zeros(1)])[row_CK.long()]  # -1: the zero at the end
        assert_same_bits(got_ds.contiguous(), want_ds)
        assert (payload[:, 2 * D + 4 * K :] == 0).all()
    else:
        assert got_ds is None


@pytest.mark.parametrize("S", [0, 1, 1500])
def test_slot_gradients(generator, S):
    T, K = 500, 3
    slot_S = permutation(generator, T * K, S).long()
    index_TK = permutation(generator, T * K, T * K).view(T, K)
    ds = randn(generator, T * K, 1)
    assert_same_bits(permute.slot_gradients(ds, index_TK, slot_S), ds[index_TK.flatten()[slot_S].long(), 0])
    copies = randint(generator, 0, 40, T, K).to(torch.int32)
    encoded = torch.where(randint(generator, 0, 2, T, K) > 0, copies, -2 - copies)
    ds = randn(generator, 40, K + 5)[:, :K]
    want = ds[copies.flatten()[slot_S].long(), slot_S % K]
    assert_same_bits(permute.slot_gradients(ds, encoded, slot_S), want)
