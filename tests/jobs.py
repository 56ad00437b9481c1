"""Jobs of torchtitan 0.2.2 for tests: a config, the mesh's dimensions and a converted model, on a CPU.

``tests/torchtitan03/jobs.py`` has the names below ``ADAPTER`` for torchtitan 0.3, so that both pass the same tests.
"""

import copy
import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchtitan.config import ConfigManager, JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.models import attention
from torchtitan.models.gpt_oss.model.moe import swiglu  # noqa: F401
from torchtitan.models.moe.moe import MoE, MoEArgs
from torchtitan.protocols.model_converter import build_model_converters
from torchtitan.protocols.train_spec import get_train_spec

from titan_fp8moe.config import Fp8FlowMoEConfig
from titan_fp8moe.ops import backend
from titan_fp8moe.torchtitan import converter, cpu, dry_run, flavors
from titan_fp8moe.torchtitan.cpu import _dense_attention, _histc_with_integers
from titan_fp8moe.torchtitan.modules import Fp8FlowMoE
from titan_fp8moe.trainer import preflight
from titan_fp8moe.trainer.cpu import create_block_mask_on_cpu
from titan_fp8moe.trainer.experts import TitanExperts

CUSTOM_MODULE = "--job.custom_config_module=titan_fp8moe.torchtitan"


@pytest.fixture(autouse=True)
def cpu_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The same results on a machine with GPUs, for every test of a file that imports this."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    # With a GPU the import does not patch these.
    monkeypatch.setattr(torch, "histc", _histc_with_integers(torch.histc))
    monkeypatch.setattr(attention.FlexAttentionWrapper, "_compiled_flex_attn", staticmethod(_dense_attention))
    monkeypatch.setattr(attention, "_compiled_create_block_mask", create_block_mask_on_cpu)
    emulates = backend.emulating()
    backend.emulate(False)
    yield
    backend.emulate(emulates)


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


# --- what both releases have ------------------------------------------------------------------------------------------

ADAPTER = "titan_fp8moe.torchtitan"
DOORS = ("converter",)
VALIDATION = "validation"
DRY_RUN = ["train_configs/debug.toml"]
CONVERTED = "2 MoE layers, 2 shared experts, 1 dense FFNs, 0 linears"
ALL_LAYERS = "layers"
create_attention_mask = attention.create_attention_mask


def training(data: Path, folder: Path) -> list[str]:
    """Arguments of a job of torchtitan's own, without FP8."""
    return f"""
        {CUSTOM_MODULE} --model.name=deepseek_v3 --model.flavor=tiny --job.dump_folder={folder}
        --optimizer.lr=8e-4 --lr_scheduler.warmup_steps=2 --lr_scheduler.decay_ratio=0.8 --lr_scheduler.min_lr_factor=0
        --activation_checkpoint.mode=selective --activation_checkpoint.selective_ac_option=op
        --model.hf_assets_path={data}/tokenizer --training.dataset=c4_test --training.dataset_path={data}/data
        --validation.dataset=c4_test --validation.dataset_path={data}/data --validation.seq_len=64
        --checkpoint.no_last_save_model_only
    """.split()


def fp8_flags(**settings: Any) -> list[str]:
    values = [f"--fp8_flow_moe.{name}" + ("" if value is True else f"={value}") for name, value in settings.items()]
    return ["--model.converters=fp8_flow_moe", *values]


def set_all(job: Any, settings: dict[str, Any]) -> Any:
    for path, value in settings.items():
        *owners, name = path.split(".")
        setattr(functools.reduce(getattr, owners, job), name, value)
    return job


def parse(*flags: str) -> JobConfig:
    return ConfigManager().parse_args(["--job.config_file=train_configs/debug.toml", *flags])


def make_job(settings: dict[str, Any] | None = None, door: str = DOORS[0], **fp8: Any) -> JobConfig:
    """A job of a debug model. ``settings`` by their paths, ``fp8`` of fp8_flow_moe; ``door``: how it is converted."""
    return set_all(
        make_config(), {"training.seq_len": 2048, **(settings or {}), "fp8_flow_moe": Fp8FlowMoEConfig(**fp8)}
    )


def plain_model() -> nn.Module:
    return make_model(make_config())


def start(job: JobConfig, ranks: int = 1, dim: int = 256, hidden_dim: int = 256) -> nn.Module:
    """The job's model on the meta device, converted; what is refused is unchanged. The dims are those of experts."""
    model = make_model(job, dim=dim, moe_inter_dim=hidden_dim)
    try:
        converter.Fp8FlowMoEConverter(job, dry_run.make_parallel_dims(job, ranks)).convert(model)
    except ValueError:
        assert not any(isinstance(module, TitanExperts) for module in model.modules())
        raise
    return model


def layout(job: JobConfig, ranks: int) -> tuple[int, ...]:
    return preflight.expert_layout(job, dry_run.make_parallel_dims(job, ranks))


def register() -> None:
    """What an import does to other packages."""
    converter.register()
    flavors.register_flavors()
    if not torch.cuda.is_available():
        cpu.enable_cpu_training()


def moe_layer(fp8: bool, groups: int | None) -> tuple[MoE, str]:
    """With random parameters, and the name of its counts of tokens."""
    args = MoEArgs(num_experts=8, top_k=3, num_expert_groups=groups, num_limited_groups=groups and 2)
    layer = MoE(args, dim=256, hidden_dim=128)
    with torch.no_grad():
        layer.init_weights(0.05, torch.device("cpu"))
        nn.init.normal_(layer.router.gate.weight, std=0.3)
    if fp8:
        Fp8FlowMoE.convert(layer, Fp8FlowMoEConfig())
    return layer, "tokens_per_expert"
