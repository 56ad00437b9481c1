"""Time of an FFN that serves every token, forward and backward, next to compiled bf16 on one Hopper GPU.

    python -m experiments.kernels.ffn_shared --out experiments/kernels/results.json

Such are DeepSeek's shared experts and dense FFNs. "ours" is :mod:`titan_fp8moe.layer.ffn` with one group of rows, from
fp8 rows and fp8 gradient rows, as where routed experts need the same rows. "ours, with casts" also quantizes x and dy,
as a dense FFN must. Both quantize the weights in the forward and again in the backward. The reference takes bf16 rows
and computes dx and the three weight gradients by autograd, compiled as one graph.

Milliseconds back to back and after idling, see :func:`experiments.timing.median_ms`. The roofline's speedup is the
speed of cuBLAS's FP8 GEMM over its bf16 GEMM, both of 8192x8192x8192, in the same state and run. Records are written
after each FFN.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.kernels.ffn import forward_backward
from experiments.records import begin, script_parser, write_records
from experiments.timing import launched, median_ms, ms_records, show
from titan_fp8moe import ops
from titan_fp8moe.layer.ffn import FFN
from titan_fp8moe.layer.weights import ExpertWeights
from titan_fp8moe.recipe import FP8
from titan_fp8moe.rows import Rows, one_group
from titan_fp8moe.spec import BackwardSpec, ExpertSpec

BF16 = torch.bfloat16
FFNS = {  # model dim, hidden dim
    "16B shared": (2048, 2816),
    "671B shared": (7168, 2048),
    "671B dense": (7168, 18432),
    "16B dense": (2048, 10944),
}
OURS, WITH_CASTS, REFERENCE = "ours", "ours, with casts", "bf16, compiled"
PEAK_SIZE = 8192


def ours(x: Tensor, dy: Tensor, weights: ExpertWeights[Tensor], casts: bool) -> Callable[[], list[Tensor]]:
    """Returns y, dx and the gradients of w1, w2, w3. ``x`` and ``dy`` are quantized in each run only with ``casts``."""
    beforehand = None if casts else [ops.quantize_group(t) for t in (x, dy)]

    def run() -> list[Tensor]:
        q, _, scale, end = ops.quantize_group(x) if beforehand is None else beforehand[0]
        rows, ffn = Rows(q, scale), FFN(ExpertSpec(), BackwardSpec(), one_group(end))
        q, _, scale, _ = ops.quantize_group(dy) if beforehand is None else beforehand[1]
        y, dx, dw = forward_backward(ffn, rows, rows, Rows(q, scale), weights)
        return [y, dx, *dw]

    return run


def bf16_ffn(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
    return F.linear(F.silu(F.linear(x, w1)) * F.linear(x, w3), w2)


def reference(x: Tensor, dy: Tensor, weights: ExpertWeights[Tensor]) -> Callable[[], list[Tensor]]:
    """:func:`ours` in bf16, compiled; the weights' gradients without the dim of experts."""
    leaves = [t.detach().requires_grad_() for t in (x, *(w[0] for w in weights))]
    torch._dynamo.reset()  # or the shapes together pass the limit of recompilations
    ffn = torch.compile(bf16_ffn, dynamic=False, fullgraph=True)

    def run() -> list[Tensor]:
        y = ffn(*leaves)
        return [y, *torch.autograd.grad(y, leaves, dy)]

    return run


def candidates(tokens: int, D: int, H: int, device: str = "cuda") -> dict[str, Callable[[], list[Tensor]]]:
    """The timed functions by name."""
    x, dy = (torch.randn(tokens, D, device=device, dtype=BF16) for _ in range(2))
    shapes = (1, H, D), (1, D, H), (1, H, D)
    weights = ExpertWeights(*(torch.randn(shape, device=device, dtype=BF16) * 0.02 for shape in shapes))
    return {
        OURS: ours(x, dy, weights, casts=False),
        WITH_CASTS: ours(x, dy, weights, casts=True),
        REFERENCE: reference(x, dy, weights),
    }


def roofline() -> dict[str, float]:
    """cuBLAS's FP8 speed over its bf16 speed by state of the GPU, for a GEMM that reaches the peak of both."""
    a, b = (torch.randn(PEAK_SIZE, PEAK_SIZE, device="cuda", dtype=BF16) for _ in range(2))
    a8, b8, one = a.to(FP8), b.to(FP8), torch.ones((), device="cuda")
    gemms = {
        "bf16": lambda: a @ b.t(),
        "fp8": lambda: torch._scaled_mm(a8, b8.t(), one, one, out_dtype=BF16, use_fast_accum=True),
    }
    times = median_ms(gemms, 5, launched(100))
    show("peak", times)
    return {state: ms["bf16"] / ms["fp8"] for state, ms in times.items()}


def records(shape: str, times: dict[str, dict[str, float]], peaks: dict[str, float]) -> list[dict]:
    """``ffn_shared`` and ``ffn_shared_with_casts`` for each state of the GPU."""
    found = ms_records("ffn_shared", shape, times, OURS, [REFERENCE])
    found += ms_records("ffn_shared_with_casts", shape, times, WITH_CASTS, [REFERENCE])
    for r in found:
        peak = peaks[r["shape"].rpartition(", ")[2]]
        r |= {"roofline": peak, "share_of_roofline": r["speedup"] / peak}
    return found


def main() -> None:
    args = script_parser(__doc__, out="add the records to this JSON file").parse_args()
    begin()
    peaks = roofline()
    for name, (D, H) in FFNS.items():
        for tokens in (16384, 4096):
            shape = f"{name}, {tokens} tokens, D {D}, H {H}"
            times = median_ms(candidates(tokens, D, H), 5, launched(100))
            show(shape, times)
            write_records(args.out, records(shape, times, peaks))
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
