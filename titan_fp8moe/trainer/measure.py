"""Times one rank's layers of a job in bf16 and in FP8, on a GPU: ``--measure`` of a dry run.

The first MoE layer, dense FFN and linear of each shape run forward and backward, with the job's tokens, random weights
and a random router. bf16 is a graph of torch.compile with gate and up in one grouped GEMM, and activations in bf16. FP8
quantizes its weights each time. Biases are left out.
"""

import functools
import statistics
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
import triton.testing
from torch import Tensor

from titan_fp8moe.activations import ACTIVATIONS
from titan_fp8moe.layer.group import feed_forward, linear
from titan_fp8moe.layer.run import Experts, Shared, run_layer
from titan_fp8moe.layer.weights import ExpertWeights
from titan_fp8moe.nn.linear import Fp8FlowLinear
from titan_fp8moe.spec import ExpertSpec
from titan_fp8moe.trainer.dry_run import Built, MetaMoE, Tokens, converted

LEAST, MOST, ROUNDS = 128, 2**16, 3  # tokens between which it is looked for a gain; turns of each precision
LIMITS = "One rank's share, without exchange, attention and optimizer: not the gain of a step"


class Layer(NamedTuple):
    """A layer to time.

    Attributes:
        top_k: K, or 0 without a router.
        shapes: of its weights.
        plain, fp8: from rows (T, D), weights and, with a router, scores and ``ids_TK``. ``plain`` computes in the dtype
            of the rows.
    """

    name: str
    tokens: int
    top_k: int
    shapes: list[tuple[int, ...]]
    plain: Callable[..., Tensor]
    fp8: Callable[..., Tensor]

    def inputs(self, tokens: int, device: str) -> "Inputs":
        """Random ones of so many tokens."""
        shapes = (tokens, self.shapes[0][-1]), *self.shapes, (tokens, self.shapes[:2][-1][-2])
        x, *weights, dout = (torch.randn(shape, dtype=torch.bfloat16, device=device) for shape in shapes)
        leaves, ids = [x, *(weight.mul_(weight.shape[-1] ** -0.5) for weight in weights)], {}
        if self.top_k:
            random = torch.rand(tokens, self.shapes[0][0], dtype=torch.float32, device=device)
            scores, ids["ids_TK"] = random.topk(self.top_k)
            leaves.append(scores / self.top_k)
        return Inputs([leaf.requires_grad_() for leaf in leaves], ids, dout)


class Inputs(NamedTuple):
    """A layer's tensors that get gradients, rows first; others by name; the gradient of its output."""

    leaves: list[Tensor]
    others: dict[str, Tensor]
    dout: Tensor

    def step(self, run: Callable[..., Tensor]) -> list[Tensor]:
        """Forward and backward: the output, and the gradients of the leaves."""
        out = run(*self.leaves, **self.others)
        return [out.detach(), *torch.autograd.grad(out, self.leaves, self.dout)]

    def saved_bytes(self, run: Callable[..., Tensor]) -> int:
        """Bytes that autograd keeps between forward and backward, without the weights."""
        weights, kept = {w.untyped_storage().data_ptr() for w in self.leaves[1:]}, {}

        def pack(t: Tensor) -> Tensor:
            storage = t.untyped_storage()
            if storage.data_ptr() not in weights:
                kept[storage.data_ptr()] = storage.nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            run(*self.leaves, **self.others)
        return sum(kept.values())


def layers(built: Built) -> Iterator[Layer]:
    """The converted layers of a rank's model on the meta device, one of each shape. See :func:`dry_run.layers`."""
    seen = []
    for name, module in converted(built.parts, built.moe_of):
        layer = _layer(name, built.tokens.count, module)
        if (layer.top_k, layer.shapes) not in seen:
            seen.append((layer.top_k, layer.shapes))
            yield layer


def _layer(name: str, tokens: int, module: Any) -> Layer:
    gather = Tokens(tokens, torch.bfloat16, torch.bfloat16).gather
    if isinstance(module, MetaMoE):
        experts, shared = module.experts, module.shared
        config = cast(Any, module.routed).config
        gather(experts, fsdp=module.fsdp)
        w2 = experts.matrices().w2
        spec = ExpertSpec(experts.expert.activation, parameters=experts.expert.parameters)
        num_experts, D, H = max(w2.shape[0], module.top_k), *w2.shape[1:]  # a token's experts are different ones
        shapes: list[tuple[int, ...]] = [(num_experts, spec.rows_per_unit * H, D), (num_experts, D, H)]
        if shared is not None:
            gather(shared)
            shapes += [tuple(w.shape) for w in cast(Any, shared).matrices()]
        what = f"MoE layer {name}, {num_experts} experts, top {module.top_k}, dims {D} and {H}"
        plain, fp8 = functools.partial(plain_moe, expert=spec), functools.partial(_fp8_moe, expert=spec, config=config)
        return Layer(what, tokens, module.top_k, shapes, plain, fp8)
    gather(module)
    if isinstance(module, Fp8FlowLinear):
        shape = tuple(module.weight.shape)
        fp8 = lambda x, w: linear(x, w, module.config)  # noqa: E731
        return Layer(f"linear {name}, {shape[0]}x{shape[1]}", tokens, 0, [shape], F.linear, fp8)
    shapes = [tuple(w.shape) for w in cast(Any, module).matrices()]
    what = f"dense FFN {name}, dims {shapes[1][0]} and {shapes[1][1]}"
    fp8 = lambda x, *weights: feed_forward(x, ExpertWeights(*weights), module.config)  # noqa: E731
    return Layer(what, tokens, 0, shapes, plain_ffn, fp8)


