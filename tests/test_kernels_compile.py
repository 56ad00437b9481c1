"""Every data-movement kernel compiles for sm_90 at the sizes of both models, without spills."""

import os
import re

import pytest
import torch

from titan_fp8moe.kernels import permute, quantize, swiglu, transpose
from titan_fp8moe.ops.permute import payload_width
from titan_fp8moe.recipe import E8M0, FP8, TILE

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("compiling needs TRITON_INTERPRET unset", allow_module_level=True)

from tests.offline_compile import record_launches

BF16, FP32, INT32 = torch.bfloat16, torch.float32, torch.int32
MODELS = {"16B": (98304, 2048, 1408, 64), "671B": (32768, 7168, 2048, 8)}  # M, D, H, E
TOP_K, T = 8, 12288


def meta(*shape, dtype):
    return torch.empty(*shape, dtype=dtype, device="meta")


def rows(M, D):
    """(M, D) e4m3 and column-major scales."""
    return meta(M, D, dtype=FP8), meta(D // TILE, M, dtype=E8M0).t()


def calls(M, D, H, E):
    """(name, launch function, arguments) of every kernel variant training launches."""
    offsets_E, score_M, index_M = meta(E, dtype=INT32), meta(M, dtype=FP32), meta(M, dtype=INT32)
    h, d = meta(M, 2 * H, dtype=BF16), meta(M, H, dtype=BF16)
    y, payload = meta(M, D, dtype=BF16), meta(M, 2 * D + 16, dtype=torch.uint8)
    q, scale = meta(T, D, dtype=FP8), meta(T, D // TILE, dtype=E8M0)
    for dtype in (BF16, FP32):
        yield f"quantize_rows {dtype}", quantize.quantize_rows, (meta(T, D, dtype=dtype),)
        pair, w2 = [meta(E, H, D, dtype=dtype)] * 2, [meta(E, D, H, dtype=dtype)]
        yield f"quantize_weight plain {dtype}", quantize.quantize_weight, (pair, True, False)
        yield f"quantize_weight transposed {dtype}", quantize.quantize_weight, (w2, False, True)
        yield f"quantize_weight both {dtype}", quantize.quantize_weight, (pair, True, True)
    for mode in ("balanced", "scaling_aware", "requantize"):
        yield f"transpose w13 {mode}", transpose.transpose_pair, (*rows(M, D), *rows(M, 2 * H), offsets_E, mode)
        yield f"transpose w2 {mode}", transpose.transpose_pair, (*rows(M, H), *rows(M, D), offsets_E, mode)
    for first in (False, True):
        for keep_h in (False, True):
            yield f"swiglu {first} {keep_h}", swiglu.swiglu_quantize, (h, score_M, offsets_E, first, keep_h)
        for kept in ((h, None), rows(M, 2 * H)):
            args = (d, *kept, score_M, offsets_E, first)
            yield f"swiglu backward {first} {kept[0].dtype}", swiglu.swiglu_quantize_backward, args
    for sources in (1, 32):
        counts = meta(sources, E, dtype=INT32)
        for slots in (None, index_M):
            args = (counts, score_M, slots, M, TOP_K, M + TILE * E)
            yield f"expert_layout {sources} {slots is None}", permute.expert_layout, args
    yield "permute", permute.permute_rows, (q, scale, index_M, offsets_E)
    for dtype in (BF16, FP32):
        yield f"unpermute {dtype}", permute.unpermute_sum, (y, meta(T, TOP_K, dtype=INT32), dtype)
    received = payload[:, : 2 * D].view(BF16)
    yield "unpermute payload", permute.unpermute_sum, (received, meta(T, TOP_K, dtype=INT32), BF16)
    for score in (None, score_M):
        args = (q, scale, score, index_M, TOP_K, payload_width(D))
        yield f"pack_dispatch {score is None}", permute.pack_dispatch, args
        yield f"pack_combine {score is None}", permute.pack_combine, (y, score, index_M)


@pytest.mark.parametrize("model", MODELS)
def test_no_spills(model):
    for name, function, args in calls(*MODELS[model]):
        launches = record_launches(function, *args)
        assert launches, name
        for launch in launches:
            kernel = launch.compile()
            print(f"{name:36} {kernel.name:28} {kernel.registers:4} registers {kernel.shared:6} B shared {launch.grid}")
            assert kernel.spills == kernel.stack == 0, (name, kernel)
            assert all(n <= 65535 for n in launch.grid[1:]), (name, launch.grid)


def test_vector_access():
    """Rows move in 16-byte pieces: divisibility is not lost on the way from a launch to the kernel."""
    M, D, H, E = MODELS["16B"]
    for name, function, args in calls(M, D, H, E):
        for launch in record_launches(function, *args):
            kernel = launch.compile()
            if kernel.name in ("_runs_kernel", "_layout_kernel", "_row_gauge_kernel"):
                continue  # no rows
            wide = r"ld\.global\S*\.v4\.b32|cp\.async\.cg\.shared\.global"  # 16 bytes, the second when pipelined
            assert re.search(wide, kernel.asm["ptx"]), (name, kernel)
            assert "ftz" not in kernel.asm["ptx"], f"{name}: subnormals would be flushed"


def test_converted_bytes_stay_in_words():
    """No byte is taken out of a pair of e4m3 that one instruction converted: where it is also merged with another pair
    into a word, ptxas 12.8 (Triton 3.6 and 3.7) gets the byte wrong, silently."""
    for name, function, args in calls(*MODELS["16B"]):
        for launch in record_launches(function, *args):
            ptx = launch.compile().asm["ptx"]
            pairs = set(re.findall(r"cvt\.rn\.satfinite\.e4m3x2\.\S+\s+(%rs\d+)", ptx))
            taken = set(re.findall(r"shr\.u16\s+%rs\d+, (%rs\d+), 8", ptx))
            assert not pairs & taken, name
