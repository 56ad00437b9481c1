"""The routed part of a MoE layer, forward and backward, next to SonicMoE's bf16 kernels for Hopper (arXiv 2512.14080).

    python -m experiments.kernels.sonicmoe --out experiments/kernels/results.json

Both get the same tokens, routing, scores and bf16 weights, and return gradients of all but the routing. Routing is
random: each expert has about the same number of rows. SonicMoE's packages are not among this project's requirements:

    pip install --no-deps sonic-moe==0.1.2.post1 quack-kernels==0.3.11 nvidia-cutlass-dsl==4.4.2 \\
        nvidia-cutlass-dsl-libs-base==4.4.2 apache-tvm-ffi==0.1.15.post2 torch-c-dlpack-ext==0.1.5

With an empty cache its autotuner compiles 80 GEMMs first: ten minutes and more on 16 cores
(``QUACK_COMPILE_WORKERS=14``). ``QUACK_PRINT_AUTOTUNING=1`` shows how far it is.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from experiments.throughput.variants import MODELS
from titan_fp8moe import Fp8FlowMoEConfig, RoutedExperts, testing
from titan_fp8moe.testing import environment, launched, median_ms, relative_error, write_records

BF16 = torch.bfloat16
Step = Callable[[], list[Tensor]]


class Sizes(NamedTuple):
    """Model dim, hidden dim, experts, and experts of a token."""

    D: int
    H: int
    E: int
    K: int


class Problem:
    """Inputs of routed experts."""

    def __init__(self, sizes: Sizes, tokens: int, device: str = "cuda"):
        D, H, E, K = sizes
        self.experts = {
            weights_cached: RoutedExperts(
                E, D, H, config=Fp8FlowMoEConfig(cache_weights=weights_cached), device=device, dtype=BF16
            )
            for weights_cached in (True, False)
        }
        with torch.no_grad():
            for mine, other in zip(*(module.parameters() for module in self.experts.values()), strict=True):
                other.copy_(mine)
        self.x = torch.randn(tokens, D, device=device, dtype=BF16).requires_grad_()
        self.dout = torch.randn_like(self.x)
        self.ids = torch.rand(tokens, E, device=device).topk(K, sorted=False).indices
        self.scores = torch.rand(tokens, K, device=device).requires_grad_()

    def ours(self, weights_cached: bool) -> Step:
        module = self.experts[weights_cached]
        leaves = [self.x, self.scores, *module.parameters()]

        def step() -> list[Tensor]:
            out = module(self.x, self.ids, self.scores)
            return [out, *torch.autograd.grad(out, leaves, self.dout)]

        return step

    def fused_weights(self) -> list[Tensor]:
        """w1 and w3 as one, and w2."""
        w1, w2, w3 = (w.detach() for w in self.experts[False].parameters())
        return [torch.cat((w1, w3), 1).requires_grad_(), w2.clone().requires_grad_()]

    def sonicmoe(self) -> Step:
        from sonicmoe.enums import ActivationType
        from sonicmoe.functional import moe_general_routing_inputs

        w13, w2 = self.fused_weights()
        E, (T, K) = w2.shape[0], self.ids.shape
        token = torch.arange(T, device="cuda", dtype=torch.int32).repeat_interleave(K)
        expert = self.ids.flatten().int()
        stream = torch.cuda.current_stream().cuda_stream
        leaves = [self.x, self.scores, w13, w2]

        def step() -> list[Tensor]:
            weights = w13.permute(1, 2, 0), None, w2.permute(1, 2, 0), None
            out, _ = moe_general_routing_inputs(
                *(self.x, self.scores.flatten(), token, expert, *weights, E, stream, ActivationType.SWIGLU),
                concat_layout=True,
            )
            return [out, *torch.autograd.grad(out, leaves, self.dout)]

        return step


def check(ours: Step, theirs: Step) -> float:
    """The largest relative difference of output, dx, dscores, dw1, dw3 and dw2; FP8 explains 0.1.

    ``theirs`` returns dw1 and dw3 as one, before dw2.

    Raises:
        RuntimeError: if it is 0.15 or more.
    """
    out, dx, dscores, dw1, dw2, dw3 = ours()
    their_out, their_dx, their_dscores, their_dw13, their_dw2 = theirs()
    pairs = [(out, their_out), (dx, their_dx), (dscores, their_dscores), (dw2, their_dw2)]
    pairs += zip((dw1, dw3), their_dw13.chunk(2, 1), strict=True)
    apart = max(relative_error(mine, other) for mine, other in pairs)
    if not apart < 0.15:
        raise RuntimeError(f"the peer's results differ from ours by {apart:.2f}")
    return apart


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["16B", "Qwen3-30B", "GLM-4.5-Air", "Kimi-K2"], choices=MODELS)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 16384])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget", type=float, default=3600, help="seconds after which no further shape is begun")
    parser.add_argument("--out", type=Path, help="add the records to this JSON file")
    args = parser.parse_args()
    testing.require_gpu()
    print(environment()["hardware"], environment()["versions"])
    torch.manual_seed(0)
    deadline = time.monotonic() + args.budget
    for model in args.models:
        for tokens in args.tokens:
            if time.monotonic() > deadline:
                print("out of time")
                return
            experts = MODELS[model].experts[0]
            sizes = MODELS[model]
            problem = Problem(Sizes(sizes.D, sizes.H, experts, sizes.top_k), tokens)
            steps = {
                "ours": problem.ours(weights_cached=True),
                "ours, weights quantized": problem.ours(weights_cached=False),
                "sonicmoe": problem.sonicmoe(),
            }
            apart = check(steps["ours"], steps["sonicmoe"])
            records = []
            for state, ms in median_ms(steps, args.rounds, launched(60)).items():
                shape = f"{model}, {experts} experts per GPU, {tokens} tokens, {state}"
                print(
                    f"{shape:60}" + "".join(f"  {name} {t:.2f} ms" for name, t in ms.items()) + f"  apart {apart:.3f}"
                )
                for name, title in (("ours", ""), ("ours, weights quantized", "_with_weights")):
                    records.append(
                        dict(name=f"routed_experts{title}", shape=shape, value=ms[name], unit="ms forward + backward",
                             reference="sonicmoe", reference_value=ms["sonicmoe"], speedup=ms["sonicmoe"] / ms[name])
                    )  # fmt: skip
            if args.out:
                write_records(args.out, records)
            del problem, steps
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
