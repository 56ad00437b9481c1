"""Plans, writes and verifies the files of an export. One shard and one tensor of the source are in memory at a time."""

import hashlib
import json
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from titan_fp8moe import ops, recipe
from titan_fp8moe.export_fp8.format import ROUTED, check_experts, exported, has_nan, main_dtype, stays_fp32
from titan_fp8moe.export_fp8.model_config import read_config
from titan_fp8moe.export_fp8.sources import INDEX, HuggingFaceSource, Source, open_safetensors, read_json
from titan_fp8moe.recipe import FP8, TILE

FORMAT = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [TILE, TILE],
    "scale_fmt": "ue8m0",
}
_COPIED = ".json", ".jinja", ".model", ".py", ".tiktoken", ".txt"
_WEIGHTS = ".bin", ".distcp", ".gguf", ".pt", ".pth", ".safetensors"
_METADATA = "titan_fp8moe.export_fp8"  # in each shard's header: the plan that it belongs to


@dataclass
class Plan:
    """The fate of each tensor of a source.

    Attributes:
        source: the checkpoint.
        fp8: by name of each matrix that is quantized, the precision that training quantizes it from.
        fp32: the names of the other tensors that stay fp32.
        rounded: the number of tensors that are fp32 in the source and bf16 in the export.
        shards: the names of the source's tensors in each file.
        modules_to_not_convert: the modules whose matrices stay bf16.
        fingerprint: changes with the source, and with what is done to it.
    """

    source: Source
    fp8: dict[str, torch.dtype]
    fp32: set[str]
    rounded: int
    shards: list[list[str]]
    modules_to_not_convert: list[str]
    fingerprint: str

    def file(self, shard: int) -> str:
        return f"model-{shard + 1:05}-of-{len(self.shards):05}.safetensors"


def make_plan(source: Source, fp8: dict[str, torch.dtype], published: set[str], shard_bytes: int) -> Plan:
    """Raises ValueError for matrices that cannot be quantized as asked for.

    Args:
        published: the names that the published model has in fp32.
    """
    _check_source(source)
    _check_quantized(source, fp8)
    model = main_dtype(source.tensors.values())
    full = {name for name, info in source.tensors.items() if info.dtype == torch.float32 and name not in fp8}
    fp32 = {name for name in full if stays_fp32(name, model, published)}
    shards: list[list[str]] = [[]]
    size = 0
    for name, info in source.tensors.items():
        itemsize = 1 if name in fp8 else 4 if name in fp32 else min(info.dtype.itemsize, 2)
        nbytes = torch.Size(info.shape).numel() * itemsize
        if shards[-1] and size + nbytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += nbytes
    stored = {name: [info.shape, str(info.dtype), str(fp8.get(name))] for name, info in source.tensors.items()}
    identity = [source.identity, stored, sorted(fp32), shards, FORMAT]
    fingerprint = hashlib.sha256(json.dumps(identity).encode()).hexdigest()
    kept = _modules_to_not_convert(source, fp8)
    return Plan(source, fp8, fp32, len(full - fp32), shards, kept, fingerprint)


def _check_source(source: Source) -> None:
    for name, info in source.tensors.items():
        if name.endswith("_scale_inv") or info.dtype == FP8:
            raise ValueError(f"{name} is FP8 already: export from the checkpoint that training wrote")
        if info.dtype in (torch.float16, torch.float64):
            raise ValueError(f"{name} is {info.dtype}, which is not what training wrote; convert it to bf16 or fp32")


def _check_quantized(source: Source, fp8: dict[str, torch.dtype]) -> None:
    if not fp8:
        raise ValueError("nothing is quantized: the checkpoint has no routed experts that the settings match")
    for name in (name for name in fp8 if ROUTED in name):
        check_experts(name, len(source.tensors[name].shape))
    for name, dtype in fp8.items():
        shape, stored = source.tensors[name]
        if len(shape) != 2 or not name.endswith(".weight"):
            raise ValueError(
                f"{name} {shape} is to be quantized, but is no matrix of a linear layer; narrow --quantize"
            )
        if dtype == torch.float32 and stored != torch.float32:
            raise ValueError(
                f"training quantized {name} from fp32, but the checkpoint has {stored}: the values are lost. Export an "
                "fp32 checkpoint, or pass --quantized-from bf16 if it was not so"
            )


def _modules_to_not_convert(source: Source, fp8: dict[str, torch.dtype]) -> list[str]:
    """Modules with a matrix that stays bf16; a layer's routed experts are one module, and all or none are FP8."""
    quantized, kept = (
        dict.fromkeys(
            re.sub(r"(\.experts)\..*", r"\1", name.removesuffix(".weight"))
            for name, info in source.tensors.items()
            if len(info.shape) > 1 and (name in fp8) == wanted
        )
        for wanted in (True, False)
    )
    if mixed := quantized.keys() & kept.keys():
        raise ValueError(
            f"some matrices of {min(mixed)} would be FP8 and others bf16; quantize all of a layer's experts or none"
        )
    return list(kept)


