"""An FFN on rows in expert order, forward and backward, next to three ``torch._grouped_mm`` on one Hopper GPU.

    python -m experiments.kernels.grouped_ffn --out experiments/kernels/results.json [--only 16B]
    python -m experiments.kernels.grouped_ffn --out OUT.json --tiny    # also on a CPU: do they agree?

All candidates get the same rows, ends of groups and bf16 weights, return all gradients, and are one graph each. Group
sizes are random, and no multiples of 128. Weights are quantized in each direction. Five candidates:

* ``ours``: :func:`titan_fp8moe.grouped_ffn`;
* ``ours, routed_experts`` on the same rows: a token each, with one expert of score 1;
* ``ours, three grouped_mm``: :func:`titan_fp8moe.grouped_mm` in the place of torch's;
* ``bf16, three grouped_mm``: the reference;
* ``moves``: only what ours spends on moving rows to groups of multiples of 128 rows and back, in both directions.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.kernels.sonicmoe import BF16, UNIT, Step
from experiments.records import begin, script_parser, within, write_records
from experiments.reference import largest_error
from experiments.throughput.layer import compile_whole
from experiments.timing import median_ms, show, state_records
from titan_fp8moe import grouped_ffn, grouped_mm, ops, routed_experts
from titan_fp8moe.recipe import row_capacity

OURS, ROUTED, PRODUCTS = "ours", "ours, routed_experts", "ours, three grouped_mm"
BF16_MM, MOVES = "bf16, three grouped_mm", "moves"


class Rows(NamedTuple):
    """Model dim, hidden dim, experts of this rank, and rows."""

    D: int
    H: int
    E: int
    M: int


SHAPES = {
    "16B": Rows(2048, 1408, 64, 98304),
    "16B, few rows": Rows(2048, 1408, 64, 12288),
    "Qwen3-30B, 16 experts": Rows(2048, 768, 16, 65536),
    "671B, 8 experts": Rows(7168, 2048, 8, 32768),
}


class Problem:
    """Inputs of the FFN, and the candidates."""

    def __init__(self, sizes: Rows, device: str):
        D, H, E, M = sizes
        self.sizes = sizes

        def leaf(*shape: int, std: float = 1.0) -> Tensor:
            return (torch.randn(shape, device=device) * std).to(BF16).requires_grad_()

        self.x, self.dy = leaf(M, D), leaf(M, D).detach()
        self.weights = [leaf(E, H, D, std=D**-0.5), leaf(E, D, H, std=H**-0.5), leaf(E, H, D, std=D**-0.5)]
        ids, experts = torch.randint(E, (M,), device=device).sort().values, torch.arange(E, device=device)
        self.ids, self.ones = ids.unsqueeze(1), torch.ones(M, 1, device=device)
        self.offs = torch.searchsorted(ids, experts, right=True, out_int32=True)

    def step(self, ffn: Callable[..., Tensor]) -> Step:
        torch._dynamo.reset()
        call, leaves = compile_whole(lambda x: ffn(x, *self.weights)), [self.x, *self.weights]

        def step() -> list[Tensor]:
            y = call(self.x)
            return [y.detach(), *torch.autograd.grad(y, leaves, self.dy)]

        return step

    def three(self, mm: Callable[..., Tensor]) -> Step:
        def ffn(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
            gate, up = (mm(x, w.transpose(1, 2), offs=self.offs) for w in (w1, w3))
            return mm(F.silu(gate) * up, w2.transpose(1, 2), offs=self.offs)

        return self.step(ffn)

    def candidates(self) -> dict[str, Step]:
        return {
            OURS: self.step(lambda x, *weights: grouped_ffn(x, *weights, self.offs)),
            ROUTED: self.step(lambda x, *weights: routed_experts(x, *weights, self.ids, self.ones)),
            PRODUCTS: self.three(grouped_mm),
            BF16_MM: self.three(torch._grouped_mm),
            MOVES: self.moves(),
        }

    def moves(self) -> Step:
        capacity = row_capacity(self.sizes.M, self.sizes.E)
        ends, token_P, _, row_M1 = ops.expert_routing(self.ids, self.ones, self.sizes.E, capacity)
        rows, out = ops.quantize_rows(self.x.detach()), self.x.new_empty(capacity, self.sizes.D)

        def step() -> list[Tensor]:
            for _ in range(2):
                results = [*ops.permute_rows(*rows, row_M1, token_P, ends), ops.unpermute_sum(out, row_M1, BF16)]
            return results

        return step


def check(steps: dict[str, Step]) -> float:
    """:func:`largest_error` of ours to bf16.

    Raises:
        RuntimeError: if ``routed_experts`` gives other bits.
    """
    mine, routed, true = (steps[name]() for name in (OURS, ROUTED, BF16_MM))
    if not all(torch.equal(a, b) for a, b in zip(mine, routed, strict=True)):
        raise RuntimeError("routed_experts gives other bits")
    return largest_error(mine, true)


def main() -> None:
    parser = script_parser(__doc__, out="add the records to this JSON file", budget="shape")
    parser.add_argument("--only", nargs="+", default=[*SHAPES], choices=SHAPES)
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU")
    args = parser.parse_args()
    if not args.tiny:
        begin(args.trial)
    for name in within(args.budget, args.only):
        sizes = Rows(256, 128, 4, 300) if args.tiny else SHAPES[name]
        steps = Problem(sizes, "cuda" if torch.cuda.is_available() else "cpu").candidates()
        apart = check(steps)
        shape = f"{name}, {sizes.M} rows, {sizes.E} experts"
        times = median_ms(steps)
        show(f"{shape}, {apart:.3f} apart", times)
        write_records(
            args.out, state_records("grouped_ffn", shape, times, OURS, [BF16_MM, ROUTED, PRODUCTS], UNIT, moves=MOVES)
        )
        del steps


if __name__ == "__main__":
    main()
