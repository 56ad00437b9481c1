"""The settings of [fp8_flow_moe] in TOML and on the command line, assigned later, and in its help."""

from pathlib import Path

import pytest
from torchtitan.config import ConfigManager

from tests.jobs import CUSTOM_MODULE, cpu_only, make_config  # noqa: F401
from tests.layer import refused
from titan_fp8moe import Fp8FlowMoEConfig, RoutedExperts


def test_wrong_values(tmp_path: Path):
    """tests/test_checks.py has each setting's."""
    (tmp_path / "wrong.toml").write_text('[fp8_flow_moe]\nwgrad = "blanced"\n')
    with refused("fp8_flow_moe.wgrad is 'blanced'; set it to one of 'balanced'"):
        ConfigManager().parse_args([CUSTOM_MODULE, f"--job.config_file={tmp_path}/wrong.toml"])
    for wrong in ("wgrad=fp8", "filter_fqns=", "filter_fqns=layers.1.,"):  # the empty one would match every layer
        with pytest.raises((ValueError, SystemExit)):
            make_config(f"--fp8_flow_moe.{wrong}")
    config = Fp8FlowMoEConfig()
    config.recompute = "full"  # type: ignore[assignment]
    with refused("fp8_flow_moe.recompute is 'full'"):
        RoutedExperts(4, 128, 128, config=config)
