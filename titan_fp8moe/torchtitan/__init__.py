"""torchtitan 0.2.2 adapter. Set ``job.custom_config_module = "titan_fp8moe.torchtitan"``; importing this module

* adds the ``[fp8_flow_moe]`` table to torchtitan's configuration (:class:`JobConfig`),
* registers the model converter ``fp8_flow_moe``,
* adds the flavors of :mod:`~titan_fp8moe.torchtitan.flavors`, and a validator to ``deepseek_v3`` and ``llama4``,
* and, on a machine without a GPU, lets torchtitan train on the CPU (:mod:`~titan_fp8moe.torchtitan.cpu`), because its
  trainer asks for the device before it converts.

All other changes to torchtitan and PyTorch wait for a converter that converts something: see ``prepare_torchtitan`` in
:mod:`~titan_fp8moe.torchtitan.converter`. :mod:`titan_fp8moe.patches` lists the changes of a process and undoes them.
"""

from dataclasses import dataclass, field
from typing import Literal

import torch

from titan_fp8moe.versions import installed, warn_about_versions

if (RELEASE := installed("torchtitan") or "").startswith("0.3"):  # none of a checkout that is not installed
    raise ImportError(
        f"titan_fp8moe.torchtitan is for torchtitan 0.2.2, but {RELEASE} is installed; use titan_fp8moe.torchtitan03, "
        "or install '.[torchtitan]'"
    )

from titan_fp8moe.config import Fp8FlowMoEConfig
from titan_fp8moe.torchtitan import converter as _converter
from titan_fp8moe.torchtitan.cpu import enable_cpu_training
from titan_fp8moe.torchtitan.flavors import register_flavors
from titan_fp8moe.trainer.cpu import compute_dtype


@dataclass
class Training:
    """A default of torchtitan's ``[training]`` table that depends on the machine."""

    mixed_precision_param: Literal["bfloat16", "float32"] = field(default_factory=compute_dtype)


@dataclass
class JobConfig:
    """The table that this package adds to torchtitan's ``JobConfig``."""

    training: Training = field(default_factory=Training)

    fp8_flow_moe: Fp8FlowMoEConfig = field(default_factory=Fp8FlowMoEConfig)
    """Settings of the model converter ``fp8_flow_moe``."""


warn_about_versions("torchtitan", "torchao")
_converter.register()
register_flavors()
if not torch.cuda.is_available():
    enable_cpu_training()
