"""The model converter ``fp8_flow_moe``: checks that the job can work, then converts the model's MoE layers."""

import torch
import torch.nn as nn
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.models.deepseek_v3.infra import parallelize as deepseek_v3_parallelize
from torchtitan.models.llama4.infra import parallelize as llama4_parallelize
from torchtitan.models.moe.moe import GroupedExperts, MoE, TokenReorderer
from torchtitan.models.qwen3.infra import parallelize as qwen3_parallelize
from torchtitan.protocols.model_converter import ModelConverter, register_model_converter
from torchtitan.tools.logging import logger

from titan_fp8moe import moe, ops
from titan_fp8moe.kernels.sizes import MAX_ROWS
from titan_fp8moe.torchtitan import parallel
from titan_fp8moe.torchtitan.modules import Fp8FlowMoE
from titan_fp8moe.torchtitan.statistics import log_statistics

NAME = "fp8_flow_moe"

# Results that per-op activation checkpointing keeps: those of the routed experts, who keep little and recompute by
# themselves, and the chosen experts, so that the recomputation routes exactly as the forward did.
_SAVED_OPS = (*moe.SAVED_OPS, torch.ops.aten.topk.default)

# They compute input and weight gradients at different times; the layer's backward computes both at once.
_UNSUPPORTED_SCHEDULES = ("dualpipev", "zbvzerobubble", "interleavedzerobubble")


