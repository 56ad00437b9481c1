"""Layers of random shapes, routings and settings on a GPU, each compared with the specification, for as long as asked.

    python -m tests.soak --seconds 300 --first 0       # prints the seed to go on with

A seed is one layer. It runs twice with its number of tokens, which must give the same bits, and once with another
number, which must compile nothing. Output and gradients are compared with the reference (``ops.emulate``) on the same
GPU. What is allocated afterwards must be what was before.
"""

import random
import time
from typing import NamedTuple

import torch
from torch import Tensor

from experiments.records import require_gpu, script_parser
from experiments.reference import make_layer, relative_error
from titan_fp8moe import Fp8FlowMoEConfig, ops
from titan_fp8moe.kernels import permute, quantize, routing, swiglu, transpose
from titan_fp8moe.kernels.gemm import forward, wgrad
from titan_fp8moe.kernels.launch import Kernel
from titan_fp8moe.layer.run import Experts, Shared, run_layer
from titan_fp8moe.layer.weights import ExpertWeights
from titan_fp8moe.spec import ExpertSpec

# bf16 rounding of the GEMMs' results and the codes that it moves: 0.0035 on average. Few rows vary more.
LIMIT, LIMIT_OF_FEW = 0.01, 0.03
FEW = 64
MODULES = (permute, quantize, routing, swiglu, transpose, forward, wgrad)
KERNELS = [value for module in MODULES for value in vars(module).values() if isinstance(value, Kernel)]
KERNELS += [swiglu._forward("swiglu", False, False), swiglu._backward("swiglu", False, False)]
ROUTINGS = ("uniform", "skewed", "one expert", "mostly none")


class Layer(NamedTuple):
    """What a seed decides."""

    tokens: int
    other_tokens: int
    dim: int
    hidden: int
    experts: int
    top_k: int
    routing: str
    shared: bool
    score_before: bool
    dtype: torch.dtype
    config: Fp8FlowMoEConfig


def draw(seed: int, largest: int) -> Layer:
    """The layer of a seed, with at most ``largest`` tokens and tiles of 128 in proportion."""
    r = random.Random(seed)
    tiles = max(largest // 512, 1)
    experts = r.choice([1, 2, 3, 8, 17, 64])
    config = Fp8FlowMoEConfig(
        wgrad=r.choice(["balanced", "scaling_aware"]),
        save_h=r.choice(["bf16", "fp8"]),
        recompute=r.choice(["none", "activation", "experts"]),
    )
    tokens = [r.choice([r.randint(1, largest), r.randint(1, 200), 128, largest]) for _ in range(2)]
    dims = [128 * r.randint(1, tiles) for _ in range(2)]
    dtype = r.choice([torch.bfloat16, torch.float32])
    top_k = r.randint(1, min(8, experts))
    return Layer(*tokens, *dims, experts, top_k, r.choice(ROUTINGS), r.random() < 0.5, r.random() < 0.3, dtype, config)


def inputs(layer: Layer, tokens: int, device: str) -> tuple[list[Tensor], Tensor, Tensor]:
    """Leaves (x, scores, w1, w2, w3 and the shared experts'), the experts of each token, and the output's gradient."""
    E, K = layer.experts, layer.top_k
    x, scores, ids, weights = make_layer(tokens, layer.dim, layer.hidden, E, K, layer.dtype, device)
    if layer.routing == "skewed":
        preference = torch.rand(tokens, E, device=device) + 3 * (torch.arange(E, device=device) < max(E // 4, 1))
        ids = preference.topk(K, dim=1).indices
    elif layer.routing == "one expert":
        ids = torch.full_like(ids, E - 1)
    elif layer.routing == "mostly none":
        ids = ids.masked_fill(torch.rand_like(scores) < 0.9, -1)
    shared = [w[0].clone() for w in weights] if layer.shared else []
    leaves = [t.requires_grad_() for t in (x, scores, *(w.to(layer.dtype) for w in (*weights, *shared)))]
    return leaves, ids, torch.randn_like(x)


def step(layer: Layer, leaves: list[Tensor], ids: Tensor, dout: Tensor) -> list[Tensor]:
    """Output and gradients."""
    x, scores, *weights = leaves
    spec = ExpertSpec(score_before_experts=layer.score_before)
    experts = Experts(ExpertWeights(*weights[:3]), layer.config, expert=spec)
    shared = Shared(ExpertWeights(*weights[3:])) if layer.shared else None
    out = run_layer(x, ids, scores, experts, shared)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def check(layer: Layer, device: str) -> float:
    """The largest relative error of the layer's results.

    Raises:
        AssertionError: it is too large, a repetition gives other bits, or another number of tokens compiles a kernel.
    """
    leaves, ids, dout = inputs(layer, layer.tokens, device)
    got, again = step(layer, leaves, ids, dout), step(layer, leaves, ids, dout)
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True)), "a repetition gave other bits"
    compiled = sum(len(kernel._compiled) for kernel in KERNELS)
    step(layer, *inputs(layer, layer.other_tokens, device))
    assert sum(len(kernel._compiled) for kernel in KERNELS) == compiled, "another number of tokens compiled a kernel"
    ops.emulate(True)
    try:
        want = step(layer, leaves, ids, dout)
    finally:
        ops.emulate(False)
    errors = [relative_error(g, w) for g, w in zip(got, want, strict=True) if w.any()]
    assert all(not g.any() for g, w in zip(got, want, strict=True) if not w.any()), "values where there should be none"
    limit = LIMIT_OF_FEW if int((ids >= 0).sum()) < FEW else LIMIT
    largest = max(errors, default=0.0)
    assert largest < limit, f"relative errors {', '.join(f'{e:.4f}' for e in errors)}, of which none may pass {limit}"
    return largest


def run(first: int, seconds: float, largest: int, device: str) -> int:
    """Checks layers from seed ``first`` on; returns the first seed that has not run."""
    seed, begin, worst, allocated = first, time.monotonic(), 0.0, None
    while time.monotonic() - begin < seconds:
        layer = draw(seed, largest)
        torch.manual_seed(seed)
        try:
            worst = max(worst, check(layer, device))
        except AssertionError as error:
            raise SystemExit(f"error: seed {seed}, {layer}: {error}") from None
        seed += 1
        if device == "cuda":
            torch.cuda.synchronize()
            # Kernels' own buffers, as tile counters, are allocated by the first layers.
            now = torch.cuda.memory_allocated()
            if seed - first > 20 and allocated is not None and now > allocated:
                raise SystemExit(f"error: after seed {seed - 1} {now - allocated} bytes more are allocated: {layer}")
            allocated = now
        if (seed - first) % 50 == 0:
            print(
                f"{seed - first} layers, {time.monotonic() - begin:.0f} s, largest relative error {worst:.4f}",
                flush=True,
            )
    print(
        f"{seed - first} layers from seed {first} on agree with the specification; largest relative error {worst:.4f}"
    )
    print(f"go on with --first {seed}")
    return seed


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--first", type=int, default=0, help="seed to begin with")
    parser.add_argument("--seconds", type=float, default=300)
    args = parser.parse_args()
    require_gpu()
    run(args.first, args.seconds, 4096, "cuda")


if __name__ == "__main__":
    main()
