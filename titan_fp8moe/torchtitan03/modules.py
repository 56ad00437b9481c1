"""MoE, RoutedExperts, GroupedExperts, FeedForward and Linear of torchtitan 0.3.0 in FP8.

Each class is built in the place of torchtitan's from a config derived from torchtitan's. Parameters, buffers,
submodules and state-dict keys stay the same. Forwards get plain tensors: FSDP has gathered the parameters of the whole
block, and torchtitan's ``local_map`` has unwrapped the inputs.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from titan_fp8moe.config import Fp8FlowMoEConfig
from titan_fp8moe.layer.lora import Adapter, Lora
from titan_fp8moe.layer.run import run_layer
from titan_fp8moe.layer.weights import Biases
from titan_fp8moe.nn.linear import Fp8FlowLinear
from titan_fp8moe.nn.modules import add_cache
from titan_fp8moe.nn.parallel import local_of
from titan_fp8moe.torchtitan03 import names as tt
from titan_fp8moe.torchtitan03.lora import AdaptedExperts, make_factors
from titan_fp8moe.trainer.experts import Fp8FFN, TitanExperts, gpt_oss_expert, part_of_bias


class Fp8FlowGroupedExperts(TitanExperts, AdaptedExperts):
    """The experts of most models: parameters, and those of any adapters, which :class:`Fp8FlowRoutedExperts` reads and
    configures. Their own forward, torchtitan's, is not called."""

    @dataclass(kw_only=True, slots=True)
    class Config(AdaptedExperts.Config):
        pass

    matrix_names = "w1_EFD", "w2_EDF", "w3_EFD"
    lora_scale: float | None = None

    def __init__(self, config: Config):
        super().__init__(config)
        if config.lora_rank:
            self.lora_a, self.lora_b = make_factors(config)
            self.lora_scale = config.lora_alpha / config.lora_rank

    def lora(self) -> Lora | None:
        if (scale := self.lora_scale) is None:
            return None
        return Lora(**{name: Adapter(self.lora_a[name], self.lora_b[name], scale) for name in Lora._fields})


class Fp8FlowGptOssExperts(TitanExperts, tt.GptOssGroupedExperts):
    """gpt-oss's, with biases and with gate and up interleaved in one weight."""

    @dataclass(kw_only=True, slots=True)
    class Config(tt.GptOssGroupedExperts.Config):
        pass

    matrix_names = "mlp1_weight_EGD", "mlp2_weight_EDF"

    def __init__(self, config: Config):
        super().__init__(config)
        self.expert = gpt_oss_expert(config.swiglu_limit)

    def biases(self) -> Biases[Tensor]:
        b1, b2 = local_of(self.mlp1_bias_EG), local_of(self.mlp2_bias_ED)
        mesh = getattr(self.mlp2_bias_ED, "device_mesh", None)
        if mesh is not None and "tp" in (names := mesh.mesh_dim_names):
            b2 = part_of_bias(b2, mesh.size(names.index("tp")))
        return Biases(b1, b2)


class Fp8FlowDispatcher(tt.Configurable):
    """Holds the mesh in the place of a token dispatcher. It is none of torchtitan's, which refuses CUDA graphs with
    dispatchers that sync the host."""

    @dataclass(kw_only=True, slots=True)
    class Config(tt.Configurable.Config):
        pass

    def __init__(self, config: Config):
        self.ep_mesh: DeviceMesh | None = None

    def wire_meshes(self, *, ep_mesh: DeviceMesh | None) -> None:
        self.ep_mesh = ep_mesh


def _check_parts(owner: Any, **kinds: type) -> None:
    """Raises ValueError if an override has replaced a part since the conversion: it would not run, or run in bf16."""
    for name, kind in kinds.items():
        part = getattr(owner, name)
        if not isinstance(part, kind) or (kind is tt.Linear and type(part) is not tt.Linear):
            raise ValueError(
                f"{type(part).__qualname__} has replaced {name} of a {type(owner).__qualname__} after fp8_flow_moe had "
                "converted the model; apply that override before, or with fp8_flow_moe in one override.imports"
            )


class Fp8FlowRoutedExperts(tt.RoutedExperts):
    """Dispatch, FFN and combine of the routed experts."""

    @dataclass(kw_only=True, slots=True)
    class Config(tt.RoutedExperts.Config):
        fp8_flow: Fp8FlowMoEConfig = field(default_factory=Fp8FlowMoEConfig)
        in_fsdp: bool = True

    nan_flags: Tensor | None = None

    def __init__(self, config: Config):
        super().__init__(config)
        _check_parts(self, inner_experts=TitanExperts, token_dispatcher=Fp8FlowDispatcher)
        self.config, experts = config.fp8_flow, cast(TitanExperts, self.inner_experts)
        experts.fp8_all_gather, experts.in_fsdp = config.fp8_flow.fp8_all_gather, config.in_fsdp
        add_cache(self)

    def forward(
        self,
        x_BLD: Tensor,
        topk_scores_BLK: Tensor,
        topk_expert_ids_BLK: Tensor,
        num_local_tokens_per_expert_E: Tensor,
        *,  # torchtitan's sharding config knows the positional arguments
        shared: "Fp8FlowFeedForward | None" = None,
    ) -> Tensor:
        """(B, L, D) -> (B, L, D): each token's experts, plus the result of the ``shared`` experts.

        The counts are not used, since the experts sort routed pairs themselves."""
        D, K = x_BLD.shape[-1], topk_scores_BLK.shape[-1]
        given = cast(TitanExperts, self.inner_experts).for_layer(self, self.token_dispatcher.ep_mesh)
        ffn = None if shared is None else shared.shared(shared.scores(x_BLD))
        scores_TK = topk_scores_BLK.reshape(-1, K).float()  # fp32 but on CPUs, whose autocast lacks it
        x_TD, ids_TK = x_BLD.reshape(-1, D), topk_expert_ids_BLK.reshape(-1, K)
        return run_layer(x_TD, ids_TK, scores_TK, given, ffn).view(x_BLD.shape)

    def extra_repr(self) -> str:
        return self.config.describe()


