"""The provenance of measurements: commit, hardware, versions and command."""

import datetime
import functools
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path

import torch

from titan_fp8moe.versions import installed


@functools.cache
def commit() -> str | None:
    """The checkout's short commit, with "+" if Python, shell or TOML files differ from it.

    ``$TITAN_FP8MOE_COMMIT`` where that is set, as for a copy of the files; None where there is neither.
    """
    root = Path(__file__).parents[1]
    if (name := os.environ.get("TITAN_FP8MOE_COMMIT")) or not (root / ".git").exists():
        return name

    def git(*args: str) -> str:
        command = ["git", "-C", str(root), *args]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    changed = git("status", "--porcelain", "--", "*.py", "*.sh", "*.toml")
    return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")


def environment() -> dict[str, object]:
    """Provenance of a measurement: hardware, versions, commit, date and command, without a machine's paths."""
    gpus = torch.cuda.device_count()
    hardware = f"{gpus} x {torch.cuda.get_device_name()}" if gpus else f"CPU ({platform.machine()})"
    versions = {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda}
    for package in ("triton", "torchtitan", "torchao"):
        versions[package] = installed(package)
    spec = sys.modules["__main__"].__spec__  # None for a script that is run by its path
    module = ["-m", spec.name] if spec else []
    arguments = (os.path.basename(a) if os.path.isabs(a) else a for a in sys.argv[1 if module else 0 :])
    return {
        "hardware": hardware,
        "versions": versions,
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
        "command": shlex.join(["python", *module, *arguments]),
    }
