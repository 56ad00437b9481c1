"""A job's converted layers on the meta device, for its dry run and for its kernels."""

import copy
from collections.abc import Iterable
from typing import Any, cast

from torch import Tensor, nn
from torchtitan.config import TORCH_DTYPE_MAP, JobConfig
from torchtitan.distributed import ParallelDims

from titan_fp8moe.kernels import warm_up
from titan_fp8moe.nn.modules import KeepDtype
from titan_fp8moe.torchtitan.modules import Fp8FlowExperts, Fp8FlowFeedForward, Fp8FlowMoE
from titan_fp8moe.trainer.dry_run import MetaMoE, Tokens, layers
from titan_fp8moe.trainer.preflight import expert_layout


def tokens_of(config: JobConfig, dims: ParallelDims) -> Tokens:
    """A microbatch of the job."""
    training, fsdp_casts = config.training, dims.fsdp_enabled or dims.ep_enabled
    compute_dtype = TORCH_DTYPE_MAP[training.mixed_precision_param]
    # Under autocast the residual stream and its norms stay in the parameters' dtype.
    dtype = compute_dtype if fsdp_casts else TORCH_DTYPE_MAP[training.dtype]
    autocast = not (fsdp_casts or dims.tp_enabled or dims.pp_enabled)
    return Tokens(expert_layout(config, dims).tokens, dtype, compute_dtype, autocast)


def moe_of(module: Any) -> MetaMoE | None:
    """The layer that the module is, if it is a converted one."""
    if not isinstance(module, Fp8FlowMoE):
        return None
    inside = [*module.modules()]  # compile and checkpoints may wrap them
    experts: Any = next(m for m in inside if isinstance(m, Fp8FlowExperts))
    shared = next((m for m in inside if isinstance(m, Fp8FlowFeedForward)), None)

    def forward(x: Tensor, ids: Tensor, scores: Tensor) -> Tensor:
        experts.tp_mesh = None
        return type(experts).forward(experts, x, ids, KeepDtype(scores), shared=shared)

    return MetaMoE(experts, experts, shared, cast(Any, module.router).top_k, True, forward)


def compile_ahead(modules: Iterable[nn.Module], tokens: Tokens) -> None:
    """Has the kernels of converted modules on the meta device compiled beside this job. Leaves the modules alone."""
    kinds = {tuple((name, p.shape) for name, p in module.named_parameters()): module for module in modules}
    parts: list[nn.Module] = [part.to(tokens.dtype) for part in copy.deepcopy([*kinds.values()])]
    warm_up.compile_job(layers(parts, tokens, moe_of))
