"""The rounding errors of gradients next to the noise of minibatches, with the weights of one step of a run.

For minibatches k of equal size, g_k is the gradient in bf16, and d_k is FP8's less g_k. Measured are

    V = E |g - E g|^2    the noise of a minibatch
    S = E |d - E d|^2    the scatter of FP8's error, which batches average out like the noise
    B = |E d|^2          its bias, which they do not

The gradient of n minibatches has the noise V / n, and FP8 adds the squared error B + S / n. The two are equal at
n = (V - S) / B: FP8's rounding begins to matter in batches of about that size. A second comparison finds the same for
bf16 against fp32.

B is the mean of the products d_i d_j, i < j, whose expectation it is. Its standard error comes from the terms of the
sum, d_k times the sum of the d_i before it. It is right where S dominates and up to 1.7 times too small where B does.

All gradients are those of eager models with the parameters of the trained one, so that the arithmetic alone differs:
routed experts of :mod:`experiments.throughput.fused_bf16`, converted modules, and torchtitan's without autocast.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchtitan.models.moe import FeedForward

from experiments.throughput.fused_bf16 import FusedMoE, moes
from titan_fp8moe.config import Fp8FlowMoEConfig
from titan_fp8moe.torchtitan.modules import Fp8FlowFeedForward, Fp8FlowMoE

KINDS = {
    r"moe\.experts\.w1": "routed w1",
    r"moe\.experts\.w2": "routed w2",
    r"moe\.experts\.w3": "routed w3",
    r"moe\.shared_experts": "shared experts",
    r"feed_forward": "dense FFN",
    r"moe\.router": "router",
    r"norm": "norms",
    r"attention": "attention",
    r"tok_embeddings": "embeddings",
    r"output": "output",
}
FP32_MINIBATCHES = 4
Gradients = dict[str, Tensor]


def kind_of(name: str) -> str:
    return next(kind for pattern, kind in KINDS.items() if re.search(pattern, name))


class Moments:
    """Sums over the gradients, or errors of gradients, of minibatches, by kind of weight."""

    def __init__(self) -> None:
        self.sums: Gradients = {}
        self.squares: list[dict[str, float]] = []
        self.products: list[dict[str, float]] = []  # of each with the sum of those before it

    def add(self, gradients: Gradients) -> None:
        """Takes the tensors: they may change."""
        squares, products = defaultdict(list), defaultdict(list)
        for name, gradient in gradients.items():
            kind = kind_of(name)
            squares[kind].append((gradient * gradient).sum(dtype=torch.float64))
            if name in self.sums:
                products[kind].append((gradient * self.sums[name]).sum(dtype=torch.float64))
                self.sums[name] += gradient
            else:
                self.sums[name] = gradient
        self.squares.append({kind: sum(parts).item() for kind, parts in squares.items()})
        self.products.append({kind: sum(parts).item() for kind, parts in products.items()})

    def of(self, kind: str) -> dict[str, float]:
        """Estimates |E x|^2, its standard error and E |x - E x|^2. Kind "all" has all weights."""
        count = len(self.squares)
        squares, products = (
            [sum(by_kind.values()) if kind == "all" else by_kind.get(kind, 0.0) for by_kind in found]
            for found in (self.squares, self.products)
        )
        pairs = count * (count - 1) / 2
        mean = sum(products) / pairs
        error = sum((product - k * mean) ** 2 for k, product in enumerate(products)) ** 0.5 / pairs
        return {"square_of_mean": mean, "standard_error": error, "variance": sum(squares) / count - mean}


def critical_tokens(noise: dict[str, float], error: dict[str, float], tokens: int) -> float | None:
    """Tokens of the batch whose error equals its noise, of minibatches of ``tokens``; None without a sure bias."""
    if error["square_of_mean"] <= 2 * error["standard_error"]:
        return None
    return tokens * (noise["variance"] - error["variance"]) / error["square_of_mean"]


def plain(name: str) -> str:
    """A name without those of wrappers for compilation and checkpointing."""
    return re.sub(r"_orig_mod\.|_checkpoint_wrapped_module\.", "", name)


def to_bf16(model: nn.Module) -> None:
    for moe in moes(model):
        moe.__class__ = FusedMoE


def to_fp8(model: nn.Module) -> None:
    """As the converter ``fp8_flow_moe`` with its defaults, which would also change the process."""
    for moe in moes(model):
        Fp8FlowMoE.convert(moe, Fp8FlowMoEConfig(), fp8_shared=True)
    for ffn in [module for module in model.modules() if type(module) is FeedForward]:
        Fp8FlowFeedForward.convert(ffn, Fp8FlowMoEConfig())


def to_fp32(model: nn.Module) -> None:
    for moe in moes(model):
        moe.experts.use_grouped_mm = False  # which computes in bf16


def twin(trained: nn.Module, build: Callable[[], nn.Module], convert: Callable[[nn.Module], None]) -> nn.Module:
    """A model of ``build`` with the parameters and buffers of the trained one, but for counts of tokens."""
    with torch.device("meta"):
        model = build()
    convert(model)
    parameters, buffers = ({plain(n): t for n, t in f()} for f in (trained.named_parameters, trained.named_buffers))
    for prefix, module in model.named_modules():
        for owned, shared in ((module._parameters, parameters), (module._buffers, buffers)):
            for name in [name for name, tensor in owned.items() if tensor is not None]:
                tensor = shared[f"{prefix}.{name}".lstrip(".")]
                owned[name] = torch.zeros_like(tensor) if name == "tokens_per_expert" else tensor
    return model


def gradients(model: nn.Module, autocast: Any, parts: int, tokens: Tensor, labels: Tensor) -> Gradients:
    """Gradients of the mean loss of a minibatch, computed in ``parts``. None stays on the parameters."""
    for some, targets in zip(tokens.chunk(parts), labels.chunk(parts), strict=True):
        with autocast:
            pred = model(some)
        (F.cross_entropy(pred.flatten(0, 1).float(), targets.flatten()) / parts).backward()
        del pred
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def compare(
    reference: Callable[[Tensor, Tensor], Gradients],
    ours: Callable[[Tensor, Tensor], Gradients],
    batches: Iterable[tuple[Tensor, Tensor]],
) -> tuple[Moments, Moments]:
    """Moments of the reference's gradients, and of the differences of ours from them."""
    noise, error = Moments(), Moments()
    for tokens, labels in batches:
        expected = reference(tokens, labels)
        error.add({name: gradient.sub_(expected[name]) for name, gradient in ours(tokens, labels).items()})
        noise.add(expected)
    return noise, error


