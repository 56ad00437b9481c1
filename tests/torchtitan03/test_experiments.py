"""Configs of the runs that compare precisions under torchtitan 0.3."""

import pytest
import torch
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models.common.moe import GroupedExperts
from torchtitan.overrides.fused_swiglu import FusedGroupedExperts

from experiments.throughput import setting03, train
from titan_fp8moe.torchtitan03 import parallel
from titan_fp8moe.torchtitan03.trainer import Fp8FlowTrainer
from titan_fp8moe.trainer.experts import Placement


@pytest.mark.parametrize("variant", [name for name in train.VARIANTS_03 if name != "torchao"])
def test_a_variant(variant, monkeypatch):
    monkeypatch.setattr(GroupedExperts, "placement", None, raising=False)  # which a variant may set
    config = getattr(setting03, f"16b:3:selective:{variant}")()
    assert len(config.model_spec.model.layers) == 3 and config.compile.components == ["model", "loss"]
    assert config.debug.moe_force_load_balance and config.training.seq_len == 4096
    outside = Placement(in_fsdp=False) if variant in ("bf16_outside_fsdp", "bf16_strongest") else None
    assert GroupedExperts.placement == outside and FusedGroupedExperts.placement == outside
    assert isinstance(config, Fp8FlowTrainer.Config) == (variant == "fp8_flow")
    assert any("fused_grouped_experts" in name for name in config.override.imports) == (
        variant in ("bf16_fused_swiglu", "bf16_strongest")
    )
    kept = config.activation_checkpoint.build().get_save_ops() - SelectiveAC.Config().build().get_save_ops()
    assert [str(op) for op in kept] == (["aten._grouped_mm.default"] if variant == "bf16_strongest" else [])


def test_experts_leave_fsdp(monkeypatch):
    """torchtitan's own, where the variant says so, as ours do."""
    monkeypatch.setattr(GroupedExperts, "placement", None, raising=False)
    config = getattr(setting03, "16b:3:selective:bf16_outside_fsdp")()
    with torch.device("meta"):
        block = config.model_spec.model.build().layers["2"]
    left: list[int] = []
    monkeypatch.setattr(parallel, "torch_fully_shard", lambda *_, **__: None)
    monkeypatch.setattr(parallel, "leave_fsdp", lambda part, params: left.extend(map(id, params)))
    parallel.fully_shard(block)
    (experts,) = (module for module in block.modules() if isinstance(module, GroupedExperts))
    assert left == [id(param) for param in experts.parameters()]


def test_checkpointing_and_models(monkeypatch):
    monkeypatch.setattr(GroupedExperts, "placement", None, raising=False)
    assert isinstance(getattr(setting03, "16b:2:full:bf16")().activation_checkpoint, FullAC.Config)
    assert getattr(setting03, "16b:2:none:bf16")().activation_checkpoint is None
    config = getattr(setting03, "qwen3_30b:5:selective:bf16_outside_fsdp")()
    assert len(config.model_spec.model.layers) == 5 and config.training.seq_len == 4096
    with pytest.raises(AttributeError, match="bf16"):
        setting03.bf16  # noqa: B018
