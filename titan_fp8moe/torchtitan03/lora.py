"""LoRA on the routed experts of torchtitan 0.3, whose own converter adapts linears only.

    model_registry(flavor, converters=[LoRAConverter.Config(target_modules=["wo", EXPERTS])])

The experts' adapters are submodules ``lora_a`` and ``lora_b`` of ``inner_experts``, with parameters w1, w2 and w3 of
shapes (E, r, K) and (E, N, r). torchtitan's converter freezes everything else. Checkpoints hold them; torchtitan's
Hugging Face format leaves them out or ends in a KeyError, as with a linear's (docs/finetune.md).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import spmd_types as spmd
import torch
from torch import nn

from titan_fp8moe.nn.parallel import local_of
from titan_fp8moe.torchtitan03 import names as tt

EXPERTS = "inner_experts"


class AdaptedExperts(tt.GroupedExperts):
    """Routed experts that may have adapters, ``lora_a`` and ``lora_b``, which only their FP8 subclass runs.

    Raises:
        ValueError: they stay in bf16.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(tt.GroupedExperts.Config):
        lora_rank: int = 0  # 0 for no adapters
        lora_alpha: float = 1.0

    def __init__(self, config: Config):
        if type(self) is AdaptedExperts:
            raise ValueError(
                "no adapters run beside bf16 experts: convert all MoE layers, as by --override.imports "
                f"titan_fp8moe.torchtitan03.fp8_flow_moe, or leave {EXPERTS!r} out of LoRAConverter's target_modules"
            )
        super().__init__(config)


class LoRAConverter(tt.LinearLoRAConverter):
    """torchtitan's converter, which also adapts routed experts in FP8: the name ``inner_experts`` among the
    ``target_modules``, or None for all linears and experts."""

    @dataclass(kw_only=True, slots=True)
    class Config(tt.LinearLoRAConverter.Config):
        pass

    def __init__(self, config: Config, **kwargs: Any):
        super().__init__(config, **kwargs)
        self.adapts_experts = self.target_modules is None or EXPERTS in self.target_modules
        if self.target_modules is not None:
            self.target_modules.discard(EXPERTS)  # torchtitan would warn that it is no linear

    def convert(self, model_config: Any) -> Any:
        """Replaces configs inside of ``model_config``. The result takes its place.

        Raises:
            ValueError: for experts of another class, such as gpt_oss's.
        """
        if self.adapts_experts:
            for name, experts, parent, key in [*model_config.traverse(tt.GroupedExperts.Config)]:
                if experts._owner is not tt.GroupedExperts:
                    raise ValueError(
                        f"{name} is a {experts._owner.__qualname__}, beside which no adapters run; leave {EXPERTS!r} "
                        "out of LoRAConverter's target_modules"
                    )
                adapted = tt.derive(experts, AdaptedExperts.Config, lora_rank=self.rank, lora_alpha=self.alpha)
                setattr(parent, key, adapted)
        return super().convert(model_config)


def owner_of(config: Any) -> type:
    """The class that a config builds; for a linear with adapters the linear's."""
    base = config._owner.__base__
    return base if tt.lora._lora_class_cache.get(base) is config._owner else config._owner


def derive_adapted(old: Any, kind: type[Any], **deltas: Any) -> Any:
    """torchtitan's ``derive`` to a ``kind`` of config, with adapters or frozen as LoRAConverter has made ``old``."""
    if owner_of(old) is not old._owner:
        kind = tt.lora._get_lora_cls(cast(Any, kind)._owner).Config
    new = tt.derive(old, kind, **deltas)
    return tt.lora._make_frozen_config(new) if type(old) in tt.lora._frozen_config_class_cache.values() else new


class Factors(tt.Module):
    """A or B of the adapters of a layer's experts, by the weights' names in :class:`titan_fp8moe.layer.lora.Lora`."""

    @dataclass(kw_only=True, slots=True)
    class Config(tt.Module.Config):
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
        if layout != tt.expert_param_placement_sparse():  # no expert parallelism
            layout = tt.expert_param_placement_dense(tp_placement=spmd.R)
        sharding = tt.ShardingConfig(state_shardings=dict.fromkeys(dims, layout))

    def make(init: Callable, shapes: dict[str, tuple[int, int, int]]) -> Factors:
        options: dict[str, Any] = dict(param_init=dict.fromkeys(dims, init), sharding_config=sharding)
        return Factors.Config(shapes=shapes, **options).build()

    A = make(_draw, {name: (E, r, K) for name, (_, K) in dims.items()})
    return A, make(nn.init.zeros_, {name: (E, N, r) for name, (N, _) in dims.items()})


def _draw(A: torch.Tensor) -> None:
    bound = A.shape[2] ** -0.5
    nn.init.uniform_(A, -bound, bound)
