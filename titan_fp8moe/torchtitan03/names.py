"""Every name of torchtitan 0.3.0 that this adapter uses: the other files import them from here.

torchtitan's main moves some of them and makes overrides the one way to change a model. A new release begins with this
file; the override in ``__init__`` stays. torchtitan does not promise these names, which are used too:

    torchtitan.components.lora:_lora_class_cache            torchtitan.components.lora:_get_lora_cls
    torchtitan.components.lora:_frozen_config_class_cache   torchtitan.components.lora:_make_frozen_config
    torchtitan.components.metrics:MetricsProcessor._build_metric_logger
    torchtitan.models.common.attention:FlexAttention._compiled_flex_attn
    torchtitan.models.common.attention:_compiled_create_block_mask
    torchtitan.models.common.moe:GroupedExperts._grouped_mm
    torchtitan.models.common.token_dispatcher:get_spmd_backend
    torchtitan.protocols.module:Module._spmd_distribute_state
    torchtitan.protocols.module:Module._redistribute_inputs
    torchtitan.protocols.module:Module._redistribute_outputs
    torchtitan.trainer:Trainer.Config._owner
    torchtitan.trainer:Trainer.Config._validate_cuda_graphs, called right after the overrides

Besides them modules have ``_parallelized`` and ``_sharding_config``.
"""

import importlib
from types import ModuleType

from torchtitan.components import lora, optimizer
from torchtitan.components.lora import LoRAConverter as LinearLoRAConverter
from torchtitan.components.metrics import BaseLogger, MetricsProcessor
from torchtitan.components.quantization import QuantizationConverter
from torchtitan.config import TORCH_DTYPE_MAP, CompileConfig, Configurable
from torchtitan.config.manager import ConfigManager
from torchtitan.config.override import derive, override
from torchtitan.distributed import ParallelDims, fsdp
from torchtitan.distributed.activation_checkpoint import MemoryBudgetAC, SelectiveAC
from torchtitan.models.common import attention, moe, token_dispatcher
from torchtitan.models.common.feed_forward import FeedForward, SigmoidGatedFeedForward
from torchtitan.models.common.linear import Linear
from torchtitan.models.common.moe import GroupedExperts, MoE, RoutedExperts, TokenChoiceTopKRouter
from torchtitan.models.common.moe_sharding import expert_param_placement_dense, expert_param_placement_sparse
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher, LocalTokenDispatcher
from torchtitan.models.gpt_oss.moe import GptOssGroupedExperts, GptOssMoE
from torchtitan.protocols.module import Module
from torchtitan.protocols.sharding import LocalMapConfig, ShardingConfig
from torchtitan.tools import utils
from torchtitan.tools.logging import logger
from torchtitan.trainer import Trainer


def config_registry(model: str) -> ModuleType:
    """torchtitan's config functions of a model. Some need packages that others do without."""
    return importlib.import_module(f"torchtitan.models.{model}.config_registry")
