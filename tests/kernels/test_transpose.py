"""Transposes against the recipe, bit by bit."""

import pytest
import torch

from tests.kernels.compare import assert_same_bits, column_major_scale, fp8_rows, offsets, randint, randn
from titan_fp8moe import ops, recipe
from titan_fp8moe.kernels import transpose

MODES = recipe.TRANSPOSE_MODES


def check(x, x_scale, dy, dy_scale, offsets_E, mode, token_M=None):
    end = int(offsets_E[-1])
    got = transpose.transpose_pair(x, x_scale, dy, dy_scale, offsets_E, mode, token_M)
    want = recipe.transpose_pair(x, x_scale, dy, dy_scale, offsets_E, mode, token_M)
    for (g, w), columns in zip(zip(got, want, strict=True), (end, end // 128) * 2, strict=True):
        assert_same_bits(g[:, :columns], w[:, :columns])
        assert g.shape[1] == columns or (g[:, columns:].view(torch.uint8) == 0xA5).all(), "unused columns were written"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("D, N", [(128, 128), (384, 256), (2176, 128)])
def test_any_codes(generator, mode, D, N):
    M = 256
    x, dy = fp8_rows(generator, M, D), fp8_rows(generator, M, N)
    # Up to the scales whose product with a value still is an fp32 number.
    scales = [column_major_scale(generator, M, n, 1, 240) for n in (D, N)]
    check(x, scales[0], dy, scales[1], offsets(0, 128, 256, device=x.device), mode)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("top_k", [None, 3])
@pytest.mark.parametrize("D", [128, 1408])
def test_rows_of_tokens(generator, mode, top_k, D):
    """x as it was dispatched: a quantized tensor, or a payload with positions and scores; whole tiles of padding."""
    T, M, N = 150, 512, 256
    q, scale = fp8_rows(generator, T, D), column_major_scale(generator, T, D, 1, 240).contiguous()
    if top_k is not None:
        payload = randint(generator, 0, 256, T, D + 8 * top_k + 24).to(torch.uint8)
        values, payload_scale, _, _ = ops.unpack_dispatch(payload, D, top_k)
        values.view(torch.uint8).copy_(q.view(torch.uint8))
        payload_scale.view(torch.uint8).copy_(scale.view(torch.uint8))
        q, scale = values, payload_scale
    token_M = randint(generator, 0, T, M).int()
    token_M[100:300] = -1
    dy, dy_scale = fp8_rows(generator, M, N), column_major_scale(generator, M, N, 1, 240)
    dy.view(torch.uint8)[100:300], dy_scale.view(torch.uint8)[100:300] = 0, 1
    check(q, scale, dy, dy_scale, offsets(128, 384, device=q.device), mode, token_M)


@pytest.mark.parametrize("mode", MODES)
def test_padding_and_zero_rows(generator, mode):
    """Among anti-correlated rows."""
    M, D, N = 384, 256, 128
    tilt = 2.0 ** randint(generator, -12, 13, M, 1)
    x, x_scale = recipe.quantize_rows(randn(generator, M, D) * tilt)
    dy, dy_scale = recipe.quantize_rows(randn(generator, M, N) * 1e-10 / tilt)
    for q, scale in ((x, x_scale), (dy, dy_scale)):
        q.view(torch.uint8)[100:140] = 0
        q.view(torch.uint8)[7] = 0x80  # negative zeros
        scale.view(torch.uint8)[100:140] = 1
    x.view(torch.uint8)[3, :128], x_scale.view(torch.uint8)[3, 0] = 0x7F, 1  # a tile that held a NaN
    scales = [recipe.column_major(s) for s in (x_scale, dy_scale)]
    check(x, scales[0], dy, scales[1], offsets(0, 128, 128, 256, device=x.device), mode)
    check(x, scales[0], dy, scales[1], offsets(0, 0, device=x.device), mode)
    check(x, x_scale, dy, dy_scale, offsets(M, device=x.device), mode)  # row-major scales: strides are honoured


@pytest.mark.parametrize("zeros, x_byte, dy_byte", [
    ("x", 1, 2), ("x", 1, 3), ("dy", 200, 1), ("dy", 201, 1), ("", 2, 2), ("", 2, 3), ("", 3, 2),
])  # fmt: skip
def test_which_rows_count(generator, zeros, x_byte, dy_byte):
    """How far operands are apart at most, and whether that is even or odd, is known from rows that both have. A row of
    zeros does not count, one of the smallest scale of other rows does."""
    M = 128
    x, x_scale = fp8_rows(generator, M, 128), column_major_scale(generator, M, 128, 100, 110)
    dy, dy_scale = fp8_rows(generator, M, 128), column_major_scale(generator, M, 128, 180, 190)
    x_scale.view(torch.uint8)[50], dy_scale.view(torch.uint8)[50] = x_byte, dy_byte
    if zeros:
        (x if zeros == "x" else dy).view(torch.uint8)[50] = 0
    check(x, x_scale, dy, dy_scale, offsets(M, device=x.device), "balanced")


@pytest.mark.parametrize("mode", MODES)
def test_tile_column_far_below_its_rows(generator, mode):
    """The balance exponent would move the first tiles' exponents under the smallest scale."""
    M, D = 128, 256
    x, dy = fp8_rows(generator, M, D), fp8_rows(generator, M, 128)
    x_scale, dy_scale = column_major_scale(generator, M, D, 180, 200), column_major_scale(generator, M, 128, 100, 110)
    x_scale.view(torch.uint8)[:, 0] = randint(generator, 1, 30, M).to(torch.uint8)
    check(x, x_scale, dy, dy_scale, offsets(M, device=x.device), mode)
