"""Wheel and source distribution, built offline from a copy of the checkout with the environment's setuptools."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import titan_fp8moe

ROOT = Path(__file__).parents[1]
NOT_COPIED = ".git", ".venv*", "outputs", "build", "*.egg-info", "__pycache__", ".*_cache", "*.gz"


def run(command: list[str], folder: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "TRITON"))}
    subprocess.run(command, cwd=folder, env=environment, check=True)  # pytest shows what it says


def files_below(folder: Path, *patterns: str) -> set[str]:
    """Relative paths of the files that match, Python's caches left out."""
    found = (path for pattern in patterns for path in folder.rglob(pattern) if path.is_file())
    return {str(path.relative_to(ROOT)) for path in found if "__pycache__" not in path.parts}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy, because setuptools writes into the folder that it builds from."""
    copy = tmp_path_factory.mktemp("checkout") / "source"
    return shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*NOT_COPIED))


def test_wheel_has_the_package_and_nothing_else(checkout: Path, tmp_path: Path):
    pip = [sys.executable, "-m", "pip", "wheel", "--disable-pip-version-check", "--no-index", "--no-deps"]
    run([*pip, "--no-build-isolation", "--wheel-dir", str(tmp_path), "."], checkout)
    (built,) = tmp_path.iterdir()
    with zipfile.ZipFile(built) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        (metadata,) = (name for name in archive.namelist() if name.endswith("METADATA"))
        text = archive.read(metadata).decode()
    assert names == files_below(ROOT / "titan_fp8moe", "*.py", "py.typed")
    assert {"titan_fp8moe/py.typed", "titan_fp8moe/kernels/gemm/hopper.py"} <= names
    assert f"\nVersion: {titan_fp8moe.__version__}\n" in text and "\nLicense-Expression: BSD-3-Clause\n" in text
    required = [line for line in text.splitlines() if line.startswith("Requires-Dist: ") and "extra ==" not in line]
    assert sorted(Requirement(line.split(": ", 1)[1]).name for line in required) == ["torch", "triton"]


def test_source_distribution_has_what_tests_read(checkout: Path, tmp_path: Path):
    build = f"from setuptools import build_meta; build_meta.build_sdist({str(tmp_path)!r})"
    run([sys.executable, "-c", build], checkout)
    (built,) = tmp_path.iterdir()
    with tarfile.open(built) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    folders = ("examples", "titan_fp8moe", "tests", "tools", "train_configs")
    needed = set().union(*(files_below(ROOT / folder, "*") for folder in folders))
    needed |= files_below(ROOT / "experiments", "*.py", "*.toml")
    needed |= {"LICENSE", "MANIFEST.in", "README.md", "pyproject.toml", ".ci/run"}
    assert needed <= names, needed - names
