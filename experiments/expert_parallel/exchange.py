"""Dispatch over symmetric memory: what its kernels reach, whether the host waits, and how it compares.

    python -m experiments.expert_parallel.exchange --out experiments/expert_parallel/results.json

One GPU: four ranks' memory on it, kernel by kernel (``local``), then four processes that share it (``processes``). Both
take less than two minutes. Several GPUs: a process on each (``processes``) also measures NVLink, next to the all-to-all
path in FP8 and to bf16 rows as torchtitan moves them, in less than nine minutes. Every part has a time limit.
"""

import functools
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from experiments.records import add_trial, require_commit, require_gpu, script_parser, write_records
from experiments.timing import graphed, in_turn, medians
from titan_fp8moe import Fp8FlowMoEConfig, ops, recipe, routed_experts
from titan_fp8moe.dispatch.symmetric import kernels, workspace
from titan_fp8moe.dispatch.symmetric.workspace import COMBINE, Sizes, Workspace, capacities
from titan_fp8moe.kernels import permute
from titan_fp8moe.recipe import FP8

LIMITS = {"local": 50, "processes": 60}  # seconds on one GPU
LIMITS_SEVERAL = {"local": 50, "processes": 480}
FACTOR, DEVICE = 1.5, "cuda"


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


def record(
    name: str, shape: str, ms: float, reference: str = "none", reference_ms: float | None = None, **more: Any
) -> dict[str, Any]:
    """One record of results.json; more are facts next to the time."""
    speedup = None if reference_ms is None else reference_ms / ms
    names = dict(name=name, shape=shape, value=ms, unit="ms", reference=reference)
    return names | dict(reference_value=reference_ms, speedup=speedup) | more


def choose(shape: Shape, num_ranks: int, skewed: bool) -> Tensor:
    """(T, K) ids of different experts. Skewed, each of rank 0's experts is twice as likely as any other."""
    keys = torch.rand(shape.T, num_ranks * shape.E, device=DEVICE).log()
    if skewed:
        keys[:, : shape.E] /= 2
    return keys.topk(shape.K).indices.int()


# --- one process: four ranks' memory on one GPU -----------------------------------------------------------------------


