"""tools/compare_losses.py on event files, written as torchtitan does."""

import math
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from torch.utils.tensorboard import SummaryWriter

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

import compare_losses
from compare_losses import GRAD_NORM, LOSS, PEAK_MEMORY, TOKENS_PER_SECOND, VALIDATION_LOSS


def decay(step):
    return 2.0 + 6.0 * math.exp(-step / 20)


def log_run(folder, values_by_tag, wall_time=None):
    """Write {tag: {step: value}} as torchtitan's TensorBoardLogger does."""
    writer = SummaryWriter(folder)
    for tag, values in values_by_tag.items():
        for step, value in values.items():
            writer.add_scalar(tag, value, step, walltime=wall_time)
    writer.close()


def losses(steps, factor=1.0):
    return {LOSS: {step: factor * decay(step) for step in steps}}


@pytest.fixture
def compare(tmp_path, capsys, monkeypatch):
    """Run the tool on folders of tmp_path; returns (exit status, its summaries, stdout)."""
    found = []
    report = compare_losses.report
    monkeypatch.setattr(compare_losses, "report", lambda *args: found.append(report(*args)) or found[-1])

    def run(*names, options=(), draws=False):
        if not draws:
            monkeypatch.setattr(compare_losses, "plot", lambda *_: None)
        argv = [f"--run={name}={tmp_path / name}" for name in names]
        status = compare_losses.main([*argv, f"--out={tmp_path / 'curves.png'}", *map(str, options)])
        return status, found[-1], capsys.readouterr().out

    return run


@pytest.fixture
def compare_fails(tmp_path, capsys):
    """Run the tool on arguments that cannot be compared; returns its message."""

    def run(*argv):
        assert compare_losses.main([f"--out={tmp_path / 'curves.png'}", *map(str, argv)]) == 2
        assert not (tmp_path / "curves.png").exists()
        return capsys.readouterr().err

    return run


def table(output):
    """Parse the printed table into {run: {column: cell}}."""
    lines = [line for line in output.splitlines() if not line.startswith(("FAIL", "note"))]
    header, *rows = [[cell.strip() for cell in re.split(r"\s{2,}", line)] for line in lines]
    return {row[0]: dict(zip(header, row, strict=True)) for row in rows}


def test_reports_every_metric(tmp_path, compare):
    steps = range(1, 61)
    # torchtitan makes a folder per start, below metrics.save_tb_folder. Devices without statistics log -1 byte or 0.
    log_run(tmp_path / "bf16" / "tb" / "20260101-1200", losses(steps) | {PEAK_MEMORY: {1: -1 / 2**30, 2: 0.0}})
    log_run(
        tmp_path / "fp8" / "tb" / "20260101-1300",
        losses(steps, 1.002)
        | {
            TOKENS_PER_SECOND: {step: 10.0 if step <= 10 else 1500.0 + step % 2 for step in range(1, 60)},
            PEAK_MEMORY: {1: 40.0, 2: 61.5, 3: 60.0},
            GRAD_NORM: {step: 100.0 if step <= 40 else 0.5 for step in steps},
            VALIDATION_LOSS: {30: 4.0, 60: 3.25},
        },
    )
    status, report, output = compare("bf16", "fp8", draws=True)

    assert status == 0
    fp8 = report["fp8"]
    smoothed = np.mean([decay(step) for step in range(41, 61)])
    assert fp8.final_loss == pytest.approx(1.002 * decay(60), rel=1e-6)
    assert fp8.smoothed_final_loss == pytest.approx(1.002 * smoothed, rel=1e-6)
    for key in ("final_deviation", "largest_deviation", "mean_deviation"):
        assert getattr(fp8, key) == pytest.approx(0.002, rel=1e-3)
    assert (fp8.compared_up_to_step, fp8.tokens_per_second, fp8.peak_memory_gib) == (60, 1501, 61.5)
    assert (fp8.validation_loss, fp8.grad_norm) == (3.25, 0.5)

    assert "smoothed is the mean loss of the last 20 steps; deviation: how far from bf16's at the last" in output
    assert "largest and mean are of the deviations at all steps, without sign" in output
    cells = table(output)
    assert [cells["fp8"][key] for key in ("deviation", "tokens/s", "result")] == ["+0.200%", "1,501", "ok"]
    missing = "deviation", "tokens/s", "memory GiB", "val. loss", "grad norm"
    assert {cells["bf16"][key] for key in missing} == {"-"} and cells["bf16"]["result"] == "reference"
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("factor", [1.02, 0.98])
@pytest.mark.parametrize(("tolerance", "expected"), [(0.021, 0), (0.019, 1)])
def test_tolerance_decides_the_exit_status(tmp_path, compare, factor, tolerance, expected):
    log_run(tmp_path / "bf16", losses(range(1, 31)))
    log_run(tmp_path / "fp8", losses(range(1, 31), factor))
    status, _, output = compare("bf16", "fp8", options=["--tolerance", tolerance])
    assert status == expected
    assert ("FAIL fp8: smoothed loss deviates" in output) is (expected == 1)


