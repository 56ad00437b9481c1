"""torchtitan's checkpoints under Hugging Face's names, and which of their tensors a job trains in FP8."""

import json
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.protocols.state_dict_adapter import BaseStateDictAdapter

from titan_fp8moe.export_fp8.files import Checkpoint, open_folder
from titan_fp8moe.export_fp8.format import ROUTED, is_matrix
from titan_fp8moe.export_fp8.model_config import Fact
from titan_fp8moe.nn.modules import fp8_parameters
from titan_fp8moe.recipe import BLOCK
from titan_fp8moe.torchtitan.converter import NAME
from titan_fp8moe.torchtitan.dry_run import build_model, load, make_parallel_dims, smallest_world_size
from titan_fp8moe.torchtitan.modules import Fp8FlowExperts
from titan_fp8moe.trainer import preflight
from titan_fp8moe.trainer.plan import natural

# What torchtitan stores besides the model, whose parameters have no common prefix.
_NOT_THE_MODEL = ("optimizer.", "lr_scheduler.", "dataloader", "train_state", "ft_dataloader")


class Job:
    """The model of a training config: its tensors, its names in Hugging Face's format, and what it trains in FP8.

    Attributes:
        settings: what config.json should state of the model.
        starting_config: a config.json to start from, for a model that was trained from scratch; or why there is none.
        fp8: Hugging Face's names of the matrices that the job multiplies in FP8.
        assets: ``model.hf_assets_path``.
        quantized_from: :func:`quantized_from` on ``world_size`` ranks; None if that is None.

    Raises:
        ValueError: for a config that cannot work, a model without a state-dict adapter, or matrices that were quantized
            in other blocks than the export's.
    """

    def __init__(self, toml: str, overrides: list[str], world_size: int | None = None):
        config = load(toml, overrides)
        if NAME not in config.model.converters:
            raise ValueError(
                f"{toml} does not name the converter: add --job.custom_config_module titan_fp8moe.torchtitan "
                f"--model.converters {NAME}, as for its training"
            )
        config.checkpoint.enable = False  # nothing resumes here: other checkpoints of the run do not matter
        dims = make_parallel_dims(config, smallest_world_size(config) if world_size is None else world_size)
        with preflight.for_other_machines():
            spec, model_args, model = build_model(config, dims)
        if spec.state_dict_adapter is None:
            raise ValueError(f"torchtitan has no names in Hugging Face's format for {config.model.name}")
        self.name = f"{config.model.name} {config.model.flavor}"
        # Without assets, which would have the adapter look for an index of shards there.
        self.adapter: BaseStateDictAdapter = spec.state_dict_adapter(model_args, None)
        self.state: dict[str, Tensor] = model.state_dict()  # on the meta device
        matrices = {key: self.state[key] for key in fp8_parameters(model)}
        _check_blocks(config, dims, matrices)
        self.fp8 = {name for name, value in self.adapter.to_hf(matrices).items() if is_matrix(name, value)}
        values = vars(model_args) | vars(getattr(model_args, "moe_args", None) or model_args)
        for name in ("num_expert_groups", "num_limited_groups"):
            values[name] = values.get(name) or 1
        self.settings = _settings(values)
        self.starting_config = _starting_config(config.model.name, values)
        self.assets = Path(config.model.hf_assets_path)
        self.quantized_from = None if world_size is None else quantized_from(config, dims, model)

    def open(self, folder: Path) -> Checkpoint:
        """The checkpoint in a folder, torchtitan's or one of safetensors.

        Raises:
            ValueError: unless it holds exactly the job's model.
        """
        if (folder / ".metadata").exists():
            return self._open_dcp(folder)
        checkpoint = open_folder(folder)
        self._check(folder, checkpoint.tensors, self.adapter.to_hf(self.state))
        return checkpoint

    def _open_dcp(self, folder: Path) -> Checkpoint:
        """One of torchtitan's tensors is in memory at a time, for the experts all of a layer."""
        stored = {
            key: torch.empty(meta.size, dtype=meta.properties.dtype, device="meta")
            for key, meta in FileSystemReader(folder).read_metadata().state_dict_metadata.items()
            if isinstance(meta, TensorStorageMetadata) and not key.startswith(_NOT_THE_MODEL)
        }
        self._check(folder, stored, self.state)
        keys = sorted(stored, key=natural)
        tensors = {key: self.adapter.to_hf({key: stored[key]}) for key in keys}
        if left_out := [key for key in keys if key != "output.weight" and not tensors[key]]:
            lost = "have no name in Hugging Face's format; the served model differs unless they are zero"
            print(f"warning: {len(left_out)} tensors such as {left_out[0]} {lost}", file=sys.stderr)

        def load(key: str) -> dict[str, Tensor]:
            value = torch.empty_like(stored[key], device="cpu")
            with warnings.catch_warnings(action="ignore", category=UserWarning):  # that this is one process
                dcp.load({key: value}, checkpoint_id=folder, no_dist=True)
            return self.adapter.to_hf({key: value})

        names = {name: value for found in tensors.values() for name, value in found.items()}
        return Checkpoint(names, lambda: (item for key in keys for item in load(key).items()))

    def _check(self, folder: Path, found: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> None:
        has, should = ({key: tuple(value.shape) for key, value in tensors.items()} for tensors in (found, want))
        if wrong := sorted({key for key, _ in has.items() ^ should.items()}):
            key = wrong[0]
            raise ValueError(
                f"{folder} is not a checkpoint of {self.name}: {len(wrong)} tensors are missing, unknown or of another "
                f"shape, such as {key}, {has.get(key)} instead of {should.get(key)}. Pass the config of its run"
            )


# Settings of torchtitan's models by their keys in config.json, but for those that show in shapes of tensors.
_SETTINGS = {
    "rope_theta": "rope_theta",
    "rms_norm_eps": "norm_eps",
    "num_attention_heads": "n_heads",
    "num_experts_per_tok": "top_k",
    "n_group": "num_expert_groups",
    "topk_group": "num_limited_groups",
    "routed_scaling_factor": "route_scale",
    "norm_topk_prob": "route_norm",
    "scoring_func": "score_func",
}


# Further keys, which the tensors show. Models have only some of them.
_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "intermediate_size": "inter_dim",
    "moe_intermediate_size": "moe_inter_dim",
    "n_shared_experts": "num_shared_experts",
    "first_k_dense_replace": "n_dense_layers",
    "num_key_value_heads": "n_kv_heads",
    "tie_word_embeddings": "enable_weight_tying",
    "max_position_embeddings": "max_seq_len",
    **{name: name for name in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")},
}
# A model's type and architecture in Transformers, the scores of its router there, and keys of other names.
_TYPES: dict[str, tuple[str, str, str, dict[str, str]]] = {
    "deepseek_v3": (
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        "sigmoid",
        {"n_routed_experts": "num_experts", "num_key_value_heads": "n_heads"},
    ),
    "qwen3": (
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        "softmax",
        {"num_experts": "num_experts", "intermediate_size": "hidden_dim", "head_dim": "head_dim"},
    ),
}


def _starting_config(model: str, values: dict[str, Any]) -> str:
    """Builds a config.json from torchtitan's arguments, or says why Transformers would compute another model."""
    if model not in _TYPES or not values.get("moe_enabled", True):
        return "None is printed here, because only deepseek_v3 and qwen3 with experts are known"
    kind, architecture, scores, names = _TYPES[model]
    if values["score_func"] != scores or values["score_before_experts"]:
        return f"None is printed here, because {architecture} multiplies what experts return by {scores} scores"
    if values["max_seq_len"] > values.get("original_seq_len", values["max_seq_len"]):
        return f"None is printed here, because training.seq_len > {values['original_seq_len']} turned YaRN on"
    found = {key: values[name] for key, name in (_SETTINGS | _SIZES | names).items() if values.get(name) is not None}
    if "q_lora_rank" in found:
        found["q_lora_rank"] = found["q_lora_rank"] or None  # a query without LoRA has rank 0 in torchtitan
    config = {"architectures": [architecture], "model_type": kind, "dtype": "bfloat16"} | found
    advice = "For a model from scratch save this there, and add what else it needs, such as token ids"
    return f"{advice}:\n{json.dumps(config, indent=2)}"


def _settings(values: dict[str, Any]) -> list[Fact]:
    """The values that torchtitan's arguments give to keys of config.json; one that is None says nothing."""
    found = {key: values[name] for key, name in _SETTINGS.items() if values.get(name) is not None}
    return [(key, value, f"the model was trained with {json.dumps(value)}") for key, value in found.items()]


def _check_blocks(config: JobConfig, dims: ParallelDims, matrices: dict[str, Tensor]) -> None:
    """Training quantizes blocks of a tensor-parallel rank's part of a matrix, which should be the whole matrix's."""
    routed_shards = preflight.expert_layout(config, dims).hidden_dim_shards
    for name, matrix in matrices.items():
        shards, shape = routed_shards if ROUTED in name else dims.tp, [*matrix.shape[-2:]]
        if shards > 1 and any(dim % (BLOCK * shards) for dim in shape):
            raise ValueError(
                f"{name}: training quantized parts of {shape} on {shards} tensor-parallel ranks each, whose blocks of "
                f"{BLOCK} are not the whole matrix's; leave it in bf16 with --fp8_flow_moe.filter_fqns"
            )


def quantized_from(config: JobConfig, dims: ParallelDims, model: nn.Module) -> str:
    """The values that a model quantizes: ``bf16`` or ``fp32`` parameters, or ``fp32-routed``, which is fp32 for
    the routed experts and bf16 for everything else."""
    training = config.training
    if training.dtype == "bfloat16":
        return "bf16"
    if training.mixed_precision_param == "float32" or not (dims.fsdp_enabled or dims.ep_enabled):
        return "fp32"  # without FSDP autocast applies, which the experts' parameters do not see
    experts = [module for module in model.modules() if isinstance(module, Fp8FlowExperts)]
    alone = dims.ep_enabled and not any(module.in_fsdp for module in experts)
    sharded = preflight.expert_layout(config, dims).fsdp_shards > 1
    in_fp8 = sharded and all(module.config.fp8_all_gather for module in experts)
    return "fp32-routed" if in_fp8 or alone else "bf16"
