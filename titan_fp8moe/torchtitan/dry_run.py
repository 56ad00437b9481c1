"""Check a training config without its machines: ``python -m titan_fp8moe.torchtitan.dry_run CONFIG``.

Loads the TOML file as torchtitan does, then repeats the steps of its ``Trainer`` up to the allocation of memory: model
on the meta device, converters, pipeline split, and tensor, expert and data parallelism. It runs as one rank of a fake
process group of the real size. The degrees, dims and batch sizes of a config that passes fit together. It takes seconds
and needs no GPU. The peak of memory that it prints is an estimate (:mod:`titan_fp8moe.torchtitan.memory`).

    python -m titan_fp8moe.torchtitan.dry_run train_configs/deepseek_v3_671b.toml --rank 100
    python -m titan_fp8moe.torchtitan.dry_run train_configs/deepseek_v3_16b.toml --world-size 64 --training.seq_len 8192

Arguments after the config are torchtitan's own overrides.
"""

import argparse
import functools
import math
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torchtitan.config import TORCH_DTYPE_MAP, JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.experiments import _supported_experiments
from torchtitan.hf_datasets.text_datasets import DATASETS
from torchtitan.models import _supported_models
from torchtitan.protocols.model import BaseModelArgs
from torchtitan.protocols.model_converter import build_model_converters
from torchtitan.protocols.train_spec import TrainSpec, get_train_spec
from torchtitan.tools import utils

from titan_fp8moe.nn.modules import Fp8FlowLinear, KeepDtype
from titan_fp8moe.torchtitan import toml_file
from titan_fp8moe.torchtitan.converter import Fp8FlowMoEConverter
from titan_fp8moe.torchtitan.first_hour import check_text, check_tokenizer, warn_of_missing_corpus
from titan_fp8moe.torchtitan.job_checks import expert_layout
from titan_fp8moe.torchtitan.memory import estimate
from titan_fp8moe.torchtitan.modules import Fp8FlowExperts, Fp8FlowFeedForward, Fp8FlowMoE
from titan_fp8moe.trainer import rank_report
from titan_fp8moe.trainer.meta_layers import Tokens, watch


