"""The linears of a dense FFN, and the whole FFN, forward and backward, next to bf16 on one Hopper GPU.

    python -m experiments.kernels.dense --out experiments/kernels/results.json
    python -m experiments.kernels.dense --out OUT.json --tiny    # also on a CPU: do they agree?

A step runs gate, up and down, each on an input of its own and with both gradients, as CUDA graphs: no launch counts.
``ours`` quantizes the weights in both directions, ``ours, weights kept`` finds them unchanged. The FFNs are
torchtitan's, bf16's compiled. Records of linears have the ratio that a roofline allows, see :func:`roofline`, and our
part of it.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torchtitan.models.moe.moe import FeedForward

from experiments.kernels.sonicmoe import BF16, UNIT, Step
from experiments.records import begin, script_parser, within, write_records
from experiments.reference import largest_error
from experiments.throughput.layer import compile_whole
from experiments.timing import CUDA, median_ms, show, state_records
from titan_fp8moe import Fp8FlowLinear, Fp8FlowMoEConfig
from titan_fp8moe.recipe import padded
from titan_fp8moe.torchtitan.modules import Fp8FlowFeedForward

OURS, KEPT, REFERENCE = "ours", "ours, weights kept", "bf16"
FFN, REFERENCE_FFN = "ours, FFN", "bf16, FFN"
BF16_FLOPS, FP8_FLOPS, BANDWIDTH = 989e12, 1979e12, 4.3e12  # per second: data sheet, data sheet, a device copy


class Sizes(NamedTuple):
    """Model dim, hidden dim and tokens."""

    D: int
    H: int
    M: int


SHAPES = {f"{model}, M {M}": Sizes(*dims, M) for model, dims in {"16B": (2048, 10944), "671B": (7168, 18432)}.items()
          for M in (4096, 16384)}  # fmt: skip


def roofline(sizes: Sizes) -> float:
    """The ratio of three GEMMs in bf16 to three in FP8 with casts and transposes, which read and write each value once.

    Rows of x and dy: bf16 to FP8, then FP8 to FP8, 5 bytes. A weight: bf16 to FP8 in both layouts, 4 bytes.
    """
    D, H, M = sizes.D, padded(sizes.H), sizes.M
    flops, moved = 3 * 2 * M * D * H, 5 * M * (D + H) + 4 * D * H
    return (flops / BF16_FLOPS) / (flops / FP8_FLOPS + moved / BANDWIDTH)


def linears(sizes: Sizes, config: Fp8FlowMoEConfig | None, device: str) -> list[nn.Linear]:
    """Gate, up and down, with the same weights for every ``config``."""
    torch.manual_seed(0)
    D, H = sizes.D, padded(sizes.H)
    found = [nn.Linear(i, o, bias=False, device=device, dtype=BF16) for i, o in ((D, H), (D, H), (H, D))]
    for linear in found if config else ():
        Fp8FlowLinear.convert(linear, config)
    return found


def step_of(modules: list[nn.Module], widths: list[int], tokens: int, device: str) -> Step:
    """A step of modules on inputs of these widths: their outputs, then gradients of inputs and parameters."""
    torch.manual_seed(1)
    xs = [torch.randn(tokens, width, device=device, dtype=BF16).requires_grad_() for width in widths]
    parameters = [p for module in modules for p in module.parameters()]
    douts = [torch.randn_like(module(x)) for module, x in zip(modules, xs, strict=True)]

    def step() -> list[Tensor]:
        outs = [module(x) for module, x in zip(modules, xs, strict=True)]
        return [*(out.detach() for out in outs), *torch.autograd.grad(outs, [*xs, *parameters], douts)]

    return captured(step) if CUDA else step


def captured(step: Step) -> Step:
    """The step as a CUDA graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()

    def replay() -> list[Tensor]:
        graph.replay()
        return results

    return replay


def ffn(sizes: Sizes, fp8: bool, device: str) -> Callable[[Tensor], Tensor]:
    torch.manual_seed(0)
    module = FeedForward(sizes.D, sizes.H).to(device, BF16)
    if fp8:
        Fp8FlowFeedForward.convert(module, Fp8FlowMoEConfig())
    return module


class Compiled(nn.Module):
    """A module as one graph."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module, self.call = module, compile_whole(module)

    def forward(self, x: Tensor) -> Tensor:
        return self.call(x)


def candidates(sizes: Sizes, device: str) -> dict[str, Step]:
    D, widths = sizes.D, [sizes.D, sizes.D, padded(sizes.H)]
    configs = {OURS: Fp8FlowMoEConfig(), KEPT: Fp8FlowMoEConfig(cache_weights=True), REFERENCE: None}
    found = {name: step_of(linears(sizes, of, device), widths, sizes.M, device) for name, of in configs.items()}
    ffns = {FFN: ffn(sizes, True, device), REFERENCE_FFN: Compiled(ffn(sizes, False, device))}
    return found | {name: step_of([module], [D], sizes.M, device) for name, module in ffns.items()}


def main() -> None:
    parser = script_parser(__doc__, out="add the records to this JSON file", budget="shape")
    parser.add_argument("--only", nargs="+", default=[*SHAPES], choices=SHAPES)
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU")
    args = parser.parse_args()
    if not args.tiny:
        begin(args.trial)
    for name in within(args.budget, args.only):
        sizes = Sizes(256, 192, 300) if args.tiny else SHAPES[name]
        steps = candidates(sizes, "cuda" if CUDA else "cpu")
        apart = max(largest_error(steps[a](), steps[b]()) for a, b in ((OURS, REFERENCE), (FFN, REFERENCE_FFN)))
        times, bound = median_ms(steps), roofline(sizes)
        show(f"{name}, {apart:.3f} apart, roofline {bound:.2f}x", times)
        records = []
        for kind, ours, reference in (
            ("dense_linears", OURS, REFERENCE),
            ("dense_linears, weights kept", KEPT, REFERENCE),
            ("dense_ffn", FFN, REFERENCE_FFN),
        ):
            found = state_records(kind, f"{name}, D {sizes.D}, H {sizes.H}", times, ours, [reference], UNIT)
            bounds = [
                {} if kind == "dense_ffn" else {"roofline": bound, "of_roofline": r["speedup"] / bound} for r in found
            ]
            records += [r | of for r, of in zip(found, bounds, strict=True)]
        write_records(args.out, records)
        del steps


if __name__ == "__main__":
    main()
