"""PEFT's adapters of Transformers' experts (``target_parameters``), run beside their FP8 weights.

PEFT wraps the experts in one ``ParamWrapper`` per parameter. In its forward a wrapper replaces the parameter by
W + scale * B A, and FP8 would round most of B A away. Here it hands the factors to the experts instead, and
:func:`titan_fp8moe.transformers.register` passes them to the layer. Everything else is PEFT's: names, files, merging,
switching adapters on and off.
"""

import contextlib
import functools
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from titan_fp8moe import patches
from titan_fp8moe.layer.lora import Adapter, Lora
from titan_fp8moe.versions import warn_about_versions

# Parameters of Transformers' experts, and the weights of a layer.
_PARAMETERS = {"gate_up_proj": "w1", "up_proj": "w1", "down_proj": "w2"}


def run_beside(serves: Callable[[nn.Module], bool]) -> None:
    """Lets PEFT's wrappers hand their adapters to the experts for which ``serves`` is true. Does nothing without PEFT.

    Raises:
        RuntimeError: for a version of PEFT whose wrappers are others.
    """
    if importlib.util.find_spec("peft") is None:
        return
    warn_about_versions("peft")
    activating = functools.partial(_activating, serves)
    patches.wrap("peft.tuners.lora:ParamWrapper", "_activate_lora", activating, checked_on="PEFT 0.21.2")


def _activating(serves: Callable[[nn.Module], bool], merge: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(merge)
    def activate(self: Any, active_adapters: list[str]) -> contextlib.AbstractContextManager:
        experts = self.get_base_layer()
        if self.parameter_name not in _PARAMETERS or not serves(experts):
            return merge(self, active_adapters)
        return _hand_over(self, experts, [name for name in active_adapters if name in self.lora_A])

    return activate


@contextlib.contextmanager
def _hand_over(wrapper: Any, experts: Any, names: list[str]) -> Iterator[None]:
    weight, before = _PARAMETERS[wrapper.parameter_name], vars(experts).get("_fp8_flow_lora", {})
    # A dict of this call's own: nn.DataParallel's replicas share the attributes of their module.
    experts._fp8_flow_lora = before | ({weight: _join([_adapter(wrapper, name) for name in names])} if names else {})
    try:
        yield
        if experts._fp8_flow_lora:
            raise ValueError(
                f"another package's forward of {type(experts).__name__} has run without PEFT's adapters; "
                "titan_fp8moe.transformers.converted(model) names it"
            )
    finally:
        experts._fp8_flow_lora = {}


def _adapter(wrapper: Any, name: str) -> Adapter:
    """PEFT's A is (E r, K), expert by expert, and its B (N, r E), rank by rank, also of a weight (E, K, N)."""
    E, A, B = wrapper.num_experts, wrapper.lora_A[name].weight, wrapper.lora_B[name].weight
    A, B = A.view(E, -1, A.shape[1]), B.view(B.shape[0], -1, E).permute(2, 0, 1)
    return Adapter(A, B, wrapper.scaling[name])


def _join(adapters: list[Adapter]) -> Adapter:
    """Several active adapters as one, whose rank is the sum of theirs."""
    if len(adapters) == 1:
        return adapters[0]
    return Adapter(torch.cat([a.A for a in adapters], 1), torch.cat([a.B * a.scale for a in adapters], 2))


def take_over(experts: Any) -> Lora | None:
    """The adapters that PEFT's wrappers have handed to these experts for the call that runs, once."""
    if not (adapters := vars(experts).get("_fp8_flow_lora")):
        return None
    experts._fp8_flow_lora = {}
    return Lora(**adapters)
