"""tools/compare_losses.py on event files, written as torchtitan does."""

import math
import re
import sys
from pathlib import Path

import numpy as np
import pytest
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

    def run(*names, options=()):
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
    # torchtitan makes a folder per start, below metrics.save_tb_folder.
    log_run(tmp_path / "bf16" / "tb" / "20260101-1200", losses(steps))
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
    status, report, output = compare("bf16", "fp8")

    assert status == 0
    fp8 = report["fp8"]
    smoothed = np.mean([decay(step) for step in range(41, 61)])
    assert fp8.final_loss == pytest.approx(1.002 * decay(60), rel=1e-6)
    assert fp8.smoothed_final_loss == pytest.approx(1.002 * smoothed, rel=1e-6)
    for key in ("final_deviation", "largest_deviation", "mean_deviation"):
        assert getattr(fp8, key) == pytest.approx(0.002, rel=1e-3)
    assert fp8.compared_up_to_step == 60
    assert fp8.tokens_per_second == 1501
    assert fp8.peak_memory_gib == 61.5
    assert fp8.validation_loss == 3.25
    assert fp8.grad_norm == 0.5

    cells = table(output)
    assert cells["fp8"]["deviation"] == "+0.200%"
    assert cells["fp8"]["tokens/s"] == "1,501"
    assert cells["fp8"]["result"] == "ok"
    # The reference logged only its loss.
    assert {cells["bf16"][key] for key in ("deviation", "tokens/s", "memory GiB", "val. loss", "grad norm")} == {"-"}
    assert cells["bf16"]["result"] == "reference"
    lines = output.splitlines()
    # Right-aligned: the numbers of a column end where its header ends.
    assert lines[2].index("+0.200%") + len("+0.200%") == lines[0].index("deviation") + len("deviation")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_curves_that_coincide_are_both_seen(tmp_path, compare, monkeypatch):
    """The reference shows on both sides of a run that lies on it, and the legend explains the thin lines."""
    for name in ("bf16", "fp8"):
        log_run(tmp_path / name, losses(range(1, 31)))
    drawn = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, *_, **__: drawn.append(figure))
    compare("bf16", "fp8")
    axes = drawn[0].axes[0]
    widths = {line.get_label(): line.get_linewidth() for line in axes.get_lines()}
    assert widths["bf16 (reference)"] > 2 * widths["fp8"]
    legend = [text.get_text() for text in axes.get_legend().get_texts()]
    assert legend == ["bf16 (reference)", "fp8", "thin: single steps"]


def test_memory_of_devices_without_statistics_is_missing(tmp_path, compare):
    log_run(tmp_path / "a", losses([1, 2]) | {PEAK_MEMORY: {1: -1 / 2**30, 2: -1 / 2**30}})
    log_run(tmp_path / "b", losses([1, 2]) | {PEAK_MEMORY: {1: 0.0}})
    _, report, _ = compare("a", "b")
    assert [report[name].peak_memory_gib for name in "ab"] == [None, None]


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
    assert status == 0
    assert report["early"].largest_deviation == pytest.approx(0.25)
    assert report["early"].largest_deviation_step == 1
    assert report["early"].final_deviation == 0
    # The spike of 10% is one of 20 steps, or one of one.
    assert report["spike"].final_deviation == pytest.approx(0.005, rel=1e-4)
    status, report, output = compare("ref", "early", "spike", options=["--smooth", 1])
    assert status == 1
    assert table(output)["early"]["result"] == "ok"
    assert table(output)["spike"]["result"] == "FAIL"


def test_runs_are_compared_at_common_steps(tmp_path, compare):
    # Averaging all of a's steps and every tenth of b's would find a deviation between equal curves.
    log_run(tmp_path / "a", losses(range(1, 101)))
    log_run(tmp_path / "b", losses([1, *range(10, 71, 10)]))
    status, report, output = compare("a", "b", options=["--tolerance", 0])
    assert status == 0
    assert report["b"].largest_deviation == 0
    assert report["b"].compared_up_to_step == 70
    assert "note: b and a end at steps 70 and 100; compared up to step 70" in output


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("broken", ["ref", "run"])
def test_losses_that_are_not_finite_fail(tmp_path, compare, value, broken):
    # In the middle, so that the final smoothed losses agree.
    for name in ("ref", "run"):
        curve = losses(range(1, 101))
        if name == broken:
            curve[LOSS] |= {40: value, 41: value}
        log_run(tmp_path / name, curve)
    status, _, output = compare("ref", "run")
    assert status == 1
    assert f"FAIL {broken}: loss is {value} at step 40 (2 logged values are not finite)" in output
    assert table(output)[broken]["result"] == "FAIL"


