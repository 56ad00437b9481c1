"""torchtitan's config functions for DeepSeek-V3 and Qwen3's MoE models, with the section ``fp8_flow_moe``.

``--config`` names one of them. A config function of your own returns ``with_fp8_flow(config)``. Checkpointing is chosen
last on the command line: ``... activation-checkpoint:none``.
"""

import functools
from collections.abc import Callable
from typing import Any

from torchtitan.config.override import derive
from torchtitan.models.deepseek_v3 import config_registry as _deepseek_v3
from torchtitan.models.qwen3 import config_registry as _qwen3
from torchtitan.trainer import Trainer

from titan_fp8moe.config import Fp8FlowMoEConfig
from titan_fp8moe.torchtitan03.trainer import Fp8FlowTrainer


def with_fp8_flow(config: Trainer.Config, fp8_flow_moe: Fp8FlowMoEConfig | None = None) -> Fp8FlowTrainer.Config:
    """A training config whose model trains in FP8, with all other settings of ``config``.

    Raises:
        ValueError: ``config`` is of a trainer that would lose its own settings and methods.
    """
    if isinstance(config, Fp8FlowTrainer.Config):
        return derive(config, type(config), fp8_flow_moe=fp8_flow_moe or config.fp8_flow_moe)
    if type(config) is not Trainer.Config:
        raise ValueError(
            f"with_fp8_flow would replace {type(config).__qualname__} and its trainer by Fp8FlowTrainer; derive that "
            "trainer and its Config from titan_fp8moe.torchtitan03.trainer.Fp8FlowTrainer and Fp8FlowTrainer.Config"
        )
    return derive(config, Fp8FlowTrainer.Config, fp8_flow_moe=fp8_flow_moe or Fp8FlowMoEConfig())


def _extended(function: Callable[[], Trainer.Config]) -> Callable[[], Fp8FlowTrainer.Config]:
    @functools.wraps(function)
    def config() -> Any:
        return with_fp8_flow(function())

    return config


globals().update(
    {name: _extended(function) for name, function in vars(_deepseek_v3).items() if name.startswith("deepseek_v3")}
)
# Its other models have no MoE layers.
globals().update({name: _extended(getattr(_qwen3, name)) for name in ("qwen3_moe_debug", "qwen3_30b_a3b")})
