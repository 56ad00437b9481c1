"""Configs of the runs that compare precisions under torchtitan 0.3."""

import pytest
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models.common.moe import GroupedExperts

from experiments.throughput import setting03, train
from titan_fp8moe.torchtitan03.trainer import Fp8FlowTrainer


@pytest.mark.parametrize("variant", [name for name in train.VARIANTS_03 if name != "torchao"])
def test_a_variant(variant):
    config = getattr(setting03, f"16b:3:selective:{variant}")()
    assert len(config.model_spec.model.layers) == 3 and config.compile.components == ["model", "loss"]
    assert config.debug.moe_force_load_balance and config.training.seq_len == 4096
    experts = {type(place) for _, place, *_ in config.model_spec.model.traverse(GroupedExperts.Config)}
    outside = {setting03.ExpertsOutsideFsdp.Config} if variant == "bf16_outside_fsdp" else {GroupedExperts.Config}
    assert experts == outside
    assert isinstance(config, Fp8FlowTrainer.Config) == (variant == "fp8_flow")
    assert any("fused_grouped_experts" in name for name in config.override.imports) == (
        variant in ("bf16_fused_swiglu", "bf16_strongest")
    )
    kept = config.activation_checkpoint.build().get_save_ops() - SelectiveAC.Config().build().get_save_ops()
    assert [str(op) for op in kept] == (["aten._grouped_mm.default"] if variant == "bf16_strongest" else [])


def test_checkpointing_and_models():
    assert isinstance(getattr(setting03, "16b:2:full:bf16")().activation_checkpoint, FullAC.Config)
    assert getattr(setting03, "16b:2:none:bf16")().activation_checkpoint is None
    config = getattr(setting03, "qwen3_30b:5:selective:bf16_outside_fsdp")()
    assert len(config.model_spec.model.layers) == 5 and config.training.seq_len == 4096
    with pytest.raises(AttributeError, match="bf16"):
        setting03.bf16  # noqa: B018
