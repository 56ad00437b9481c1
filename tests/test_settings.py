"""The settings of [fp8_flow_moe] in TOML and on the command line: wrong, removed and conflicting ones are refused."""

import dataclasses
import re
import sys
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from torchtitan.config import ConfigManager

from tests.jobs import CUSTOM_MODULE, cpu_only, make_config, make_dims  # noqa: F401
from tests.layer import refused
from tests.processes import run_script
from titan_fp8moe.config import Fp8FlowMoEConfig
from titan_fp8moe.torchtitan import dry_run
from titan_fp8moe.torchtitan.converter import Fp8FlowMoEConverter

ROOT = Path(__file__).parent.parent
DEBUG_TOML = (ROOT / "train_configs/debug.toml").read_text()


def test_wrong_value_in_toml(tmp_path: Path):
    """tests/test_checks.py has each setting's."""
    (tmp_path / "wrong.toml").write_text("[fp8_flow_moe]\nstatistics_every = 2.5\n")
    with pytest.raises(ValueError, match=r"fp8_flow_moe\.statistics_every is 2.5; set it to a number of steps"):
        ConfigManager().parse_args([CUSTOM_MODULE, f"--job.config_file={tmp_path}/wrong.toml"])


def printed(capsys: pytest.CaptureFixture) -> str:
    """Everything printed, without the boxes that tyro draws and its line breaks."""
    return " ".join(re.sub("[│╭╮╰╯─]", " ", "".join(capsys.readouterr())).split())


def test_wrong_value_on_the_command_line(capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit) as exit_:
        make_config("--fp8_flow_moe.wgrad=fp8")
    message = printed(capsys).replace("_", "-")
    assert exit_.value.code != 0 and "fp8-flow-moe.wgrad" in message and "scaling-aware" in message, message


def test_help_lists_the_settings(capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit):
        make_config("--help")
    help_ = printed(capsys).replace("fp8-flow-moe", "fp8_flow_moe")
    options = set(re.findall(r"--fp8_flow_moe\.([a-z0-9-]+)", help_))
    names = {f.name.replace("_", "-") for f in dataclasses.fields(Fp8FlowMoEConfig)}
    assert {name for name in options if not name.startswith("no-")} == names
    choices = get_args(get_type_hints(Fp8FlowMoEConfig)["wgrad"])
    assert f"--fp8_flow_moe.wgrad {{{','.join(choices)}}} How the two FP8 operands" in help_


def test_wrong_config_ends_the_real_command(tmp_path: Path):
    """It ends before anything is built: process group, tokenizer (which does not exist here) or model."""
    assert 'wgrad = "balanced"' in DEBUG_TOML
    (tmp_path / "wrong.toml").write_text(DEBUG_TOML.replace('wgrad = "balanced"', 'wgrad = "fp8"'))
    run = run_script("-m", "torchtitan.train", f"--job.config_file={tmp_path}/wrong.toml")
    assert run.returncode == 1
    last_line = run.stderr.strip().splitlines()[-1]
    assert "fp8_flow_moe.wgrad is 'fp8'; set it to one of 'balanced'" in last_line, run.stderr[-3000:]
    assert "Starting job" not in run.stdout + run.stderr


PP2, CP2, EP2 = (f"parallelism.{kind}_parallel_degree=2" for kind in ("pipeline", "context", "expert"))
SCHEDULE = "parallelism.pipeline_parallel_schedule"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.converters=quantize.grouped_mm.float8,fp8_flow_moe"], "keep one of them in model.converters"),
        (["model.converters=fp8_flow_moe,quantize.grouped_mm.mx"], "keep one of them in model.converters"),
        *(([PP2, EP2, f"{SCHEDULE}={name}"], "") for name in ("1f1b", "Interleaved1F1B", "GPipe")),
        *(([PP2, f"{SCHEDULE}={name}"], "") for name in ("ZBVZeroBubble", "InterleavedZeroBubble")),
        *(([PP2, EP2, f"{SCHEDULE}={name}"], "") for name in ("ZBVZeroBubble", "InterleavedZeroBubble")),
        ([PP2, EP2, f"{SCHEDULE}_csv=schedule.csv", "fp8_flow_moe.dispatch=all_to_all"], ""),
        ([PP2, f"{SCHEDULE}=dualpipev"], "set parallelism.pipeline_parallel_expert_parallel_overlap = false"),
        ([PP2, f"{SCHEDULE}=DualPipeV", "parallelism.no_pipeline_parallel_expert_parallel_overlap"], ""),
        ([f"{SCHEDULE}=DualPipeV"], ""),  # without a pipeline nobody reads it
        (["fp8_flow_moe.cache_weights", "optimizer.early_step_in_backward"], "optimizer.early_step_in_backward"),
        (["validation.enable", CP2], "set validation.enable = false or parallelism.context_parallel_degree = 1"),
        (["validation.enable"], ""),
        ([CP2], ""),
        (["fp8_flow_moe.fp8_all_gather", "training.enable_cpu_offload"], "training.enable_cpu_offload"),
        (["training.enable_cpu_offload"], ""),
        (["training.dtype=bfloat16", "training.mixed_precision_param=float32"], ""),
    ],
    ids=str,
)
def test_settings_that_cannot_go_together(overrides: list[str], message: str):
    """The constructor raises, before there is a model."""
    with refused(*[message] * bool(message)):
        Fp8FlowMoEConverter(make_config(*(f"--{override}" for override in overrides)), make_dims())


def test_a_folder_is_no_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name, message in ((tmp_path, "Is a directory"), (tmp_path / "none", "No such file or directory")):
        monkeypatch.setattr(sys, "argv", ["dry_run", str(name)])
        with pytest.raises(SystemExit, match=re.escape(f"{message}: '{name}'")):
            dry_run.from_command_line(None)
