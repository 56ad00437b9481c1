"""Quantization kernels against the recipe, bit by bit."""

import warnings

import pytest
import torch

from tests.kernels.compare import assert_same_bits, column_major_scale, fp8_rows, offsets, randint, randn
from titan_fp8moe import recipe
from titan_fp8moe.kernels import quantize

BF16, FP32 = torch.bfloat16, torch.float32


def hard_tiles(generator: torch.Generator) -> torch.Tensor:
    """(T, 128) fp32 tiles at the edges of the rules."""
    tiles = []
    for e in (-149, -140, -127, -126, -119, -118, -117, -33, -8, 0, 7, 100, 118, 119):
        for ulps in (-1, 0, 1):  # amax at, one ulp below and one above 448 * 2**e, rounded into fp32's range
            amax = torch.tensor(448.0).double().mul(2.0**e).float().view(torch.int32) + ulps
            tile = randn(generator, 128).clamp(-1, 1) * amax.view(FP32).to(generator.device)
            tile[5] = -amax.view(FP32)
            tiles.append(tile)
    subnormal = randint(generator, 0, 1 << 23, 128).to(torch.int32).view(FP32)
    special = [randn(generator, 128) for _ in range(4)]
    for tile, value in zip(special, (float("inf"), float("-inf"), float("nan"), -float("nan")), strict=True):
        tile[77] = value
    zero, tiny, wide = torch.zeros_like(subnormal), randn(generator, 128) * 1e-10, randn(generator, 128)
    wide *= 2.0 ** randint(generator, -30, 30, 128)
    largest = torch.full_like(zero, torch.finfo(FP32).max)
    one_ulp = torch.full_like(zero, 2.0**-149)
    return torch.stack([*tiles, subnormal, *special, zero, -zero, tiny, wide, largest, one_ulp])


def check_rows(x):
    for name in ("quantize_rows", "quantize_group"):
        assert_same_bits(getattr(quantize, name)(x), getattr(recipe, name)(x))
    _, _, column_scale, end = quantize.quantize_group(x)
    assert column_scale.t().is_contiguous() and end.item() == max(-(-len(x) // 128) * 128, 128)


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize(
    "T, D", [(0, 64), (0, 128), (1, 128), (129, 256), (7, 1408), (5, 16), (33, 64), (65, 192), (129, 272), (7, 1360)]
)
def test_rows(generator, T, D, dtype):
    """Of a group, padded with zeros to a multiple of 128 rows, also their scales in both layouts, and their number; of
    rows that lie in wider ones, or column-major, too."""
    x = (randn(generator, T, D) * 2.0 ** randint(generator, -20, 20, T, 1)).to(dtype)
    for view in (x, torch.cat([x, x], 1)[:, :D], x.t().contiguous().t()):
        check_rows(view)


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_rows_hard_tiles(generator, dtype):
    any_bits = randint(generator, -(2**31), 2**31, 64, 128).to(torch.int32).view(FP32)
    check_rows(torch.cat([hard_tiles(generator), any_bits]).to(dtype))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 3e38])
@pytest.mark.parametrize("quantize_x", [quantize.quantize_rows, quantize.quantize_group])
def test_nan_flag(generator, device, quantize_x, value):
    """Stored for one bad value, in the last tile, too; nothing else is, and finite values leave it alone."""
    x = randn(generator, 70, 256)
    x[69, 255] = value
    flag = torch.zeros(16, dtype=torch.uint8, device=device)
    assert_same_bits(quantize_x(x, flag), quantize_x(x))
    assert flag.tolist() == [int(value != 3e38)] + [0] * 15


def check_weight(weights):
    quantized = [[t.mT.contiguous().mT for t in recipe.quantize_weight(w)] for w in weights]  # of any strides
    if len(weights) < 3:
        first, last = (*quantized, (None, None))[:2]
        check_operands(weights, lambda *how: quantize.join_weight(*first, *last, *how))
    check_operands(weights, lambda *how: quantize.quantize_weight(weights, *how))


@pytest.mark.parametrize("M, K, end", [(256, 128, 128), (384, 768, 384), (128, 256, 0)])
def test_dequantize_rows(generator, M, K, end):
    """Of every e4m3 code and scale, rows of either layout; those past the last group are not touched."""
    q, scale = fp8_rows(generator, M, K), column_major_scale(generator, M, K)
    ends = offsets(0, end, end, device=q.device)
    for layout in (scale, scale.view(torch.uint8).contiguous().view(recipe.E8M0)):
        out = quantize.dequantize_rows(q, layout, ends)
        want = recipe.dequantize(q, scale, BF16)[:end]
        torch.testing.assert_close(out[:end], want, rtol=0, atol=0, equal_nan=True)
        assert (out[end:].view(torch.uint8) == 0xA5).all()


def joined(weights):
    """The recipe's codes and scales of the weights, one after the other."""
    quantized = [recipe.quantize_weight(w) for w in weights]
    q, scale = (torch.cat([t.view(torch.uint8) for t in ts], 1) for ts in zip(*quantized, strict=True))
    return q.view(recipe.FP8), scale.view(recipe.E8M0)


