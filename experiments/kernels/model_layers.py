"""MoE layers of models with other activations than SwiGLU's, as one of eight expert-parallel ranks has them.

    python -m experiments.kernels.model_layers --out experiments/kernels/results.json

Candidates are one graph each. Shared experts and their gate are inside, the router is not. Ours quantizes its weights
in each direction, as a step without gradient accumulation does. The reference is the strongest bf16,
:func:`experiments.throughput.fused_bf16.fused_experts`, with the model's activation and, for gate and up of the shared
experts, one GEMM. A clamp's cost is that of ours next to ours with SwiGLU.
"""

from typing import NamedTuple, cast

import torch
from torch import Tensor

from experiments.kernels.problem import BF16, UNIT, Inputs, Sizes, Step, compiled_step, leaf
from experiments.records import measure_each
from experiments.reference import require_agreement
from experiments.throughput.fused_bf16 import fused_experts
from experiments.timing import median_ms, state_records
from titan_fp8moe import SharedExperts, routed_experts
from titan_fp8moe.activations import ACTIVATIONS
from titan_fp8moe.spec import ExpertSpec

OURS, SWIGLU, FUSED = "ours", "ours with SwiGLU", "bf16 fused"


class Model(NamedTuple):
    """A rank's part of a layer. ``shared``: hidden dim of the shared experts; ``shared_gate``: whether a sigmoid gates
    their output."""

    sizes: Sizes
    tokens: int
    spec: ExpertSpec
    shared: int = 0
    shared_gate: bool = False


_OAI = ExpertSpec.of("clamped_swiglu", dict(limit=7, alpha=1.702, offset=1))
_V4 = ExpertSpec.of("clamped_swiglu", dict(limit=10))
MODELS = {
    "gpt-oss-120B": Model(Sizes(2880, 2880, 16, 4), 8192, _OAI._replace(biased=True, interleaved=True)),
    "MiniMax-M3": Model(Sizes(6144, 3072, 16, 4), 8192, _OAI, shared=3072),
    "Gemma-4-26B": Model(Sizes(2816, 704, 16, 8), 8192, ExpertSpec.of("geglu_tanh")),
    "Nemotron-3-Nano": Model(Sizes(2688, 1856, 16, 6), 8192, ExpertSpec.of("relu2"), shared=3712),
    "Qwen3-Next": Model(Sizes(2048, 512, 64, 10), 16384, ExpertSpec(), shared=512, shared_gate=True),
    "DeepSeek-V4-Flash": Model(Sizes(4096, 2048, 32, 6), 8192, _V4, shared=2048),
}


class Problem(Inputs):
    """Inputs and weights of a layer, and the candidates that compute it."""

    def __init__(self, model: Model):
        super().__init__(model.sizes, model.tokens)
        (D, H, E, _), spec, S, self.model = model.sizes, model.spec, model.shared, model
        parts = spec.rows_per_unit
        self.w13, self.w2 = leaf(E, parts * H, D, std=D**-0.5), leaf(E, D, H, std=H**-0.5)
        self.b13, self.b2 = (leaf(E, parts * H), leaf(E, D)) if spec.biased else (None, None)
        self.s13, self.s2 = (leaf(parts * S, D, std=D**-0.5), leaf(D, S, std=S**-0.5)) if S else (None, None)
        self.gate = leaf(D, std=D**-0.5) if model.shared_gate else None
        leaves = self.scores, self.s13, self.s2, self.gate, self.w2, self.b13, self.b2, self.w13
        self.leaves = [t for t in leaves if t is not None]

    def ours(self, spec: ExpertSpec) -> Step:
        parameters = dict(zip(ACTIVATIONS[spec.activation].parameters, spec.parameters, strict=True))
        options = dict(activation=spec.activation, activation_parameters=parameters, interleaved=spec.interleaved)

        def layer(x: Tensor) -> Tensor:
            shared = None
            if self.s13 is not None:
                scores = None if self.gate is None else torch.sigmoid((x @ self.gate).float())
                shared = SharedExperts(self.s13, cast(Tensor, self.s2), None, scores)
            experts = self.w13, self.w2, None, self.ids, self.scores
            return routed_experts(x, *experts, b1=self.b13, b2=self.b2, shared=shared, **options)

        return compiled_step(layer, self.x, self.leaves, self.dout)

    def activate(self, h: Tensor) -> Tensor:
        """The activation of gate and up; in fp32 of bf16, as the compiler computes it anyway."""
        spec, up = self.model.spec, None
        if spec.gated:
            h, up = (h[:, ::2], h[:, 1::2]) if spec.interleaved else h.chunk(2, 1)
        forward = ACTIVATIONS[spec.activation].forward
        return forward(h.float(), None if up is None else up.float(), *spec.parameters).to(BF16)

    def shared_experts(self, x: Tensor) -> Tensor:
        y = self.activate(x @ cast(Tensor, self.s13).T) @ cast(Tensor, self.s2).T
        return y if self.gate is None else y * torch.sigmoid(x @ self.gate).unsqueeze(1)

    def fused(self) -> Step:
        def layer(x: Tensor) -> Tensor:
            biases = (self.b13, self.b2) if self.model.spec.biased else None
            out = fused_experts(x, self.w13, self.w2, self.ids, self.scores, self.activate, biases)
            return (out if self.s13 is None else out + self.shared_experts(x)).to(BF16)

        return compiled_step(layer, self.x, self.leaves, self.dout)


def measure(name: str) -> list[dict]:
    model = MODELS[name]
    problem, spec = Problem(model), model.spec
    steps = {OURS: problem.ours(spec), FUSED: problem.fused()}
    if spec.activation == "clamped_swiglu":
        steps[SWIGLU] = problem.ours(spec._replace(activation="swiglu", parameters=()))
    require_agreement(steps[OURS](), steps[FUSED]())
    shape = f"{name}, {model.sizes.rows(model.tokens)}"
    return state_records(f"layer_{name}", shape, median_ms(steps), OURS, [FUSED, SWIGLU], UNIT)


if __name__ == "__main__":
    measure_each(__doc__, "model", MODELS, measure)
