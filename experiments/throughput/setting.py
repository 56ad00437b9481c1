"""torchtitan's ``job.custom_config_module`` of train.toml: what titan_fp8moe registers, flavors with fewer layers, and
the model converters of train.py's variants.

Flavors are ``16B_<n>_layers_<attention>`` of deepseek_v3, the first of the n layers dense, and
``30B-A3B_<n>_layers_<attention>`` of qwen3; of llama3 ``8B_<n>_layers_<attention>``, and ``1B_...``, which is Llama
3.2's with an output of its own. Attention is ``flex`` or ``sdpa``, which is cuDNN's on a Hopper GPU. ``_8k`` behind
the name is a vocabulary of 8,192.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn as nn
import torch.nn.functional as F
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.prototype.moe_training.config import Float8TrainingOpConfig
from torchao.quantization.quant_api import quantize_
from torchtitan.config.job_config import Compile
from torchtitan.distributed import utils
from torchtitan.models.deepseek_v3 import deepseekv3_args
from torchtitan.models.deepseek_v3.infra import parallelize as deepseek_v3_parallelize
from torchtitan.models.llama3 import llama3_args
from torchtitan.models.moe import moe as torchtitan_moe
from torchtitan.models.moe.moe import GroupedExperts
from torchtitan.models.moe.utils import set_token_group_alignment_size_m
from torchtitan.models.qwen3 import qwen3_args
from torchtitan.models.qwen3.infra import parallelize as qwen3_parallelize
from torchtitan.protocols.model_converter import ModelConverter, register_model_converter

from experiments.throughput.fused_bf16 import BalancedRandomRouter, FusedMoE, moes
from experiments.throughput.train import wait_for_turn
from titan_fp8moe import grouped_mm
from titan_fp8moe.torchtitan import JobConfig  # noqa: F401  torchtitan looks for it here
from titan_fp8moe.torchtitan.converter import loaded_trainers
from titan_fp8moe.trainer.ahead import keep_host_ahead
from titan_fp8moe.trainer.compat import fix_selective_checkpointing
from tools.one_bit import change_one_bit

fix_selective_checkpointing()  # bf16 needs it too, and no converter installs it there

MASKS = {"flex": "block_causal", "sdpa": "causal"}
llama3_args["1B"] = replace(llama3_args["8B"], dim=2048, n_layers=16, ffn_dim_multiplier=1.5, multiple_of=256)
for flavors, name in ((deepseekv3_args, "16B"), (qwen3_args, "30B-A3B"), (llama3_args, "8B"), (llama3_args, "1B")):
    base = flavors[name]
    for num_layers in range(2, base.n_layers + 1):
        for attention, mask in MASKS.items():
            copied = {"moe_args": replace(base.moe_args)} if hasattr(base, "moe_args") else {}
            flavor = replace(base, **copied, n_layers=num_layers, attn_type=attention, attn_mask_type=mask)
            flavors[f"{name}_{num_layers}_layers_{attention}"] = flavor
            flavors[f"{name}_{num_layers}_layers_{attention}_8k"] = replace(flavor, vocab_size=8192)


def converter(convert: Callable[[nn.Module], None]) -> Callable[[nn.Module], None]:
    """Registers a function that changes a model as the model converter of its name."""

    class Converter(ModelConverter):  # its other methods do nothing
        def convert(self, model: nn.Module) -> None:
            convert(model)

    register_model_converter(Converter, convert.__name__)
    return convert


@converter
def balanced_random(model: nn.Module) -> None:
    """Makes every router assign experts at random but balanced."""
    for moe in moes(model):
        moe.router.__class__ = BalancedRandomRouter
        moe.router._debug_force_load_balance = True


@converter
def fused_bf16(model: nn.Module) -> None:
    """The strongest bf16, whose host keeps ahead of the GPU as ours does."""
    for trainer in loaded_trainers():
        keep_host_ahead(trainer, utils)
    for moe in moes(model):
        moe.__class__ = FusedMoE


@converter
def changed_bit(model: nn.Module) -> None:
    """Changes the last bf16 bit of one initial weight: how far such a run parts is how far bf16 is from itself."""
    init_weights = model.init_weights

    def init_and_change(*args, **kwargs) -> None:
        init_weights(*args, **kwargs)
        change_one_bit(model)

    model.init_weights = init_and_change


@converter
def save_grouped_mm(model: nn.Module) -> None:
    """Adds bf16's grouped GEMM to what per-op checkpointing keeps, as ``fp8_flow_moe`` adds ours."""
    for parallelize in (deepseek_v3_parallelize, qwen3_parallelize):
        parallelize._op_sac_save_list.add(torch.ops.aten._grouped_mm.default)


@converter
def torchao_rowwise(model: nn.Module) -> None:
    """torchao's fp8 rowwise experts. torchtitan 0.2.2's own import a name that torchao 0.18 no longer has."""
    set_token_group_alignment_size_m(16)  # fp8 operands are aligned to 16 bytes
    quantize_(model, Float8TrainingOpConfig(), filter_fn=lambda module, _: isinstance(module, GroupedExperts))


def float8_linears(model: nn.Module, recipe: str) -> None:
    """torchao's float8 in all linears but the output, as torchtitan's ``quantize.linear.float8`` converts them."""
    config = Float8LinearConfig.from_recipe_name(recipe)
    convert_to_float8_training(model, config=config, module_filter_fn=lambda _, name: name != "output")


@converter
def float8_tensorwise(model: nn.Module) -> None:
    float8_linears(model, "tensorwise")


@converter
def float8_rowwise(model: nn.Module) -> None:
    torch._inductor.config.emulate_precision_casts = True  # as torchtitan sets it
    float8_linears(model, "rowwise")


def cast_around_each_gemm(
    w1: torch.Tensor, w2: torch.Tensor, w3: torch.Tensor, x: torch.Tensor, num_tokens_per_expert: torch.Tensor
) -> torch.Tensor:
    """torchtitan's ``_run_experts_grouped_mm`` with FP8 products, each of which casts its operands in 1x128 tiles and
    128x128 blocks."""
    offs = num_tokens_per_expert.cumsum(0, dtype=torch.int32)
    w1, w2, w3 = (w.bfloat16().transpose(-2, -1) for w in (w1, w2, w3))
    h = F.silu(grouped_mm(x.bfloat16(), w1, offs)) * grouped_mm(x.bfloat16(), w3, offs)
    return grouped_mm(h, w2, offs).type_as(x)


@converter
def naive_blockwise(model: nn.Module) -> None:
    torchtitan_moe._run_experts_grouped_mm = cast_around_each_gemm  # before torchtitan compiles it


@converter
def whole_blocks(model: nn.Module) -> None:
    """Compiles each block as one graph on one expert-parallel rank, as torchtitan compiles dense blocks only."""

    def apply_compile(model: nn.Module, compile_config: Compile, ep_enabled: bool) -> None:
        torch._dynamo.config.capture_scalar_outputs = True
        for name, block in model.layers.named_children():
            block = torch.compile(block, backend=compile_config.backend, fullgraph=True)
            model.layers.register_module(name, block)

    deepseek_v3_parallelize.apply_compile = qwen3_parallelize.apply_compile = apply_compile


wait_for_turn()  # everything is imported
