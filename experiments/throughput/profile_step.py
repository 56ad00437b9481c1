"""Where the time of training steps goes, in bf16 and in FP8-Flow: a trace of rank 0 of each, summarized.

    python -m experiments.throughput.profile_step --out experiments/throughput --gpus 1 --layers 6 --attention sdpa
    python -m experiments.throughput.profile_step --out experiments/throughput --gpus 2 --layers 12

The runs are train.py's. The traces have kernels and their launches only; they are large and are not kept. Tables, and
below them all kernels in the order they started, go to ``outputs/throughput``. The records ``host_bound_share`` have
the fraction of a step in which the GPU has nothing to run and the CPU has not launched anything, FP8-Flow's next to
each reference's, and both steps' milliseconds by class of kernel.
"""

import os

from experiments.records import exit_on_sigterm, require_commit, require_gpu, write_records
from experiments.throughput import kernel_trace
from experiments.throughput.kernel_trace import TRACE_WRITTEN, TRACED
from experiments.throughput.train import CONVERTERS, Run, finish, parser, record_model

VARIANTS = ("bf16", "bf16_whole", "fp8_flow")
OURS = "fp8_flow"


def summary(variant: str, kernels: list[kernel_trace.Kernel], own: dict[str, str]) -> tuple[str, str]:
    """The time line and the classes, of a step on average, and the list of all kernels."""
    steps = len(TRACED)
    lines = [f"== {variant}, rank 0, a step, average of {steps}"]
    line = kernel_trace.timeline(kernels)
    lines += [f"{key:24} {ms / steps:9.2f} ms" for key, ms in line.items()]
    lines += [f"host-bound share {kernel_trace.host_bound_share(line):17.1%}"]
    lines += ["-- by class (kernels overlap: the parts add up to more than the busy time)"]
    classes = kernel_trace.by_class(kernels, own)
    lines += [f"{key:28} {ms / steps:9.2f} ms {n / steps:6.0f} launches" for key, (ms, n) in classes.items()]
    every = [
        f"{(k.start - kernels[0].start) / 1e3:9.3f} {(k.end - k.start) / 1e3:8.3f} {(k.start - k.launched) / 1e3:9.3f} "
        f"{k.stream:3} {k.name[:80]}"
        for k in kernels
    ]
    return "\n".join(lines), "\n".join(["-- ms: start, duration, since its launch; stream; kernel", *every])


def records(shares: dict[str, float], classes: dict[str, dict[str, float]], shape: str) -> list[dict]:
    """FP8-Flow's host-bound share and classes of kernels, with each reference's."""
    return [
        dict(name="host_bound_share", shape=shape, value=shares[OURS], unit="fraction", reference=reference,
             reference_value=share, speedup=None,
             classes={"ours": classes[OURS], "reference": classes[reference]})
        for reference, share in shares.items()
        if OURS in shares and reference != OURS
    ]  # fmt: skip


def main() -> None:
    p = parser(__doc__)
    p.add_argument("--variants", nargs="+", help=f"of {', '.join(CONVERTERS)}; bf16_whole needs --gpus 1")
    args = p.parse_args()
    require_gpu()
    require_commit(args.trial)
    args.variants = args.variants or [name for name in VARIANTS if args.gpus == 1 or name != "bf16_whole"]
    args.steps = TRACED.stop
    exit_on_sigterm()
    shape = finish(args, "profile")
    own = kernel_trace.own_kernels()
    shares, classes = {}, {}
    for variant in args.variants:
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
            line, by_class = kernel_trace.timeline(kernels), kernel_trace.by_class(kernels, own)
            shares[variant] = kernel_trace.host_bound_share(line)
            parts = {"span": line["span"], "idle": line["idle"]} | {kind: ms for kind, (ms, _) in by_class.items()}
            classes[variant] = {kind: round(ms / len(TRACED), 3) for kind, ms in parts.items()}
        finally:
            run.end()
            trace.unlink(missing_ok=True)
    write_records(args.out / "results.json", records(shares, classes, f"train_{record_model(args)}: {shape}"))


if __name__ == "__main__":
    main()
