"""FP8 tensors of a live model in DeepSeek's format, for a rollout engine in another process: no files, no second model.

The names, values and scales are those that ``python -m titan_fp8moe.export_fp8`` writes for the same weights.
"""

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.parallel import DataParallel, DistributedDataParallel

from titan_fp8moe import ops
from titan_fp8moe.export_fp8.format import ROUTED, check_merged, exported, has_nan, is_fp32, is_matrix
from titan_fp8moe.nn.modules import fp8_parameters
from titan_fp8moe.recipe import FP8
from titan_fp8moe.trainer.plan import plain_name

_DDP = DataParallel, DistributedDataParallel


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

    Matrices that training multiplies in FP8 become e4m3 values with ``weight_scale_inv``, everything else bf16. Fp32
    tensors of a bf16 model, such as routers, stay fp32. What keeps its dtype is the model's own memory: do not write to
    it, and send a bucket before you train on. Under FSDP and expert parallelism all ranks iterate together.

    Args:
        model: of Transformers, or of torchtitan with ``adapter``; also compiled or in DDP.
        adapter: torchtitan's state-dict adapter of the model, ``train_spec.state_dict_adapter(model_args, None)``. With
            ``hf_assets_path`` instead of None, what the weights in that folder have in fp32 stays fp32.
        quantize: quantize the matrices with one of these strings in their name. By default those that the model
            multiplies in FP8, as its modules name them, and in a model without any the routed experts'. If ``fp8_flow``
            was chosen for Transformers' experts that run otherwise, they leave in bf16, with a warning.
        quantized_from: the precision that training quantizes from. By default the parameters'; FSDP with mixed
            precision gathers fp32 parameters in bf16, so fp32 DTensors need it said.
        bucket_bytes: the most bytes of a bucket; a larger tensor is one of its own.
        gather: whether each rank gets all experts, gathered one tensor at a time. Else it gets those that it holds, and
            experts are not communicated. Other tensors come on every rank.

    Raises:
        ValueError: for matrices with a NaN or Inf, weights that are FP8 already, adapters that are not merged,
            parametrized or pruned weights, tied ones that differ, or settings that do not fit.
    """
    while (inner := model.module if isinstance(model, _DDP) else getattr(model, "_orig_mod", None)) is not None:
        model = cast(nn.Module, inner)
    check_merged(state := _state(model))
    masters = is_fp32({key: (value.shape, value.dtype) for key, value in state.items()})
    published: set[str] = set()
    if assets := getattr(adapter, "hf_assets_path", None):
        from titan_fp8moe.export_fp8.files import published_fp32  # needs safetensors

        published = published_fp32(Path(assets))
    to_hf = adapter.to_hf if adapter is not None else lambda tensors: _revert_conversion(model, tensors)
    names, decides = _fp8_names(model)
    fp8 = {plain_name(name) for name in names}
    parts = quantize or ([] if decides else [ROUTED])
    bucket: dict[str, Tensor] = {}
    size, found = 0, False
    for key, value in state.items():
        if value.dtype == FP8 or (value.dtype == torch.uint8 and key in fp8):  # Fp8RoutedExperts' bytes
            raise ValueError(f"{key} is stored in FP8; send the tensors of the checkpoint that it was loaded from")
        for name, part in _parts(key, value, to_hf, gather):
            precision = None
            chosen = (quantize is None and key in fp8) or any(string in name for string in parts)
            if chosen and is_matrix(name, part.dim()):
                precision, found = quantized_from or _own_precision(name, value), True
            stays = not masters or name in published
            tensors = exported(name, part, precision, lambda w: ops.quantize_weight(w), stays)
            more = sum(tensor.nbytes for tensor in tensors.values())
            if bucket and size + more > bucket_bytes:
                yield _checked(bucket)
                bucket, size = {}, 0
            bucket |= tensors
            size += more
    if not found and (quantize is not None or not decides):
        raise ValueError("nothing is quantized: no module is converted, and quantize or .experts. matches no matrix")
    yield _checked(bucket)


def _checked(bucket: dict[str, Tensor]) -> dict[str, Tensor]:
    flags = {name: has_nan(tensor) for name, tensor in bucket.items() if tensor.dtype == FP8}
    if flags and torch.stack([*flags.values()]).any():  # one host-device sync per bucket
        bad = next(name for name, flag in flags.items() if flag)
        raise ValueError(f"{bad} holds a NaN or Inf: the run has diverged; load an earlier checkpoint")
    return bucket


def _own_precision(name: str, value: Tensor) -> torch.dtype:
    if isinstance(value, DTensor) and value.dtype == torch.float32:
        raise ValueError(
            f"{name} is fp32 and sharded, and FSDP may gather it in bf16; set quantized_from to torch.bfloat16 with "
            "mixed precision, else to torch.float32"
        )
    return value.dtype


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


def _state(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of the state dict by their plain names, a tied one once. Transformers' models name the copies; layers
    that share one there without saying so are apart for an engine."""
    state = {plain_name(key): value for key, value in model.state_dict().items() if isinstance(value, Tensor)}
    named = model.named_parameters(remove_duplicate=False)
    owners = {plain_name(name): id(param) for name, param in named}
    if (tied := cast(Any, getattr(model, "all_tied_weights_keys", None))) is None:
        first: dict[Any, str] = {}
        for key in state:
            first.setdefault(owners.get(key, key), key)
        return {key: state[key] for key in first.values()}
    copies = {copy: original for copy, original in tied.items() if copy in state and original in state}
    for copy, original in copies.items():
        if owners.get(copy) != owners.get(original) and not torch.equal(state[copy], state[original]):
            raise ValueError(
                f"{copy} differs from {original}, to which the model's config ties it, and an engine would have "
                "one of them; set config.tie_word_embeddings to False, save the model and load it again"
            )
    return {key: value for key, value in state.items() if key not in copies}


def _fp8_names(model: nn.Module) -> tuple[list[str], bool]:
    """The matrices that modules name, and those of Transformers' experts, which are named for them. And whether the
    model decides what is FP8: if it has such matrices, or if ``fp8_flow`` was chosen for it."""
    names, chosen = fp8_parameters(model), False
    if (adapter := sys.modules.get("titan_fp8moe.transformers")) is not None:  # else no experts of its run in FP8
        names += adapter.fp8_matrices(model)
        chosen = adapter.is_chosen(model)
    return names, chosen or bool(names)


def _revert_conversion(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(model, tensors)
