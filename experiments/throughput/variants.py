"""The variants of one MoE layer that layer.py measures, and the models whose layers they are.

A variant is torchtitan's ``MoE``, as it is or converted, compiled in one of two ways:

* ``parts``: torchtitan's ``apply_compile``, which leaves what lies between the submodules eager;
* ``whole``: one graph, ``torch.compile(fullgraph=True)``, as the converter compiles a block on one GPU.

On one GPU a variant runs under autocast, as torchtitan trains there. Its bmm with the scores is bf16 then; on several
GPUs it is fp32, as under FSDP's mixed precision.

Under expert parallelism the host reads split sizes in the layer, so nothing compiles whole: FP8-Flow goes by parts too.

A :class:`titan_fp8moe.WeightCache` looks for changed weights in every forward. Variants whose weights are quantized
beforehand read them from :class:`FixedWeights` instead, in the same graph as the variant that quantizes them at every
step: the two differ by the quantization alone.
"""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
import torchtitan.models.moe.moe as moe_module
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torchtitan.config.job_config import Compile
from torchtitan.models.llama4.infra.parallelize import apply_compile
from torchtitan.models.moe.moe import MoE, MoEArgs
from torchtitan.tools.utils import set_default_dtype

import titan_fp8moe.torchtitan  # noqa: F401  registers and, without a GPU, patches torchtitan
from experiments.ablations import permute_then_copy, requantized_pair
from experiments.reference import in_model
from experiments.throughput.fused_bf16 import FusedMoE
from experiments.throughput.routing import BalancedRandomRouter
from titan_fp8moe import ops
from titan_fp8moe.config import Fp8FlowMoEConfig
from titan_fp8moe.layer.operands import WeightCache, WeightOperands, copies_for, pack_weights
from titan_fp8moe.layer.weights import ExpertWeights
from titan_fp8moe.torchtitan import parallel
from titan_fp8moe.torchtitan.modules import Fp8FlowMoE

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# The routers' arguments of torchtitan's MoEArgs.
_V2, _V3 = dict(score_func="softmax"), dict(score_func="sigmoid", route_norm=True, route_scale=2.5)
_QWEN3 = dict(score_func="softmax", route_norm=True)


class Model(NamedTuple):
    """A model's MoE layers; ``experts`` is the number per GPU that is measured."""

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
    "tiny": Model(256, 128, 3, 1, 6, _V3),  # for tests
}


class Shape(NamedTuple):
    """``tokens`` are per GPU. Parameters are bf16, or fp32."""

    model: str
    tokens: int
    fp32: bool = False

    def moe_args(self, gpus: int) -> MoEArgs:
        model = MODELS[self.model]
        return MoEArgs(
            num_experts=model.experts * gpus,
            num_shared_experts=model.shared,
            score_before_experts=False,
            top_k=model.top_k,
            _debug_force_load_balance=True,
            **model.router,
        )

    def __str__(self) -> str:
        experts = MODELS[self.model].experts
        return f"{self.model}, {experts} experts per GPU, {self.tokens} tokens{', fp32 parameters' * self.fp32}"


class Variant(NamedTuple):
    """A way to run a layer. ``replaced``: the functions in place of some of :mod:`titan_fp8moe.ops`. A step has some
    microbatches, of which the first quantizes the weights if the layer keeps them; a time is a microbatch's."""

    config: Fp8FlowMoEConfig | None = None  # None: bf16
    compiled: str = "whole"
    quantizes_weights: bool = False
    fp8_shared: bool = True
    fused: bool = False
    microbatches: int = 1
    replaced: dict[str, Callable[..., Any]] = {}  # noqa: RUF012  never changed


