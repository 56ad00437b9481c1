"""Experts on two ranks, when something is wrong.

    torchrun --nproc_per_node 2 faults_worker.py      # NaN, and ranks that disagree
    faults_worker.py OUT gloo|nccl                    # a rank dies, or stalls, during the all-to-all
    faults_worker.py OUT symmetric                    # a rank is lost or late while tokens travel in shared memory

torchtitan's own function parallelizes a converted layer. Every token's experts are given; the router only decides the
scores. All faults of a command run at the same time, with two ranks each: on a CPU, on a GPU each, or on one that they
share. What rank 0 says, its libraries included, goes to ``OUT/<fault>.err``.
"""

import faulthandler
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torchtitan.models.moe.moe import MoE, MoEArgs, TokenChoiceTopKRouter

from experiments.reference import in_model
from tests.distributed.runner import check, end, start
from tests.processes import time_limit
from titan_fp8moe import ops, routed_experts
from titan_fp8moe.config import Fp8FlowMoEConfig
from titan_fp8moe.dispatch import base
from titan_fp8moe.dispatch.symmetric import exchange, kernels
from titan_fp8moe.torchtitan import parallel
from titan_fp8moe.torchtitan.modules import Fp8FlowMoE

D, H, EXPERTS, TOP_K = 256, 128, 4, 2
TIMEOUT = 5  # seconds a collective may wait for a lost rank
LATE = round(time_limit(2.5))  # and a symmetric exchange, 5 where nothing else runs
SETUP = time_limit(60)  # and both before
SYMMETRIC_FAULTS = ("dies", "raises", "stalls", "late")
WEIGHTS = ("w1", "w2", "w3")


class GivenExperts(TokenChoiceTopKRouter):
    """Routes by a table instead of by score."""

    experts_TK: Tensor

    def _debug_force_load_balance_routing(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        return self.experts_TK, scores.gather(1, self.experts_TK)


def make_layer(device: str) -> MoE:
    """The layer with its experts spread over the ranks; always the same weights."""
    torch.manual_seed(0)
    moe = MoE(MoEArgs(EXPERTS, top_k=TOP_K, score_before_experts=False, _debug_force_load_balance=True), D, H)
    moe = moe.to(device)
    with torch.no_grad():
        moe.init_weights(0.05, torch.device(device))
    moe.router.__class__ = GivenExperts
    Fp8FlowMoE.convert(moe, Fp8FlowMoEConfig())
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
    dist.all_reduce(loss := loss.detach().clone())
    grads = {name: getattr(moe.experts, name).grad.to_local() for name in WEIGHTS}
    return {"out": out.detach(), "dx": x_TD.grad, "loss": loss} | grads


def check_nan(device: str, rank: int) -> None:
    """One NaN shows in the loss, in that token's rows and in its experts' gradients, and changes nothing else."""
    torch.manual_seed(1 + rank)
    tokens, bad = 90, 17
    x, dout = torch.randn(tokens, D).to(device), torch.randn(tokens, D).to(device)
    experts = torch.rand(tokens, EXPERTS).topk(TOP_K, dim=1).indices.to(device)
    hit = experts[bad].clone()
    dist.broadcast(hit, 0)
    others = torch.arange(tokens, device=device) != (bad if rank == 0 else -1)
    moe = make_layer(device)
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


def join(how: str, rank: int, out: Path, backend: str, cuda: bool) -> None:
    """Begins a process of the fault ``how``."""
    if rank == 0:
        os.dup2(os.open(out / f"{how}.err", os.O_WRONLY | os.O_CREAT), 2)
    faulthandler.dump_traceback_later(SETUP, exit=False)  # says where a rank hangs
    if cuda:
        torch.cuda.set_device(rank % torch.cuda.device_count())
    # In a fork PyTorch 2.11 may fail where autograd's threads are the first to set theirs, all at once.
    torch.set_num_threads(1)
    store = dist.FileStore(str(out / f"{how}.store"), 2)
    dist.init_process_group(backend, store=store, rank=rank, world_size=2, timeout=timedelta(seconds=SETUP))


def shorten_timeout(how: str, rank: int, out: Path, seconds: int) -> None:
    """Kernels are compiled by now, on one rank earlier than on the other."""
    dist.barrier()
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), dist.group.WORLD)
    if rank == 0:
        (out / f"{how}.begin").touch()


