"""Runs every kernel once at small sizes and compares it with the specification: :func:`self_check`. It leaves out the
kernels of symmetric memory, which need several ranks.

The tests have run on few combinations of GPU, PyTorch and Triton (:data:`TESTED`). On any other, the first kernel of a
process waits for this check (:func:`require_checked`), and so does torchtitan's converter.

Quantization and data movement must agree bit for bit. So must the GEMMs, whose operands here are small integers: every
order of summation gives the same sums. SwiGLU may differ by the last bits of an exponential.
"""

import itertools
import logging
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from titan_fp8moe import ops, recipe
from titan_fp8moe.activations import ACTIVATIONS
from titan_fp8moe.ops import backend
from titan_fp8moe.recipe import BLOCK, E8M0, FP8, SCALE_TILE
from titan_fp8moe.spec import ExpertSpec

logger = logging.getLogger(__name__)

TESTED = {((9, 0), "2.11", "3.6"), ((9, 0), "2.14", "3.8"), ((9, 0), "2.15", "3.9")}
"""Compute capability, PyTorch and Triton on which the tests have run on a GPU."""

OLDEST = (8, 9)
"""The first compute capability with e4m3."""


class Case(NamedTuple):
    """One call of an op. ``nearly``: with an exponential, whose last bits may differ."""

    name: str
    op: Callable[..., Any]
    args: tuple[Any, ...]
    nearly: bool = False


def self_check() -> list[str]:
    """Compares every kernel on the current GPU with the reference on the CPU; takes seconds, without compilation.

    Returns:
        The names of the ops that differ; empty if all agree.

    Raises:
        RuntimeError: if the ops run the reference on the GPU (:func:`titan_fp8moe.ops.emulate`).
    """
    if backend.emulating():
        raise RuntimeError("self_check compares kernels with the reference, but ops.emulate(True) has turned them off")
    with backend.open_gate(), torch.no_grad():
        return [case.name for case in cases() if not agrees(case, "cuda")]


def agrees(case: Case, device: str) -> bool:
    want = run(case, "cpu")
    run(case, device)  # launched by Triton, which compiles; the second time by titan_fp8moe.kernels.launch
    got = run(case, device)
    return len(want) == len(got) and all(same(g.cpu(), w, case.nearly) for g, w in zip(got, want, strict=True))


def run(case: Case, device: str) -> list[Tensor]:
    results = case.op(*(arg.to(device) if isinstance(arg, Tensor) else arg for arg in case.args))
    return [results] if isinstance(results, Tensor) else [t for t in results if t.numel()]


def same(got: Tensor, want: Tensor, nearly: bool = False) -> bool:
    """Bit for bit, or by the norm, of which one e4m3 code in a thousand moves less."""
    if (got.dtype, got.shape) != (want.dtype, want.shape):
        return False
    if nearly:
        return float((got.float() - want.float()).norm()) <= 5e-3 * float(want.float().norm())
    return torch.equal(*(value.contiguous().flatten().view(torch.uint8) for value in (got, want)))


# --- cases ------------------------------------------------------------------------------------------------------------

T, D, H, E, K, RANKS = 140, 256, 128, 4, 2, 2