FP8 = Variant(Fp8FlowMoEConfig())
KEPT = Variant(Fp8FlowMoEConfig(cache_weights=True), quantizes_weights=True, microbatches=4)
VARIANTS = {
    "bf16": Variant(compiled="parts"),
    "bf16 whole": Variant(),
    "bf16 fused": Variant(fused=True),
    "fp8": FP8,
    "fp8 with weight quantization": FP8._replace(quantizes_weights=True),
    "fp8 with weights kept for 4 microbatches": KEPT,
    "fp8 with bf16 shared experts": FP8._replace(fp8_shared=False),
    "fp8 requantize": FP8._replace(replaced={"transpose_pair": requantized_pair}),
    "fp8 unfused permute": FP8._replace(replaced={"permute_rows": permute_then_copy}),
}
ABLATIONS = tuple(name for name, variant in VARIANTS.items() if variant.replaced)
"""Variants that are measured when asked for, against the default too."""


def variants(shape: Shape, gpus: int) -> dict[str, Variant]:
    """The variants that this layer has on that many GPUs."""
    found = dict(VARIANTS)
    if MODELS[shape.model].shared == 0:
        del found["fp8 with bf16 shared experts"]
    if gpus > 1:
        found = {n: v._replace(compiled="parts") for n, v in found.items() if v.config or v.compiled == "parts"}
    return found


class FixedWeights(WeightCache):
    """A cache of weights that never change. Variants that read it replace ``refresh_weight``, so that nothing looks at
    the weights again."""

    def __init__(self, *weights: Tensor):
        super().__init__()
        local = (w.to_local() if isinstance(w, DTensor) else w for w in weights)
        matrices = ExpertWeights(*(w.detach() for w in local))
        self.made = copies_for(self, matrices)
        WeightOperands(pack_weights(matrices, self.made, frozen=True)).of_forward()

    def of(self, module: torch.nn.Module) -> WeightCache:
        """A cache of the module's with these copies."""
        cache = WeightCache(owner=module)
        vars(cache).update(copies=self.copies, _sizes=self._sizes)
        return cache

    def storages(self) -> set[int]:
        """Addresses of what the operands are kept in."""
        return {t.untyped_storage().data_ptr() for operand in self.made.operands for t in (*operand.plain, operand.q_t)}


def _unchanged(weights: list[Tensor], *_: Any) -> Tensor:
    return torch.zeros(2, dtype=torch.int32, device=weights[0].device)


_EAGER_EXPERTS = moe_module._run_experts_grouped_mm
_OPS = {name: getattr(ops, name) for variant in VARIANTS.values() for name in ("refresh_weight", *variant.replaced)}


