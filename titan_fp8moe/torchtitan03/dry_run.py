"""Checks a job without its machines: ``python -m titan_fp8moe.torchtitan03.dry_run --config deepseek_v3_16b``.

Runs the config's own trainer as one rank of a fake process group of the real size, up to where it would allocate the
model. The degrees, dims and batch sizes of a job that passes fit together. It takes seconds and needs no GPU. It
does not estimate what activations take.

    python -m titan_fp8moe.torchtitan03.dry_run --config deepseek_v3_671b --rank 100 --fp8_flow_moe.save_h fp8

Other arguments are those of training; ``--module`` is this package's unless given.
"""

import argparse
import contextlib
import functools
import math
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torchtitan.components.metrics import BaseLogger, MetricsProcessor
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.config.configs import ParallelismConfig
from torchtitan.config.manager import ConfigManager
from torchtitan.trainer import Trainer

from titan_fp8moe.torchtitan03.conversion import conversion_of
from titan_fp8moe.torchtitan03.job_checks import expert_layout
from titan_fp8moe.torchtitan03.modules import Fp8FlowFeedForward, Fp8FlowLinear03, Fp8FlowMoE
from titan_fp8moe.trainer import rank_report
from titan_fp8moe.trainer.meta_layers import Tokens, watch


class _Allocates(Exception):
    """torchtitan is about to allocate a part of the model."""

    def __init__(self, part: nn.Module):
        self.part = part


def _to_empty(self: nn.Module, **_: Any) -> None:
    raise _Allocates(self)


@contextlib.contextmanager
def _nothing_outside() -> Iterator[None]:
    """Neither memory of a model nor a logger, which would start a run of W&B."""
    with (
        patch.object(nn.Module, "to_empty", _to_empty),
        patch.object(MetricsProcessor, "_build_metric_logger", lambda *_, **__: BaseLogger()),
    ):
        yield


def smallest_world_size(parallelism: ParallelismConfig) -> int:
    """Product of the parallel degrees. A ``data_parallel_shard_degree`` of -1 counts as the least that works."""
    p = parallelism
    inner, shard = p.context_parallel_degree * p.tensor_parallel_degree, p.data_parallel_shard_degree
    if shard == -1:
        shard = p.expert_parallel_degree // math.gcd(p.expert_parallel_degree, inner)
    return p.data_parallel_replicate_degree * shard * inner * p.pipeline_parallel_degree


def build(config: Trainer.Config, rank: int, world_size: int) -> tuple[Trainer, list[nn.Module]]:
    """One rank's trainer, as far as it gets without memory, and its model parts on the meta device.

    Initializes a fake default process group, so it can run once per process.
    """
    os.environ |= {"WORLD_SIZE": str(world_size), "NGPU": str(world_size), "RANK": str(rank), "LOCAL_RANK": "0"}
    config.comm.mode, config.debug.save_config_file = "fake_backend", None
    owner: Any = type(config)._owner
    trainer = owner.__new__(owner)
    with _nothing_outside():
        try:
            trainer.__init__(config)
        except _Allocates as reached:
            return trainer, vars(trainer).get("model_parts", [reached.part])
    raise RuntimeError("torchtitan's Trainer no longer allocates its model by to_empty, where the dry run ends")


class Built(NamedTuple):
    """One rank's share of a job, from :func:`build`."""

    trainer: Trainer
    rank: int
    parts: list[Any]


def report(built: Built) -> str:
    """The layout and what the rank holds, in a few lines."""
    trainer, rank, parts = built
    config, dims = trainer.config, trainer.parallel_dims
    training, spec = config.training, config.model_spec
    sequences = dims.dp_replicate * dims.dp_shard * training.local_batch_size
    experts = expert_layout(config, dims)
    lines = [
        f"model     {spec.name} {spec.flavor}, {len(cast(Any, conversion_of(spec.model)).fp8)} parts in FP8",
        *rank_report.describe_layout(dims, experts.hidden_dim_shards, experts.fsdp_shards),
        rank_report.describe_batch(sequences, training.seq_len, trainer.gradient_accumulation_steps),
        rank_report.describe_parameters(rank, parts),
        *rank_report.describe_parts(parts, ("tok_embeddings", "norm", "lm_head")),
    ]
    blocks = [(name, block) for part in parts for name, block in part.layers.items()]
    for name, block in [(name, block) for name, block in blocks if getattr(block, "moe_enabled", False)][:1]:
        lines += rank_report.describe_experts(name, block.moe.routed_experts.inner_experts)
    return "\n".join(lines)


def layers(built: Built) -> Iterator[Callable[[], Tensor]]:
    """Forwards of the rank's converted modules on meta tensors. They change the modules, and run once each."""
    config = built.trainer.config
    dtype = TORCH_DTYPE_MAP[config.training.mixed_precision_param]  # FSDP casts, also on one rank
    tokens = Tokens(expert_layout(config, built.trainer.parallel_dims).tokens, dtype, dtype)
    joined: set[nn.Module] = set()
    for module in [m for part in built.parts for m in part.modules()]:
        if isinstance(module, Fp8FlowMoE):
            if module.shared == "fp8":
                joined.add(cast(nn.Module, module.shared_experts))
            yield functools.partial(_run_experts, tokens, module)
        elif module in joined or not isinstance(module, Fp8FlowLinear03 | Fp8FlowFeedForward):
            continue
        elif getattr(module, "in_fp8", True):
            yield functools.partial(tokens.run, module)


def _run_experts(tokens: Tokens, moe: Any) -> Tensor:
    routed, shared = moe.routed_experts, moe.shared_experts if moe.shared == "fp8" else None
    experts = routed.inner_experts
    tokens.gather(experts, fsdp=not experts.outside_fsdp)
    if shared is not None:
        tokens.gather(shared)
    watch(routed)
    experts.gathers_fp8 = False
    ids, scores = tokens.routing(moe.router.top_k)
    x = tokens.rows(experts.matrices().w2.shape[1])
    x_BLD, scores_BLK, ids_BLK = (t.unsqueeze(0) for t in (x, scores, ids))
    counts_E = torch.empty(0, dtype=torch.int32, device="meta")  # which are not read
    return type(routed).forward(routed, x_BLD, scores_BLK, ids_BLK, counts_E, shared=shared)


def from_command_line(description: str | None) -> Built:
    """Builds the job of ``sys.argv``. Ends the process with the mistake, if there is one."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--module", default="titan_fp8moe.torchtitan03", help="whose --config; default: %(default)s")
    parser.add_argument("--world-size", type=int, help="number of ranks; default: the fewest that the degrees allow")
    parser.add_argument("--rank", type=int, default=0, help="the rank to build; under PP ranks hold different stages")
    args, options = parser.parse_known_args()
    try:
        config = ConfigManager().parse_args(["--module", args.module, *options])
        if not hasattr(config, "fp8_flow_moe") and conversion_of(config.model_spec.model) is None:
            raise ValueError(
                f"{args.module}: its config is torchtitan's own; return with_fp8_flow(config), or name "
                "Fp8FlowConverter among the converters"
            )
        world_size = smallest_world_size(config.parallelism) if args.world_size is None else args.world_size
        if not 0 <= args.rank < world_size:
            raise ValueError(f"--world-size {world_size} has no rank {args.rank}; ranks begin with 0")
        trainer, parts = build(config, args.rank, world_size)
    except (AssertionError, ImportError, RuntimeError, ValueError) as error:
        sys.exit(f"error: {error}")
    return Built(trainer, args.rank, parts)


def main() -> None:
    print(report(from_command_line(__doc__)))


if __name__ == "__main__":
    main()
