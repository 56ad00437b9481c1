"""Seconds that the first forward and backward of a layer take in a new process with an empty Triton cache.

    python -m experiments.kernels.first_step --out experiments/kernels/results.json

A layer's kernels compile in parallel processes before its first launch; a process that may use one core compiles them
one after the other. Other numbers of tokens must compile nothing.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time

import torch
import triton

from experiments.records import begin, require_gpu, script_parser, write_records
from titan_fp8moe.layer.run import routed_experts

LAYERS = {  # D model dim, H expert hidden dim, E experts, top_k, dtype of the weights
    "671B, 8 experts": (7168, 2048, 8, 8, torch.bfloat16),
    "16B, 64 experts": (2048, 1408, 64, 6, torch.bfloat16),
    "debug model, 8 experts": (256, 256, 8, 3, torch.float32),
}
TOKENS = (4096, 1024, 1000, 37, 2049, 8192)


def measure(layer: str) -> dict:
    """Seconds of the first step, and the kernels that its launches and other numbers of tokens compiled."""
    D, H, E, top_k, dtype = LAYERS[layer]

    def randn(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, device="cuda", dtype=dtype) * 0.02).requires_grad_()

    weights = randn(E, H, D), randn(E, D, H), randn(E, H, D)
    compiled = []
    triton.knobs.compilation.listener = lambda **compilation: compiled.append(compilation["src"].name)

    def step(tokens: int) -> float:
        x, score = randn(tokens, D), torch.rand(tokens, top_k, device="cuda", requires_grad=True)
        chosen = torch.rand(tokens, E, device="cuda").topk(top_k, 1).indices
        torch.cuda.synchronize()
        start = time.monotonic()
        out = routed_experts(x, *weights, chosen, score)
        out.backward(torch.ones_like(out))
        torch.cuda.synchronize()
        return time.monotonic() - start

    seconds, kernels = step(TOKENS[0]), len(compiled)
    for tokens in TOKENS[1:]:
        step(tokens)
    return {"seconds": seconds, "kernels": kernels, "later": compiled[kernels:]}


def in_new_process(layer: str, cores: set[int]) -> dict:
    with tempfile.TemporaryDirectory() as cache:
        done = subprocess.run(
            [sys.executable, "-m", "experiments.kernels.first_step", "--out", os.devnull, "--layer", layer],
            env=os.environ | {"TRITON_CACHE_DIR": cache}, check=True, stdout=subprocess.PIPE, text=True,
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = script_parser(__doc__, out="file of the records")
    parser.add_argument("--layer", choices=LAYERS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    require_gpu()
    if args.layer:
        return print(json.dumps(measure(args.layer)))
    begin()
    cores = os.sched_getaffinity(0)
    for layer in LAYERS:
        alone, found = in_new_process(layer, {min(cores)}), in_new_process(layer, cores)
        value, reference = found["seconds"], alone["seconds"]
        print(f"{layer}: {value:.1f} s, on one core {reference:.1f} s; later {found['later'] or 'nothing'}", flush=True)
        record = dict(name="first_step", shape=f"{layer}, {len(cores)} cores", value=value, unit="s")
        record |= dict(reference="one core", reference_value=reference, speedup=reference / value, later=found["later"])
        write_records(args.out, [record])


if __name__ == "__main__":
    main()
