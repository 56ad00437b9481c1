"""An FFN on rows in expert order, forward and backward, next to three ``torch._grouped_mm`` on one Hopper GPU.

    python -m experiments.kernels.grouped_ffn --out experiments/kernels/results.json

All candidates get the same rows, ends of groups and bf16 weights, return all gradients, and are one graph each. Group
sizes are random, and no multiples of 128. Weights are quantized in each direction. Candidates:

* ``ours``: :func:`titan_fp8moe.grouped_ffn`;
* ``ours, three grouped_mm``: :func:`titan_fp8moe.grouped_mm` in the place of torch's;
* ``bf16, three grouped_mm``: the reference;
* ``moves``: only what ours spends on moving rows to groups of multiples of 128 rows and back, in both directions.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.kernels.problem import BF16, UNIT, Step, compiled_step, leaf
from experiments.records import DEVICE, measure_each
from experiments.reference import require_agreement
from experiments.timing import median_ms, state_records
from titan_fp8moe import grouped_ffn, grouped_mm, ops
from titan_fp8moe.recipe import row_capacity

OURS, PRODUCTS, BF16_MM, MOVES = "ours", "ours, three grouped_mm", "bf16, three grouped_mm", "moves"


SHAPES = {  # model dim, hidden dim, experts of this rank, rows
    "16B": (2048, 1408, 64, 98304),
    "16B, few rows": (2048, 1408, 64, 12288),
    "Qwen3-30B, 16 experts": (2048, 768, 16, 65536),
    "671B, 8 experts": (7168, 2048, 8, 32768),
}


class Problem:
    """Inputs of the FFN, and the candidates."""

    def __init__(self, D: int, H: int, E: int, M: int):
        self.capacity = row_capacity(M, E)
        self.x, self.dy = leaf(M, D), leaf(M, D).detach()
        self.weights = [leaf(E, H, D, std=D**-0.5), leaf(E, D, H, std=H**-0.5), leaf(E, H, D, std=D**-0.5)]
        ids, experts = torch.randint(E, (M,), device=DEVICE).sort().values, torch.arange(E, device=DEVICE)
        self.ids, self.ones = ids.unsqueeze(1), torch.ones(M, 1, device=DEVICE)
        self.offs = torch.searchsorted(ids, experts, right=True, out_int32=True)

    def step(self, ffn: Callable[..., Tensor]) -> Step:
        return compiled_step(lambda x: ffn(x, *self.weights), self.x, self.weights, self.dy)

    def three(self, mm: Callable[..., Tensor]) -> Step:
        def ffn(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
            gate, up = (mm(x, w.transpose(1, 2), offs=self.offs) for w in (w1, w3))
            return mm(F.silu(gate) * up, w2.transpose(1, 2), offs=self.offs)

        return self.step(ffn)

    def moves(self) -> Step:
        ends, token_P, _, row_M1 = ops.expert_routing(self.ids, self.ones, len(self.offs), self.capacity)
        rows, out = ops.quantize_rows(self.x.detach()), self.x.new_empty(self.capacity, self.x.shape[1])

        def step() -> list[Tensor]:
            for _ in range(2):
                results = [*ops.permute_rows(*rows, row_M1, token_P, ends), ops.unpermute_sum(out, row_M1, BF16)]
            return results

        return step


def measure(name: str) -> list[dict]:
    problem = Problem(*SHAPES[name])
    steps = {
        OURS: problem.step(lambda x, *weights: grouped_ffn(x, *weights, problem.offs)),
        PRODUCTS: problem.three(grouped_mm),
        BF16_MM: problem.three(torch._grouped_mm),
        MOVES: problem.moves(),
    }
    require_agreement(steps[OURS](), steps[BF16_MM]())
    shape = f"{name}, {len(problem.x)} rows, {len(problem.offs)} experts"
    return state_records("grouped_ffn", shape, median_ms(steps), OURS, [BF16_MM, PRODUCTS], UNIT, moves=MOVES)


if __name__ == "__main__":
    measure_each(__doc__, "shape", SHAPES, measure)
