"""Index maps and row movements against the recipe and the ops' reference, bit by bit."""

import pytest
import torch

from tests.kernels.compare import assert_same_bits, column_major_scale, fp8_rows, randint, randn
from titan_fp8moe import ops, recipe
from titan_fp8moe.kernels import permute, routing

COUNTS = {  # slots of each expert
    "even": [9, 5, 7],
    "empty experts": [0, 129, 0, 7],
    "one expert takes all": [0, 300, 0],
    "one row, 129 rows": [1, 129],
    "nothing": [0, 0],
    "exact tiles": [128, 256, 0],
    "more experts than rows": [0] * 37 + [1] + [0] * 200 + [1, 1],
    "last expert empty": [9, 2, 0],
    "one expert": [1],
}


def choices(generator, name, top_k, num_tokens):
    """(num_tokens, top_k) experts, of which each has as many slots as COUNTS says, in random order; a token may name an
    expert twice. Slots that are left over are served by none: half -1, half the number after the last."""
    counts = torch.tensor(COUNTS[name], device=generator.device)
    E, slots = len(COUNTS[name]), num_tokens * top_k
    nobody = torch.tensor([-1, E], device=generator.device).repeat(slots)[: slots - int(counts.sum())]
    experts = torch.cat([torch.arange(E, device=generator.device).repeat_interleave(counts), nobody])
    order = torch.randperm(slots, generator=generator, device=generator.device)
    return experts[order].view(num_tokens, top_k)


@pytest.fixture(params=[2, routing.SLOT_PROGRAMS])
def programs(request, monkeypatch):
    """Also with several blocks of tokens for a program, as with many tokens and experts."""
    monkeypatch.setattr(routing, "SLOT_PROGRAMS", request.param)
    if request.param == 2:
        monkeypatch.setattr(routing, "SLOT_ENTRIES", 64)


