"""Routed experts, forward and backward, next to the strongest bf16 in fifteen lines on one Hopper GPU.

    python -m experiments.kernels.routed_vs_fused_bf16 --out experiments/kernels/results.json

The reference is :func:`experiments.throughput.fused_bf16.fused_experts`, compiled as one graph, with gate and up as one
weight. Ours quantizes its weights in each direction, as a step without gradient accumulation does. In a second and a
third record ``cache_weights`` keeps them for four microbatches, and each bears a fourth of their refresh.
"""

import torch
from torch import Tensor

from experiments.kernels.problem import BF16, UNIT, Problem, Sizes, Step, require_same, step_of
from experiments.records import measure_each
from experiments.throughput.fused_bf16 import fused_experts
from experiments.timing import median_ms, state_records

SHAPES = {  # sizes, tokens
    "Qwen3-Next, 512 experts": (Sizes(2048, 512, 512, 10), 16384),
    "Qwen3-Next, 64 experts": (Sizes(2048, 512, 64, 10), 16384),
    "16B": (Sizes(2048, 1408, 64, 6), 6144),
    "dots.llm1": (Sizes(4096, 1408, 128, 6), 12288),
    "GLM-4.6, 40 experts": (Sizes(5120, 1536, 40, 8), 6144),
    "MiniMax-M2, 64 experts": (Sizes(3072, 1536, 64, 8), 12288),
    "Mixtral 8x7B": (Sizes(4096, 14336, 8, 2), 8192),
    "OLMoE": (Sizes(2048, 1024, 64, 8), 16384),
    "ERNIE-4.5-300B, 8 experts": (Sizes(8192, 3584, 8, 8), 6144),
}
OURS, CACHED, FUSED = "ours, weights quantized", "ours", "bf16 fused"
MICROBATCHES = 4
ACCUMULATED = {  # by what is kept of the weights
    "both": "ours, 2 bytes kept for 4 microbatches",
    "forward": "ours, 1 byte kept for 4 microbatches",
}


def fused(problem: Problem) -> Step:
    torch._dynamo.reset()
    experts = torch.compile(fused_experts, fullgraph=True, dynamic=False)
    w13, w2 = problem.fused_weights()

    def layer(x: Tensor) -> Tensor:
        return experts(x, w13, w2, problem.ids, problem.scores).to(BF16)

    return step_of(layer, problem.x, [problem.scores, w13, w2], problem.dout)


def measure(case: tuple[str, tuple[Sizes, int]]) -> list[dict]:
    name, (sizes, tokens) = case
    problem = Problem(sizes, tokens)
    steps = {CACHED: problem.ours("both"), OURS: problem.ours(), FUSED: fused(problem)}
    steps |= {name: problem.ours(kept, MICROBATCHES) for kept, name in ACCUMULATED.items()}
    require_same(steps[OURS](), steps[FUSED]())
    shape = f"{name}, {sizes.rows(tokens)}"
    times = median_ms(steps)
    for ms in times.values():
        ms.update({name: ms[name] / MICROBATCHES for name in ACCUMULATED.values()})
    found = state_records("routed_vs_fused_bf16", shape, times, OURS, [FUSED], UNIT, weights_cached=CACHED)
    for candidate in ACCUMULATED.values():
        name = f"routed_vs_fused_bf16, {candidate.removeprefix('ours, ')}"
        found += state_records(name, shape, times, candidate, [FUSED], UNIT)
    return found


if __name__ == "__main__":
    measure_each(__doc__, "shape", SHAPES.items(), measure)
