"""One rank's share of a job, without its machines: the part of a dry run that no release of torchtitan changes.

An adapter's ``dry_run`` reads the command line with :func:`from_command_line` and builds the rank's model parts on the
meta device. :func:`report` describes them.

:func:`layers` runs their converted modules as they are in training, on meta tensors: what they launch is what a job
compiles. A dry run ends where torchtitan would allocate the model, with parameters sharded as FSDP keeps them. A layer
that runs alone needs them whole, in FSDP's compute dtype. Transfers to other ranks move nothing.
"""

import argparse
import functools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titan_fp8moe.nn.linear import Fp8FlowLinear
from titan_fp8moe.nn.parallel import local_of
from titan_fp8moe.trainer import plan, preflight
from titan_fp8moe.trainer.experts import Fp8FFN
from titan_fp8moe.trainer.preflight import ExpertLayout

# Parameter, gradient and Adam's two moments, all in the parameter's dtype.
_TENSORS_PER_PARAMETER = 4


class Built(NamedTuple):
    """One rank's share of a job.

    Attributes:
        model: its name and what is known of the whole model, for the report.
        dims: torchtitan's ``ParallelDims``.
        parts: the parallelized model, or its pipeline stages that the rank has.
        tokens: of a microbatch on this rank.
        moe_of: the MoE layer that a module is, if it is a converted one.
        measured: whether the command line asks for :mod:`titan_fp8moe.trainer.measure`.
    """

    config: Any
    rank: int
    dims: Any
    layout: ExpertLayout
    model: str
    parts: list[nn.Module]
    tokens: "Tokens"
    moe_of: "Callable[[Any], MetaMoE | None]"
    measured: bool = False


def smallest_world_size(config: Any, expert_tensor_parallel: int = 1, least_shards: int = 1) -> int:
    """Product of the parallel degrees. A ``data_parallel_shard_degree`` of -1 counts as the least that works."""
    p = config.parallelism
    inner, shard = p.context_parallel_degree * p.tensor_parallel_degree, p.data_parallel_shard_degree
    if shard == -1:
        experts = p.expert_parallel_degree * expert_tensor_parallel
        shard = max(least_shards, experts // math.gcd(experts, inner))
    return p.data_parallel_replicate_degree * shard * inner * p.pipeline_parallel_degree


def from_command_line(
    description: str | None,
    argument: str,
    load: Callable[[str | None, list[str]], Any],
    smallest: Callable[[Any], int],
    build: Callable[[Any, int, int], Built],
    **options: Any,
) -> Built:
    """Builds the job of ``sys.argv``. Ends the process with the mistake, if there is one.

    Args:
        argument: the one that names the job, with its ``options`` for argparse.
        load: makes the job's config of its value and of all arguments that are not known here.
        smallest: the fewest ranks of a config.
        build: one rank's share of a config, from the rank and the number of ranks.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(argument, **options)
    parser.add_argument("--world-size", type=int, help="number of ranks; default: the fewest that the degrees allow")
    parser.add_argument("--rank", type=int, default=0, help="the rank to build; under PP ranks hold different stages")
    parser.add_argument("--measure", action="store_true", help="time the rank's layers, on a GPU")
    args, others = parser.parse_known_args()
    if args.measure and not torch.cuda.is_available():
        sys.exit("error: --measure times layers on a GPU, and PyTorch finds none here; leave it out")
    try:
        with preflight.for_other_machines():
            config = load(getattr(args, argument.strip("-")), others)
            world_size = smallest(config) if args.world_size is None else args.world_size
            if not 0 <= args.rank < world_size:
                raise ValueError(f"--world-size {world_size} has no rank {args.rank}; ranks begin with 0")
            return build(config, args.rank, world_size)._replace(measured=args.measure)
    except KeyError as error:  # a name that torchtitan does not know, such as a converter's
        sys.exit(f"error: KeyError: {error}")
    except (AssertionError, ImportError, OSError, RuntimeError, TypeError, ValueError) as error:
        sys.exit(f"error: {error}")


def report(built: Built, *, experts: str, lines: Sequence[str]) -> str:
    """The layout and what the rank holds, in a few lines.

    Args:
        experts: name of a block's routed experts.
        lines: what else is known of the rank.
    """
    dims, layout, training, parts = built.dims, built.layout, built.config.training, built.parts
    sequences = dims.dp_replicate * dims.dp_shard * training.local_batch_size
    shards = [local_of(param) for part in parts for param in part.parameters()]
    gib = _TENSORS_PER_PARAMETER * sum(shard.nbytes for shard in shards) / 2**30
    found = [
        f"model     {built.model}",
        f"layout    {dims.world_size} ranks = pp {dims.pp} x dp_replicate {dims.dp_replicate} x "
        f"dp_shard {dims.dp_shard} x cp {dims.cp} x tp {dims.tp}",
        f"          experts: ep {dims.ep} x etp {getattr(dims, 'etp', layout.hidden_dim_shards)} x fsdp "
        f"{layout.fsdp_shards}",
        f"batch     {sequences} sequences of {training.seq_len} tokens, "
        f"{max(training.global_batch_size // sequences, 1)} times per step",
        *(f"{'          ' if i else 'fp8       '}{line}" for i, line in enumerate(plan.announced)),
        f"rank {built.rank:<4} {sum(shard.numel() for shard in shards):,} parameters, {gib:.1f} GiB with gradients and "
        "Adam states",
        *lines,
    ]
    for part in parts:
        ends = [name for name, _ in part.named_children() if name != "layers"]
        held = ", ".join(cast(nn.ModuleDict, part.layers))
        found.append(f"          layers {held}{' with ' if ends else ''}{', '.join(ends)}")
    blocks = [(name, block) for part in cast(Any, parts) for name, block in part.layers.items()]
    for name, block in [(name, block) for name, block in blocks if getattr(block, "moe_enabled", False)][:1]:
        module = attrgetter(experts)(block)
        found.append(f"experts   of layer {name}, {type(module).__name__}:")
        for key, param in module.named_parameters():
            found.append(f"          {key} {tuple(param.shape)}, on this rank {tuple(local_of(param).shape)}")
    return "\n".join(found)


# --- converted layers on meta tensors ---------------------------------------------------------------------------------

_RANKS_KEEP = {"ep", "tp", "etp"}
"""Mesh dims over which FSDP does not gather."""


class Tokens(NamedTuple):
    """A microbatch on one rank.

    Attributes:
        count: T.
        dtype: of the layers' input.
        compute_dtype: of the parameters that FSDP gathers, or of results under autocast.
        autocast: whether the job runs under autocast, as torchtitan 0.2.2's does without FSDP.
    """

    count: int
    dtype: torch.dtype
    compute_dtype: torch.dtype
    autocast: bool = False

    def rows(self, dim: int) -> Tensor:
        """A layer's input (T, D)."""
        return torch.empty(self.count, dim, dtype=self.dtype, device="meta", requires_grad=True)

    def routing(self, top_k: int) -> tuple[Tensor, Tensor]:
        """A router's ids and scores (T, K)."""
        ids = torch.empty(self.count, top_k, dtype=torch.int64, device="meta")
        return ids, torch.empty(self.count, top_k, dtype=torch.float32, device="meta", requires_grad=True)

    def gather(self, module: nn.Module, fsdp: bool = True) -> None:
        """Replaces the module's parameters by meta tensors as its forward sees them. ``fsdp``: FSDP gathers them."""
        for part in module.modules():
            for name, param in part.named_parameters(recurse=False):
                part.register_parameter(name, self._gathered(param, fsdp))

    def run(self, module: Fp8FFN | Fp8FlowLinear) -> Tensor:
        """The forward of a module that serves every token."""
        self.gather(module)
        watch(module)
        with torch.autocast("cpu", self.compute_dtype, enabled=self.autocast and self.compute_dtype != self.dtype):
            if isinstance(module, Fp8FlowLinear):
                return Fp8FlowLinear.forward(module, self.rows(module.weight.shape[1]))
            return module.run(self.rows(module.w1.weight.shape[1]))

    def _gathered(self, param: nn.Parameter, fsdp: bool) -> nn.Parameter:
        shape, dtype = list(param.shape), param.dtype
        if isinstance(param, DTensor):
            mesh, names = param.device_mesh, param.device_mesh.mesh_dim_names or ()
            for dim, (name, placement) in enumerate(zip(names, param.placements, strict=True)):
                if name in _RANKS_KEEP and placement.is_shard():
                    shape[cast(Any, placement).dim] //= mesh.size(dim)
            if fsdp and not _RANKS_KEEP.issuperset(names):
                dtype = self.compute_dtype
        return nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=param.requires_grad)


