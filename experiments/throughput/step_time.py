"""Where a step's time goes on one GPU: its kernels by kind, and how long the GPU has none.

    python -m experiments.throughput.step_time --out experiments/throughput --local-batch 1

A step's time is the median over logs without the profiler. The times of kernels come from torchtitan's trace of the
last step, in which the host is slower: the difference, not the trace, is the time without kernels. Options are
:mod:`experiments.throughput.train`'s.
"""

import json
import math
import re
import statistics
import sys
from argparse import Namespace

from experiments.records import begin, record, write_records
from experiments.throughput.train import Run, finish, line, parser, record_name, require_fit

KINDS = {
    "optimizer and clipping": "multi_tensor_apply",
    "sums of gradients": r"CUDAFunctor_add<float>",  # AccumulateGrad's, of parameters in fp32
    "weights quantized": "_quantize_weight_kernel|_refresh_weight_kernel|_seen_weights_kernel",
    "other kernels": "",
}
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")


def kernel_ms(trace: dict) -> dict[str, float]:
    """Milliseconds in which the GPU runs something, by kind; of two at once the first counts."""
    events = [event for event in trace["traceEvents"] if event.get("cat") in ON_GPU]
    spans = sorted((event["ts"], event["ts"] + event["dur"], event["name"]) for event in events)
    found, end = dict.fromkeys(KINDS, 0.0), 0.0
    for begins, ends, name in spans:
        kind = next(kind for kind, pattern in KINDS.items() if re.search(pattern, name))
        found[kind] += max(0.0, ends - max(begins, end)) / 1e3
        end = max(end, ends)
    return found


def measure(variant: str, args: Namespace) -> dict:
    """A result, as train.py's have it, with ``step_ms`` and ``parts``."""
    profile = ("--profiling.enable_profiling", f"--profiling.profile_freq={args.steps}")
    run = Run(variant, args, 0, f"{variant}_profiled", extra=profile)
    run.begin()
    try:
        result, log = run.result(run.wait(args.timeout, until="Finished dumping")), run.log.read_text()
        if result["error"]:
            sys.exit(f"error: {line(result)}\n{log[-3000:]}")
        (trace,) = run.dump.rglob("rank0_trace.json")
        tokens = re.search(r"global batch size (\d+),.* sequence length (\d+)", log)
        assert tokens is not None
        per_second = statistics.median(result["tokens_per_second"][:-1])  # the last log has the profiled steps
        step_ms = 1e3 * math.prod(map(int, tokens.groups())) / per_second
        return result | {"step_ms": step_ms, "parts": kernel_ms(json.loads(trace.read_text()))}
    finally:
        run.end()


def main() -> None:
    p = parser(__doc__)
    variants = ["fp8_flow", "fp8_flow:cache_weights=true", "bf16_fused:checkpointing=saved"]
    p.add_argument("--variants", nargs="+", default=variants, help=f"the last is the reference; default: {variants}")
    p.set_defaults(gpus=1, layers=6, attention="sdpa")
    args = p.parse_args()
    begin(args.trial)
    require_fit(args.variants, args.gpus)
    shape = finish(args, "step_time")
    results = []
    for variant in args.variants:
        results.append(measure(variant, args))
        print(line(results[-1]), results[-1]["parts"], flush=True)
    *ours, bf16 = results
    reference = bf16["variant"], bf16["step_ms"]
    found = [
        record(record_name(args.model, r["variant"], "step time"), shape, "ms", r["step_ms"], *reference)
        | {"parts": r["parts"], "reference_parts": bf16["parts"]}
        for r in ours
    ]
    write_records(args.out / "results.json", found)


if __name__ == "__main__":
    main()