@pytest.mark.parametrize("absent", [0, 7])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("name", COUNTS)
def test_expert_layout(generator, name, dtype, absent, programs):
    R, top_k = sum(COUNTS[name]), 4
    expert_TK = choices(generator, name, top_k, -(-R // top_k) + absent).to(dtype)
    capacity = recipe.row_capacity(R, len(COUNTS[name])) + 128
    args = (expert_TK, randn(generator, *expert_TK.shape), len(COUNTS[name]), capacity)
    for got, want in zip(routing.expert_layout(*args), recipe.expert_layout(*args), strict=True):
        assert_same_bits(got, want)


def make_layout(generator, name, top_k, num_tokens):
    expert_TK = choices(generator, name, top_k, num_tokens)
    capacity = recipe.row_capacity(sum(COUNTS[name]), len(COUNTS[name]))
    return recipe.expert_layout(expert_TK, randn(generator, num_tokens, top_k), len(COUNTS[name]), capacity)


def routed(generator, tokens, top_k, ranks, experts, part):
    """(tokens, top_k) experts as a router chooses them: for ``part`` of the tokens, the others -1; and of the experts
    only every third where there are many, so that some ranks get none."""
    chosen = torch.rand(tokens, ranks * experts, generator=generator, device=generator.device)
    if ranks * experts > 3 * top_k:
        chosen[:, torch.arange(ranks * experts) % 3 > 0] -= 1
    chosen = chosen.topk(top_k).indices
    chosen[int(part * tokens) :] = -1
    return chosen


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


@pytest.mark.parametrize("name", [*EXCHANGES, "experts twice"])
def test_dispatch_layout(generator, name, programs):
    tokens, top_k, ranks, experts, part = EXCHANGES.get(name, (90, 5, 3, 2, 1))
    if name == "experts twice":
        expert_TK = randint(generator, -1, ranks * experts + 1, tokens, top_k)
    else:
        expert_TK = routed(generator, *EXCHANGES[name])
    got = routing.dispatch_layout(expert_TK, ranks, experts)
    want = recipe.dispatch_layout(expert_TK, ranks, experts)
    C = int(want[3][:, 0].sum())
    for i in (0, 1, 3):
        assert_same_bits(got[i], want[i])
    assert_same_bits(got[2][:C], want[2][:C])


@pytest.mark.parametrize("D", [128, 1024])  # with 1024 and an odd top_k, payload rows end with the last scale
@pytest.mark.parametrize("name", EXCHANGES)
def test_copies_carry_each_slot_once(generator, name, D):
    """From first principles: what a rank packs for the others, token by token and slot by slot."""
    tokens, top_k, ranks, experts, part = EXCHANGES[name]
    expert_TK = routed(generator, *EXCHANGES[name])
    score_TK = randn(generator, tokens, 2 * top_k)[:, :top_k]
    slots = expert_TK.flatten().argsort(stable=True)
    slots = slots[expert_TK.flatten()[slots] >= 0]
    counts = torch.bincount(expert_TK.flatten()[slots], minlength=ranks * experts).view(ranks, experts)
    q, scale = fp8_rows(generator, tokens, D), column_major_scale(generator, tokens, D).contiguous()
    position_TK, copy_TK, token_C, message = routing.dispatch_layout(expert_TK, ranks, experts)
    token_C = token_C[: int(message[:, 0].sum())]
    width = ops.pack_dispatch(q, scale, token_C, copy_TK, position_TK, score_TK).shape[1]
    payload = permute.pack_dispatch(q, scale, token_C, copy_TK, position_TK, score_TK, width)
    got_q, got_scale, position_CK, score_CK = ops.unpack_dispatch(payload, D, top_k)
    expected, first, copy = [], 0, 0
    for n in range(ranks):
        end = first + int(counts[n].sum())
        on_rank = {int(slot): first + i for i, slot in enumerate(slots[first:end])}
        assert message[n].tolist() == [len({s // top_k for s in on_rank}), first, *counts[n].tolist()]
        for token in sorted({s // top_k for s in on_rank}):
            positions = [on_rank.get(token * top_k + k, -1) for k in range(top_k)]
            assert position_CK[copy].tolist() == positions
            assert score_CK[copy].tolist() == [
                float(s) if p >= 0 else 0.0 for s, p in zip(score_TK[token], positions, strict=True)
            ]
            assert int(token_C[copy]) == token
            copy, _ = copy + 1, expected.append(token)
        first = end
    assert copy == token_C.shape[0]
    index = torch.tensor(expected, dtype=torch.int64, device=q.device)
    assert_same_bits(got_q.contiguous(), q[index])
    assert_same_bits(got_scale.contiguous(), scale[index])
    gradients = permute.pack_dispatch(q, scale, token_C, copy_TK, None, None, (D + D // 128 + 15) // 16 * 16)
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
        expert_TK = routed(generator, own, *EXCHANGES[name][1:])
        q, scale = fp8_rows(generator, own, D), column_major_scale(generator, own, D).contiguous()
        position_TK, copy_TK, token_C, message = recipe.dispatch_layout(expert_TK, ranks, experts)
        payload = ops.pack_dispatch(
            q, scale, token_C[: int(message[:, 0].sum())], copy_TK, position_TK, randn(generator, own, top_k)
        )
        payloads.append(payload.split(message[:, 0].tolist())[me])
        messages.append(message[me])
    received, payload = torch.stack(messages), torch.cat(payloads)
    _, _, position_CK, score_CK = ops.unpack_dispatch(payload, D, top_k)
    R = int(received[:, 2:].sum())
    padded = int(-(-received[:, 2:].sum(0) // 128).sum()) * 128
    for capacity in (recipe.row_capacity(R, experts), max(padded, 128)):
        args = (received, position_CK, score_CK, R, capacity)
        for got, want in zip(routing.arrival_layout(*args), recipe.arrival_layout(*args), strict=True):
            assert_same_bits(got, want)


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("from_payload", [False, True])
def test_permute_rows(generator, name, from_payload):
    T, D, top_k = 150, 1408, 3
    offsets_E, token_M, _, row_TK = make_layout(generator, name, top_k, T)
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
    offsets_E, token_M, _, row_TK = make_layout(generator, "nothing", 1, 0)
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
    for impl in (permute, recipe):  # a rank whose tokens other ranks send
        assert not impl.unpermute_sum(y[:0], torch.full_like(row_TK, -1), out_dtype).any()


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


@pytest.mark.parametrize("D", [128, 1408])
@pytest.mark.parametrize("T", [0, 1, 50])
@pytest.mark.parametrize("K", [1, 3])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
def test_unpermute_gradients(generator, D, T, K, out_dtype):
    rows = 40
    dx, ds = randn(generator, rows, D + 8)[:, :D].bfloat16(), randn(generator, rows, 1)
    index_TK = randint(generator, -1, rows, T, K).to(torch.int32)
    want = torch.where(index_TK < 0, 0, ds[index_TK.long(), 0])
    got, got_ds = permute.unpermute_gradients(dx, ds, index_TK, out_dtype)
    assert_same_bits(got, recipe.unpermute_sum(dx, index_TK, out_dtype))
    assert_same_bits(got_ds, want)
    # By copy: a token's rows on a rank have been summed there, their score gradients lie side by side.
    ds = randn(generator, rows, K + 5)[:, :K]
    encoded = torch.where((index_TK >= 0) & (randint(generator, 0, 2, T, K) > 0), -2 - index_TK, index_TK)
    want = torch.where(index_TK < 0, 0, ds[index_TK.long(), torch.arange(K, device=ds.device)])
    got, got_ds = permute.unpermute_gradients(dx, ds, encoded, out_dtype)
    assert_same_bits(got, recipe.unpermute_sum(dx, encoded, out_dtype))
    assert_same_bits(got_ds, want)
