"""The public grouped_mm: its numbers, gradients, groups of every size, layouts, compilation and errors."""

import re
import warnings

import pytest
import torch

from experiments.reference import relative_error
from tests.layer import DEVICE
from titan_fp8moe import grouped_mm, recipe
from titan_fp8moe.nn.grouped_mm import _GroupedMM

K, N = 256, 128
BF16 = torch.bfloat16
# FP8's rounding: the relative error of a product of two quantized normal operands is 3.7%.
TOLERANCE = 0.045


def inputs(sizes, unused=0, transposed=True, dtype=BF16):
    """x, w, offs and the output's gradient; ``unused`` rows follow the last group."""
    M = sum(sizes) + unused
    offs = torch.tensor(sizes, device=DEVICE).cumsum(0).int()
    x, dy = torch.randn(M, K, device=DEVICE, dtype=BF16), torch.randn(M, N, device=DEVICE, dtype=BF16)
    w = torch.randn(len(sizes), *((N, K) if transposed else (K, N)), device=DEVICE, dtype=dtype) * 0.05
    return x.requires_grad_(), (w.transpose(1, 2) if transposed else w).detach().requires_grad_(), offs, dy


def exact(x, w, offs, dy):
    """Output and gradients in float64; zeros for rows at and past offs[-1]."""
    x, w, dy = (t.detach().double() for t in (x, w, dy))
    y, dx, dw = torch.zeros_like(dy), torch.zeros_like(x), torch.zeros_like(w)
    start = 0
    for e, end in enumerate(offs.tolist()):
        rows = slice(start, end)
        y[rows], dx[rows], dw[e] = x[rows] @ w[e], dy[rows] @ w[e].T, x[rows].T @ dy[rows]
        start = end
    return y, dx, dw


def step(x, w, offs, dy, function=grouped_mm):
    y = function(x, w, offs)
    return y.detach(), *torch.autograd.grad(y, (x, w), dy)


@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize(
    ("sizes", "unused"), [([0, 1, 129, 0, 128, 40], 0), ([0, 0, 300], 70), ([5, 0, 0], 3), ([0, 0], 9), ([0], 0)]
)
def test_against_float64(sizes, unused, transposed):
    args = inputs(sizes, unused, transposed)
    for got, want in zip(step(*args), exact(*args), strict=True):
        assert got.dtype == BF16 and got.shape == want.shape
        assert not got[(want == 0).all(-1)].any()  # unused rows and empty experts are zeros, not what memory held
        if want.any():
            assert relative_error(got, want) < TOLERANCE
    x, w, offs, dy = args
    if sum(sizes):  # of the recipe's values, which the tolerance of FP8 alone would not show
        x_8, w_8 = recipe.dequantize(*recipe.quantize_rows(x)), recipe.dequantize(*recipe.quantize_weight(w))
        assert relative_error(grouped_mm(x, w, offs).detach(), exact(x_8, w_8, offs, dy)[0]) < 3e-3


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("transposed", [True, False])
def test_gradients_have_the_weights_dtype_and_layout(transposed, dtype):
    x, w, offs, dy = inputs([3, 200], transposed=transposed, dtype=dtype)
    _, _, dw = step(x, w, offs, dy)
    assert dw.dtype == dtype and dw.stride() == w.stride()
    assert (dtype == torch.float32) != torch.equal(dw, dw.bfloat16().to(dtype))  # fp32 ones are not rounded


def test_only_needed_gradients():
    x, w, offs, dy = inputs([3, 200])
    _, dx, dw = step(x, w, offs, dy)
    y = grouped_mm(x.detach(), w, offs)
    assert torch.equal(torch.autograd.grad(y, w, dy)[0], dw)
    y = grouped_mm(x, w.detach(), offs)
    assert torch.equal(torch.autograd.grad(y, x, dy)[0], dx)
    with torch.no_grad():
        assert not grouped_mm(x, w, offs).requires_grad


