"""A rank that is lost or late while ranks exchange tokens through shared memory.

    symmetric_faults_worker.py OUT [TIMEOUT]

Runs each fault with two ranks, on a CPU, on a GPU each, or on one GPU that they share, all faults at the same time.
What rank 0 says goes to ``OUT/<fault>.err``.
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

from tests.processes import time_limit
from titan_fp8moe import Fp8FlowMoEConfig, routed_experts
from titan_fp8moe.dispatch.symmetric import exchange, kernels

TIMEOUT = round(time_limit(2.5))  # seconds a rank may be late, 5 where nothing else runs
SETUP = time_limit(60)
FAULTS = ("dies", "raises", "stalls", "late")


def layer(device: str) -> torch.Tensor:
    torch.manual_seed(0)
    x, dout = torch.randn(8, 128, device=device), torch.randn(8, 128, device=device)
    weights = [torch.randn(2, 128, 128, device=device).requires_grad_() for _ in range(3)]
    ids, scores = torch.tensor([[0, 3]], device=device).repeat(8, 1), torch.rand(8, 2, device=device)
    config = Fp8FlowMoEConfig(dispatch="symmetric", dispatch_capacity=2)
    out = routed_experts(x, *weights, ids, scores, config=config, ep_group=dist.group.WORLD)
    out.backward(dout)
    return torch.cat([out, *[w.grad.flatten(0, 1) for w in weights]])


def inject(how: str, device: str, timeout: int) -> None:
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
        time.sleep(1000 if how == "stalls" else timeout / 2)
        push_sums(*args)

    impl.push_sums = fault


def lose_rank(how: str, rank: int, out: Path, device: str, timeout: int) -> None:
    if rank == 0:
        os.dup2(os.open(out / f"{how}.err", os.O_WRONLY | os.O_CREAT), 2)
    faulthandler.dump_traceback_later(SETUP, exit=False)  # says where a rank hangs
    if device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    torch.set_num_threads(1)
    store = dist.FileStore(str(out / f"{how}.store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=SETUP))
    want = layer(device).cpu()
    dist.barrier()
    # Kernels are compiled by now, on one rank earlier than on the other.
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout), dist.group.WORLD)
    if rank == 1:
        inject(how, device, timeout)
    else:
        (out / f"{how}.begin").touch()
    got = layer(device).cpu()
    assert how == "late" and torch.equal(got, want)
    print("the result is right", file=sys.stderr, flush=True)
    os._exit(0)


def main() -> None:
    out, timeout = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else TIMEOUT
    device = "cuda" if torch.cuda.is_available() else "cpu"
    context = torch.multiprocessing.get_context("spawn" if device == "cuda" else "fork")
    processes = {
        (how, rank): context.Process(target=lose_rank, args=(how, rank, out, device, timeout), daemon=True)
        for how in FAULTS
        for rank in range(2)
    }
    report_ends(processes, out, SETUP + 4 * timeout)


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


if __name__ == "__main__":
    main()
