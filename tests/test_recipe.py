"""The recipe against its definition, written a second time in float64 without looking for speed."""

import math
from random import Random

import hypothesis.extra.numpy as npst
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import gelu, relu, silu

from tests.specs import SPECS
from titan_fp8moe import ops, recipe
from titan_fp8moe.activations import ACTIVATIONS, _on_tensors, _tanh
from titan_fp8moe.spec import encode

FP32 = torch.float32
settings.register_profile("recipe", deadline=None, max_examples=60)
settings.load_profile("recipe")


# --- the definition ---------------------------------------------------------------------------------------------------


CODES = np.arange(0x7F)  # the non-negative: 4 exponent bits with bias 7, 3 mantissa bits, subnormals, no infinities
VALUES = np.where(CODES < 8, np.ldexp(CODES * 1.0, -9), np.ldexp(8.0 + CODES % 8, CODES // 8 - 10))


def round_to_e4m3(x: np.ndarray) -> np.ndarray:
    """Codes of the values nearest to float64 ``x``, ties to the even code; |x| <= 448."""
    magnitude = np.abs(x)
    low = np.searchsorted(VALUES, magnitude, side="right") - 1
    high = np.minimum(low + 1, len(VALUES) - 1)
    below, above = magnitude - VALUES[low], VALUES[high] - magnitude
    up = (above < below) | ((above == below) & (low % 2 == 1))
    return np.where(up, high, low) | np.where(np.signbit(x), 0x80, 0)


def quantize_definition(x: np.ndarray) -> tuple[np.ndarray, int]:
    """Codes and scale byte of the fp32 values that share one scale."""
    if not np.isfinite(x).all():
        return np.full(x.shape, 0x7F), 1
    x = x.astype(np.float64)
    exponent = -126
    while math.ldexp(np.abs(x).max(), -exponent) > 448:
        exponent += 1
    return round_to_e4m3(np.ldexp(x, -exponent)), exponent + 127


def assert_quantized(q, scale, x):
    codes, byte = quantize_definition(x.numpy())
    assert scale.view(torch.uint8).item() == byte
    np.testing.assert_array_equal(q.view(torch.uint8).numpy(), codes)


def value64(q):
    """float64 values of e4m3 codes."""
    codes = q.view(torch.uint8).numpy()
    magnitude = np.append(VALUES, np.nan)[codes & 0x7F]
    return np.where(codes & 0x80, -magnitude, magnitude)


# --- quantization -----------------------------------------------------------------------------------------------------

any_floats = npst.arrays(np.float32, 128, elements=st.floats(width=32), fill=st.floats(width=32))
similar_floats = st.builds(  # a tile's usual content: one magnitude, anywhere in the exponent range
    lambda seed, e: np.ldexp(np.random.default_rng(seed).standard_normal(128), e).astype(np.float32),
    st.integers(0, 2**32),
    st.integers(-150, 124),
)


@given(any_floats | similar_floats, similar_floats)
def test_rows(first, second):
    tiles = [torch.from_numpy(tile.copy()) for tile in (first, second)]
    q, scale = recipe.quantize_rows(torch.cat(tiles).unsqueeze(0))
    for i, tile in enumerate(tiles):
        assert_quantized(q[0, 128 * i : 128 * (i + 1)], scale[0, i], tile)


@pytest.mark.parametrize("ulps", [-1, 0, 1])
def test_scale_at_every_power_of_two(ulps):
    """amax at 448 * 2**e and an ulp to either side, down into fp32's subnormals and up to its end."""
    for e in range(-149, 120):
        if 448 * 2.0**e > torch.finfo(FP32).max:
            continue
        bits = torch.tensor(448 * 2.0**e, dtype=torch.float64).float().view(torch.int32) + ulps
        x = torch.linspace(-1, 1, 128) * bits.view(FP32)
        q, scale = recipe.quantize_rows(x.unsqueeze(0))
        assert_quantized(q[0], scale, x)


@given(st.integers(0, 2**32), st.integers(-140, 100), st.sampled_from([None, math.nan, math.inf]))
@settings(max_examples=15)
def test_weight(seed, e, special):
    rng = np.random.default_rng(seed)
    w = torch.from_numpy(np.ldexp(rng.standard_normal((2, 128, 256)), e).astype(np.float32))
    if special is not None:
        w[1, 100, 200] = special
    q, scale = recipe.quantize_weight(w)
    for i in range(2):
        for block in range(2):
            columns = slice(128 * block, 128 * block + 128)
            assert_quantized(q[i, :, columns], scale[i, :, block], w[i, :, columns])
    q_t, scale_t = recipe.quantize_weight(w.transpose(1, 2))
    assert torch.equal(q_t.view(torch.uint8), q.transpose(1, 2).view(torch.uint8))
    assert torch.equal(scale_t.view(torch.uint8), scale.transpose(1, 2).view(torch.uint8))


# --- transposes -------------------------------------------------------------------------------------------------------


def test_shift_exponent_of_every_code():
    codes = torch.tensor([c for c in range(256) if c & 0x7F != 0x7F], dtype=torch.uint8).view(recipe.FP8)
    for shift in (*range(0, -25, -1), -33, -127, -300):
        got = recipe.shift_exponent(codes, torch.tensor(shift, dtype=torch.int32))
        np.testing.assert_array_equal(got.view(torch.uint8), round_to_e4m3(np.ldexp(value64(codes), shift)))


def transposed_definition(q, byte, shift_M):
    """(D, M) codes and (D // 128, M // 128) bytes of (M, D) codes whose row scales move by ``2**shift_M`` first."""
    e = byte.view(torch.uint8).numpy().astype(int) - 127 + shift_M[:, None]
    e_block = np.maximum(e.reshape(-1, 128, e.shape[1]).max(1), -126)
    shift = np.repeat(e - np.repeat(e_block, 128, 0), 128, 1)
    values = value64(q)
    codes = round_to_e4m3(np.ldexp(np.nan_to_num(values), shift))
    return np.where(np.isnan(values), 0x7F, codes).T, e_block.T + 127


@given(st.integers(0, 2**32), st.integers(0, 40), st.sampled_from(recipe.TRANSPOSE_MODES))
@settings(max_examples=20)
def test_transposes(seed, spread, mode):
    rng = np.random.default_rng(seed)
    operands = []
    for D in (256, 128):
        tilt = rng.integers(-spread, spread + 1, (256, 1))
        x = np.ldexp(rng.standard_normal((256, D)), tilt)
        x[rng.integers(256), rng.integers(D)] = math.nan
        x[rng.integers(256)] = 0
        operands += recipe.quantize_rows(torch.from_numpy(x.astype(np.float32)))
    x, x_scale, dy, dy_scale = operands
    balance = np.zeros(256, int)
    if mode == "balanced":
        e_x, e_dy = (s.view(torch.uint8).numpy().astype(int).max(1) for s in (x_scale, dy_scale))
        for block in range(2):
            rows = range(128 * block, 128 * block + 128)
            parity = max((e_x[m] - e_dy[m] for m in rows if e_x[m] > 1 and e_dy[m] > 1), default=0) % 2
            balance[rows] = [(e_x[m] - e_dy[m] - parity) // 2 for m in rows]
    all_rows = torch.tensor([256], dtype=torch.int32)
    xT, xT_scale, dyT, dyT_scale = recipe.transpose_pair(x, x_scale, dy, dy_scale, all_rows, mode)
    for q, scale, want in (
        (xT, xT_scale, transposed_definition(x, x_scale, -balance)),
        (dyT, dyT_scale, transposed_definition(dy, dy_scale, balance)),
    ):
        np.testing.assert_array_equal(q.view(torch.uint8).numpy(), want[0])
        np.testing.assert_array_equal(scale.view(torch.uint8).numpy(), want[1])


# --- activation -------------------------------------------------------------------------------------------------------


def values(*shape):
    """Moderate, small and large ones."""
    return torch.randn(shape, dtype=torch.float64) * 2.0 ** torch.randint(-6, 4, shape)


def cap(x, limit):
    return torch.tanh(x / limit) * limit


def clamped(g, u, limit, alpha, offset):
    g = g.clamp(max=limit)
    return (u.clamp(-limit, limit) + offset) * (g * torch.sigmoid(g * alpha))


OF_MODELS = {  # as their code has them: gpt-oss and DeepSeek-V4, Inkling 2, Nemotron-3
    "swiglu": lambda g, u: silu(g) * u,
    "clamped_swiglu": clamped,
    "geglu_tanh": lambda g, u: gelu(g, approximate="tanh") * u,
    "softcapped_swiglu": lambda g, u, gate_cap, up_cap: cap(g, gate_cap) * torch.sigmoid(g) * cap(u, up_cap),
    "relu2": lambda h, _: torch.square(relu(h)),
}


@pytest.mark.parametrize("spec", [s for s in SPECS if not s.score_before_experts], ids=lambda spec: spec.activation)
def test_activations_are_those_of_models(spec):
    """With autograd's derivatives, also at a clamp's limit and beyond, and of what is not finite."""
    entry, more = ACTIVATIONS[spec.activation], spec.parameters
    g, u, dout = values(1000), values(1000), values(1000)
    if spec.activation == "clamped_swiglu":
        limit = more[0]
        g[:4], u[:4] = limit * torch.tensor([[1, 1.2, -1, -9], [1, -1, 1.2, -1.2]])
    elif spec.activation == "relu2":
        inf, nan = math.inf, math.nan
        g[:7], dout[5:7] = torch.tensor([0.0, -0.0, inf, -inf, nan, -1.0, -1.0]), torch.tensor([inf, nan])
    leaves = [g.requires_grad_(), u.requires_grad_()][: spec.rows_per_unit]
    want = OF_MODELS[spec.activation](g, u, *more)
    grads = torch.autograd.grad(want, leaves, dout)
    # The tanh of soft caps is as precise as fp32.
    close = dict(rtol=1e-6, atol=1e-6) if spec.activation == "softcapped_swiglu" else dict(rtol=1e-12, atol=1e-12)
    g, u = g.detach(), u.detach() if spec.gated else None
    torch.testing.assert_close(entry.forward(g, u, *more), want.detach(), equal_nan=True, **close)
    got = entry.backward(g, u, dout, *more)
    torch.testing.assert_close(got[: len(grads)], grads, equal_nan=True, **close)
    assert spec.gated or got[1] is None


def test_tanh_of_small_numbers():
    """In fp32, where a difference of sigmoids would lose all digits."""
    small = torch.logspace(-12, 1, 1000)
    torch.testing.assert_close(_on_tensors(_tanh)(small), torch.tanh(small.double()).float(), rtol=2e-6, atol=0)


@pytest.mark.parametrize("spec", SPECS, ids=encode)
def test_no_kept_value_crosses_the_clamp(spec):
    """Also where the rounding of h alone would move it there; other values are rounded to the nearest code."""
    h, score = torch.randn(256, 512).bfloat16() * 2, torch.rand(256)
    h[3, 5] = float("nan")
    q, scale = recipe.quantize_hidden(h, score, spec)
    nearest, nearest_scale = recipe.quantize_rows(h)
    assert torch.equal(scale.view(torch.uint8), nearest_scale.view(torch.uint8))
    s, beyond = (score.unsqueeze(1) if spec.score_before_experts else 1), ACTIVATIONS[spec.activation].beyond
    moved = q.view(torch.uint8) != nearest.view(torch.uint8)
    if beyond is None:
        assert not moved.any()
        return

    def sides(x):
        return torch.cat(beyond(*(s * x).chunk(2, 1), *spec.parameters), 1)

    want, got, rounded = (sides(x) for x in (h.float(), recipe.dequantize(q, scale), recipe.dequantize(nearest, scale)))
    held = ~recipe.dequantize(q, scale).isnan()
    assert torch.equal(got[held], want[held]) and (rounded != want)[held].any()
    assert torch.equal(moved[held], (rounded != want)[held])


# --- expert order -----------------------------------------------------------------------------------------------------


@given(npst.arrays(np.int64, st.tuples(st.integers(0, 70), st.integers(1, 4)), elements=st.integers(-1, 9)))
def test_expert_routing(ids):
    topk_ids_TK, E = torch.from_numpy(ids), 9  # 9 and -1 are nobody's
    topk_scores_TK, ids = torch.rand(ids.shape), topk_ids_TK.flatten()
    R = int(((ids >= 0) & (ids < E)).sum())
    capacity = recipe.row_capacity(R, E)
    offsets_E, token_M, score_M, row_TK = recipe.expert_routing(topk_ids_TK, topk_scores_TK, E, capacity)
    assert offsets_E[-1] <= capacity
    assert (offsets_E % 128 == 0).all()
    start_E = torch.cat([torch.zeros(1, dtype=torch.int32), offsets_E[:-1]])
    padding = torch.ones(capacity, dtype=torch.bool)
    for e in range(E):  # an expert's pairs in their order
        pairs = (ids == e).nonzero().squeeze(1)
        rows = start_E[e] + torch.arange(len(pairs))
        assert torch.equal(row_TK.flatten()[pairs].long(), rows)
        assert torch.equal(token_M[rows].long(), pairs // topk_ids_TK.shape[1])
        assert torch.equal(score_M[rows], topk_scores_TK.flatten()[pairs])
        assert offsets_E[e] - start_E[e] == -(-len(pairs) // 128) * 128
        padding[rows] = False
    assert (token_M[padding] == -1).all() and (score_M[padding] == 0).all()
    assert row_TK.shape == topk_ids_TK.shape and (row_TK == -1).sum() == topk_ids_TK.numel() - R


@given(st.lists(st.integers(0, 300), min_size=1, max_size=20))
def test_row_capacity_suffices(groups):
    padded = sum(-(-n // 128) * 128 for n in groups)
    capacity = recipe.row_capacity(sum(groups), len(groups))
    assert padded <= capacity and capacity % 128 == 0
    assert recipe.row_capacity(1 + 129, 2) == 128 + 256  # which is reached
    assert recipe.row_capacity(0, 8) == 128


EXCHANGES = st.tuples(st.integers(0, 40), st.integers(1, 4), st.integers(1, 5), st.integers(1, 3)).filter(
    lambda e: e[1] <= e[2] * e[3]
)


@given(EXCHANGES, st.integers(0, 2**31 - 1), st.booleans())
def test_exchange_brings_each_pair_to_its_expert(shape, number, repeats):
    """Every rank's pairs, dispatched and routed again where they arrive, are those the routers chose."""
    max_tokens, top_k, N, E = shape
    random, generator = Random(number), torch.Generator().manual_seed(number)
    expected, payloads, sources = [set() for _ in range(N)], [[] for _ in range(N)], [[] for _ in range(N)]
    for source in range(N):
        T = random.randint(0, max_tokens)
        ids = torch.rand(T, N * E, generator=generator).topk(top_k).indices
        if repeats:  # and ids of nobody
            ids = torch.randint(-1, N * E + 1, (T, top_k), generator=generator)
        ids[: random.randint(0, 3)] = -1  # the first tokens are another rank's to send
        scores = torch.rand(T, top_k, generator=generator)
        sent_TK, token_C, counts_N = recipe.dispatch_routing(ids, N, E, signature=77)
        splits = counts_N[:, 0].tolist()
        assert (token_C[sum(splits) :] == -1).all() and counts_N[:, -2:].tolist() == [[T * top_k, 77]] * N
        token_C = token_C[: sum(splits)]
        tokens = recipe.quantize_rows(torch.zeros(T, 128))
        payload = ops.pack_dispatch(*tokens, token_C, sent_TK, ids, scores, E)
        for rank, (part, token) in enumerate(zip(payload.split(splits), token_C.split(splits), strict=True)):
            payloads[rank].append(part)
            sources[rank] += [(source, int(t)) for t in token]
        for (token, k), expert in np.ndenumerate(ids.numpy()):
            if 0 <= expert < N * E:
                expected[expert // E].add((source, token, k, expert % E, float(scores[token, k])))
        pairs = torch.bincount(ids[(ids >= 0) & (ids < N * E)], minlength=N * E)
        assert torch.equal(counts_N[:, 1:-2].flatten().long(), pairs)
    for rank in range(N):
        assert sources[rank] == sorted({pair[:2] for pair in expected[rank]})  # each token once
        _, _, ids_CK, scores_CK = ops.unpack_dispatch(torch.cat(payloads[rank]), 128, top_k)
        capacity = recipe.row_capacity(len(expected[rank]), E)
        offsets_E, token_M, score_M, row_CK = recipe.expert_routing(ids_CK, scores_CK, E, capacity)
        arrived = set()
        for c, k in (row_CK >= 0).nonzero().tolist():
            row = int(row_CK[c, k])
            assert int(token_M[row]) == c
            expert = int(torch.searchsorted(offsets_E, row, right=True))
            arrived.add((*sources[rank][c], k, expert, float(score_M[row])))
        assert arrived == expected[rank]


def test_combine_adds_each_ranks_row_once_in_the_order_of_first_pairs():
    """2**30, 1 and -2**30 in fp32: the 1 is lost unless it comes last."""
    big = 2.0**30
    for ids, rows, want in (
        ([2, 0, 2, 1], [1.0, -big, big], 0.0),  # ranks 2, 0, 1: 2**30 + 1 - 2**30
        ([2, 1, 2, 0], [1.0, -big, big], 1.0),  # ranks 2, 1, 0: 2**30 - 2**30 + 1
        ([1, 1, 2, 0], [1.0, -big, big], 1.0),
    ):
        sent_TK, _, _ = recipe.dispatch_routing(torch.tensor([ids]), 3, 1)
        rows = torch.tensor(rows).bfloat16().unsqueeze(1)  # of ranks 0, 1, 2
        assert recipe.unpermute_sum(rows, sent_TK, FP32).item() == want