def test_reference_that_ends_in_nan_passes_nobody(tmp_path, compare):
    log_run(tmp_path / "ref", {LOSS: {1: 5.0, 2: math.nan}})
    log_run(tmp_path / "run", losses([1, 2]))
    _, _, output = compare("ref", "run")
    assert [row["result"] for row in table(output).values()] == ["FAIL", "FAIL"]


def test_validation_losses_that_are_not_finite_fail(tmp_path, compare):
    log_run(tmp_path / "a", losses([1, 2]))
    log_run(tmp_path / "b", losses([1, 2]) | {VALIDATION_LOSS: {1: 3.0, 2: math.nan}})
    status, report, output = compare("a", "b")
    assert status == 1
    assert math.isnan(report["b"].validation_loss)
    assert "FAIL b: validation loss is nan at step 2" in output


def test_restarts_merge_and_the_later_value_wins(tmp_path, compare):
    log_run(tmp_path / "a", losses(range(1, 31)))
    # Diverged from step 15 on, and was restarted at 10. The names of the folders sort in the wrong order.
    log_run(tmp_path / "b" / "2", losses(range(1, 15)), wall_time=1000.0)
    log_run(tmp_path / "b" / "2", {LOSS: dict.fromkeys(range(15, 21), math.nan)}, wall_time=1001.0)
    log_run(tmp_path / "b" / "1", losses(range(11, 31)), wall_time=2000.0)
    status, report, _ = compare("a", "b", options=["--tolerance", 0])
    assert status == 0
    assert report["b"].last_step == 30
    assert report["b"].largest_deviation == 0


def test_runs_that_cannot_be_compared(tmp_path, compare_fails):
    log_run(tmp_path / "odd", losses([1, 3, 5]))
    log_run(tmp_path / "even", losses([2, 4]))
    log_run(tmp_path / "no_loss", {GRAD_NORM: {1: 1.0}})
    log_run(tmp_path / "first_stage", {LOSS: {1: -4.0}})
    log_run(tmp_path / "ranks" / "rank_0", losses([1]))
    log_run(tmp_path / "ranks" / "rank_1", losses([1]))
    log_run(tmp_path / "outputs" / "bf16", losses([1, 2]))
    log_run(tmp_path / "outputs" / "fp8", losses([1, 2]))
    (tmp_path / "empty").mkdir()

    def message(first, second):
        return compare_fails(f"--run={first}={tmp_path / first}", f"--run={second}={tmp_path / second}")

    assert "absent is not a folder" in message("odd", "absent")
    assert "--metrics.enable_tensorboard" in message("odd", "empty")
    assert f"has the metric {LOSS}; found ['grad_norm']" in message("odd", "no_loss")
    assert "no common steps (3 steps from 1 to 5 and 2 steps from 2 to 4)" in message("odd", "even")
    assert "only ranks of the last stage" in message("odd", "first_stage")
    assert "rank_0, rank_1; give the folder of one" in message("odd", "ranks")
    assert "holds 2 runs that start at step 1, in bf16, fp8; give the folder of one" in message("odd", "outputs")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--run=a=x"], "at least two"),
        (["--run=a=x", "--run=a=y"], "a name of its own"),
        (["--run=a=x", "--run=b=y", "--smooth=0"], "--smooth must be at least 1"),
        (["--run=a=x", "--run=b=y", "--tolerance=-1"], "--tolerance must not be negative"),
        (["--run=a=x", "--run=b=y", "--tolerance=nan"], "--tolerance must not be negative"),
        (["--run=a=x", "--run=b=y", "--out=no/such/folder/curves.png"], "there is no folder"),
        (["--run=a=x", "--run=b=y", "--out=curves.txt"], "must end in .png, .pdf or .svg"),
    ],
)
def test_bad_arguments(compare_fails, argv, message):
    assert message in compare_fails(*argv)


def test_a_run_without_a_name_is_a_usage_error(capsys):
    with pytest.raises(SystemExit, match="2"):
        compare_losses.main(["--run", "outputs"])
    assert "is not NAME=PATH" in capsys.readouterr().err
