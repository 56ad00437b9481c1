"""Jobs of torchtitan 0.3 for tests, by each of the ways to convert their models. See ``tests/jobs.py``."""

import functools
import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torchtitan.config.manager import ConfigManager
from torchtitan.config.override import apply_overrides
from torchtitan.distributed import ParallelDims
from torchtitan.models.common import attention
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.models.deepseek_v3 import model_registry
from torchtitan.models.deepseek_v3.config_registry import deepseek_v3_16b, deepseek_v3_debugmodel
from torchtitan.models.gpt_oss.moe import swiglu  # noqa: F401
from torchtitan.trainer import Trainer

from titan_fp8moe.config import Fp8FlowMoEConfig
from titan_fp8moe.torchtitan03 import cpu, job_checks
from titan_fp8moe.torchtitan03.config_registry import with_fp8_flow
from titan_fp8moe.torchtitan03.converter import Fp8FlowConverter
from titan_fp8moe.torchtitan03.modules import Fp8FlowMoE
from titan_fp8moe.torchtitan03.trainer import Fp8FlowTrainer, overriding

ADAPTER = "titan_fp8moe.torchtitan03"
FLAG = f"{ADAPTER}.fp8_flow_moe"
CONFIG = ["--module", ADAPTER, "--config", "deepseek_v3_debugmodel"]
VALIDATION = "validator"
DRY_RUN = [f"--config={CONFIG[3]}", "--training.disable_cuda_graphs"]
CONVERTED = "1 MoE layers, 1 shared experts, 1 dense FFNs, 0 linears"
ALL_LAYERS = ["layers"]
create_attention_mask = attention.create_attention_mask
DOORS = "section", "flag", "converter"


def two_layers() -> Trainer.Config:
    """torchtitan's own config of the 16B model with two layers of its debug model."""
    job, spec = deepseek_v3_16b(), model_registry("debugmodel", attn_backend="flex")
    del spec.model.layers[2:]
    job.checkpoint.last_save_model_only = False  # so that a run can go on
    job.model_spec, job.loss.loss_fn.global_vocab_size = spec, decoder_vocab_size(spec)
    return job


def training(data: Path, folder: Path) -> list[str]:
    return f"""
        --module={__name__} --config=two_layers --dump_folder={folder} --hf_assets_path={data}/tokenizer
        --compile.backend=aot_eager --training.disable_cuda_graphs
        --dataloader.dataset=c4_test --dataloader.dataset_path={data}/data
        --validator.dataloader.dataset=c4_test --validator.dataloader.dataset_path={data}/data
    """.split()


def fp8_flags(**settings: Any) -> list[str]:
    return ["--override.imports", f"{FLAG}={json.dumps(settings)}"]


def set_all(job: Any, settings: dict[str, Any]) -> Any:
    for path, value in settings.items():
        *owners, name = path.split(".")
        setattr(functools.reduce(getattr, owners, job), name, value)
    return job


def parse(*flags: str) -> Trainer.Config:
    return ConfigManager().parse_args([*CONFIG, *flags])


def make_job(settings: dict[str, Any] | None = None, door: str = "section", others: Any = (), **fp8: Any) -> Any:
    """A job whose model is converted by the config module's section, by the flag of torchtitan's own command line, or
    by a model converter. ``others``: converters behind it."""
    job = deepseek_v3_debugmodel()
    set_all(job, {"training.disable_cuda_graphs": True, **(settings or {})})
    if door == "section":
        return with_fp8_flow(job, Fp8FlowMoEConfig(**fp8))
    ours = [Fp8FlowConverter.Config(**fp8)] if door == "converter" else []
    job.model_spec = model_registry("debugmodel", converters=[*ours, *others])
    if door == "flag":
        job.override.imports = [*job.override.imports, (FLAG, fp8)]
    return job


def convert(job: Any, ranks: int = 1) -> Any:
    """Does what a trainer does before it builds the model."""
    if isinstance(job, Fp8FlowTrainer.Config):
        job.override = overriding(job).override
    with patch.dict("os.environ", WORLD_SIZE=str(ranks)):
        job.model_spec.model.update_from_config(config=job)
        if job.override.imports:
            apply_overrides(job.override, job)
        job._validate_cuda_graphs()
    return job


def build(job: Any) -> nn.Module:
    with torch.device("meta"):
        return job.model_spec.model.build()


def plain_model() -> nn.Module:
    return build(deepseek_v3_debugmodel())


def start(job: Any, ranks: int = 1, **dims: int) -> nn.Module:
    for moe in moes(job) if dims else ():
        set_all(moe.routed_experts.inner_experts, dims)
    return build(convert(job, ranks))


def moes(job: Any) -> list[Any]:
    return [layer.moe for layer in job.model_spec.model.layers if layer.moe is not None]


def layout(job: Any, ranks: int) -> tuple[int, ...]:
    return job_checks.expert_layout(job, ParallelDims.from_config(job.parallelism, ranks))


def register() -> None:
    if not torch.cuda.is_available():
        cpu.enable_cpu_training()


def randomize(module: nn.Module) -> nn.Module:
    """On the CPU, from the meta device."""
    module = module.to_empty(device="cpu")
    for tensor in (*module.parameters(), *module.buffers()):
        nn.init.normal_(tensor, std=0.05) if tensor.is_floating_point() else tensor.zero_()
    return module


def moe_layer(fp8: bool, groups: int | None) -> tuple[nn.Module, str]:
    moe = randomize((build(convert(make_job())) if fp8 else plain_model()).layers["3"].moe)
    if not isinstance(moe, Fp8FlowMoE):
        moe.routed_experts.forward = lambda x, *_: x  # the router is what is tested; its GEMMs are bf16
    moe.tokens_per_expert_E.zero_()
    return moe, "tokens_per_expert_E"
