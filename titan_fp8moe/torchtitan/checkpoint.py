"""torchtitan's checkpoints under Hugging Face's names, and which of their tensors a job trains in FP8."""

import copy
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.protocols.model import BaseModelArgs
from torchtitan.protocols.state_dict_adapter import BaseStateDictAdapter

from titan_fp8moe.export_fp8.files import Source, TensorInfo
from titan_fp8moe.export_fp8.format import is_matrix
from titan_fp8moe.export_fp8.model_config import ConfigValues
from titan_fp8moe.nn.modules import fp8_parameters
from titan_fp8moe.recipe import TILE
from titan_fp8moe.torchtitan import toml_file
from titan_fp8moe.torchtitan.dry_run import build_model, check_config, make_parallel_dims, smallest_world_size
from titan_fp8moe.torchtitan.first_hour import read_whole
from titan_fp8moe.torchtitan.job_checks import expert_layout
from titan_fp8moe.torchtitan.modules import Fp8FlowExperts, Fp8FlowFeedForward, down_projection
from titan_fp8moe.trainer import preflight
from titan_fp8moe.trainer.plan import natural

_Shape = tuple[int, ...]
# What torchtitan stores besides the model, whose parameters have no common prefix.
_NOT_THE_MODEL = ("optimizer.", "lr_scheduler.", "dataloader", "train_state", "ft_dataloader")


class Job:
    """The model of a training config: its shapes, its names in Hugging Face's format, and what it trains in FP8.

    Attributes:
        name: the model's and its flavor's.
        settings: the values of config.json that fit settings of the model.
        shapes: of the model's tensors, by torchtitan's names.
        fp8: Hugging Face's names of the matrices that the job multiplies in FP8.
        assets: ``model.hf_assets_path``.
        quantized_from: :func:`quantized_from` on ``world_size`` ranks; None if that is None.

    Raises:
        ValueError: for a config that cannot work, a model without a state-dict adapter, or matrices that were quantized
            in other blocks than the export's.
    """

    def __init__(self, toml: str, overrides: list[str], world_size: int | None = None):
        config = toml_file.load(toml, overrides)
        config.checkpoint.enable = False  # nothing resumes here: other checkpoints of the run do not matter
        check_config(config)
        ranks = smallest_world_size(config) if world_size is None else world_size
        dims = make_parallel_dims(config, ranks)
        with preflight.for_other_machines():
            spec, model_args, model = build_model(config, dims)
        _check_blocks(config, dims, model)
        if spec.state_dict_adapter is None:
            raise ValueError(f"torchtitan has no names in Hugging Face's format for {config.model.name}")
        self.settings = _settings(model_args)
        self.name = f"{config.model.name} {config.model.flavor}"
        self.assets = Path(config.model.hf_assets_path)
        self.shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
        # Without assets, which would have the adapter look for an index of shards there.
        self.adapter: BaseStateDictAdapter = spec.state_dict_adapter(copy.deepcopy(model_args), None)
        self.quantized_from = None if world_size is None else quantized_from(config, dims, model)
        fp8 = [self.hf_shapes(key) for key in fp8_parameters(model)]
        self.fp8 = {name for shapes in fp8 for name, shape in shapes.items() if is_matrix(name, len(shape))}

    def check_names(self, folder: Path, source: Source) -> None:
        """Raises ValueError unless ``source``, in ``folder``, holds exactly the model."""
        want = {name: shape for key in self.shapes for name, shape in self.hf_shapes(key).items()}
        _check_model(folder, {name: info.shape for name, info in source.tensors.items()}, want, self.name)

    def hf_shapes(self, key: str) -> dict[str, tuple[int, ...]]:
        """Hugging Face's names and shapes of what torchtitan calls ``key``; empty for a tensor that is tied."""
        value = torch.empty(self.shapes[key], dtype=torch.float32, device="meta")
        return {name: tuple(part.shape) for name, part in self.adapter.to_hf({key: value}).items()}


# Settings of torchtitan's models by their keys in config.json.
_SETTINGS = {
    "rope_theta": "rope_theta",
    "rms_norm_eps": "norm_eps",
    "num_attention_heads": "n_heads",
    "first_k_dense_replace": "n_dense_layers",
    "kv_lora_rank": "kv_lora_rank",
    "qk_nope_head_dim": "qk_nope_head_dim",
    "qk_rope_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
    "tie_word_embeddings": "enable_weight_tying",
}


def _settings(model_args: BaseModelArgs) -> ConfigValues:
    args: Any = model_args
    found: ConfigValues = {key: [getattr(args, name)] for key, name in _SETTINGS.items() if hasattr(args, name)}
    found["num_key_value_heads"] = [getattr(args, "n_kv_heads", None) or args.n_heads, None]
    if hasattr(args, "q_lora_rank"):
        found["q_lora_rank"] = [args.q_lora_rank or None]
    if hasattr(args, "head_dim"):
        found["head_dim"] = [args.head_dim, None]
    if (moe := getattr(args, "moe_args", None)) is not None:
        found |= {
            "n_shared_experts": [moe.num_shared_experts] if moe.num_shared_experts else [0, None],
            "num_experts_per_tok": [moe.top_k],
            "n_group": [moe.num_expert_groups] if moe.num_expert_groups else [1, None],
            "topk_group": [moe.num_limited_groups] if moe.num_expert_groups else [1, None],
            "routed_scaling_factor": [moe.route_scale],
            "norm_topk_prob": [moe.route_norm],
            "scoring_func": [moe.score_func],
        }
    return found


