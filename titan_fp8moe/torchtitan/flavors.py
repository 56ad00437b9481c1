"""Small flavors of torchtitan's ``deepseek_v3``, and validation for ``deepseek_v3`` and ``llama4``."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

from torch import Tensor, nn
from torchtitan.components.validate import Validator
from torchtitan.models import deepseek_v3, llama4
from torchtitan.models.deepseek_v3 import deepseekv3_args
from torchtitan.protocols.train_spec import TrainSpec

from titan_fp8moe import check_room, patches
from titan_fp8moe.trainer.compat import kept_buffers

_CHECKED_ON = "torchtitan 0.2.2"


def register_flavors() -> None:
    """Add flavors ``tiny`` and ``16B_short`` to ``deepseek_v3``, and a validator to it and ``llama4``."""
    # 6M parameters with DeepSeek-V3's routing: trains on a laptop CPU. MoE dims are multiples of 128 for the FP8 tiles.
    debug = deepseekv3_args["debugmodel"]
    moe = replace(debug.moe_args, num_shared_experts=1, score_func="sigmoid", route_norm=True, route_scale=2.5)
    tiny = replace(
        debug,
        inter_dim=512,
        n_layers=3,
        n_heads=4,
        moe_args=moe,
        kv_lora_rank=128,
        qk_nope_head_dim=64,
        qk_rope_head_dim=32,
        v_head_dim=64,
        mscale=1.0,
    )
    # Four of the 16B model's layers, which fit one GPU. SDPA needs no compilation, unlike flex attention.
    base = deepseekv3_args["16B"]
    short = replace(
        base,
        moe_args=replace(base.moe_args),  # torchtitan writes config values into it: do not share it with 16B
        vocab_size=8192,
        n_layers=4,
        attn_type="sdpa",
        attn_mask_type="causal",
    )
    for name, args in (("tiny", tiny), ("16B_short", short)):
        patches.put("torchtitan.models.deepseek_v3:deepseekv3_args", name, args, checked_on=_CHECKED_ON)
    # torchtitan's spec of deepseek_v3 has no validator builder, so `validation.enable` would fail an assertion. The
    # builder in llama4's spec fails with SDPA. The functions that return the specs are replaced: a spec registered
    # under a model's name would keep users from registering their own.
    for model in (deepseek_v3, llama4):
        patches.wrap(model, "get_train_spec", _with_validator, checked_on=_CHECKED_ON)


def _with_validator(get_train_spec: Callable[[], TrainSpec]) -> Callable[[], TrainSpec]:
    return lambda: replace(get_train_spec(), build_validator_fn=MoEValidator)


class MoEValidator(Validator):
    """torchtitan's validator, corrected for models with SDPA and without effect on the router's load balancing."""

    def post_dataloading_process(
        self, input_dict: dict[str, Tensor], labels: Tensor, model_parts: list[nn.Module]
    ) -> tuple[Tensor, Tensor, dict[str, Tensor], dict[str, Any]]:
        # Unlike the trainer, torchtitan's validator passes flex attention's masks to SDPA too, which rejects them.
        if cast(Any, model_parts[0]).model_args.attn_type != "sdpa":
            return super().post_dataloading_process(input_dict, labels, model_parts)
        return input_dict.pop("input"), labels, input_dict, {}

    def validate(self, model_parts: list[nn.Module], step: int) -> None:
        # The forward of bf16 layers counts tokens per expert in eval mode too, and the next optimizer step moves
        # expert_bias by the counts.
        with kept_buffers(model_parts):
            super().validate(model_parts, step)
        check_room()
