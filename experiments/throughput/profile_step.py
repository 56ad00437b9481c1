"""Where the time of training steps goes, in bf16 and in FP8-Flow: a trace of rank 0 of each, summarized.

    python -m experiments.throughput.profile_step --out experiments/throughput --gpus 2 --layers 12

The runs are train.py's. The traces have kernels and their launches only; they are large and are not kept. Tables, and
below them all kernels in the order they started, go to ``outputs/throughput``. The record ``host_bound_share`` is the
share of a step in which the GPU has nothing to run and the CPU has not launched anything.
"""

import os

from experiments.throughput import kernel_trace
from experiments.throughput.kernel_trace import TRACE_WRITTEN, TRACED
from experiments.throughput.train import Run, finish, parser
from titan_fp8moe.testing import exit_on_sigterm, write_records

VARIANTS = ("bf16", "fp8_flow")


def summary(variant: str, kernels: list[kernel_trace.Kernel], own: dict[str, str]) -> tuple[str, str]:
    """The time line and the classes, of a step on average, and the list of all kernels."""
    steps = len(TRACED)
    lines = [f"== {variant}, rank 0, a step, average of {steps}"]
    lines += [f"{key:24} {ms / steps:9.2f} ms" for key, ms in kernel_trace.timeline(kernels).items()]
    lines += ["-- by class (kernels overlap: the parts add up to more than the busy time)"]
    classes = kernel_trace.by_class(kernels, own)
    lines += [f"{key:28} {ms / steps:9.2f} ms {n / steps:6.0f} launches" for key, (ms, n) in classes.items()]
    every = [
        f"{(k.start - kernels[0].start) / 1e3:9.3f} {(k.end - k.start) / 1e3:8.3f} {(k.start - k.launched) / 1e3:9.3f} "
        f"{k.stream:3} {k.name[:80]}"
        for k in kernels
    ]
    return "\n".join(lines), "\n".join(["-- ms: start, duration, since its launch; stream; kernel", *every])


def main() -> None:
    args = parser(__doc__).parse_args()
    args.steps = TRACED.stop
    exit_on_sigterm()
    shape = finish(args, "profile")
    own = kernel_trace.own_kernels()
    shares = {}
    for variant in VARIANTS:
        trace = args.work / f"{variant}.trace.json"
        os.environ["THROUGHPUT_TRACE"] = str(trace.absolute())
        run = Run(variant, args, 0, variant)
        try:
            run.begin()
            error = run.wait(args.timeout, until=TRACE_WRITTEN)
            if error:
                print(f"{run.label}: {error}\n{run.log.read_text()[-3000:]}", flush=True)
                continue
            kernels = kernel_trace.load(trace)
            head, every = summary(run.label, kernels, own)
            print(head, flush=True)
            (args.work / f"{run.label}.txt").write_text(f"{head}\n{every}\n")
            line = kernel_trace.timeline(kernels)
            shares[variant] = line["host-bound"] / line["span"]
        finally:
            run.end()
            trace.unlink(missing_ok=True)
    if shares.keys() == set(VARIANTS):
        record = dict(name="host_bound_share", shape=f"train_{args.model}: {shape}", value=shares["fp8_flow"])
        record |= dict(unit="of a step", reference="bf16", reference_value=shares["bf16"], speedup=None)
        write_records(args.out / "results.json", [record])


if __name__ == "__main__":
    main()
