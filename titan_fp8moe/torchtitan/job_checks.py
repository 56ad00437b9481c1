"""Checks of a torchtitan 0.2.2 job: :mod:`titan_fp8moe.trainer.preflight` under torchtitan's names, and limits of its
own.

All of them run before anything is converted or allocated. Each raises ValueError with the setting to change.
"""

from typing import Any, cast

from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.models.gpt_oss.model.moe import GptOssGroupedExperts, GptOssMoE
from torchtitan.models.moe.moe import GroupedExperts, MoE, TokenReorderer
from torchtitan.tools.logging import logger

from titan_fp8moe.config import Fp8FlowMoEConfig
from titan_fp8moe.torchtitan.modules import EXPERTS
from titan_fp8moe.trainer import preflight
from titan_fp8moe.trainer.preflight import ExpertLayout

# The classes of a MoE layer's parts that conversion replaces. Subclasses may compute something else.
_KNOWN = (MoE, GroupedExperts, TokenReorderer), (GptOssMoE, GptOssGroupedExperts, TokenReorderer)


def check_job(job: JobConfig) -> None:
    """The settings of the job, without its parallel degrees and its model."""
    config = cast(Any, job).fp8_flow_moe
    preflight.check_job(job, config, validation="validation")
    if config.cache_weights and job.optimizer.early_step_in_backward:
        raise ValueError(
            "fp8_flow_moe.cache_weights keeps quantized weights for a whole step, but with "
            "optimizer.early_step_in_backward each microbatch changes the weights; set one of the two to false"
        )
    if others := [name for name in job.model.converters if name.startswith("quantize.grouped_mm")]:
        raise ValueError(
            f"fp8_flow_moe and {', '.join(others)} convert the same experts; keep one of them in model.converters"
        )
    if config.linear_fqns and preflight.compiles_model(job) and config.statistics_every:
        raise ValueError(
            "fp8_flow_moe.statistics_every works outside of graphs, but compile takes the linears of "
            "fp8_flow_moe.linear_fqns into one; leave out one of the three"
        )


def check_parallelism(dims: ParallelDims) -> None:
    """Warns about degrees that torchtitan 0.2.2 gets wrong."""
    if dims.dp_replicate > 1 and dims.dp_shard * dims.cp == 1:
        logger.warning(
            f"torchtitan 0.2.2 divides gradients by parallelism.data_parallel_replicate_degree = {dims.dp_replicate} "
            "once too often when unsharded; raise data_parallel_shard_degree, or scale learning rate and max_norm"
        )
    if dims.pp > 1:
        logger.warning(
            "torchtitan 0.2.2 leaves gradients under pipeline parallelism as sums over a step's tokens, which "
            "training.max_norm clips; multiply it by their number, as train_configs/deepseek_v3_671b.toml does"
        )


def why_all_to_all(job: JobConfig) -> str | None:
    """Why no step of this job can be run again, as ``dispatch = "auto"`` needs it over symmetric memory."""
    return "optimizer.early_step_in_backward" if job.optimizer.early_step_in_backward else None


def check_layer(name: str, layer: MoE, config: Fp8FlowMoEConfig, layout: ExpertLayout) -> None:
    """The classes and dims of one MoE layer."""
    parts = type(layer), type(layer.experts), type(layer.reorderer)
    if parts not in _KNOWN:
        known, found = (", ".join(part.__name__ for part in kind) for kind in (_KNOWN[0], parts))
        raise ValueError(
            f"fp8_flow_moe converts torchtitan's {known}, or gpt_oss's, but {name} has {found}; leave it in bf16 with "
            "fp8_flow_moe.filter_fqns, or remove the converter that changed it"
        )
    w2 = EXPERTS[type(layer.experts)].matrix_names[1]
    preflight.check_layer(name, getattr(layer.experts, w2).shape, config, layout)