def convert(plan: Plan, name: str, quantize: Callable[[Tensor], tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    """The tensors of an export for a tensor of the source.

    ``quantize`` is :func:`titan_fp8moe.recipe.quantize_weight`, or an equal of it.

    Raises:
        ValueError: for a matrix with a NaN or Inf.
    """
    found = exported(name, plan.source.read(name), plan.fp8.get(name), quantize, published=plan.fp32)
    if name in plan.fp8 and has_nan(found[name]):
        raise ValueError(f"{name} holds a NaN or Inf: this checkpoint is of a run that diverged; export an earlier one")
    return {key: value.cpu() for key, value in found.items()}


def write_shards(plan: Plan, out: Path, device: torch.device, report: Callable[[str], None]) -> None:
    """Writes the shards that ``out`` lacks, then the index. Each file appears whole or not at all.

    Raises:
        ValueError: if ``out`` has files of another export, or as :func:`convert`.
    """
    out.mkdir(parents=True, exist_ok=True)
    names = [plan.file(shard) for shard in range(len(plan.shards))]
    done = {path.name for path in out.glob("*.safetensors")}
    if other := sorted(name for name in done if name not in names or _fingerprint(out / name) != plan.fingerprint):
        raise ValueError(
            f"{out} has {other[0]} of another checkpoint, or of other settings; choose an empty folder or remove it"
        )

    def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
        return ops.quantize_weight(weight.to(device))

    weight_map, total = {}, 0
    for shard, file in enumerate(names):
        path = out / file
        if file not in done:
            tensors = {key: t for name in plan.shards[shard] for key, t in convert(plan, name, quantize).items()}
            new = path.with_suffix(".new")
            save_file(tensors, new, {"format": "pt", _METADATA: plan.fingerprint})
            os.umask(mask := os.umask(0))
            new.chmod(0o666 & ~mask)  # safetensors lets nobody else read it
            os.replace(new, path)
            del tensors
        with open_safetensors(path) as opened:
            weight_map |= dict.fromkeys(opened.keys(), file)
        total += path.stat().st_size
        report(f"{file}: {path.stat().st_size / 1e9:.2f} GB{', was there' if file in done else ''}")
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_json(out / INDEX, index)


def _fingerprint(path: Path) -> str | None:
    with open_safetensors(path) as file:
        return (file.metadata() or {}).get(_METADATA)


def write_config(plan: Plan, assets: Path, out: Path) -> list[str]:
    """Copies the small files of ``assets`` and its subfolders, with what is FP8 in config.json; returns what it leaves.

    config.json comes last: its presence says that the export is complete.
    """
    left = []
    for path in sorted(assets.iterdir()):
        if path.name.startswith(".") or path.name in ("config.json", INDEX) or path.resolve() == out.resolve():
            continue
        files = [file for file in sorted(path.rglob("*")) if file.is_file()] if path.is_dir() else [path]
        if path.is_dir() and any(file.suffix in _WEIGHTS for file in files):  # another model's or another format's
            left.append(f"{path.name}/")
            continue
        for name in (file.relative_to(assets) for file in files):
            if name.suffix in _COPIED:
                (out / name).parent.mkdir(parents=True, exist_ok=True)
                (out / name).write_bytes((assets / name).read_bytes())
            elif name.suffix != ".safetensors":
                left.append(str(name))
    write_json(out / "config.json", expected_config(plan, assets))
    return left


def expected_config(plan: Plan, assets: Path) -> dict[str, Any]:
    """The config.json of ``assets`` with the export's dtype and quantization."""
    config = read_config(assets)
    dtype = "torch_dtype" if "torch_dtype" in config else "dtype"
    quantization = FORMAT | {"modules_to_not_convert": plan.modules_to_not_convert}
    return config | {dtype: "bfloat16", "quantization_config": quantization}


def verify(plan: Plan, assets: Path, out: Path) -> int:
    """Compares an export with its source, bit for bit, and returns the number of tensors compared.

    The quantization is :mod:`titan_fp8moe.recipe` on the CPU, the specification of what training computes.

    Raises:
        ValueError: for the first difference.
    """
    for name in ("config.json", INDEX):
        if not (out / name).exists():
            raise ValueError(f"{out} has no {name}: the export is incomplete; run it again without --verify-only")
    if read_json(out / "config.json") != expected_config(plan, assets):
        raise ValueError(f"{out}/config.json is not what this export writes; remove it and run the export again")
    export, count = HuggingFaceSource(out), 0
    for name in (name for names in plan.shards for name in names):
        for key, want in convert(plan, name, recipe.quantize_weight).items():
            if key not in export.tensors:
                raise ValueError(f"{out} lacks {key}; remove its shards and export again")
            got = export.read(key)
            if (got.dtype, got.shape) != (want.dtype, want.shape) or not torch.equal(_bytes(got), _bytes(want)):
                raise ValueError(f"{key} differs from the checkpoint's values; remove its shard and export again")
            del export.tensors[key]
            count += 1
    if export.tensors:
        raise ValueError(
            f"{out} has {len(export.tensors)} tensors that the checkpoint lacks, such as {min(export.tensors)}"
        )
    return count


def _bytes(value: Tensor) -> Tensor:
    return value.contiguous().flatten().view(torch.uint8)


def write_json(path: Path, value: object) -> None:
    """Replaces a file as a whole."""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    os.replace(new, path)