class Fp8FlowMoEConverter(ModelConverter):
    """Converts every torchtitan ``MoE`` layer not named in ``fp8_flow_moe.filter_fqns``.

    Raises:
        ValueError: for a configuration or hardware that cannot work, naming the setting and the remedy, before anything
            is converted or allocated.
    """

    def __init__(self, job_config: JobConfig, parallel_dims: ParallelDims):
        if not hasattr(job_config, NAME):
            raise ValueError(
                f"model.converters has {NAME!r}, but the [{NAME}] table is unknown; set "
                'job.custom_config_module = "titan_fp8moe.torchtitan", or give the JobConfig of your own module the '
                "field fp8_flow_moe: titan_fp8moe.config.Fp8FlowMoEConfig, and import titan_fp8moe.torchtitan in it"
            )
        self.config = job_config.fp8_flow_moe
        self.fault_tolerance = job_config.fault_tolerance.enable
        _check_job(job_config)
        _check_parallelism(job_config, parallel_dims)
        # Tokens of a microbatch that a rank's layers see at the least.
        tokens = job_config.training.local_batch_size * job_config.training.seq_len
        if parallel_dims.pp_enabled:
            tokens = job_config.parallelism.pipeline_parallel_microbatch_size * job_config.training.seq_len
        self.tokens = tokens // (parallel_dims.cp * parallel_dims.tp)
        # Expert parallelism without expert tensor parallelism leaves the hidden dim whole, whatever the tensor degree.
        self.hidden_dim_shards = parallel_dims.etp if parallel_dims.ep > 1 else parallel_dims.tp
        self.expert_shards = parallel_dims.ep
        experts_ranks, ranks = parallel_dims.ep * parallel_dims.etp, _ranks_of_experts(parallel_dims)
        if parallel_dims.ep > 1 and ranks % experts_ranks:
            raise ValueError(
                f"parallelism.expert_parallel_degree = {parallel_dims.ep} x expert_tensor_parallel_degree = "
                f"{parallel_dims.etp} do not divide data_parallel_shard x context x tensor parallel degree = {ranks}; "
                "choose degrees that do"
            )
        self.fsdp_shards = expert_fsdp_shards(parallel_dims)
        if self.config.cache_weights and self.fsdp_shards > 1:
            logger.warning(
                f"{NAME}.cache_weights keeps quantized weights whole, 2 bytes per parameter, which FSDP shards over "
                f"{self.fsdp_shards} ranks; set it to false if memory runs out"
            )
        if self.config.recompute == "experts" and self.config.save_h == "fp8":
            logger.warning(f'{NAME}.save_h has no effect with {NAME}.recompute = "experts", which keeps no h')
        if self.config.fp8_all_gather and self.fsdp_shards == 1:
            logger.warning(
                f"{NAME}.fp8_all_gather has no effect: FSDP shards the experts over one rank, and gathers nothing; set "
                "it to false"
            )

    def convert(self, model: nn.Module) -> None:
        layers = {name: module for name, module in model.named_modules() if isinstance(module, MoE)}
        if not layers:
            raise ValueError(
                f"model.converters has {NAME!r}, but the model has no MoE layer; remove it or choose a flavor with MoE"
            )
        skipped = [name for name in layers if any(part in f"{name}." for part in self.config.filter_fqns)]
        for part in self.config.filter_fqns:
            if not any(part in f"{name}." for name in layers):
                raise ValueError(
                    f"{NAME}.filter_fqns has {part!r}, which matches none of the MoE layers {', '.join(layers)}"
                )
        selected = {name: layer for name, layer in layers.items() if name not in skipped}
        if self.config.statistics_every and not selected:
            logger.warning(f"{NAME}.statistics_every has no effect: {NAME}.filter_fqns leaves no layer to be counted")
        for name, layer in selected.items():
            self._check_layer(name, layer)

        backend = _check_hardware(self.config.emulate) if selected else "nothing to convert"
        parallel.install()
        for module in (llama4_parallelize, deepseek_v3_parallelize, qwen3_parallelize):
            module._op_sac_save_list.update(_SAVED_OPS)
        ops.emulate(self.config.emulate)
        if self.config.statistics_every:
            log_statistics()
        for layer in selected.values():
            Fp8FlowMoE.convert(layer, self.config)
            # The norm of all gradients is taken of tensors on one mesh, and experts left in bf16 have FSDP's; TorchFT
            # averages over replicas what FSDP reduces.
            layer.experts.keep_fsdp = bool(skipped) or self.fault_tolerance
        logger.info(
            f"FP8-Flow-MoE: {len(selected)} MoE layers converted, {len(skipped)} left in bf16"
            f"{' (' + ', '.join(skipped) + ')' if skipped else ''}; {backend}; "
            f"{self.config.describe()}"
        )

    def post_optimizer_hook(self, model: nn.Module | list[nn.Module]) -> None:
        """Nothing: what microbatches share of weights clears itself (:class:`titan_fp8moe.ffn.WeightCache`)."""

    def _check_layer(self, name: str, layer: MoE) -> None:
        if type(layer) is not MoE or type(layer.experts) is not GroupedExperts:
            raise ValueError(
                f"{NAME} converts torchtitan's MoE with GroupedExperts, but {name} is a {type(layer).__name__} with "
                f"{type(layer.experts).__name__}; leave it in bf16 with {NAME}.filter_fqns, or remove the converter "
                "that changed it"
            )
        if type(layer.reorderer) is not TokenReorderer:
            raise ValueError(
                f"{NAME} sorts slots itself, as torchtitan's TokenReorderer does, but {name} has a "
                f"{type(layer.reorderer).__name__}; leave the layer in bf16 with {NAME}.filter_fqns"
            )
        num_experts, hidden_dim, dim = layer.experts.w1.shape
        local = hidden_dim / self.hidden_dim_shards
        if num_experts % self.expert_shards:
            raise ValueError(
                f"{name}: {num_experts} experts do not divide over parallelism.expert_parallel_degree = "
                f"{self.expert_shards}; choose a degree that divides them"
            )
        if self.config.fp8_all_gather and num_experts % (self.expert_shards * self.fsdp_shards):
            raise ValueError(
                f"{name}: {NAME}.fp8_all_gather needs whole experts on each rank, but {num_experts} experts do not "
                f"divide over {self.expert_shards} expert-parallel x {self.fsdp_shards} FSDP ranks; set it to false, "
                "or raise parallelism.data_parallel_replicate_degree until they do"
            )
        if dim % 128:
            raise ValueError(f"{name}: model dim {dim} is not a multiple of 128, the width of an FP8 tile; choose one")
        if hidden_dim % 128:
            raise ValueError(
                f"{name}: expert hidden dim {hidden_dim} is not a multiple of 128, the width of an FP8 tile; choose "
                f"one, or leave the layer in bf16 with {NAME}.filter_fqns"
            )
        if (rows := self.tokens * layer.router.top_k) > MAX_ROWS:
            raise ValueError(
                f"{name}: {self.tokens} tokens of a microbatch have {rows} rows for their top-{layer.router.top_k} "
                f"experts, and a rank can have {MAX_ROWS}; lower training.local_batch_size or training.seq_len"
            )
        if local % 128:
            remedy = "set parallelism.expert_tensor_parallel_degree = 1"
            if self.expert_shards == 1:
                remedy = f"lower parallelism.tensor_parallel_degree, or raise expert_parallel_degree and {remedy}"
            raise ValueError(
                f"{name}: expert hidden dim {hidden_dim} over {self.hidden_dim_shards} tensor-parallel rank(s) is "
                f"{local:g} per rank, not a multiple of 128; {remedy}"
            )


def _check_parallelism(job_config: JobConfig, dims: ParallelDims) -> None:
    """Raises for, or warns of, degrees that torchtitan 0.2.2 has trouble with, by itself too."""
    if dims.ep > 1 and dims.tp > 1 and dims.dp_shard * dims.cp == 1:
        raise ValueError(
            "expert parallelism beside tensor parallelism needs at least two ranks of FSDP or of context parallelism "
            "in torchtitan 0.2.2; raise parallelism.data_parallel_shard_degree"
        )
    compiles = job_config.compile.enable and "model" in job_config.compile.components
    if dims.tp > 1 and compiles and torch.__version__ >= "2.12":
        raise ValueError(
            f"tensor parallelism with compile fails in torchtitan 0.2.2 with PyTorch {torch.__version__}; set "
            "compile.enable = false, or use PyTorch 2.11"
        )
    if dims.dp_replicate > 1 and dims.dp_shard * dims.cp == 1:
        logger.warning(
            f"torchtitan 0.2.2 divides gradients by parallelism.data_parallel_replicate_degree = {dims.dp_replicate} "
            "once too often where nothing is sharded; raise data_parallel_shard_degree, or scale the learning rate and "
            "training.max_norm"
        )


