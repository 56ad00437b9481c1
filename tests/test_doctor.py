"""Where kernels may run: at once on what tests have run on, after a comparison elsewhere, and not where they differ."""

import functools
import itertools
import logging
import re
from unittest.mock import Mock

import pytest
import torch
from triton import knobs

from tests.layer import refused
from titan_fp8moe import doctor, ops, recipe
from titan_fp8moe.ops import backend, self_check
from titan_fp8moe.trainer import preflight

HOPPER = (9, 0), "2.11", "3.6"


CASES = [*self_check.cases()]
ON_GPU = Mock(is_cuda=True)  # all that an op asks of a tensor


@pytest.fixture
def gpu(monkeypatch):
    """Pretends that there is this GPU, whose kernels differ in the ``wrong`` ones of two. Returns what is compared."""
    compared = []

    def agrees(case, device, wrong):
        compared.append((device, backend._gate))
        return case.name not in wrong

    def pretend(where=HOPPER, hip=None, wrong=()):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: where[0])
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "GPU")
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(torch, "__version__", f"{where[1]}.0+cu130")
        monkeypatch.setattr(self_check.triton, "__version__", f"{where[2]}.0")
        monkeypatch.setattr(self_check, "cases", lambda: CASES[:2])
        monkeypatch.setattr(self_check, "agrees", functools.partial(agrees, wrong=wrong))
        backend.before_first_kernel(self_check.require_checked)
        return compared

    before = backend.emulating()
    ops.emulate(False)
    yield pretend
    ops.emulate(before)
    backend.before_first_kernel(self_check.require_checked)


@pytest.mark.parametrize(("where", "untested"), [
    (HOPPER, False), (((9, 0), "2.14", "3.8"), False),
    (((9, 0), "2.13", "3.6"), True), (((9, 0), "2.11", "3.8"), True), (((8, 9), "2.11", "3.6"), True),
])  # fmt: skip
def test_other_combinations_than_the_tested_are_compared_once(gpu, caplog, capsys, where, untested):
    compared = gpu(where)
    with caplog.at_level(logging.WARNING):
        assert backend.use_kernels(ON_GPU)
        assert preflight.check_hardware() == "Triton kernels on GPU"
    assert compared == [("cuda", None)] * 2 * untested  # once, and kernels could run meanwhile
    (major, minor), torch_version, triton_version = where
    said = f"never tested on GPU ({major}.{minor}) with PyTorch {torch_version} and Triton {triton_version}"
    assert (said in caplog.text) == untested == bool(caplog.text)
    assert doctor.main() == 0
    printed = capsys.readouterr().out
    assert "agree with the specification\n" in printed and ("NOT among" in printed) == untested


def test_kernels_that_differ_never_run(gpu, capsys):
    """Neither in torchtitan nor elsewhere; the reference does, which is not compared with itself."""
    wrong = [case.name for case in CASES[:2]]
    compared = gpu(((9, 0), "2.14", "3.6"), wrong=wrong)
    for _ in range(2):
        with refused(f"{', '.join(wrong)}; please report", "titan_fp8moe.doctor", error=RuntimeError):
            backend.use_kernels(ON_GPU)
        with refused("differ from the specification", error=RuntimeError):
            preflight.check_hardware()
    assert len(compared) == 8
    assert doctor.main() == 1 and f"kernels      differ: {', '.join(wrong)}\n" in capsys.readouterr().out
    ops.emulate(True)
    assert not backend.use_kernels(ON_GPU) and preflight.check_hardware().endswith("(TITAN_FP8MOE_EMULATE)")
    with refused("has turned them off", error=RuntimeError):
        self_check.self_check()


@pytest.mark.parametrize(("capability", "hip"), [((8, 0), None), ((9, 0), "6.4")])
def test_gpus_without_the_format_are_refused(gpu, capsys, capability, hip):
    compared = gpu((capability, "2.11", "3.6"), hip)
    with refused("compute capability 8.9 or later", f"GPU ({capability[0]}.0)", "TITAN_FP8MOE_EMULATE=1"):
        backend.use_kernels(ON_GPU)
    assert doctor.main() == 1 and "not run: the FP8 kernels need an NVIDIA GPU" in capsys.readouterr().out
    assert not compared


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_wrong_element_is_found(case):
    """In any result of any op; where an exponential is allowed its last bits, one in 64."""
    assert self_check.agrees(case, "cpu")
    for index in range(len(self_check.run(case, "cpu"))):
        calls = itertools.count()

        def spoiled(*args, index=index, calls=calls):
            results = self_check.run(case._replace(args=args), "cpu")
            if next(calls):  # the first is the reference
                spoil = results[index] = results[index].clone(memory_format=torch.contiguous_format)
                raw, size = spoil.view(torch.uint8).view(-1), spoil.itemsize
                raw[size - 1 :: 64 * size if case.nearly else raw.numel()] ^= 0x40 if case.nearly else 1
            return results

        assert not self_check.agrees(case._replace(op=spoiled), "cpu"), index


def test_what_is_compared():
    """Also what a backward computes again: dh and a with their scales, and the scores' gradient. Where an exponential
    is allowed its last bits, one code in a thousand may be the next one."""
    results = [self_check.run(case, "cpu") for case in CASES if "quantize_backward" in case.name]
    assert results and all(len(found) >= 5 for found in results)
    want = torch.full((4096,), 3.0)
    for wrong, near in ((3.25, True), (-3.0, False), (float("nan"), False)):
        got = want.clone()
        got[:4] = wrong
        assert self_check.same(got.to(recipe.FP8), want.to(recipe.FP8), nearly=True) == near


@pytest.mark.skipif(torch.cuda.is_available(), reason="without a GPU")
def test_without_a_gpu(capsys, tmp_path, monkeypatch):
    """And the ptxas in use: Triton's own, or what the environment puts in its place."""
    monkeypatch.delenv("TRITON_PTXAS_PATH", raising=False)
    assert doctor.main() == 0
    said = capsys.readouterr().out
    why = "for CUDA, but its driver finds no GPU" if torch.version.cuda else "without CUDA"
    assert f"torch {torch.__version__}" in said and f"kernels      not run: PyTorch is built {why}" in said
    version = re.search(r"ptxas        (.*), of Triton\n", said)[1]
    (tmp_path / "ptxas").symlink_to(knobs.nvidia.ptxas.path)
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(tmp_path / "ptxas"))
    assert doctor.main() == 0
    assert f"ptxas        {version}, {tmp_path}/ptxas\n" in capsys.readouterr().out
