"""DeepSeek's FP8 format: the tensors of an export for one tensor of a model. Files and live models share it."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor

from titan_fp8moe import recipe

ROUTED = ".experts."
# The router's balance of DeepSeek, LFM2 and others: never a master value, as no optimizer changes it.
BALANCE = "e_score_correction_bias", "expert_bias"
_ADAPTER = re.compile(r"\.(lora_|base_layer\.|modules_to_save\.)")


def fp32_that_stays(tensors: Mapping[str, Tensor], published: Mapping[str, Tensor]) -> Callable[[str], bool]:
    """Tells by its name whether a model's fp32 tensor stays fp32, instead of becoming bf16.

    All of a bf16 model do: someone chose it for them, as Transformers does for routers. Those of an fp32 model are
    master values, of which training usually reads bf16. There the router's balance stays fp32, and what ``published``
    weights have in fp32.
    """
    if not _is_fp32(tensors):
        return lambda name: True
    names = set() if _is_fp32(published) else {n for n, value in published.items() if value.dtype == torch.float32}
    return lambda name: name in names or name.endswith(BALANCE)


def _is_fp32(tensors: Mapping[str, Tensor]) -> bool:
    """Whether a model is fp32: most values of its experts, or of all tensors."""
    counts: Counter[torch.dtype] = Counter()
    for value in [value for name, value in tensors.items() if ROUTED in name] or tensors.values():
        counts[value.dtype] += value.numel()
    return counts[torch.float32] == max(counts.values(), default=0)


def exported(
    name: str, value: Tensor, precision: torch.dtype | None, quantize: Callable, fp32: bool = False
) -> dict[str, Tensor]:
    """The exported tensors of one of a model's, by name.

    Args:
        precision: what training quantizes it from; None for a tensor that it does not quantize.
        quantize: :func:`titan_fp8moe.recipe.quantize_weight`, or an equal of it.
        fp32: whether an fp32 tensor stays so, instead of becoming bf16.
    """
    if precision is None:
        stays = not value.is_floating_point() or value.itemsize == 1 or (fp32 and value.dtype == torch.float32)
        return {name: (value if stays else value.bfloat16()).contiguous()}
    N, K = value.shape
    q_1NK, scale = quantize(value.to(precision).unsqueeze(0))
    q = q_1NK[0, :N, :K].contiguous()  # without the zeros that pad the last blocks
    return {name: q, f"{name}_scale_inv": recipe.exp2(recipe.exponent(scale[0]))}


def buckets(tensors: Iterable[dict[str, Tensor]], max_bytes: float) -> Iterator[dict[str, Tensor]]:
    """Joins exported tensors to buckets of at most ``max_bytes``; larger ones stay alone.

    Raises:
        ValueError: for a matrix with a NaN or Inf.
    """
    bucket: dict[str, Tensor] = {}
    size = 0
    for found in tensors:
        more = sum(tensor.nbytes for tensor in found.values())
        if bucket and size + more > max_bytes:
            yield _checked(bucket)
            bucket, size = {}, 0
        bucket |= found
        size += more
    yield _checked(bucket)


def _checked(bucket: dict[str, Tensor]) -> dict[str, Tensor]:
    bad = {n: (t.view(torch.uint8) & 0x7F == recipe.FP8_NAN).any() for n, t in bucket.items() if t.dtype == recipe.FP8}
    if bad and torch.stack([*bad.values()]).any():  # one host-device sync per bucket
        name = next(name for name, flag in bad.items() if flag)
        raise ValueError(f"{name} holds a NaN or Inf: the run has diverged; take an earlier checkpoint")
    return bucket


def is_matrix(name: str, value: Tensor) -> bool:
    """Whether a tensor is the matrix of a linear layer or of one expert, which the format can hold in FP8.

    Raises:
        ValueError: for all experts of a layer in one tensor, as gpt-oss stores them.
    """
    if value.dim() > 2 and ROUTED in name:
        raise ValueError(
            f"{name} holds all experts of a layer, as gpt-oss's own format and plain RoutedExperts do. DeepSeek's has "
            "one matrix per expert and no biases: export a model of Transformers, or serve in bf16"
        )
    return value.dim() == 2 and name.endswith(".weight")


def check_merged(names: Iterable[str]) -> None:
    """Raises ValueError for adapters and the weights below them."""
    if name := next((name for name in sorted(names) if _ADAPTER.search(name)), None):
        merge = "merge it first, with merge_lora() or PEFT's merge_and_unload()"
        raise ValueError(f"{name} is an adapter or the weight below one; {merge}")