class LocalRanks:
    """N ranks of this process, all of which have published; rank 0 has also pulled."""

    def __init__(self, shape: Shape, num_ranks: int):
        sizes = Sizes(num_ranks, shape.T, shape.D, shape.K, shape.E)
        memory = [torch.zeros(sizes.nbytes, dtype=torch.uint8, device=DEVICE) for _ in range(num_ranks)]
        self.ranks = [Workspace(sizes, n, memory, lambda: 10.0) for n in range(num_ranks)]
        self.shape, (M, C) = shape, capacities(shape.T, shape.K, num_ranks, shape.E, FACTOR)
        self.M, self.C, self.sent = M, C, []
        for at in self.ranks:
            ids = choose(shape, num_ranks, False)
            q = torch.randint(0, 255, (shape.T, shape.D), dtype=torch.uint8, device=DEVICE).view(FP8)
            scale = torch.full((shape.T, shape.D // 128), 127, dtype=torch.uint8, device=DEVICE).view(recipe.E8M0)
            sent_TK, token_C, counts_N = ops.dispatch_routing(ids, num_ranks, shape.E)
            self.sent.append(sent_TK)
            self.published = q, scale, (ids, torch.rand(shape.T, shape.K, device=DEVICE)), (token_C, counts_N, (M, C))
            kernels.publish(at, *self.published)
        self.at = self.ranks[0]
        self.route()
        self.pull()
        self.y = torch.randn(M, shape.D, device=DEVICE, dtype=torch.bfloat16)
        assert not int(self.at.overflow)

    def route(self) -> None:
        self.at.rounds.zero_()  # nobody arrives again
        self.plan = kernels.plan(self.at)
        routing = kernels.pull_routing(self.at, self.plan, self.M, self.C)
        self.offsets_E, self.token_M, _, self.row_CK, self.token_C, self.pair_CK = routing

    def pull(self, keep: bool = True) -> None:
        kernels.pull_rows(self.at, self.plan, self.token_C, self.row_CK, self.token_M, self.offsets_E, keep)

    def push(self) -> None:
        kernels.push_sums(self.at, self.plan, self.y, None, self.row_CK, self.pair_CK)

    def sum(self) -> None:
        permute.unpermute_sum(self.at.view("sums"), self.sent[0], torch.bfloat16)

    def publish(self) -> None:
        kernels.publish(self.at, *self.published)


def local() -> Iterator[dict[str, Any]]:
    """Milliseconds of each kernel in local memory."""
    num_ranks = 4
    for shape in (SHAPES[0], SHAPES[3]):
        ranks = LocalRanks(shape, num_ranks)
        arrived, rows = int(ranks.plan[0, -1]), int(ranks.offsets_E[-1])
        moved = dict(tokens=arrived, rows=rows)
        where = f"{shape}, {num_ranks} ranks of one process, 1 GPU"
        for name in ("publish", "route", "pull", "push", "sum"):
            yield record(f"ep_kernel {name}", where, graphed(getattr(ranks, name))(), **moved)
        del ranks


# --- processes --------------------------------------------------------------------------------------------------------


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

    def forward(self, x: Tensor | None = None) -> Tensor:
        return routed_experts(
            self.x if x is None else x, *self.weights, self.ids, self.scores, config=self.config,
            ep_group=dist.group.WORLD,
        )  # fmt: skip

    def step(self) -> list[Tensor]:
        out = self.forward()
        return [out, *torch.autograd.grad(out, [self.x, self.scores, *self.weights], self.dout)]


def host_waits(run: Callable[[], object]) -> int:
    """Calls of the CUDA runtime for which the host waits, in one run."""
    return _waits(run) - _waits(lambda: None)  # the profiler waits too


def _waits(run: Callable[[], object]) -> int:
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        run()
    waits = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
    return sum(event.count for event in profile.key_averages() if event.key in waits)


def in_one_graph(layer: Layer, others: list[Layer], layers: int) -> bool:
    """Captures ``layers`` forwards and backwards, replays them with each of ``others``' inputs, compares every bit."""
    graph, inputs = torch.cuda.CUDAGraph(), (layer.x, layer.scores, layer.ids, layer.dout)
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(layers):
            results = layer.step()
    equal = True
    for other in others:
        with torch.no_grad():
            for mine, new in zip(inputs, (other.x, other.scores, other.ids, other.dout), strict=True):
                mine.copy_(new)
        together()
        graph.replay()
        torch.cuda.synchronize()
        replayed = [t.clone() for t in results]
        equal &= all(torch.equal(a, b) for a, b in zip(replayed, layer.step(), strict=True))
    return equal


def without_a_wait() -> Iterator[dict[str, Any]]:
    """On any number of GPUs: layers launched without a wait, CUDA graphs, a training step."""
    shape = Shape("small", 1024, 2048, 6, 8, 512)
    layer, others = Layer(shape, dispatch="symmetric"), [Layer(shape, dispatch="symmetric") for _ in range(3)]
    optimizer = torch.optim.SGD(layer.weights, lr=1e-3)

    def training_step() -> None:
        optimizer.zero_grad()
        layer.forward().backward(layer.dout)
        optimizer.step()

    for _ in range(2):
        layer.step(), training_step()
    together()
    began, layers = time.perf_counter(), 30
    with torch.no_grad():
        for _ in range(layers):
            layer.forward()
    launched = time.perf_counter() - began
    torch.cuda.synchronize()
    found = dict(layers=layers, seconds=time.perf_counter() - began)
    together()
    found["host_waits_of_a_layer"] = host_waits(layer.step)
    together()
    found["host_waits_of_a_training_step"] = host_waits(training_step)
    together()
    found["graph_of_12_layers_equal"] = in_one_graph(layer, others, 12)
    workspace.check_room()
    ranks, gpus = dist.get_world_size(), torch.cuda.device_count()
    where = f"{shape}, {ranks} ranks, {min(ranks, gpus)} GPU{'s' * (gpus > 1)}"
    yield record("ep_launches", where, launched * 1e3, **found)


def together() -> None:
    torch.cuda.synchronize()
    dist.all_gather_object([None] * dist.get_world_size(), None)


def slowest_ms(run: Callable[[], object], repeats: int = 10) -> float:
    """Milliseconds of the slowest rank, all of which begin together."""
    for _ in range(3):
        run()
    together()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(repeats):
        run()
    end.record()
    torch.cuda.synchronize()
    times: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(times, begin.elapsed_time(end) / repeats)
    return max(times)


def phases_in_turn(runs: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Median of :func:`slowest_ms`, in an order that is the same on all ranks."""
    timers = {name: functools.partial(slowest_ms, run) for name, run in runs.items()}
    return medians(in_turn(timers, 3, random.Random(0)))


class Bf16Rows:
    """What torchtitan's expert parallelism moves: a bf16 row for each routed pair, sorted by expert, sent and permuted.
    Its combine scatters the rows and multiplies them by the scores in fp32, as torchtitan's MoE does under FSDP. Split
    sizes are known beforehand, so that no wait for them is in the times."""

    def __init__(self, layer: Layer, E: int):
        N, K = dist.get_world_size(), layer.ids.shape[1]
        self.x, self.scores = layer.x.detach(), layer.scores.detach()
        self.order = layer.ids.flatten().argsort(stable=True)
        self.token = self.order // K
        self.counts = torch.bincount(layer.ids.flatten(), minlength=N * E).view(N, E)
        received = torch.empty_like(self.counts)
        dist.all_to_all_single(received, self.counts)
        self.send, self.receive = self.counts.sum(1).tolist(), received.sum(1).tolist()
        expert = torch.arange(E, device=DEVICE).repeat(N).repeat_interleave(received.flatten())
        self.permutation = expert.argsort(stable=True)
        self.rows = self.dispatch()

    def dispatch(self) -> Tensor:
        arrived = self.x.new_empty(sum(self.receive), self.x.shape[1])
        dist.all_to_all_single(arrived, self.x[self.token], self.receive, self.send)
        return arrived[self.permutation]

    def combine(self) -> Tensor:
        arrived = torch.empty_like(self.rows).index_copy_(0, self.permutation, self.rows)
        back = self.x.new_empty(sum(self.send), self.x.shape[1])
        dist.all_to_all_single(back, arrived, self.send, self.receive)
        unsorted = torch.zeros_like(back)
        unsorted[self.order] = back
        rows_TKD = unsorted.view(*self.scores.shape, -1).float()
        return torch.bmm(self.scores.unsqueeze(1), rows_TKD).squeeze(1).to(self.x.dtype)


def symmetric_phases(layer: Layer, shape: Shape) -> dict[str, Callable[[], None]]:
    """Dispatch + permute and sum + combine of one layer, each as a whole exchange with its barrier."""
    N = dist.get_world_size()
    q, scale = ops.quantize_rows(layer.x)
    sent_TK, token_C, counts_N = ops.dispatch_routing(layer.ids, N, shape.E)
    M, C = capacities(shape.T, shape.K, N, shape.E, layer.config.dispatch_capacity)
    at = workspace.begin(dist.group.WORLD.group_name, Sizes(N, *shape[1:5]), q.device)
    at.in_flight = False
    state: dict[str, Any] = {}

    def dispatch() -> None:
        kernels.publish(at, q, scale, (layer.ids, layer.scores.detach()), (token_C, counts_N, (M, C)))
        plan = kernels.plan(at)
        offsets_E, token_M, _, row_CK, arrived_C, pair_CK = kernels.pull_routing(at, plan, M, C)
        kernels.pull_rows(at, plan, arrived_C, row_CK, token_M, offsets_E, True)
        at.mapped[1].barrier()  # nobody publishes before all have pulled
        state.update(plan=plan, pair_CK=pair_CK, row_CK=row_CK)

    dispatch()
    y = torch.randn(M, shape.D, device=DEVICE, dtype=torch.bfloat16)

    def combine() -> None:
        kernels.push_sums(at, state["plan"], y, None, state["row_CK"], state["pair_CK"])
        kernels.wait(at, COMBINE)
        permute.unpermute_sum(at.view("sums"), sent_TK, torch.bfloat16)

    remote = state["plan"][0].diff()
    remote[dist.get_rank()] = 0
    return {"dispatch": dispatch, "combine": combine, "remote": lambda: int(remote.sum())}


def all_to_all_phases(layer: Layer, shape: Shape) -> dict[str, Callable[[], object]]:
    """The same of the all-to-all path, with split sizes known beforehand."""
    N, name = dist.get_world_size(), dist.group.WORLD.group_name
    q, scale = ops.quantize_rows(layer.x)
    sent_TK, token_C, counts_N = ops.dispatch_routing(layer.ids, N, shape.E)
    received_N = torch.empty_like(counts_N)
    dist.all_to_all_single(received_N, counts_N)
    send, receive = counts_N[:, 0].tolist(), received_N[:, 0].tolist()
    token_C, scores = token_C[: sum(send)], layer.scores.detach()
    capacity = int(((received_N[:, 1:-2].sum(0) + 127) // 128 * 128).sum())
    state: dict[str, Tensor] = {}

    def dispatch() -> None:
        payload = ops.pack_dispatch(q, scale, token_C, sent_TK, layer.ids, scores, shape.E)
        payload = ops.wait(ops.start_all_to_all(payload, receive, send, name))
        token_q, token_scale, ids, arrived_scores = ops.unpack_dispatch(payload, shape.D, shape.K)
        offsets_E, token_M, _, row_CK = ops.expert_routing(ids, arrived_scores, shape.E, capacity)
        ops.permute_rows(token_q, token_scale, row_CK, token_M, offsets_E)
        state.update(row_CK=row_CK)

    dispatch()
    y = torch.randn(capacity, shape.D, device=DEVICE, dtype=torch.bfloat16)

    def combine() -> None:
        payload = ops.pack_combine(y, None, state["row_CK"])
        payload = ops.wait(ops.start_all_to_all(payload, send, receive, name))
        ops.unpermute_sum(ops.unpack_combine(payload, shape.D, 0)[0], sent_TK, torch.bfloat16)

    return {"dispatch": dispatch, "combine": combine}


def over_nvlink() -> Iterator[dict[str, Any]]:
    """With a GPU for each process: both phases of both paths and of bf16 rows; then whole layers."""
    for shape in SHAPES:
        for skewed in (False, True):
            # A layer of 64 experts has weights of 5.6 GB; phases alone need none.
            layer = Layer(shape._replace(H=128), skewed, dispatch="symmetric")
            phases = symmetric_phases(layer, shape)
            others = {"all_to_all": all_to_all_phases(layer, shape)}
            bf16 = Bf16Rows(layer, shape.E)
            others["bf16"] = {"dispatch": bf16.dispatch, "combine": bf16.combine}
            runs = {f"{phase} symmetric": phases[phase] for phase in ("dispatch", "combine")}
            for name, functions in others.items():
                runs |= {f"{phase} {name}": function for phase, function in functions.items()}
            ms = phases_in_turn(runs)
            where = f"{shape}, {'skewed' if skewed else 'balanced'}, {dist.get_world_size()} GPUs"
            remote = dict(remote_tokens=phases["remote"]())
            for phase in ("dispatch", "combine"):
                mine, theirs = ms[f"{phase} symmetric"], ms[f"{phase} all_to_all"]
                yield record(f"ep_{phase}", where, theirs, "bf16", ms[f"{phase} bf16"], **remote)
                for reference in ("all_to_all", "bf16"):
                    name = f"ep_{phase} dispatch=symmetric"
                    yield record(name, where, mine, reference, ms[f"{phase} {reference}"], **remote)
            del layer, phases, others, bf16, runs
            torch.cuda.empty_cache()
    for shape in SHAPES:
        if shape.name == "16B":
            ms = phases_in_turn({d: Layer(shape, dispatch=d).step for d in ("all_to_all", "symmetric")})
            where = f"{shape}, {dist.get_world_size()} GPUs"
            yield record("ep_routed_experts dispatch=symmetric", where, ms["symmetric"], "all_to_all", ms["all_to_all"])


def processes(out: Path) -> None:
    rank, gpus = int(os.environ["RANK"]), torch.cuda.device_count()
    shared = gpus < int(os.environ["WORLD_SIZE"])
    torch.cuda.set_device(rank % gpus)
    dist.init_process_group("gloo" if shared else "cpu:gloo,cuda:nccl")
    torch.manual_seed(rank)
    parts = [without_a_wait()] if shared else [without_a_wait(), over_nvlink()]
    for part in parts:
        for record in part:
            if rank == 0:
                print(record, flush=True)
                write_records(out, [record])
    together()
    os._exit(0)  # symmetric memory is left to the driver


def main() -> None:
    parser = script_parser(__doc__, out="add the records to this JSON file")
    parser.add_argument("--part", choices=[*LIMITS], help="one part only, in this process")
    add_trial(parser)
    args = parser.parse_args()
    if args.part == "processes" and "RANK" in os.environ:
        return processes(args.out)
    if args.part == "local":
        for record in local():
            print(record, flush=True)
            write_records(args.out, [record])
        return None
    require_gpu()
    require_commit(args.trial)
    gpus, failed = torch.cuda.device_count(), []
    ranks, limits = (4, LIMITS) if gpus == 1 else (min(gpus, 8), LIMITS_SEVERAL)
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    env = os.environ | {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"} if gpus < ranks else dict(os.environ)
    for part in [args.part] if args.part else LIMITS:
        command = [sys.executable, *(launcher if part == "processes" else []), "-m"]
        command += ["experiments.expert_parallel.exchange", "--part", part, "--out", str(args.out)]
        began = time.monotonic()
        try:
            code = subprocess.run(command, env=env, timeout=limits[part]).returncode
        except subprocess.TimeoutExpired:
            code = "out of time"
        print(f"{part}: exit {code} after {time.monotonic() - began:.0f} s", flush=True)
        if code:
            failed.append(part)
    if failed:
        sys.exit(f"error: failed parts: {', '.join(failed)}")
    return None


if __name__ == "__main__":
    main()
