"""The model converter ``fp8_flow_moe``: checks that the job can work, then converts the model's MoE layers."""

from typing import Any, cast

import torch
import torch.nn as nn
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.models.deepseek_v3.infra import parallelize as deepseek_v3_parallelize
from torchtitan.models.llama4.infra import parallelize as llama4_parallelize
from torchtitan.models.moe.moe import MoE
from torchtitan.models.qwen3.infra import parallelize as qwen3_parallelize
from torchtitan.protocols.model_converter import ModelConverter, register_model_converter
from torchtitan.tools.logging import logger

from titan_fp8moe import checks, moe, ops
from titan_fp8moe.config import Fp8FlowMoEConfig
from titan_fp8moe.torchtitan import compiling, job_checks, parallel
from titan_fp8moe.torchtitan.modules import Fp8FlowMoE, why_not_fp8
from titan_fp8moe.torchtitan.statistics import log_statistics

NAME = "fp8_flow_moe"

# What per-op activation checkpointing keeps. The routed experts save little and recompute by themselves. The router's
# choice is kept so that the recomputation routes exactly as the forward did.
_SAVED_OPS = (*moe.SAVED_OPS, torch.ops.aten.topk.default)


class Fp8FlowMoEConverter(ModelConverter):
    """Converts every torchtitan ``MoE`` layer that ``fp8_flow_moe.filter_fqns`` does not match.

    Raises:
        ValueError: for a job or hardware that cannot work, before anything is converted or allocated. It names the
            setting and the remedy.
    """

    trains_here = True
    """Whether this machine trains the model and so needs the hardware. False in a dry run."""

    def __init__(self, job_config: JobConfig, parallel_dims: ParallelDims):
        job_checks.check_job(job_config)
        job_checks.check_parallelism(job_config, parallel_dims)
        self.layout = job_checks.expert_layout(job_config, parallel_dims)
        self.config: Fp8FlowMoEConfig = cast(Any, job_config).fp8_flow_moe
        self.fault_tolerance = job_config.fault_tolerance.enable
        self.tensor_shards = parallel_dims.tp
        self.converts_linears = any(name.startswith("quantize.linear") for name in job_config.model.converters)
        checks.warn_about_settings(self.config, self.layout.fsdp_shards)

    def convert(self, model: nn.Module) -> None:
        layers = {name: module for name, module in model.named_modules() if isinstance(module, MoE)}
        if not layers:
            raise ValueError(
                f"model.converters has {NAME!r}, but the model has no MoE layer; remove it or choose a flavor with MoE"
            )
        shared = [f"{name}.shared_experts" for name, layer in layers.items() if layer.shared_experts is not None]
        names = checks.select_layers([*layers, *shared], self.config.filter_fqns)
        selected = [name for name in layers if name in names]
        for name in selected:
            job_checks.check_layer(name, layers[name], self.config, self.layout)
        backend = self._check_hardware() if selected else "nothing to convert"
        if self.config.statistics_every and not selected:
            logger.warning(f"{NAME}.statistics_every has no effect: {NAME}.filter_fqns leaves no layer to count")

        _prepare_torchtitan(self.config)
        skipped = [name for name in layers if name not in selected]
        reasons = {}
        for name in selected:
            if layers[name].shared_experts is not None:
                reasons[name] = self._why_shared_stay(layers[name], f"{name}.shared_experts" in names)
            Fp8FlowMoE.convert(layers[name], self.config, fp8_shared=reasons.get(name, "") is None)
            # FSDP keeps the experts even on one rank in two cases. Clipping needs all gradients on one mesh, and bf16
            # experts are on FSDP's. TorchFT averages over replicas what FSDP reduces.
            cast(Fp8FlowMoE, layers[name]).experts.keep_fsdp = bool(skipped) or self.fault_tolerance
        logger.info(
            f"FP8-Flow-MoE: {len(selected)} MoE layers converted, {len(skipped)} left in bf16"
            f"{' (' + ', '.join(skipped) + ')' if skipped else ''}; {backend}; {self.config.describe()}"
        )
        if reasons:
            fp8 = sum(reason is None for reason in reasons.values())
            why = "; ".join(sorted({reason for reason in reasons.values() if reason is not None}))
            logger.info(
                f"FP8-Flow-MoE: shared experts of {fp8} layers in FP8, of {len(reasons) - fp8} as before"
                f"{': ' + why if why else ''}"
            )

    def _why_shared_stay(self, layer: MoE, selected: bool) -> str | None:
        """Why the shared experts of a converted layer stay as they are, or None if they join the FP8 data flow."""
        if not selected:
            return f"{NAME}.filter_fqns"
        if self.converts_linears:
            return "model.converters has quantize.linear, which converts them"
        return why_not_fp8(layer.shared_experts, self.tensor_shards)

    def _check_hardware(self) -> str:
        if not self.trains_here:
            return "dry run"
        return checks.check_hardware(self.config.emulate, remedy="train in bf16 with model.converters = []")

    def post_optimizer_hook(self, model: nn.Module | list[nn.Module]) -> None:
        """Nothing: :class:`titan_fp8moe.weights.WeightCache` clears itself after an optimizer step."""


def _prepare_torchtitan(config: Fp8FlowMoEConfig) -> None:
    """What converted layers need of the process: parallel styles, checkpointing, compilation, kernels, statistics."""
    parallel.install()
    for module in (llama4_parallelize, deepseek_v3_parallelize, qwen3_parallelize):
        module._op_sac_save_list.update(_SAVED_OPS)
        compiling.install(module)
    ops.emulate(config.emulate)
    if config.statistics_every:
        log_statistics()


register_model_converter(Fp8FlowMoEConverter, NAME)
