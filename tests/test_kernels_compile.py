"""Every data-movement kernel compiles for sm_90 without spills; sizes that differ in registers, of both models."""

import functools
import os
import re
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch

from tests.specs import SPECS
from titan_fp8moe.dispatch.symmetric import kernels
from titan_fp8moe.dispatch.symmetric.workspace import Sizes, Workspace, capacities
from titan_fp8moe.kernels import permute, quantize, routing, swiglu, transpose
from titan_fp8moe.kernels.sizes import MAX_ROWS
from titan_fp8moe.recipe import E8M0, FP8, STATE_HEADER, TILE, TRANSPOSE_MODES, num_samples, unpack_dispatch
from titan_fp8moe.spec import ExpertSpec, encode

if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("compiling needs TRITON_INTERPRET unset", allow_module_level=True)

from tests.offline_compile import TRITON, Compiled, Launch, get_ptxas, record_launches

BF16, FP32, INT32 = torch.bfloat16, torch.float32, torch.int32
MODELS = {"16B": (98304, 2048, 1408, 64), "671B": (32768, 7168, 2048, 8)}  # M, D, H, E
TOP_K = 8
# They compute indices, or move little.
NO_ROWS = (
    *("_balance_exponent_kernel", "_count_kernel", "_place_rows_kernel", "_place_dispatched_kernel"),
    *("_wait_kernel", "_plan_kernel", "_pull_pairs_kernel"),
    *("_seen_weights_kernel", "_bias_gradient_kernel"),
)


def meta(*shape, dtype):
    return torch.empty(*shape, dtype=dtype, device="meta")


