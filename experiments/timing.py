"""Times of GPU kernels by state of the GPU, candidates in turn, and the records of such times."""

import functools
import math
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
import triton
import triton.testing
from torch import Tensor
from triton.language.extra.cuda import globaltimer

from titan_fp8moe.recipe import TILE

BACK_TO_BACK = "back to back"
AFTER_IDLING = "after idling"
WITH_BUSY_SMS = "with 16 busy SMs"
BUSY_SMS = 16


def group_ends(rows: int, experts: int, device: str = "cuda") -> Tensor:
    """(experts,) int32 ends of row groups, multiples of 128 that end at ``rows``, the same in every run.

    Groups have 0.7 to 1.3 times the average number of rows.
    """
    tiles = (torch.linspace(0.7, 1.3, experts) * (rows / experts / TILE)).round().long()
    tiles[experts // 2] += rows // TILE - tiles.sum()
    order = torch.randperm(experts, generator=torch.Generator().manual_seed(0))
    return (tiles[order] * TILE).cumsum(0).to(torch.int32).to(device)


def elapsed_ms(run: Callable[[], object]) -> float:
    """Milliseconds between the GPU's arrival at ``run`` and its end."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def after_idling_ms(run: Callable[[], object], idle_s: float = 0.04) -> float:
    """Milliseconds of one run after the GPU has idled, with nothing of its operands in L2."""
    torch.cuda.synchronize()
    time.sleep(idle_s)
    torch.empty(2**28, dtype=torch.uint8, device="cuda").zero_()
    torch.cuda._sleep(2_000_000)  # longer than the host takes to launch
    return elapsed_ms(run)


def launched(rep_ms: int) -> Callable[[Callable[[], object]], Callable[[], float]]:
    """Makes back-to-back timers that launch from Python for ``rep_ms``, with a cold L2; for :func:`median_ms`."""

    def timer(run: Callable[[], object]) -> Callable[[], float]:
        return lambda: cast(float, triton.testing.do_bench(run, rep=rep_ms, return_mode="median"))

    return timer


@triton.jit(do_not_specialize=["nanoseconds"])
def _occupy_kernel(nanoseconds):
    start = globaltimer()
    now = start
    while now - start < nanoseconds:
        now = globaltimer()


def occupy(num_sms: int, ms: float) -> None:
    """Keeps SMs busy for a time: none of them has room for a CTA of a GEMM."""
    launch = _occupy_kernel[(num_sms,)]
    launch(int(ms * 1e6), num_warps=16)  # pyrefly: ignore[unexpected-keyword]


def with_busy_sms_ms(run: Callable[[], object], busy_ms: float) -> float:
    """Milliseconds of one run while ``BUSY_SMS`` SMs are busy on another stream, for at least ``busy_ms``."""
    torch.cuda.synchronize()
    time.sleep(0.01)
    stream = torch.cuda.Stream()
    torch.cuda._sleep(4_000_000)  # longer than the host takes to launch
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        occupy(BUSY_SMS, busy_ms)
    torch.cuda._sleep(30_000)
    return elapsed_ms(run)


def busy_ms(run: Callable[[], object]) -> float:
    """Milliseconds in which the GPU works on ``run``, without the gaps in which it waits for the host."""
    run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    cuda = torch.autograd.DeviceType.CUDA
    return covered((e.time_range.start, e.time_range.end) for e in profile.events() if e.device_type == cuda) / 1e3


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """The length of the union of intervals."""
    total, end = 0.0, -math.inf
    for left, right in sorted(intervals):
        total += max(0.0, right - max(left, end))
        end = max(end, right)
    return total


def in_turn(timers: dict[str, Callable[[], float]], rounds: int, draw: Any = random) -> dict[str, list[float]]:
    """The times of each timer. In each round they run in an order drawn anew, by ``draw`` if ranks must agree."""
    times: dict[str, list[float]] = {name: [] for name in timers}
    for _ in range(rounds):
        for name in draw.sample(list(timers), len(timers)):
            times[name].append(timers[name]())
    return times


def medians(times: dict[str, list[float]]) -> dict[str, float]:
    return {name: statistics.median(values) for name, values in times.items()}


def median_ms(
    candidates: dict[str, Callable[[], object]],
    rounds: int,
    back_to_back: Callable[[Callable[[], object]], Callable[[], float]],
    rounds_after_idling: int = 5,
    idle_s: float = 0.04,
    rounds_with_busy_sms: int = 0,
) -> dict[str, dict[str, float]]:
    """Median milliseconds by state of the GPU and candidate.

    The states are ``BACK_TO_BACK``, where power limits the clocks, ``AFTER_IDLING`` and, if asked for,
    ``WITH_BUSY_SMS``, as communication occupies them. Candidates take turns, so that all of them meet the same clocks
    and temperature.

    Args:
        candidates: functions that launch; names of this package's begin with "ours".
        back_to_back: makes a timer, as :func:`launched` does.

    Raises:
        Exception: what one of this package's candidates raises. Another candidate that fails is left out and its error
            goes to stderr.
    """
    bursts = {}
    for name, run in candidates.items():
        try:
            run()
            bursts[name] = back_to_back(run)
        except Exception as error:
            if name.startswith("ours"):
                raise
            print(f"{name}: {str(error)[:150]}", file=sys.stderr)
    runs = {name: candidates[name] for name in bursts}
    idling = {name: functools.partial(after_idling_ms, run, idle_s) for name, run in runs.items()}
    states = {
        BACK_TO_BACK: medians(in_turn(bursts, rounds)),
        AFTER_IDLING: medians(in_turn(idling, rounds_after_idling)),
    }
    if rounds_with_busy_sms:
        busy_ms = 4 * max(states[AFTER_IDLING].values())
        timers = {name: functools.partial(with_busy_sms_ms, run, busy_ms) for name, run in runs.items()}
        states[WITH_BUSY_SMS] = medians(in_turn(timers, rounds_with_busy_sms))
    return states


def show(title: str, times: dict[str, dict[str, float]]) -> None:
    """Prints the milliseconds of each candidate, a column for each state."""
    print(f"\n{title}; ms {', '.join(times)}")
    for name in next(iter(times.values())):
        print(f"  {name:28}" + "".join(f"{ms[name]:8.2f}" for ms in times.values()), flush=True)


def ms_records(
    name: str,
    shape: str,
    times: dict[str, dict[str, float]],
    ours: str,
    references: Iterable[str],
    unit: str = "ms",
    **fields: str,
) -> list[dict]:
    """A record of candidate ``ours`` for each state and each of ``references`` that ran.

    ``fields`` names further fields and the candidates whose times they hold.
    """
    return [
        dict(name=name, shape=f"{shape}, {state}", value=ms[ours], unit=unit, reference=reference,
             reference_value=ms[reference], speedup=ms[reference] / ms[ours])
        | {field: ms[candidate] for field, candidate in fields.items()}
        for state, ms in times.items() for reference in references if reference in ms
    ]  # fmt: skip
