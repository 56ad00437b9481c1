"""FP8 tensors of a live model in DeepSeek's format, for a rollout engine in another process: no files, no second model.

The names, values and scales are those that ``python -m titan_fp8moe.export_fp8`` writes for the same weights.
"""

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn.parallel import DataParallel, DistributedDataParallel

from titan_fp8moe import ops
from titan_fp8moe.export_fp8.format import ROUTED, buckets, check_merged, exported, fp32_that_stays, is_matrix
from titan_fp8moe.nn.modules import fp8_parameters
from titan_fp8moe.recipe import FP8
from titan_fp8moe.trainer.plan import plain_name

_DDP = DataParallel, DistributedDataParallel


def fp8_tensors(
    model: nn.Module,
    *,
    adapter: Any = None,
    quantize: Sequence[str] | None = None,
    quantized_from: torch.dtype | Literal["fp32-routed"] | None = None,
    bucket_bytes: int = 1 << 30,
    gather: bool = True,
) -> Iterator[dict[str, Tensor]]:
    """Yields a model's tensors in DeepSeek's format, by Hugging Face's names and on their device.

    Matrices that training multiplies in FP8 become e4m3 values with ``weight_scale_inv``, everything else bf16. Fp32
    tensors of a bf16 model, such as routers, stay fp32. FP8 weights that Transformers has loaded leave as they came,
    with their scales. What keeps its dtype is the model's own memory: do not write to it, and send a bucket before you
    train on. Under FSDP and expert parallelism all ranks iterate together.

    Args:
        model: of Transformers, or of torchtitan with ``adapter``; also compiled or in DDP.
        adapter: torchtitan's state-dict adapter of the model, ``train_spec.state_dict_adapter(model_args, None)``. With
            ``hf_assets_path`` instead of None, what the weights in that folder have in fp32 stays fp32.
        quantize: quantize the matrices with one of these strings in their name. By default those that the model
            multiplies in FP8, as its modules name them, and in a model without any the routed experts'. If ``fp8_flow``
            was chosen for Transformers' experts that run otherwise, they leave in bf16, with a warning.
        quantized_from: the precision that training quantizes from. By default the parameters'; FSDP with mixed
            precision gathers fp32 parameters in bf16, so fp32 DTensors need it said. ``"fp32-routed"``: fp32 for the
            routed experts, which it leaves alone if expert parallelism spans all ranks, and bf16 for everything else.
        bucket_bytes: the most bytes of a bucket; a larger tensor is one of its own.
        gather: whether each rank gets all experts, gathered one tensor at a time. Else it gets those that it holds, and
            experts are not communicated. Other tensors come on every rank.

    Raises:
        ValueError: for matrices with a NaN or Inf, ``Fp8RoutedExperts``, adapters that are not merged, tied weights
            that differ, or settings that do not fit.
    """
    while (inner := model.module if isinstance(model, _DDP) else getattr(model, "_orig_mod", None)) is not None:
        model = cast(nn.Module, inner)
    check_merged(state := _state(model))
    published: dict[str, Tensor] = {}
    if assets := getattr(adapter, "hf_assets_path", None):
        from titan_fp8moe.export_fp8 import files  # needs safetensors

        published = files.published(Path(assets))
    stays_fp32 = fp32_that_stays(state, published)
    to_hf = adapter.to_hf if adapter is not None else lambda tensors: _revert_conversion(model, tensors)
    names, decides = _fp8_names(model)
    fp8, parts = {plain_name(name) for name in names}, quantize or ([] if decides else [ROUTED])

    def tensors() -> Iterator[dict[str, Tensor]]:
        for key, value in state.items():
            if value.dtype == torch.uint8 and key in fp8:  # Fp8RoutedExperts' bytes
                raise ValueError(f"{key} is stored in FP8; send the tensors of the checkpoint that it was loaded from")
            for name, part in _parts(key, value, to_hf, gather):
                chosen = (quantize is None and key in fp8) or any(string in name for string in parts)
                chosen = chosen and value.dtype != FP8 and is_matrix(name, part)
                precision = _precision(name, value, quantized_from) if chosen else None
                yield exported(name, part, precision, ops.quantize_weight, stays_fp32(name))

    stored = quantize is None and any(value.dtype == FP8 for value in state.values())
    without_match = [] if stored or not parts else _without_match(parts, state, to_hf)
    if without_match:
        why = "; correct quantize" if quantize else ", and no module of the model is FP8; set quantize"
        raise ValueError(f"no matrix has {', '.join(map(repr, without_match))} in its name{why}")
    yield from buckets(tensors(), bucket_bytes)


def _without_match(parts: Sequence[str], state: dict[str, Tensor], to_hf: Callable[[dict], dict]) -> list[str]:
    """Those of ``parts`` that are in no matrix's name."""
    metas = {key: torch.empty(t.shape, dtype=t.dtype, device="meta") for key, t in state.items() if t.dim() > 1}
    tensors = (item for key, meta in metas.items() for item in to_hf({key: meta}).items())
    chosen = ((name, tensor) for name, tensor in tensors if any(part in name for part in parts))
    names = [name for name, tensor in chosen if is_matrix(name, tensor)]
    return [part for part in parts if not any(part in name for name in names)]


def _precision(name: str, value: Tensor, quantized_from: Any) -> torch.dtype:
    if quantized_from == "fp32-routed":
        return torch.float32 if ROUTED in name else torch.bfloat16
    if quantized_from is None and isinstance(value, DTensor) and value.dtype == torch.float32:
        raise ValueError(
            f"{name} is fp32 and sharded, and FSDP with mixed precision gathers in bf16, but not experts that expert "
            "parallelism spreads over all ranks; set quantized_from to torch.bfloat16, torch.float32 or 'fp32-routed'"
        )
    return quantized_from or value.dtype


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
    """The tensors of the state dict by their plain names, without the copies that a model of Transformers ties."""
    state = {plain_name(key): value for key, value in model.state_dict().items() if isinstance(value, Tensor)}
    tied = cast(Any, getattr(model, "all_tied_weights_keys", None)) or {}
    copies = {copy: original for copy, original in tied.items() if copy in state and original in state}
    for copy, original in copies.items():
        if not torch.equal(state.pop(copy), state[original]):
            untie = "set config.tie_word_embeddings to False, save the model and load it again"
            raise ValueError(f"{copy} differs from {original}, to which the model's config ties it; {untie}")
    return state


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
