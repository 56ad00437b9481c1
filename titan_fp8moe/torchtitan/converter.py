"""The model converter ``fp8_flow_moe``: checks that the job can work, then converts MoE layers, FFNs and linears."""

import sys
from typing import Any, cast

import torch
import torch.nn as nn
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims, utils
from torchtitan.models.deepseek_v3.infra import parallelize as deepseek_v3_parallelize
from torchtitan.models.gpt_oss.infra import parallelize as gpt_oss_parallelize
from torchtitan.models.llama3.infra import parallelize as llama3_parallelize
from torchtitan.models.llama4.infra import parallelize as llama4_parallelize
from torchtitan.models.moe.moe import MoE
from torchtitan.models.qwen3.infra import parallelize as qwen3_parallelize
from torchtitan.protocols.model_converter import ModelConverter
from torchtitan.tools.logging import logger

from titan_fp8moe import SAVED_OPS, patches
from titan_fp8moe.config import Fp8FlowMoEConfig
from titan_fp8moe.kernels import warm_up
from titan_fp8moe.layer.operands import after_optimizer_step
from titan_fp8moe.nn.linear import Fp8FlowLinear
from titan_fp8moe.torchtitan import compiling, first_hour, job_checks, meta, metrics, parallel
from titan_fp8moe.torchtitan.modules import Fp8FlowFeedForward, Fp8FlowMoE, why_not_fp8
from titan_fp8moe.trainer import auto_dispatch, compat, preflight
from titan_fp8moe.trainer.ahead import keep_host_ahead
from titan_fp8moe.trainer.plan import DENSE, LINEAR, MOE, SHARED, announce, make_plan

NAME = "fp8_flow_moe"

# What per-op activation checkpointing keeps. The routed experts save little and recompute by themselves. The router's
# choice is kept so that the recomputation routes exactly as the forward did.
_SAVED_OPS = {*SAVED_OPS, torch.ops.aten.topk.default}
_PARALLELIZE = (llama3_parallelize, llama4_parallelize, deepseek_v3_parallelize, qwen3_parallelize, gpt_oss_parallelize)
_CHECKED_ON = "torchtitan 0.2.2"
_TRAIN = "torchtitan.train"


class Fp8FlowMoEConverter(ModelConverter):
    """Converts the MoE layers and FFNs that ``filter_fqns`` does not match, and the linears that ``linear_fqns`` does.

    Raises:
        ValueError: for a job or hardware that cannot work, before anything is converted or allocated. It names the
            setting and the remedy.
    """

    def __init__(self, job_config: JobConfig, parallel_dims: ParallelDims):
        job_checks.check_job(job_config)
        job_checks.check_parallelism(parallel_dims)
        first_hour.check_resumption(job_config, parallel_dims)
        self.layout = preflight.expert_layout(job_config, parallel_dims)
        self.config: Fp8FlowMoEConfig = cast(Any, job_config).fp8_flow_moe
        self.why_all_to_all = job_checks.why_all_to_all(job_config)
        self.tensor_shards = parallel_dims.tp
        self.tokens = meta.tokens_of(job_config, parallel_dims)
        self.fsdp_has_work = preflight.fsdp_has_work(job_config, self.layout, parallel_dims)
        self.converts_linears = any(name.startswith("quantize.linear") for name in job_config.model.converters)
        preflight.check_dispatch(self.config, self.layout)
        preflight.warn_of_settings_without_effect(self.config, self.layout)

    def convert(self, model: nn.Module) -> None:
        found = dict(model.named_modules())
        layers = {name: m for name, m in found.items() if isinstance(m, MoE)}
        shared = {f"{name}.{SHARED}" for name in layers}
        plan = make_plan(
            layers,
            {name: m for name, m in found.items() if name in shared or name.split(".")[-1] == DENSE},
            {name: m for name, m in found.items() if isinstance(m, nn.Linear)},
            self.config,
            check_layer=lambda name, layer: job_checks.check_layer(name, layer, self.config, self.layout),
            why_not_ffn=self._why_not_fp8,
            check_linear=self._check_linear,
        )
        fp8 = [part for part in plan if part.reason is None]
        num_layers = sum(part.kind == MOE for part in fp8)
        way = auto_dispatch.prepare(self.config, self.layout, self.why_all_to_all, num_layers)
        announce(plan, self.config, logger, way)
        if fp8:
            prepare_torchtitan()
        converted = {part.name for part in fp8}
        # Clipping needs all gradients on one mesh, and bf16 experts are on FSDP's.
        in_fsdp = self.fsdp_has_work or any(part.kind == MOE and part.reason for part in plan)
        for part in fp8:
            if part.kind == MOE:
                Fp8FlowMoE.convert(part.module, self.config, f"{part.name}.{SHARED}" in converted, in_fsdp)
            elif part.kind == DENSE:
                Fp8FlowFeedForward.convert(part.module, self.config)
            elif part.kind == LINEAR:
                Fp8FlowLinear.convert(cast(nn.Linear, part.module), self.config)
        if fp8 and preflight.trains_here():
            warm_up.use_inductors_ptxas()
            if warm_up.begin() is not None and self.layout.expert_shards == self.tensor_shards == 1:
                meta.compile_ahead((m for name, m in found.items() if name in converted), self.tokens)  # in their order
            watched = {part.name for part in fp8 if part.kind != SHARED}
            metrics.watch({name: getattr(m, "experts", m) for name, m in model.named_modules() if name in watched})
        if fp8:
            patches.log()

    def _check_linear(self, name: str, linear: nn.Linear) -> None:
        if self.converts_linears:
            raise ValueError(
                f"{NAME}.linear_fqns and model.converters' quantize.linear both convert linears; keep one of them"
            )
        preflight.check_linear(name, linear.out_features, linear.in_features, self.tensor_shards)

    def _why_not_fp8(self, ffn: nn.Module) -> str | None:
        if self.converts_linears:
            return "model.converters has quantize.linear, which converts its linears"
        return why_not_fp8(ffn, self.tensor_shards)

    def post_optimizer_hook(self, model: nn.Module | list[nn.Module]) -> None:
        """Clears caches of trained weights, also where a container steps optimizers that are not ``torch.optim``'s."""
        after_optimizer_step()


def prepare_torchtitan() -> None:
    """Prepares the process for converted layers: parallel styles, checkpointing, compilation."""
    compat.fix_selective_checkpointing()
    compat.fix_full_checkpointing()
    compat.fix_shape_inference()
    parallel.install()
    for module in _PARALLELIZE:
        patches.wrap(module, "_op_sac_save_list", lambda ops: ops | _SAVED_OPS, checked_on=_CHECKED_ON)
        if hasattr(module, "apply_compile"):  # torchtitan compiles no block of gpt_oss
            compiling.install(module)
    for trainer in loaded_trainers():
        keep_host_ahead(trainer, utils)
        auto_dispatch.run_steps_again(trainer)


def loaded_trainers() -> list[type]:
    """torchtitan's ``Trainer``, also of ``python -m torchtitan.train``, where the module is ``__main__``."""
    loaded: list[Any] = [sys.modules[name] for name in ("__main__", _TRAIN) if name in sys.modules]
    return [module.Trainer for module in loaded if getattr(module.__spec__, "name", "") == _TRAIN]


def register() -> None:
    """Adds the converter to torchtitan."""
    registry = "torchtitan.protocols.model_converter:_registry_model_converter_cls"
    patches.put(registry, NAME, Fp8FlowMoEConverter, checked_on=_CHECKED_ON)
