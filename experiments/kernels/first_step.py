"""Seconds that the first forward and backward of a layer take to compile, and what other numbers of tokens compile.

    python -m experiments.kernels.first_step

Each layer runs in its own process with an empty Triton cache, as after a fresh install.
"""

import os
import subprocess
import sys
import tempfile
import time

import torch
import triton

from experiments.records import begin, require_gpu, script_parser
from titan_fp8moe.layer.experts import routed_experts

LAYERS = {  # D model dim, H expert hidden dim, E experts, top_k, dtype of the weights
    "671B, 8 experts": (7168, 2048, 8, 8, torch.bfloat16),
    "16B": (2048, 1408, 64, 6, torch.bfloat16),
    "debugmodel": (256, 256, 8, 3, torch.float32),
}
TOKENS = (4096, 1024, 1000, 37, 2049, 8192)


def measure(layer: str) -> None:
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

    seconds = step(TOKENS[0])
    print(f"{layer}: {seconds:.1f} s for {len(compiled)} kernels", flush=True)
    compiled.clear()
    for tokens in TOKENS[1:]:
        step(tokens)
    print(f"  other numbers of tokens: {', '.join(compiled) or 'nothing'} compiled", flush=True)


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--layer", choices=LAYERS, help="one layer, in this process and with its cache")
    layer = parser.parse_args().layer
    require_gpu()
    if layer is not None:
        return measure(layer)
    begin()
    failed = False
    for layer in LAYERS:
        with tempfile.TemporaryDirectory() as cache:
            command = [sys.executable, "-m", "experiments.kernels.first_step", "--layer", layer]
            failed |= subprocess.run(command, env=os.environ | {"TRITON_CACHE_DIR": cache}).returncode != 0
    sys.exit(failed)


if __name__ == "__main__":
    main()
