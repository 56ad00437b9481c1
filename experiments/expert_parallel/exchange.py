"""Dispatch over symmetric memory, next to the all-to-all path in FP8 and to bf16 rows as torchtitan moves them.

    python -m experiments.expert_parallel.exchange --out experiments/expert_parallel/results.json

It takes two GPUs or more of a node, a process on each, and less than nine minutes.
"""

import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from experiments.records import begin, record, script_parser, write_records
from experiments.timing import elapsed_ms, medians_in_turn
from titan_fp8moe import Fp8FlowMoEConfig, ops, routed_experts
from titan_fp8moe.dispatch.symmetric import kernels, workspace
from titan_fp8moe.kernels import permute

LIMIT = 530  # seconds
FACTOR, DEVICE = 1.5, "cuda"
ROUNDS = 3


class Shape(NamedTuple):
    """T tokens of each of N ranks, model dim D, top K of E experts on each rank, hidden dim H."""

    name: str
    T: int
    D: int
    K: int
    E: int
    H: int

    def __str__(self) -> str:
        return f"{self.name}, {self.E} experts per GPU, {self.T} tokens"


SHAPES = (
    Shape("671B", 4096, 7168, 8, 64, 2048),
    Shape("671B", 16384, 7168, 8, 64, 2048),
    Shape("16B", 4096, 2048, 6, 16, 1408),
    Shape("16B", 16384, 2048, 6, 16, 1408),
)


def choose(shape: Shape, num_ranks: int, skewed: bool) -> Tensor:
    """(T, K) ids of different experts. Skewed, each of rank 0's experts is twice as likely as any other."""
    keys = torch.rand(shape.T, num_ranks * shape.E, device=DEVICE).log()
    if skewed:
        keys[:, : shape.E] /= 2
    return keys.topk(shape.K).indices.int()


class Layer:
    """One rank's inputs of a layer, and its forward and backward."""

    def __init__(self, shape: Shape, skewed: bool = False, **settings: Any):
        N, bf16 = dist.get_world_size(), dict(device=DEVICE, dtype=torch.bfloat16)
        self.config = Fp8FlowMoEConfig(dispatch_capacity=FACTOR if not skewed else min(2.0, N), **settings)
        shapes = ((shape.H, shape.D), (shape.D, shape.H), (shape.H, shape.D))
        self.weights = [(torch.randn(shape.E, *s, **bf16) * 0.02).requires_grad_() for s in shapes]
        self.x = torch.randn(shape.T, shape.D, **bf16).requires_grad_()
        self.scores = torch.rand(shape.T, shape.K, device=DEVICE).requires_grad_()
        self.ids, self.dout = choose(shape, N, skewed), torch.randn(shape.T, shape.D, **bf16)

    def step(self) -> list[Tensor]:
        inputs = self.x, *self.weights, self.ids, self.scores
        out = routed_experts(*inputs, config=self.config, ep_group=dist.group.WORLD)
        return [out, *torch.autograd.grad(out, [self.x, self.scores, *self.weights], self.dout)]


def together() -> None:
    torch.cuda.synchronize()
    dist.all_gather_object([None] * dist.get_world_size(), None)


def slowest_ms(run: Callable[[], object]) -> float:
    """Milliseconds of the slowest rank, all of which begin together."""
    for _ in range(3):
        run()
    together()
    times: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(times, elapsed_ms(run, 10))
    return max(times)


def bf16_phases(layer: Layer, shape: Shape) -> dict[str, Callable[[], object]]:
    """Dispatch of torchtitan's expert parallelism: a bf16 row for each routed pair, sorted by expert, then sent."""
    N, pairs = dist.get_world_size(), layer.ids.flatten()
    x, token = layer.x.detach(), pairs.argsort(stable=True) // shape.K
    counts = torch.bincount(pairs, minlength=N * shape.E).view(N, shape.E)
    received = torch.empty_like(counts)
    dist.all_to_all_single(received, counts)
    send, receive = counts.sum(1).tolist(), received.sum(1).tolist()
    expert = torch.arange(shape.E, device=DEVICE).repeat(N).repeat_interleave(received.flatten())
    permutation = expert.argsort(stable=True)

    def dispatch() -> Tensor:
        arrived = x.new_empty(sum(receive), shape.D)
        dist.all_to_all_single(arrived, x[token], receive, send)
        return arrived[permutation]

    return {"dispatch": dispatch}


def symmetric_phases(layer: Layer, shape: Shape) -> dict[str, Callable[[], object]]:
    """Dispatch + permute and sum + combine of one layer, each as a whole exchange with its barrier."""
    N = dist.get_world_size()
    q, scale = ops.quantize_rows(layer.x)
    sent_TK, token_C, counts_N = ops.dispatch_routing(layer.ids, N, shape.E)
    M, C = workspace.capacities(shape.T, shape.K, N, shape.E, layer.config.dispatch_capacity)
    at = workspace.begin(dist.group.WORLD.group_name, workspace.Sizes(N, *shape[1:5]), q.device)
    at.in_flight = False

    def dispatch() -> tuple[Tensor, Tensor, Tensor]:
        kernels.publish(at, q, scale, (layer.ids, layer.scores.detach(), token_C, counts_N, M, C))
        plan = kernels.plan(at)
        offsets_E, token_M, _, row_CK, arrived_C, pair_CK = kernels.pull_routing(at, plan, M, C)
        kernels.pull_rows(at, plan, arrived_C, row_CK, token_M, offsets_E, True)
        at.mapped[1].barrier()  # nobody publishes before all have pulled
        return plan, row_CK, pair_CK

    plan, row_CK, pair_CK = dispatch()
    y = torch.randn(M, shape.D, device=DEVICE, dtype=torch.bfloat16)

    def combine() -> None:
        kernels.push_sums(at, plan, y, None, row_CK, pair_CK)
        kernels.wait(at, workspace.COMBINE)
        permute.unpermute_sum(at.view("sums"), sent_TK, torch.bfloat16)

    return {"dispatch": dispatch, "combine": combine}


