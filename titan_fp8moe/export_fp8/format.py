"""DeepSeek's FP8 format: the tensors of an export for one tensor of a model. Files and live models share it."""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable

import torch
from torch import Tensor

from titan_fp8moe import recipe
from titan_fp8moe.recipe import FP8_NAN

ROUTED = ".experts."
# The router's balance of DeepSeek, LFM2 and others: never a master value, as no optimizer changes it.
_BALANCE = "e_score_correction_bias", "expert_bias"


def main_dtype(tensors: Iterable[tuple[tuple[int, ...], torch.dtype]]) -> torch.dtype:
    """The dtype of most values of a model, from its tensors' shapes and dtypes."""
    counts: Counter[torch.dtype] = Counter()
    for shape, dtype in tensors:
        counts[dtype] += math.prod(shape)
    return max(counts, key=lambda dtype: counts[dtype])


def stays_fp32(name: str, model: torch.dtype, published: Collection[str] = ()) -> bool:
    """Whether an fp32 tensor that training does not quantize stays fp32.

    In a bf16 model it does, since someone chose fp32 for it, such as Transformers for many routers. In an fp32 model it
    is a master value, of which training usually reads bf16.

    Args:
        model: the model's :func:`main_dtype`.
        published: the names that the published model has in fp32.
    """
    return model != torch.float32 or name in published or name.endswith(_BALANCE)


def exported(
    name: str,
    value: Tensor,
    precision: torch.dtype | None,
    quantize: Callable[[Tensor], tuple[Tensor, Tensor]],
    model: torch.dtype = torch.float32,
    published: Collection[str] = (),
) -> dict[str, Tensor]:
    """The exported tensors of one of a model's, by name.

    Args:
        precision: what training quantizes it from; None for a tensor that stays as it is, or becomes bf16.
        quantize: :func:`titan_fp8moe.recipe.quantize_weight`, or an equal of it.
        model, published: as for :func:`stays_fp32`.
    """
    if precision is None:
        stays = value.dtype == torch.float32 and stays_fp32(name, model, published)
        return {name: (value if stays or not value.is_floating_point() else value.bfloat16()).contiguous()}
    N, K = value.shape
    q_1NK, scale = quantize(value.to(precision).unsqueeze(0))
    q = q_1NK[0, :N, :K].contiguous()  # without the zeros that pad the last blocks
    return {name: q, f"{name}_scale_inv": recipe.exp2(recipe.exponent(scale[0]))}


def check_experts(name: str, dims: int) -> None:
    """Raises ValueError for experts that DeepSeek's format cannot hold: all in one tensor, as gpt-oss stores them."""
    if dims > 2:
        raise ValueError(
            f"{name} holds all experts of a layer, as gpt-oss's own format does, beside biases and with gate and up "
            "interleaved; DeepSeek's FP8 format has one matrix per expert and no biases: serve such a model in bf16"
        )


def check_merged(names: Iterable[str]) -> None:
    """Raises ValueError for adapters, for weights as PEFT renames them beside adapters, and for what PyTorch makes
    weights of in each forward."""
    names = set(names)
    parts = (".lora_", ".base_layer.", ".modules_to_save.")
    if adapters := sorted(name for name in names if any(part in name for part in parts)):
        raise ValueError(
            f"{adapters[0]} is an adapter or the weight below one, whose change the weights lack; merge it first, with "
            "merge_lora() or PEFT's merge_and_unload(), or leave adapters out and send them apart"
        )
    pruned = {f"{name.removesuffix('_mask')}_orig" for name in names if name.endswith("_mask")} & names
    normed = {f"{name.removesuffix('_g')}_v" for name in names if name.endswith(".weight_g")} & names
    if made := sorted(pruned | normed | {name for name in names if ".parametrizations." in name}):
        raise ValueError(
            f"{made[0]} is what PyTorch makes a weight of in each forward, and no engine knows it; first call "
            "torch.nn.utils.parametrize.remove_parametrizations, prune.remove or remove_weight_norm"
        )


def has_nan(q: Tensor) -> Tensor:
    """Whether e4m3 values were quantized from a NaN or Inf, as a tensor ()."""
    return (q.view(torch.uint8) & 0x7F == FP8_NAN).any()
