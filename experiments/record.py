"""What every experiment writes beside its numbers: hardware, versions, date and command."""

import datetime
import importlib.metadata
import json
import platform
import shlex
import sys
from pathlib import Path

import torch


def environment() -> dict:
    """The fields that tell where and how a number was measured."""
    gpus = torch.cuda.device_count()
    hardware = f"{gpus} x {torch.cuda.get_device_name()}" if gpus else f"CPU ({platform.machine()})"
    versions = {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda}
    for package in ("triton", "torchtitan", "torchao"):
        versions[package] = importlib.metadata.version(package)
    return {
        "hardware": hardware,
        "versions": versions,
        "date": datetime.date.today().isoformat(),
        "command": shlex.join(["python", *sys.argv]),
    }


def write_records(path: Path, records: list[dict]) -> None:
    """Writes ``records`` with the environment added to each."""
    env = environment()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([record | env for record in records], indent=1) + "\n")