def all_to_all_phases(layer: Layer, shape: Shape) -> dict[str, Callable[[], object]]:
    """The same of the all-to-all path."""
    N, name = dist.get_world_size(), dist.group.WORLD.group_name
    q, scale = ops.quantize_rows(layer.x)
    sent_TK, token_C, counts_N = ops.dispatch_routing(layer.ids, N, shape.E)
    received_N = torch.empty_like(counts_N)
    dist.all_to_all_single(received_N, counts_N)
    send, receive = counts_N[:, 0].tolist(), received_N[:, 0].tolist()
    token_C, scores = token_C[: sum(send)], layer.scores.detach()
    capacity = int(((received_N[:, 1:-2].sum(0) + 127) // 128 * 128).sum())

    def dispatch() -> Tensor:
        payload = ops.pack_dispatch(q, scale, token_C, sent_TK, layer.ids, scores, shape.E)
        payload = ops.wait(ops.start_all_to_all(payload, receive, send, name))
        token_q, token_scale, ids, arrived_scores = ops.unpack_dispatch(payload, shape.D, shape.K)
        offsets_E, token_M, _, row_CK = ops.expert_routing(ids, arrived_scores, shape.E, capacity)
        ops.permute_rows(token_q, token_scale, row_CK, token_M, offsets_E)
        return row_CK

    row_CK = dispatch()
    y = torch.randn(capacity, shape.D, device=DEVICE, dtype=torch.bfloat16)

    def combine() -> None:
        payload = ops.pack_combine(y, None, row_CK)
        payload = ops.wait(ops.start_all_to_all(payload, send, receive, name))
        ops.unpermute_sum(ops.unpack_combine(payload, shape.D, 0)[0], sent_TK, torch.bfloat16)

    return {"dispatch": dispatch, "combine": combine}


def phases(shape: Shape, skewed: bool) -> Iterator[dict[str, Any]]:
    """Records of both phases of both paths and of bf16 rows. Split sizes are known: no time has a wait for them."""
    # A layer of 64 experts has weights of 5.6 GB; phases alone need none.
    layer = Layer(shape._replace(H=128), skewed, dispatch="symmetric")
    paths = {
        "symmetric": symmetric_phases(layer, shape),
        "all_to_all": all_to_all_phases(layer, shape),
        "bf16": bf16_phases(layer, shape),
    }
    runs = {f"{phase} {path}": run for path, of in paths.items() for phase, run in of.items()}
    ms = medians_in_turn(slowest_ms, runs, ROUNDS, random.Random(0))  # in an order that is the same on all ranks
    where = f"{shape}, {'skewed' if skewed else 'balanced'}, {dist.get_world_size()} GPUs"
    mine, theirs = ms["combine symmetric"], ms["combine all_to_all"]
    yield record("ep_combine dispatch=symmetric", where, "ms", mine, "all_to_all", theirs)
    for name, path in (("ep_dispatch", "all_to_all"), ("ep_dispatch dispatch=symmetric", "symmetric")):
        yield record(name, where, "ms", ms[f"dispatch {path}"], "bf16", ms["dispatch bf16"])


def over_nvlink() -> Iterator[dict[str, Any]]:
    """The phases of all shapes, then whole layers of 16B."""
    for shape in SHAPES:
        for skewed in (False, True):
            yield from phases(shape, skewed)
            torch.cuda.empty_cache()
    for shape in (shape for shape in SHAPES if shape.name == "16B"):
        steps = {dispatch: Layer(shape, dispatch=dispatch).step for dispatch in ("all_to_all", "symmetric")}
        ms = medians_in_turn(slowest_ms, steps, ROUNDS, random.Random(0))
        where, name = f"{shape}, {dist.get_world_size()} GPUs", "ep_routed_experts dispatch=symmetric"
        yield record(name, where, "ms", ms["symmetric"], "all_to_all", ms["all_to_all"])


def measure(out: Path) -> None:
    """One rank's part; the first writes the records."""
    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl")
    torch.manual_seed(rank)
    for found in over_nvlink():
        if rank == 0:
            write_records(out, [found])
    together()
    os._exit(0)  # symmetric memory is left to the driver


def main() -> None:
    parser = script_parser(__doc__, out="add the records to this JSON file")
    if "RANK" in os.environ:  # a process of torch.distributed.run, below
        measure(parser.parse_args().out)
    args = begin(parser)
    ranks = min(torch.cuda.device_count(), 8)
    if ranks < 2:
        sys.exit("error: ranks exchange tokens over NVLink, and this machine has one GPU")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += ["-m", "experiments.expert_parallel.exchange", "--out", str(args.out)]
    sys.exit(subprocess.run(command, timeout=LIMIT).returncode)


if __name__ == "__main__":
    main()
