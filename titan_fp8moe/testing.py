"""What every experiment writes beside its numbers: hardware, versions, date and command."""

import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import signal
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
    spec = sys.modules["__main__"].__spec__  # None of a script that is run by its path
    module = ["-m", spec.name] if spec else []
    return {
        "hardware": hardware,
        "versions": versions,
        "date": datetime.date.today().isoformat(),
        "command": shlex.join(["python", *module, *sys.argv[1 if module else 0 :]]),
    }


def exit_on_sigterm() -> None:
    """Lets ``finally`` end the processes that this one has started, when ``timeout`` or a person ends it."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))


def write_text(path: Path, text: str) -> None:
    """Puts a file in place whole: whoever reads it, or ends this process, meets the old text or the new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.new")
    new.write_text(text)
    os.replace(new, path)


def write_records(path: Path, records: list[dict]) -> None:
    """Adds ``records``, with the environment where they do not say it themselves, to the list in ``path``. They replace
    records of the same name, shape and reference. A record is a line."""

    def key(record: dict) -> tuple[str, str, str]:
        return record["name"], json.dumps(record["shape"]), record["reference"]

    env = environment()
    new = {key(record): env | record for record in records}
    old = json.loads(path.read_text()) if path.exists() else []
    kept = [record for record in old if key(record) not in new]
    lines = ",\n".join(json.dumps(record) for record in kept + list(new.values()))
    write_text(path, f"[\n{lines}\n]\n")
