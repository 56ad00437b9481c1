"""Check a training config without its machines: ``python -m titan_fp8moe.torchtitan.dry_run CONFIG``.

Loads the TOML file as torchtitan does, then repeats the steps of its ``Trainer`` up to the allocation of memory: model
on the meta device, converters, pipeline split, and tensor, expert and data parallelism. It runs as one rank of a fake
process group of the real size. The degrees, dims and batch sizes of a config that passes fit together. It takes seconds
and needs no GPU. The peak of memory that it prints is an estimate (:mod:`titan_fp8moe.trainer.memory`).

    python -m titan_fp8moe.torchtitan.dry_run train_configs/deepseek_v3_671b.toml --rank 100
    python -m titan_fp8moe.torchtitan.dry_run train_configs/deepseek_v3_16b.toml --world-size 64 --training.seq_len 8192

Arguments after the config are torchtitan's own overrides.
"""

import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torchtitan.config import TORCH_DTYPE_MAP, ConfigManager, JobConfig
from torchtitan.config.job_config import ActivationCheckpoint
from torchtitan.distributed import ParallelDims
from torchtitan.hf_datasets.text_datasets import DATASETS
from torchtitan.protocols.model import BaseModelArgs
from torchtitan.protocols.model_converter import build_model_converters
from torchtitan.protocols.train_spec import TrainSpec, get_train_spec
from torchtitan.tools import utils

from titan_fp8moe.torchtitan.compiling import why_eager, why_submodules
from titan_fp8moe.torchtitan.converter import NAME
from titan_fp8moe.torchtitan.job_checks import check_job, why_all_to_all
from titan_fp8moe.torchtitan.meta import moe_of, tokens_of
from titan_fp8moe.torchtitan.modules import Fp8FlowFeedForward
from titan_fp8moe.trainer import dry_run, measure, memory
from titan_fp8moe.trainer.dry_run import Built
from titan_fp8moe.trainer.preflight import compiles_model, expert_layout


def smallest_world_size(config: JobConfig) -> int:
    """The fewest ranks. Expert parallelism needs two of FSDP or context parallelism, or torchtitan's meshes are
    incomplete."""
    p = config.parallelism
    least = 2 if p.expert_parallel_degree > 1 and p.context_parallel_degree == 1 else 1
    return dry_run.smallest_world_size(config, p.expert_tensor_parallel_degree, least)


def make_parallel_dims(config: JobConfig, world_size: int) -> ParallelDims:
    """The parallel degrees of the config on so many ranks."""
    p = config.parallelism
    return ParallelDims(
        dp_replicate=p.data_parallel_replicate_degree,
        dp_shard=p.data_parallel_shard_degree,
        cp=p.context_parallel_degree,
        tp=p.tensor_parallel_degree,
        pp=p.pipeline_parallel_degree,
        ep=p.expert_parallel_degree,
        etp=p.expert_tensor_parallel_degree,
        world_size=world_size,
    )


def build_model(config: JobConfig, dims: ParallelDims) -> tuple[TrainSpec, BaseModelArgs, nn.Module]:
    """The whole model on the meta device, converted but not parallelized, with its spec and arguments."""
    spec = get_train_spec(config.model.name)
    if config.model.flavor not in spec.model_args:
        raise ValueError(f"model.flavor = {config.model.flavor!r}: {config.model.name} has {sorted(spec.model_args)}")
    model_args = spec.model_args[config.model.flavor]
    model_args.update_from_config(config)
    converters = build_model_converters(config, dims)  # refuse a job before torchtitan looks for what it would need
    with torch.device("meta"), utils.set_default_dtype(TORCH_DTYPE_MAP[config.training.dtype]):
        model = spec.model_cls(model_args)
    converters.convert(model)
    return spec, model_args, model


def build(config: JobConfig, rank: int, world_size: int) -> tuple[ParallelDims, int, list[nn.Module]]:
    """Build one rank's share of the model on the meta device.

    Returns the parallel dims, the parameter count of the whole model and the rank's parallelized model parts (one, or
    its pipeline stages). Initializes a fake default process group, so it can run once per process.
    """
    torch.distributed.init_process_group("fake", rank=rank, world_size=world_size)
    dims = make_parallel_dims(config, world_size)
    step = config.training.local_batch_size * dims.dp_replicate * dims.dp_shard
    if config.training.global_batch_size > 0 and config.training.global_batch_size % step:
        raise ValueError(
            f"training.global_batch_size = {config.training.global_batch_size} is not a multiple of local batch size "
            f"x data parallel degree = {step}"
        )

    spec, model_args, model = build_model(config, dims)
    n_params = sum(param.numel() for param in model.parameters())
    if not dims.pp_enabled:
        return dims, n_params, [spec.parallelize_fn(model, dims, config)]
    loss_fn = spec.build_loss_fn(config, parallel_dims=dims)
    device = torch.device(utils.device_type)
    pipeline = cast(Any, spec.pipelining_fn)
    _, parts, _, _ = pipeline(model, dims, config, device, model_args, spec.parallelize_fn, loss_fn)
    return dims, n_params, parts


