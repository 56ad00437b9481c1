"""FP8-Flow-MoE: FP8 training of mixture-of-experts layers on Hopper GPUs.

:func:`routed_experts`, :class:`RoutedExperts` and :class:`Fp8FlowLinear` serve any PyTorch model. For code with a
dispatch of its own :func:`grouped_ffn` is the experts' FFN on its rows, and :func:`grouped_mm` one product.
``titan_fp8moe.torchtitan`` converts torchtitan's models, ``titan_fp8moe.transformers`` serves those of Transformers.
"""

from titan_fp8moe.config import Fp8FlowMoEConfig
from titan_fp8moe.dispatch.symmetric.workspace import check_room
from titan_fp8moe.layer.experts import SAVED_OPS
from titan_fp8moe.layer.lora import Adapter, Lora
from titan_fp8moe.layer.operands import WeightCache
from titan_fp8moe.layer.run import routed_experts
from titan_fp8moe.layer.weights import SharedExperts
from titan_fp8moe.nn.grouped_ffn import grouped_ffn
from titan_fp8moe.nn.grouped_mm import grouped_mm
from titan_fp8moe.nn.linear import Fp8FlowLinear
from titan_fp8moe.nn.modules import RoutedExperts
from titan_fp8moe.nn.offload import offload_experts
from titan_fp8moe.nn.parallel import clip_grad_norm_, distributed_data_parallel, parameter_groups
from titan_fp8moe.nn.routing_replay import record_routing, replay_routing
from titan_fp8moe.ops import Fp8Weight
from titan_fp8moe.ops.self_check import self_check
from titan_fp8moe.versions import warn_about_versions

warn_about_versions("torch", "triton")

__version__ = "0.4.0"
__all__ = [
    "SAVED_OPS",
    "Adapter",
    "Fp8FlowLinear",
    "Fp8FlowMoEConfig",
    "Fp8Weight",
    "Lora",
    "RoutedExperts",
    "SharedExperts",
    "WeightCache",
    "__version__",
    "check_room",
    "clip_grad_norm_",
    "distributed_data_parallel",
    "grouped_ffn",
    "grouped_mm",
    "offload_experts",
    "parameter_groups",
    "record_routing",
    "replay_routing",
    "routed_experts",
    "self_check",
]
