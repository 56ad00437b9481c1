"""Processes that tests start, and how long they may take.

They are forks of one process that has imported this package and what torchtitan depends on, which takes 6 s each time,
but not torchtitan or an adapter. It sees no GPU: a process that needs one begins anew.
"""

import functools
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import connection, forkserver
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).parents[1]
CPU = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
PRELOADED = [
    "torch._inductor.compile_fx",
    "torch.distributed.checkpoint.hf_storage",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "torch.utils.tensorboard",
    "datasets.distributed",
    "torchdata.stateful_dataloader",
    "titan_fp8moe",
    "tests.flags",
    "tests.frozen",
]
TIMED_OUT = 124


def time_limit(seconds: float) -> float:
    """Twice the ``seconds`` that an idle machine takes at most, and more where others use this one."""
    return seconds * max(2, 2 * os.getloadavg()[0] / (os.cpu_count() or 1))


@functools.cache
def forks() -> BaseContext:
    """Starts processes as forks of the one that has imported everything."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with mock.patch.dict(os.environ, CPU):
        forkserver.ensure_running()
    return context


def call(function: Callable, *arguments: Any) -> Any:
    """The function's result in a process of its own, for what changes a process for good."""
    with ProcessPoolExecutor(1, forks()) as pool:
        return pool.submit(function, *arguments).result(time_limit(120))


def run_script(
    *command: str | Path, gpu: bool = False, seconds: float = 120, **environment: str
) -> subprocess.CompletedProcess:
    """Runs a file, ``-c`` and a program, or ``-m`` and a module as ``python`` would; on the CPU unless ``gpu``."""
    context = multiprocessing.get_context("spawn") if gpu else forks()
    return _run([list(map(str, command))], [os.environ | ({} if gpu else CPU) | environment], context, seconds)


def run_workers(
    script: str,
    num_ranks: int,
    *args: str,
    seconds: float = 400,
    cpu_only: bool = False,
    one_gpu: bool = False,
    awaits: int | None = None,
) -> subprocess.CompletedProcess:
    """Runs tests/distributed/<script>, or ``-c`` or ``-m`` as above, on ``num_ranks`` processes as torchrun does.

    They use gloo on CPUs, and NCCL where there are enough GPUs; with ``one_gpu`` they share it. ``awaits``: so many
    ranks end the run, whatever becomes of the others; by default all.
    """
    import torch
    from torch.distributed import TCPStore

    gpu = not cpu_only and torch.cuda.device_count() >= (1 if one_gpu else num_ranks)
    context = multiprocessing.get_context("spawn") if gpu else forks()
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    shared = os.environ | ({"OMP_NUM_THREADS": "1"} if gpu else CPU)
    shared |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port), "TORCHELASTIC_RUN_ID": "tests"}
    shared |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    shared |= {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
    environments = [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_ranks)]
    command = [script if script in ("-c", "-m") else str(ROOT / "tests/distributed" / script), *args]
    return _run([command] * num_ranks, environments, context, seconds, awaits)


def ended_well(done: subprocess.CompletedProcess) -> bool:
    """Exit code 0, or the one abort that is not about what ran: gloo's threads have been seen to terminate a process
    that was done and on its way out. Callers check besides that the work was reported as done."""
    return done.returncode == 0 or "terminate called without an active exception" in done.stdout + done.stderr


def _run(
    commands: Sequence[list[str]],
    environments: Sequence[dict[str, str]],
    context: BaseContext,
    seconds: float,
    awaits: int | None = None,
) -> subprocess.CompletedProcess:
    """Exit code, of the first awaited process that fails, and all output; the code is TIMED_OUT after a timeout."""
    limit = time_limit(seconds)
    with tempfile.TemporaryDirectory() as folder:
        outs, errs = ([Path(folder) / f"{kind}{n}" for n in range(len(commands))] for kind in ("out", "err"))
        jobs = zip(commands, environments, outs, errs, strict=True)
        processes = [context.Process(target=_main, args=job) for job in jobs]
        try:
            for process in processes:
                process.start()
            code = _wait(processes[:awaits], time.monotonic() + limit)
        finally:  # also of a run that is interrupted: ranks would stay on the GPUs
            _end([process for process in processes if process.pid])
        out, err = ("".join(f.read_text(errors="replace") for f in files if f.exists()) for files in (outs, errs))
    if code == TIMED_OUT:
        err += f"\nstopped after {limit:.0f} s"
    return subprocess.CompletedProcess(commands[0], code, out, err)


def _wait(awaited: Sequence[BaseProcess], deadline: float) -> int:
    """The first exit code that is not 0."""
    timed_out = False
    while running := [process for process in awaited if process.exitcode is None]:
        if timed_out or any(process.exitcode for process in awaited):
            break
        sentinels = [process.sentinel for process in running]
        timed_out = not connection.wait(sentinels, max(deadline - time.monotonic(), 0))
    return TIMED_OUT if timed_out else next((p.exitcode for p in awaited if p.exitcode), 0)


def _end(processes: Sequence[BaseProcess]) -> None:
    for process in processes:
        process.terminate()  # not killed: a script may have processes of its own to end
        process.join(10)
        process.kill()
        process.join()


def _main(command: list[str], environment: dict[str, str], out: Path, err: Path) -> None:
    for descriptor, file in ((1, out), (2, err)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(ROOT)
    import torch  # after CUDA_VISIBLE_DEVICES is set, where the process begins anew

    torch.set_num_threads(1)
    if command[0] == "-m":
        sys.argv = command[1:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    elif command[0] == "-c":
        sys.argv = ["-c", *command[2:]]
        exec(command[1], {"__name__": "__main__"})
    else:
        sys.argv = command
        runpy.run_path(command[0], run_name="__main__")
