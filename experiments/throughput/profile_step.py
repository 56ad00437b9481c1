"""Where one training step's time goes, in bf16 and in FP8-Flow: a torch.profiler trace of rank 0 of each, summarized.

    python -m experiments.throughput.profile_step --out experiments/throughput --gpus 2 --layers 12

The setting is train.py's. The traces are hundreds of MB and are not kept; the tables are, compressed.
"""

import gzip

from experiments.record import exit_on_sigterm
from experiments.throughput import kernel_trace
from experiments.throughput.train import Run, parser

VARIANTS = ("bf16", "fp8_flow")
STEP = 10
_PROFILING = ("--profiling.enable_profiling", f"--profiling.profile_freq={STEP}")


def summary(variant: str, kernels: list[kernel_trace.Kernel], own: dict[str, str]) -> tuple[str, str]:
    """The time line and the classes, and the table of all kernels."""
    lines = [f"== {variant}, rank 0, one step"]
    lines += [f"{key:24} {ms:9.2f} ms" for key, ms in kernel_trace.timeline(kernels).items()]
    lines += ["-- by class (kernels overlap: the parts add up to more than the busy time)"]
    lines += [f"{key:28} {ms:9.2f} ms {n:6} launches" for key, (ms, n) in kernel_trace.by_class(kernels, own).items()]
    names = kernel_trace.by_name(kernels)
    every = [f"{ms:9.3f} ms {n:6}  {kernel_trace.classify(name, own):26} {name}" for name, (ms, n) in names.items()]
    return "\n".join(lines), "\n".join(every)


def main() -> None:
    args = parser(__doc__).parse_args()
    args.steps = STEP
    exit_on_sigterm()
    args.out = args.out / f"profile_{args.layers}layers_{args.gpus}gpu_{args.routing}"
    args.out.mkdir(parents=True, exist_ok=True)
    own = kernel_trace.own_kernels()
    runs = [Run(variant, args, 0, variant, _PROFILING) for variant in VARIANTS]
    try:
        while runs:
            run = runs[0]
            trace = run.dump / f"profile_traces/iteration_{STEP}/rank0_trace.json"
            run.begin()
            error = run.wait(args.timeout, until="Finished dumping profiler traces")
            if error:
                print(f"{run.label}: {error}\n{run.log.read_text()[-3000:]}", flush=True)
            else:
                head, every = summary(run.label, kernel_trace.load(trace), own)
                print(head, flush=True)
                with gzip.open(args.out / f"{run.label}.txt.gz", "wt") as file:
                    file.write(f"{head}\n-- by kernel\n{every}\n")
            runs.pop(0).end()
    finally:
        for run in runs:
            run.end()


if __name__ == "__main__":
    main()
