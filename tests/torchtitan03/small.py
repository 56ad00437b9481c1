"""torchtitan's own configs with its debug models of a few layers: a ``--module``. ``NAME_section`` has fp8_flow_moe."""

import functools
from collections.abc import Callable

from torchtitan.models import deepseek_v3, gpt_oss, qwen3
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.models.deepseek_v3.config_registry import deepseek_v3_16b as _deepseek_v3_16b
from torchtitan.models.gpt_oss.config_registry import gpt_oss_20b as _gpt_oss_20b
from torchtitan.models.qwen3.config_registry import qwen3_30b_a3b as _qwen3_30b_a3b
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.trainer import Trainer

from titan_fp8moe.torchtitan03.config_registry import with_fp8_flow  # uses the CPU before a trainer looks for a GPU


def _small(config: Trainer.Config, spec: ModelSpec) -> Trainer.Config:
    del spec.model.layers[2:]
    config.checkpoint.last_save_model_only = False  # so that a run can go on
    config.model_spec, config.loss.loss_fn.global_vocab_size = spec, decoder_vocab_size(spec)
    return config


def deepseek_v3_16b() -> Trainer.Config:
    return _small(_deepseek_v3_16b(), deepseek_v3.model_registry("debugmodel", attn_backend="flex"))


def qwen3_30b_a3b() -> Trainer.Config:
    return _small(_qwen3_30b_a3b(), qwen3.model_registry("debugmodel_moe"))


def gpt_oss_20b() -> Trainer.Config:
    return _small(_gpt_oss_20b(), gpt_oss.model_registry("debugmodel", attn_backend="flex"))


def _section(function: Callable[[], Trainer.Config]) -> Trainer.Config:
    return with_fp8_flow(function())


CONFIGS = deepseek_v3_16b, qwen3_30b_a3b, gpt_oss_20b
globals().update({f"{function.__name__}_section": functools.partial(_section, function) for function in CONFIGS})
