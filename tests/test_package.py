"""The wheel; tensors that state their dtype; untested versions; an import that changes nothing."""

import ast
import importlib
import itertools
import os
import shutil
import subprocess
import sys
import tomllib
import warnings
import zipfile
from collections import Counter
from pathlib import Path

import pytest
import torch
import triton
from packaging.requirements import Requirement

from tests.layer import refused
from tests.patched import undone
from titan_fp8moe import __version__, versions
from titan_fp8moe.torchtitan import cpu
from titan_fp8moe.trainer import cpu as trainer_cpu

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "titan_fp8moe"
NOT_COPIED = ".git", ".venv*", "outputs", "build", "*.egg-info", "__pycache__", ".*_cache", "*.gz"


def test_wheel_has_the_package_and_nothing_else(tmp_path: Path):
    """Built offline with the environment's setuptools, and from a copy, because setuptools writes into the folder."""
    copy = shutil.copytree(ROOT, tmp_path / "source", ignore=shutil.ignore_patterns(*NOT_COPIED))
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "TRITON"))}
    pip = [sys.executable, "-m", "pip", "wheel", "--no-index", "--no-deps", "--no-build-isolation", "--wheel-dir=.."]
    subprocess.run([*pip, "."], cwd=copy, env=environment, check=True)  # pytest shows what it says
    (built,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(built) as archive:
        files = {name: archive.read(name).decode() for name in archive.namelist()}
    sources = {str(path.relative_to(ROOT)) for kind in ("*.py", "py.typed") for path in PACKAGE.rglob(kind)}
    assert {name for name in files if ".dist-info/" not in name} == sources
    (metadata,) = (text for name, text in files.items() if name.endswith("METADATA"))
    assert f"\nVersion: {__version__}\n" in metadata and "\nLicense-Expression: BSD-3-Clause\n" in metadata
    required = [line for line in metadata.splitlines() if line.startswith("Requires-Dist: ") and "extra ==" not in line]
    assert sorted(Requirement(line.split(": ", 1)[1]).name for line in required) == ["torch", "triton"]


OF_FLOATS = {"empty", "empty_strided", "full", "linspace", "ones", "rand", "randn", "tensor", "zeros"}
FACTORIES = OF_FLOATS | {"arange", "as_tensor", "asarray", "eye", "randint", "randperm"}


def test_every_tensor_states_dtype_and_device():
    """Lightning, vLLM and DeepSpeed change the process-wide defaults."""
    silent: Counter[str] = Counter()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            function = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            name, stated = function.removeprefix("torch."), {k.arg for k in getattr(node, "keywords", ())}
            needed = {"device", "dtype"} if name in OF_FLOATS else {"device"}
            if function == f"torch.{name}" and name in FACTORIES and None not in stated and needed - stated:
                silent[str(path.relative_to(PACKAGE))] += 1
    # Parameters of a module are made as nn.Linear's are: where and as the caller's defaults say.
    assert silent == {"torchtitan03/lora.py": 1}


def install(folder: Path, package: str, version: str | None) -> str:
    """A path on which Python finds the package in this version, or in none."""
    if version is not None:
        (folder / f"{package}.dist-info").mkdir()
        (folder / f"{package}.dist-info/METADATA").write_text(f"Name: {package}\nVersion: {version}\n")
    return str(folder)


@pytest.mark.parametrize(("package", "version", "warned"), [
    ("torch", "2.10.1", True), ("torch", "2.11.0+cu130", False), ("torch", "2.15.0+cu132", False),
    ("torch", "2.16.0a0+git12345", True), ("triton", "3.9.1", False), ("triton", "3.10.0", True),
    ("torchtitan", "0.3.0", True), ("torchtitan", "0.2.2", False), ("torchao", None, False),
])  # fmt: skip
def test_versions_that_were_never_tested(monkeypatch, tmp_path, package, version, warned):
    """No other package is found but torch and Triton."""
    monkeypatch.setattr(sys, "path", [install(tmp_path, package, version)])
    for name, module in (("torch", torch), ("triton", triton)):
        monkeypatch.setattr(module, "__version__", version if name == package else f"{versions.TESTED[name][0]}.0")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        versions.warn_about_versions("torch", "triton", "torchtitan", "torchao")
    assert [f"never tested with {package} {version} (tested: " in str(w.message) for w in caught] == [True] * warned


def test_tested_versions_are_those_that_are_required():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = [*project["dependencies"], *itertools.chain(*project["optional-dependencies"].values())]
    required = [Requirement(text) for text in listed]
    for package, bounds in versions.TESTED.items():
        assert any(r.name == package and all(version in r.specifier for version in bounds) for r in required), package


IMPORT = """
import warnings, torch, triton
triton.__version__ = "3.4.0"
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import titan_fp8moe.torchtitan
print([str(w.message) for w in caught if "never tested" in str(w.message)])
later = ("compat", "compiling", "metrics", "torchtitan.parallel", "ahead", "auto_dispatch")
print([line for line in titan_fp8moe.patches.listed() if line.split(", ")[1].endswith(later)])
raise SystemExit(not titan_fp8moe.ops.backend.emulating())
"""


def test_an_import_changes_nothing():
    """Of torch, FSDP, pipelines and parallel styles; and it names the one version that was never tested, once. The
    environment switches kernels off."""
    options = dict(env=os.environ | {"TITAN_FP8MOE_EMULATE": "1"}, capture_output=True, text=True)
    done = subprocess.run([sys.executable, "-c", IMPORT], cwd=ROOT, **options)
    assert done.returncode == 0, done.stderr[-2000:]
    first, second = done.stdout.splitlines()[-2:]
    assert "triton 3.4.0 (tested: 3.6 to 3.9)" in first and first.count("never tested") == 1, done.stdout
    assert second == "[]", done.stdout
    assert ("uses the CPU and gloo" in done.stderr) == (not torch.cuda.is_available())


@pytest.mark.parametrize(("built_for", "visible", "has_gpu", "said"), [
    ("13.0", None, True, ["set CUDA_VISIBLE_DEVICES="]), ("13.0", "0", True, ["set CUDA_VISIBLE_DEVICES="]),
    (None, None, True, []), ("13.0", "", True, []), ("13.0", None, False, []),
])  # fmt: skip
def test_a_gpu_without_a_driver_does_not_train_on_the_cpu(monkeypatch, caplog, built_for, visible, has_gpu, said):
    """On a node of a GPU job it would wait for the others with another backend."""
    monkeypatch.setattr(torch.version, "cuda", built_for)
    monkeypatch.setattr(trainer_cpu, "_has_nvidia_gpu", lambda: has_gpu)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with undone(), refused(*said, error=RuntimeError):
        cpu.enable_cpu_training()
    assert ("torchtitan uses the CPU and gloo in this process" in caplog.text) == (not said)


@pytest.mark.parametrize(("adapter", "release", "said"), [
    ("torchtitan", "0.3.0", "use titan_fp8moe.torchtitan03"),
    ("torchtitan03", "0.2.2", "use titan_fp8moe.torchtitan with 0.2.2"),
])  # fmt: skip
def test_another_release_is_refused(monkeypatch, tmp_path, adapter, release, said):
    """Before the adapter changes anything, with the name of the one to use."""
    monkeypatch.syspath_prepend(install(tmp_path, "torchtitan", release))
    monkeypatch.delitem(sys.modules, f"titan_fp8moe.{adapter}", raising=False)
    with pytest.raises(ImportError, match=said):
        importlib.import_module(f"titan_fp8moe.{adapter}")
