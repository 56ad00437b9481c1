"""The linears of a dense FFN, and the whole FFN, forward and backward, next to bf16 on one Hopper GPU.

    python -m experiments.kernels.dense --out experiments/kernels/results.json

A step runs gate, up and down in turn, each on an input of its own and with both gradients, as a CUDA graph.
``ours`` quantizes the weights in both directions, ``ours, weights kept`` finds them unchanged. The FFNs are
torchtitan's, bf16's compiled. Records of linears have the ratio that a roofline allows, see :func:`roofline`, and our
part of it.
"""

import itertools

import torch
from torch import Tensor, nn
from torchtitan.models.moe.moe import FeedForward

from experiments.kernels.problem import BF16, UNIT, Step, leaf, step_of
from experiments.records import DEVICE, measure_each
from experiments.reference import require_agreement
from experiments.throughput.layer import compile_whole
from experiments.timing import median_ms, state_records
from titan_fp8moe import Fp8FlowLinear, Fp8FlowMoEConfig
from titan_fp8moe.recipe import padded
from titan_fp8moe.torchtitan.modules import Fp8FlowFeedForward

OURS, KEPT, REFERENCE = "ours", "ours, weights kept", "bf16"
FFN, REFERENCE_FFN = "ours, FFN", "bf16, FFN"
BF16_FLOPS, FP8_FLOPS, BANDWIDTH = 989e12, 1979e12, 4.3e12  # per second: data sheet, data sheet, a device copy


MODELS = {"16B": (2048, 10944), "671B": (7168, 18432)}  # model dim, hidden dim
TOKENS = (4096, 16384)


def roofline(D: int, H: int, M: int) -> float:
    """The ratio of three GEMMs in bf16 to three in FP8 with casts and transposes, which read and write each value once.

    Rows of x and dy: bf16 to FP8, then FP8 to FP8, 5 bytes. A weight: bf16 to FP8 in both layouts, 4 bytes.
    """
    flops, moved = 3 * 2 * M * D * H, 5 * M * (D + H) + 4 * D * H
    return (flops / BF16_FLOPS) / (flops / FP8_FLOPS + moved / BANDWIDTH)


def linears(D: int, H: int, config: Fp8FlowMoEConfig | None) -> list[nn.Module]:
    """Gate, up and down, with the same weights for every ``config``."""
    torch.manual_seed(0)
    found = [nn.Linear(i, o, bias=False, device=DEVICE, dtype=BF16) for i, o in ((D, H), (D, H), (H, D))]
    for linear in found if config else ():
        Fp8FlowLinear.convert(linear, config)
    return found


def ffn(D: int, H: int, fp8: bool) -> list[nn.Module]:
    torch.manual_seed(0)
    module = FeedForward(D, H).to(DEVICE, BF16)
    if fp8:
        Fp8FlowFeedForward.convert(module, Fp8FlowMoEConfig())
    else:
        module.forward = compile_whole(module.forward)
    return [module]


def combined(modules: list[nn.Module], widths: list[int], tokens: int) -> Step:
    """Steps of modules on inputs of these widths, one after another, as a CUDA graph."""
    torch.manual_seed(1)
    xs = [leaf(tokens, width) for width in widths]
    steps = [step_of(m, x, [*m.parameters()], torch.randn_like(m(x))) for m, x in zip(modules, xs, strict=True)]

    def step() -> list[Tensor]:
        return [result for each in steps for result in each()]

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

    replay.step = step  # holds what the graph reads
    return replay


def measure(case: tuple[str, int]) -> list[dict]:
    model, M = case
    D, H = MODELS[model]
    rows = padded(H)  # of the weights of gate and up
    configs = {OURS: Fp8FlowMoEConfig(), KEPT: Fp8FlowMoEConfig(cache_weights=True), REFERENCE: None}
    steps = {who: combined(linears(D, rows, config), [D, D, rows], M) for who, config in configs.items()}
    steps |= {who: combined(ffn(D, H, who == FFN), [D], M) for who in (FFN, REFERENCE_FFN)}
    for ours, reference in ((OURS, REFERENCE), (FFN, REFERENCE_FFN)):
        require_agreement(steps[ours](), steps[reference]())
    times, bound = median_ms(steps), roofline(D, rows, M)
    shape, found = f"{model}, M {M}, D {D}, H {H}", []
    for kind, ours in (("dense_linears", OURS), ("dense_linears, weights kept", KEPT)):
        for r in state_records(kind, shape, times, ours, [REFERENCE], UNIT):
            found.append(r | {"roofline": bound, "of_roofline": r["speedup"] / bound})
    return found + state_records("dense_ffn", shape, times, FFN, [REFERENCE_FFN], UNIT)


if __name__ == "__main__":
    measure_each(__doc__, "shape", itertools.product(MODELS, TOKENS), measure)
