"""tools/compare_losses.py on event files, written as torchtitan does."""

import math
import sys
from pathlib import Path

import pytest
from torch.utils.tensorboard import SummaryWriter

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

import compare_losses


@pytest.fixture
def compare(tmp_path, capsys, monkeypatch):
    """Runs the tool. A run is its losses from step 1, or {first step: losses} of its starts."""
    monkeypatch.setattr(compare_losses, "plot", lambda *_: None)

    def run(runs, *options):
        for name, starts in runs.items():
            for at, (first, losses) in enumerate((starts if isinstance(starts, dict) else {1: starts}).items()):
                with SummaryWriter(tmp_path / name / str(9 - at)) as writer:  # folders' names sort the other way
                    for step, loss in enumerate(losses, first):
                        writer.add_scalar(compare_losses.LOSS, loss, step, walltime=1000.0 + at)
        status = compare_losses.main([*(f"--run={name}={tmp_path / name}" for name in runs), *options])
        return status, capsys.readouterr().out

    return run


@pytest.mark.parametrize("broken", ["bf16", "fp8"])
def test_a_loss_that_is_not_finite_fails(compare, broken):
    """In the middle too, where the last losses agree."""
    runs = dict(bf16=[4.0] * 99, fp8=[4.0] * 99) | {broken: [4.0] * 39 + [math.nan] + [4.0] * 59}
    status, output = compare(runs)
    assert status == 1 and f"FAIL {broken}: loss is nan at step 40" in output


@pytest.mark.parametrize("end", [4.05, 3.95])
@pytest.mark.parametrize(("tolerance", "failed"), [(0.013, 0), (0.012, 1)])
def test_the_end_alone_decides(compare, end, tolerance, failed):
    """There the mean of 20 steps is 1.25% from the reference. Before, losses were 25% from it."""
    runs = dict(bf16=[4.0] * 60, fp8=[5.0] * 20 + [4.0] * 20 + [end] * 20)
    status, output = compare(runs, f"--tolerance={tolerance}")
    assert status == failed == output.count("FAIL fp8: smoothed loss deviates")


def test_a_restart_keeps_the_later_value(compare):
    status, _ = compare(dict(bf16=[4.0] * 30, fp8={1: [4.0] * 10 + [math.nan] * 10, 11: [4.0] * 20}), "--tolerance=0")
    assert status == 0


def test_runs_are_paired_by_seed(compare):
    """Baselines that are far apart are the yardstick and fail nobody."""
    factors = {1: 1.0, 2: 0.9, 3: 1.05}
    runs = {f"bf16-s{seed}": [4 * factor] * 40 for seed, factor in factors.items()}
    runs |= {f"fp8-s{seed}": [4 * factor * (1 + seed / 1000)] * 40 for seed, factor in factors.items()}
    status, output = compare(runs)
    assert status == 0 and "yardstick: bf16 differs from itself by up to 10.00% in the mean" in output
    assert "fp8 in the mean of the last quarter: +0.20% ± 0.25% (95%, 3 runs)" in output  # 4.303 * 0.1% / sqrt(3)


@pytest.mark.parametrize("seed", ["", "-s2"])
def test_bf16_with_one_bit_changed_is_a_baseline(compare, seed):
    """Of its seed's run, not of the first. pairs.sh and quickstart.sh name it alike."""
    runs = {"bf16-s1": [5.0] * 40} if seed else {}
    runs |= {f"bf16{seed}": [4.0] * 40, f"bf16_bit{seed}": [4.12] * 40, f"fp8{seed}": [4.02] * 40}
    status, output = compare(runs)
    assert status == 0 and ("+3.000%" in output) and output.count("baseline\n") == len(runs) - 1
    most = "20.00%" if seed else "3.00%"
    assert f"yardstick: bf16 differs from itself by up to {most}" in output
    assert f"fp8 differs from bf16{seed} by +0.50% in the mean" in output
