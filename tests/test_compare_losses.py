"""tools/compare_losses.py on event files, written as torchtitan does."""

import math
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from torch.utils.tensorboard import SummaryWriter

from tests.processes import run_script

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
    """Run the tool on folders of tmp_path; returns (exit status, cells of the table by run and column, stdout)."""

    def run(*names, options=(), draws=False):
        if not draws:
            monkeypatch.setattr(compare_losses, "plot", lambda *_: None)
        argv = [f"--run={name}={tmp_path / name}" for name in names]
        status = compare_losses.main([*argv, f"--out={tmp_path / 'curves.png'}", *map(str, options)])
        output = capsys.readouterr().out
        lines = [re.split(r"\s{2,}", line.strip()) for line in output.splitlines()]
        return status, {line[0]: dict(zip(lines[0], line, strict=True)) for line in lines if len(line) > 9}, output

    return run


@pytest.fixture
def compare_fails(tmp_path, capsys):
    """Run the tool on arguments that cannot be compared; returns its message."""

    def run(*argv):
        assert compare_losses.main([f"--out={tmp_path / 'curves.png'}", *map(str, argv)]) == 2
        assert not (tmp_path / "curves.png").exists()
        return capsys.readouterr().err

    return run


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
    status, cells, output = compare("bf16", "fp8", draws=True)
    smoothed = 1.002 * np.mean([decay(step) for step in range(41, 61)])
    expected = {
        "step": "60", "loss": f"{1.002 * decay(60):.5f}", "smoothed": f"{smoothed:.5f}", "deviation": "+0.200%",
        "largest": "0.200%", "mean": "0.200%", "tokens/s": "1,501", "memory GiB": "61.50", "val. loss": "3.25000",
        "grad norm": "0.5000", "result": "ok", "run": "fp8",
    }  # fmt: skip
    assert status == 0 and cells["fp8"] == expected
    assert "smoothed is the mean loss of the last 20 steps; deviation: how far from the reference's at the" in output
    missing = "deviation", "tokens/s", "memory GiB", "val. loss", "grad norm"
    assert {cells["bf16"][key] for key in missing} == {"-"} and cells["bf16"]["result"] == "baseline"
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
    status, cells, _ = compare("ref", "early", "spike")
    assert (status, cells["early"]["largest"], cells["early"]["deviation"]) == (0, "25.000%", "+0.000%")
    # The spike of 10% is one of 20 steps, or one of one.
    assert cells["spike"]["deviation"] == "+0.500%"
    status, cells, _ = compare("ref", "early", "spike", options=["--smooth", 1])
    assert status == 1 and [cells[name]["result"] for name in ("early", "spike")] == ["ok", "FAIL"]


def test_runs_are_compared_at_common_steps(tmp_path, compare):
    # Averaging all of a's steps and every tenth of b's would find a deviation between equal curves.
    log_run(tmp_path / "a", losses(range(1, 101)))
    log_run(tmp_path / "b", losses([1, *range(10, 71, 10)]))
    status, cells, output = compare("a", "b", options=["--tolerance", 0])
    assert status == 0 and cells["b"]["largest"] == "0.000%"
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
    status, cells, output = compare("ref", "run")
    assert status == 1
    label = "loss" if tag == LOSS else "validation loss"
    assert f"FAIL {broken}: {label} is {value} at step 40 (2 logged values are not finite)" in output
    assert cells[broken]["result"] == "FAIL"


def test_reference_that_ends_in_nan_passes_nobody(tmp_path, compare):
    log_run(tmp_path / "ref", {LOSS: {1: 5.0, 2: math.nan}})
    log_run(tmp_path / "fp8", losses([1, 2]))
    _, cells, _ = compare("ref", "fp8")
    assert [row["result"] for row in cells.values()][1:] == ["FAIL", "FAIL"]


def test_restarts_merge_and_the_later_value_wins(tmp_path, compare):
    log_run(tmp_path / "a", losses(range(1, 31)))
    # Diverged from step 15 on, and was restarted at 10. The names of the folders sort in the wrong order.
    log_run(tmp_path / "b" / "2", losses(range(1, 15)), wall_time=1000.0)
    log_run(tmp_path / "b" / "2", {LOSS: dict.fromkeys(range(15, 21), math.nan)}, wall_time=1001.0)
    log_run(tmp_path / "b" / "1", losses(range(11, 31)), wall_time=2000.0)
    status, cells, _ = compare("a", "b", options=["--tolerance", 0])
    assert status == 0 and (cells["b"]["largest"], cells["b"]["step"]) == ("0.000%", "30")


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
        "absent": "no events.out.tfevents.* of TensorBoard or run-*.wandb",
        "empty": "--metrics.enable_tensorboard",
        "no_loss": f"has the metric {LOSS}",
        "even": "no common steps (3 steps from 1 to 5 and 2 steps from 2 to 4)",
        "first_stage": "only ranks of the last stage",
        "ranks": "holds 2 runs that start at step 1, in rank_0, rank_1; give the folder of one",
        "outputs": "holds 2 runs that start at step 1, in bf16, fp8; give the folder of one",
    }.items():
        assert message in compare_fails(f"--run=odd={tmp_path / 'odd'}", f"--run={second}={tmp_path / second}")


