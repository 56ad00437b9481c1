"""Parsers, preliminaries and records that the scripts share, and the records' provenance."""

import datetime
import functools
import json
import os
import platform
import shlex
import signal
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterable, Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeVar

import torch

from titan_fp8moe.versions import installed

T = TypeVar("T")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # the CPU: in tests and for numerics/layer.py


def script_parser(description: str, *, out: str = "", budget: str = "") -> ArgumentParser:
    """A parser whose help is a script's docstring, with ``--out`` if ``out`` says what that names, and ``--budget`` if
    ``budget`` says what is not begun after it."""
    parser = ArgumentParser(description=description, formatter_class=RawDescriptionHelpFormatter)
    if out:
        parser.add_argument("--out", type=Path, required=True, help=out)
        parser.add_argument("--trial", action="store_true", help="record from files that differ from their commit")
    if budget:
        parser.add_argument("--budget", type=float, default=3600, help=f"seconds after which no {budget} is begun")
    return parser


def begin(parser: ArgumentParser, gpu: bool = True) -> Namespace:
    """Parses the options; requires a GPU and, but for a trial, files of a commit; prints where it runs, seeds torch.

    From here on SIGTERM is SystemExit, so that ``finally`` blocks end the processes that this one starts.
    """
    args, name = parser.parse_args(), commit()
    if gpu and not torch.cuda.is_available():
        sys.exit(f"error: this measures on a GPU, and PyTorch {torch.__version__} finds none")
    if not args.trial and (not name or name.endswith("+")):
        what = f"files differ from commit {name[:-1]}" if name else "there is no checkout"
        sys.exit(f"error: {what}; commit them, name the commit in $TITAN_FP8MOE_COMMIT, or pass --trial")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    setting = environment()
    print(setting["hardware"], setting["versions"], flush=True)
    torch.manual_seed(0)
    return args


def within(seconds: float, items: Iterable[T]) -> Iterator[T]:
    """Yields the items that begin within a time, and frees the GPU's memory behind each."""
    deadline = time.monotonic() + seconds
    for item in items:
        if time.monotonic() > deadline:
            print("out of time", flush=True)
            return
        yield item
        torch.cuda.empty_cache()


def measure_each(description: str, what: str, cases: Iterable[T], measure: Callable[[T], list[dict]]) -> None:
    """A script's main on a GPU: adds the records of each case, which ``what`` names, as soon as it is measured."""
    args = begin(script_parser(description, out="add the records to this JSON file", budget=what))
    for case in within(args.budget, cases):
        write_records(args.out, measure(case))


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


def other_torch() -> list[str]:
    """Names a PyTorch that is not the tables' own, 2.11, for a record's shape."""
    release = torch.__version__.partition("+")[0]
    return [] if release.startswith("2.11.") else [f"torch {release}"]


def record(
    name: str, shape: str, unit: str, value: float, reference: str, reference_value: float | None, **fields: Any
) -> dict[str, Any]:
    """Ours next to a reference, if there is one, with further ``fields``.

    ``speedup`` says how many times as good ours is. More is better of rates, less of all else.
    """
    speedup = None
    if reference_value is not None:
        speedup = value / reference_value if "/s" in unit else reference_value / value
    names = dict(name=name, shape=shape, unit=unit, reference=reference)
    return names | dict(value=value, reference_value=reference_value, speedup=speedup) | fields


def write_text(path: Path, text: str) -> None:
    """Replaces a file as a whole: a reader, or whoever ends this process, finds the old text or the new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.new")
    new.write_text(text)
    os.replace(new, path)


def write_records(path: Path, records: list[dict]) -> None:
    """Prints ``records``, and adds them to the list in ``path`` with the fields of :func:`environment` that they lack.

    They replace records of the same name, shape, reference and hardware.
    """
    key, env = itemgetter("name", "shape", "reference", "hardware"), environment()
    new = {key(record): record for record in (env | record for record in records)}
    for r in new.values():
        over = r["reference"] and f", {r['speedup']:.3f}x of {r['reference']}"
        print(f"{r['name']}, {r['shape']}: {r['value']:.5g} {r['unit']}{over}", flush=True)
    old = json.loads(path.read_text()) if path.exists() else []
    kept = [record for record in old if key(record) not in new]
    write_list(path, kept + list(new.values()))


def write_list(path: Path, records: list[dict]) -> None:
    """Writes ``records`` as a list, one per line."""
    lines = ",\n".join(map(json.dumps, records))
    write_text(path, f"[\n{lines}\n]\n")
