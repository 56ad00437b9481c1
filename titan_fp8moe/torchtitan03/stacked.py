"""The routed experts and FFNs of torchtitan's main, which no release has: ready for one, and refused until then.

At commit 00a4c147 gate and up are one parameter, stacked and not interleaved, and tokens have one dim:

| torchtitan 0.3.0 | main |
|---|---|
| ``RoutedExperts.inner_experts``, ``GroupedExperts`` | none: ``RoutedExperts`` holds the parameters |
| ``w1_EFD``, ``w3_EFD``; ``w2_EDF`` | ``w13.weight`` (E, 2, F, D); ``w2.weight`` (E, D, F) |
| ``num_experts``, ``dim``, ``hidden_dim`` | ``w13.group_size``, ``w13.in_features``, ``w13.out_features`` |
| ``FeedForward.w1.weight``, ``w3.weight`` | ``w13.weight`` (2, F, D) |
| SwiGLU | ``activation_fn`` |
| ``x_BLD``, scores and ids (B, L, K) | ``x_TD``, (T, K) |

A converted layer differs in no more than the two mixins here. Tests run them on stand-ins. The router, the ``MoE``
around the experts and where its expert-parallel mesh comes from are main's, and wait for the release.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from titan_fp8moe.layer.weights import ExpertWeights, are_frozen
from titan_fp8moe.nn.modules import Fp8FFN, add_cache
from titan_fp8moe.nn.parallel import local_of
from titan_fp8moe.spec import ExpertSpec
from titan_fp8moe.torchtitan03.modules import Fp8FlowFeedForward, run_experts
from titan_fp8moe.trainer.experts import TitanExperts

_ACTIVATIONS = {"SwiGLU": ExpertSpec()}


class StackedExperts(TitanExperts):
    """Mixin before ``RoutedExperts``. Its config has ``fp8_flow`` and ``placement``."""

    matrix_names = "w13.weight", "w2.weight"
    nan_flags: Tensor | None = None
    w13: Any
    w2: Any
    activation_fn: Any
    token_dispatcher: Any

    def __init__(self, config: Any):
        super().__init__(config)
        self.config, self.placement = config.fp8_flow, config.placement
        if self.config.fp8_all_gather:
            raise ValueError("fp8_flow_moe.fp8_all_gather does not know gate and up in one parameter; leave it out")
        if (name := type(self.activation_fn).__name__) not in _ACTIVATIONS:
            raise ValueError(f"fp8_flow_moe does not know the activation {name} of routed experts; use filter_fqns")
        self.expert = _ACTIVATIONS[name]
        add_cache(self)

    def matrices(self) -> ExpertWeights[nn.Parameter]:
        return ExpertWeights(self.w13.weight, self.w2.weight)

    def local_weights(self, *params: nn.Parameter | None) -> list[Any]:
        # Views come last: FSDP gathers parameters, and only they know whether they train. A shard has both gate and up.
        return [w if w is None else w.flatten(1, -2) for w in super().local_weights(*params)]

    def forward(
        self,
        x_TD: Tensor,
        topk_scores_TK: Tensor,
        topk_expert_ids_TK: Tensor,
        num_local_tokens_per_expert_E: Tensor,
        *,
        meanwhile: Callable[[], Tensor] | None = None,
        shared: Fp8FlowFeedForward | None = None,
    ) -> Tensor:
        """See :meth:`titan_fp8moe.torchtitan03.modules.Fp8FlowRoutedExperts.forward`."""
        return run_experts(self, self, x_TD, topk_scores_TK, topk_expert_ids_TK, meanwhile, shared)


class StackedFeedForward(Fp8FFN):
    """Mixin before ``FeedForward``."""

    w13: Any

    @property
    def frozen(self) -> bool:
        return are_frozen((self.w13.weight, self.w2.weight))

    def matrices(self) -> ExpertWeights[Tensor]:
        gate, up = local_of(self.w13.weight).unbind()
        return ExpertWeights(gate, local_of(self.w2.weight), up)

    def fp8_matrices(self) -> list[str]:
        return ["w13.weight", "w2.weight"]
