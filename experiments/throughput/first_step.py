"""Seconds that the first step of training takes where nothing is compiled yet, in bf16 and in FP8-Flow.

    python -m experiments.throughput.first_step --out experiments/throughput --gpus 1 --layers 6 --attention sdpa

Runs are alone on the machine, one after another, and each has Triton and Inductor caches of its own, empty at its
beginning. The records have the time between torchtitan's "Training starts" and its log of step 1, and
that from the launch of the processes. Options are :mod:`experiments.throughput.train`'s.
"""

import re
import tempfile
import time
from datetime import datetime

from experiments.records import begin
from experiments.throughput.train import Run, drawn, finish, parser, require_success, write

STARTS, FIRST = "Training starts", "step:  1 "
CACHES = {"TRITON_CACHE_DIR": "triton", "TORCHINDUCTOR_CACHE_DIR": "inductor"}
MEASURED = ("first_step", "s", "first step"), ("from_launch", "s", "from launch")


def first_step(log: str) -> float:
    """Seconds between the two lines of rank 0, by the times that torchtitan logs."""
    times = []
    for line in (STARTS, FIRST):
        logged = re.search(rf"^\[rank0\].*?(\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d,\d{{3}}) .*{line}", log, re.MULTILINE)
        if not logged:
            raise ValueError(f"the log has no time of {line!r}")
        times.append(datetime.strptime(logged[1], "%Y-%m-%d %H:%M:%S,%f"))
    return (times[1] - times[0]).total_seconds()


def measure(variant: str, args, seed: int) -> dict:
    """A result, as train.py's have it, of a run that ends after its first step."""
    result = {"variant": variant, "seed": seed, "first_step": None, "from_launch": None}
    with tempfile.TemporaryDirectory() as empty:
        caches = {name: f"{empty}/{folder}" for name, folder in CACHES.items()}
        launched = time.monotonic()
        run = Run(variant, args, seed, **caches)
        run.begin()
        try:
            result["error"] = run.wait(args.timeout, until=FIRST)
            if not result["error"]:
                result |= {"from_launch": time.monotonic() - launched, "first_step": first_step(run.log.read_text())}
        finally:
            run.end()
    return result


def main() -> None:
    args = begin(parser(__doc__, ["bf16", "fp8_flow"], [0, 1, 2]))
    shape = finish(args, "first_step")
    results: list[dict] = []
    for variant, seed in drawn(args.variants, args.seeds):
        results.append(measure(variant, args, seed))
        write(results, args, shape, MEASURED)
    require_success(results)


if __name__ == "__main__":
    main()
