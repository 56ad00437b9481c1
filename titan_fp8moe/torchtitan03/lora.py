"""LoRA on the routed experts of torchtitan 0.3, whose own converter adapts linears only.

    model_registry(flavor, converters=[Fp8FlowConverter.Config(), LoRAConverter.Config(target_modules=["wo", EXPERTS])])

The experts' adapters are submodules ``lora_a`` and ``lora_b`` of ``inner_experts``, with parameters w1, w2 and w3 of
shapes (E, r, K) and (E, N, r). torchtitan's converter freezes everything else. Checkpoints hold them; torchtitan's
Hugging Face format leaves them out, as it does a linear's.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import spmd_types as spmd
import torch
from torch import nn
from torchtitan.components.lora import LoRAConverter as LinearLoRAConverter
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.models.common.moe_sharding import expert_param_placement_dense, expert_param_placement_sparse
from torchtitan.protocols.module import Module
from torchtitan.protocols.sharding import ShardingConfig

from titan_fp8moe.layer.lora import Adapter, Lora
from titan_fp8moe.nn.parallel import local_of

EXPERTS = "inner_experts"


class LoRAConverter(LinearLoRAConverter):
    """torchtitan's converter, which also adapts routed experts in FP8: the name ``inner_experts`` among the
    ``target_modules``, or None for all linears and experts."""

    @dataclass(kw_only=True, slots=True)
    class Config(LinearLoRAConverter.Config):
        pass

    def __init__(self, config: Config, **kwargs: Any):
        super().__init__(config, **kwargs)
        self.adapts_experts = self.target_modules is None or EXPERTS in self.target_modules
        if self.target_modules is not None:
            self.target_modules.discard(EXPERTS)  # torchtitan would warn that it is no linear

    def convert(self, model_config: Any) -> Any:
        """Replaces configs inside of ``model_config``. The result takes its place.

        Raises:
            ValueError: for experts that are not in FP8.
        """
        if self.adapts_experts:
            for name, experts, *_ in model_config.traverse(GroupedExperts.Config):
                if not hasattr(experts, "lora_rank"):
                    raise ValueError(
                        f"{name} has bf16 experts or gpt_oss's, beside which no adapters run; put Fp8FlowConverter "
                        f"before LoRAConverter and let it convert them, or leave {EXPERTS!r} out of target_modules"
                    )
                experts.lora_rank, experts.lora_alpha = self.rank, self.alpha
        return super().convert(model_config)


class Factors(Module):
    """A or B of the adapters of a layer's experts, by the weights' names in :class:`Lora`."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        shapes: dict[str, tuple[int, int, int]]

    def __init__(self, config: Config):
        super().__init__()
        for name, shape in config.shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape)))

    def __getitem__(self, name: str) -> torch.Tensor:
        """This rank's."""
        return local_of(getattr(self, name))


def make_factors(experts: Any) -> tuple[Factors, Factors]:
    """A and B for a config of ``Fp8FlowGroupedExperts``. A is drawn as torchtitan draws a linear's, and B is zero."""
    E, D, H, r = experts.num_experts, experts.dim, experts.hidden_dim, experts.lora_rank
    dims = dict(w1=(H, D), w2=(D, H), w3=(H, D))
    sharding = None
    if experts.sharding_config is not None:
        layout = experts.sharding_config.state_shardings["w1_EFD"]
        if layout != expert_param_placement_sparse():  # no expert parallelism
            layout = expert_param_placement_dense(tp_placement=spmd.R)
        sharding = ShardingConfig(state_shardings=dict.fromkeys(dims, layout))

    def make(init: Callable, shapes: dict[str, tuple[int, int, int]]) -> Factors:
        options: dict[str, Any] = dict(param_init=dict.fromkeys(dims, init), sharding_config=sharding)
        return Factors.Config(shapes=shapes, **options).build()

    A = make(_draw, {name: (E, r, K) for name, (_, K) in dims.items()})
    return A, make(nn.init.zeros_, {name: (E, N, r) for name, (N, _) in dims.items()})


def _draw(A: torch.Tensor) -> None:
    bound = A.shape[2] ** -0.5
    nn.init.uniform_(A, -bound, bound)


def joined(A: Factors, B: Factors, scale: float) -> Lora:
    """The adapters of these factors."""
    return Lora(**{name: Adapter(A[name], B[name], scale) for name in Lora._fields})
