"""The grouped GEMMs compile for sm_90 to asynchronous tensor core instructions, without spills, for three models.

Those in plain Triton also compile for other GPUs, with whatever registers they need.
"""

import os
import re

import pytest
import torch

from titan_fp8moe.kernels.gemm import grouped_mm as gemms
from titan_fp8moe.recipe import E8M0, FP8, SCALE_BITS, TILE

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("compiling needs TRITON_INTERPRET unset", allow_module_level=True)

from tests.offline_compile import record_launches

MODELS = {  # M, E, D, H
    "smallest": (256, 2, 128, 128),
    "16B": (98304, 64, 2048, 1408),
    "671B": (32768, 8, 7168, 2048),
}
DTYPES = [torch.bfloat16, torch.float32]
# A result's dtype changes how a tile is stored, whatever the sizes.
MODELS_AND_DTYPES = [(model, dtype) for model in MODELS for dtype in DTYPES if dtype is DTYPES[0] or model == "16B"]
# Those that differ: 16B's have odd numbers of K blocks or narrow tiles, and more experts than a warp has lanes. Other
# GEMMs of 16B and 671B had the same registers, and fewer instructions or up to 1% more.
GEMMS = {"smallest": ["forward 1", "forward 2", "dgrad 1"], "16B": ["forward 2", "dgrad 2"], "671B": ["dgrad 1"]}
WGRADS = {"smallest": ["wgrad 1", "wgrad 2"], "16B": ["wgrad 1", "wgrad 2, 2 experts"], "671B": ["wgrad 1"]}
SHARED_MEMORY = 227 * 1024  # bytes that a CTA may have


@pytest.fixture(params=["Hopper", "plain"])
def kernels(request, monkeypatch):
    monkeypatch.setattr(gemms, "is_hopper", lambda x: request.param == "Hopper")
    return gemms


def meta(*shape, dtype):
    return torch.empty(*shape, dtype=dtype, device="meta")


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


@pytest.mark.parametrize(("model", "dtype"), MODELS_AND_DTYPES)
@pytest.mark.parametrize("scales", SCALE_BITS)
def test_grouped_mm(model, kernels, dtype, scales):
    M, E, D, H = MODELS[model]
    sizes = {"forward 1": (2 * H, D), "forward 2": (D, H), "dgrad 2": (H, D), "dgrad 1": (D, 2 * H)}
    for name in GEMMS[model]:
        N, K = sizes[name]
        a, a_scale = meta(M, K, dtype=FP8), meta(K // TILE, M, dtype=E8M0).t()
        b, b_scale = meta(E, N, K, dtype=FP8), meta(E, N // TILE, K // TILE, dtype=scales)
        offsets_E = meta(E, dtype=torch.int32)
        check(f"{model} {name} {dtype} {scales}", kernels.grouped_mm, a, a_scale, b, b_scale, offsets_E, dtype)


@pytest.mark.parametrize(("model", "dtype"), MODELS_AND_DTYPES)
def test_wgrad(model, kernels, dtype):
    M, experts, D, H = MODELS[model]
    sizes = {
        "wgrad 1": (experts, 2 * H, D, 2),
        "wgrad 2": (experts, D, H, 1),
        "wgrad 2, 2 experts": (2, D, H, 1),
    }
    for name in WGRADS[model]:
        E, N, K, parts = sizes[name]
        a, b = meta(N, M, dtype=FP8), meta(K, M, dtype=FP8)
        a_scale, b_scale = (meta(n // TILE, M // TILE, dtype=E8M0) for n in (N, K))
        offsets_E = meta(E, dtype=torch.int32)
        check(f"{model} {name} {dtype}", kernels.grouped_mm_wgrad, a, a_scale, b, b_scale, offsets_E, dtype, parts)


@pytest.mark.parametrize("N, K, rows, columns, layout, dtype", [
    *((5888, 2944, 5760, 2880, layout, dtype) for layout in ("joined", "transposed") for dtype in DTYPES),
    (2944, 2816, 2880, 2816, "joined", DTYPES[1]),
])  # fmt: skip
def test_wgrad_of_padded_weights(kernels, N, K, rows, columns, layout, dtype):
    """gpt-oss, and Gemma 4, one of whose two matrices a launch fills."""
    M, offsets_E = 8192, meta(8, dtype=torch.int32)
    a, b = meta(N, M, dtype=FP8), meta(K, M, dtype=FP8)
    a_scale, b_scale = (meta(n // TILE, M // TILE, dtype=E8M0) for n in (N, K))
    args = a, a_scale, b, b_scale, offsets_E, dtype, 1, rows, columns, layout
    check(f"wgrad {rows}x{columns} {layout} {dtype}", kernels.grouped_mm_wgrad, *args)


@pytest.mark.parametrize(
    "capability, shared_memory, instruction",
    [
        (89, 99 * 1024, r"mma\.sync\.\S*\.e4m3\.e4m3\."),
        (120, 99 * 1024, r"mma\.sync\.\S*e4m3\.e4m3\."),
        (100, SHARED_MEMORY, r"tcgen05\.mma\.\S*kind::f8f6f4"),
    ],
)
def test_plain_on_other_gpus(capability, shared_memory, instruction, monkeypatch):
    monkeypatch.setattr(gemms, "is_hopper", lambda x: False)
    M, E, D, H = MODELS["16B"]
    N, K, offsets_E = 2 * H, D, meta(E, dtype=torch.int32)
    a, b, column_major = meta(M, K, dtype=FP8), meta(E, N, K, dtype=FP8), meta(K // TILE, M, dtype=E8M0).t()
    forward = a, column_major, b, meta(E, N // TILE, K // TILE, dtype=E8M0), offsets_E, torch.bfloat16
    launches = record_launches(gemms.grouped_mm, *forward)
    a_scale, b_scale = (meta(n // TILE, M // TILE, dtype=E8M0) for n in (N, K))
    wgrad = meta(N, M, dtype=FP8), a_scale, meta(K, M, dtype=FP8), b_scale, offsets_E, torch.float32
    launches += record_launches(gemms.grouped_mm_wgrad, *wgrad)
    for launch in launches:
        kernel = launch.compile(capability)
        assert kernel.shared <= shared_memory, kernel
        assert re.search(instruction, kernel.asm["ptx"]), f"{kernel}: products are not on the fp8 tensor cores"