def figures(noise: Moments, error: Moments, tokens: int) -> dict[str, Any]:
    """Estimates by kind of weight, of minibatches of so many tokens."""
    found = {}
    for kind in ("all", *noise.squares[0]):
        of_noise, of_error = noise.of(kind), error.of(kind)
        critical = critical_tokens(of_noise, of_error, tokens)
        found[kind] = {"gradient": of_noise, "error": of_error, "critical_tokens": critical}
    return {"minibatches": len(noise.squares), "tokens": tokens, "by_kind": found}


def measure(trainer: Any, batches: Iterable[tuple[dict[str, Tensor], Tensor]]) -> dict[str, Any]:
    """FP8's error against bf16, and over the first minibatches bf16's against fp32."""
    trainer.optimizers.zero_grad()
    if trainer.device.type == "cuda":
        torch.cuda.empty_cache()

    def gradients_of(convert: Callable[[nn.Module], None], autocast: Any, parts: int) -> Callable:
        model = twin(trainer.model_parts[0], lambda: trainer.train_spec.model_cls(trainer.model_args), convert)
        return partial(gradients, model, autocast, parts)

    device, amp = trainer.device, trainer.maybe_enable_amp
    on_device = [(inputs["input"].to(device), labels.to(device)) for inputs, labels in batches]
    some, size = on_device[:FP32_MINIBATCHES], on_device[0][1].numel()
    bf16, fp8 = gradients_of(to_bf16, amp, 1), gradients_of(to_fp8, amp, 1)
    fp32 = gradients_of(to_fp32, nullcontext(), len(on_device[0][1]))  # a sequence at a time, for memory
    return {
        "fp8 against bf16": figures(*compare(bf16, fp8, on_device), size),
        "bf16 against fp32": figures(*compare(fp32, bf16, some), size),
    }
