"""Compiles the kernels of a job's layers ahead of it: ``python -m titan_fp8moe.warm_up CONFIG``.

Takes the arguments of the dry run: torchtitan 0.2.2's TOML file and overrides, or 0.3's ``--config`` and options. The
kernels go to Triton's cache, ``TRITON_CACHE_DIR`` or ``~/.triton/cache``. No GPU is needed: they are compiled for
Hopper GPUs, by the installed versions of torch and Triton. With Triton 3.6 a C compiler also builds their launchers,
which it links with libcuda; on a node without it they are left to the job.

    python -m titan_fp8moe.warm_up train_configs/deepseek_v3_16b.toml
    python -m titan_fp8moe.warm_up --config deepseek_v3_16b --parallelism.expert_parallel_degree 4
"""

import importlib
import os
import sys
import time

import torch
from triton import knobs

from titan_fp8moe.kernels import warm_up
from titan_fp8moe.versions import installed


def main() -> None:
    if torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0):
        sys.exit(f"error: kernels are compiled for Hopper GPUs, and this is a {torch.cuda.get_device_name()}")
    release = "torchtitan" if (installed("torchtitan") or "").startswith("0.2.") else "torchtitan03"
    dry_run = importlib.import_module(f"titan_fp8moe.{release}.dry_run")
    built, start = dry_run.from_command_line(__doc__), time.monotonic()

    def run_layers() -> None:
        for run in dry_run.layers(built):
            out = run()
            out.backward(torch.empty_like(out))

    launches = warm_up.recorded(run_layers)
    if not launches:
        print("Nothing to compile: this rank has no layer in FP8")
        return
    processes = min(len(os.sched_getaffinity(0)), warm_up.MAX_PROCESSES)
    print(f"Compiling {len(launches)} kernels in {processes} processes", flush=True)
    shares = [launches[index::processes] for index in range(processes)]
    failed = warm_up.wait(warm_up.begin(shares, deadline=0))
    if failed:
        sys.exit(f"error: {failed} of {processes} processes failed; the job compiles what is missing")
    seconds = time.monotonic() - start
    print(f"{len(launches)} kernels for Hopper GPUs are in {knobs.cache.dir} after {seconds:.0f} s")


if __name__ == "__main__":
    main()