class Fp8FlowFeedForward(Fp8FFN, tt.FeedForward):
    """A dense FFN, or the shared experts of a MoE layer, which reads its weights."""

    @dataclass(kw_only=True, slots=True)
    class Config(tt.FeedForward.Config):
        fp8_flow: Fp8FlowMoEConfig = field(default_factory=Fp8FlowMoEConfig)

    def __init__(self, config: Config):
        tt.FeedForward.__init__(self, config)
        _check_parts(self, w1=tt.Linear, w2=tt.Linear, w3=tt.Linear)
        self.config = config.fp8_flow
        add_cache(self)

    def parallelize(self, parallel_dims: Any) -> None:
        """torchtitan's. Under tensor parallelism it places this module's results, partial sums, as it would w2's, whose
        forward is not called. The input's gradients are partial sums too."""
        if parallel_dims.tp > 1:
            down = cast(Any, self.w2)._sharding_config
            self._sharding_config = replace(
                cast(Any, self)._sharding_config,
                out_src_shardings=down.out_src_shardings,
                out_dst_shardings=down.out_dst_shardings,
                local_map=tt.LocalMapConfig(in_grad_placements=(down.out_src_shardings,)),
            )
        super().parallelize(parallel_dims)

    def forward(self, x: Tensor) -> Tensor:
        """(B, L, D) -> (B, L, D), under tensor parallelism a partial sum."""
        return self.run(x)

    def scores(self, x: Tensor) -> Tensor | None:
        """By which the output of each token is multiplied, (T,) fp32."""
        return None


class Fp8FlowGatedFeedForward(Fp8FlowFeedForward):
    """torchtitan's SigmoidGatedFeedForward, Qwen3.5's shared experts: the sigmoid is the score of their rows."""

    @dataclass(kw_only=True, slots=True)
    class Config(Fp8FlowFeedForward.Config):
        gate: tt.Linear.Config

    def __init__(self, config: Config):
        super().__init__(config)
        self.gate = config.gate.build()

    def forward(self, x: Tensor) -> Tensor:
        """(B, L, D) -> (B, L, D), where the routed experts are in bf16 or run apart."""
        return torch.sigmoid(self.gate(x)) * super().forward(x)

    def scores(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.gate(x).float()).flatten()


class Fp8FlowLinear03(Fp8FlowLinear, tt.Linear):
    """A linear of ``linear_fqns``."""

    @dataclass(kw_only=True, slots=True)
    class Config(tt.Linear.Config):
        fp8_flow: Fp8FlowMoEConfig = field(default_factory=Fp8FlowMoEConfig)

    def __init__(self, config: Config):
        tt.Linear.__init__(self, config)
        self.config = config.fp8_flow
        add_cache(self)


class Fp8FlowMoE(tt.MoE):
    """torchtitan's MoE layer around :class:`Fp8FlowRoutedExperts`: same router and load balancing.

    Attributes:
        fp8_shared: whether the shared experts join the FP8 data flow. Else they run as a module of their own.
        parallel_dims: the job's, once it is parallelized.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(tt.MoE.Config):
        fp8_shared: bool = False

    def __init__(self, config: Config):
        super().__init__(config)
        _check_parts(self, routed_experts=Fp8FlowRoutedExperts)
        if config.fp8_shared:
            _check_parts(self, shared_experts=Fp8FlowFeedForward)
        self.fp8_shared = config.fp8_shared

    def parallelize(self, parallel_dims: Any) -> None:
        super().parallelize(parallel_dims)
        self.parallel_dims = parallel_dims

    @property
    def breaks_graphs(self) -> bool:
        """Whether dispatch reads sizes on the host."""
        routed = self.routed_experts
        return routed.token_dispatcher.ep_mesh is not None and routed.config.backend.syncs_host

    def route(self, x_BLD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The router's choice for each token, scores and ids (B, L, K), and how many tokens chose each expert (E,)."""
        scores_BLK, ids_BLK, scores_BLE = self.router(x_BLD, self.expert_bias_E)
        chosen_BLE = torch.zeros_like(scores_BLE, dtype=torch.bool).scatter_(-1, ids_BLK, True)
        counts_E = chosen_BLE.sum(dim=(0, 1))
        if self.training:
            with torch.no_grad():
                self.tokens_per_expert_E.add_(counts_E)
        return scores_BLK, ids_BLK, counts_E

    def forward(self, x_BLD: Tensor, *, routing: Sequence[Tensor] | None = None) -> Tensor:
        """(B, L, D) -> (B, L, D). ``routing`` is :meth:`route`'s result, if a caller has it."""
        routed = functools.partial(self.routed_experts, x_BLD, *(routing or self.route(x_BLD)))
        if self.shared_experts is None:
            return routed()
        if self.fp8_shared:
            return routed(shared=self.shared_experts)
        return routed() + self.shared_experts(x_BLD)
