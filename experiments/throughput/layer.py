"""One MoE layer, forward and backward, FP8-Flow against bf16 in the same run, on one GPU.

    python -m experiments.throughput.layer --out experiments/throughput --models 671B --tokens 16384

Variants are torchtitan's ``MoE`` with the same parameters, as it is or converted, under autocast, as torchtitan trains
on one GPU. Router, shared experts and combine are inside the time. They take turns in blocks of back-to-back steps, in
an order drawn anew for each round. FP8-Flow quantizes its weights in every forward and backward. Where it keeps them
for four microbatches, each bears a fourth of the time.
"""

import functools
import gc
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
import torchtitan.models.moe.moe as moe_module
from torch import Tensor, nn
from torchtitan.config.job_config import Compile
from torchtitan.models.llama4.infra.parallelize import apply_compile
from torchtitan.models.moe.moe import MoE, MoEArgs
from torchtitan.tools.utils import set_default_dtype

import titan_fp8moe.torchtitan  # noqa: F401  registers and, without a GPU, patches torchtitan
from experiments.ablations import permute_then_copy, requantized_pair
from experiments.records import DEVICE, begin, other_torch, record, script_parser, within, write_records
from experiments.throughput.fused_bf16 import BalancedRandomRouter, FusedMoE
from experiments.timing import elapsed_ms, medians_in_turn
from titan_fp8moe import WeightCache, ops
from titan_fp8moe.config import Fp8FlowMoEConfig
from titan_fp8moe.torchtitan import parallel
from titan_fp8moe.torchtitan.modules import Fp8FlowMoE

ROUNDS, BLOCK_MS, MIN_STEPS = 4, 80.0, 5  # turns of a variant, and their length
_V2, _V3 = dict(score_func="softmax"), dict(score_func="sigmoid", route_norm=True, route_scale=2.5)
_QWEN3 = dict(score_func="softmax", route_norm=True)


class Model(NamedTuple):
    """A model's MoE layers; ``experts`` is the number per GPU that is measured, ``router`` arguments of MoEArgs."""

    D: int
    H: int
    top_k: int
    shared: int
    experts: int
    router: dict[str, Any]


MODELS = {
    "671B": Model(7168, 2048, 8, 1, 64, _V3),
    "16B": Model(2048, 1408, 6, 2, 64, _V2),
    "Kimi-K2": Model(7168, 2048, 8, 1, 48, _V3),
    "GLM-4.5-Air": Model(4096, 1408, 8, 1, 128, _V3),
    "Qwen3-235B": Model(4096, 1536, 8, 0, 32, _QWEN3),
    "Qwen3-30B": Model(2048, 768, 8, 0, 128, _QWEN3),
}


class Variant(NamedTuple):
    """A way to run a layer: its record's name, the settings of FP8, and functions in place of some of the ops. A step
    has some microbatches, of which the first quantizes the weights if the layer keeps them."""

    name: str = ""
    config: Fp8FlowMoEConfig | None = None  # None: bf16
    fused: bool = False
    parts: bool = False  # as torchtitan compiles a layer; else it is one graph
    microbatches: int = 1
    replaced: dict[str, Callable[..., Any]] = {}  # noqa: RUF012  never changed


REFERENCES = {"bf16": Variant(parts=True), "bf16 whole": Variant(), "bf16 fused": Variant(fused=True)}
OURS = Variant("moe_layer_with_weights", Fp8FlowMoEConfig())
KEPT = Variant("moe_layer with weights kept for 4 microbatches", Fp8FlowMoEConfig(cache_weights=True), microbatches=4)
ABLATIONS = {
    "requantize": OURS._replace(name="moe_layer requantize", replaced={"transpose_pair": requantized_pair}),
    "unfused permute": OURS._replace(name="moe_layer unfused permute", replaced={"permute_rows": permute_then_copy}),
}
MAIN = REFERENCES | {"fp8": OURS, "fp8 kept": KEPT}
_EAGER_EXPERTS = moe_module._run_experts_grouped_mm
_OPS = {name: getattr(ops, name) for variant in ABLATIONS.values() for name in variant.replaced}


