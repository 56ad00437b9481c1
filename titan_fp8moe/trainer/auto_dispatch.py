"""Lets torchtitan's trainers run a step again over the all-to-all where ``dispatch = "auto"`` had no room.

See :mod:`titan_fp8moe.dispatch.auto`.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from titan_fp8moe import patches
from titan_fp8moe.config import Fp8FlowMoEConfig
from titan_fp8moe.dispatch import auto
from titan_fp8moe.layer import statistics
from titan_fp8moe.trainer import preflight

_CPU = torch.device("cpu")
_COUNTS = "tokens_per_expert", "tokens_per_expert_E"  # of torchtitan 0.2.2's and 0.3.0's MoE layers


def prepare(config: Fp8FlowMoEConfig, layout: preflight.ExpertLayout, reason: str | None, layers: int) -> str:
    """Allows or forbids symmetric memory in this process; says how tokens travel, for logs.

    Args:
        reason: why the job excludes symmetric memory, or None.
        layers: how many MoE layers are in FP8.
    """
    auto.disable()
    way, changes = describe(config, layout, reason) if layers else ("", False)
    if changes and preflight.trains_here():
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else _CPU
        auto.enable(device)
    return way


def describe(config: Fp8FlowMoEConfig, layout: preflight.ExpertLayout, reason: str | None) -> tuple[str, bool]:
    """How tokens travel, and whether that may change. ``reason``: as for :func:`prepare`."""
    if layout.expert_shards == 1:
        return "", False
    way, condition = f"dispatch over {config.backend.description}", ""
    if preflight.ranks_of_a_node() is None:
        condition = f", if the {layout.expert_shards * layout.hidden_dim_shards} ranks share a node"
    if config.dispatch == "symmetric":
        return f"{way}{condition}", False
    if config.dispatch != "auto":
        return way, False
    if (reason := reason or _why_all_to_all(layout)) is not None:
        return f"{way}: {reason}", False
    return f"{way}, and over symmetric memory once all rows fit{condition}", True


def _why_all_to_all(layout: preflight.ExpertLayout) -> str | None:
    ranks = layout.expert_shards * layout.hidden_dim_shards
    if not preflight.trains_here():
        return None
    if (here := preflight.ranks_of_a_node()) is None:
        return "LOCAL_WORLD_SIZE does not say how many ranks a node has"
    if here % ranks:
        return f"{ranks} ranks share the experts and a node has {here}"
    devices = range(torch.cuda.device_count())
    if any(a != b and not torch.cuda.can_device_access_peer(a, b) for a in devices for b in devices):
        return "a GPU cannot access another one's memory"
    return None


def run_steps_again(trainer: type) -> None:
    """Changes ``train_step`` of torchtitan's ``Trainer``: :func:`titan_fp8moe.dispatch.auto.run_step` runs it."""
    patches.wrap(trainer, "train_step", _again, checked_on="torchtitan 0.2.2 and 0.3.0")


def _again(train_step: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(train_step)
    def wrapper(self: Any, data_iterator: Iterator[Any]) -> None:
        taken: list[Any] = []
        ntokens_seen, drawn = self.ntokens_seen, _random_states() if auto.is_fast() else ()

        def take() -> Iterator[Any]:
            nonlocal ntokens_seen
            for batch in data_iterator:
                taken.append(batch)
                ntokens_seen = self.ntokens_seen  # 0.2.2 counts what is loaded; 0.3 counts later, in each forward
                yield batch

        def step() -> None:
            return train_step(self, iter([*taken]) if taken else take())

        def forget() -> None:
            self.ntokens_seen = ntokens_seen
            for state, restore in zip(drawn, (torch.set_rng_state, torch.cuda.set_rng_state), strict=False):
                restore(state)  # dropout and routers' noise draw the same numbers again
            _forget(self.model_parts)

        return auto.run_step(step, forget)

    return wrapper


def _random_states() -> tuple[torch.Tensor, ...]:
    """The states of PyTorch's default generators. The device's is kept on the host: reading it waits for nothing."""
    return (torch.get_rng_state(), *([torch.cuda.get_rng_state()] if torch.cuda.is_available() else ()))


def _forget(model_parts: list[torch.nn.Module]) -> None:
    """Clears what a step leaves behind: the routers' counts, which each begins at zero, NaN flags and statistics."""
    statistics.forget()
    for part in model_parts:
        for module in part.modules():
            for name in (*_COUNTS, "nan_flags"):
                if isinstance(tensor := getattr(module, name, None), torch.Tensor):
                    tensor.zero_()
