"""torchtitan 0.3.0 adapter: ``--module titan_fp8moe.torchtitan03 --config deepseek_v3_16b --fp8_flow_moe.save_h fp8``.

:mod:`~titan_fp8moe.torchtitan03.config_registry` has torchtitan's config functions for DeepSeek-V3,
gpt-oss, Kimi-K2.7, and the MoE models of Qwen3 and Qwen3.5. Their trainer is
:class:`~titan_fp8moe.torchtitan03.trainer.Fp8FlowTrainer`. It converts the model's config before torchtitan builds the
model. Importing this package changes torchtitan on machines without a GPU only, where it trains on the CPU.
"""

import torch

from titan_fp8moe.versions import installed

if (RELEASE := installed("torchtitan")) is None:
    raise ImportError("titan_fp8moe.torchtitan03 needs torchtitan 0.3: pip install -e '.[torchtitan03]' in a checkout")
if not RELEASE.startswith("0.3."):
    raise ImportError(
        f"titan_fp8moe.torchtitan03 is for torchtitan 0.3, but {RELEASE} is installed; install '.[torchtitan03]', or "
        "use titan_fp8moe.torchtitan with 0.2.2"
    )

if not torch.cuda.is_available():
    from titan_fp8moe.torchtitan03.cpu import enable_cpu_training

    enable_cpu_training()