def _build(config: JobConfig, rank: int, world_size: int) -> Built:
    dims, n_params, parts = build(config, rank, world_size)
    model = f"{config.model.name} {config.model.flavor}, {n_params:,} parameters, "
    model += f"converters {', '.join(config.model.converters) or 'none'}"
    if NAME not in config.model.converters:
        model += f"; {NAME} is not among them, so this package converts nothing"
    return Built(config, rank, dims, expert_layout(config, dims), model, parts, tokens_of(config, dims), moe_of)


def memory_job(config: JobConfig, dims: ParallelDims) -> memory.Job:
    """The job as :mod:`titan_fp8moe.trainer.memory` reads it."""
    training, checkpoint = config.training, config.activation_checkpoint
    # torchtitan autocasts neither under tensor nor under pipeline parallelism, if FSDP does not cast.
    casts = dims.fsdp_enabled or dims.ep_enabled or not (dims.tp_enabled or dims.pp_enabled)
    return memory.Job(
        config,
        dims,
        TORCH_DTYPE_MAP[training.mixed_precision_param if casts else training.dtype],
        head="output",
        moe_of=moe_of,
        keeps=functools.partial(_keeps, checkpoint),
        recomputed=checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns,
        hides=lambda block: compiles_model(config) and _hides_ops(block),
        keeps_exchange=config.model.name != "qwen3",  # whose list of ops in torchtitan 0.2.2 lacks it
    )


def _keeps(checkpoint: ActivationCheckpoint, block: int, part: memory.Part) -> float:
    mode, option = checkpoint.mode, checkpoint.selective_ac_option
    if mode == "selective" and option == "op":
        return part.per_op
    if mode == "selective":  # every n-th block is checkpointed as a whole; 0 means every block
        return part.everything if int(option) and block % int(option) else 0
    return part.everything * {"none": 1, "memory_budget": checkpoint.memory_budget}.get(mode, 0)


def _hides_ops(block: Any) -> bool:
    """A graph inside of a checkpoint hides its ops from that; one around it does not."""
    if not hasattr(block, "moe_enabled"):
        return False
    if not block.moe_enabled and not isinstance(block.feed_forward, Fp8FlowFeedForward):
        return False
    return why_submodules(block) is not None or why_eager(block) is not None


def load(path: str | None, overrides: list[str]) -> JobConfig:
    """A job's config. Raises ValueError if it cannot work."""
    unknown = f'{NAME} is unknown to torchtitan; set job.custom_config_module = "titan_fp8moe.torchtitan"'
    try:
        config = ConfigManager().parse_args([f"--job.config_file={path}", *overrides])
    except ValueError as error:
        if f"{{'{NAME}'}}" in str(error):
            raise ValueError(unknown) from error
        raise
    if NAME in config.model.converters:
        if not hasattr(config, NAME):
            raise ValueError(unknown)
        check_job(config)  # before a converter of torchao's asks for its hardware
    return config


def from_command_line(description: str | None) -> Built:
    """Builds the job of ``sys.argv``. Ends the process with the mistake, if there is one."""
    return dry_run.from_command_line(description, "config", load, smallest_world_size, _build, help="TOML file")


def lacking(config: JobConfig) -> Iterator[str]:
    """Yields a sentence for each file that training would lack on this machine."""
    assets = config.model.hf_assets_path
    if not any((Path(assets) / name).is_file() for name in ("tokenizer.json", "vocab.json", "vocab.txt")):
        yield f"model.hf_assets_path = {assets!r} has no tokenizer.json"
    for section in ("training", *["validation"] * config.validation.enable):
        settings = getattr(config, section)
        if settings.dataset not in DATASETS:
            yield f"{section}.dataset = {settings.dataset!r}: torchtitan has {', '.join(DATASETS)}"
            continue
        path = settings.dataset_path or DATASETS[settings.dataset].path
        if (settings.dataset == "c4_test" or Path(path).is_absolute()) and not Path(path).exists():
            yield f"{section}.dataset_path = {path!r} does not exist"


def main() -> None:
    built = from_command_line(__doc__)
    lines = memory.report(memory_job(built.config, built.dims), built, why_all_to_all(built.config))
    print(dry_run.report(built, experts="moe.experts", lines=lines), flush=True)
    if built.measured:
        measure.show(built)
    if lacks := [*lacking(built.config)]:
        sys.exit(f"error: training would fail here: {'; '.join(lacks)}. tools/build_corpus.py makes both")


if __name__ == "__main__":
    main()
