"""Numerics statistics: counts what FP8 does to the values of a training step, in its backward.

:func:`collect` starts counting, each layer's backward calls :func:`record`, and :func:`take` stops and returns counts.
They are sums, so they add up over layers, microbatches and ranks; :func:`summarize` turns them into figures.

Only the backward's operands are counted. A forward that activation checkpointing repeats is thus not counted twice, and
evaluation not at all. The central table counts each code with the shift that the transpose applies to it; underflow,
flushing and rounding follow from it on the host.
"""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, cast
from unittest import mock

import torch
from torch import Tensor

from titan_fp8moe import ops, recipe
from titan_fp8moe.kernels.launch import is_recording
from titan_fp8moe.recipe import BLOCK, FP8, FP8_NAN
from titan_fp8moe.rows import Rows

KINDS = ("x", "a", "dy", "dh", "w")
SHIFTS = {"0": (0, 0), "1-3": (1, 3), "4-7": (4, 7), "8-14": (8, 14), "15+": (15, 20)}
"""Bins of the shift: how far the transpose lowers a value's exponent. 15 and more round even a tile's largest value."""

_LIMIT = 20  # larger shifts count as this one, which already sends every value to zero
_UNCOUNTED = _LIMIT + 1  # the shift of values that do not count: padding, tiles of zeros, NaN
_CODES = 128  # of e4m3, without the sign
# Values by shift and code, tiles by scale byte, rows by spread, NaN tiles, nonzero inputs (of weights).
SIZES = ((_UNCOUNTED + 1) * _CODES, 256, 256, 1, 1)
_CHUNK = 1 << 25  # values processed at once, which bounds memory

_collecting = False
_counts: Any = None


def collecting() -> bool:
    """Whether layers should call :func:`record`; not where an op is traced, or runs for its launches alone."""
    return _collecting and not is_recording()


def collect() -> None:
    """Starts counting."""
    global _collecting
    _collecting = True


def forget() -> None:
    """Forgets the counts of a step that is run again, which goes on counting."""
    global _counts
    _counts = None


def paused() -> AbstractContextManager[Any]:
    """Suspends counting inside this context."""
    return mock.patch(f"{__name__}._collecting", False)


def take(device: torch.device | str) -> Tensor:
    """Stops counting and returns the counts, to be added over ranks for :func:`summarize`.

    ``device`` is where zeros are returned if nothing was counted.
    """
    global _collecting, _counts
    counts = _zeros(device) if _counts is None else _counts
    _collecting, _counts = False, None
    return counts


def _zeros(device: torch.device | str) -> Tensor:
    return torch.zeros(len(KINDS), sum(SIZES), dtype=torch.int64, device=device)


Operand = tuple[str, Rows, int, int]
"""An operand of a weight gradient: its kind, of :data:`KINDS`; its rows (M, D) in expert order; equal parts of their
columns, 2 for gate and up; the columns of each part. Others, which pad a part to a multiple of 128, do not count."""