def test_only_the_end_decides_and_smoothing_damps_it(tmp_path, compare):
    steps = range(1, 101)
    log_run(tmp_path / "ref", {LOSS: dict.fromkeys(steps, 4.0)})
    log_run(tmp_path / "early", {LOSS: {step: 5.0 if step <= 20 else 4.0 for step in steps}})
    log_run(tmp_path / "spike", {LOSS: {step: 4.4 if step == 100 else 4.0 for step in steps}})
    status, report, _ = compare("ref", "early", "spike")
    early = report["early"]
    assert (status, early.largest_deviation, early.largest_deviation_step, early.final_deviation) == (0, 0.25, 1, 0)
    # The spike of 10% is one of 20 steps, or one of one.
    assert report["spike"].final_deviation == pytest.approx(0.005, rel=1e-4)
    status, _, output = compare("ref", "early", "spike", options=["--smooth", 1])
    assert status == 1
    assert [table(output)[name]["result"] for name in ("early", "spike")] == ["ok", "FAIL"]


def test_runs_are_compared_at_common_steps(tmp_path, compare):
    # Averaging all of a's steps and every tenth of b's would find a deviation between equal curves.
    log_run(tmp_path / "a", losses(range(1, 101)))
    log_run(tmp_path / "b", losses([1, *range(10, 71, 10)]))
    status, report, output = compare("a", "b", options=["--tolerance", 0])
    assert status == report["b"].largest_deviation == 0
    assert report["b"].compared_up_to_step == 70
    assert "note: b and a end at steps 70 and 100; compared up to step 70" in output


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(("broken", "tag"), [("ref", LOSS), ("run", LOSS), ("run", VALIDATION_LOSS)])
def test_losses_that_are_not_finite_fail(tmp_path, compare, value, broken, tag):
    # In the middle, so that the final smoothed losses agree.
    for name in ("ref", "run"):
        curves = losses(range(1, 101)) | {VALIDATION_LOSS: {step: 3.0 for step in range(1, 101)}}
        if name == broken:
            curves[tag] |= {40: value, 41: value}
        log_run(tmp_path / name, curves)
    status, _, output = compare("ref", "run")
    assert status == 1
    label = "loss" if tag == LOSS else "validation loss"
    assert f"FAIL {broken}: {label} is {value} at step 40 (2 logged values are not finite)" in output
    assert table(output)[broken]["result"] == "FAIL"


def test_reference_that_ends_in_nan_passes_nobody(tmp_path, compare):
    log_run(tmp_path / "ref", {LOSS: {1: 5.0, 2: math.nan}})
    log_run(tmp_path / "run", losses([1, 2]))
    _, _, output = compare("ref", "run")
    assert [row["result"] for row in table(output).values()] == ["FAIL", "FAIL"]


def test_restarts_merge_and_the_later_value_wins(tmp_path, compare):
    log_run(tmp_path / "a", losses(range(1, 31)))
    # Diverged from step 15 on, and was restarted at 10. The names of the folders sort in the wrong order.
    log_run(tmp_path / "b" / "2", losses(range(1, 15)), wall_time=1000.0)
    log_run(tmp_path / "b" / "2", {LOSS: dict.fromkeys(range(15, 21), math.nan)}, wall_time=1001.0)
    log_run(tmp_path / "b" / "1", losses(range(11, 31)), wall_time=2000.0)
    status, report, _ = compare("a", "b", options=["--tolerance", 0])
    assert status == report["b"].largest_deviation == 0
    assert report["b"].last_step == 30


def test_runs_that_cannot_be_compared(tmp_path, compare_fails):
    for name, curves in {
        "odd": losses([1, 3, 5]),
        "even": losses([2, 4]),
        "no_loss": {GRAD_NORM: {1: 1.0}},
        "first_stage": {LOSS: {1: -4.0}},
        "ranks/rank_0": losses([1]),
        "ranks/rank_1": losses([1]),
        "outputs/bf16": losses([1, 2]),
        "outputs/fp8": losses([1, 2]),
    }.items():
        log_run(tmp_path / name, curves)
    (tmp_path / "empty").mkdir()
    for second, message in {
        "absent": "absent is not a folder",
        "empty": "--metrics.enable_tensorboard",
        "no_loss": f"has the metric {LOSS}; found ['grad_norm']",
        "even": "no common steps (3 steps from 1 to 5 and 2 steps from 2 to 4)",
        "first_stage": "only ranks of the last stage",
        "ranks": "rank_0, rank_1; give the folder of one",
        "outputs": "holds 2 runs that start at step 1, in bf16, fp8; give the folder of one",
    }.items():
        assert message in compare_fails(f"--run=odd={tmp_path / 'odd'}", f"--run={second}={tmp_path / second}")


def test_small_deviations_fill_the_picture(tmp_path, monkeypatch):
    """The tolerance of 1% does not flatten them, and a few steps have whole numbers as ticks."""
    figures, save = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (figures.append(self), save(self, *a, **k)))
    runs = [compare_losses.Run(n, {compare_losses.LOSS: {s: 5 + d * s for s in range(1, 4)}}) for n, d in RUNS]
    deviation = compare_losses.compare(runs[1], runs[0], 1)
    compare_losses.plot(runs, {"fp8": deviation}, 1, 0.01, tmp_path / "curves.png")
    axes = figures[0].axes[1]
    assert axes.get_ylim()[1] == pytest.approx(120 * abs(deviation.relative).max()) and axes.get_ylim()[1] < 0.1
    assert all(tick == round(tick) for tick in axes.get_xticks())


RUNS = (("bf16", 0.0), ("fp8", 0.0005))
