"""Layers whose experts are spread over ranks, over both dispatches, against all experts in one process.

A row of a table is a layer of :mod:`tests.test_any_layer`, drawn or named, whose tokens are each rank's. The reference
needs no group. Each rank's experts serve all tokens in one process, and their parts, rounded to bf16, are added in a
rank's order. Outputs and gradients of what belongs to tokens must have these bits. Weight gradients may differ by FP8
noise, since their 128-token blocks hold other tokens. Both dispatches have the same bits in all results.
"""

import dataclasses
import functools
import gc
import itertools
import os
import re
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from experiments.reference import relative_error
from tests.distributed.runner import ONE_CONNECTION, ONE_GPU, Place, gather_list, on_ranks, start
from tests.layer import refused
from tests.processes import run_workers, time_limit
from tests.test_any_layer import BY_TOKEN, DEVICE, PLAIN, SHARED, WAYS, Layer, Tensors, as_function, call_in, ours
from titan_fp8moe import Fp8FlowMoEConfig as Config
from titan_fp8moe import check_room, ops, routed_experts
from titan_fp8moe.dispatch import base
from titan_fp8moe.dispatch.symmetric import exchange, kernels
from titan_fp8moe.layer.ffn import FFN

IMPL = kernels if DEVICE == "cuda" else exchange
SMALL = PLAIN._replace(tokens=70, travels=True)


class Row(NamedTuple):
    """Tokens that each rank has: ``layer.tokens``, or what ``uneven`` says of ranks 0, 1...; and who serves them."""

    layer: Layer = SMALL
    routing: str = "uniform"
    uneven: tuple[int, ...] = ()
    seed: int = 0


def drawn(seed: int) -> Row:
    layer = Layer.draw(seed)
    layer = layer._replace(entry="routed_experts", experts=4 * layer.experts, travels=True)
    return Row(layer._replace(tokens=min(layer.tokens, 150)), "drawn", seed=seed)


BEFORE = SMALL._replace(score_before_experts=True)
FP8_H = SMALL._replace(config=Config(save_h="fp8", recompute="none"))
AGAIN = SMALL._replace(config=Config(recompute="experts"))
ROWS = {
    "skewed": Row(FP8_H, "skewed"),
    "one_expert": Row(BEFORE, "one_expert"),
    "idle_rank": Row(AGAIN, "idle_rank"),
    "missing": Row(SMALL, "missing"),
    "more_experts_than_tokens": Row(SMALL._replace(tokens=3, top_k=4, experts=64)),
    "uneven": Row(SMALL, "skewed", (50, 140, 230, 320)),
    "uneven_one_expert": Row(FP8_H, "one_expert", (50, 140, 230, 320)),
    "rank_without_tokens": Row(AGAIN._replace(score_before_experts=True), "uniform", (0, 140, 230, 320)),
} | {f"seed_{seed}": drawn(seed) for seed in range(15) if Layer.draw(seed).entry in ("routed_experts", "RoutedExperts")}


