"""The versions that the tests have run with, and a warning at import about others."""

import importlib.metadata
import re
import warnings

import torch
import triton

TESTED = {
    "torch": ("2.11", "2.15"),
    "triton": ("3.6", "3.9"),
    "torchtitan": ("0.2.2", "0.2.2"),
    "torchao": ("0.18", "0.18"),
    "transformers": ("5.17", "5.24"),
    "peft": ("0.21", "0.21"),
}
"""The first and the last version, of as many parts as matter."""


def warn_about_versions(*packages: str) -> None:
    """One warning that names the installed versions of ``packages`` outside of :data:`TESTED`. Python shows it once."""
    others = []
    for package in packages:
        first, last = TESTED[package]
        version = installed(package)
        if version is not None and not _parts(first) <= _parts(version, like=first) <= _parts(last):
            others.append(f"{package} {version} (tested: {first if first == last else f'{first} to {last}'})")
    if others:
        warnings.warn(
            f"titan_fp8moe was never tested with {', '.join(others)}; install a tested version, or run python -m "
            "titan_fp8moe.doctor and its tests first",
            stacklevel=3,
        )


def installed(package: str) -> str | None:
    """The version of a package, or None where it is not there."""
    loaded = {"torch": torch, "triton": triton}
    try:
        return loaded[package].__version__ if package in loaded else importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _parts(version: str, like: str = "") -> tuple[int, ...]:
    """Its numbers, as many as ``like`` has if that is given; "2.14.0a0+git" begins with 2, 14, 0."""
    numbers = tuple(int(number) for number in re.findall(r"\d+", version.split("+")[0]))
    return numbers[: len(_parts(like))] if like else numbers
