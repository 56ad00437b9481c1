"""FP8 tensors of a live model in DeepSeek's format, for a rollout engine in another process: no files, no second model.

The names, values and scales are those that ``python -m titan_fp8moe.export_fp8`` writes for the same weights.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from titan_fp8moe import ops
from titan_fp8moe.config import Fp8FlowMoEConfig
from titan_fp8moe.export_fp8.format import ROUTED, check_experts, exported, has_nan
from titan_fp8moe.recipe import FP8
from titan_fp8moe.trainer.plan import plain_name


def fp8_tensors(
    model: nn.Module,
    *,
    adapter: Any = None,
    quantize: Sequence[str] | None = None,
    quantized_from: torch.dtype | None = None,
    bucket_bytes: int = 1 << 30,
    gather: bool = True,
) -> Iterator[dict[str, Tensor]]:
    """Yields a model's tensors in DeepSeek's format, by Hugging Face's names and on their device.

    Matrices that training multiplies in FP8 become e4m3 values with ``weight_scale_inv``, everything else bf16. What is
    bf16 already is the model's own: do not write to it, and send a bucket before you train on. Under FSDP and expert
    parallelism all ranks iterate together.

    Args:
        model: of Transformers, or of torchtitan with ``adapter``.
        adapter: torchtitan's state-dict adapter of the model, ``train_spec.state_dict_adapter(model_args, None)``.
        quantize: quantize the matrices with one of these strings in their name. By default those of modules that this
            package has converted, and in Transformers' models the routed experts.
        quantized_from: the precision that training quantizes from. By default the parameters'; FSDP with mixed
            precision gathers fp32 parameters in bf16, so fp32 DTensors need it said.
        bucket_bytes: the most bytes of a bucket; a larger tensor is one of its own.
        gather: whether each rank gets all experts, gathered one tensor at a time. Else it gets those that it holds, and
            experts are not communicated. Other tensors come on every rank.

    Raises:
        ValueError: for matrices with a NaN or Inf, weights that are FP8 already, adapters that are not merged, or
            settings that do not fit.
    """
    bucket: dict[str, Tensor] = {}
    size = 0
    for name, value, precision in _named_values(model, adapter, quantize, quantized_from, gather):
        tensors = exported(name, value, precision, lambda w: ops.quantize_weight(w))
        more = sum(tensor.nbytes for tensor in tensors.values())
        if bucket and size + more > bucket_bytes:
            yield _checked(bucket)
            bucket, size = {}, 0
        bucket |= tensors
        size += more
    if bucket:
        yield _checked(bucket)


def _checked(bucket: dict[str, Tensor]) -> dict[str, Tensor]:
    flags = [has_nan(tensor) for tensor in bucket.values() if tensor.dtype == FP8]
    if flags and torch.stack(flags).any():  # one host-device sync per bucket
        bad = [name for name, tensor in bucket.items() if tensor.dtype == FP8 and has_nan(tensor)]
        raise ValueError(f"{bad[0]} holds a NaN or Inf: the run has diverged; load an earlier checkpoint")
    return bucket


def _named_values(
    model: Any, adapter: Any, quantize: Sequence[str] | None, quantized_from: torch.dtype | None, gather: bool
) -> Iterator[tuple[str, Tensor, torch.dtype | None]]:
    """Hugging Face's name of each tensor, its value, and the precision that it is quantized from, if it is."""
    to_hf = _reverse_conversion(model) if adapter is None else adapter.to_hf
    converted = tuple(
        f"{plain_name(name)}."
        for name, module in model.named_modules()
        if isinstance(vars(module).get("config"), Fp8FlowMoEConfig)
    )
    found = False
    state = {plain_name(key): value for key, value in model.state_dict().items()}
    if adapters := [key for key in state if ".lora_" in key]:
        raise ValueError(
            f"{adapters[0]} is an adapter, whose change the weights lack; merge it first, with merge_lora() or PEFT's "
            "merge_and_unload(), or call this before adapters are added and send them apart"
        )
    for key, value in state.items():
        if key in getattr(model, "all_tied_weights_keys", ()) or not isinstance(value, Tensor):
            continue
        if value.dtype == FP8 or (value.dtype == torch.uint8 and key.startswith(converted)):  # Fp8RoutedExperts' bytes
            raise ValueError(f"{key} is stored in FP8; send the tensors of the checkpoint that it was loaded from")
        in_fp8 = key.startswith(converted) if quantize is None and converted else None
        for name, part in _parts(key, value, to_hf, gather):
            chosen = any(s in name for s in quantize or [ROUTED]) if in_fp8 is None else in_fp8
            if chosen:
                check_experts(name, part.dim())
            if not chosen or part.dim() != 2 or not name.endswith(".weight"):
                yield name, part, None
                continue
            if quantized_from is None and isinstance(value, DTensor) and value.dtype == torch.float32:
                raise ValueError(
                    f"{name} is fp32 and sharded, and FSDP may gather it in bf16; set quantized_from to torch.bfloat16 "
                    "with mixed precision, else to torch.float32"
                )
            found = True
            yield name, part, quantized_from or part.dtype
    if not found:
        raise ValueError(
            "nothing is quantized: the model has no converted modules and no routed experts that quantize matches"
        )


def _parts(key: str, value: Tensor, to_hf: Callable[[dict], dict], gather: bool) -> Iterator[tuple[str, Tensor]]:
    """One of the model's tensors under Hugging Face's names, for experts one each."""
    if not isinstance(value, DTensor):
        yield from to_hf({key: value}).items()
        return
    names = list(to_hf({key: torch.empty(value.shape, dtype=value.dtype, device="meta")}))
    if gather or len(names) == 1:
        yield from to_hf({key: value.full_tensor()}).items()
        return
    if any(placement.is_shard() and not placement.is_shard(0) for placement in value.placements):
        raise ValueError(f"{key} is sharded within experts, {value.placements}; set gather=True")
    _, offset = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    local, first = value.to_local(), offset[0]
    if len(names) == len(value):  # torchtitan's adapters split all experts, or none
        yield from zip(names[first : first + len(local)], local.unbind(), strict=True)
        return
    for name, part in to_hf({key: local}).items():  # Transformers': gate and up of an expert
        yield re.sub(r"(\.experts\.)(\d+)", lambda match: f"{match[1]}{int(match[2]) + first}", name), part


def _reverse_conversion(model: Any) -> Callable[[dict], dict]:
    from transformers.core_model_loading import revert_weight_conversion

    model = getattr(model, "_orig_mod", model)  # of torch.compile
    return lambda tensors: revert_weight_conversion(model, tensors)