def _ranks_of_experts(dims: ParallelDims) -> int:
    """The ranks that hold the experts once, where they are spread."""
    return dims.dp_shard * dims.cp * dims.tp


def expert_fsdp_shards(dims: ParallelDims) -> int:
    """Of the ranks that FSDP has, those over which it shards what an expert-parallel rank holds."""
    return _ranks_of_experts(dims) // (dims.ep * dims.etp) if dims.ep > 1 else dims.dp_shard * dims.cp


def _check_hardware(emulate: bool) -> str:
    """Raises unless this machine can run the ops; returns what they run on, for the log."""
    if not torch.cuda.is_available():
        if torch.version.cuda:
            logger.warning("PyTorch is built for CUDA, but finds no GPU: this process trains on the CPU")
        return "plain PyTorch reference on the CPU"
    major, minor = torch.cuda.get_device_capability()
    name = torch.cuda.get_device_name()
    if emulate:
        return f"plain PyTorch reference on {name} (emulate)"
    if (major, minor) != (9, 0) or torch.version.hip:
        raise ValueError(
            f"{NAME} has kernels for compute capability 9.0 (Hopper), but {name} has {major}.{minor}; train with "
            f"model.converters = [] in bf16, or set {NAME}.emulate = true to run the (slow) reference"
        )
    return f"Triton kernels on {name}"


def _check_job(job_config: JobConfig) -> None:
    """Raises for settings of torchtitan that cannot go together with the converter."""
    others = [c for c in job_config.model.converters if c.startswith("quantize.grouped_mm")]
    if others:
        raise ValueError(
            f"{NAME} and {', '.join(others)} convert the same experts; keep one of them in model.converters"
        )
    if job_config.model.converters.count(NAME) > 1:
        raise ValueError(f"model.converters names {NAME} twice; once is enough")
    metrics = job_config.metrics
    if job_config.fp8_flow_moe.statistics_every and not (metrics.enable_tensorboard or metrics.enable_wandb):
        raise ValueError(
            f"{NAME}.statistics_every = {job_config.fp8_flow_moe.statistics_every}, but nothing would log them; set "
            "metrics.enable_tensorboard or metrics.enable_wandb, or statistics_every = 0"
        )
    if job_config.fp8_flow_moe.cache_weights and job_config.optimizer.early_step_in_backward:
        raise ValueError(
            f"{NAME}.cache_weights keeps quantized weights for the microbatches of a step, but with "
            "optimizer.early_step_in_backward each of them changes the weights; set one of the two to false"
        )
    if job_config.fp8_flow_moe.fp8_all_gather and job_config.training.enable_cpu_offload:
        raise ValueError(
            f"{NAME}.fp8_all_gather quantizes shards where they are, but with training.enable_cpu_offload they are on "
            "the CPU; set one of the two to false"
        )
    for name in ("dtype", "mixed_precision_param"):
        value = getattr(job_config.training, name)
        if value not in ("bfloat16", "float32"):
            raise ValueError(f"{NAME} quantizes bf16 or fp32; set training.{name}, now {value!r}, to one of them")
    parallelism = job_config.parallelism
    if job_config.validation.enable and parallelism.context_parallel_degree > 1:
        raise ValueError(
            f"{NAME} with validation under context parallelism is untested; set validation.enable = false or "
            "parallelism.context_parallel_degree = 1"
        )
    if parallelism.expert_parallel_comm_backend != "standard":
        raise ValueError(
            f"{NAME} dispatches fp8 rows itself and cannot use "
            f"parallelism.expert_parallel_comm_backend = {parallelism.expert_parallel_comm_backend!r}; "
            'set it to "standard"'
        )
    schedule = parallelism.pipeline_parallel_schedule
    if parallelism.pipeline_parallel_degree > 1 and parallelism.pipeline_parallel_schedule_csv:
        raise ValueError(
            f"{NAME} does not support a pipeline schedule that comes from a CSV, which may split the backward; unset "
            "parallelism.pipeline_parallel_schedule_csv and use 1F1B or Interleaved1F1B"
        )
    if parallelism.pipeline_parallel_degree > 1 and schedule.lower() in _UNSUPPORTED_SCHEDULES:
        raise ValueError(
            f"{NAME} does not support pipeline schedules that split the backward "
            f"(parallelism.pipeline_parallel_schedule = {schedule!r}); use 1F1B or Interleaved1F1B"
        )


register_model_converter(Fp8FlowMoEConverter, NAME)
