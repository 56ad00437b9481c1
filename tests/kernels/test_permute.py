"""Routing and row movement against the recipe and the ops' reference, bit by bit, and from first principles."""

import pytest
import torch

from tests.kernels.compare import assert_same_bits, column_major_scale, fp8_rows, randint, randn
from titan_fp8moe import ops, recipe
from titan_fp8moe.kernels import permute, routing

COUNTS = {  # routed pairs of each expert
    "even": [9, 5, 7],
    "empty experts": [0, 129, 0, 7],
    "one expert gets all": [0, 300, 0],
    "one row, 129 rows": [1, 129],
    "nothing": [0, 0],
    "exact tiles": [128, 256, 0],
    "more experts than tokens": [0] * 37 + [1] + [0] * 200 + [1, 1],
    "last expert empty": [9, 2, 0],
    "one expert": [1],
}


def make_ids(generator, name, top_k, num_tokens):
    """(num_tokens, top_k) int64 ids with COUNTS pairs for each expert, in random order; a token may choose an expert
    twice. Of the pairs left over, half get -1 and half the first id that is no expert's."""
    counts = torch.tensor(COUNTS[name], device=generator.device)
    E, pairs = len(COUNTS[name]), num_tokens * top_k
    nobody = torch.tensor([-1, E], device=generator.device).repeat(pairs)[: pairs - int(counts.sum())]
    ids = torch.cat([torch.arange(E, device=generator.device).repeat_interleave(counts), nobody])
    return ids[torch.randperm(pairs, generator=generator, device=generator.device)].view(num_tokens, top_k)


def strided(x_TK, after=2):
    """The same values as a view of wider rows, with zeros between them: a valid id."""
    return torch.nn.functional.pad(x_TK, (1, after))[:, 1:-after]


@pytest.fixture(params=[2, routing.MAX_CTAS])
def ctas(request, monkeypatch):
    """With 2 CTAs, each handles several blocks, as with many tokens and experts."""
    monkeypatch.setattr(routing, "MAX_CTAS", request.param)
    if request.param == 2:
        monkeypatch.setattr(routing, "BLOCK_ENTRIES", 64)


