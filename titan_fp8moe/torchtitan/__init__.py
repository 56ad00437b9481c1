"""torchtitan 0.2.2 adapter. Set ``job.custom_config_module = "titan_fp8moe.torchtitan"``; importing this module

* adds the ``[fp8_flow_moe]`` table to torchtitan's configuration (:class:`JobConfig`),
* registers the model converter ``fp8_flow_moe`` and the flavors of :mod:`~titan_fp8moe.torchtitan.flavors`,
* mends per-op activation checkpointing with expert parallelism, and what is counted under pipeline parallelism
  (:mod:`~titan_fp8moe.torchtitan.compat`),
* and, on a machine without a GPU, lets torchtitan train on the CPU (:mod:`~titan_fp8moe.torchtitan.cpu`).
"""

from dataclasses import dataclass, field

import torch

from titan_fp8moe.config import Fp8FlowMoEConfig
from titan_fp8moe.torchtitan import converter as _converter  # noqa: F401  registers fp8_flow_moe
from titan_fp8moe.torchtitan.compat import fix_pipeline_counts, fix_selective_checkpointing
from titan_fp8moe.torchtitan.cpu import enable_cpu_training
from titan_fp8moe.torchtitan.flavors import register_flavors


@dataclass
class JobConfig:
    """What this package adds to torchtitan's ``JobConfig``."""

    fp8_flow_moe: Fp8FlowMoEConfig = field(default_factory=Fp8FlowMoEConfig)
    """Settings of the model converter ``fp8_flow_moe``."""


fix_selective_checkpointing()
fix_pipeline_counts()
register_flavors()
if not torch.cuda.is_available():
    enable_cpu_training()
