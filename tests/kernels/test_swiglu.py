"""SwiGLU kernels against the recipe: within one e4m3 code, on at most one byte in a thousand."""

import itertools

import pytest
import torch

from tests.kernels.compare import assert_same_bits, offsets, randint, randn
from tests.kernels.conftest import INTERPRETED
from tests.specs import SPECS
from titan_fp8moe import recipe
from titan_fp8moe.kernels import swiglu
from titan_fp8moe.spec import ExpertSpec, encode


def assert_nearly_same(q, scale, want, want_scale):
    """At most 0.1% of the bytes differ, each by one code; the exponential's last bit may also move one tile's scale."""
    assert (q.dtype, q.shape, scale.dtype, scale.shape) == (want.dtype, want.shape, want_scale.dtype, want_scale.shape)
    assert scale.stride() == (1, scale.shape[0]) and q.is_contiguous()
    same_scale = scale.view(torch.uint8) == want_scale.view(torch.uint8)
    assert (~same_scale).sum() <= 1
    q, want = q.view(torch.uint8).int(), want.view(torch.uint8).int()
    assert torch.equal(q == recipe.FP8_NAN, want == recipe.FP8_NAN)
    q, want = (torch.where(codes < 0x80, codes, 0x80 - codes) for codes in (q, want))  # ordered like the values
    distance = (q - want).abs().unflatten(1, (-1, 128))[same_scale]
    assert distance.max() <= 1, f"differs by {distance.max()} codes"
    assert (distance > 0).float().mean() <= 1e-3


def assert_rows(got, want, end):
    """Pairs of rows and scales, up to ``end``."""
    for i in range(0, len(want), 2):
        assert_nearly_same(got[i][:end].contiguous(), recipe.column_major(got[i + 1][:end]), *want[i : i + 2])


def assert_sums(got, want, size, tolerance):
    """Relative to the sum of magnitudes, ``size``: the sum itself may cancel, or be finite where these are not."""
    finite = want.isfinite()
    assert torch.equal(got.isfinite(), finite)
    finite &= size.isfinite()
    assert ((got - want).abs()[finite] <= tolerance * size[finite]).all()


def inputs(generator, M, H, spec=ExpertSpec()):  # noqa: B008  an immutable value
    N = spec.rows_per_unit * H
    h = (randn(generator, M, N) * 2.0 ** randint(generator, -4, 3, M, 1)).bfloat16()
    d = (randn(generator, M, H) * 1e-10 * 2.0 ** randint(generator, -8, 8, M, 1)).bfloat16()
    score = randn(generator, M).sigmoid()
    h[5], score[6] = 0, 0  # padding: rows of zeros, score zero
    return h, d, score


def put_non_finite(h, d):
    h[10, 3], h[11, -1], h[12, 130], d[13, 0], d[14, 1] = *(float("nan"),) * 2, float("inf"), float("inf"), float("nan")


def join(spec, parts, H, N):
    """Columns of gate and up, and zeros, as they lie in the N columns of h."""
    pad = torch.nn.functional.pad
    if spec.interleaved:
        return pad(torch.stack(parts, 2).flatten(1), (0, N - 2 * parts[0].shape[1]))
    return torch.cat([pad(part, (0, H - part.shape[1])) for part in parts], 1)


INTERLEAVED = [spec._replace(interleaved=True) for spec in SPECS if spec.activation == "clamped_swiglu"]
# Interleaved with a single tile column, an odd number of them, and an even one.
KINDS = [*((spec, 0) for spec in SPECS), *itertools.product(INTERLEAVED, (32, 176)), (INTERLEAVED[0], 256)]
# With any other activation, biases and h in fp8 come together or not at all.
CASES = [(spec, hidden, fp8_h, biased) for spec, hidden in KINDS for fp8_h in (False, True) for biased in (False, True)
         if fp8_h == biased or spec.activation == "clamped_swiglu"]  # fmt: skip


