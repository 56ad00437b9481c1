import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch

from experiments.reference import relative_error
from tests.distributed.runner import Place
from tests.processes import run_workers

SPLIT_BACKWARDS = re.compile("_zbv?|dualpipev")


class WorkerResults:
    """Results of a worker script's cases by name. All cases of a world size are computed at once, when the first of
    them is asked for, and after the smaller world sizes, whose files they may start from. A case that ends the script
    fails alone: the script runs again for those after it.

    Where there are GPUs, but fewer than a case has ranks, it runs on the CPU with gloo, from files of its own: what the
    smaller world sizes have left on GPUs differs by more than rounding.

    Args:
        out: where the script leaves ``<case>.pt``.
        script: of tests/distributed, or a tuple with its first arguments.
        groups: by number of ranks, the names of the cases.
        settings: of ranks that share a GPU.
    """

    def __init__(
        self,
        out: Path,
        script: str | tuple[str, ...],
        groups: dict[int, list[str]],
        cpu_only: bool = False,
        settings: tuple[str, ...] = (),
    ):
        self.out, self.script, self.groups, self.cpu_only, self.settings = out, script, groups, cpu_only, settings
        self.logs, self.ran = {}, set()

    def get(self, case: str, beside: str | None = None) -> dict:
        """The case's result, on the device of the case ``beside``, with which it is to be compared."""
        num_ranks = self._ranks(case)
        most_ranks = max(num_ranks, self._ranks(beside or case))
        cpu_only, out = self.cpu_only, self.out
        if not cpu_only and not self.settings and 0 < torch.cuda.device_count() < most_ranks:
            cpu_only, out = True, out / "cpu"
            if not out.exists():
                shutil.copytree(self.out, out, ignore=shutil.ignore_patterns("*.pt"))
        gloo = cpu_only or not torch.cuda.is_available()
        if gloo and SPLIT_BACKWARDS.search(case) and torch.__version__ < "2.13":
            pytest.skip("these schedules fail over gloo in torch before 2.13")
        for n, names in self.groups.items():
            if n <= num_ranks and (n, out) not in self.ran:
                self.ran.add((n, out))
                self._run(n, names, out, cpu_only)
        path = out / f"{case}.pt"
        assert path.exists(), f"no result for {case}; the workers' last words:\n{self.logs.get((case, out))}"
        result = torch.load(path)
        assert "error" not in result, result["error"]
        return result

    def assert_gradients(self, case: str, reference: str, tolerance: float) -> dict[str, float]:
        """The relative errors of the first step's gradients, by parameters, which are below a tolerance."""
        got, want = self.get(case)["grads"], self.get(reference, beside=case)["grads"]
        assert got.keys() == want.keys()
        errors = {name: relative_error(grad, want[name]) for name, grad in got.items()}
        assert max(errors.values()) < tolerance, sorted(errors.items(), key=lambda item: -item[1])[:3]
        return errors

    def assert_same_step(self, case: str, reference: str, tolerance: float) -> None:
        """Gradients up to a tolerance, and how the bias of each router has moved."""
        self.assert_gradients(case, reference, tolerance)
        biases, expected = self.get(case)["expert_bias"], self.get(reference, beside=case)["expert_bias"]
        assert biases.keys() == expected.keys()
        for name, bias in biases.items():
            moves = "mtp_layers" not in name  # which torchtitan does not balance
            assert torch.equal(bias, expected[name]) and (bias.abs().max() > 0) == moves, name

    def assert_gathered_in_fp8(self, case: str, whole: str) -> None:
        """Weights with the bits of those quantized when whole, since FSDP's compute dtype here is the parameters'."""
        got, want = self.get(case), self.get(whole)
        assert got["gathered"] == {"torch.uint8"} and want["gathered"] == {"torch.float32"}
        assert got["losses"] == want["losses"]
        assert all(torch.equal(got["grads"][name], grad) for name, grad in want["grads"].items())

    def _run(self, num_ranks: int, names: list[str], out: Path, cpu_only: bool) -> None:
        fruitless = 0
        while names and fruitless < 2:  # twice without any result: it is not the cases
            script, *first = (self.script,) if isinstance(self.script, str) else self.script
            with mock.patch.dict(os.environ, dict(setting.split("=") for setting in self.settings)):
                done = run_workers(
                    script, num_ranks, *first, str(out), *names, cpu_only=cpu_only, one_gpu=bool(self.settings)
                )
            left = [name for name in names if not (out / f"{name}.pt").exists()]
            fruitless = fruitless + 1 if len(left) == len(names) else 0
            log = done.stdout[-4000:] + done.stderr[-4000:]
            self.logs |= {(name, out): log for name in left}
            # The case that ended the script has left its error, or else nothing.
            failed = any("error" in torch.load(out / f"{name}.pt") for name in names if name not in left)
            names = left if failed else left[1:]

    def _ranks(self, case: str) -> int:
        return next(n for n, names in self.groups.items() if case in names)


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Place], WorkerResults]:
    """Runs what of the module's tests is selected for a place, all at once."""
    names: dict[Place, list[str]] = {}
    for item in request.session.items:
        if item.module is request.module and hasattr(item.function, "on_ranks") and not item.get_closest_marker("skip"):
            names.setdefault(item.callspec.params["place"], []).append(item.name)
    script, cpu_only = ("runner.py", request.module.__name__), getattr(request.module, "CPU_ONLY", False)
    results = {}
    for place, cases in names.items():
        out = tmp_path_factory.mktemp("ranks")
        results[place] = WorkerResults(out, script, {place.ranks: cases}, cpu_only, settings=place.settings)
    return results.__getitem__


@pytest.fixture(scope="session")
def case_dir(tmp_path_factory) -> Path:
    """Where the workers leave their results, with a tokenizer and a dataset for torchtitan to load."""
    from tokenizers import Tokenizer, models

    out = tmp_path_factory.mktemp("cases")
    (out / "tokenizer").mkdir()
    (out / "data").mkdir()
    vocab = {"<s>": 0, "</s>": 1} | {f"t{i}": i for i in range(2, 16)}
    Tokenizer(models.WordLevel(vocab, unk_token="<s>")).save(str(out / "tokenizer/tokenizer.json"))
    (out / "tokenizer/tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    (out / "data/part.jsonl").write_text('{"text": "unused"}\n' * 8)
    return out
