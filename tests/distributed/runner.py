"""Runs cases on ranks: in every process of a group, which this file begins, and gathers results over the ranks.

    torchrun --nproc_per_node N tests/distributed/runner.py MODULE[:FUNCTION] OUT_DIR CASE...

A case is an argument of the module's ``FUNCTION(case, out)``, or a row of one of its tests with :func:`on_ranks`.
"""

import faulthandler
import functools
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

from tests.processes import time_limit
from titan_fp8moe import ops, recipe
from titan_fp8moe.export_fp8 import fp8_tensors
from titan_fp8moe.export_fp8.format import BALANCE, exported
from titan_fp8moe.trainer.experts import TitanExperts
from titan_fp8moe.trainer.plan import plain_name

# Seconds, after which a hang prints every thread's stack and ends the run. On GPUs kernels compile first.
CASE_TIMEOUT = 600 if torch.cuda.is_available() else time_limit(60)


class Place(NamedTuple):
    """Where a case runs: ``ranks`` processes, on GPUs with NCCL where there are enough, else on the CPU with gloo; or
    on one GPU that they share, with these settings."""

    ranks: int
    settings: tuple[str, ...] = ()


SHARED_GPU = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1", "GLOO_SOCKET_IFNAME=lo"
ONE_GPU = pytest.param(Place(4, SHARED_GPU), marks=pytest.mark.gpu, id="gpu")
ONE_CONNECTION = pytest.param(
    Place(4, (*SHARED_GPU, "CUDA_DEVICE_MAX_CONNECTIONS=1")), marks=pytest.mark.gpu, id="gpu_connection"
)


def on_ranks(*places: Any, rows: dict[str, Any] | None = None) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a test of a function whose asserts must hold on every rank. ``places``: numbers of ranks, or the above.

    Args:
        rows: arguments of the function by name, each for a test of its own.
    """
    params = [pytest.param(Place(p), id=str(p)) if isinstance(p, int) else p for p in places]

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @pytest.mark.parametrize("place", params)
        @pytest.mark.parametrize("row", list(rows or [""]))
        def test(place: Place, row: str, ranks: Any, request: pytest.FixtureRequest) -> None:
            ranks(place).get(request.node.name)

        test.on_ranks = lambda row: function(rows[row]) if rows else function()
        return test

    return decorate


def run_test(module: ModuleType, case: str, out: Path) -> dict:
    """A case by its test's name, ``function[row-place]``."""
    name, _, ids = case.removesuffix("]").partition("[")
    getattr(module, name).on_ranks(ids.rpartition("-")[0])
    return {}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gather_list(value) -> list:
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def gather(values: dict) -> dict:
    """On rank 0 the union of all ranks' dicts: pipeline stages hold different parameters."""
    parts = [{}] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(values, parts)
    return {name: value for part in parts or () for name, value in part.items()}


def buffers(parts: list[nn.Module], ending: str | tuple[str, ...]) -> dict[str, torch.Tensor]:
    """A model's whole buffers with this ending of their names, as they are now; collective."""
    named = [(plain_name(name), b) for part in parts for name, b in part.named_buffers()]
    return {name: whole(b).cpu().clone() for name, b in named if name.endswith(ending)}


def gathered_dtypes(parts: list[nn.Module]) -> set[str]:
    """Of what FSDP gathers for the experts."""
    modules = [module for part in parts for module in part.modules()]
    experts = {id(p) for m in modules if isinstance(m, TitanExperts) for p in m.parameters()}
    states = [module._get_fsdp_state() for module in modules if isinstance(module, FSDPModule)]
    # Since torch 2.14 a state has several groups.
    groups = [g for s in states for g in getattr(s, "_fsdp_param_groups", None) or [s._fsdp_param_group]]
    found = [p for group in groups if group for p in group.fsdp_params if id(p.sharded_param) in experts]
    return {str(p.all_gather_outputs[0].dtype) for p in found}


def load(parts: list[nn.Module], seed: Path) -> dict[str, nn.Parameter]:
    """A model's parameters, which get the values of the first model that asked for the file. By hand, since
    torch.distributed.checkpoint does not know names that hooks split. Adapters are random: B too, so that A has a
    gradient."""
    parameters = {plain_name(name): p for part in parts for name, p in part.named_parameters()}
    if not seed.exists():
        torch.save({name: whole(p).detach().cpu().clone() for name, p in parameters.items()}, seed)
    state = torch.load(seed, mmap=True)
    with torch.no_grad():
        for i, (name, p) in enumerate(parameters.items()):
            draws = "lora_" in name
            full = 0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(i)) if draws else state[name]
            placed = isinstance(p, DTensor)
            p.copy_(distribute_tensor(full, p.device_mesh, p.placements, src_data_rank=None) if placed else full)
    return parameters


