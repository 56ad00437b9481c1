"""Times of GPU kernels by state of the GPU, candidates in turn, and the records of such times."""

import math
import random
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
import triton
import triton.testing
from torch import Tensor
from triton.language.extra.cuda import globaltimer

from experiments.records import record
from titan_fp8moe.recipe import BLOCK

BACK_TO_BACK = "back to back"
AFTER_IDLING = "after idling"
WITH_BUSY_SMS = "with 16 busy SMs"
BUSY_SMS = 16
ROUNDS = 5
States = dict[str, dict[str, float]]  # figures by state of the GPU and candidate


def group_ends(rows: int, experts: int, device: str = "cuda") -> Tensor:
    """(experts,) int32 ends of groups of 0.7 to 1.3 times the average number of rows, multiples of 128."""
    tiles = (torch.linspace(0.7, 1.3, experts) * (rows / experts / BLOCK)).round().long()
    tiles[experts // 2] += rows // BLOCK - tiles.sum()
    order = torch.randperm(experts, generator=torch.Generator().manual_seed(0))
    return (tiles[order] * BLOCK).cumsum(0).to(torch.int32).to(device)


def elapsed_ms(run: Callable[[], object], times: int = 1) -> float:
    """Milliseconds per call of some calls in a row, from the GPU's arrival at the first to the end of the last."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    events[0].record()
    for _ in range(times):
        run()
    events[1].record()
    torch.cuda.synchronize()
    return events[0].elapsed_time(events[1]) / times


def back_to_back_ms(run: Callable[[], object]) -> float:
    """Milliseconds of a launch from Python, for 60 ms one behind the other, each with a cold L2."""
    return cast(float, triton.testing.do_bench(run, rep=60, return_mode="median"))


def after_idling_ms(run: Callable[[], object]) -> float:
    """Milliseconds of one run after the GPU has idled, with nothing of its operands in L2."""
    torch.cuda.synchronize()
    time.sleep(0.04)
    torch.empty(2**28, dtype=torch.uint8, device="cuda").zero_()
    torch.cuda._sleep(2_000_000)  # longer than the host takes to launch
    return elapsed_ms(run)


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


def medians_in_turn(
    ms: Callable[..., float], runs: dict[str, Any], rounds: int, draw: Any = random, **options: float
) -> dict[str, float]:
    """The median of ``ms(run, **options)`` for each run. In each round they take turns in an order drawn anew, by
    ``draw`` if ranks must agree."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name in draw.sample(list(runs), len(runs)):
            times[name].append(ms(runs[name], **options))
    return {name: statistics.median(values) for name, values in times.items()}


def median_ms(runs: dict[str, Callable[[], object]], busy_sms: bool = False) -> States:
    """Median milliseconds. Candidates take turns, so that all of them meet the same clocks and temperature.

    ``BACK_TO_BACK`` power limits the clocks.
    """
    for run in runs.values():
        run()  # compiles
    states = {
        BACK_TO_BACK: medians_in_turn(back_to_back_ms, runs, ROUNDS),
        AFTER_IDLING: medians_in_turn(after_idling_ms, runs, ROUNDS),
    }
    if busy_sms:
        busy_ms = 4 * max(states[AFTER_IDLING].values())
        states[WITH_BUSY_SMS] = medians_in_turn(with_busy_sms_ms, runs, ROUNDS, busy_ms=busy_ms)
    return states


def tflops(times: States, products: int) -> States:
    """TFLOP/s in the place of milliseconds."""
    return {state: {name: 2e-9 * products / ms for name, ms in of.items()} for state, of in times.items()}


def state_records(
    name: str, shape: str, figures: States, ours: str, references: Iterable[str], unit: str, **fields: str
) -> list[dict]:
    """A record of ``ours`` for each state and reference that ran. ``fields`` names candidates for further fields."""
    return [
        record(name, f"{shape}, {state}", unit, of[ours], reference, of[reference])
        | {field: of[candidate] for field, candidate in fields.items()}
        for state, of in figures.items()
        for reference in references
        if reference in of
    ]
