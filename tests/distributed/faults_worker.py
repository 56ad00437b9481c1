"""A converted MoE layer with experts on two ranks, when something is wrong.

    torchrun --nproc_per_node 2 faults_worker.py      # routing at its extremes, and NaN
    faults_worker.py OUT BACKEND                      # a rank dies, or stalls, during dispatch

torchtitan's own function parallelizes the experts. Every token's experts are given; the router only decides the scores.
"""

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torchtitan.models.moe.moe import MoE, MoEArgs, TokenChoiceTopKRouter

from experiments.reference import in_model, relative_error
from tests.distributed.runner import check, end, start
from tests.distributed.symmetric_faults_worker import report_ends
from tests.processes import time_limit
from titan_fp8moe import ops, routed_experts
from titan_fp8moe.config import Fp8FlowMoEConfig
from titan_fp8moe.dispatch import base
from titan_fp8moe.torchtitan import parallel
from titan_fp8moe.torchtitan.modules import Fp8FlowMoE

D, H, EXPERTS, TOP_K = 256, 128, 4, 2
TIMEOUT = 5  # seconds a collective may wait for a lost rank
SETUP = time_limit(60)  # and before
WEIGHTS = ("w1", "w2", "w3")


class GivenExperts(TokenChoiceTopKRouter):
    """Routes by a table instead of by score."""

    experts_TK: Tensor

    def _debug_force_load_balance_routing(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        return self.experts_TK, scores.gather(1, self.experts_TK)


def make_layer(device: str, spread: bool) -> MoE:
    """The layer on this rank alone, or with its experts spread over the ranks; always the same weights."""
    torch.manual_seed(0)
    moe = MoE(MoEArgs(EXPERTS, top_k=TOP_K, score_before_experts=False, _debug_force_load_balance=True), D, H)
    moe = moe.to(device)
    with torch.no_grad():
        moe.init_weights(0.05, torch.device(device))
    moe.router.__class__ = GivenExperts
    Fp8FlowMoE.convert(moe, Fp8FlowMoEConfig())
    if spread:
        mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("ep",))
        parallel.llama4_parallelize.apply_moe_ep_tp(in_model(moe), None, mesh, None, None)
    return moe


def run(moe: MoE, x_TD: Tensor, experts_TK: Tensor, dout_TD: Tensor) -> dict[str, Tensor]:
    """Output, gradients of x and of this rank's experts, and the loss whose gradient is ``dout_TD``."""
    x_TD = x_TD.clone().requires_grad_()
    moe.zero_grad()
    moe.router.experts_TK = experts_TK
    out = moe(x_TD.unsqueeze(0)).squeeze(0)
    loss = (out * dout_TD).sum()
    loss.backward()
    if dist.is_initialized():
        dist.all_reduce(loss := loss.detach().clone())
    grads = {name: getattr(moe.experts, name).grad for name in WEIGHTS}
    grads = {name: g.to_local() if hasattr(g, "to_local") else g for name, g in grads.items()}
    return {"out": out.detach(), "dx": x_TD.grad, "loss": loss} | grads


def check_routing(device: str, rank: int, ranks: int) -> None:
    """Routings at their extremes give what one process computes for the tokens of all ranks."""
    last = EXPERTS - 1
    cases = {
        "a rank that gets no token": ([40, 90], lambda n: torch.tensor([[last, last - 1]]).repeat(n, 1)),
        "all tokens to one expert": ([40, 90], lambda n: torch.full((n, TOP_K), last)),
        "a rank that has no token": ([0, 90], lambda n: torch.rand(n, EXPERTS).topk(TOP_K, dim=1).indices),
    }
    for name, (counts, choose) in cases.items():
        torch.manual_seed(1)
        total = sum(counts)
        x, dout = torch.randn(total, D).to(device), torch.randn(total, D).to(device)
        experts = choose(total).to(device)
        mine = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
        expected = run(make_layer(device, spread=False), x, experts, dout)
        result = run(make_layer(device, spread=True), x[mine], experts[mine], dout[mine])
        for key in ("out", "dx"):
            # What the other rank adds to a token comes back in bf16.
            ok = counts[rank] == 0 or relative_error(result[key], expected[key][mine]) < 5e-3
            check(f"{name}: {key}", ok and result[key].shape == expected[key][mine].shape)
        local = EXPERTS // ranks
        unused = [e for e in range(local) if e + rank * local not in experts]
        for key in WEIGHTS:
            want = expected[key].chunk(ranks)[rank]
            check(f"{name}: {key}'s gradient", (result[key] - want).norm() <= 1e-3 * want.norm())
            check(f"{name}: {key}'s gradient is zero where no token came", not result[key][unused].any())