def check_operands(weights, make):
    want, want_scale = joined(weights)
    for plain, transposed in ((True, True), (True, False), (False, True)):
        q, q_t, scale = make(plain, transposed)
        assert_same_bits(scale, want_scale)
        if plain:
            assert_same_bits(q, want)
        if transposed:
            assert_same_bits(q_t, want.transpose(1, 2))
        assert plain or q.numel() == 0
        assert transposed or q_t.numel() == 0


def test_weights_that_are_copied_are_warned_of(generator):
    """Once, and not those whose rows are views, as of gate and up in one parameter."""
    quantize._warn_of_copies.cache_clear()
    both = randn(generator, 2, 256, 128)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_weight([*both.chunk(2, 1)])
        stored_E_K_N = randn(generator, 2, 192, 2 * 272).transpose(1, 2)
        check_weight([stored_E_K_N])  # read where it lies
        check_weight([*stored_E_K_N.chunk(2, 1)])
    strided = [randn(generator, 2, 128, 256, 2)[..., 0] for _ in range(2)]
    said = r"weights \(2, 128, 256\) with strides \(65536, 512, 2\) are copied"
    with pytest.warns(UserWarning, match=said) as caught:
        check_weight(strided)
    assert len(caught) == 1


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("sizes, K", [((96,), 80), ((384,), 264), ((1, 130), 256), ((256, 128), 264)])
def test_weights_are_padded(generator, device, sizes, K, dtype):
    """The memory around a weight must not be read as padding."""
    around = [torch.full((2, n + 7, K + 24), float("nan"), dtype=dtype, device=device) for n in sizes]
    weights = [w[:, 3:-4, 8 : K + 8] for w in around]
    for w in weights:
        w.copy_(randn(generator, *w.shape))
    check_weight(weights)


def test_weight_hard_blocks(generator):
    rows = hard_tiles(generator)
    w = randn(generator, rows.shape[0], 128, 128) * 1e-3
    w *= rows.abs().nan_to_num(0, 0, 0).amax(1)[:, None, None]
    w[:, 64] = rows
    check_weight([w])


@pytest.mark.parametrize("E, N, K, pair, dtype, turned", [
    (2, 200, 256, False, BF16, False),
    (33, 16, 128, True, FP32, False),
    (2, 200, 256, False, FP32, True),
    (2, 144, 192, True, BF16, True),
])  # fmt: skip
def test_refresh_weight(generator, E, N, K, pair, dtype, turned):
    """Into the same memory, if a sample, the step or the caller says so, or for a backward of another generation; the
    state is the recipe's. Weights may be stored transposed, ``turned``."""
    weights = [randn(generator, E, N, K).to(dtype) for _ in range(1 + pair)]
    as_stored = weights
    if turned:
        as_stored = [w.transpose(1, 2).contiguous() for w in weights]
        weights = [w.transpose(1, 2) for w in as_stored]
    q, q_t, scale = map(torch.empty_like, quantize.quantize_weight(weights, True, True))
    size, numbers = recipe.STATE_HEADER + len(weights) * recipe.num_samples(weights[0]), dict(dtype=torch.int32)
    state, steps = torch.zeros(size, **numbers, device=q.device), torch.full((1,), 7, **numbers, device=q.device)
    state[0] = -1
    kept, operands = state.clone(), ()

    def refresh(steps, force, want, transposed=q_t, generation=None):
        nonlocal operands, kept
        if want:
            codes, scales = joined(weights)
            operands = codes, codes.view(torch.uint8).mT, scales
        number, made = quantize.refresh_weight(weights, q, transposed, scale, state, steps, force, generation).tolist()
        changed, kept = recipe.seen_weights(as_stored, kept, steps, force, generation)
        assert made == changed == want and number == kept[1]
        assert torch.equal(state, kept)
        for got, expected in zip((q, q_t, scale), operands, strict=True):
            same = torch.equal(got.view(torch.uint8), expected.view(torch.uint8))
            assert same or (got is q_t and transposed is None)

    refresh(steps, False, True)
    refresh(steps, False, False)
    refresh(None, False, False)
    refresh(steps, True, True)
    steps += 1
    as_stored[-1].view(-1)[1] += 1  # no sample sees it
    refresh(steps, False, True)
    at = (recipe.num_samples(weights[0]) - 1) * recipe.sample_step(weights[0])
    as_stored[-1].view(-1)[at] += 1
    refresh(steps, False, True, transposed=None)
    refresh(steps, False, False, transposed=None)
    state[0] = kept[0] = -1
    refresh(None, False, True)
    number, steps = int(state[1]), steps + 1
    refresh(steps, False, False, generation=torch.tensor([number, 1], dtype=torch.int32, device=q.device))
    refresh(steps, False, True, generation=torch.tensor([number - 1, 0], dtype=torch.int32, device=q.device))
    refresh(steps, False, False)  # the backward has noted step and samples
    as_stored[0].view(-1)[0] += 1
    refresh(steps, False, True)
    assert int(state[1]) == number + 1, "no number is given twice"
    assert (at * 1.0) / weights[0].numel() > 0.9 and recipe.sample_step(weights[0]) % 2