def test_compiles_into_one_graph():
    """Other group sizes compile nothing; one more number of rows makes it dynamic."""
    torch._dynamo.reset()
    compiled = torch.compile(lambda *a: grouped_mm(*a).relu(), fullgraph=True, backend="aot_eager")
    eager = lambda *a: grouped_mm(*a).relu()  # noqa: E731
    counts = []
    for sizes in ([3, 97], [100, 0], [60, 70], [10, 140]):
        args = inputs(sizes)
        for a, b in zip(step(*args, function=compiled), step(*args, function=eager), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-3)
        counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert counts[1] == counts[0] and counts[3] == counts[2] <= counts[0] + 1


def test_wrong_ends_touch_no_other_memory():
    """Where they are not checked, rows beyond x are never read and no group is negative."""
    x, w, _, dy = inputs([3, 200])
    for ends in ([500, 900], [150, 20], [-5, 203]):
        offs = torch.tensor(ends, dtype=torch.int32, device=DEVICE)
        y, dx, dw = step(x, w, offs, dy, function=_GroupedMM.apply)
        assert y.isfinite().all() and dx.isfinite().all() and dw.isfinite().all()


@pytest.mark.skipif(DEVICE == "cuda", reason="nothing waits for the GPU")
def test_counts_in_place_of_ends():
    x, w, _, _ = inputs([16, 16, 16, 16])

    def call(*offs):
        return grouped_mm(x, w, torch.tensor(offs, dtype=torch.int32))

    for offs in ([30, 4, 10, 20], [10, 20, 30, 65], [-1, 20, 30, 64]):
        with pytest.raises(ValueError, match=r"counts\.cumsum\(0"):
            call(*offs)
    with pytest.warns(UserWarning, match=r"counts\.cumsum\(0"):
        call(16, 16, 16, 16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(16, 32, 48, 64)
        call(0, 0, 0, 64)
        call(1, 2, 3, 4)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("x", lambda x: x.float(), "x must be bf16"),
        ("x", lambda x: x[:, :128], "x must be (M, K), w (E, K, N)"),
        ("x", lambda x: x[:1].expand(2**21, K), "kernels take at most 2097024"),
        ("w", lambda w: w.transpose(1, 2), "as w.transpose(1, 2)"),
        ("w", lambda w: w[0], "w (E, K, N)"),
        ("w", lambda w: w[:1], "offs (E,)"),
        ("w", lambda w: w[..., :64], "K and N must be multiples of 128"),
        ("w", lambda w: w.half(), "w bf16 or fp32"),
        ("offs", lambda offs: offs.long(), "use offs.int()"),
        ("offs", lambda offs: offs.to("meta"), "must be on one device"),
    ],
)
def test_errors(name, change, message):
    x, w, offs, _ = inputs([8, 12])
    args = dict(x=x.detach(), w=w.detach(), offs=offs)
    args[name] = change(args[name])
    with pytest.raises(ValueError, match=re.escape(message)):
        grouped_mm(**args)


def test_dtensors_are_refused(group):
    mesh = torch.distributed.init_device_mesh("cpu", (1,))
    w = torch.distributed.tensor.DTensor.from_local(torch.zeros(1, K, N), mesh)
    with pytest.raises(ValueError, match=r"use to_local\(\)"):
        grouped_mm(torch.zeros(4, K, dtype=BF16), w, torch.tensor([4], dtype=torch.int32))


@pytest.mark.gpu
def test_model_size_without_waiting_for_the_gpu():
    """Experts of the 16B model with groups of any size: FP8's errors, and no host-device sync."""
    sizes = torch.randint(0, 700, (64,)).tolist()
    sizes[7], sizes[8] = 0, 1
    offs = torch.tensor(sizes, device=DEVICE).cumsum(0).int()
    x, dy = (torch.randn(sum(sizes), dim, device=DEVICE, dtype=BF16) for dim in (2048, 1408))
    w = (torch.randn(64, 1408, 2048, device=DEVICE, dtype=BF16) * 0.02).transpose(1, 2)
    args = x.requires_grad_(), w.requires_grad_(), offs, dy
    step(*args)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        results = step(*args)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for got, want in zip(results, exact(*args), strict=True):
        assert relative_error(got, want) < TOLERANCE
