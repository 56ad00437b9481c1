"""Jobs of torchtitan for tests: a config, the mesh's dimensions and a converted model, on a CPU."""

import copy
import dataclasses

import pytest
import torch
from torch import nn
from torchtitan.config import ConfigManager, JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.models import attention
from torchtitan.protocols.model_converter import build_model_converters
from torchtitan.protocols.train_spec import get_train_spec

import titan_fp8moe.torchtitan  # noqa: F401  registers the flavor `tiny`
from titan_fp8moe.ops import backend
from titan_fp8moe.torchtitan.cpu import _dense_attention, _histc_with_integers
from titan_fp8moe.trainer.cpu import create_block_mask_on_cpu

CUSTOM_MODULE = "--job.custom_config_module=titan_fp8moe.torchtitan"


@pytest.fixture(autouse=True)
def cpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same results on a machine with GPUs, for every test of a file that imports this.

    Each test leaves the choice of kernels as it was.
    """
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    # With a GPU the import does not patch these.
    monkeypatch.setattr(torch, "histc", _histc_with_integers(torch.histc))
    monkeypatch.setattr(attention.FlexAttentionWrapper, "_compiled_flex_attn", staticmethod(_dense_attention))
    monkeypatch.setattr(attention, "_compiled_create_block_mask", create_block_mask_on_cpu)
    monkeypatch.setattr(backend, "_emulating", False)


def make_config(*overrides: str, model: str = "deepseek_v3", flavor: str = "tiny") -> JobConfig:
    args = [CUSTOM_MODULE, f"--model.name={model}", f"--model.flavor={flavor}", "--model.converters=fp8_flow_moe"]
    return ConfigManager().parse_args([*args, *overrides])


def make_dims(dp_shard: int = 1, tp: int = 1, ep: int = 1, etp: int = 1, cp: int = 1, pp: int = 1) -> ParallelDims:
    world_size = dp_shard * tp * cp * pp
    return ParallelDims(dp_replicate=1, dp_shard=dp_shard, cp=cp, tp=tp, pp=pp, ep=ep, etp=etp, world_size=world_size)


def make_model(config: JobConfig, device: str = "meta", **changes) -> nn.Module:
    """The model as torchtitan's trainer builds it, with ``changes`` to the flavor."""
    spec = get_train_spec(config.model.name)
    args = dataclasses.replace(copy.deepcopy(spec.model_args[config.model.flavor]), **changes)
    args.update_from_config(config)
    with torch.device(device):
        return spec.model_cls(args)


def convert(config: JobConfig, model: nn.Module, dims: ParallelDims | None = None) -> nn.Module:
    build_model_converters(config, dims or make_dims()).convert(model)
    return model