@pytest.mark.parametrize("spec, hidden, fp8_h, biased", CASES, ids=lambda x: encode(x) if type(x) is ExpertSpec else x)
def test_forward_and_backward(generator, spec, hidden, fp8_h, biased):
    """Experts 0 and 3 have no rows. With biases, and interleaved, some of H columns are padding."""
    D, dim, end = 256, 192, 256
    hidden = hidden or (176 if biased else 256)
    H = recipe.padded(hidden)
    M = end if H == 128 else 384  # a part of a single column of scales would have another stride
    N = recipe.padded(2 * hidden) if spec.interleaved else spec.rows_per_unit * H
    h, d, score = inputs(generator, M, N // spec.rows_per_unit, spec)
    d = torch.nn.functional.pad(d, (0, H - d.shape[1]))
    valid = join(spec, [torch.ones(1, hidden, device=h.device)] * spec.rows_per_unit, H, N)
    h *= valid
    d[:, hidden:] = 0
    if hidden > 130:
        put_non_finite(h[:, : 2 * hidden if spec.interleaved else hidden], d[:, :hidden])
    offsets_E, bias, rows, more = offsets(0, 128, end, end, device=h.device), [], None, ()
    if biased:
        dy_q, dy_scale = recipe.quantize_rows(torch.nn.functional.pad(randn(generator, M, dim) * 1e-10, (0, D - dim)))
        dy_scale = recipe.column_major(dy_scale)
        both, b2 = randn(generator, 4, hidden, 2).bfloat16(), randn(generator, dim, 4).bfloat16().t()
        both = both.unbind(2) if spec.interleaved else both.movedim(2, 0).contiguous()
        bias = [*both[: spec.rows_per_unit], None][:2]
        rows = recipe.expert_rows(join(spec, [b.float() for b in bias if b is not None], H, N), offsets_E, M)
        more = (rows[:end],)

    q, scale, h_q, h_scale = swiglu.swiglu_quantize(h, score, offsets_E, spec, fp8_h, *bias)
    assert_rows((q, scale), recipe.swiglu_quantize(h[:end], score[:end], spec, *more), end)
    assert scale.stride() == (1, M)
    assert (q[end:].view(torch.uint8) == 0xA5).all(), "rows past the last group were written"
    kept, wide_h = (h, None), h
    if fp8_h:
        assert_same_bits((h_q[:end], h_scale[:end]), recipe.quantize_hidden(h[:end], score[:end], spec, *more))
        assert h_scale.stride() == (1, M)
        h_q, h_scale = recipe.quantize_hidden(h, score, spec, rows)
        kept, wide_h = (h_q, recipe.column_major(h_scale)), recipe.dequantize(h_q, h_scale)
    else:
        assert h_q.numel() == h_scale.numel() == 0

    *want, want_ds, dbias_rows = recipe.swiglu_quantize_backward(d[:end], wide_h[:end], score[:end], spec, *more)
    size = (d.float().abs() * (wide_h.float().abs() + 3 * biased).amax(1, keepdim=True) ** 2).sum(1)[:end]
    tolerance = 1e-5 if biased else 1e-6
    if biased:
        dy = recipe.dequantize(dy_q, dy_scale)[:end, :dim]
        ds_of_b2, db2_rows = recipe.output_bias_backward(dy, b2, score[:end], offsets_E, spec)
        want_ds, size = want_ds + ds_of_b2, size + 1e-7
    for with_gradients in (True, False)[: 1 + biased]:
        output = (b2, dy_q, dy_scale, with_gradients) if biased else ()

        def run(recompute_a=True, kept=kept, output=output):
            args = d, *kept, score, offsets_E, spec, recompute_a, *bias, *output
            return swiglu.swiglu_quantize_backward(*args)

        dh, dh_scale, q, q_scale, ds, *dbias = run()
        assert_rows((dh, dh_scale, q, q_scale), want, end)
        assert dh_scale.stride() == q_scale.stride() == (1, M)
        assert_sums(ds[:end], want_ds, size, tolerance)
        assert len(dbias) == (biased and with_gradients)
        other_dh, _, none, _, other_ds, *_ = run(recompute_a=False)  # of its own, whose sums may be fused otherwise
        assert_same_bits(dh[:end], other_dh[:end])
        assert none.numel() == 0
        assert_sums(other_ds[:end], ds[:end], size, tolerance)
        again = [] if INTERPRETED else [run()]  # sums of several warps
        if fp8_h:  # scales as they may come back from the host
            again.append(run(kept=(kept[0], kept[1].view(torch.uint8).contiguous().view(recipe.E8M0))))
        for results in again:
            assert_same_bits([t[:end] for t in (dh, q, ds)], [t[:end] for t in results[:5:2]])
        if dbias:
            want_dbias = recipe.bias_gradient(torch.cat([dbias_rows[:, valid[0] > 0], db2_rows], 1), offsets_E)
            assert dbias[0].dtype == torch.bfloat16 and not dbias[0][[0, 3]].any()
            torch.testing.assert_close(dbias[0].float(), want_dbias, rtol=0.01, atol=1e-10, equal_nan=True)
