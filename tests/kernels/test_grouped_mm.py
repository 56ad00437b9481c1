"""Grouped GEMMs against float64 products of the dequantized operands.

Every test runs two implementations: the one that :mod:`titan_fp8moe.kernels.gemm.grouped_mm` picks, and another. That
is plain Triton on Hopper. Without a GPU it is the Hopper kernels, emulated (:mod:`tests.gluon_emulator`).
"""

import pytest
import torch

from experiments.timing import occupy
from tests.gluon_emulator import emulate
from tests.kernels.compare import offsets, randn
from tests.kernels.conftest import INTERPRETED
from titan_fp8moe import recipe
from titan_fp8moe.kernels.gemm import grouped_mm
from titan_fp8moe.kernels.gemm import launch as gemm_launch
from titan_fp8moe.recipe import BLOCK

# Hopper sums the products of 128 values with about 14 bits. For bf16 the error counts twice, see assert_close.
TOLERANCE = {torch.bfloat16: 4e-4, torch.float32: 2e-4}
DTYPES = list(TOLERANCE)
GROUPS = {
    "uneven": (128, 512, 640),
    "empty first, inner and last": (0, 256, 256, 640, 640),
    "one expert has all rows": (0, 640, 640),
    "more experts than tokens, and than a warp has lanes": (0,) * 33 + (128,) * 4,
    "no rows": (0, 0),
    "last of two empty, buffer full": (768, 768),
    "last of three empty, buffer full": (256, 768, 768),
}
HOPPER = not INTERPRETED and torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
CTAS = [f"emulated on {num_ctas}" for num_ctas in (1, 3)]


@pytest.fixture(params=["picked", "plain"] if HOPPER else ["picked", *CTAS] if INTERPRETED else ["picked"])
def kernels(request, monkeypatch):
    if request.param in CTAS:
        with emulate(num_ctas=int(request.param.split()[-1])):
            yield grouped_mm
        return
    if request.param == "plain":
        monkeypatch.setattr(grouped_mm, "is_hopper", lambda x: False)
    yield grouped_mm


def assert_close(out, ref):
    """Small relative error of the whole result, and of the worst 128x128 block: a wrong tile hides in a large one.

    A sum z that is rounded to the result's dtype is at most as far from it as the rounded reference: the result's error
    is that of rounding the reference and twice that of z.
    """
    blocks = (ref.numel() // (BLOCK * ref.shape[-1]), BLOCK, ref.shape[-1] // BLOCK, BLOCK)
    rounding = ref.to(out.dtype).double() - ref
    for dims, factor in (((0, 1, 2, 3), 1), ((1, 3), 2)):
        error, rounded, size = (
            torch.linalg.vector_norm(x.view(blocks), dim=dims) for x in (out.double() - ref, rounding, ref)
        )
        assert (error <= rounded + factor * TOLERANCE[out.dtype] * size).all(), ((error - rounded) / size).max()


def by_expert(offsets_E):
    ends = offsets_E.tolist()
    return enumerate(zip([0, *ends[:-1]], ends, strict=True))


# --- out[m] = a[m] @ b[e]^T -------------------------------------------------------------------------------------------


def make_operands(generator, M, N, K, E, magnitude=1.0):
    """Rows and experts differ in magnitude, so that a neighbour's scale is an error."""
    a, a_scale = recipe.quantize_rows(randn(generator, M, K) * magnitude * 2.0 ** (4 * randn(generator, M, 1)))
    b, b_scale = recipe.quantize_weight(randn(generator, E, N, K) * 2.0 ** (2 * randn(generator, E, 1, 1)))
    return a, recipe.column_major(a_scale), b, b_scale


def reference(a, a_scale, b, b_scale, offsets_E):
    out = []
    for e, (start, end) in by_expert(offsets_E):
        rows = recipe.dequantize(a[start:end], a_scale[start:end], torch.float64) if end > start else a[:0].double()
        out.append(rows @ recipe.dequantize(b[e], b_scale[e], torch.float64).t())
    return torch.cat(out)


def check(kernels, operands, offsets_E, dtype):
    out = kernels.grouped_mm(*operands, offsets_E, dtype)
    end = int(offsets_E[-1])
    assert out.dtype == dtype and out.shape == (operands[0].shape[0], operands[2].shape[1])
    assert (out[end:].view(torch.uint8) == 0xA5).all(), "unused rows were written"
    assert_close(out[:end], reference(*operands, offsets_E))
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS.keys())
def test_groups(kernels, generator, device, groups, dtype):
    """Unused rows must not matter."""
    ends = offsets(*groups, device=device)
    operands = make_operands(generator, 768, 256, 128, len(groups))
    operands[0].view(torch.uint8)[groups[-1] :] = recipe.FP8_NAN
    check(kernels, operands, ends, dtype)
    for N, K in ((128, 256), (256, 128)):  # on Hopper the second is stored transposed
        operands = make_wgrad_operands(generator, 768, N, K)
        for x in operands[::2]:
            x.view(torch.uint8)[:, groups[-1] :] = recipe.FP8_NAN
        check_wgrad(kernels, operands, ends, dtype)


