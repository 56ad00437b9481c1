"""Wheel and source distribution, built offline from a copy of the checkout with the environment's setuptools.

The wheel then runs a layer where only torch, triton and what they require can be imported.
"""

import importlib.metadata
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
from tests.test_rooms import ADAPTERS

ROOT = Path(__file__).parents[1]
NOT_COPIED = shutil.ignore_patterns(
    ".git", ".venv*", "outputs", "build", "*.egg-info", "__pycache__", ".*_cache", "*.gz"
)


def run(command: list[str], folder: Path, **variables: str) -> str:
    """Output of a command; fails with it."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "TRITON"))}
    result = subprocess.run(command, cwd=folder, env=environment | variables, text=True, capture_output=True)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def files_below(folder: Path, *patterns: str) -> set[str]:
    """Relative paths of the files that match, Python's caches left out."""
    found = (path for pattern in patterns for path in folder.rglob(pattern) if path.is_file())
    return {str(path.relative_to(ROOT)) for path in found if "__pycache__" not in path.parts}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy, because setuptools writes into the folder that it builds from."""
    return shutil.copytree(ROOT, tmp_path_factory.mktemp("checkout") / "source", ignore=NOT_COPIED)


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "wheel", "--disable-pip-version-check", "--no-index", "--no-deps"]
    run([*pip, "--no-build-isolation", "--wheel-dir", str(out), "."], checkout)
    (built,) = out.iterdir()
    return built


def test_wheel_has_the_package_and_nothing_else(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
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


def distributions(*names: str) -> dict[str, importlib.metadata.Distribution]:
    """These and all that they require."""
    found, wanted = {}, list(names)
    while wanted:
        if (name := wanted.pop()) not in found:
            found[name] = importlib.metadata.distribution(name)
            requirements = map(Requirement, found[name].requires or [])
            wanted += [r.name for r in requirements if r.marker is None or r.marker.evaluate({"extra": ""})]
    return found


@pytest.fixture(scope="module")
def torch_and_triton(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of links to the installed torch, triton and what they require."""
    folder = tmp_path_factory.mktemp("site")
    for distribution in distributions("torch", "triton").values():
        for name in {file.parts[0] for file in distribution.files or []} - {"..", "__pycache__"}:
            if not (folder / name).exists():
                (folder / name).symlink_to(Path(str(distribution.locate_file(name))))
    return folder


# Imports every module outside the adapters, then runs a layer forward and backward.
LAYER = """
import importlib, pkgutil, sys
import titan_fp8moe
assert titan_fp8moe.__file__.startswith(sys.argv[1]), titan_fp8moe.__file__
for info in pkgutil.walk_packages(titan_fp8moe.__path__, "titan_fp8moe."):
    if info.name.split(".")[1] not in sys.argv[2:]:
        importlib.import_module(info.name)
        print(info.name)
import torch
weights = [torch.randn(4, 128, 128, requires_grad=True) for _ in range(3)]
x, scores = torch.randn(9, 128, requires_grad=True), torch.rand(9, 2)
out = titan_fp8moe.routed_experts(x, *weights, torch.randint(0, 4, (9, 2)), scores)
out.sum().backward()
assert x.grad.isfinite().all() and weights[0].grad.any()
for name in ("torchtitan", "torchao", "numpy", "matplotlib", "tomli", "wandb"):
    assert name not in sys.modules, name
"""


def test_wheel_needs_torch_and_triton_only(wheel: Path, torch_and_triton: Path, tmp_path: Path):
    target = tmp_path / "installed"
    pip = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--no-index", "--no-deps"]
    run([*pip, "--target", str(target), str(wheel)], tmp_path)
    path = os.pathsep.join(map(str, (target, torch_and_triton)))
    # -S leaves out the environment's own packages.
    imported = run([sys.executable, "-S", "-c", LAYER, str(target), *ADAPTERS], tmp_path, PYTHONPATH=path).split()
    assert {"titan_fp8moe.kernels.gemm.hopper", "titan_fp8moe.ops.quantize", "titan_fp8moe.doctor"} <= set(imported)
