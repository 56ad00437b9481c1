"""The routed part of a MoE layer, forward and backward, next to SonicMoE's bf16 kernels for Hopper (arXiv 2512.14080).

    python -m experiments.kernels.sonicmoe --out experiments/kernels/results.json

SonicMoE runs on two paths, the one that its authors time and the one for any routing; the faster is the reference. Its
packages are not among this project's requirements:

    pip install --no-deps sonic-moe==0.1.2.post1 quack-kernels==0.3.11 nvidia-cutlass-dsl==4.4.2 \\
        nvidia-cutlass-dsl-libs-base==4.4.2 apache-tvm-ffi==0.1.15.post2 torch-c-dlpack-ext==0.1.5

With an empty cache its autotuner compiles 80 GEMMs first: ten minutes and more on 16 cores
(``QUACK_COMPILE_WORKERS=14``). ``QUACK_PRINT_AUTOTUNING=1`` shows how far it is.
"""

import itertools

import torch
from torch import Tensor

from experiments.kernels.problem import UNIT, Problem, Step, layer_of, require_same, step_of
from experiments.records import measure_each
from experiments.timing import median_ms, state_records

SHAPES, TOKENS = ("16B", "Qwen3-30B", "GLM-4.5-Air", "Kimi-K2"), (8192, 16384)
OURS, CACHED, PEER, GENERAL = "ours, weights quantized", "ours", "sonicmoe", "sonicmoe, any routing"


class SonicMoE(Problem):
    """A problem with the peer's two paths."""

    def sonicmoe(self) -> Step:
        """The path of ``moe_TC_softmax_topk_layer`` behind its router: every token has K experts, and rows of gate and
        up alternate in the weights."""
        from sonicmoe.enums import ActivationType
        from sonicmoe.functional import _DownProjection, _UpProjection
        from sonicmoe.functional.triton_kernels import TC_topk_router_metadata_triton

        w13, w2 = self.fused_weights()
        w13 = torch.stack(w13.detach().chunk(2, 1), 2).view(w13.shape).requires_grad_()
        E, (T, K), ids = w2.shape[0], self.ids.shape, self.ids.int()

        def layer(x: Tensor) -> Tensor:
            lengths = (E, E + 1, T * K, T * K, T * K)
            count, offset, *order = (torch.empty(n, dtype=torch.int32, device="cuda") for n in lengths)
            TC_topk_router_metadata_triton(ids, E, count, offset, *order)
            route = *order, None, False, ActivationType.SWIGLU
            a, h = _UpProjection.apply(x, w13.permute(1, 2, 0), None, offset, T * K, K, *route, False, False)
            return _DownProjection.apply(a, h, w2.permute(1, 2, 0), None, self.scores, offset, T, K, *route)

        return step_of(layer, self.x, [self.scores, w13, w2], self.dout)

    def any_routing(self) -> Step:
        """The path for any routing, on weights with gate first."""
        from sonicmoe.enums import ActivationType
        from sonicmoe.functional import moe_general_routing_inputs

        w13, w2 = self.fused_weights()
        E, (T, K) = w2.shape[0], self.ids.shape
        token = torch.arange(T, device="cuda", dtype=torch.int32).repeat_interleave(K)
        expert = self.ids.flatten().int()
        stream = torch.cuda.current_stream().cuda_stream

        def layer(x: Tensor) -> Tensor:
            weights = w13.permute(1, 2, 0), None, w2.permute(1, 2, 0), None
            out, _ = moe_general_routing_inputs(
                *(x, self.scores.flatten(), token, expert, *weights, E, stream, ActivationType.SWIGLU),
                concat_layout=True,
            )
            return out

        return step_of(layer, self.x, [self.scores, w13, w2], self.dout)


def gate_first(results: list[Tensor]) -> list[Tensor]:
    *others, dw13, dw2 = results
    return [*others, torch.cat((dw13[:, ::2], dw13[:, 1::2]), 1), dw2]


def measure(case: tuple[str, int]) -> list[dict]:
    sizes, shape = layer_of(*case)
    problem = SonicMoE(sizes, case[1])
    steps = {OURS: problem.ours(), CACHED: problem.ours("both")}
    steps |= {PEER: problem.sonicmoe(), GENERAL: problem.any_routing()}
    require_same(steps[CACHED](), gate_first(steps[PEER]()))
    require_same(steps[CACHED](), steps[GENERAL]())
    times = median_ms(steps)
    for ms in times.values():
        ms[PEER] = min(ms[PEER], ms[GENERAL])
    found = state_records("routed_experts", shape, times, CACHED, [PEER], UNIT)
    return found + state_records("routed_experts_with_weights", shape, times, OURS, [PEER], UNIT)


if __name__ == "__main__":
    measure_each(__doc__, "shape", itertools.product(SHAPES, TOKENS), measure)