def compile_whole(moe: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The layer as one graph; raises where that is impossible, and never falls back to eager.

    torch.compile caches by code object. Each layer gets its own, or the guards of the other variants' graphs would be
    tried before its own, and the graphs be counted against the limit of recompilations.
    """
    torch._dynamo.config.capture_scalar_outputs = True  # as torchtitan's apply_compile

    def call(x: Tensor) -> Tensor:
        return moe(x)

    call.__code__ = call.__code__.replace()
    return torch.compile(call, fullgraph=True)


class Bench:
    """Variants of one shape's layer, sharing parameters, inputs and gradients."""

    def __init__(self, shape: Shape, gpus: int, chosen: dict[str, Variant]):
        self.shape, self.gpus, self.first, self.w13 = shape, gpus, None, None
        self.chosen = chosen
        self.mesh = init_device_mesh(DEVICE, (gpus,), mesh_dim_names=("ep",)) if gpus > 1 else None
        self.fixed: list[FixedWeights] = []  # of the routed and the shared experts, once a variant needs them
        x_shape = (1, shape.tokens, MODELS[shape.model].D)
        self.x = torch.randn(x_shape, device=DEVICE, dtype=torch.bfloat16).requires_grad_()
        self.dout = torch.randn(x_shape, device=DEVICE, dtype=torch.bfloat16)
        self.layers = {name: self._layer(variant) for name, variant in chosen.items()}
        self.forwards = {name: self._forward(moe, chosen[name]) for name, moe in self.layers.items()}

    def _layer(self, variant: Variant) -> MoE:
        model, dtype = MODELS[self.shape.model], torch.float32 if self.shape.fp32 else torch.bfloat16
        with torch.device("meta"), set_default_dtype(dtype):
            moe = MoE(self.shape.moe_args(self.gpus), model.D, model.H)
        moe.router.__class__ = BalancedRandomRouter
        if variant.config is not None:
            Fp8FlowMoE.convert(moe, variant.config, fp8_shared=variant.fp8_shared and moe.shared_experts is not None)
        if self.mesh is not None:
            parallel.llama4_parallelize.apply_moe_ep_tp(in_model(moe), None, self.mesh, None, None)
        if self.first is None:
            moe.to_empty(device=DEVICE)
            with torch.no_grad():
                moe.init_weights(0.02, torch.device(DEVICE))
            self.first = moe
        for module, other in zip(moe.modules(), self.first.modules(), strict=True):
            module._parameters, module._buffers = other._parameters, other._buffers
        if variant.fused:
            moe.__class__, experts = FusedMoE, self.first.experts
            if not self.shape.fp32:
                self.w13 = cast(FusedMoE, moe).w13 = torch.cat((experts.w1, experts.w3), 1).detach().requires_grad_()
        return moe

    def _forward(self, moe: MoE, variant: Variant) -> Callable[[], Tensor]:
        if variant.config is not None and not variant.quantizes_weights:
            parts = [moe.experts, *([moe.shared_experts] if cast(Fp8FlowMoE, moe).fp8_shared else [])]
            for part, fixed in zip(cast(Any, parts), self._fixed_weights(), strict=False):
                part.cache, part.config = fixed.of(part), dataclasses.replace(variant.config, cache_weights=True)
        moe_module._run_experts_grouped_mm = _EAGER_EXPERTS  # or torchtitan compiles what is compiled
        call: Callable[[Tensor], Tensor] = moe
        if variant.compiled == "parts":
            apply_compile(in_model(moe), Compile(enable=True), ep_enabled=self.gpus > 1)
        else:
            call = compile_whole(moe)
        run_experts, fixed_ops = moe_module._run_experts_grouped_mm, {"refresh_weight": _unchanged}

        def forward() -> Tensor:
            moe_module._run_experts_grouped_mm = run_experts
            vars(ops).update(_OPS | variant.replaced | ({} if variant.quantizes_weights else fixed_ops))
            with torch.autocast(DEVICE, torch.bfloat16, enabled=self.gpus == 1):
                return call(self.x)

        return forward

    def _fixed_weights(self) -> list[FixedWeights]:
        """Weights of the routed and, if there are any, the shared experts."""
        if not self.fixed:
            experts, shared = self.first.experts, self.first.shared_experts
            self.fixed = [FixedWeights(experts.w1, experts.w2, experts.w3)]
            if shared is not None:
                self.fixed += [FixedWeights(*(w.weight.unsqueeze(0) for w in (shared.w1, shared.w2, shared.w3)))]
        return self.fixed

    def parameters(self) -> list[Tensor]:
        return [*self.first.parameters(), *([] if self.w13 is None else [self.w13])]

    def step(self, name: str) -> None:
        if (microbatches := self.chosen[name].microbatches) > 1:
            WeightCache.clear_all()
        for _ in range(microbatches):
            for leaf in (self.x, *self.parameters()):
                leaf.grad = None
            self.forwards[name]().backward(self.dout)

    def saved_bytes(self, name: str) -> int:
        """Bytes of the storages that the forward keeps for the backward, parameters and their casts left out."""
        skip = {_storage(t).data_ptr() for t in itertools.chain(self.parameters(), self.first.buffers())}
        skip = skip.union(*(fixed.storages() for fixed in self.fixed))
        kept = {}

        def pack(t: Tensor) -> Tensor:
            if _storage(t).data_ptr() not in skip:
                kept[_storage(t).data_ptr()] = _storage(t).nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            out = self.forwards[name]()
        out.backward(self.dout)
        return sum(kept.values())


def _storage(t: Tensor) -> torch.UntypedStorage:
    return (t.to_local() if isinstance(t, DTensor) else t).untyped_storage()