def compile_whole(moe: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The layer as one graph, of a code object of its own: torch.compile would try the other variants' graphs first."""
    torch._dynamo.config.capture_scalar_outputs = True  # as torchtitan's apply_compile

    def call(x: Tensor) -> Tensor:
        return moe(x)

    call.__code__ = call.__code__.replace()
    return torch.compile(call, fullgraph=True)


class Bench:
    """Variants of a model's layer, which share parameters, inputs and gradients."""

    def __init__(self, model: Model, tokens: int, fp32: bool, variants: dict[str, Variant]):
        self.model, self.fp32, self.variants, self.w13 = model, fp32, variants, None
        self.x, self.dout = (torch.randn(1, tokens, model.D, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
        self.x.requires_grad_()
        self.first = self._layer(Variant())
        self.forwards = {name: self._forward(self._layer(variant), variant) for name, variant in variants.items()}

    def _layer(self, variant: Variant) -> MoE:
        model, router = self.model, dict(score_before_experts=False, _debug_force_load_balance=True)
        router |= dict(num_experts=model.experts, num_shared_experts=model.shared, top_k=model.top_k) | model.router
        with torch.device("meta"), set_default_dtype(torch.float32 if self.fp32 else torch.bfloat16):
            moe = MoE(MoEArgs(**router), model.D, model.H)
        moe.router.__class__ = BalancedRandomRouter
        if variant.config is not None:
            Fp8FlowMoE.convert(moe, variant.config, fp8_shared=model.shared > 0)
        if not hasattr(self, "first"):
            moe.to_empty(device=DEVICE)
            with torch.no_grad():
                moe.init_weights(0.02, torch.device(DEVICE))
            return moe
        for module, other in zip(moe.modules(), self.first.modules(), strict=True):
            module._parameters, module._buffers = other._parameters, other._buffers
        if variant.fused:
            moe.__class__, experts = FusedMoE, self.first.experts
            if not self.fp32:
                self.w13 = cast(FusedMoE, moe).w13 = torch.cat((experts.w1, experts.w3), 1).detach().requires_grad_()
        return moe

    def _forward(self, moe: MoE, variant: Variant) -> Callable[[], Tensor]:
        moe_module._run_experts_grouped_mm = _EAGER_EXPERTS  # or torchtitan compiles what is compiled
        call: Callable[[Tensor], Tensor] = moe
        if variant.parts:
            block, model = nn.ModuleDict({"moe": moe}), nn.Module()
            block.moe_enabled, model.layers = True, nn.ModuleDict({"0": block})
            apply_compile(model, Compile(enable=True), ep_enabled=False)
        else:
            call = compile_whole(moe)
        run_experts = moe_module._run_experts_grouped_mm

        def forward() -> Tensor:
            moe_module._run_experts_grouped_mm = run_experts
            vars(ops).update(_OPS | variant.replaced)
            with torch.autocast(DEVICE, torch.bfloat16):
                return call(self.x)

        return forward

    def parameters(self) -> list[Tensor]:
        return [*self.first.parameters(), *([] if self.w13 is None else [self.w13])]

    def step(self, name: str) -> None:
        microbatches = self.variants[name].microbatches
        if microbatches > 1:
            WeightCache.clear_all()
        for _ in range(microbatches):
            for leaf in (self.x, *self.parameters()):
                leaf.grad = None
            self.forwards[name]().backward(self.dout)

    def times(self) -> dict[str, float]:
        """Median milliseconds of a microbatch, after two steps of every variant, which compile it."""
        for name in self.forwards:
            self.step(name)
            self.step(name)
            torch.cuda.empty_cache()
        gc.collect()
        turns = {}
        for name in self.forwards:
            step = functools.partial(self.step, name)
            turns[name] = step, max(MIN_STEPS, math.ceil(BLOCK_MS / elapsed_ms(step, 2)))
        with torch._dynamo.config.patch(error_on_recompile=True):  # or compilation would be inside the times
            found = medians_in_turn(_after_half, turns, ROUNDS)
        return {name: ms / self.variants[name].microbatches for name, ms in found.items()}

    def saved_bytes(self, name: str) -> float:
        """Bytes per token that the forward keeps for the backward, without parameters and their casts."""
        skip = {t.untyped_storage().data_ptr() for t in itertools.chain(self.parameters(), self.first.buffers())}
        kept = {}

        def pack(t: Tensor) -> Tensor:
            if (storage := t.untyped_storage()).data_ptr() not in skip:
                kept[storage.data_ptr()] = storage.nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            out = self.forwards[name]()
        out.backward(self.dout)
        return sum(kept.values()) / self.x.shape[1]


def _after_half(turn: tuple[Callable[[], None], int]) -> float:
    """Half a turn's length passes untimed: the card's clocks still are those of what ran before, up to 3% apart."""
    step, times = turn
    elapsed_ms(step, times // 2)
    return elapsed_ms(step, times)


def measure(name: str, tokens: int, fp32: bool, variants: dict[str, Variant]) -> list[dict]:
    """Records of a layer: times, and saved bytes next to torchtitan's bf16; of ablations times next to the defaults."""
    bench = Bench(MODELS[name], tokens, fp32, variants)
    times = bench.times()
    shape = [f"{name}, {bench.model.experts} experts per GPU, {tokens} tokens", *["fp32 parameters"] * fp32]
    label = ", ".join([*shape, *other_torch(), "1 GPU"])
    found = []
    for variant, ms in times.items():
        if variant not in REFERENCES:
            references = ["fp8"] if variant in ABLATIONS else [r for r in REFERENCES if r in times]
            of = variants[variant].name
            found += [record(of, label, "ms forward + backward", ms, r, times[r]) for r in references]
    if "bf16" in times:
        bytes_saved = [bench.saved_bytes(each) for each in ("fp8", "bf16")]
        found.append(record("moe_layer saved", label, "bytes per token", bytes_saved[0], "bf16", bytes_saved[1]))
    torch._dynamo.reset()
    return found


def main() -> None:
    parser = script_parser(__doc__, out="folder of results.json", budget="shape")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    parser.add_argument("--tokens", type=int, nargs="+", default=[16384, 8192, 4096])
    parser.add_argument("--fp32", action="store_true", help="parameters in fp32, not bf16")
    parser.add_argument("--ablations", action="store_true", help="the paper's, next to the defaults")
    args = begin(parser)
    parallel.install()
    gc.disable()  # as torchtitan's trainer does: no step waits for a collection
    variants = {"fp8": OURS} | ABLATIONS if args.ablations else MAIN
    for name, tokens in within(args.budget, itertools.product(args.models, args.tokens)):
        write_records(args.out / "results.json", measure(name, tokens, args.fp32, variants))


if __name__ == "__main__":
    main()
