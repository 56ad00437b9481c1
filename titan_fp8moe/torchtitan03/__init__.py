"""torchtitan 0.3.0 adapter: ``--override.imports 'titan_fp8moe.torchtitan03.fp8_flow_moe={"save_h": "fp8"}'``.

:func:`fp8_flow_moe` is an override for DeepSeek-V3, gpt-oss, Kimi-K2.7, and the MoE models of Qwen3 and Qwen3.5.
:mod:`~titan_fp8moe.torchtitan03.config_registry` has the same models with the settings as options of the command line.
:class:`~titan_fp8moe.torchtitan03.converter.Fp8FlowConverter` serves trainers that apply no overrides. All of them
claim MoE layers, and :mod:`~titan_fp8moe.torchtitan03.conversion` converts what is claimed. Importing this package
changes torchtitan on machines without a GPU only, where it trains on the CPU.
"""

from typing import Any

import torch

from titan_fp8moe.versions import installed

if not (RELEASE := installed("torchtitan") or "none").startswith("0.3."):
    raise ImportError(
        f"titan_fp8moe.torchtitan03 is for torchtitan 0.3, but {RELEASE} is installed; install '.[torchtitan03]', or "
        "use titan_fp8moe.torchtitan with 0.2.2"
    )

from titan_fp8moe.config import Fp8FlowMoEConfig
from titan_fp8moe.torchtitan03 import conversion
from titan_fp8moe.torchtitan03.names import MoE, override

if not torch.cuda.is_available():
    from titan_fp8moe.torchtitan03.cpu import enable_cpu_training

    enable_cpu_training()


@override(target=MoE.Config, description="MoE layers, FFNs and linears in FP8")
def fp8_flow_moe(layer: MoE.Config, **settings: Any) -> MoE.Config:
    """Claims a MoE layer. ``settings`` are those of :class:`~titan_fp8moe.config.Fp8FlowMoEConfig`.

    Dense FFNs and linears follow by their names, once all layers are claimed.
    """
    return conversion.claim(layer, Fp8FlowMoEConfig(**settings))
