"""Errors of FP8-Flow against an fp32 MoE layer, in the output and every gradient.

The same layer in bf16 and an fp8 layer that rounds each GEMM operand once, from high precision, are the references.

    python -m experiments.numerics.layer --out experiments/numerics

Two tables: one DeepSeek-V3-shaped layer on normal data, and that with each activation.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from experiments.records import DEVICE, begin, record, script_parser, write_records
from experiments.reference import LayerInputs, make_layer, moe_layer, relative_error
from titan_fp8moe import recipe
from titan_fp8moe.activations import ACTIVATIONS
from titan_fp8moe.config import Fp8FlowMoEConfig
from titan_fp8moe.layer.run import routed_experts

TENSORS = ("output", "dx", "dscore", "dw1", "dw2", "dw3")


class QuantizedMatmul(torch.autograd.Function):
    """x @ w.T where each of the three GEMMs sees operands rounded once: the accuracy limit of fp8 with these tiles.

    Activations and gradients have 1x128 tiles along each GEMM's own contraction dim, the weight 128x128 blocks.
    """

    @staticmethod
    def forward(ctx, x_TK, w_NK):
        ctx.save_for_backward(x_TK, w_NK)
        return tiles(x_TK) @ blocks(w_NK).T

    @staticmethod
    def backward(ctx, dy_TN):
        x_TK, w_NK = ctx.saved_tensors
        return tiles(dy_TN) @ blocks(w_NK), tiles(dy_TN.T) @ tiles(x_TK.T).T


def tiles(x: torch.Tensor) -> torch.Tensor:
    """Quantize-dequantize in 1x128 tiles along the last dim, padded to a multiple of 128."""
    return recipe.dequantize(*recipe.quantize_rows(x))[:, : x.shape[1]]


def blocks(w: torch.Tensor) -> torch.Tensor:
    return recipe.dequantize(*recipe.quantize_weight(w.unsqueeze(0)))[0]


def single_quantization_layer(x_TD, topk_scores_TK, topk_ids_TK, w1, w2, w3):
    out = torch.zeros_like(x_TD)
    mm = QuantizedMatmul.apply
    for e in range(w1.shape[0]):
        token, k = (topk_ids_TK == e).nonzero(as_tuple=True)
        h = torch.nn.functional.silu(mm(x_TD[token], w1[e])) * mm(x_TD[token], w3[e])
        out = out.index_add(0, token, mm(h * topk_scores_TK[token, k].unsqueeze(1), w2[e]))
    return out


def gradients(layer, inputs, dout):
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    out = layer(*leaves)
    out.backward(dout.to(out.dtype))
    return [out.detach(), *[leaf.grad for leaf in leaves]]


def errors(layers: dict[str, Callable[..., Any]], exact: Callable[..., Any], inputs, dout) -> dict[str, list[float]]:
    """The relative errors of each layer's output and gradients."""
    reference = gradients(exact, inputs, dout)
    results = {name: gradients(layer, inputs, dout) for name, layer in layers.items()}
    return {name: [relative_error(*pair) for pair in zip(of, reference, strict=True)] for name, of in results.items()}


def flow(topk_ids: torch.Tensor, activation: str = "swiglu", **settings: str) -> Callable[..., torch.Tensor]:
    config = Fp8FlowMoEConfig(**settings)

    def layer(x, s, w1, w2, w3=None):
        x = x.to(torch.bfloat16)
        return routed_experts(x, w1, w2, w3, topk_ids, s, config=config, activation=activation)

    return layer


def draw(size: dict, std: float) -> tuple[LayerInputs, torch.Tensor]:
    """A layer's inputs and the gradient of its output."""
    torch.manual_seed(0)
    inputs = make_layer(*size.values(), device=DEVICE, std=std)
    return inputs, torch.randn_like(inputs.x_TD)


def layer_table(size: dict) -> dict[str, list[float]]:
    (x, scores, topk_ids, weights), dout = draw(size, std=0.02)

    def plain(x, s, *weights, dtype=torch.float32):
        return moe_layer(x.to(dtype), s, topk_ids, *(w.to(dtype) for w in weights), False)

    layers = {
        "bf16": partial(plain, dtype=torch.bfloat16),
        "fp8, each operand rounded once": lambda x, s, *w: single_quantization_layer(x, s, topk_ids, *w),
        "FP8-Flow balanced": flow(topk_ids),
        "FP8-Flow balanced, h in fp8": flow(topk_ids, save_h="fp8"),
    }
    return errors(layers, plain, [x, scores, *weights], dout)


def activation_table(size: dict) -> dict[str, list[float]]:
    """Each activation's errors, with its default parameters."""
    (x, scores, topk_ids, weights), dout = draw(size, std=0.05)
    table, chosen = {}, torch.nn.functional.one_hot(topk_ids, size["experts"]).float()
    for name, entry in ACTIVATIONS.items():

        def exact(x, s, w1, w2, w3=None):
            g, u = (None if w is None else torch.einsum("td,nhd->tnh", x, w) for w in (w1, w3))
            a = entry.forward(g, u, *entry.parameters.values())  # noqa: B023 # called in this iteration
            return torch.einsum("tnh,ndh,tn->td", a, w2, (chosen * s.unsqueeze(2)).sum(1))

        layers = {f"{name}, h in {save_h}": flow(topk_ids, name, save_h=save_h) for save_h in ("bf16", "fp8")}
        table |= errors(layers, exact, [x, scores, *weights[: 3 if entry.gated else 2]], dout)
    return table


def layer_records(kind: str, shape: str, rows: dict[str, list[float]], reference: str) -> list[dict]:
    return [
        record(f"{kind} {tensor}: {name}", shape, "relative error", error, reference, of_reference)
        for name, errors in rows.items()
        for tensor, error, of_reference in zip(TENSORS, errors, rows[reference], strict=False)
    ]


def main() -> None:
    args = begin(script_parser(__doc__, out="folder of results.json"), gpu=False)
    size = dict(tokens=4096, dim=2048, hidden=1408, experts=16, top_k=6)
    if DEVICE == "cpu":  # a quarter of the dims: the reference is slow
        size = dict(tokens=1024, dim=512, hidden=384, experts=8, top_k=6)
    shape = " ".join(f"{k} {v}" for k, v in size.items())
    records = layer_records("activation_error", shape, activation_table(size), "swiglu, h in bf16")
    records += layer_records("layer_error", shape, layer_table(size), "bf16")
    write_records(args.out / "results.json", records)


if __name__ == "__main__":
    main()