def watch(module: Any) -> None:
    """Gives the module flags as the NaN watch does: kernels with flags are others."""
    module.nan_flags = torch.empty(2, 16, dtype=torch.uint8, device="meta")


class MetaMoE(NamedTuple):
    """A converted MoE layer as a dry run needs it.

    Attributes:
        routed: has the NaN flags.
        experts: holds the parameters.
        shared: the shared experts that join the routed ones, if any.
        fsdp: whether FSDP gathers the routed experts.
        forward: from rows (T, D), ids and scores (T, K).
    """

    routed: nn.Module
    experts: Any
    shared: nn.Module | None
    top_k: int
    fsdp: bool
    forward: Callable[[Tensor, Tensor, Tensor], Tensor]

    def run(self, tokens: Tokens) -> Tensor:
        tokens.gather(self.experts, fsdp=self.fsdp)
        if self.shared is not None:
            tokens.gather(self.shared)
        watch(self.routed)
        self.experts.gathers_fp8 = False
        return self._forward(tokens)

    def run_over_symmetric_memory(self, tokens: Tokens) -> Tensor:
        """Runs the layer as ``dispatch = "auto"`` may in a later step. Call it after :meth:`run`."""
        routed = cast(Any, self.routed)
        routed.config = replace(routed.config, dispatch="symmetric")
        return self._forward(tokens)

    def _forward(self, tokens: Tokens) -> Tensor:
        return self.forward(tokens.rows(self.experts.matrices().w2.shape[1]), *tokens.routing(self.top_k))


MoeOf = Callable[[Any], MetaMoE | None]


def converted(parts: list[nn.Module], moe_of: MoeOf) -> Iterator[tuple[str, MetaMoE | Fp8FFN | Fp8FlowLinear]]:
    """The converted modules by name. Shared experts that join a MoE layer are in its record."""
    joined: set[nn.Module | None] = set()
    for name, module in [named for part in parts for named in part.named_modules()]:
        if (moe := moe_of(module)) is not None:
            joined.add(moe.shared)
            yield plan.plain_name(name), moe
        elif module not in joined and isinstance(module, Fp8FFN | Fp8FlowLinear):
            yield plan.plain_name(name), module


def layers(parts: list[nn.Module], tokens: Tokens, moe_of: MoeOf) -> Iterator[Callable[[], Tensor]]:
    """Forwards of :func:`converted` modules on meta tensors. They change the modules, and run once each."""
    for _, module in converted(parts, moe_of):
        if not isinstance(module, MetaMoE):
            yield functools.partial(tokens.run, module)
            continue
        yield functools.partial(module.run, tokens)
        if cast(Any, module.routed).config.dispatch == "auto":
            yield functools.partial(module.run_over_symmetric_memory, tokens)
