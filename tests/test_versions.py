"""What importing the package says and does: versions that were never tested, and no change before it is needed."""

import importlib
import itertools
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path

import pytest
import torch
import triton
from packaging.requirements import Requirement

from tests.layer import refused
from tests.patched import undone
from titan_fp8moe import versions
from titan_fp8moe.torchtitan import cpu
from titan_fp8moe.trainer import cpu as trainer_cpu

ROOT = Path(__file__).parents[1]


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
"""


def test_an_import_changes_nothing():
    """Of torch, FSDP, pipelines and parallel styles; and it names the one version that was never tested, once."""
    done = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    first, second = done.stdout.splitlines()[-2:]
    assert "triton 3.4.0 (tested: 3.6 to 3.9)" in first, done.stdout
    assert first.count("never tested") == first.count("(tested: ") == 1, done.stdout
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
