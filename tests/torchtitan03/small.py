"""torchtitan's own config of the 16B model with two layers of its debug model: a ``--module``."""

from torchtitan.models import deepseek_v3
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.models.deepseek_v3.config_registry import deepseek_v3_16b as _deepseek_v3_16b
from torchtitan.trainer import Trainer

import titan_fp8moe.torchtitan03  # noqa: F401  uses the CPU before a trainer looks for a GPU


def deepseek_v3_16b() -> Trainer.Config:
    config, spec = _deepseek_v3_16b(), deepseek_v3.model_registry("debugmodel", attn_backend="flex")
    del spec.model.layers[2:]
    config.checkpoint.last_save_model_only = False  # so that a run can go on
    config.model_spec, config.loss.loss_fn.global_vocab_size = spec, decoder_vocab_size(spec)
    return config