def train(
    trainer: Any, module: ModuleType, data: Iterator, steps: int, scale: float = 1.0, before: Callable = lambda: None
) -> dict[str, Any]:
    """Steps of a trainer of torchtitan: "losses", "norms", and of the first step all "grads", times ``scale``, what
    routers have "counted", and the "expert_bias" after it; what FSDP has "gathered" and the number of "graphs".

    Args:
        module: the trainer's.
        before: is called before each step.
    """
    clip, losses, norms = module.dist_utils.clip_grad_norm_, [], []
    found: dict[str, Any] = {"norms": norms}

    def clip_and_record(*args: Any, **kwargs: Any) -> torch.Tensor:
        if trainer.step == 1:
            named = [(plain_name(n), p) for part in trainer.model_parts for n, p in part.named_parameters()]
            # Text has none for a vision encoder.
            named = [(n, p) for n, p in named if p.requires_grad and "vision_encoder" not in n]
            found["grads"] = gather({n: whole(p.grad).detach().cpu().clone() * scale for n, p in named})
            found["counted"] = trainer.counted() if hasattr(trainer, "counted") else None
        norms.append(float(whole(norm := clip(*args, **kwargs))))
        return norm

    trainer.metrics_processor.log = lambda step, loss, *args, **kwargs: losses.append(float(loss))
    with mock.patch.object(module.dist_utils, "clip_grad_norm_", clip_and_record):
        for trainer.step in range(1, steps + 1):
            before()
            trainer.train_step(data)
            if trainer.step == 1:  # later ones depend on how the optimizer rounds
                found["expert_bias"] = gather(buffers(trainer.model_parts, ("expert_bias", "expert_bias_E")))
    # Under pipeline parallelism only the last stage knows the loss; the others log negative values.
    found["losses"] = max(gather_list(losses), key=lambda values: values[0])
    return found | {"gathered": gathered_dtypes(trainer.model_parts), "graphs": counters["stats"]["unique_graphs"]}


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8))


def wrong_fp8_tensors(model: nn.Module, adapter: Any, precision: torch.dtype = torch.float32) -> list[str]:
    """Names of fp8_tensors, gathered and each rank's own, that an export of the whole state would not write so."""
    options: dict[str, Any] = dict(adapter=adapter, quantized_from=precision, bucket_bytes=1 << 16)
    buckets = (fp8_tensors(model, gather=gather, **options) for gather in (True, False))
    gathered, own = ({name: t for bucket in found for name, t in bucket.items()} for found in buckets)
    state = {plain_name(k): whole(v) for k, v in model.state_dict().items()}
    want: dict[str, torch.Tensor] = {}
    for name, value in adapter.to_hf(state).items():
        quantized_from = precision if f"{name}_scale_inv" in gathered else None
        want |= exported(name, value, quantized_from, recipe.quantize_weight, name.endswith(BALANCE))
    assert any(".experts." in name and name.endswith("_scale_inv") for name in want)

    def wrong(got: dict[str, torch.Tensor]) -> set[str]:
        return {name for name, t in got.items() if name not in want or not same_bits(t, want[name])}

    held = {name for names in gather_list(list(own)) for name in names}
    return sorted(wrong(gathered) | wrong(own) | (want.keys() ^ gathered.keys()) | (want.keys() ^ held))


def batches(
    dims: Any, global_batch: int, length: int, size: int, vocabulary: int
) -> Iterator[tuple[torch.Tensor, ...]]:
    """Inputs and labels of this rank's microbatches of ``size`` sequences. Each rank has contiguous rows of the global
    batch. Tokens are skewed, so that experts are unequal. ``dims``: torchtitan's ParallelDims."""
    generator, rank, ranks = torch.Generator().manual_seed(0), 0, 1
    if dims.dp_enabled:
        mesh = dims.get_mesh("batch")
        rank, ranks = mesh.get_local_rank(), mesh.size()
    while True:
        tokens = (torch.rand(global_batch, length + 1, generator=generator) ** 3 * vocabulary).long()
        for micro in tokens.chunk(ranks)[rank].split(size):
            yield micro[:, :-1].contiguous(), micro[:, 1:].contiguous()


def start() -> None:
    """Begins the ranks' group, with NCCL where there are GPUs enough."""
    cuda, count = torch.cuda.is_available(), torch.cuda.device_count()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % count)
    shared = cuda and count < int(os.environ["WORLD_SIZE"])
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda and not shared else "gloo")
    if shared:
        ops.start_all_to_all, ops.wait = _all_to_all_through_the_host, lambda rows: rows


def _all_to_all_through_the_host(
    rows: torch.Tensor, output_splits: list[int], input_splits: list[int], group_name: str
) -> torch.Tensor:
    """For processes that share a GPU, which NCCL refuses and gloo cannot."""
    received = torch.empty(sum(output_splits), *rows.shape[1:], dtype=rows.dtype)
    dist.all_to_all_single(received, rows.cpu(), output_splits, input_splits)
    return received.to(rows.device)


def run_all(run: Callable[[str, Path], dict]) -> None:
    """Runs the cases named on the command line, ``OUT_DIR CASE...``, and leaves each result, or error, in OUT_DIR."""
    out = Path(sys.argv[1])
    for case in sys.argv[2:]:
        faulthandler.dump_traceback_later(CASE_TIMEOUT, exit=True)
        try:
            result = run(case, out)
        except BaseException:
            # Any rank's error is the case's; the launcher ends the others, which may wait for this one.
            torch.save({"error": traceback.format_exc()}, out / f"{case}.pt")
            os._exit(1)
        if dist.get_rank() == 0:
            torch.save(result, out / f"{case}.pt")
    dist.destroy_process_group()


def main() -> None:
    name, _, function = sys.argv.pop(1).partition(":")
    module = importlib.import_module(name)
    start()
    run_all(getattr(module, function) if function else functools.partial(run_test, module))


if __name__ == "__main__":
    main()
