"""DeepSeek's FP8 format: the tensors of an export for one tensor of a model. Files and live models share it."""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from titan_fp8moe import recipe
from titan_fp8moe.recipe import FP8_NAN

ROUTED = ".experts."
# The router's balance of DeepSeek, LFM2 and others: never a master value, as no optimizer changes it.
BALANCE = "e_score_correction_bias", "expert_bias"
_ADAPTER = re.compile(r"\.(lora_|base_layer\.|modules_to_save\.)")
_PART = re.compile(r"\.parametrizations\.|_orig$|\.weight_g$")  # parametrize, prune, weight_norm


def is_fp32(tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> bool:
    """Whether a model is fp32, by the shapes and dtypes of its tensors: most values of its experts, or of all tensors.

    Fp32 tensors of another model stay fp32: someone chose it for them, as Transformers does for routers. Those of an
    fp32 model are master values, of which training usually reads bf16.
    """
    counts: Counter[torch.dtype] = Counter()
    for shape, dtype in [info for name, info in tensors.items() if ROUTED in name] or tensors.values():
        counts[dtype] += math.prod(shape)
    return counts[torch.float32] == max(counts.values())


def exported(
    name: str, value: Tensor, precision: torch.dtype | None, quantize: Callable, fp32: bool = False
) -> dict[str, Tensor]:
    """The exported tensors of one of a model's, by name.

    Args:
        precision: what training quantizes it from; None for a tensor that it does not quantize.
        quantize: :func:`titan_fp8moe.recipe.quantize_weight`, or an equal of it.
        fp32: whether an fp32 tensor stays so, instead of becoming bf16. The router's balance does in any case.
    """
    if precision is None:
        stays = value.dtype == torch.float32 and (fp32 or name.endswith(BALANCE))
        return {name: (value if stays or not value.is_floating_point() else value.bfloat16()).contiguous()}
    N, K = value.shape
    q_1NK, scale = quantize(value.to(precision).unsqueeze(0))
    q = q_1NK[0, :N, :K].contiguous()  # without the zeros that pad the last blocks
    return {name: q, f"{name}_scale_inv": recipe.exp2(recipe.exponent(scale[0]))}


def is_matrix(name: str, dims: int) -> bool:
    """Whether a tensor is the matrix of a linear layer or of one expert, which the format can hold in FP8.

    Raises:
        ValueError: for all experts of a layer in one tensor, as gpt-oss stores them.
    """
    if dims > 2 and ROUTED in name:
        raise ValueError(
            f"{name} holds all experts of a layer, as gpt-oss's own format does; DeepSeek's FP8 format has one matrix "
            "per expert and no biases: serve such a model in bf16"
        )
    return dims == 2 and name.endswith(".weight")


def check_merged(names: Iterable[str]) -> None:
    """Raises ValueError for adapters, the weights below them, and parts that PyTorch makes weights of in a forward."""
    for name in sorted(names):
        if _ADAPTER.search(name):
            raise ValueError(
                f"{name} is an adapter or the weight below one, whose change the weights lack; merge it first, with "
                "merge_lora() or PEFT's merge_and_unload(), or leave adapters out and send them apart"
            )
        if _PART.search(name):
            raise ValueError(
                f"{name} is what PyTorch makes a weight of in each forward, and no engine knows it; first call "
                "torch.nn.utils.parametrize.remove_parametrizations, prune.remove or remove_weight_norm"
            )


def has_nan(q: Tensor) -> Tensor:
    """Whether e4m3 values were quantized from a NaN or Inf, as a tensor ()."""
    return (q.view(torch.uint8) & 0x7F == FP8_NAN).any()