# --- the two precisions -----------------------------------------------------------------------------------------------


def plain_ffn(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
    return F.linear(F.silu(F.linear(x, w1)) * F.linear(x, w3), w2)


def plain_moe(x_TD: Tensor, w13: Tensor, w2: Tensor, *others: Tensor, ids_TK: Tensor, expert: ExpertSpec) -> Tensor:
    """The layer in fifteen lines of PyTorch, to be compiled: without padding, in two grouped GEMMs.

    Args:
        others: weights of shared experts, if any, and scores (T, K).
    """
    *shared, scores_TK = others
    ids, order = ids_TK.flatten().short().sort(stable=True)  # two bytes: a quarter of the radix sort's passes
    each = torch.arange(w2.shape[0], dtype=ids.dtype, device=ids.device)
    offsets_E = torch.searchsorted(ids, each, right=True, out_int32=True)
    token = order // ids_TK.shape[1]
    x_MD = x_TD.float()[token].to(x_TD.dtype)  # fp32: the backward adds a token's gradients in it
    h = torch._grouped_mm(x_MD, w13.transpose(1, 2), offs=offsets_E)
    activate = ACTIVATIONS[expert.activation].forward
    a = activate(*(h.chunk(2, 1) if expert.gated else (h, None)), *expert.parameters)
    y_MD = torch._grouped_mm(a, w2.transpose(1, 2), offs=offsets_E).float()
    y_MD = y_MD * scores_TK.flatten()[order].unsqueeze(1)
    out = torch.zeros(x_TD.shape, dtype=torch.float32, device=x_TD.device).index_add(0, token, y_MD)
    return (out + plain_ffn(x_TD, *shared) if shared else out).to(x_TD.dtype)


def _fp8_moe(
    x_TD: Tensor, w13: Tensor, w2: Tensor, *others: Tensor, ids_TK: Tensor, expert: ExpertSpec, config: Any
) -> Tensor:
    *shared, scores_TK = others
    experts = Experts(ExpertWeights(w13, w2), config, expert=expert)
    return run_layer(x_TD, ids_TK, scores_TK, experts, Shared(ExpertWeights(*shared)) if shared else None)


# --- the measurement --------------------------------------------------------------------------------------------------


def milliseconds(run: Callable[[], object]) -> float:
    """Back to back, each with a cold L2."""
    return cast(float, triton.testing.do_bench(run, rep=40, return_mode="median"))


def describe(
    layer: Layer, device: str = "cuda", clock: Callable[..., float] = milliseconds, compiled: Any = torch.compile
) -> Iterator[str]:
    """Yields a layer's times in both precisions, and from how many tokens on FP8 pays. ``clock`` times a call."""
    torch.compiler.reset()  # or dims that differ from another layer's become symbols
    runs = [compiled(layer.plain), compiled(layer.fp8)]

    def times(inputs: Inputs) -> list[float]:
        """Milliseconds of both, which take turns."""
        turns = [[clock(functools.partial(inputs.step, run)) for run in runs] for _ in range(ROUNDS)]
        return [statistics.median(of_one) for of_one in zip(*turns, strict=True)]

    inputs = layer.inputs(layer.tokens, device)
    bf16, fp8 = times(inputs)
    saved = [inputs.saved_bytes(run) / 2**20 for run in runs]
    leaves = [leaf.detach().float().requires_grad_() for leaf in inputs.leaves]
    exact = Inputs(leaves, inputs.others, inputs.dout.float())
    right = exact.step(layer.plain)
    errors = [max(map(_relative_error, inputs.step(run), right)) for run in runs]
    del inputs, exact, right, leaves
    yield (
        f"{layer.name}: bf16 {bf16:.2f} ms, FP8 {fp8:.2f} ms ({bf16 / fp8:.2f}x); saved {saved[0]:.1f} and "
        f"{saved[1]:.1f} MiB; error against fp32, of outputs and gradients, up to {errors[0]:.2%} and {errors[1]:.2%}"
    )

    def ratio(tokens: int) -> float:
        bf16, fp8 = times(layer.inputs(tokens, device))
        return bf16 / fp8

    yield verdict(layer.tokens, bf16 / fp8, ratio)


def _relative_error(found: Tensor, right: Tensor) -> float:
    return float((found.float() - right).norm() / right.norm())


def verdict(tokens: int, speedup: float, ratio: Callable[[int], float]) -> str:
    """One sentence. ``ratio``: the speedup of so many tokens, which is asked for until FP8 begins to pay."""
    other, found = tokens, speedup
    if speedup < 1:
        while found < 1 and other < MOST:
            other *= 2
            found = ratio(other)
        ends = f"only from about {other:,} on" if found >= 1 else f"nor with {other:,}"
        return f"FP8 does not pay with {tokens:,} tokens, {ends} ({found:.2f}x)"
    while found >= 1 and other > LEAST:
        other //= 2
        found = ratio(other)
    ends = f"below about {2 * other:,} not" if found < 1 else f"also with {other:,}"
    return f"FP8 pays with {tokens:,} tokens, {ends} ({other:,}: {found:.2f}x)"


def show(built: Built) -> None:
    """Measures and prints all layers of a rank's share."""
    print(f"measured  with {built.tokens.count:,} tokens on {torch.cuda.get_device_name()}. {LIMITS}", flush=True)
    for layer in layers(built):
        for line in describe(layer):
            print(f"          {line}", flush=True)