def choose(routing: str, tokens: int, layer: Layer) -> Tensor:
    E, K = layer.experts, layer.top_k
    scores = torch.rand(tokens, E)
    if routing == "one_expert":  # each of a token's choices
        return torch.full((tokens, K), E - 1)
    if routing == "idle_rank":
        scores[:, : E // dist.get_world_size()] = -1
    if routing == "skewed":
        scores[:, :2] += 0.4
    ids = scores.topk(K, sorted=False).indices
    return ids.masked_fill(torch.rand(tokens, K) < 0.2, -1) if routing == "missing" else ids


def of_all(row: Row) -> tuple[Tensors, slice]:
    """The tensors of all ranks, which every rank draws, and this rank's tokens."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    sizes = [row.layer.tokens] * ranks if not row.uneven else row.uneven[:ranks]
    layer = row.layer._replace(tokens=sum(sizes))
    leaves, ids, dout = Tensors.of(layer, row.seed)
    leaves["x"] = leaves["x"].to(layer.dtype)
    ids = ids if row.routing == "drawn" else choose(row.routing, layer.tokens, layer)
    return Tensors(leaves, ids, dout.to(layer.dtype)), slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))


def part(layer: Layer, tensors: Tensors, tokens: slice, rank: int) -> Tensors:
    """What of it is a rank's, for some tokens."""
    E = layer.experts // dist.get_world_size()
    leaves = dict(tensors.leaves)
    for name, t in leaves.items():
        if name not in SHARED:
            leaves[name] = t[tokens] if name in BY_TOKEN else t[rank * E : (rank + 1) * E]
    return Tensors(leaves, tensors.ids[tokens], tensors.dout[tokens])


def over(layer: Layer, dispatch: str, **more) -> Layer:
    config = dict(dispatch=dispatch, dispatch_capacity=float(dist.get_world_size())) | more
    return layer._replace(config=dataclasses.replace(layer.config, **config))


def added_by_rank(parts: list[Tensor], rank_TK: Tensor) -> Tensor:
    """The ranks' parts, each rounded to bf16, in the order of a token's first pair on each rank."""
    total = torch.zeros_like(parts[0])
    for k in range(rank_TK.shape[1]):
        first = (rank_TK[:, :k] != rank_TK[:, k : k + 1]).all(1)
        for rank, one in enumerate(parts):
            adds = first & (rank_TK[:, k] == rank)
            total[adds] += one[adds].bfloat16().float()
    return total


def expected(layer: Layer, tensors: Tensors, mine: slice) -> dict[str, Tensor]:
    """This rank's results: parts of all experts' ranks, each computed without a group."""
    rank, E = dist.get_rank(), layer.experts // dist.get_world_size()
    frozen = ("w1", "w2", "w3") if layer.weights == "fp8" else ()
    alone = layer._replace(travels=False, shared="", frozen=frozen, dtype=torch.float32)
    leaves = tensors.leaves | dict(x=tensors.leaves["x"].float())
    routed = {name: t for name, t in leaves.items() if "shared" not in name}
    served = torch.where(tensors.ids // E == rank, tensors.ids - rank * E, -1)
    inputs = part(layer, Tensors(routed, served, tensors.dout.float()), slice(None), rank)
    own = {name: t.cpu() for name, t in ours(alone, inputs).items()}
    parts = gather_list({name: own[name] for name in ("out", "x", "scores")})
    total = {name: added_by_rank([p[name] for p in parts], tensors.ids // E)[mine] for name in ("out", "x")}
    if layer.shared:
        inputs = part(layer, Tensors(leaves, torch.full_like(tensors.ids, -1), tensors.dout.float()), mine, rank)
        shared = {name: t.cpu() for name, t in ours(alone._replace(shared=layer.shared), inputs).items()}
        own |= {name: t for name, t in shared.items() if "shared" in name}
        total = {name: t + shared[name] for name, t in total.items()}
    own |= {name: t.to(layer.dtype) for name, t in total.items()}
    return own | dict(scores=sum(p["scores"] for p in parts)[mine])


def assert_bits(got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, t in got.items():
        torch.testing.assert_close(t.cpu(), want[name].cpu(), rtol=0, atol=0, msg=name)


def two_layers(run: Callable[[Tensor], Tensor], ids: Tensor) -> Tensor:
    return run(ids) + run(ids)


@on_ranks(pytest.param(Place(2), marks=pytest.mark.slow, id="2"), 4, ONE_GPU, ONE_CONNECTION, rows=ROWS)
def test_ranks_equal_one_process(row: Row) -> None:
    """Both dispatches, the second also where two layers are recomputed in their backward. Deterministic algorithms fill
    new memory, on the layer's stream: not over what has arrived."""
    layer, (tensors, mine) = row.layer, of_all(row)
    want, inputs = expected(layer, tensors, mine), part(layer, tensors, mine, dist.get_rank())
    got = ours(over(layer, "all_to_all"), inputs)
    for name, t in got.items():
        if name in BY_TOKEN or "shared" in name:
            assert_bits({name: t}, {name: want[name]})
        else:
            assert not (t.any() or want[name].any()) or relative_error(t.cpu(), want[name]) < 1e-3, name
    if not row.uneven:
        assert_bits(ours(over(layer, "symmetric"), inputs), got)
    if not row.uneven and row.routing in ("skewed", "idle_rank", "drawn"):
        torch.use_deterministic_algorithms(True, warn_only=True)
        recomputed = functools.partial(functools.partial, call_in, WAYS[row.seed % 2], layer)
        again = ours(over(layer, "symmetric"), inputs, lambda run, ids: two_layers(recomputed(run), ids))
        torch.use_deterministic_algorithms(False)
        assert_bits(again, ours(over(layer, "all_to_all"), inputs, two_layers))


def mine(row: Row = Row()) -> Tensors:  # noqa: B008
    tensors, tokens = of_all(row)
    return part(row.layer, tensors, tokens, dist.get_rank())


CPU_AND_GPU = 2, pytest.param(Place(4), marks=pytest.mark.slow, id="4"), ONE_GPU, ONE_CONNECTION


def symmetric() -> dict[str, Tensor]:
    return ours(over(SMALL, "symmetric", dispatch_capacity=2.5), mine())


@on_ranks(*CPU_AND_GPU, rows={"all_to_all": "all_to_all", "symmetric": "symmetric"})
def test_gradients_of_tokens_return_if_any_rank_needs_them(dispatch: str) -> None:
    """In the second all-to-all of a backward. Symmetric memory always has them."""
    layer, counts = over(SMALL, dispatch), []
    want = ours(layer, mine())
    for ranks in ([0], range(dist.get_world_size())):
        frozen = ("x", "scores") if dist.get_rank() in ranks else ()
        with mock.patch.object(ops, "start_all_to_all", side_effect=ops.start_all_to_all) as transfer:
            got = ours(layer._replace(frozen=frozen), mine())
        assert_bits(got, {name: t for name, t in want.items() if name not in frozen})
        counts.append(transfer.call_count)
    assert counts == ([5, 4] if dispatch == "all_to_all" else [0, 0])


# --- faults, after which the ranks go on ------------------------------------------------------------------------------


DISAGREE = {
    "top_k": dict(top_k=1), "dim": dict(dim=128), "x": dict(dtype=torch.bfloat16), "shared": dict(shared="plain"),
    "activation": dict(activation="geglu_tanh"), "score": dict(score_before_experts=True),
    "wgrad": dict(config=Config(wgrad="scaling_aware")), "recompute": dict(config=Config(recompute="none")),
    "save_h": dict(config=Config(save_h="fp8")),
}  # fmt: skip


@on_ranks(4, rows=DISAGREE)
def test_ranks_that_disagree(change: dict) -> None:
    """All raise the error, or find it where an optimizer would step. The next layer works."""
    last = dist.get_world_size() - 1
    layer = SMALL._replace(**change) if dist.get_rank() == last else SMALL
    others = [last] if dist.get_rank() != last else [*range(last)]
    with refused(f"ranks {others} of the expert-parallel group call this layer with another"):
        ours(over(layer, "all_to_all"), mine(Row(layer)))
    if not {"top_k", "dim"} & change.keys():  # for which no workspace could be made
        assert ours(over(layer, "symmetric"), mine(Row(layer)))["out"].isnan().all()
        with refused("other settings of fp8_flow_moe", error=RuntimeError):
            check_room()
    ours(over(SMALL, "all_to_all"), mine())
    symmetric()
    check_room()


@on_ranks(2)
def test_too_many_rows_for_one_rank() -> None:
    """All ranks get the error, and no collective is left half done."""
    all_to_one = Row(SMALL, "one_expert")
    few_experts = Row(SMALL._replace(experts=2, top_k=1), uneven=(300, 0))
    for limit, row, said in (
        (512, all_to_one, []),
        (384, all_to_one, ["rank 1 of the expert-parallel group has 420 rows for its 4 experts"]),
        (256, few_experts, ["rank 0 of the expert-parallel group has ", " and dispatches 300 tokens"]),
    ):
        with mock.patch.object(base, "MAX_ROWS", limit), refused(*said):
            ours(over(row.layer, "all_to_all"), mine(row))
    ours(over(SMALL, "all_to_all"), mine())


@on_ranks(2)
def test_unequal_numbers_of_tokens_have_no_workspace() -> None:
    layer = over(SMALL._replace(tokens=1000 + dist.get_rank()), "symmetric")
    with refused("equal numbers of tokens"):
        ours(layer, Tensors.of(layer, 0).rows(torch.arange(layer.tokens)))


def optimized(inputs: Tensors, capacity: float) -> tuple[Callable[[Tensor], Tensor], torch.optim.Optimizer, Tensor]:
    """A layer with an optimizer for w1."""
    leaves = {name: t.to(DEVICE) for name, t in inputs.leaves.items()}
    w = torch.nn.Parameter(leaves["w1"])
    config = Config(dispatch="symmetric", dispatch_capacity=capacity)

    def layer(ids: Tensor, x: Tensor = leaves["x"]) -> Tensor:
        args = w, leaves["w2"], leaves["w3"], ids, leaves["scores"]
        return routed_experts(x, *args, config=config, ep_group=dist.group.WORLD)

    return layer, torch.optim.SGD([w], lr=1.0), w


@on_ranks(*CPU_AND_GPU)
def test_an_overflow_is_loud_before_a_weight_changes() -> None:
    inputs = mine(Row(SMALL._replace(tokens=300)))
    layer, optimizer, w = optimized(inputs, 1.0)
    before, full = w.detach().clone(), choose("one_expert", 300, SMALL).to(DEVICE)
    out = layer(full)
    out.sum().backward()
    assert out.isnan().all()
    with refused("larger dispatch_capacity", "needed ", error=RuntimeError):
        optimizer.step()
    assert torch.equal(w, before)
    check_room()
    out = optimized(inputs, 2.5)[0](inputs.ids.to(DEVICE))
    assert out.isfinite().all()
    out.sum().backward()


# Whose so many-th call fails; tests/test_overlap.py has the others on one rank.
PLACES = {"product": (FFN, "product", 3), "pull": (IMPL, "pull_routing", 0), "push": (IMPL, "push_sums", 1)}


@on_ranks(*CPU_AND_GPU, rows=PLACES)
def test_ranks_go_on_after_an_error_that_met_all(place: tuple) -> None:
    (owner, name, after), want, calls = place, symmetric(), itertools.count()
    whole = getattr(owner, name)

    def broken(*args, **kwargs):
        if next(calls) == after:
            raise torch.OutOfMemoryError
        return whole(*args, **kwargs)

    with mock.patch.object(owner, name, broken), pytest.raises(torch.OutOfMemoryError):
        symmetric()
    assert_bits(symmetric(), want)


# --- CUDA graphs ------------------------------------------------------------------------------------------------------


def captured(step: Callable[[], object], warm_ups: int) -> torch.cuda.CUDAGraph:
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warm_ups):
            step()
    torch.cuda.synchronize()
    dist.barrier()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        step()
    return graph


@on_ranks(ONE_GPU)
def test_a_graph_of_two_layers() -> None:
    """Forward and backward: replayed with new routings they have an eager step's bits."""
    config, inputs, results = Config(dispatch="symmetric", dispatch_capacity=4), mine(), []
    leaves = {name: t.to(DEVICE, torch.bfloat16 if name == "x" else t.dtype) for name, t in inputs.leaves.items()}
    leaves = {name: t.requires_grad_() for name, t in leaves.items()}
    ids, dout = inputs.ids.to(DEVICE), inputs.dout.to(DEVICE)

    def step() -> None:
        def layer(x: Tensor) -> Tensor:
            args = (leaves[name] for name in ("w1", "w2", "w3"))
            return routed_experts(x, *args, ids, leaves["scores"], config=config, ep_group=dist.group.WORLD)

        out = layer(layer(leaves["x"]))
        results[:] = out.detach(), *torch.autograd.grad(out, leaves.values(), dout.to(out.dtype))

    graph = captured(step, 2)
    of_graph = [*results]
    for routing in ("skewed", "one_expert", "idle_rank", "missing", "uniform"):
        new = mine(Row(SMALL, routing, seed=1))
        with torch.no_grad():
            for old, name in ((leaves["x"], "x"), (leaves["scores"], "scores")):
                old.copy_(new.leaves[name])
            ids.copy_(new.ids)
        graph.replay()
        torch.cuda.synchronize()
        found = [t.clone() for t in of_graph]
        step()
        assert all(map(torch.equal, found, results)), routing


@on_ranks(ONE_GPU)
def test_an_overflow_in_replays_that_the_host_leaves_behind() -> None:
    inputs = mine(Row(SMALL._replace(tokens=300)))
    layer, optimizer, w = optimized(inputs, 1.5)
    ids, fits = inputs.ids.to(DEVICE), inputs.ids.to(DEVICE)

    def step() -> None:
        torch.cuda._sleep(500_000_000)  # cycles, a quarter of a second
        layer(fits, layer(ids)).sum().backward()

    graphs = [captured(step, 1), captured(step, 0)]
    optimizer.zero_grad(set_to_none=False)
    for call, routing in itertools.product((optimizer.step, check_room), ("one_expert", "uniform")):
        ids.copy_(choose(routing, 300, SMALL))
        before = w.detach().clone()
        torch.cuda.synchronize()
        dist.barrier()
        for graph in graphs:
            graph.replay()
        with refused(*["larger dispatch_capacity"] * (routing == "one_expert"), error=RuntimeError):
            call()
        torch.cuda.synchronize()
        check_room()
        if routing == "one_expert":
            assert torch.equal(w, before)
            w.grad.zero_()


# --- workspaces -------------------------------------------------------------------------------------------------------


def mapped_bytes() -> int:
    """Of this process's workspaces on a CPU."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    lines = [line.split()[0].split("-") for line in lines if "titan_fp8moe_" in line]
    return sum(int(end, 16) - int(begin, 16) for begin, end in lines)


@on_ranks(2)
def test_workspaces_leave_nothing_behind() -> None:
    """One for more tokens takes the place of the others, and one that inference makes serves a training step. A later
    group of the same name has its own, not that of ranks that may be gone."""
    sizes = []
    for all_tokens in ([300], [150, 300]) if DEVICE == "cpu" else ():
        dist.barrier()
        rank, ranks = dist.get_rank(), dist.get_world_size()
        # A store of its own: in the first group's, a rank would find its peer's old address and wait there for ever.
        store = dist.PrefixStore("later", dist.distributed_c10d._get_default_store())
        dist.destroy_process_group()
        gc.collect()
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
        for tokens in all_tokens:
            layer = over(SMALL._replace(tokens=tokens), "symmetric")
            inputs = mine(Row(layer))
            want = ours(over(layer, "all_to_all"), inputs)
            with torch.inference_mode():
                assert torch.equal(as_function(layer, inputs.leaves)(inputs.ids), want["out"])
            assert_bits(ours(layer, inputs), want)
        gc.collect()
        sizes.append(mapped_bytes())
    assert sizes[:1] == sizes[1:] and 0 not in sizes


# --- ranks that are lost ----------------------------------------------------------------------------------------------

LATE = round(time_limit(2.5))  # seconds a symmetric exchange waits, 5 where nothing else runs
LOST = {how: (1, r"for ranks \[1\]. They have died, raised an error") for how in ("dies", "raises", "stalls")}
LOST["late"] = (0, "the result is right")  # rank 0's exit code and last words


def lose_rank(how: str) -> None:
    """Rank 1 has the fault where it is to send the sums of a symmetric exchange."""
    torch.set_num_threads(1)
    start()
    layer = over(SMALL, "symmetric")
    inputs = mine()
    want, whole = ours(layer, inputs), IMPL.push_sums

    def fault(*args):
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        if how == "raises":
            raise ValueError("of this rank alone")
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1000 if how == "stalls" else LATE / 2)
        return whole(*args)

    if dist.get_rank() == 1:
        IMPL.push_sums = fault
    dist.barrier()  # kernels are compiled by now, on one rank earlier than on the other
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=LATE), dist.group.WORLD)
    got = ours(layer, inputs)
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    assert_bits(got, want)
    print("the result is right", flush=True)
    os._exit(0)


@pytest.mark.parametrize("gpu", [False, pytest.param(True, marks=pytest.mark.gpu)])
def test_a_lost_rank_ends_the_others(gpu: bool) -> None:
    """Over the all-to-all the group's own timeout does."""
    if gpu and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs: on one that ranks share, the survivor's kernel has hung, past its own timeout")

    def lose(how: str):
        code = f"from tests.distributed.test_layers import lose_rank; lose_rank({how!r})"
        return run_workers("-c", 2, code, seconds=60, cpu_only=not gpu, awaits=1)

    with ThreadPoolExecutor() as pool:
        done = dict(zip(LOST, pool.map(lose, LOST), strict=True))
    for how, (code, words) in LOST.items():
        log = done[how].stdout + done[how].stderr
        codes = {code, -signal.SIGABRT} if code and gpu else {code}  # CUDA may abort a process in its last moments
        assert done[how].returncode in codes and re.search(words, log), (how, done[how].returncode, log[-3000:])
