"""Time of the expert FFN, forward and backward, next to bf16 and torchao's fp8 on one Hopper GPU.

    python -m experiments.kernels.ffn [--layers 0 1 2 3] --out experiments/kernels/results.json

"ours" is :mod:`titan_fp8moe.layer.ffn`, forward and backward: from fp8 rows and fp8 gradient rows, SwiGLU, score,
transposes and all six GEMMs, with weights quantized beforehand. The row below it quantizes weights in the forward and
again in the backward, as training does. The row after that casts all M rows in both directions, where the layer casts
each token once. References take bf16 rows, apply no score and hold gate and up as one weight; compiled, they compute dx
and the weight gradients by autograd:

* ``bf16``: two ``torch._grouped_mm`` and SwiGLU.
* ``torchao rowwise``: the same with torchao's ``_to_fp8_rowwise_then_scaled_grouped_mm``, casts included.

Milliseconds back to back and after idling, see :func:`experiments.timing.median_ms`. Records are written after each
layer.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torchao.prototype.moe_training import _to_fp8_rowwise_then_scaled_grouped_mm

from experiments.kernels.gemm import LAYERS
from experiments.records import begin, script_parser, write_records
from experiments.timing import group_ends, launched, median_ms, ms_records, show
from titan_fp8moe import ops, recipe
from titan_fp8moe.layer.ffn import FFN
from titan_fp8moe.layer.operands import Read, WeightCache, backward_operands, buffers_of, forward_operands, pack
from titan_fp8moe.layer.weights import ExpertWeights
from titan_fp8moe.rows import Routing, Rows
from titan_fp8moe.spec import BackwardSpec, ExpertSpec

BF16 = torch.bfloat16
REFERENCES = ("bf16, compiled", "torchao rowwise, compiled")


def rows(x: Tensor) -> Rows:
    q, scale = ops.quantize_rows(x)
    return Rows(q, recipe.column_major(scale))


def forward_backward(
    ffn: FFN, x: Rows, tokens: Rows, dy: Rows, weights: ExpertWeights, cache: WeightCache | None = None
) -> tuple[Tensor, Tensor, ExpertWeights]:
    """y, dx and the gradients of the weights, which are quantized in each direction without a cache."""
    copies = buffers_of(cache, weights)
    (w13, w2), generations = forward_operands(pack(weights, copies, True))
    a, saved = ffn.activate(ffn.product(x, w13))
    y = ffn.product(a, w2)
    _, w13_t, w2_t = backward_operands(weights, Read.of(copies, True), generations, ffn.backward, dy.q)
    grads = ffn.hidden_gradients(dy, saved, w2_t)
    return y, ffn.product(grads.dh, w13_t), ffn.weight_grads(tokens, grads, weights, ExpertWeights(True, True, True))


def ours(
    x: Tensor, dy: Tensor, weights: ExpertWeights, offsets_E: Tensor, cache: WeightCache | None = None
) -> Callable:
    """``cache``: quantizes the weights in the first run only. Every row is another token's, the most that the weight
    gradient's transpose can have to gather."""
    x_rows, dy_rows, tokens = rows(x), rows(dy), Rows(*ops.quantize_rows(x))
    fields = {"offsets_E": offsets_E, "score_M": torch.rand(x.shape[0], device="cuda")}
    fields["token_M"] = torch.arange(x.shape[0], dtype=torch.int32, device="cuda")
    routing = Routing(**dict.fromkeys(Routing._fields) | fields)
    ffn = FFN(ExpertSpec(), BackwardSpec(), routing)

    def run():
        return forward_backward(ffn, x_rows, tokens, dy_rows, weights, cache)

    return run


def fused_ffn(product: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable:
    """An FFN of two such products of rows and transposed weights."""

    def ffn(x: Tensor, w13: Tensor, w2: Tensor, offsets_E: Tensor) -> Tensor:
        gate, up = product(x, w13.transpose(1, 2), offsets_E).chunk(2, 1)
        return product(torch.nn.functional.silu(gate) * up, w2.transpose(1, 2), offsets_E)

    return ffn


def bf16(x: Tensor, w: Tensor, offs: Tensor) -> Tensor:
    return torch._grouped_mm(x, w, offs=offs)


def torchao(x: Tensor, w: Tensor, offs: Tensor) -> Tensor:
    return _to_fp8_rowwise_then_scaled_grouped_mm(x, w, offs, pad_token_groups_for_grouped_mm=False)


def by_autograd(ffn: Callable, x: Tensor, dy: Tensor, weights: list[Tensor], offsets_E: Tensor) -> Callable:
    leaves = [t.detach().requires_grad_() for t in (x, *weights)]
    return lambda: torch.autograd.grad(ffn(*leaves, offsets_E), leaves, dy)


def compiled(ffn: Callable) -> Callable:
    torch._dynamo.reset()
    return torch.compile(ffn, dynamic=False)


def candidates(M: int, E: int, D: int, H: int) -> dict[str, Callable]:
    """The timed functions by name."""
    x, dy = (torch.randn(M, D, device="cuda", dtype=BF16) for _ in range(2))
    shapes = (E, H, D), (E, D, H), (E, H, D)
    weights = ExpertWeights(*(torch.randn(shape, device="cuda", dtype=BF16) * 0.02 for shape in shapes))
    inputs = x, dy, weights, group_ends(M, E)
    fused = x, dy, [torch.cat((weights.w1, weights.w3), 1), weights.w2], inputs[3]
    return {
        "ours": ours(*inputs, WeightCache()),
        "ours, weights quantized": ours(*inputs),
        "two row casts": lambda: (ops.quantize_rows(x), ops.quantize_rows(dy)),
        REFERENCES[0]: by_autograd(compiled(fused_ffn(bf16)), *fused),
        REFERENCES[1]: by_autograd(compiled(fused_ffn(torchao)), *fused),
    }


def main() -> None:
    parser = script_parser(__doc__, out="add the records to this JSON file")
    parser.add_argument("--layers", type=int, nargs="+", default=range(len(LAYERS)), help="which of LAYERS")
    args = parser.parse_args()
    begin()
    for layer, M, E, D, H in (LAYERS[i] for i in args.layers):
        shape = f"{layer}, M {M}, E {E}, D {D}, H {H}"
        times = median_ms(candidates(M, E, D, H), 5, launched(100))
        show(shape, times)
        fields = dict(with_weight_quantization="ours, weights quantized", row_casts="two row casts")
        write_records(args.out, ms_records("expert_ffn", shape, times, "ours", REFERENCES, **fields))
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
