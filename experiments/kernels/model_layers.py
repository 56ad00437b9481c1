"""MoE layers of models with other activations than SwiGLU's, as one of eight expert-parallel ranks has them.

    python -m experiments.kernels.model_layers --out experiments/kernels/results.json [--only gpt-oss-120B]
    python -m experiments.kernels.model_layers --out OUT.json --tiny    # also on a CPU: do they agree?

All candidates get the same tokens, routing, scores and bf16 weights, return all gradients but the routing's, and are
one graph each, ``torch.compile(fullgraph=True)``. Shared experts and their gate are inside, the router is not. Ours
quantizes its weights in each direction, as a step without gradient accumulation does. The references are torchtitan's
layer, and :func:`experiments.throughput.fused_bf16.fused_experts`, the strongest bf16. Both have the model's activation
and, for gate and up of the shared experts, one GEMM. A clamp's cost is that of ours next to ours with SwiGLU. Routing
is random: each expert has about the same number of rows.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torchtitan.models.moe.moe import MoE, MoEArgs
from torchtitan.models.moe.utils import indices_padding_wrapper

from experiments.kernels.sonicmoe import BF16, UNIT, Sizes, Step
from experiments.records import begin, script_parser, within, write_records
from experiments.reference import largest_error
from experiments.throughput.fused_bf16 import fused_experts
from experiments.throughput.variants import compile_whole
from experiments.timing import median_ms, show, state_records
from titan_fp8moe import SharedExperts, routed_experts
from titan_fp8moe.activations import ACTIVATIONS
from titan_fp8moe.spec import ExpertSpec

OURS, SWIGLU, WHOLE, FUSED = "ours", "ours with SwiGLU", "bf16 whole", "bf16 fused"


class Model(NamedTuple):
    """A rank's part of a layer. ``shared``: hidden dim of the shared experts; ``shared_gate``: whether a sigmoid gates
    their output."""

    sizes: Sizes
    tokens: int
    spec: ExpertSpec
    shared: int = 0
    shared_gate: bool = False


_OAI = ExpertSpec.of("clamped_swiglu", dict(limit=7, alpha=1.702, offset=1))
MODELS = {
    "gpt-oss-120B": Model(Sizes(2880, 2880, 16, 4), 8192, _OAI._replace(biased=True, interleaved=True)),
    "MiniMax-M3": Model(Sizes(6144, 3072, 16, 4), 8192, _OAI, shared=3072),
    "Gemma-4-26B": Model(Sizes(2816, 704, 16, 8), 8192, ExpertSpec.of("geglu_tanh")),
    "Nemotron-3-Nano": Model(Sizes(2688, 1856, 16, 6), 8192, ExpertSpec.of("relu2"), shared=3712),
    "Qwen3-Next": Model(Sizes(2048, 512, 64, 10), 16384, ExpertSpec(), shared=512, shared_gate=True),
    "DeepSeek-V4-Flash": Model(
        Sizes(4096, 2048, 32, 6), 8192, ExpertSpec.of("clamped_swiglu", dict(limit=10)), shared=2048
    ),
}


def tiny(model: Model) -> Model:
    """The same experts at sizes for a CPU, no multiples of 128 either."""
    return model._replace(sizes=Sizes(192, 176, 4, 2), tokens=256, shared=128 if model.shared else 0)


class Problem:
    """Inputs and weights of a layer, and the candidates that compute it."""

    def __init__(self, model: Model, device: str):
        (D, H, E, K), spec = model.sizes, model.spec
        self.model, self.device = model, device

        def leaf(*shape: int, std: float = 1.0) -> Tensor:
            return (torch.randn(shape, device=device) * std).to(BF16).requires_grad_()

        self.x, self.dout = leaf(model.tokens, D), leaf(model.tokens, D).detach()
        self.ids = torch.rand(model.tokens, E, device=device).topk(K, sorted=False).indices
        self.scores = torch.rand(model.tokens, K, device=device).requires_grad_()
        parts, S = spec.rows_per_unit, model.shared
        self.w13, self.w2 = leaf(E, parts * H, D, std=D**-0.5), leaf(E, D, H, std=H**-0.5)
        self.b13, self.b2 = (leaf(E, parts * H), leaf(E, D)) if spec.biased else (None, None)
        self.s13, self.s2 = (leaf(parts * S, D, std=D**-0.5), leaf(D, S, std=S**-0.5)) if S else (None, None)
        self.gate = leaf(D, std=D**-0.5) if model.shared_gate else None
        self.around = [t for t in (self.x, self.scores, self.s13, self.s2, self.gate) if t is not None]
        self.weights = [t for t in (self.w2, self.b13, self.b2, self.w13) if t is not None]

    def step(self, layer: Callable[[Tensor], Tensor], weights: list[Tensor], titan: bool = False) -> Step:
        """The output, and the gradients of what all candidates share, then of their ``weights``. torchtitan's layer
        runs under autocast, as it trains on one GPU. Its padding does not compile on a CPU."""
        torch._dynamo.reset()
        call = layer if titan and self.device == "cpu" else compile_whole(layer)
        leaves = self.around + weights

        def step() -> list[Tensor]:
            with torch.autocast(self.device, BF16, enabled=titan):
                out = call(self.x)
            return [out.detach(), *torch.autograd.grad(out, leaves, self.dout)]

        return step

    def ours(self, spec: ExpertSpec) -> Step:
        names = ACTIVATIONS[spec.activation].parameters
        options: dict[str, Any] = dict(b1=self.b13, b2=self.b2, interleaved=spec.interleaved)
        options |= dict(activation=spec.activation)
        options |= dict(activation_parameters=dict(zip(names, spec.parameters, strict=True)))

        def layer(x: Tensor) -> Tensor:
            shared = None
            if self.s13 is not None:
                scores = None if self.gate is None else torch.sigmoid((x @ self.gate).float())
                shared = SharedExperts(self.s13, cast(Tensor, self.s2), None, scores)
            return routed_experts(x, self.w13, self.w2, None, self.ids, self.scores, shared=shared, **options)

        return self.step(layer, self.weights)

    def activate(self, h: Tensor, up: Tensor | None = None) -> Tensor:
        """The activation of gate and up, which are ``h`` or, with ``up``, apart; in fp32 of bf16, as the compiler
        computes it anyway."""
        spec = self.model.spec
        if spec.gated and up is None:
            h, up = (h[:, ::2], h[:, 1::2]) if spec.interleaved else h.chunk(2, 1)
        forward = ACTIVATIONS[spec.activation].forward
        return forward(h.float(), up if up is None else up.float(), *spec.parameters).to(BF16)

    def shared_experts(self, x: Tensor) -> Tensor:
        y = self.activate(x @ cast(Tensor, self.s13).T) @ cast(Tensor, self.s2).T
        return y if self.gate is None else y * torch.sigmoid(x @ self.gate).unsqueeze(1)

    def fused(self) -> Step:
        def layer(x: Tensor) -> Tensor:
            biases = (self.b13, self.b2) if self.model.spec.biased else None
            out = fused_experts(x, self.w13, self.w2, self.ids, self.scores, self.activate, biases)
            return (out if self.s13 is None else out + self.shared_experts(x)).to(BF16)

        return self.step(layer, self.weights)

    def whole(self) -> Step:
        D, H, E, K = self.model.sizes
        args = MoEArgs(
            num_experts=E, num_shared_experts=0, top_k=K, score_before_experts=False, load_balance_coeff=None
        )
        with torch.device("meta"):
            moe = MoE(args, D, H)
        moe.tokens_per_expert = torch.zeros(E, device=self.device)
        moe.router, moe.experts = _Routed(self), _Padded(self)
        moe.shared_experts = None if self.s13 is None else cast(Any, self.shared_experts)
        return self.step(lambda x: moe(x.unsqueeze(0)).squeeze(0), moe.experts.leaves, titan=True)


class _Routed(nn.Module):
    """torchtitan's router, with a routing that is given."""

    def __init__(self, problem: Problem):
        super().__init__()
        E = problem.model.sizes.E
        self.top_k, self.scores, self.ids = problem.model.sizes.K, problem.scores, problem.ids
        self.counts = problem.ids.flatten().bincount(minlength=E).float()

    def forward(self, x: Tensor, expert_bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        return self.scores, self.ids, self.counts


class _Padded(nn.Module):
    """torchtitan's experts, a GEMM for each projection, with the model's activation and biases."""

    def __init__(self, problem: Problem):
        super().__init__()
        spec, w13 = problem.model.spec, problem.w13.detach()
        apart = spec.gated and not spec.interleaved  # torchtitan's gpt_oss has gate and up in one
        projections = w13.chunk(2, 1) if apart else [w13]
        self.up = [w.clone().requires_grad_() for w in projections]
        self.down, self.problem = problem.w2, problem
        self.leaves = problem.weights[:-1] + self.up

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        return indices_padding_wrapper(self.run)(self.up[0], self.down, None, x, counts)

    def run(self, w1: Tensor, w2: Tensor, w3: None, x: Tensor, counts: Tensor) -> Tensor:
        problem, ends = self.problem, counts.cumsum(0, dtype=torch.int32)
        h = [torch._grouped_mm(x, w.transpose(1, 2), offs=ends) for w in self.up]
        if problem.b13 is None:
            return torch._grouped_mm(problem.activate(*h), w2.transpose(1, 2), offs=ends)
        rows = torch.arange(x.shape[0], device=x.device, dtype=torch.int32)
        expert = torch.searchsorted(ends, rows, right=True).unsqueeze(1)
        one_hot = (expert == torch.arange(ends.shape[0], device=x.device)).to(BF16)
        # Rows past the end hold arbitrary bytes, also in the gradient, which the biases' GEMM reads.
        biased = torch.where(expert < ends.shape[0], h[0] + one_hot @ problem.b13, 0)
        y = torch._grouped_mm(problem.activate(biased), w2.transpose(1, 2), offs=ends)
        return y + one_hot @ cast(Tensor, problem.b2)


def check(mine: list[Tensor], others: list[Tensor]) -> float:
    """:func:`largest_error` of output and gradients. Of ``others`` the last two may be the gradients of gate and up,
    which ``mine`` has in one."""
    count = len(mine) - 1
    return largest_error(mine, [*others[:count], torch.cat(others[count:], 1)])


def candidates(problem: Problem) -> dict[str, Step]:
    spec = problem.model.spec
    steps = {OURS: problem.ours(spec), WHOLE: problem.whole(), FUSED: problem.fused()}
    if spec.activation == "clamped_swiglu":
        steps[SWIGLU] = problem.ours(spec._replace(activation="swiglu", parameters=()))
    return steps


def main() -> None:
    parser = script_parser(__doc__, out="add the records to this JSON file", budget="model")
    parser.add_argument("--only", nargs="+", default=[*MODELS], choices=MODELS)
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU")
    args = parser.parse_args()
    if not args.tiny:
        begin(args.trial)
    torch.manual_seed(0)
    for name in within(args.budget, args.only):
        model = tiny(MODELS[name]) if args.tiny else MODELS[name]
        steps = candidates(Problem(model, "cuda" if torch.cuda.is_available() else "cpu"))
        mine = steps[OURS]()
        apart = [check(mine, steps[peer]()) for peer in (FUSED, WHOLE)]
        shape = f"{name}, {model.tokens} tokens, {model.tokens * model.sizes.K // model.sizes.E} rows per expert"
        times = median_ms(steps)
        show(f"{shape}, {max(apart):.3f} apart", times)
        write_records(args.out, state_records(f"layer_{name}", shape, times, OURS, [WHOLE, FUSED, SWIGLU], UNIT))
        del steps, mine


if __name__ == "__main__":
    main()
