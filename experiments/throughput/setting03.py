"""The module of torchtitan 0.3 that train.py names. A config is MODEL:LAYERS:VARIANT.

``16b:6:fp8_flow`` has the first six layers of the 16B model. All have selective checkpointing. References:

* ``bf16`` is torchtitan's.
* ``bf16_outside_fsdp`` keeps experts outside of FSDP over one rank, as the FP8 adapter does, so that both copy alike.
* ``bf16_strongest`` has torchtitan's overrides ``fused_swiglu`` and ``fused_grouped_experts`` outside of FSDP, and
  selective checkpointing keeps its grouped GEMMs.
* ``torchao`` has torchtitan's rowwise Float8 experts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torchtitan.components.quantization.float8 import Float8GroupedExpertsConverter
from torchtitan.config import CompileConfig
from torchtitan.config.override import derive
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.models.deepseek_v3 import config_registry as deepseek_v3
from torchtitan.models.qwen3 import config_registry as qwen3

from experiments.throughput.train import wait_for_turn
from titan_fp8moe.torchtitan03 import parallel
from titan_fp8moe.torchtitan03.config_registry import with_fp8_flow

MODELS: dict[str, Callable[[], Any]] = {"16b": deepseek_v3.deepseek_v3_16b, "qwen3_30b": qwen3.qwen3_30b_a3b}


def _outside_fsdp(config: Any) -> Any:
    """Lets torchtitan's experts leave FSDP after it has sharded them."""
    parallel.install()
    GroupedExperts.in_fsdp = False
    return config


class KeepsGroupedGemms(SelectiveAC):
    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        pass

    def get_save_ops(self) -> set:
        return super().get_save_ops() | {torch.ops.aten._grouped_mm.default}


def _strongest(config: Any) -> Any:
    config.activation_checkpoint = derive(config.activation_checkpoint, KeepsGroupedGemms.Config)
    deepseek_v3.enable_fused_swiglu(config)
    return _outside_fsdp(config)


def _torchao(config: Any) -> Any:
    model = config.model_spec.model
    config.model_spec.model = Float8GroupedExpertsConverter.Config(model_compile_enabled=True).build().convert(model)
    return config


VARIANTS: dict[str, Callable[[Any], Any]] = {
    "bf16": lambda config: config,
    "bf16_outside_fsdp": _outside_fsdp,
    "bf16_strongest": _strongest,
    "torchao": _torchao,
    "fp8_flow": with_fp8_flow,
}


def __getattr__(name: str) -> Callable[[], Any]:
    """The config function of a name."""
    if name.count(":") != 2:
        raise AttributeError(name)
    model, layers, variant = name.split(":")

    def config() -> Any:
        c = MODELS[model]()
        del c.model_spec.model.layers[int(layers) :]
        c.activation_checkpoint = SelectiveAC.Config()
        c.compile = CompileConfig(enable=True, components=["model", "loss"])
        c.dataloader.dataset, c.dataloader.dataset_path = "c4_test", "outputs/corpus/train"
        c.dataloader.num_workers, c.dataloader.prefetch_factor = 1, 8  # tokenization off the training thread
        c.dataloader.persistent_workers = c.dataloader.pin_memory = True
        c.hf_assets_path = "outputs/corpus/tokenizer"
        c.training.seq_len = 4096
        c.lr_scheduler.warmup_steps = 20
        c.debug.moe_force_load_balance = True
        c.metrics.disable_color_printing = True
        return VARIANTS[variant](c)

    return config


wait_for_turn()
