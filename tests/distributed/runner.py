"""What the workers share: running the cases of a command line, and gathering their results over the ranks."""

import faulthandler
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from tests.processes import time_limit

CASE_TIMEOUT = time_limit(60)  # seconds; a hang prints every thread's stack and ends the run


def plain_name(name: str) -> str:
    """A parameter's name without the wrappers of compile and activation checkpointing."""
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


def gather_list(value) -> list:
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def gather(values: dict) -> dict:
    """On rank 0 the union of all ranks' dicts: pipeline stages hold different parameters."""
    parts = [{}] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(values, parts)
    return {name: value for part in parts or () for name, value in part.items()}


def start() -> str:
    """Begins the ranks' group, with NCCL where there are GPUs, and says where their tensors are."""
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    return "cuda" if cuda else "cpu"


def check(name: str, ok: bool) -> None:
    """Ends the ranks unless all of them are ``ok``; rank 0 prints which."""
    ok = all(gather_list(bool(ok)))
    if dist.get_rank() == 0:
        print(f"{'ok' if ok else 'FAILED'} {name}", flush=True)
    if not ok:
        sys.exit(1)


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