def _check_blocks(config: JobConfig, dims: ParallelDims, model: nn.Module) -> None:
    """Training pads a hidden dim on each tensor-parallel rank, the export's blocks lie in the whole matrix."""
    for name, module in model.named_modules():
        if isinstance(module, Fp8FlowExperts):
            hidden_dim, shards = down_projection(module).shape[2], expert_layout(config, dims).hidden_dim_shards
        elif isinstance(module, Fp8FlowFeedForward):
            hidden_dim, shards = module.w1.weight.shape[0], dims.tp
        else:
            continue
        if shards > 1 and hidden_dim % (TILE * shards):
            raise ValueError(
                f"{name}: training quantized blocks of {hidden_dim // shards} hidden units on each of {shards} "
                f"tensor-parallel ranks, which are not blocks of {TILE} of the whole matrix; export it in bf16 with "
                f"--fp8_flow_moe.filter_fqns={name.removesuffix('.experts')}."
            )


def quantized_from(config: JobConfig, dims: ParallelDims, model: nn.Module) -> str:
    """The values that a model quantizes: ``bf16`` or ``fp32`` parameters, or ``fp32-routed``, which is fp32 for
    the routed experts and bf16 for everything else."""
    training, layout = config.training, expert_layout(config, dims)
    if training.dtype == "bfloat16":
        return "bf16"
    if training.mixed_precision_param == "float32" or not (dims.fsdp_enabled or dims.ep_enabled):
        return "fp32"  # without FSDP autocast applies, which the experts' parameters do not see
    experts = [module for module in model.modules() if isinstance(module, Fp8FlowExperts)]
    # FSDP leaves experts alone that it would shard over one rank, see parallel.fully_shard.
    alone = dims.ep_enabled and layout.fsdp_shards * dims.dp_replicate == 1 and not training.enable_cpu_offload
    in_fp8 = layout.fsdp_shards > 1 and all(module.config.fp8_all_gather for module in experts)
    return "fp32-routed" if in_fp8 or (alone and not any(m.placement.keep_fsdp for m in experts)) else "bf16"


class DcpSource:
    """A checkpoint of torchtitan's as a :class:`titan_fp8moe.export_fp8.files.Source`.

    One of torchtitan's tensors is in memory at a time, for the experts all of a layer.

    Raises:
        ValueError: unless the checkpoint holds exactly the job's model.
    """

    def __init__(self, folder: Path, job: Job):
        self.folder, self.job = folder, job
        metadata, _ = read_whole(folder, "copy the checkpoint again, with the files of all ranks")
        stored = {
            key: TensorInfo(tuple(meta.size), meta.properties.dtype)
            for key, meta in metadata.state_dict_metadata.items()
            if isinstance(meta, TensorStorageMetadata) and not key.startswith(_NOT_THE_MODEL)
        }
        _check_model(folder, {key: info.shape for key, info in stored.items()}, job.shapes, job.name)
        self.left_out = [key for key in sorted(stored) if key != "output.weight" and not job.hf_shapes(key)]
        self.keys: dict[str, str] = {}  # torchtitan's by Hugging Face's
        self.tensors: dict[str, TensorInfo] = {}
        for key in sorted(stored, key=natural):
            for name, shape in job.hf_shapes(key).items():
                self.keys[name], self.tensors[name] = key, TensorInfo(shape, stored[key].dtype)
        self.stored, self.loaded_key, self.loaded = stored, "", {}

    def read(self, name: str) -> Tensor:
        if (key := self.keys[name]) != self.loaded_key:
            self.loaded_key, self.loaded = "", {}  # freed before more is read
            value = torch.empty(self.stored[key].shape, dtype=self.stored[key].dtype, device="cpu")
            with warnings.catch_warnings(action="ignore", category=UserWarning):  # that this is one process
                dcp.load({key: value}, storage_reader=FileSystemReader(self.folder), no_dist=True)
            self.loaded_key, self.loaded = key, self.job.adapter.to_hf({key: value})
        return self.loaded[name]


def _check_model(folder: Path, stored: dict[str, _Shape], want: dict[str, _Shape], name: str) -> None:
    if wrong := sorted({key for key, _ in stored.items() ^ want.items()}):
        key = wrong[0]
        raise ValueError(
            f"{folder} is not a checkpoint of {name}: {len(wrong)} tensors are missing, unknown or of another shape, "
            f"such as {key}, {stored.get(key)} instead of {want.get(key)}. Pass the config of its run"
        )
