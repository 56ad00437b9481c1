"""The settings of [fp8_flow_moe] in TOML and on the command line: wrong and removed ones are refused."""

import dataclasses
import re
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from torchtitan.config import ConfigManager

from tests.jobs import CUSTOM_MODULE, cpu_only, make_config  # noqa: F401
from tests.layer import refused
from titan_fp8moe import Fp8FlowMoEConfig, RoutedExperts


def test_wrong_value_in_toml(tmp_path: Path):
    """tests/test_checks.py has each setting's."""
    (tmp_path / "wrong.toml").write_text('[fp8_flow_moe]\nwgrad = "blanced"\n')
    with refused("fp8_flow_moe.wgrad is 'blanced'; set it to one of 'balanced'"):
        ConfigManager().parse_args([CUSTOM_MODULE, f"--job.config_file={tmp_path}/wrong.toml"])


def printed(capsys: pytest.CaptureFixture) -> str:
    """Everything printed, without the boxes that tyro draws and its line breaks."""
    return " ".join(re.sub("[│╭╮╰╯─]", " ", "".join(capsys.readouterr())).split()).replace("_", "-")


def test_wrong_value_on_the_command_line(capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit) as exit_:
        make_config("--fp8_flow_moe.wgrad=fp8")
    message = printed(capsys)
    assert exit_.value.code != 0 and "fp8-flow-moe.wgrad" in message and "scaling-aware" in message, message
    for empty in ("", "layers.1.,"):  # would match every layer and leave the whole model in bf16
        with pytest.raises((ValueError, SystemExit)):
            make_config(f"--fp8_flow_moe.filter_fqns={empty}")


def test_help_lists_the_settings(capsys: pytest.CaptureFixture):
    with pytest.raises(SystemExit):
        make_config("--help")
    help_ = printed(capsys)
    options = set(re.findall(r"--fp8-flow-moe\.([a-z0-9-]+)", help_))
    names = {f.name.replace("_", "-") for f in dataclasses.fields(Fp8FlowMoEConfig)}
    assert {name for name in options if not name.startswith("no-")} == names
    choices = ",".join(get_args(get_type_hints(Fp8FlowMoEConfig)["wgrad"])).replace("_", "-")
    assert f"--fp8-flow-moe.wgrad {{{choices}}} How the two FP8 operands" in help_


def test_a_setting_assigned_later():
    config = Fp8FlowMoEConfig()
    config.recompute = "full"  # type: ignore[assignment]
    with refused("fp8_flow_moe.recompute is 'full'"):
        RoutedExperts(4, 128, 128, config=config)