def smallest_world_size(config: JobConfig) -> int:
    """Product of the parallel degrees. A ``data_parallel_shard_degree`` of -1 counts as the least that works. Expert
    parallelism needs two ranks of FSDP or context parallelism, or torchtitan's meshes are incomplete."""
    p = config.parallelism
    inner = p.context_parallel_degree * p.tensor_parallel_degree
    shard = p.data_parallel_shard_degree
    if shard == -1:
        least = 2 if p.expert_parallel_degree > 1 and p.context_parallel_degree == 1 else 1
        experts = p.expert_parallel_degree * p.expert_tensor_parallel_degree
        shard = max(least, experts // math.gcd(experts, inner))
    return p.data_parallel_replicate_degree * shard * inner * p.pipeline_parallel_degree


def check_config(config: JobConfig) -> None:
    """Raise ValueError for mistakes that torchtitan only warns about or finds late: model, dataset."""
    try:
        flavors = get_train_spec(config.model.name).model_args
    except ValueError as error:
        known = sorted(_supported_models | _supported_experiments)
        raise ValueError(f"model.name = {config.model.name!r}: torchtitan has {known}") from error
    if config.model.flavor not in flavors:
        raise ValueError(f"model.flavor = {config.model.flavor!r}: {config.model.name} has {sorted(flavors)}")
    for section in ("training", *["validation"] * config.validation.enable):
        if (dataset := getattr(config, section).dataset) not in DATASETS:
            raise ValueError(f"{section}.dataset = {dataset!r}: torchtitan has {sorted(DATASETS)}")
    check_tokenizer(config)
    warn_of_missing_corpus(config)
    check_text(config)


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
    if spec.pipelining_fn is None:
        raise ValueError(
            f"torchtitan does not split {config.model.name} into pipeline stages; set "
            "parallelism.pipeline_parallel_degree = 1"
        )
    loss_fn = spec.build_loss_fn(config, parallel_dims=dims)
    device = torch.device(utils.device_type)
    _, parts, _, _ = spec.pipelining_fn(model, dims, config, device, model_args, spec.parallelize_fn, loss_fn)
    return dims, n_params, parts


class Built(NamedTuple):
    """One rank's share of a job, from :func:`build`."""

    config: JobConfig
    rank: int
    dims: ParallelDims
    n_params: int
    parts: list[nn.Module]


def report(built: Built) -> str:
    """The layout and what the rank holds, in a few lines."""
    config, rank, dims, n_params, parts = built
    training = config.training
    sequences = dims.dp_replicate * dims.dp_shard * training.local_batch_size
    accumulation = max(training.global_batch_size // sequences, 1)
    lines = [
        f"model     {config.model.name} {config.model.flavor}, {n_params:,} parameters, "
        f"converters {', '.join(config.model.converters) or 'none'}",
        *rank_report.describe_layout(dims, dims.etp, expert_layout(config, dims).fsdp_shards),
        rank_report.describe_batch(sequences, training.seq_len, accumulation),
        rank_report.describe_parameters(rank, parts),
    ]
    if (memory := estimate(config, dims, parts)) is not None:
        lines.append(
            f"memory    activations {memory.activations / 2**30:.1f} GiB, peak about {memory.peak / 2**30:.1f} GiB "
            f"{memory.where}, if routing is balanced"
        )
    lines += rank_report.describe_parts(parts, ("tok_embeddings", "norm", "output"))
    blocks = [(name, block) for part in cast(list[Any], parts) for name, block in part.layers.items()]
    for name, block in [(name, block) for name, block in blocks if getattr(block, "moe_enabled", False)][:1]:
        lines += rank_report.describe_experts(name, block.moe.experts)
    return "\n".join(lines)


def layers(built: Built) -> Iterator[Callable[[], Tensor]]:
    """Forwards of the rank's converted modules on meta tensors. They change the modules, and run once each."""
    config, dims = built.config, built.dims
    fsdp_casts = dims.fsdp_enabled or dims.ep_enabled
    training, compute_dtype = config.training, TORCH_DTYPE_MAP[config.training.mixed_precision_param]
    # Under autocast the residual stream and its norms stay in the parameters' dtype.
    dtype = compute_dtype if fsdp_casts else TORCH_DTYPE_MAP[training.dtype]
    autocast = not (fsdp_casts or dims.tp_enabled or dims.pp_enabled)
    tokens = Tokens(expert_layout(config, dims).tokens, dtype, compute_dtype, autocast)
    in_moe: set[nn.Module] = set()
    for module in [m for part in built.parts for m in part.modules()]:
        if isinstance(module, Fp8FlowMoE):
            inside = [*module.modules()]
            experts = next(m for m in inside if isinstance(m, Fp8FlowExperts))
            shared = next((m for m in inside if isinstance(m, Fp8FlowFeedForward)), None)
            in_moe.update(inside)
            yield functools.partial(_run_experts, tokens, experts, shared, cast(Any, module.router).top_k)
        elif isinstance(module, Fp8FlowFeedForward | Fp8FlowLinear) and module not in in_moe:
            yield functools.partial(tokens.run, module)


def _run_experts(tokens: Tokens, experts: Any, shared: Fp8FlowFeedForward | None, top_k: int) -> Tensor:
    for module in filter(None, (experts, shared)):
        tokens.gather(module)
    watch(experts)
    experts.gathers_fp8 = False
    experts.set_meshes(experts.ep_mesh, None)
    ids, scores = tokens.routing(top_k)
    x = tokens.rows(experts.matrices().w2.shape[1])
    return type(experts).forward(experts, x, ids, KeepDtype(scores), shared=shared)


def from_command_line(description: str | None) -> Built:
    """Builds the job of ``sys.argv``. Ends the process with the mistake, if there is one."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="TOML file")
    parser.add_argument("--world-size", type=int, help="number of ranks; default: the fewest that the degrees allow")
    parser.add_argument("--rank", type=int, default=0, help="the rank to build; under PP ranks hold different stages")
    args, overrides = parser.parse_known_args()
    if not os.path.isfile(args.config):
        is_folder = os.path.isdir(args.config)
        parser.error(f"{args.config}: {'a folder; name a TOML file in it' if is_folder else 'no such file'}")
    Fp8FlowMoEConverter.trains_here = False
    try:
        config = toml_file.load(args.config, overrides)
        check_config(config)
        world_size = smallest_world_size(config) if args.world_size is None else args.world_size
        if not 0 <= args.rank < world_size:
            raise ValueError(f"--world-size {world_size} has no rank {args.rank}; ranks begin with 0")
        return Built(config, args.rank, *build(config, args.rank, world_size))
    except (AssertionError, ImportError, RuntimeError, ValueError) as error:
        sys.exit(f"error: {error}")


def main() -> None:
    print(report(from_command_line(__doc__)))


if __name__ == "__main__":
    main()
