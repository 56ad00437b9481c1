"""torchtitan's config functions for models with MoE layers, with the section ``fp8_flow_moe``.

``--config`` names one of them. They import torchtitan's models when they are called, since Kimi-K2.7 and Qwen3.5 need
torchvision, and Qwen3.5 ``fla`` too. A config function of your own returns ``with_fp8_flow(config)``.
Checkpointing is chosen last on the command line: ``... activation-checkpoint:none``. In these configs, unlike in your
own, ranks on a CPU that is slow in bf16 compute in float32.
"""

import functools
from dataclasses import replace as _replace
from typing import Any

from titan_fp8moe.config import Fp8FlowMoEConfig
from titan_fp8moe.torchtitan03 import names as tt
from titan_fp8moe.torchtitan03.converter import Fp8FlowConverter
from titan_fp8moe.torchtitan03.trainer import Fp8FlowTrainer
from titan_fp8moe.trainer import cpu


def with_fp8_flow(config: tt.Trainer.Config, fp8_flow_moe: Fp8FlowMoEConfig | None = None) -> tt.Trainer.Config:
    """A training config whose model trains in FP8, with all other settings of ``config``.

    torchtitan's own ``Trainer.Config`` gets the section ``fp8_flow_moe``, whose settings are options of the command
    line. A config of another trainer keeps its class, and its model is converted with these settings.
    """
    if isinstance(config, Fp8FlowTrainer.Config):
        return _replace(config, fp8_flow_moe=fp8_flow_moe or config.fp8_flow_moe)
    settings = fp8_flow_moe or Fp8FlowMoEConfig()
    if type(config) is tt.Trainer.Config:
        return tt.derive(config, Fp8FlowTrainer.Config, fp8_flow_moe=settings)
    converter = Fp8FlowConverter.Config(**vars(settings)).build()
    config.model_spec = _replace(config.model_spec, model=converter.convert(config.model_spec.model))
    return config


def _extended(config: tt.Trainer.Config) -> Any:
    config = with_fp8_flow(config)
    config.training.mixed_precision_param = cpu.compute_dtype()
    return config


def deepseek_v3_16b_short() -> Any:
    """Four of the 16B model's layers and a vocabulary of 8,192, which fit one GPU. The quickstart trains it."""
    config: Any = tt.config_registry("deepseek_v3").deepseek_v3_16b()
    model = config.model_spec.model
    del model.layers[4:]
    model.vocab_size = model.tok_embeddings.num_embeddings = model.lm_head.out_features = 8192
    config.loss.loss_fn.global_vocab_size = 8192
    config.optimizer = tt.optimizer.default_adamw(lr=3e-4)
    config.lr_scheduler = tt.optimizer.LRSchedulersContainer.Config(
        warmup_steps=20, decay_ratio=0.8, decay_type="cosine", min_lr_factor=0.1
    )
    config.parallelism.expert_parallel_degree = 1
    config.activation_checkpoint = None
    config.compile = tt.CompileConfig(enable=True, components=["model", "loss"])
    return _extended(config)


def _of_torchtitan(model: str, name: str) -> Fp8FlowTrainer.Config:
    return _extended(getattr(tt.config_registry(model), name)())


for _model, _names in {
    "deepseek_v3": ("deepseek_v3_debugmodel", "deepseek_v3_debugmodel_mtp", "deepseek_v3_16b", "deepseek_v3_671b"),
    "gpt_oss": ("gpt_oss_debugmodel", "gpt_oss_debugmodel_flex", "gpt_oss_20b", "gpt_oss_120b"),
    "kimi_k2_7": ("kimi_k2_5_debugmodel", "moonlight_16b_a3b", "kimi_vl_a3b", "kimi_k2_5"),
    "qwen3": ("qwen3_moe_debug", "qwen3_30b_a3b"),
    "qwen3_5": ("qwen35_debugmodel_moe", "qwen35_35b_a3b", "qwen35_122b_a10b", "qwen35_397b_a17b"),
}.items():
    globals().update({name: functools.partial(_of_torchtitan, _model, name) for name in _names})
