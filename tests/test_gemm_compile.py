"""The grouped GEMMs compile for sm_90 to asynchronous tensor core instructions, without spills, for three models.

Those in plain Triton also compile for other GPUs, with whatever registers they need.
"""

import re

import pytest
import torch

from tests.offline_compile import meta, record_launches, rows
from titan_fp8moe.kernels.gemm import grouped_mm as gemms
from titan_fp8moe.recipe import BLOCK, E8M0, FP8, SCALE_BITS

# Those that differ: 16B's have odd numbers of K blocks or narrow tiles, and more experts than a warp has lanes. Other
# GEMMs of 16B and 671B had the same registers, and fewer instructions or up to 1% more.
GEMMS = {  # M, E, N, K
    "smallest forward 1": (256, 2, 256, 128),
    "smallest forward 2": (256, 2, 128, 128),
    "smallest dgrad 1": (256, 2, 128, 256),
    "16B forward 2": (98304, 64, 2048, 1408),
    "16B dgrad 2": (98304, 64, 1408, 2048),
    "671B dgrad 1": (32768, 8, 7168, 4096),
}
WGRADS = {  # M, E, N, K, parts; rows, columns and layout of weights that are padded
    "smallest wgrad 1": (256, 2, 256, 128, 2),
    "smallest wgrad 2": (256, 2, 128, 128, 1),
    "16B wgrad 1": (98304, 64, 2816, 2048, 2),
    "16B wgrad 2, 2 experts": (98304, 2, 2048, 1408, 1),
    "671B wgrad 1": (32768, 8, 4096, 7168, 2),
    "gpt-oss joined": (8192, 8, 5888, 2944, 1, 5760, 2880, "joined"),
    "gpt-oss transposed": (8192, 8, 5888, 2944, 1, 5760, 2880, "transposed"),
    "Gemma 4, one of two matrices": (8192, 8, 2944, 2816, 1, 2880, 2816, "joined"),
}
BF16, FP32 = torch.bfloat16, torch.float32
SHARED_MEMORY = 227 * 1024  # bytes that a CTA may have


@pytest.fixture(params=["Hopper", "plain"])
def kernels(request, monkeypatch):
    monkeypatch.setattr(gemms, "is_hopper", lambda x: request.param == "Hopper")
    return gemms


def forward(M, E, N, K, scales=E8M0):
    """Operands of ``grouped_mm``."""
    b_scale = meta(E, N // BLOCK, K // BLOCK, dtype=scales)
    return *rows(M, K), meta(E, N, K, dtype=FP8), b_scale, meta(E, dtype=torch.int32)


def wgrad(M, E, N, K):
    """Operands of ``grouped_mm_wgrad``."""
    a, b = ((meta(n, M, dtype=FP8), meta(n // BLOCK, M // BLOCK, dtype=E8M0)) for n in (N, K))
    return *a, *b, meta(E, dtype=torch.int32)


def check(name, function, *args):
    (launch,) = record_launches(function, *args)
    kernel = launch.compile()
    print(f"{name:28} {kernel.name:26} {kernel.registers:4} registers {kernel.shared:7} B shared")
    assert kernel.spills == kernel.stack == 0, (name, kernel)
    assert kernel.shared <= SHARED_MEMORY, (name, kernel)
    # C7510 and C7514: ptxas waits after every WGMMA, because it cannot tell which registers are in flight.
    assert not kernel.warnings, (name, kernel)
    assert "wgmma.mma_async" in kernel.asm["ptx"], name
    assert "cp.async.bulk.tensor" in kernel.asm["ptx"], f"{name}: operands are not loaded by TMA"
    assert "ftz" not in kernel.asm["ptx"], f"{name}: subnormals would be flushed"


# A result's dtype changes how a tile is stored, and the scales' how they are read, whatever the sizes.
@pytest.mark.parametrize(("name", "dtype", "scales"), [
    *((name, BF16, E8M0) for name in GEMMS),
    *(("16B forward 2", FP32, scales) for scales in SCALE_BITS),
    *((name, BF16, FP32) for name in ("16B dgrad 2", "671B dgrad 1")),
])  # fmt: skip
def test_grouped_mm(kernels, name, dtype, scales):
    check(f"{name} {dtype} {scales}", kernels.grouped_mm, *forward(*GEMMS[name], scales), dtype)


@pytest.mark.parametrize(("name", "dtype"), [
    *((name, BF16) for name in WGRADS),
    *((name, FP32) for name in ("16B wgrad 1", "16B wgrad 2, 2 experts", "gpt-oss joined", "gpt-oss transposed")),
])  # fmt: skip
def test_wgrad(kernels, name, dtype):
    M, E, N, K, *how = WGRADS[name]
    check(f"{name} {dtype}", kernels.grouped_mm_wgrad, *wgrad(M, E, N, K), dtype, *how)


@pytest.mark.parametrize(("N", "K", "parts", "transposed"), [
    (2048, 1408, 1, True), (2816, 1408, 2, False), (2816, 2048, 2, False), (1408, 1408, 1, False), (512, 128, 2, True),
])  # fmt: skip
def test_wgrad_is_transposed_where_that_avoids_narrow_tiles(N, K, parts, transposed):
    """tests/kernels/test_grouped_mm.py has the results of both."""
    (launch,) = record_launches(gemms.grouped_mm_wgrad, *wgrad(512, 2, N, K), BF16, parts)
    assert launch.arguments["TRANSPOSED"] == transposed


@pytest.mark.parametrize("capability, shared_memory, instruction", [
    (89, 99 * 1024, r"mma\.sync\.\S*\.e4m3\.e4m3\."),
    (120, 99 * 1024, r"mma\.sync\.\S*e4m3\.e4m3\."),
    (100, SHARED_MEMORY, r"tcgen05\.mma\.\S*kind::f8f6f4"),
])  # fmt: skip
def test_plain_on_other_gpus(monkeypatch, capability, shared_memory, instruction):
    monkeypatch.setattr(gemms, "is_hopper", lambda x: False)
    sizes = 98304, 64, 2816, 2048
    launches = record_launches(gemms.grouped_mm, *forward(*sizes), BF16)
    launches += record_launches(gemms.grouped_mm_wgrad, *wgrad(*sizes), FP32)
    for launch in launches:
        kernel = launch.compile(capability)
        assert kernel.shared <= shared_memory, kernel
        assert re.search(instruction, kernel.asm["ptx"]), f"{kernel}: products are not on the fp8 tensor cores"
