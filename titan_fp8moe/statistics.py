"""Numerics statistics: what FP8 does to the values of a training step, counted in the backward of a step that asks.

Everything is counted from the backward's operands, so a forward that activation checkpointing repeats is not counted
twice, and evaluation not at all. A code and the shift it meets in the transpose of its weight
gradient are counted together; underflow, flushing and rounding follow from that table on the host. All counts are sums:
they add up over layers, microbatches and ranks.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate

import torch
from torch import Tensor

from titan_fp8moe import ops, recipe
from titan_fp8moe.recipe import FP8, FP8_NAN, TILE

KINDS = ("x", "a", "dy", "dh", "w")
SHIFTS = {"up": (-20, -1), "0": (0, 0), "1-3": (1, 3), "4-7": (4, 7), "8-14": (8, 14), "15+": (15, 20)}
"""Bins of S - e', by which the transpose lowers a value's exponent; 15 and more round even the largest of a tile. Only
``requantize`` shifts up."""

_LIMIT = 20  # a shift by 2**-20 sends every value to zero
_UNCOUNTED = 2 * _LIMIT + 1  # in the place of a shift: padding, tiles of zeros, NaN
_SIZES = ((_UNCOUNTED + 1) * TILE, 256, 256, 1, 1)  # values by shift and code, tiles by scale byte, rows by spread, ...
_CHUNK = 1 << 25  # values looked at together

_collecting = False
_counts: Tensor | None = None


def collecting() -> bool:
    return _collecting


def collect() -> None:
    """Counts from now on what :func:`record` is given."""
    global _collecting
    _collecting = True


@contextmanager
def paused() -> Iterator[None]:
    """Leaves out what runs in this context."""
    global _collecting
    outer, _collecting = _collecting, False
    try:
        yield
    finally:
        _collecting = outer


def take(device: torch.device | str) -> Tensor:
    """Stops counting; returns the counts, to be added over ranks, for :func:`summarize`. ``device`` is where they are
    wanted if there was nothing to count."""
    global _collecting, _counts
    counts = _zeros(device) if _counts is None else _counts
    _collecting, _counts = False, None
    return counts


def _zeros(device: torch.device | str) -> Tensor:
    return torch.zeros(len(KINDS), sum(_SIZES), dtype=torch.int64, device=device)


@torch.no_grad()
def record(
    x: tuple[Tensor, Tensor],
    a: tuple[Tensor, Tensor],
    dy: tuple[Tensor, Tensor],
    dh: tuple[Tensor, Tensor],
    weights: tuple[Tensor, Tensor, Tensor],
    offsets_E: Tensor,
    token_M: Tensor,
    wgrad: str,
) -> None:
    """Counts one layer's backward.

    Args:
        x, a, dy, dh: the operands of the weight gradients, (M, D) e4m3 with (M, D // 128) e8m0, in expert order.
        weights: w1, w2, w3, bf16 or fp32. Those that come quantized (``fp8_all_gather``) no longer say what they
            were, and are not counted.
        token_M: -1 for rows that do not count.
        wgrad: the transpose, see :class:`titan_fp8moe.config.Fp8FlowMoEConfig`.
    """
    global _counts
    if _counts is None:
        _counts = _zeros(token_M.device)
    live_BR = (token_M >= 0).view(-1, TILE)
    for kinds, pair in ((("x", "dh"), (x, dh)), (("a", "dy"), (a, dy))):
        gauge = [0, 0]
        if wgrad == "balanced":
            a_M1 = recipe.row_gauge(pair[0][1], pair[1][1]).unsqueeze(1)
            gauge = [-a_M1, a_M1]
        # The op itself says to which scales it brings the values; those are not needed here.
        targets = [None, None] if wgrad == "bf16" else ops.transpose_pair(*pair[0], *pair[1], offsets_E, wgrad)[1::2]
        for kind, (q, scale), moved, target in zip(kinds, pair, gauge, targets, strict=True):
            B, G = q.shape[0] // TILE, q.shape[1] // TILE
            byte = scale.view(torch.uint8).int()
            if target is not None:
                target = recipe.exponent(target).t().reshape(B, 1, G, -1)
            source = (byte - 127 + moved).view(B, TILE, G, 1)
            _add(kind, q, byte.view(B, TILE, G), live_BR, source, target)

    w1, w2, w3 = weights
    if isinstance(w1, ops.QuantizedWeight):
        return
    for w in ((w1, w3), (w2,)):
        q, scale = ops.quantize_weight(*w)
        byte = scale.view(torch.uint8).int().flatten(0, 1).unsqueeze(1)
        _add("w", q, byte, torch.ones_like(byte[:, :, 0], dtype=torch.bool))
        assert _counts is not None
        _counts[KINDS.index("w"), -1] += sum(torch.count_nonzero(part) for part in w)


def _add(
    kind: str,
    q: Tensor,
    byte_BRG: Tensor,
    live_BR: Tensor,
    source_BRG1: Tensor | None = None,
    target_B1GL: Tensor | None = None,
) -> None:
    """Counts the values of ``q``, rows of 128 (R = 128 tiles of 1x128 in a block) or weights (R = 1 block of 128x128).

    ``source`` and ``target`` are a value's exponents before and after its transpose, the latter per block or column; no
    target, no transpose.
    """
    assert _counts is not None
    values, bytes_, spreads, nan_tiles, _ = _counts[KINDS.index(kind)].split(_SIZES)
    B, R, G = byte_BRG.shape
    code_BMGL = q.view(torch.uint8).view(B, TILE, G, TILE)
    live = live_BR.unsqueeze(2)
    nan = live & (code_BMGL[:, :: TILE // R, :, 0] & 0x7F == FP8_NAN)
    nan_tiles += nan.sum()
    # Byte 1 is the scale of tiles without a nonzero value, and of NaN.
    held = live & (byte_BRG > 1)
    bytes_ += torch.bincount(torch.where(live & ~nan, byte_BRG, 0).flatten(), minlength=256)
    high, low = torch.where(held, byte_BRG, 0).amax(2), torch.where(held, byte_BRG, 255).amin(2)
    spreads += torch.bincount(torch.where(high > 0, high - low, 255).flatten(), minlength=256)

    step = max(_CHUNK // (TILE * TILE * G), 1)
    for i in range(0, B, step):
        run = slice(i, i + step)
        shift = 0
        if source_BRG1 is not None and target_B1GL is not None:
            shift = (target_B1GL[run] - source_BRG1[run]).clamp(-_LIMIT, _LIMIT)
        shift = torch.where(held[run].unsqueeze(3), shift + _LIMIT, _UNCOUNTED).to(torch.int16)
        # What rows hold that do not count is left to chance.
        index = (code_BMGL[run] & 0x7F) * live[run].unsqueeze(3) + shift * TILE
        values += torch.bincount(index.flatten(), minlength=values.shape[0])


def summarize(counts: Tensor) -> dict[str, float]:
    """Figures by ``kind/name``, from counts added over ranks.

    * ``underflow``: for w, the share of nonzero parameters that became zero. The other kinds are born in fp8: the share
      of zeros in tiles that are not all zeros, which also counts what was zero before.
    * ``subnormal``: the share of values with less than 3 bits of mantissa, in the same tiles.
    * ``nan_tiles``, a number, and ``zero_tiles``, a share of the others.
    * ``exponent_min``, ``_mean``, ``_max`` of the scales of the remaining tiles.
    * ``row_spread_p99``: the 99th percentile over rows (of blocks, for w) of the largest minus the smallest of a row.
    * except for w, of the nonzero values: ``shift/BIN``, see :data:`SHIFTS`, and what the transpose makes of them:
      ``flushed`` to zero, or ``rounded`` to another value.
    """
    figures = {}
    for kind, row in zip(KINDS, counts.cpu(), strict=True):
        if not row.any():  # weights that were gathered in FP8
            continue
        values, bytes_, spreads, nan_tiles, inputs = (part.double() for part in row.split(_SIZES))
        table = values.view(-1, TILE)
        counted = table[:_UNCOUNTED].sum(0)
        figure = {
            "underflow": _share(inputs - table[:, 1:].sum(), inputs) if kind == "w" else _share(counted[0], counted),
            "subnormal": _share(counted[1:8], counted),
            "nan_tiles": float(nan_tiles),
            "zero_tiles": _share(bytes_[1], bytes_[1:]),
        }
        exponents = [byte - 127 for byte in range(2, 256) if bytes_[byte]]
        mean = float((bytes_[2:] * torch.arange(2 - 127, 256 - 127)).sum() / bytes_[2:].sum())
        figure |= {
            "exponent_min": min(exponents, default=math.nan),
            "exponent_mean": mean,
            "exponent_max": max(exponents, default=math.nan),
            "row_spread_p99": _percentile(spreads[:255].tolist(), 0.99),
        }
        if kind != "w":
            shifted = table[:_UNCOUNTED].clone()
            shifted[:, 0] = 0
            for name, (low, high) in SHIFTS.items():
                figure[f"shift/{name}"] = _share(shifted[low + _LIMIT : high + _LIMIT + 1], shifted)
            flushed, rounded = _transpose_results()
            figure |= {"flushed": _share(shifted[flushed], shifted), "rounded": _share(shifted[rounded], shifted)}
        figures |= {f"{kind}/{name}": value for name, value in figure.items()}
    return figures


def _transpose_results() -> tuple[Tensor, Tensor]:
    """Whether each code (column) is flushed, or rounded but not flushed, by each shift (row), both (41, 128) bool."""
    q = torch.arange(TILE, dtype=torch.uint8).view(FP8).unsqueeze(0)
    down = torch.arange(-_LIMIT, _LIMIT + 1, dtype=torch.int32).clamp(min=0).unsqueeze(1)
    result = recipe.shift_exponent(q, -down).float()
    flushed = (result == 0) & (q.float() != 0)
    return flushed, (result * recipe.exp2(down) != q.float()) & ~flushed & ~q.isnan()


def _share(part: Tensor, whole: Tensor) -> float:
    """NaN when there was nothing to count."""
    return float(part.sum() / whole.sum())


def _percentile(counts: list[float], share: float) -> float:
    for value, total in enumerate(accumulate(counts)):
        if total and total >= share * sum(counts):
            return float(value)
    return math.nan