def lose_rank(how: str, rank: int, out: Path, backend: str) -> None:
    """Rank 1 dies or stalls when it is to send its rows."""
    device = "cuda" if backend == "nccl" else "cpu"
    join(how, rank, out, backend, device == "cuda")
    parallel.install()
    moe = make_layer(device)
    x, experts, dout = torch.randn(8, D), torch.tensor([[0, 3]]).repeat(8, 1), torch.randn(8, D)
    batch = x.to(device), experts.to(device), dout.to(device)
    run(moe, *batch)
    if rank == 1:
        exchange_rows = ops.start_all_to_all

        def fault(rows: Tensor, *args):
            if rows.ndim == 2 and rows.shape[1] >= D:  # rows of tokens, not counts
                if how == "stalls":
                    time.sleep(1000)
                os.kill(os.getpid(), signal.SIGKILL)
            return exchange_rows(rows, *args)

        ops.start_all_to_all = fault
    shorten_timeout(how, rank, out, TIMEOUT)
    run(moe, *batch)
    if device == "cuda":
        torch.cuda.synchronize()


def symmetric_layer(device: str) -> Tensor:
    torch.manual_seed(0)
    x, dout = torch.randn(8, 128, device=device), torch.randn(8, 128, device=device)
    weights = [torch.randn(2, 128, 128, device=device).requires_grad_() for _ in range(3)]
    ids, scores = torch.tensor([[0, 3]], device=device).repeat(8, 1), torch.rand(8, 2, device=device)
    config = Fp8FlowMoEConfig(dispatch="symmetric", dispatch_capacity=2)
    out = routed_experts(x, *weights, ids, scores, config=config, ep_group=dist.group.WORLD)
    out.backward(dout)
    return torch.cat([out, *[w.grad.flatten(0, 1) for w in weights]])


def inject(how: str, device: str) -> None:
    """Makes this rank fail in the place of the combine of the next layer."""
    impl = kernels if device == "cuda" else exchange
    push_sums = impl.push_sums

    def fault(*args):
        if device == "cuda":
            torch.cuda.synchronize()
        if how == "raises":
            raise ValueError("of this rank alone")
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1000 if how == "stalls" else LATE / 2)
        push_sums(*args)

    impl.push_sums = fault


def lose_symmetric_rank(how: str, rank: int, out: Path, device: str) -> None:
    join(how, rank, out, "gloo", device == "cuda")
    want = symmetric_layer(device).cpu()
    if rank == 1:
        inject(how, device)
    shorten_timeout(how, rank, out, LATE)
    got = symmetric_layer(device).cpu()
    assert how == "late" and torch.equal(got, want)
    print("the result is right", file=sys.stderr, flush=True)
    os._exit(0)


def lose_ranks(out: Path, backend: str) -> None:
    """On a CPU in forks of this process, since imports take longer than the test."""
    symmetric, cuda = backend == "symmetric", torch.cuda.is_available()
    target, last = (lose_symmetric_rank, "cuda" if cuda else "cpu") if symmetric else (lose_rank, backend)
    context = torch.multiprocessing.get_context("spawn" if cuda else "fork")
    processes = {
        (how, rank): context.Process(target=target, args=(how, rank, out, last), daemon=True)
        for how in (SYMMETRIC_FAULTS if symmetric else ("dies", "stalls"))
        for rank in range(2)
    }
    report_ends(processes, out, SETUP + (4 * LATE if symmetric else 20 * TIMEOUT))


def report_ends(processes: dict[tuple[str, int], Any], out: Path, limit: float) -> None:
    """Runs processes by fault and rank, and says how each rank 0 has ended, and how long after ``<fault>.begin``."""
    for process in processes.values():
        process.start()
    faults = {how for how, _ in processes}
    begun, ended, deadline = {}, {}, time.monotonic() + limit
    while len(ended) < len(faults) and time.monotonic() < deadline:
        now = time.monotonic()
        for how in faults:
            if how not in begun and (out / f"{how}.begin").exists():
                begun[how] = now
            if how not in ended and processes[how, 0].exitcode is not None:
                ended[how] = now
                seconds = now - begun.get(how, float("nan"))
                print(f"{how}: rank 0 ended with {processes[how, 0].exitcode} after {seconds:.1f} s", flush=True)
        time.sleep(0.05)
    for process in processes.values():
        process.kill()


def main() -> None:
    if len(sys.argv) > 1:
        return lose_ranks(Path(sys.argv[1]), sys.argv[2])
    parallel.install()
    device = start()
    check_nan(device, dist.get_rank())
    check_agreement(device, dist.get_rank())
    end()


if __name__ == "__main__":
    main()
