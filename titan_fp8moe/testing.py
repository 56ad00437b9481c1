"""A reference MoE layer, two timers for a GPU, and the provenance of measurements.

Imports torch and the standard library only, so that it works wherever the package does.
"""

import datetime
import functools
import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# --- reference --------------------------------------------------------------------------------------------------------


class LayerInputs(NamedTuple):
    """Random inputs of an MoE layer.

    Attributes:
        x_TD: (T, D) tokens.
        topk_scores_TK: (T, K) fp32 in [0, 1).
        topk_ids_TK: (T, K) int64, K different experts for each token.
        weights: w1 (E, H, D), w2 (E, D, H) and w3 (E, H, D), fp32.
    """

    x_TD: Tensor
    topk_scores_TK: Tensor
    topk_ids_TK: Tensor
    weights: list[Tensor]


def make_layer(
    tokens: int,
    dim: int,
    hidden: int,
    experts: int,
    top_k: int,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    std: float = 0.05,
) -> LayerInputs:
    """Inputs of a layer: ``x_TD`` is normal in ``dtype``, weights are normal with standard deviation ``std``."""
    x_TD = torch.randn(tokens, dim, device=device, dtype=dtype)
    topk_scores_TK = torch.rand(tokens, top_k, dtype=torch.float32, device=device)
    topk_ids_TK = torch.rand(tokens, experts, dtype=torch.float32, device=device).topk(top_k, dim=1).indices
    shapes = (hidden, dim), (dim, hidden), (hidden, dim)
    weights = [torch.randn(experts, *shape, dtype=torch.float32, device=device) * std for shape in shapes]
    return LayerInputs(x_TD, topk_scores_TK, topk_ids_TK, weights)


def moe_layer(
    x_TD: Tensor,
    topk_scores_TK: Tensor,
    topk_ids_TK: Tensor,
    w1: Tensor,
    w2: Tensor,
    w3: Tensor,
    score_before_experts: bool,
) -> Tensor:
    """The routed experts from first principles, differentiable, in the precision of ``x_TD``.

    Sums score * W2 (silu(W1 x) * (W3 x)) over a token's experts, or with ``score_before_experts`` the experts applied
    to score * x. Shapes are those of :class:`LayerInputs`; returns (T, D).
    """
    out_TD = torch.zeros_like(x_TD)
    for e in range(w1.shape[0]):
        token, k = (topk_ids_TK == e).nonzero(as_tuple=True)
        score = topk_scores_TK[token, k].unsqueeze(1).to(x_TD.dtype)
        x = x_TD[token] * score if score_before_experts else x_TD[token]
        y = (F.silu(x @ w1[e].T) * (x @ w3[e].T)) @ w2[e].T
        out_TD = out_TD.index_add(0, token, y if score_before_experts else y * score)
    return out_TD


class _Block(nn.Module):
    def __init__(self, moe: nn.Module):
        super().__init__()
        self.moe, self.moe_enabled = moe, True


def in_model(moe: nn.Module) -> nn.Module:
    """A model of one block with this MoE layer, as torchtitan's parallelize functions expect it."""
    model = nn.Module()
    model.layers = nn.ModuleDict({"0": _Block(moe)})
    return model


def relative_error(out: Tensor, ref: Tensor) -> float:
    """||out - ref|| / ||ref|| in float64; NaN if either has one, which no threshold accepts."""
    return float((out.double() - ref.double()).norm() / ref.double().norm())


# --- time on a GPU ----------------------------------------------------------------------------------------------------


def elapsed_ms(run: Callable[[], object]) -> float:
    """Milliseconds between the GPU's arrival at ``run`` and its end."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def after_idling_ms(run: Callable[[], object], idle_s: float = 0.04) -> float:
    """Milliseconds of one run after the GPU has idled, with nothing of its operands in L2."""
    torch.cuda.synchronize()
    time.sleep(idle_s)
    torch.empty(2**28, dtype=torch.uint8, device="cuda").zero_()
    torch.cuda._sleep(2_000_000)  # longer than the host takes to launch
    return elapsed_ms(run)


# --- provenance -------------------------------------------------------------------------------------------------------


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


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def environment() -> dict[str, object]:
    """Provenance of a measurement: hardware, versions, commit, date and command, without a machine's paths."""
    gpus = torch.cuda.device_count()
    hardware = f"{gpus} x {torch.cuda.get_device_name()}" if gpus else f"CPU ({platform.machine()})"
    versions = {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda}
    for package in ("triton", "torchtitan", "torchao"):
        versions[package] = _version(package)
    spec = sys.modules["__main__"].__spec__  # None for a script that is run by its path
    module = ["-m", spec.name] if spec else []
    return {
        "hardware": hardware,
        "versions": versions,
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
        "command": shlex.join(["python", *module, *map(_name, sys.argv[1 if module else 0 :])]),
    }


def _name(argument: str) -> str:
    return os.path.basename(argument) if os.path.isabs(argument) else argument