def check_nan(device: str, rank: int) -> None:
    """One NaN shows in the loss, in that token's rows and in its experts' gradients, and changes nothing else."""
    torch.manual_seed(1 + rank)
    tokens, bad = 90, 17
    x, dout = torch.randn(tokens, D).to(device), torch.randn(tokens, D).to(device)
    experts = torch.rand(tokens, EXPERTS).topk(TOP_K, dim=1).indices.to(device)
    hit = experts[bad].clone()
    dist.broadcast(hit, 0)
    others = torch.arange(tokens, device=device) != (bad if rank == 0 else -1)
    moe = make_layer(device, spread=True)
    clean = run(moe, x, experts, dout)
    check("no NaN without one", all(t.isfinite().all() for t in clean.values()))
    local = EXPERTS // dist.get_world_size()
    held = [e for e in range(local) if e + rank * local in hit]
    for where in ("token", "gradient"):
        tensors = {"token": x.clone(), "gradient": dout.clone()}
        if rank == 0:
            tensors[where][bad, 5] = float("nan")
        result = run(moe, tensors["token"], experts, tensors["gradient"])
        check(f"NaN in a {where}: loss", result["loss"].isnan())
        for key in ("out", "dx"):
            check(f"NaN in a {where}: {key} of other tokens", torch.equal(result[key][others], clean[key][others]))
            shows = key == "dx" or where == "token"
            check(f"NaN in a {where}: {key} of it", not shows or result[key][~others].isnan().all())
        for key in WEIGHTS:
            # A gradient of y says nothing about the rows of w1 and w3 until it has gone through w2: all are reached.
            spoiled = [not result[key][e].isfinite().all() for e in range(local)]
            check(f"NaN in a {where}: {key} of its experts", all(spoiled[e] for e in held))
            kept = [e for e in range(local) if e not in held]
            check(f"NaN in a {where}: {key} of others", torch.equal(result[key][kept], clean[key][kept]))


def check_agreement(device: str, rank: int) -> None:
    """A rank that gets too many rows, or has other settings, ends all ranks, by an error that names it. No collective
    is left half done: the next layer works."""
    x, ids, scores = torch.randn(50, D), torch.randint(2, 4, (50, TOP_K)), torch.rand(50, TOP_K)
    local = [torch.randn(2, *shape).to(device) / 16 for shape in ((H, D), (D, H), (H, D))]
    x, ids, scores = x.to(device), ids.to(device), scores.to(device)

    def layer(ids: Tensor = ids, scores: Tensor = scores, x: Tensor = x, **settings) -> Tensor:
        group, config = dist.group.WORLD, Fp8FlowMoEConfig(**settings)
        return routed_experts(x, *local, ids, scores, config=config, ep_group=group)

    def error(**changes) -> str:
        try:
            layer(**changes)
        except ValueError as raised:
            return str(raised)
        return ""

    differ = {"top_k": dict(ids=ids[:, :1], scores=scores[:, :1]), "x": dict(x=x.bfloat16())}
    differ |= {"wgrad": dict(wgrad="scaling_aware"), "recompute": dict(recompute="none"), "save_h": dict(save_h="fp8")}
    for name, change in differ.items():
        said = error(**(change if rank == 1 else {}))
        check(
            f"another {name}", f"ranks [{1 - rank}] of the expert-parallel group call this layer with another" in said
        )
    ids.fill_(3)
    limit, base.MAX_ROWS = base.MAX_ROWS, 256
    check("no more rows than fit", not error())
    base.MAX_ROWS = 128
    check("too many rows", "rank 1 of the expert-parallel group has 200 rows for its 2 experts" in error())
    base.MAX_ROWS = limit
    check("the layer after that", layer().isfinite().all())


def lose_rank(how: str, rank: int, out: Path, backend: str) -> None:
    """Rank 1 dies or stalls when it is to send its rows. What rank 0 says, its libraries included, goes to a file."""
    if rank == 0:
        os.dup2(os.open(out / f"{how}.err", os.O_WRONLY | os.O_CREAT), 2)
    device = "cuda" if backend == "nccl" else "cpu"
    if device == "cuda":
        torch.cuda.set_device(rank)
    # In a fork PyTorch 2.11 may fail where autograd's threads are the first to set theirs, all at once.
    torch.set_num_threads(1)
    parallel.install()
    store = dist.FileStore(str(out / f"{how}.store"), 2)
    dist.init_process_group(backend, store=store, rank=rank, world_size=2, timeout=timedelta(seconds=SETUP))
    moe = make_layer(device, spread=True)
    x, experts, dout = torch.randn(8, D), torch.tensor([[0, 3]]).repeat(8, 1), torch.randn(8, D)
    batch = x.to(device), experts.to(device), dout.to(device)
    run(moe, *batch)
    if rank == 1:
        exchange = ops.start_all_to_all

        def fault(rows: Tensor, *args):
            if rows.ndim == 2 and rows.shape[1] >= D:  # rows of tokens, not counts
                if how == "stalls":
                    time.sleep(1000)
                os.kill(os.getpid(), signal.SIGKILL)
            return exchange(rows, *args)

        ops.start_all_to_all = fault
    dist.barrier()
    # Kernels are compiled by now, on one rank earlier than on the other.
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=TIMEOUT), dist.group.WORLD)
    if rank == 0:
        (out / f"{how}.begin").touch()
    run(moe, *batch)
    if device == "cuda":
        torch.cuda.synchronize()


def lose_ranks(out: Path, backend: str) -> None:
    """Both ways at the same time; with gloo in forks of this process, since imports take longer than the test."""
    context = torch.multiprocessing.get_context("spawn" if backend == "nccl" else "fork")
    processes = {
        (how, rank): context.Process(target=lose_rank, args=(how, rank, out, backend), daemon=True)
        for how in ("dies", "stalls")
        for rank in range(2)
    }
    report_ends(processes, out, SETUP + 20 * TIMEOUT)


def main() -> None:
    if len(sys.argv) > 1:
        return lose_ranks(Path(sys.argv[1]), sys.argv[2])
    parallel.install()
    device = start()
    check_routing(device, dist.get_rank(), dist.get_world_size())
    check_nan(device, dist.get_rank())
    check_agreement(device, dist.get_rank())
    end()


if __name__ == "__main__":
    main()