# Tiles of 256 columns, of 128 and both; fewer and more tiles than SMs (3 at most where they are emulated); 1 to 17
# blocks; one and two swizzle groups.
@pytest.mark.parametrize(
    "N, K", [(128, 128), (128, 640), (384, 384), (1408, 128), (256, 2176), (1024 if INTERPRETED else 4096, 256)]
)
@pytest.mark.parametrize("M", [256, 1920])
def test_shapes(kernels, generator, M, N, K):
    operands = make_operands(generator, M, N, K, 2)
    check(kernels, operands, offsets(128, M, device=operands[0].device), torch.bfloat16)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scales_that_are_numbers(kernels, generator, dtype, transposed):
    """A weight's fp32 or bf16 scales, also as a transposed view. Powers of two give the result of e8m0 bit for bit."""
    a, a_scale, b, b_scale = make_operands(generator, 512, 384, 384, 2)
    groups, powers = offsets(128, 384, device=a.device), recipe.exp2(recipe.exponent(b_scale))
    scales = [b_scale, powers.to(dtype), (powers * (1 + randn(generator, *powers.shape).abs())).to(dtype)]
    if transposed:
        b = b.view(torch.uint8).transpose(1, 2).contiguous().view(recipe.FP8)
        scales = [scale.transpose(1, 2) for scale in scales]
    want, same, _ = (check(kernels, (a, a_scale, b, scale), groups, torch.float32) for scale in scales)
    assert torch.equal(same[:384], want[:384])


def test_nan_stays_in_its_row(kernels, generator):
    operands = make_operands(generator, 384, 256, 256, 2)
    groups = offsets(128, 384, device=operands[0].device)
    clean = kernels.grouped_mm(*operands, groups, torch.bfloat16)
    operands[0].view(torch.uint8)[[5, 200], 128:] = recipe.FP8_NAN
    operands[1].view(torch.uint8)[[5, 200], 1] = 1
    out = kernels.grouped_mm(*operands, groups, torch.bfloat16)
    assert out[[5, 200]].isnan().all()
    others = [m for m in range(384) if m not in (5, 200)]
    torch.testing.assert_close(out[others], clean[others], rtol=0, atol=0)


def test_result_does_not_depend_on_the_other_rows(kernels, generator):
    a, a_scale, b, b_scale = make_operands(generator, 512, 128, 256, 2)
    both = kernels.grouped_mm(a, a_scale, b, b_scale, offsets(256, 512, device=a.device), torch.float32)
    scale = recipe.column_major(a_scale[256:])
    alone = kernels.grouped_mm(a[256:], scale, b, b_scale, offsets(0, 256, device=a.device), torch.float32)
    torch.testing.assert_close(both[256:], alone, rtol=0, atol=0)