def rows(M, D):
    """(M, D) e4m3 and column-major scales."""
    return meta(M, D, dtype=FP8), meta(D // TILE, M, dtype=E8M0).t()


def calls(M, D, H, E, T=12288):
    """(name, launch function, arguments) of the kernels that training launches, for M rows and T tokens.

    Those of :func:`expert_calls` come for 16B only: for 671B they had the same registers, or up to three fewer.
    """
    if MODELS["16B"][2] == H:
        yield from expert_calls(M, D, H, E)
    offsets_E, score_M, index_M = meta(E, dtype=INT32), meta(M, dtype=FP32), meta(M, dtype=INT32)
    y, payload = meta(M, D, dtype=BF16), meta(M, 2 * D + 16, dtype=torch.uint8)
    dispatched = meta(T, (D + 8 * TOP_K + D // TILE + 15) // 16 * 16, dtype=torch.uint8)
    q, scale = meta(T, D, dtype=FP8), meta(T, D // TILE, dtype=E8M0)
    map_TK, scores_TK = meta(T, TOP_K, dtype=INT32), meta(T, TOP_K, dtype=FP32)
    ids_TK, arrived = meta(T, TOP_K, dtype=torch.int64), unpack_dispatch(dispatched, D, TOP_K)
    flag = meta(16, dtype=torch.uint8)
    for dtype, nan in ((BF16, flag), (FP32, flag), (BF16, None)):
        yield f"quantize_rows {dtype} {nan is None}", quantize.quantize_rows, (meta(T, D, dtype=dtype), nan)
        yield f"quantize_group {dtype} {nan is None}", quantize.quantize_group, (meta(T, D, dtype=dtype), nan)
    for dtype in (BF16, FP32):
        for width in (D - 64, D - 112):  # padded
            x = meta(T, width, dtype=dtype), flag
            yield f"quantize_rows {dtype} {width}", quantize.quantize_rows, x
            yield f"quantize_group {dtype} {width}", quantize.quantize_group, x
    for mode in TRANSPOSE_MODES:
        yield f"transpose w13 {mode}", transpose.transpose_pair, (*rows(M, D), *rows(M, 2 * H), offsets_E, mode)
        for x in ((q, scale), unpack_dispatch(dispatched, D, TOP_K)[:2]):
            args = (*x, *rows(M, 2 * H), offsets_E, mode, index_M)
            yield f"transpose w13 {mode} {x[0].stride(0)}", transpose.transpose_pair, args
        yield f"transpose w2 {mode}", transpose.transpose_pair, (*rows(M, H), *rows(M, D), offsets_E, mode)
    for ranks, experts in ((1, E), (32, E), (256, 1)):
        name = f"{ranks} x {experts}"
        yield f"routing {name}", routing.expert_routing, (ids_TK, scores_TK, ranks * experts, M + TILE * E, True)
        yield f"routing arrived {name}", routing.expert_routing, (*arrived[2:], experts, M + TILE * experts)
        yield f"routing dispatch {name}", routing.dispatch_routing, (ids_TK, ranks, experts, 77, True)
    yield "routing dispatch int32", routing.dispatch_routing, (map_TK, 32, E, 77, True)
    yield "dequantize", quantize.dequantize_rows, (*rows(M, D), offsets_E)
    yield "permute", permute.permute_rows, (q, scale, map_TK, index_M, offsets_E)
    yield "permute payload", permute.permute_rows, (*arrived[:2], map_TK, index_M, offsets_E)
    for dtype in (BF16, FP32):
        yield f"unpermute {dtype}", permute.unpermute_sum, (y, map_TK, dtype)
    yield "unpermute with addend", permute.unpermute_sum, (y, map_TK, BF16, meta(M, D, dtype=BF16))
    row_bias = meta(E, D, dtype=BF16), score_M, offsets_E
    yield "unpermute with a bias", permute.unpermute_sum, (y, map_TK, BF16, None, *row_bias)
    yield "pack_combine with a bias", permute.pack_combine, (y, None, map_TK, *row_bias)
    received = payload[:, : 2 * D].view(BF16)
    yield "unpermute payload", permute.unpermute_sum, (received, map_TK, BF16)
    for ids in (None, map_TK, ids_TK):
        args = (q, scale, index_M, map_TK, ids, None if ids is None else scores_TK, E)
        yield f"pack_dispatch {getattr(ids, 'dtype', None)}", permute.pack_dispatch, args
    for ds in (None, score_M):
        yield f"pack_combine {ds is None}", permute.pack_combine, (y, ds, map_TK)
    yield "unpermute_gradients", permute.unpermute_gradients, (y, meta(M, 1, dtype=FP32), map_TK, BF16)
    args = (y, meta(M, 1, dtype=FP32), map_TK, BF16, meta(M, D, dtype=BF16))
    yield "unpermute_gradients with addend", permute.unpermute_gradients, args
    yield "unpermute_gradients payload", permute.unpermute_gradients, (received, scores_TK, map_TK, BF16)
    yield from symmetric_calls(4, D, E, T)


def expert_calls(M, D, H, E):
    """As :func:`calls`, for the kernels of weights and of activations.

    Without a recomputed operand, gradients of biases or h in fp8 kernels have no more: the first kind's stand for all.
    """
    offsets_E, score_M = meta(E, dtype=INT32), meta(M, dtype=FP32)
    h, d = meta(M, 2 * H, dtype=BF16), meta(M, H, dtype=BF16)
    for dtype in (BF16, FP32):
        stored = meta(E, D - 64, 2 * H - 96, dtype=dtype).transpose(1, 2).chunk(2, 1)
        yield f"quantize_weight halves {dtype}", quantize.quantize_weight, ([*stored], True, True)
        pair, w2 = [meta(E, H, D, dtype=dtype)] * 2, [meta(E, D, H, dtype=dtype)]
        yield f"quantize_weight plain {dtype}", quantize.quantize_weight, (pair, True, False)
        yield f"quantize_weight transposed {dtype}", quantize.quantize_weight, (w2, False, True)
        yield f"quantize_weight both {dtype}", quantize.quantize_weight, (pair, True, True)
        narrow = [meta(E, H - 64, D, dtype=dtype)] * 2, [meta(E, D, H - 64, dtype=dtype)]
        for part, weights in zip(("rows", "columns"), narrow, strict=True):
            yield f"quantize_weight padded {part} {dtype}", quantize.quantize_weight, (weights, True, True)
        for weights, N, K in ((pair, 2 * H, D), (w2, D, H)):
            state = meta(STATE_HEADER + len(weights) * num_samples(weights[0]), dtype=INT32)
            kept = meta(E, N, K, dtype=FP8), meta(E, K, N, dtype=FP8), meta(E, N // TILE, K // TILE, dtype=E8M0)
            args = weights, *kept, state, meta(1, dtype=INT32), False, meta(2, dtype=INT32)
            yield f"refresh_weight {len(weights)} {dtype}", quantize.refresh_weight, args
            args = weights, kept[0], None, kept[2], state, None, False, None
            yield f"refresh_weight forward {len(weights)} {dtype}", quantize.refresh_weight, args
    quantized = (meta(E, H, D, dtype=FP8), meta(E, H // TILE, D // TILE, dtype=E8M0)) * 2
    for plain, transposed in ((True, False), (False, True), (True, True)):
        yield f"join_weight {plain} {transposed}", quantize.join_weight, (*quantized, plain, transposed)
    for spec in SPECS:
        of_spec = meta(M, spec.rows_per_unit * H, dtype=BF16)
        for keep_h in (False, True)[spec is not SPECS[0] :]:
            yield (
                f"{encode(spec)} {keep_h}",
                swiglu.swiglu_quantize,
                (of_spec, score_M, offsets_E, spec, keep_h),
            )
        for kept in ((of_spec, None), rows(*of_spec.shape))[spec is not SPECS[0] :]:
            for again in (False, True)[spec is not SPECS[0] :]:
                args = (d, *kept, score_M, offsets_E, spec, again)
                yield f"{encode(spec)} backward {kept[0].dtype} {again}", swiglu.swiglu_quantize_backward, args
    b2, rows_of_dy = meta(E, D, dtype=BF16), rows(M, D)
    for spec in SPECS:
        of_spec = meta(M, spec.rows_per_unit * H, dtype=BF16)
        bias = [*[meta(E, H - 64, dtype=BF16)] * spec.rows_per_unit, None][:2]
        yield (
            f"{encode(spec)} biased",
            swiglu.swiglu_quantize,
            (of_spec, score_M, offsets_E, spec, True, *bias),
        )
        for kept in ((of_spec, None), rows(*of_spec.shape)):
            for with_gradients in (False, True)[spec is not SPECS[0] :]:
                output = b2, *rows_of_dy, with_gradients
                args = (d, *kept, score_M, offsets_E, spec, True, *bias, *output)
                yield f"{encode(spec)} backward biased {kept[0].dtype}", swiglu.swiglu_quantize_backward, args
    paired = next(spec for spec in SPECS if spec.activation == "clamped_swiglu")._replace(interleaved=True)
    pair_bias = meta(E, H, 2, dtype=BF16).unbind(2)
    for kept in ((h, None), rows(M, 2 * H)):
        for given in ((), pair_bias):
            output = given and (b2, *rows_of_dy, True)
            args = (d, *kept, score_M, offsets_E, paired, True, *given, *output)
            yield f"interleaved backward {kept[0].dtype}", swiglu.swiglu_quantize_backward, args
    for given in ((), pair_bias):
        yield "interleaved", swiglu.swiglu_quantize, (h, score_M, offsets_E, paired, True, *given)
    for keep_h in (False, True):
        yield f"no router {keep_h}", swiglu.swiglu_quantize, (h, None, offsets_E[:1], ExpertSpec(), keep_h)
    for kept in ((h, None), rows(M, 2 * H)):
        args = (d, *kept, None, offsets_E[:1], ExpertSpec(), True)
        yield f"no router, backward {kept[0].dtype}", swiglu.swiglu_quantize_backward, args


def symmetric_calls(N, D, E, T):
    """As :func:`calls`, for kernels that exchange T tokens of N ranks."""
    sizes = Sizes(N, T, D, TOP_K, E)
    at = Workspace(sizes, N - 1, [meta(sizes.nbytes, dtype=torch.uint8)] * N, lambda: 60.0)
    M, C = capacities(T, TOP_K, N, E, 1.5)
    q, scale, ids_TK = meta(T, D, dtype=FP8), meta(T, D // TILE, dtype=E8M0), meta(T, TOP_K, dtype=torch.int64)
    sent = meta(sizes.sent, dtype=INT32), meta(N, 3 + E, dtype=INT32), M, C
    plan, token_C, row_CK = meta(2, N + 1, dtype=INT32), meta(C, dtype=INT32), meta(C, TOP_K, dtype=INT32)
    token_M, offsets_E = meta(M, dtype=INT32), meta(E, dtype=INT32)
    for ids in (ids_TK, ids_TK.int()):
        yield f"publish {ids.dtype}", kernels.publish, (at, q, scale, (ids, meta(T, TOP_K, dtype=FP32), *sent))
    yield "publish gradients", kernels.publish, (at, q, scale, None)
    yield "wait", kernels.wait, (at, 1)
    yield "plan", kernels.plan, (at,)
    yield "pull_routing", kernels.pull_routing, (at, plan, M, C)
    for keep in (True, False):
        args = at, plan, token_C, row_CK, token_M, offsets_E, keep
        yield f"pull_rows {keep}", kernels.pull_rows, args
    bias = meta(E, D, dtype=BF16), meta(M, dtype=FP32), offsets_E
    args = at, plan, meta(M, D, dtype=BF16), None, row_CK, meta(C, TOP_K, dtype=torch.uint8), *bias
    yield "push_sums with a bias", kernels.push_sums, args
    for ds in (None, meta(M, dtype=FP32)):
        args = at, plan, meta(M, D, dtype=BF16), ds, row_CK, meta(C, TOP_K, dtype=torch.uint8)
        yield f"push_sums {ds is None}", kernels.push_sums, args


class Kernel(NamedTuple):
    """A kernel with the call that launches it."""

    name: str
    function: Callable
    args: tuple
    launch: Launch
    compiled: Compiled


@functools.cache
def compile_all(model: str) -> list[Kernel]:
    found = []
    for name, function, args in calls(*MODELS[model]):
        launches = record_launches(function, *args)
        assert launches, name
        found += [Kernel(name, function, args, launch, launch.compile()) for launch in launches]
    return found


@pytest.mark.parametrize("model", MODELS)
def test_no_spills(model):
    ptxas = get_ptxas(90).version
    for name, function, _, launch, kernel in compile_all(model):
        print(f"{name:36} {kernel.name:28} {kernel.registers:4} registers {kernel.shared:6} B shared {launch.grid}")
        # ptxas 13.4 of Triton 3.9 stores and loads one register per block of 128x128.
        allowed = 8 if TRITON >= (3, 9) and kernel.name == "_shift_pair_kernel" else 0
        if name == "routing dispatch 256 x 1" and ptxas.startswith("13."):  # torch 2.11's, once Inductor has set it
            allowed = 20
        assert kernel.spills <= allowed, (name, kernel)
        # ptxas of CUDA 12.8 converts other values back than those that a kernel has just converted to e4m3.
        if function is swiglu.swiglu_quantize:
            assert "f16x2.e4m3x2" not in kernel.asm["ptx"], name
        if kernel.stack and not kernel.spills:  # ptxas 13 leaves a frame where nothing is kept
            assert not re.search(r"\b(LDL|STL)\b", kernel.asm["sass"]), (name, kernel)
        assert all(n <= 65535 for n in launch.grid[1:]), (name, launch.grid)


def test_grids_of_the_most_rows():
    """No kernel's grid is too large for MAX_ROWS, and one is for more."""

    def largest(M):
        launches = [launch for _, f, args in calls(M, *MODELS["16B"][1:], T=M) for launch in record_launches(f, *args)]
        return max(n for launch in launches for n in launch.grid[1:])

    assert largest(MAX_ROWS) <= 65535 < largest(MAX_ROWS + TILE)


@pytest.mark.parametrize("model", MODELS)
def test_other_numbers_of_tokens_compile_nothing_new(model):
    """Tokens of a rank, dispatched tokens and rows change from step to step."""
    _, D, H, E = MODELS[model]

    def specializations(M, T):
        return {
            (name, i): (launch.kernel.__name__, launch.options, launch.specialization())
            for name, function, args in calls(M, D, H, E, T)
            for i, launch in enumerate(record_launches(function, *args))
        }

    want = specializations(32768, 12288)
    for M, T in ((128, 1), (128 * 37, 77), (128 * 1000, 16384)):
        got = specializations(M, T)
        assert not {key: (got[key], want[key]) for key in want if got[key] != want[key]}, (M, T)


def test_vector_access():
    """Rows move 16 bytes at a time: divisibility is not lost on the way from a launch to the kernel."""
    for name, *_, kernel in compile_all("16B"):
        if kernel.name in NO_ROWS:
            continue
        wide = r"ld\.global\S*\.v4\.b32|cp\.async\.cg\.shared\.global"  # 16 bytes, the second when pipelined
        found = len(re.findall(wide, kernel.asm["ptx"]))
        # A transpose loads 16 KiB of either operand with 128 threads, from other rows if x is gathered.
        assert found == 16 if name.startswith("transpose") else found > 0, (name, kernel)
        assert "ftz" not in kernel.asm["ptx"], f"{name}: subnormals would be flushed"
        if "with a bias" in name:
            assert "fma.rn" not in kernel.asm["ptx"], f"{name}: score * bias would not be rounded, as it is elsewhere"


def test_converted_bytes_stay_in_words():
    """No byte is taken out of a pair of e4m3 that one instruction converted: where it is also merged with another pair
    into a word, ptxas 12.8 (Triton 3.6 and 3.7) gets the byte wrong, silently."""
    for name, *_, kernel in compile_all("16B"):
        pairs = set(re.findall(r"cvt\.rn\.satfinite\.e4m3x2\.\S+\s+(%rs\d+)", kernel.asm["ptx"]))
        taken = set(re.findall(r"shr\.u16\s+%rs\d+, (%rs\d+), 8", kernel.asm["ptx"]))
        assert not pairs & taken, name


@pytest.mark.parametrize(
    "capability, shared_memory",
    # What 89 runs, 120 does too, with as much shared memory.
    [(89, 99 * 1024), (100, 227 * 1024), pytest.param(120, 99 * 1024, marks=pytest.mark.slow)],
)
def test_other_gpus(capability, shared_memory):
    """Every kernel once, with the sizes of whatever launches it first."""
    first = {kernel.launch.kernel: kernel for kernel in reversed(compile_all("16B"))}
    for name, *_, launch, _ in first.values():
        assert launch.compile(capability).shared <= shared_memory, name


def test_ids_are_asserted_only_where_asked():
    """With Triton's debug option, which must not check integers for overflow as well."""
    asserts = {True: set(), False: set()}
    for _, function, args, _, kernel in compile_all("16B"):
        if function is routing.expert_routing and kernel.name == "_count_kernel":
            asserts[args[-1] is True].add(kernel.asm["ptx"].count("call.uni"))
    assert asserts == {True: {1}, False: {0}}
