"""Time of an FFN that serves every token, forward and backward, next to compiled bf16 on one Hopper GPU.

    python -m experiments.kernels.ffn_shared [--ffns "16B shared"] [--tokens 16384] --out OUT.json

Such are DeepSeek's shared experts and dense FFNs. "ours" is :mod:`titan_fp8moe.layer.ffn` with one group of rows, from
fp8 rows and fp8 gradient rows, as where routed experts need the same rows. "ours, with casts" also quantizes x and dy,
as a dense FFN must. Both quantize the weights in the forward and again in the backward. The reference takes bf16 rows
and computes dx and the three weight gradients by autograd, compiled as one graph.

Milliseconds back to back and after idling, see :func:`titan_fp8moe.testing.median_ms`. The roofline's speedup is the
speed of cuBLAS's FP8 GEMM over its bf16 GEMM, both of 8192x8192x8192, in the same state and run. Records are written
after each FFN.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.kernels.ffn import forward_backward
from titan_fp8moe import ops, testing
from titan_fp8moe.layer.ffn import FFN
from titan_fp8moe.layer.weights import ExpertWeights
from titan_fp8moe.recipe import FP8
from titan_fp8moe.rows import Rows, one_group
from titan_fp8moe.spec import BackwardSpec, ExpertSpec
from titan_fp8moe.testing import environment, launched, median_ms, write_records

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
    """What is timed, by name."""
    x, dy = (torch.randn(tokens, D, device=device, dtype=BF16) for _ in range(2))
    shapes = (1, H, D), (1, D, H), (1, H, D)
    weights = ExpertWeights(*(torch.randn(shape, device=device, dtype=BF16) * 0.02 for shape in shapes))
    return {
        OURS: ours(x, dy, weights, casts=False),
        WITH_CASTS: ours(x, dy, weights, casts=True),
        REFERENCE: reference(x, dy, weights),
    }


def roofline(rep_ms: int, size: int = PEAK_SIZE) -> dict[str, float]:
    """cuBLAS's FP8 speed over its bf16 speed by state of the GPU, for a GEMM that reaches the peak of both."""
    a, b = (torch.randn(size, size, device="cuda", dtype=BF16) for _ in range(2))
    a8, b8, one = a.to(FP8), b.to(FP8), torch.ones((), device="cuda")
    gemms = {
        "bf16": lambda: a @ b.t(),
        "fp8": lambda: torch._scaled_mm(a8, b8.t(), one, one, out_dtype=BF16, use_fast_accum=True),
    }
    times = median_ms(gemms, 5, launched(rep_ms))
    for state, ms in times.items():
        tflops = {name: 2 * size**3 / t * 1e-9 for name, t in ms.items()}
        print(f"peak {state}: " + ", ".join(f"{name} {speed:.0f} TFLOP/s" for name, speed in tflops.items()))
    return {state: ms["bf16"] / ms["fp8"] for state, ms in times.items()}


def records(shape: str, times: dict[str, dict[str, float]], peaks: dict[str, float]) -> list[dict]:
    """``ffn_shared`` and ``ffn_shared_with_casts`` for each state of the GPU."""
    out = []
    for state, ms in times.items():
        for name, who in (("ffn_shared", OURS), ("ffn_shared_with_casts", WITH_CASTS)):
            speedup = ms[REFERENCE] / ms[who]
            r = {"name": name, "shape": f"{shape}, {state}", "value": round(ms[who], 3), "unit": "ms"}
            r |= {"reference": REFERENCE, "reference_value": round(ms[REFERENCE], 3), "speedup": round(speedup, 3)}
            out.append(r | {"roofline": round(peaks[state], 3), "share_of_roofline": round(speedup / peaks[state], 3)})
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ffns", nargs="+", choices=FFNS, default=FFNS, metavar="FFN", help=f"of {[*FFNS]}")
    parser.add_argument("--tokens", type=int, nargs="+", default=[16384, 4096])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rep-ms", type=int, default=100, help="length of a candidate's turn")
    parser.add_argument("--out", type=Path, help="add the records to this JSON file")
    args = parser.parse_args()
    testing.require_gpu()
    setting = environment()
    print(setting["hardware"], setting["versions"])
    torch.manual_seed(0)
    peaks = roofline(args.rep_ms)
    for name in args.ffns:
        D, H = FFNS[name]
        for tokens in args.tokens:
            shape = f"{name}, {tokens} tokens, D {D}, H {H}"
            runs = candidates(tokens, D, H)
            found = records(shape, median_ms(runs, args.rounds, launched(args.rep_ms)), peaks)
            for r in found:
                print(
                    f"{r['shape']:50} {r['name']:22} {r['value']:7.3f} ms, bf16 {r['reference_value']:7.3f} ms, "
                    f"{r['speedup']:.2f}x of the roofline's {r['roofline']:.2f}x ({r['share_of_roofline']:.0%})",
                    flush=True,
                )
            if args.out:
                write_records(args.out, found)
            del runs
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
