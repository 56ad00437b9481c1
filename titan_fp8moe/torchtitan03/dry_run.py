"""Checks a job without its machines: ``python -m titan_fp8moe.torchtitan03.dry_run`` and the arguments of training.

Runs the config's own trainer as one rank of a fake process group of the real size, up to where it would allocate the
model. The degrees, dims and batch sizes of a job that passes fit together. It takes seconds and needs no GPU. The
peak of memory that it prints is an estimate (:mod:`titan_fp8moe.trainer.memory`).

    python -m titan_fp8moe.torchtitan03.dry_run --rank 100 --module deepseek_v3 --config deepseek_v3_671b \\
        --override.imports titan_fp8moe.torchtitan03.fp8_flow_moe

``--module`` is this package's unless given.
"""

import functools
import os
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import Tensor, nn

from titan_fp8moe.torchtitan03 import names as tt
from titan_fp8moe.torchtitan03.job_checks import expert_layout, why_all_to_all
from titan_fp8moe.torchtitan03.modules import Fp8FlowFeedForward, Fp8FlowLinear03, Fp8FlowMoE
from titan_fp8moe.trainer import dry_run, measure, memory
from titan_fp8moe.trainer.dry_run import Built, MetaMoE, Tokens


class _Allocates(Exception):
    """torchtitan is about to allocate a part of the model, its argument."""


def _to_empty(self: nn.Module, **_: Any) -> None:
    raise _Allocates(self)


def build(config: tt.Trainer.Config, rank: int, world_size: int) -> tuple[tt.Trainer, list[nn.Module]]:
    """One rank's trainer, as far as it gets without memory, and its model parts on the meta device.

    Initializes a fake default process group, so it can run once per process.
    """
    ranks = {"WORLD_SIZE": str(world_size), "NGPU": str(world_size), "RANK": str(rank), "LOCAL_RANK": "0"}
    config.comm.mode, config.debug.save_config_file = "fake_backend", None
    owner: Any = type(config)._owner
    trainer = owner.__new__(owner)
    with (
        patch.object(nn.Module, "to_empty", _to_empty),
        # else it would start a run of W&B
        patch.object(tt.MetricsProcessor, "_build_metric_logger", lambda *_, **__: tt.BaseLogger()),
        patch.dict(os.environ, ranks),
    ):
        try:
            trainer.__init__(config)
        except _Allocates as reached:
            return trainer, vars(trainer).get("model_parts", [*reached.args])
    raise RuntimeError("torchtitan's Trainer no longer allocates its model by to_empty, where the dry run ends")


def _build(config: Any, rank: int, world_size: int) -> Built:
    trainer, parts = build(config, rank, world_size)
    config, dims = trainer.config, trainer.parallel_dims
    spec, kinds = config.model_spec, (Fp8FlowMoE.Config, Fp8FlowFeedForward.Config, Fp8FlowLinear03.Config)
    fp8 = sum(isinstance(found, kinds) for _, found, *_ in spec.model.traverse(tt.Module.Config, recurse=True))
    model = f"{spec.name} {spec.flavor}, {fp8} parts in FP8"
    layout = expert_layout(config, dims)
    dtype = tt.TORCH_DTYPE_MAP[config.training.mixed_precision_param]  # FSDP casts, also on one rank
    return Built(config, rank, dims, layout, model, parts, Tokens(layout.tokens, dtype, dtype), _moe)


def memory_job(config: Any, dims: tt.ParallelDims) -> memory.Job:
    """The job as :mod:`titan_fp8moe.trainer.memory` reads it."""
    policy = config.activation_checkpoint
    return memory.Job(
        config,
        dims,
        tt.TORCH_DTYPE_MAP[config.training.mixed_precision_param],
        head="lm_head",
        moe_of=_moe,
        keeps=functools.partial(_keeps, policy),
        recomputed=policy.force_recompute_mm_shapes_by_fqns if isinstance(policy, tt.SelectiveAC.Config) else (),
        loss_chunks=getattr(config.loss, "num_chunks", 1),
        keeps_gradients=not config.training.disable_cuda_graphs,
    )


def _keeps(policy: Any, block: int, part: memory.Part) -> float:
    if isinstance(policy, tt.SelectiveAC.Config):
        return part.per_op
    if isinstance(policy, tt.MemoryBudgetAC.Config):
        return policy.memory_budget * part.everything
    return part.everything if policy is None else 0


def _moe(module: Any) -> MetaMoE | None:
    if not isinstance(module, Fp8FlowMoE):
        return None
    routed: Any = module.routed_experts
    shared: Any = module.shared_experts if module.fp8_shared else None

    def forward(*inputs: Tensor) -> Tensor:
        x_BLD, ids_BLK, scores_BLK = (t.unsqueeze(0) for t in inputs)
        counts_E = torch.empty(0, dtype=torch.int32, device="meta")  # which are not read
        return type(routed).forward(routed, x_BLD, scores_BLK, ids_BLK, counts_E, shared=shared)

    experts = routed.inner_experts
    return MetaMoE(routed, experts, shared, cast(Any, module.router).top_k, experts.in_fsdp, forward)


def _load(module: str | None, options: list[str]) -> Any:
    return tt.ConfigManager().parse_args(["--module", str(module), *options])


def from_command_line(description: str | None) -> Built:
    """Builds the job of ``sys.argv``. Ends the process with the mistake, if there is one."""
    options = dict(default="titan_fp8moe.torchtitan03", help="whose --config; default: %(default)s")
    return dry_run.from_command_line(description, "--module", _load, dry_run.smallest_world_size, _build, **options)


def main() -> None:
    built, lines = from_command_line(__doc__), []
    if not any(getattr(part, "mtp_layers", None) for part in built.parts):  # multi-token prediction is not estimated
        lines = memory.report(memory_job(built.config, built.dims), built, why_all_to_all(built.config))
    print(dry_run.report(built, experts="moe.routed_experts.inner_experts", lines=lines), flush=True)
    if built.measured:
        measure.show(built)


if __name__ == "__main__":
    main()