# --- out[e] = sum of a[m]^T b[m] --------------------------------------------------------------------------------------


def make_wgrad_operands(generator, M, N, K, magnitude=1.0):
    """Blocks of 128x128 differ in magnitude, so that a neighbour's scale is an error.

    Rows in a block do not. The tensor cores lose products that are small against the largest one of a block. Where rows
    differ by random factors of 4, that is 4e-4 of the result, on a GPU and in a model of its sums.
    """

    def make(columns):
        row_blocks, column_blocks = (2.0 ** (2 * randn(generator, n // BLOCK)) for n in (M, columns))
        magnitudes = (row_blocks[:, None] * column_blocks).repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        return randn(generator, M, columns) * magnitudes

    (x, x_scale), (dy, dy_scale) = recipe.quantize_rows(make(K)), recipe.quantize_rows(make(N) * magnitude)
    xT, xT_scale, dyT, dyT_scale = recipe.transpose_pair(x, x_scale, dy, dy_scale, offsets(M, device=x.device))
    return dyT, dyT_scale, xT, xT_scale


def wgrad_reference(aT, aT_scale, bT, bT_scale, offsets_E):
    a, b = recipe.dequantize(aT, aT_scale, torch.float64), recipe.dequantize(bT, bT_scale, torch.float64)
    return torch.stack([a[:, start:end] @ b[:, start:end].t() for _, (start, end) in by_expert(offsets_E)])


def check_wgrad(kernels, operands, offsets_E, dtype):
    out = kernels.grouped_mm_wgrad(*operands, offsets_E, dtype)
    end = int(offsets_E[-1])
    used = [x[:, : end if x.dtype == recipe.FP8 else end // BLOCK] for x in operands]
    assert out.dtype == dtype and out.shape == (offsets_E.shape[0], operands[0].shape[0], operands[2].shape[0])
    ref = wgrad_reference(*used, offsets_E) if end else torch.zeros_like(out, dtype=torch.float64)
    assert_close(out, ref)
    for e, (start, stop) in by_expert(offsets_E):
        assert stop > start or not out[e].any(), "an expert without rows must get zeros"
    return out


@pytest.mark.parametrize("N, columns", [(128, 16), (256, 192), (384, 320)])
def test_without_padding(kernels, generator, N, columns):
    """A weight's padded rows give columns that are not stored."""
    operands = make_operands(generator, 384, N, 256, 2)
    groups = offsets(128, 384, device=operands[0].device)
    whole = kernels.grouped_mm(*operands, groups, torch.bfloat16)
    part = kernels.grouped_mm(*operands, groups, torch.bfloat16, columns)
    assert part.is_contiguous() and torch.equal(part, whole[:, :columns])


@pytest.mark.parametrize("dtype, parts, N, K, rows, columns", [
    *((dtype, *sizes) for dtype in DTYPES for sizes in ((1, 256, 384, 192, 320), (2, 512, 384, 256, 320))),
    *((DTYPES[0], *sizes) for sizes in ((1, 384, 128, 272, 16), (2, 256, 256, 80, 256), (2, 768, 384, 384, 384))),
    *((DTYPES[1], *sizes) for sizes in ((1, 128, 128, 64, 64), (1, 256, 384, 256, 328), (2, 512, 128, 144, 64))),
])  # fmt: skip
@pytest.mark.parametrize("layout", recipe.WGRAD_LAYOUTS)
def test_wgrad_of_padded_weights(kernels, generator, layout, dtype, parts, N, K, rows, columns):
    """The rows and columns that pad each matrix of an expert are not stored, nor do they hit its neighbours. Gate's
    gradients, then up's, have the bits of separate results. Of matrices of 256 rows the Hopper kernel stores the tiles
    transposed."""
    operands = dy, dy_scale, *x = make_wgrad_operands(generator, 384, N, K)
    groups = offsets(128, 128, 384, device=dy.device)
    each = zip(dy.chunk(parts), dy_scale.chunk(parts), strict=True)
    whole = torch.stack([kernels.grouped_mm_wgrad(*part, *x, groups, dtype) for part in each])[:, :, :rows, :columns]
    got = kernels.grouped_mm_wgrad(*operands, groups, dtype, parts, rows, columns, layout)
    want = whole.flatten(0, 1) if layout == "apart" else whole.transpose(0, 1).flatten(1, 2)
    assert got.is_contiguous()
    if layout == "transposed":  # the operands change places, and on a CPU the order of the sums with them
        torch.testing.assert_close(got, want.transpose(1, 2), rtol=1e-2, atol=1e-5 * float(want.abs().max()))
    else:
        assert torch.equal(got, want)


@pytest.mark.parametrize("N, K, groups", [
    *((N, K, (128, 256)) for N, K in ((128, 128), (128, 640), (384, 384), (2176, 384), (512, 384))),
    # On Hopper the producer fetches a long tile's successor towards its end, not after the first blocks.
    (256, 384, (2176, 2176, 2304, 4096)),
])  # fmt: skip
def test_wgrad_shapes(kernels, generator, N, K, groups):
    operands = make_wgrad_operands(generator, groups[-1], N, K)
    check_wgrad(kernels, operands, offsets(*groups, device=operands[0].device), torch.float32)


def test_wgrad_scales_of_any_strides(kernels, generator):
    """Of both operands, along rows and along blocks."""
    a, a_scale, b, b_scale = make_wgrad_operands(generator, 384, 512, 256)
    views = []
    for scale in (a_scale, b_scale):
        wide = scale.view(torch.uint8).new_full((2 * scale.shape[0], 3 * scale.shape[1]), 200)
        wide[::2, ::3] = scale.view(torch.uint8)
        views.append(wide.view(recipe.E8M0)[::2, ::3])
    check_wgrad(kernels, (a, views[0], b, views[1]), offsets(128, 384, device=a.device), torch.float32)


@pytest.mark.parametrize("magnitude", [1e-10, 1e-30, 1e30])
def test_magnitudes(kernels, generator, device, magnitude):
    group = offsets(128, device=device)
    check(kernels, make_operands(generator, 128, 128, 256, 1, magnitude), group, torch.float32)
    check_wgrad(kernels, make_wgrad_operands(generator, 128, 128, 128, magnitude), group, torch.float32)


@pytest.mark.parametrize("by", [90, -90])
def test_wgrad_scales_of_opposite_size(kernels, generator, by):
    """Factors near the largest and the smallest fp32 number, whose product is an ordinary number."""
    aT, aT_scale, bT, bT_scale = make_wgrad_operands(generator, 128, 128, 128)
    scales = [(s.view(torch.uint8) + n).view(recipe.E8M0) for s, n in ((aT_scale, by), (bT_scale, -by))]
    check_wgrad(kernels, (aT, scales[0], bT, scales[1]), offsets(128, device=aT.device), torch.float32)


# --- the layers' real shapes ------------------------------------------------------------------------------------------

LAYERS = {  # M, E, D, H
    "671B, 32 ranks": (32768, 8, 7168, 2048),
    "16B, 1 rank": (98304, 64, 2048, 1408),
    "16B, 8 ranks": (32768, 8, 2048, 1408),
    "16B, 32 ranks": (32768, 2, 2048, 1408),
}


def uneven_groups(M, E, device):
    """Group ends for groups of 0.7 to 1.3 times the average, in multiples of 128; about M rows."""
    size = torch.linspace(0.7, 1.3, E) * (M / E / BLOCK)
    return (size.round().long() * BLOCK).cumsum(0).clamp(max=M).to(torch.int32).to(device)


@pytest.mark.gpu
@pytest.mark.parametrize("M, E, D, H", LAYERS.values(), ids=LAYERS.keys())
def test_layer(kernels, generator, device, M, E, D, H):
    groups = uneven_groups(M, E, device)
    for N, K in ((2 * H, D), (D, H), (H, D), (D, 2 * H)):
        check(kernels, make_operands(generator, M, N, K, E), groups, torch.bfloat16)
    for N, K in ((2 * H, D), (D, H)):
        operands = make_wgrad_operands(generator, M, N, K)
        check_wgrad(kernels, operands, groups, torch.bfloat16)
        check_wgrad(kernels, operands, groups, torch.float32)


# More tiles than half the CTAs, so that not all are computed as halves.
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("N, K, parts", [(2048, 1408, 1), (1408, 2048, 1), (1024, 1408, 2)])
@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS.keys())
def test_wgrad_groups_of_whole_tiles(kernels, generator, groups, N, K, parts, dtype):
    operands = make_wgrad_operands(generator, 768, N, K)
    ends = offsets(*groups, device=operands[0].device)
    whole = check_wgrad(kernels, operands, ends, dtype)
    by_part = kernels.grouped_mm_wgrad(*operands, ends, dtype, parts)
    assert torch.equal(by_part, torch.cat(whole.chunk(parts, dim=1)))


@pytest.mark.gpu
def test_many_rows_and_experts(kernels, generator, device):
    """2**20 rows of 256 experts: offsets in bytes exceed 31 bits."""
    M, N, K = 2**20, 128, 2176
    groups = uneven_groups(M, 256, device)
    check(kernels, make_operands(generator, M, N, K, 256), groups, torch.bfloat16)


# --- beside other work: CTAs take their tiles from a counter ----------------------------------------------------------


@pytest.fixture
def gemms(generator):
    """Both kernels, with more work tiles than SMs, and their results when nothing else runs."""
    if not HOPPER:
        pytest.skip("needs a Hopper GPU")
    groups = offsets(1024, 4096, device="cuda")
    operands = make_operands(generator, 4096, 2048, 512, 2)
    wgrad_operands = make_wgrad_operands(generator, 4096, 1408, 2048)
    runs = [
        lambda: grouped_mm.grouped_mm(*operands, groups, torch.bfloat16),
        lambda: grouped_mm.grouped_mm_wgrad(*wgrad_operands, groups, torch.bfloat16),
    ]
    return runs, [run() for run in runs]


def assert_same(results, expected):
    torch.cuda.synchronize()
    for result, right in zip(results, expected, strict=True):
        assert torch.equal(result, right)
    assert all(counter.item() == 0 for counter in gemm_launch._stream_counters.values())


@pytest.mark.gpu
@pytest.mark.parametrize("num_sms", [1, 16, 131])
def test_beside_busy_sms(gemms, num_sms):
    runs, expected = gemms
    busy = torch.cuda.Stream()
    for _ in range(3):
        with torch.cuda.stream(busy):
            occupy(num_sms, 0.5)
        assert_same([run() for run in runs], expected)


@pytest.mark.gpu
def test_on_streams_beside_each_other(gemms):
    runs, expected = gemms
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda._sleep(40_000_000)  # the host is slower than the GPU: all are launched before any runs
    results = []
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
    for _ in range(3):
        for stream in streams:
            with torch.cuda.stream(stream):
                results += [run() for run in runs]
    assert_same(results, 9 * expected)


@pytest.mark.gpu
@pytest.mark.parametrize("left", [True, False], ids=["a counter each", "no counters left"])
def test_graphs_beside_each_other(gemms, monkeypatch, left):
    runs, expected = gemms
    if not left:
        monkeypatch.setattr(gemm_launch, "_free_counters", {})
    graphs, results = [torch.cuda.CUDAGraph() for _ in range(3)], []
    for graph in graphs:
        with torch.cuda.graph(graph):
            results += [run() for run in 3 * runs]
    for _ in range(3):
        for graph in graphs:
            with torch.cuda.stream(torch.cuda.Stream()):
                graph.replay()
        assert_same([run() for run in runs], expected)
        assert_same(results, 9 * expected)