@pytest.mark.parametrize(
    "top_k, unserved_tokens, dtype, views",
    [(4, 0, torch.int64, False), (4, 7, torch.int32, True), (1, 3, torch.int64, True)],
)
@pytest.mark.parametrize("name", COUNTS)
def test_expert_routing(generator, name, top_k, unserved_tokens, dtype, views, ctas):
    R, E = sum(COUNTS[name]), len(COUNTS[name])
    ids = make_ids(generator, name, top_k, -(-R // top_k) + unserved_tokens).to(dtype)
    scores = randn(generator, *ids.shape)
    capacity = recipe.row_capacity(R, E) + 128
    want = recipe.expert_routing(ids, scores, E, capacity)
    if views:
        ids, scores = strided(ids), strided(scores, after=5)
    assert_same_bits(routing.expert_routing(ids, scores, E, capacity), want)


def test_rows_must_be_contiguous(generator):
    ids, scores = randint(generator, 0, 2, 3, 8).t(), randn(generator, 3, 8).t()
    with pytest.raises(ValueError, match="topk_ids_TK needs unit stride"):
        routing.expert_routing(ids, scores.contiguous(), 2, 256)
    with pytest.raises(ValueError, match="use topk_scores_TK.contiguous"):
        routing.expert_routing(ids.contiguous(), scores, 2, 256)
    with pytest.raises(ValueError, match="use topk_ids_TK.contiguous"):
        routing.dispatch_routing(ids, 2, 1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="an assertion on a GPU ends the process")
@pytest.mark.parametrize("wrong", [8, -2, 2**33])
def test_ids_are_asserted(generator, monkeypatch, wrong):
    from triton.runtime import interpreter

    monkeypatch.setattr(interpreter.interpreter_builder, "options", interpreter.InterpreterOptions(debug=True))
    ids, scores = randint(generator, -1, 8, 70, 3).long(), randn(generator, 70, 3)
    for ids_TK in (ids, strided(ids)):
        for route, *args in ((routing.expert_routing, scores, 8, 2048), (routing.dispatch_routing, 2, 4, 0)):
            ids_TK[69, 2] = -1
            route(ids_TK, *args, True)
            ids_TK[69, 2] = wrong
            with pytest.raises(Exception, match="neither -1 nor one of the experts"):
                route(ids_TK, *args, True)
            if abs(wrong) < 2**31:
                route(ids_TK, *args, False)


EXCHANGES = {  # tokens, top_k, ranks, experts per rank, ids to choose from
    "two ranks": (300, 3, 2, 4, range(8)),
    "one rank": (70, 2, 1, 8, range(8)),
    "an expert per rank": (40, 4, 33, 1, range(33)),
    "many ranks": (20, 8, 200, 1, range(0, 200, 3)),
    "half of the tokens": (150, 3, 4, 2, range(8)),
    "no token": (0, 2, 4, 2, range(8)),
    "one token": (1, 8, 4, 64, range(256)),
    "top 1": (40, 1, 3, 5, range(15)),
    "rank 1 gets nothing": (90, 2, 3, 2, (0, 1, 4, 5)),
    "one expert gets all": (140, 3, 3, 2, (3,)),
    "experts twice": (90, 5, 3, 2, range(-1, 7)),
}


def choose(generator, name, tokens):
    """(tokens, top_k) int64 ids. The last tokens get -1, since other ranks send them."""
    _, top_k, _, _, pool = EXCHANGES[name]
    pool = torch.tensor(pool, device=generator.device)
    if name in ("one expert gets all", "experts twice"):
        choice = randint(generator, 0, len(pool), tokens, top_k)
    else:
        choice = torch.rand(tokens, len(pool), generator=generator, device=generator.device).topk(top_k).indices
    ids = pool[choice]
    ids[tokens // 2 if name == "half of the tokens" else -(-tokens * 9 // 10) :] = -1
    return ids


@pytest.mark.parametrize("name", EXCHANGES)
def test_dispatch_routing(generator, name, ctas):
    tokens, _, ranks, experts, _ = EXCHANGES[name]
    ids = choose(generator, name, tokens)
    signature = 2**31 - 1
    want_sent, want_token, want_counts = recipe.dispatch_routing(ids, ranks, experts, signature)
    C = int(want_counts[:, 0].sum())
    for topk_ids_TK in (ids, strided(ids.int())):
        sent_TK, token_C, counts_N = routing.dispatch_routing(topk_ids_TK, ranks, experts, signature)
        assert_same_bits((sent_TK, token_C[:C], counts_N), (want_sent, want_token[:C], want_counts))
        assert token_C.shape == want_token.shape


# With 1024 and an odd top_k, payload rows end with the last scale. With 1152 and top-1, a backward's rows are shorter.
@pytest.mark.parametrize("D, views", [(128, True), (1024, False), (1152, False)])
@pytest.mark.parametrize("name", EXCHANGES)
def test_payloads_of_dispatch(generator, name, D, views):
    """Byte by byte; tests/test_recipe.py has what a payload must hold."""
    tokens, top_k, ranks, experts, _ = EXCHANGES[name]
    ids, scores = choose(generator, name, tokens), randn(generator, tokens, top_k)
    q, scale = fp8_rows(generator, tokens, D), column_major_scale(generator, tokens, D).contiguous()
    sent_TK, token_C, counts_N = recipe.dispatch_routing(ids, ranks, experts)
    token_C = token_C[: int(counts_N[:, 0].sum())]
    if views:
        ids, scores = strided(ids.int()), strided(scores, after=5)
    for of in ((ids, scores), (None, None)):
        args = q, scale, token_C, sent_TK, *of, experts
        want = ops.pack_dispatch(*(arg.cpu() if isinstance(arg, torch.Tensor) else arg for arg in args))
        assert_same_bits(permute.pack_dispatch(*args).cpu(), want)


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("from_payload", [False, True])
def test_permute_rows(generator, name, from_payload):
    T, D, top_k, E = 150, 640, 3, len(COUNTS[name])
    ids, capacity = make_ids(generator, name, top_k, T), recipe.row_capacity(sum(COUNTS[name]), E)
    offsets_E, token_M, _, row_TK = recipe.expert_routing(ids, randn(generator, T, top_k), E, capacity)
    q, scale = fp8_rows(generator, T, D), column_major_scale(generator, T, D).contiguous()
    if from_payload:
        payload = randint(generator, 0, 256, T, D + 8 * top_k + 24).to(torch.uint8)
        q, scale, _, _ = ops.unpack_dispatch(payload, D, top_k)
    got_q, got_scale = permute.permute_rows(q, scale, row_TK, token_M, offsets_E)
    end = int(offsets_E[-1])
    assert_same_bits((got_q[:end], got_scale[:end]), [t[:end] for t in recipe.permute_rows(q, scale, token_M)])
    assert got_scale.stride() == (1, token_M.shape[0])
    assert (got_q[end:].view(torch.uint8) == 0xA5).all()
    if name == "nothing":  # nor any token
        got_q, _ = permute.permute_rows(q[:0], scale[:0], row_TK[:0], token_M, offsets_E)
        assert got_q.shape == (128, D)


def assert_same_sums(got, want):
    assert torch.equal(got.isnan(), want.isnan())
    assert_same_bits(got.nan_to_num(7.0), want.nan_to_num(7.0))


@pytest.mark.parametrize(("D", "T", "K"), [(128, 0, 2), (1408, 1, 3), (128, 20, 1), (1408, 20, 8)])
@pytest.mark.parametrize(("out_dtype", "strided"), [(torch.bfloat16, False), (torch.float32, True)])
def test_sums(generator, D, T, K, out_dtype, strided):
    """Also with an addend, rows of an FFN that serves every token: they join the sums before the one rounding."""
    M = 64
    y, addend = randn(generator, M, D + 8).bfloat16(), randn(generator, 128, D).bfloat16()
    y = y[:, :D] if strided else y[:, :D].contiguous()
    y[3, 5:8] = torch.tensor([float("inf"), float("nan"), -0.0])
    row_TK, ds = randint(generator, -1, M, T, K).to(torch.int32), randn(generator, M, 1)
    row_TK[:3] = torch.tensor([-1, 3, 4], device=row_TK.device)[:T, None]
    for more in ((), (addend,)):
        want = recipe.unpermute_sum(y, row_TK, out_dtype, *more)
        of_gradients, got_ds = permute.unpermute_gradients(y, ds, row_TK, out_dtype, *more)
        for got in (permute.unpermute_sum(y, row_TK, out_dtype, *more), of_gradients):
            assert_same_sums(got, want)
        assert_same_bits(got_ds, torch.where(row_TK < 0, 0, ds[row_TK.long(), 0]))
    assert_same_bits(want[:1], addend[:1][:T].to(out_dtype))
    for impl in (permute, recipe):  # a rank whose tokens other ranks send
        assert not impl.unpermute_sum(y[:0], torch.full_like(row_TK, -1), out_dtype).any()
    for of in (ds[:, 0], None):  # as they travel, byte by byte
        got, want = (impl.pack_combine(y.contiguous(), of, row_TK).view(y.dtype) for impl in (permute, recipe))
        assert_same_sums(got, want)
    # By dispatched token: its rank has summed the token's rows, and its score gradients lie next to each other.
    ds = randn(generator, M, K + 5)[:, :K]
    encoded = torch.where((row_TK >= 0) & (randint(generator, 0, 2, T, K) > 0), -2 - row_TK, row_TK)
    got, got_ds = permute.unpermute_gradients(y, ds, encoded, out_dtype)
    assert_same_sums(got, recipe.unpermute_sum(y, encoded, out_dtype))
    assert_same_bits(got_ds, torch.where(row_TK < 0, 0, ds[row_TK.long(), torch.arange(K, device=ds.device)]))


@pytest.mark.parametrize("E", [1, 5, 64])
@pytest.mark.parametrize("with_score", [False, True])
def test_sums_with_a_bias(generator, E, with_score):
    """Of the expert whose group a row is in; some experts have no rows."""
    M, D, T, K = 1024, 192, 19, 3
    tiles = torch.bincount(randint(generator, 0, E, M // 128 - 1), minlength=E)
    offsets_E = (tiles * 128).cumsum(0).int()
    y, b2 = randn(generator, M, D).bfloat16(), randn(generator, D, E).t()
    score = randn(generator, M) if with_score else None
    row_TK = randint(generator, -1, M - 128, T, K).to(torch.int32)
    row_TK[0] = -1
    bias = b2, score, offsets_E
    want = recipe.unpermute_sum(y, row_TK, torch.float32, None, *bias)
    assert_same_bits(permute.unpermute_sum(y, row_TK, torch.float32, None, *bias), want)
    payload = permute.pack_combine(y, None, row_TK, *bias)
    assert_same_bits(payload.view(torch.bfloat16), want.bfloat16())