def test_small_deviations_fill_the_picture(tmp_path, monkeypatch):
    """The tolerance of 1% does not flatten them."""
    figures, save = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (figures.append(self), save(self, *a, **k)))
    runs = [compare_losses.Run(n, {compare_losses.LOSS: {s: 5 + d * s for s in range(1, 4)}}) for n, d in RUNS]
    deviation = compare_losses.compare(runs[1], runs[0], 1)
    compare_losses.plot(runs, {"fp8": deviation}, 1, 0.01, tmp_path / "curves.png")
    axes = figures[0].axes[1]
    assert 100 <= axes.get_ylim()[1] / abs(deviation.relative).max() < 120 and axes.get_ylim()[1] < 0.1


RUNS = (("bf16", 0.0), ("fp8", 0.0005))


def test_baselines_are_a_yardstick(tmp_path, compare):
    """A run's reference is the baseline of its seed. Baselines that are far apart fail nobody."""
    for seed, factor in ((1, 1.0), (2, 1.1), (3, 0.9)):
        log_run(tmp_path / f"bf16-s{seed}", losses(range(1, 41), factor))
        log_run(tmp_path / f"fp8-s{seed}", losses(range(1, 41), factor * (1 + seed / 1000)))
    names = [f"{recipe}-s{seed}" for recipe in ("bf16", "fp8") for seed in (1, 2, 3)]
    saved = tmp_path / "losses.xz"
    status, cells, output = compare(*names, options=["--save", saved])
    assert status == 0 and [row["result"] for row in cells.values()][1:] == ["baseline"] * 3 + ["ok"] * 3
    assert [cells[f"fp8-s{seed}"]["deviation"] for seed in (1, 2, 3)] == ["+0.100%", "+0.200%", "+0.300%"]
    assert "yardstick: bf16 is up to 10.00% from itself in the mean of the last quarter" in output
    assert "fp8 in the mean of the last quarter: +0.20% ± 0.25% (95%, 3 runs)" in output  # 4.303 * 0.1% / sqrt(3)
    assert compare(options=["--saved", saved])[2] == output and saved.stat().st_size < 10_000


def test_schedules_that_differ_are_named(tmp_path, compare):
    log_run(tmp_path / "a", losses(range(1, 11)) | {"lr": {s: 1e-3 for s in range(1, 11)}})
    log_run(tmp_path / "b", losses(range(1, 11)) | {"lr": {s: 1e-3 if s < 5 else 9e-4 for s in range(1, 11)}})
    assert "schedules differ: learning rate at step 5 is 0.0009, of a 0.001" in compare("a", "b")[2]


WANDB = """
import os, sys, wandb
run = wandb.init(project="p", dir=sys.argv[1], mode="offline", settings=wandb.Settings(silent=True))
for step in range(1, 2001):
    run.log({"loss_metrics/global_avg_loss": 8 / step, "grad_norm": float("nan"), "memory/other": "x" * 40}, step=step)
if sys.argv[2] == "killed":
    import time
    time.sleep(3)
    os.kill(os.getpid(), 9)
run.finish()
"""


@pytest.mark.parametrize("end", ["finished", "killed"])
def test_reads_offline_runs_of_wandb(tmp_path, compare, end):
    """Over several blocks of its file. Of a run that was killed nothing but the last records may be missing."""
    pytest.importorskip("wandb")
    done = run_script("-c", WANDB, tmp_path / "wb", end)
    assert (done.returncode == 0) == (end == "finished"), done.stderr
    (file,) = (tmp_path / "wb").rglob("run-*.wandb")
    if end == "killed":
        file.write_bytes(file.read_bytes()[:-5])
    points = list(compare_losses.wandb_points(file))
    found = {step: value for _, step, tag, value in points if tag == LOSS}
    assert len(found) >= (2000 if end == "finished" else 1000) and found == {s: 8 / s for s in range(1, len(found) + 1)}
    assert math.isnan(next(value for _, _, tag, value in points if tag == GRAD_NORM))
    log_run(tmp_path / "tb", {LOSS: found})
    assert compare("tb", "wb", options=["--tolerance", 1e-6])[0] == 0