@torch.no_grad()
def record(
    pairs: Sequence[tuple[Operand, Operand]],
    weights: Sequence[Sequence[Tensor | ops.Fp8Weight]],
    offsets_E: Tensor,
    token_M: Tensor | None,
    wgrad: str,
) -> None:
    """Counts one module's backward.

    Args:
        pairs: the input's and the gradient's operand of each weight gradient.
        weights: each GEMM's, bf16 or fp32. Quantized weights (``fp8_all_gather``) are not counted: their original
            values are gone.
        offsets_E: (E,) int32, the end of each expert's group.
        token_M: (M,) int32; rows with -1, padding, do not count.
        wgrad: mode of the transpose, see :class:`titan_fp8moe.config.Fp8FlowMoEConfig`; ``bf16`` shifts nothing.
    """
    global _counts
    if _counts is None:
        _counts = _zeros(offsets_E.device)
    for pair in pairs:
        (_, x, *_), (_, dy, *_) = pair
        live_M = torch.ones_like(x.q[:, 0], dtype=torch.bool) if token_M is None else token_M >= 0
        balance = [0, 0]
        if wgrad == "balanced":
            a_M1 = recipe.balance_exponent(x.scale, dy.scale).unsqueeze(1)
            balance = [-a_M1, a_M1]
        # The blocks' scales come from the op itself; its values are not needed.
        targets = [None, None] if wgrad == "bf16" else ops.transpose_pair(*x, *dy, offsets_E, wgrad)[1::2]
        for (kind, (q, scale), parts, columns), moved, target in zip(pair, balance, targets, strict=True):
            byte_BRG = scale.view(torch.uint8).int().unflatten(0, (-1, BLOCK))
            shift_BRG = torch.zeros_like(byte_BRG)
            if target is not None:
                source_BRG = (recipe.exponent(scale) + moved).unflatten(0, (-1, BLOCK))
                shift_BRG = recipe.exponent(target).t().unsqueeze(1) - source_BRG
            column = torch.arange(q.shape[1], device=q.device)
            counts_GL = (column % (q.shape[1] // parts) < columns).view(-1, BLOCK)
            _add(kind, q, byte_BRG, live_M.view(-1, BLOCK), shift_BRG, counts_GL)

    for ws in weights:
        if isinstance(ws[0], ops.Fp8Weight):
            continue
        q, scale = ops.quantize_weight(*ws)
        byte_BRG = scale.view(torch.uint8).int().flatten(0, 1).unsqueeze(1)
        live_BR, shift_BRG = torch.ones_like(byte_BRG[:, :, 0], dtype=torch.bool), torch.zeros_like(byte_BRG)
        # Padding counts as zeros: underflow is the nonzero inputs without a nonzero code.
        counts_GL = torch.ones(q.shape[2] // BLOCK, BLOCK, dtype=torch.bool, device=q.device)
        _add("w", q, byte_BRG, live_BR, shift_BRG, counts_GL)
        _counts[KINDS.index("w"), -1] += sum(torch.count_nonzero(cast(Tensor, w)) for w in ws)


def _add(kind: str, q: Tensor, byte_BRG: Tensor, live_BR: Tensor, shift_BRG: Tensor, counts_GL: Tensor) -> None:
    """Counts the values of ``q``: B blocks of 128 rows and G of 128 columns, each with R scales.

    Args:
        q: e4m3, as many values as B blocks of 128 rows and 128 * G columns.
        byte_BRG: int32 scale bytes; R is 128 for rows with 1x128 tiles, 1 for weights.
        live_BR: bool, which rows count.
        shift_BRG: int32, by how much the transpose lowers the exponents; arbitrary where nothing counts.
        counts_GL: (G, 128) bool, which columns count.
    """
    values, bytes_, spreads, nan_tiles, _ = _counts[KINDS.index(kind)].split(SIZES)
    B, R, G = byte_BRG.shape
    code_BMGL = q.view(torch.uint8).view(B, BLOCK, G, BLOCK)
    live = live_BR.unsqueeze(2)
    nan = live & (code_BMGL[:, :: BLOCK // R, :, 0] & 0x7F == FP8_NAN)
    nan_tiles += nan.sum()
    # Byte 1 is the scale of tiles of zeros and of NaN.
    held = live & (byte_BRG > 1)
    bytes_ += torch.bincount(torch.where(live & ~nan, byte_BRG, 0).flatten(), minlength=256)
    high, low = torch.where(held, byte_BRG, 0).amax(2), torch.where(held, byte_BRG, 255).amin(2)
    spreads += torch.bincount(torch.where(high > 0, high - low, 255).flatten(), minlength=256)

    step = max(_CHUNK // (BLOCK * BLOCK * G), 1)
    for i in range(0, B, step):
        run = slice(i, i + step)
        shift = torch.where(held[run], shift_BRG[run].clamp(max=_LIMIT), _UNCOUNTED).to(torch.int16).unsqueeze(3)
        # Rows that do not count hold arbitrary bytes: zero their codes, so that counts are reproducible.
        index = (code_BMGL[run] & 0x7F) * live[run].unsqueeze(3) + shift * _CODES
        index = torch.where(counts_GL, index, _UNCOUNTED * _CODES)
        values += torch.bincount(index.flatten(), minlength=values.shape[0])


def summarize(counts: Tensor) -> dict[str, float]:
    """Figures by ``kind/name``, from counts added over ranks.

    * ``underflow``: for w, the share of nonzero parameters that became zero. For the others, the share of zeros in
      tiles that are not all zeros; it includes values that were zero before quantization.
    * ``subnormal``: the share of values with fewer than 3 mantissa bits, in the same tiles.
    * ``nan_tiles``: the number of tiles of NaN; ``zero_tiles``: the share of tiles of zeros among the others.
    * ``exponent_min``, ``_mean``, ``_max``: of the scales of the remaining tiles.
    * ``row_spread_p99``: the 99th percentile, over rows (of blocks, for w), of a row's largest minus smallest exponent.
    * ``shift/BIN``, not for w: the share of nonzero values in each bin of :data:`SHIFTS`.
    * ``flushed``, ``rounded``, not for w: the share of nonzero values that the transpose turns into zero, or into
      another nonzero value.
    """
    figures = {}
    for kind, row in zip(KINDS, counts.cpu(), strict=True):
        if not row.any():  # weights gathered in FP8
            continue
        values, bytes_, spreads, nan_tiles, inputs = (part.double() for part in row.split(SIZES))
        table = values.view(-1, _CODES)
        counted = table[:_UNCOUNTED].sum(0)
        figure = {
            "underflow": _share(inputs - table[:, 1:].sum(), inputs) if kind == "w" else _share(counted[0], counted),
            "subnormal": _share(counted[1:8], counted),
            "nan_tiles": float(nan_tiles),
            "zero_tiles": _share(bytes_[1], bytes_[1:]),
        }
        exponents = [byte - 127 for byte in range(2, 256) if bytes_[byte]]
        mean = float((bytes_[2:] * torch.arange(2 - 127, 256 - 127, device=bytes_.device)).sum() / bytes_[2:].sum())
        total = spreads[:255].cumsum(0)
        p99 = float(torch.searchsorted(total, 0.99 * total[-1])) if total[-1] else math.nan
        figure |= {
            "exponent_min": min(exponents, default=math.nan),
            "exponent_mean": mean,
            "exponent_max": max(exponents, default=math.nan),
            "row_spread_p99": p99,
        }
        if kind != "w":
            shifted = table[:_UNCOUNTED].clone()
            shifted[:, 0] = 0
            for name, (low, high) in SHIFTS.items():
                figure[f"shift/{name}"] = _share(shifted[low : high + 1], shifted)
            flushed, rounded = _transpose_results()
            figure |= {"flushed": _share(shifted[flushed], shifted), "rounded": _share(shifted[rounded], shifted)}
        figures |= {f"{kind}/{name}": value for name, value in figure.items()}
    return figures


def _transpose_results() -> tuple[Tensor, Tensor]:
    """Whether each shift (row) flushes each code (column), or rounds it to a nonzero value; both (21, 128) bool."""
    q = torch.arange(_CODES, dtype=torch.uint8, device="cpu").view(FP8).unsqueeze(0)
    shift = torch.arange(_LIMIT + 1, dtype=torch.int32, device="cpu").unsqueeze(1)
    result = recipe.shift_exponent(q, -shift).float()
    flushed = (result == 0) & (q.float() != 0)
    return flushed, (result * recipe.exp2(shift) != q.float()) & ~flushed & ~q.isnan()


def _share(part: Tensor, whole: Tensor) -> float:
    """NaN if nothing was counted."""
    return float(part.sum() / whole.sum())
