"""Loads a job's TOML file as torchtitan 0.2.2 does, but refuses what torchtitan only warns of."""

import warnings
from collections.abc import Sequence

from torchtitan.config import ConfigManager, JobConfig


def load(path: str, overrides: Sequence[str] = ()) -> JobConfig:
    """The job of a TOML file and of torchtitan's own arguments.

    Raises:
        ValueError: for a mistake in the file, in the words of torchtitan or of tyro, which warns of wrong types.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("error", module=r"tyro\.")
        try:
            return ConfigManager().parse_args([f"--job.config_file={path}", *overrides])
        except Warning as warning:
            raise ValueError(f"{path}: {warning}") from warning
