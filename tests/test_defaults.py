"""Nothing depends on the process-wide defaults of dtype and device, which Lightning, vLLM and DeepSpeed change."""

import ast
import contextlib
from pathlib import Path

import pytest
import torch
from torch import nn

from experiments import reference
from titan_fp8moe import RoutedExperts
from titan_fp8moe.layer import statistics

PACKAGE = Path(__file__).parents[1] / "titan_fp8moe"
OF_FLOATS = {"empty", "empty_strided", "full", "linspace", "ones", "rand", "randn", "tensor", "zeros"}
FACTORIES = OF_FLOATS | {"arange", "as_tensor", "asarray", "eye", "randint", "randperm"}
# Parameters of a module are made as nn.Linear's are: where and as the caller's defaults say.
OF_THE_CALLER = {"torchtitan03/lora.py": 1}
STATES = [(torch.bfloat16, "cpu"), (torch.float64, "cpu"), (torch.float32, "meta")]


def test_every_tensor_states_dtype_and_device():
    silent: dict[str, int] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            name, stated = node.func.attr, {keyword.arg for keyword in node.keywords}
            needed = {"device", "dtype"} if name in OF_FLOATS else {"device"}
            if ast.unparse(node.func.value) == "torch" and name in FACTORIES and None not in stated and needed - stated:
                place = str(path.relative_to(PACKAGE))
                silent[place] = silent.get(place, 0) + 1
    assert silent == OF_THE_CALLER


@contextlib.contextmanager
def defaults(dtype: torch.dtype, device: str):
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(torch.float32)


def step(experts: nn.Module, x, ids, scores) -> list[torch.Tensor]:
    leaves = [x.requires_grad_(), scores.requires_grad_(), *experts.parameters()]
    out = experts(x, ids, scores)
    return [out, *torch.autograd.grad(out, leaves, torch.ones_like(out))]


@pytest.mark.parametrize("state", STATES, ids=str)
@pytest.mark.parametrize("options", [{}, dict(activation="relu2"), dict(bias=True)])
def test_a_layer(state: tuple, options: dict):
    x, scores, ids, _ = reference.make_layer(40, 128, 64, 4, 2)
    experts = RoutedExperts(4, 128, 64, **options, device="cpu", dtype=torch.float32)
    statistics.collect()
    want, counts = step(experts, x, ids, scores), statistics.take("cpu")
    with defaults(*state):
        statistics.collect()
        got, figures = step(experts, x, ids, scores), statistics.summarize(statistics.take("cpu"))
    assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert str(figures) == str(statistics.summarize(counts))  # as strings, in which NaN equals NaN