def cases() -> Iterator[Case]:
    """At least one of every kernel; the same in every run."""
    generator = torch.Generator("cpu").manual_seed(0)
    fp32: Any = dict(dtype=torch.float32, device="cpu", generator=generator)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, **fp32)

    def integers(*shape: int) -> Tensor:
        return torch.randint(-2, 3, shape, device="cpu", generator=generator).float().to(FP8)

    def scales(*shape: int) -> Tensor:
        return torch.randint(125, 131, shape, device="cpu", generator=generator).to(torch.uint8).view(E8M0)

    yield from _quantization(randn)
    ids_TK = torch.rand(T, RANKS * E, **fp32).topk(K).indices
    ids_TK[5] = -1
    scores_TK = torch.rand(T, K, **fp32)
    yield from _movement(randn, ids_TK, scores_TK)
    M, offsets_E = 384, torch.tensor([128, 128, 256, 384], dtype=torch.int32, device="cpu")
    yield from _swiglu(randn, M, offsets_E)
    rows = [(*recipe.quantize_rows(randn(M, width) * 2.0 ** randn(M, 1).round()),) for width in (D, H)]
    x, dy = ((q, recipe.column_major(scale)) for q, scale in rows)
    yield Case("dequantize_rows", ops.dequantize_rows, (*x, offsets_E))
    for mode in recipe.TRANSPOSE_MODES:
        yield Case(f"transpose_pair {mode}", ops.transpose_pair, (*x, *dy, offsets_E, mode))
    for dtype in (torch.bfloat16, torch.float32):
        a = integers(M, D), recipe.column_major(scales(M, D // SCALE_TILE))
        b = integers(E, H, D), scales(E, H // BLOCK, D // BLOCK)
        yield Case(f"grouped_mm {dtype}", ops.grouped_mm, (*a, *b, offsets_E, dtype))
        for numbers in (torch.float32, torch.bfloat16):
            b_scale = 3 * recipe.exp2(recipe.exponent(b[1])).to(numbers)
            args = *a, b[0], b_scale, offsets_E, dtype
            yield Case(f"grouped_mm {dtype} with scales in {numbers}", ops.grouped_mm, args)
        a_t, b_t = ((integers(N, M), scales(N // BLOCK, M // BLOCK)) for N in (H, D))
        yield Case(f"grouped_mm_wgrad {dtype}", ops.grouped_mm_wgrad, (*a_t, *b_t, offsets_E, dtype))
        padded = *a_t, *b_t, offsets_E, dtype, 1, H - 48, D - 64, "joined"
        yield Case(f"grouped_mm_wgrad of padded weights {dtype}", ops.grouped_mm_wgrad, padded)


def _quantization(randn: Callable[..., Tensor]) -> Iterator[Case]:
    x = randn(T, D) * 2.0 ** randn(T, 1).mul(8).round()
    x[3, 5], x[4, 200], x[6] = float("nan"), float("inf"), 0
    x[7, :4] = x.new_tensor([448.0, 448.0000305, 1e-40, -3e38])
    weights = [randn(E, H, D), randn(E, BLOCK, D)]
    for dtype in (torch.bfloat16, torch.float32):
        yield Case(f"quantize_rows {dtype}", ops.quantize_rows, (x.to(dtype),))
        padded = x[:, : D - 48].to(dtype)
        yield Case(f"quantize_rows, padded {dtype}", ops.quantize_rows, (padded,))
        yield Case(f"quantize_group, padded {dtype}", ops.quantize_group, (padded,))
        yield Case(f"quantize_group {dtype}", ops.quantize_group, (x.to(dtype),))
        typed = [w.to(dtype) for w in weights]
        yield Case(f"quantize_weight {dtype}", ops.quantize_weight, (typed[0],))
        yield Case(f"quantize_weight_transposed {dtype}", ops.quantize_weight_transposed, (*typed,))
    quantized = [ops.Fp8Weight(*recipe.quantize_weight(w)) for w in weights]
    args = tuple(t for pair in quantized for t in pair)
    yield Case("join_weight", ops.quantize.join_weights, (*args, True, True))
    numbers = tuple(t if t.dtype == FP8 else recipe.exp2(recipe.exponent(t)) for t in args)
    yield Case("join_weight with scales in fp32", ops.quantize.join_weights, (*numbers, True, True))

    def both(*weights: Tensor) -> tuple[Tensor, ...]:
        q, q_t, scale = ops.quantize_weights([*weights], True, True)
        return q, scale, q_t, scale.transpose(1, 2)

    def refreshed(*weights: Tensor) -> tuple[Tensor, ...]:
        q, scale, q_t, _ = map(torch.empty_like, both(*weights))
        samples, device = len(weights) * recipe.num_samples(weights[0]), q.device
        state = torch.zeros(recipe.STATE_HEADER + samples, dtype=torch.int32, device=device)
        return ops.refresh_weight([*weights], q, q_t, scale, state, None, True, None), q, q_t, scale, state

    def halves(w: Tensor) -> list[Tensor]:
        """Gate and up, 48 rows each, of one weight that is stored transposed."""
        return list(w[:, :96].transpose(1, 2).contiguous().transpose(1, 2).chunk(2, 1))

    yield Case("refresh_weight", refreshed, (weights[0],))
    yield Case("quantize_weight of halves", lambda w: both(*halves(w)), (weights[0],))
    # Without the state: kernels sample weights in the order in which they are stored.
    yield Case("refresh_weight of halves", lambda w: refreshed(*halves(w))[:-1], (weights[0],))


def _movement(randn: Callable[..., Tensor], ids_TK: Tensor, scores_TK: Tensor) -> Iterator[Case]:
    capacity = recipe.row_capacity(T * K, RANKS * E)
    args = ids_TK, scores_TK, RANKS * E, capacity
    yield Case("expert_routing", ops.expert_routing, args)
    offsets_E, token_M, score_M, row_TK = recipe.expert_routing(*args)
    M = int(offsets_E[-1])
    token_M, score_M, tokens = token_M[:M], score_M[:M], recipe.quantize_rows(randn(T, D))
    y, shared = randn(M, D).bfloat16(), randn(T, D).bfloat16()
    yield Case("permute_rows", ops.permute_rows, (*tokens, row_TK, token_M, offsets_E))
    yield Case("unpermute_sum", ops.unpermute_sum, (y, row_TK, torch.bfloat16, shared))
    biased = y, row_TK, torch.bfloat16, None, randn(RANKS * E, D), score_M, offsets_E
    yield Case("unpermute_sum with a bias", ops.unpermute_sum, biased)
    gradients = y, score_M.unsqueeze(1), row_TK, torch.float32
    yield Case("unpermute_gradients", ops.unpermute_gradients, gradients)

    def counts_and_pairs(*args: Any) -> tuple[Tensor, ...]:
        sent_TK, token_C, counts_N = ops.dispatch_routing(*args)
        return sent_TK, token_C[: int(counts_N[:, 0].sum())], counts_N  # the others are undefined

    yield Case("dispatch_routing", counts_and_pairs, (ids_TK, RANKS, E, 77))
    sent_TK, token_C, counts_N = recipe.dispatch_routing(ids_TK, RANKS, E)
    token_C = token_C[: int(counts_N[:, 0].sum())].clone()
    yield Case("pack_dispatch", ops.pack_dispatch, (*tokens, token_C, sent_TK, ids_TK, scores_TK, E))
    yield Case("pack_combine", ops.pack_combine, (y, score_M, row_TK))


def _swiglu(randn: Callable[..., Tensor], M: int, offsets_E: Tensor) -> Iterator[Case]:
    h, d, score_M = randn(M, 2 * H).bfloat16(), randn(M, H).bfloat16(), randn(M).sigmoid()
    for activation, first in itertools.product(ACTIVATIONS, (False, True)):
        expert = ExpertSpec.of(activation, score_before_experts=first)
        columns = h[:, : expert.rows_per_unit * H].contiguous()
        args = columns, score_M, offsets_E, expert, first
        yield Case(f"swiglu_quantize {expert}", ops.swiglu_quantize, args, nearly=True)
        args = d, columns, None, score_M, offsets_E, expert, True
        yield Case(f"swiglu_quantize_backward {expert}", ops.swiglu_quantize_backward, args, nearly=True)
    expert, biases = ExpertSpec(biased=True), (randn(E, H), randn(E, H))
    args = h, score_M, offsets_E, expert, False, *biases
    yield Case("swiglu_quantize with biases", ops.swiglu_quantize, args, nearly=True)
    dy, dy_scale = recipe.quantize_rows(randn(M, D))
    of_output = randn(E, D), dy, recipe.column_major(dy_scale)
    args = d, h, None, score_M, offsets_E, expert, True, *biases, *of_output, True
    yield Case("swiglu_quantize_backward with biases", ops.swiglu_quantize_backward, args, nearly=True)


# --- the gate ---------------------------------------------------------------------------------------------------------


def combination() -> tuple[tuple[int, int], str, str]:
    """The current GPU's compute capability, and the versions of PyTorch and Triton without their last part."""
    torch_version, triton_version = (".".join(v.split(".")[:2]) for v in (torch.__version__, triton.__version__))
    return torch.cuda.get_device_capability(), torch_version, triton_version


def _gpu() -> str:
    return "{} ({}.{})".format(torch.cuda.get_device_name(), *torch.cuda.get_device_capability())


def why_no_kernels() -> str | None:
    """Why the current GPU cannot run the kernels, or None if it can."""
    if torch.cuda.get_device_capability() >= OLDEST and not torch.version.hip:
        return None
    return f"the FP8 kernels need an NVIDIA GPU of compute capability 8.9 or later, but this one is {_gpu()}"


def require_checked() -> None:
    """Lets kernels run on the current GPU: at once where the tests have run, elsewhere after :func:`self_check`.

    Raises:
        ValueError: the GPU has no e4m3, or is AMD's.
        RuntimeError: kernels differ from the specification.
    """
    _, torch_version, triton_version = where = combination()
    if reason := why_no_kernels():
        raise ValueError(
            f"{reason}; run the slow reference with TITAN_FP8MOE_EMULATE=1 in the environment, or "
            "use bf16 (in torchtitan, model.converters = [])"
        )
    if where in TESTED:
        return
    here = f"{_gpu()} with PyTorch {torch_version} and Triton {triton_version}"
    logger.warning(
        f"FP8 kernels were never tested on {here}: comparing them with the specification. They are tuned for "
        "compute capability 9.0, and may be slow on others"
    )
    if wrong := self_check():
        raise RuntimeError(
            f"FP8 kernels differ from the specification on {here}: {', '.join(wrong)}; please report the output of "
            "python -m titan_fp8moe.doctor. Use bf16, other versions, or TITAN_FP8MOE_EMULATE=1"
        )


backend.before_first_kernel(require_checked)
