"""Time of :func:`titan_fp8moe.grouped_mm`, next to bf16 and torchao's fp8 on one Hopper GPU.

    python -m experiments.kernels.grouped_mm --out experiments/kernels/results.json

One product x (M, K), w (E, K, N), forward and backward, from bf16 to bf16: casts, padding and transposes included.

* ``bf16``: ``torch._grouped_mm``.
* ``torchao rowwise``: ``_to_fp8_rowwise_then_scaled_grouped_mm``, eager and compiled. Its groups are multiples of 128
  rows here, so it pads nothing.

A layer's whole flow, ``routed_experts``, comes next to an FFN of three such products and SwiGLU, whose rows are in
expert order already.

Milliseconds back to back and after idling, see :func:`experiments.timing.median_ms`.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from experiments.kernels.ffn import bf16, by_autograd, compiled, torchao
from experiments.records import begin, script_parser, write_records
from experiments.reference import relative_error
from experiments.timing import BACK_TO_BACK, group_ends, launched, median_ms, ms_records, show
from titan_fp8moe import grouped_mm, routed_experts

BF16 = torch.bfloat16
SHAPES = [  # name, M rows, E experts, D model dim, H expert hidden dim, top-k
    ("671B, 8 ranks", 32768, 32, 7168, 2048, 8),
    ("16B, 1 rank", 98304, 64, 2048, 1408, 6),
    ("Qwen3-30B-A3B", 131072, 128, 2048, 768, 8),
]


def step(product: Callable, x: Tensor, w: Tensor, offs: Tensor, dy: Tensor) -> Callable:
    leaves = [t.detach().requires_grad_() for t in (x, w)]

    def run() -> tuple[Tensor, ...]:
        y = product(*leaves, offs)
        return y.detach(), *torch.autograd.grad(y, leaves, dy)

    return run


def product(M: int, E: int, K: int, N: int) -> dict[str, Callable]:
    x, dy = torch.randn(M, K, device="cuda", dtype=BF16), torch.randn(M, N, device="cuda", dtype=BF16)
    w = (torch.randn(E, N, K, device="cuda", dtype=BF16) * 0.02).transpose(1, 2)
    args = x, w, group_ends(M, E), dy
    errors = map(relative_error, step(grouped_mm, *args)(), step(bf16, *args)())
    print("  relative errors of y, dx, dw against bf16: " + ", ".join(f"{error:.4f}" for error in errors))
    return {
        "ours": step(grouped_mm, *args),
        "bf16": step(bf16, *args),
        "torchao rowwise": step(torchao, *args),
        "torchao rowwise, compiled": step(compiled(torchao), *args),
    }


def layer(M: int, E: int, D: int, H: int, top_k: int) -> dict[str, Callable]:
    """The experts of one layer: the whole flow, and three products without permutation and sum."""
    T, shapes = M // top_k, ((E, H, D), (E, D, H), (E, H, D))
    x, dout = (torch.randn(T, D, device="cuda", dtype=BF16) for _ in range(2))
    weights = [torch.randn(shape, device="cuda", dtype=BF16) * 0.02 for shape in shapes]
    scores, ids = torch.rand(T, E, device="cuda").topk(top_k)
    leaves = [t.detach().requires_grad_() for t in (x, *weights)]

    def ffn(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, offs: Tensor) -> Tensor:
        gate, up = (grouped_mm(x, w.transpose(1, 2), offs) for w in (w1, w3))
        return grouped_mm(torch.nn.functional.silu(gate) * up, w2.transpose(1, 2), offs)

    rows = x.repeat(top_k, 1)
    drows = dout.repeat(top_k, 1)
    return {
        "ours": lambda: torch.autograd.grad(routed_experts(*leaves, ids, scores), leaves, dout),
        "ours, FFN of products": by_autograd(ffn, rows, drows, weights, group_ends(M, E)),
    }


def main() -> None:
    args = script_parser(__doc__, out="add the records to this JSON file").parse_args()
    begin()
    for name, M, E, D, H, top_k in SHAPES:
        shape = f"{name}, M {M}, E {E}, D {D}, H {H}"
        for kind, make, sizes in (("product", product, (M, E, D, H)), ("layer", layer, (M, E, D, H, top_k))):
            times = median_ms(make(*sizes), 5, launched(100), rounds_after_idling=3)
            show(f"{shape}, {kind}", times)
            references = [name for name in times[BACK_TO_BACK] if name != "ours"]
            write_records(args.out, ms_records(f"grouped_mm, {kind}", shape, times, "ours", references))


if __name__ == "__main__":
    main()
