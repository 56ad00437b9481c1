"""Reads the files of a model, and plans, writes and verifies those of an export.

One tensor of the source and one shard of the export are in memory at a time.
"""

import contextlib
import json
import os
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from titan_fp8moe import recipe
from titan_fp8moe.export_fp8.format import BALANCE, ROUTED, check_merged, exported, has_nan, is_fp32
from titan_fp8moe.trainer.plan import plain_name

INDEX = "model.safetensors.index.json"
FORMAT = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [recipe.TILE, recipe.TILE],
    "scale_fmt": "ue8m0",
}
# safetensors' names of the dtypes that the export tells apart. It takes others for integers, which stay as they are.
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": recipe.FP8,
}
_COPIED = ".json", ".jinja", ".model", ".py", ".tiktoken", ".txt"
_WEIGHTS = ".bin", ".distcp", ".gguf", ".pt", ".pth", ".safetensors"


class TensorInfo(NamedTuple):
    """Shape and dtype of a stored tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Source(Protocol):
    """A checkpoint under Hugging Face's names: :class:`HuggingFaceSource`, or torchtitan's own format.

    Attributes:
        tensors: what it holds, in the order in which it is read fastest.
        left_out: the model's tensors that Hugging Face's format has no name for.
    """

    tensors: dict[str, TensorInfo]
    left_out: list[str]

    def read(self, name: str) -> Tensor:
        """The tensor, on the CPU."""


class HuggingFaceSource:
    """The model in a folder: the files of its index, else ``model.safetensors``, else all of ``model-N-of-M``.

    The names lose the prefixes of wrappers around the model that was saved, such as DDP's ``module.``.

    Raises:
        ValueError: for files that are damaged or no model's, an index that does not fit them, or adapters.
        OSError: for files that are missing.
    """

    def __init__(self, folder: Path):
        index = folder / INDEX
        weight_map = json.loads(index.read_bytes())["weight_map"] if index.exists() else None
        self.left_out: list[str] = []
        self.tensors: dict[str, TensorInfo] = {}
        self.stored: dict[str, tuple[Any, str]] = {}  # the open file, and the name there
        held = {}
        for path in _model_files(folder, weight_map):
            try:
                file = safe_open(path, framework="pt")  # maps the file, reads its header
            except SafetensorError as error:
                raise ValueError(f"{path} cannot be read ({error}); copy or save it again") from None
            for stored, info in _infos(file).items():
                name = re.sub(r"^(module\.|base_model\.model\.)+", "", plain_name(stored))  # DDP's, DeepSpeed's, PEFT's
                if name in self.tensors:
                    raise ValueError(f"{folder} has {name} twice, the second in {path.name}; keep one of the two")
                self.tensors[name], self.stored[name], held[stored] = info, (file, stored), path.name
        if weight_map is not None and weight_map != held:
            name, file = min(weight_map.items() ^ held.items())
            raise ValueError(f"{INDEX} and {folder / file} differ in {name}; complete the download or save again")
        check_merged(self.tensors)

    def read(self, name: str) -> Tensor:
        file, stored = self.stored[name]
        return file.get_tensor(stored)


def _infos(file: Any) -> dict[str, TensorInfo]:
    parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  not a dict
    return {n: TensorInfo(tuple(p.get_shape()), _DTYPES.get(p.get_dtype(), torch.uint8)) for n, p in parts.items()}


def _model_files(folder: Path, weight_map: dict[str, str] | None) -> list[Path]:
    """The files that Transformers would read; other safetensors in the folder, such as an adapter's, are no part."""
    single = folder / "model.safetensors"
    if weight_map is not None:
        if single.exists() and single.name not in weight_map.values():
            raise ValueError(f"{folder} has model.safetensors, which {INDEX} does not name; remove one of the two")
        return [folder / name for name in sorted(set(weight_map.values()))]
    files = [single] if single.exists() else sorted(folder.glob("model-*-of-*.safetensors"))
    if files != [single] and {path.stem[-5:] for path in files} != {f"{len(files):05}"}:
        raise ValueError(
            f"{folder} has neither .metadata, as torchtitan's checkpoints (step-N) do, nor {INDEX}, model.safetensors "
            "or all files of one model-N-of-M.safetensors; complete it, or save with save_pretrained, adapters merged"
        )
    return files


def published_fp32(folder: Path) -> set[str]:
    """The names that the weights of a published model have in fp32; none without weights, or of an fp32 model.

    Files that cannot be read count as none: a folder for its tokenizer may hold git-lfs's pointers.
    """
    found: dict[str, TensorInfo] = {}
    for path in folder.glob("*.safetensors"):
        with contextlib.suppress(OSError, SafetensorError), safe_open(path, framework="pt") as file:
            found |= _infos(file)
    if not found or is_fp32(found):
        return set()
    return {name for name, info in found.items() if info.dtype == torch.float32}


class Plan(NamedTuple):
    """The fate of each tensor of a source.

    Attributes:
        source: the checkpoint.
        fp8: by name of each matrix that is quantized, the precision that training quantizes it from.
        fp32: the names of tensors that stay fp32 if they are.
        rounded: the number of tensors that are fp32 in the source and bf16 in the export.
        shards: by name of each file, the names of the source's tensors in it.
        config: the config.json of the export.
    """

    source: Source
    fp8: dict[str, torch.dtype]
    fp32: set[str]
    rounded: int
    shards: dict[str, list[str]]
    config: dict[str, Any]


def make_plan(
    source: Source, names: Collection[str], quantized_from: str | None, assets: Path, shard_bytes: float
) -> Plan:
    """Decides what becomes FP8, what stays fp32, and which file holds it.

    Args:
        names: the matrices that training multiplies in FP8.
        quantized_from: what it quantizes them from: ``fp32``, ``bf16`` or ``fp32-routed``. None if nobody says it.
        assets: the folder of the published model; its weights, if it has any, say what stays fp32.

    Raises:
        ValueError: for matrices that cannot be quantized so, or without a config.json.
    """
    if not (assets / "config.json").exists():
        raise ValueError(f"{assets} has no config.json; --assets names a folder with the model's own and its tokenizer")
    fp8 = {name: _precision(name, info.dtype, quantized_from) for name, info in source.tensors.items() if name in names}
    if not fp8:
        raise ValueError("nothing is quantized: the checkpoint has no routed experts that the settings match")
    for name, info in source.tensors.items():
        if info.dtype in (recipe.FP8, torch.float16, torch.float64):
            raise ValueError(f"{name} is {info.dtype}; export the bf16 or fp32 checkpoint that training wrote")
    fp32 = {*source.tensors}
    if is_fp32(source.tensors):
        fp32 = published_fp32(assets) | {name for name in fp32 if name.endswith(BALANCE)}
    full = {name for name, info in source.tensors.items() if info.dtype == torch.float32}
    shards: list[list[str]] = [[]]
    size = 0
    for name, info in source.tensors.items():
        nbytes = torch.Size(info.shape).numel() * (1 if name in fp8 else min(info.dtype.itemsize, 2))
        if shards[-1] and size + nbytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += nbytes
    files = {f"model-{i + 1:05}-of-{len(shards):05}.safetensors": shard for i, shard in enumerate(shards)}
    config = json.loads((assets / "config.json").read_bytes())
    config["torch_dtype" if "torch_dtype" in config else "dtype"] = "bfloat16"
    config["quantization_config"] = FORMAT | {"modules_to_not_convert": _modules_to_not_convert(source, fp8)}
    return Plan(source, fp8, fp32, len(full - fp32 - fp8.keys()), files, config)


def _precision(name: str, stored: torch.dtype, quantized_from: str | None) -> torch.dtype:
    """The precision that training quantizes a matrix from."""
    if quantized_from is None and stored == torch.float32:
        raise ValueError(
            f"{name} is fp32, but training may have quantized it from bf16: pass --config and --world-size of the run, "
            "or --quantized-from"
        )
    fp32 = quantized_from == "fp32" or (quantized_from == "fp32-routed" and ROUTED in name)
    if fp32 and stored != torch.float32:
        raise ValueError(
            f"training quantized {name} from fp32, but the checkpoint has {stored}: the values are lost. Export an "
            "fp32 checkpoint, or pass --quantized-from bf16 if it was not so"
        )
    return torch.float32 if fp32 else torch.bfloat16


def _modules_to_not_convert(source: Source, fp8: dict[str, torch.dtype]) -> list[str]:
    """Modules with a matrix that is not quantized; a layer's routed experts are one module, and all or none are FP8."""
    modules: tuple[dict[str, None], dict[str, None]] = ({}, {})
    for name, info in source.tensors.items():
        if len(info.shape) > 1:
            modules[name in fp8][re.sub(r"(\.experts)\..*", r"\1", name.removesuffix(".weight"))] = None
    kept, quantized = modules
    if mixed := quantized.keys() & kept.keys():
        raise ValueError(f"some matrices of {min(mixed)} would be FP8 and others bf16; quantize all of them or none")
    return list(kept)


def _convert(plan: Plan, name: str, quantize: Callable) -> dict[str, Tensor]:
    """The tensors of an export for a tensor of the source. Raises ValueError for a matrix with a NaN or Inf."""
    found = exported(name, plan.source.read(name), plan.fp8.get(name), quantize, name in plan.fp32)
    if name in plan.fp8 and has_nan(found[name]):
        raise ValueError(f"{name} holds a NaN or Inf: this run has diverged; export an earlier checkpoint")
    return {key: value.cpu() for key, value in found.items()}


def write(plan: Plan, assets: Path, out: Path, quantize: Callable) -> None:
    """Writes shards, index, the assets and config.json, which comes last: with it the export is complete.

    Args:
        quantize: :func:`titan_fp8moe.recipe.quantize_weight`, or an equal of it.

    Raises:
        ValueError: if ``out`` is not empty, as files of another export would stay; or for a matrix with a NaN or Inf.
    """
    if out.exists() and (there := sorted(out.iterdir())):
        raise ValueError(f"{there[0]} is there already; choose an empty folder or remove {out}")
    out.mkdir(parents=True, exist_ok=True)
    os.umask(mask := os.umask(0))
    weight_map, total = {}, 0
    for file, names in plan.shards.items():
        tensors = {key: value for name in names for key, value in _convert(plan, name, quantize).items()}
        save_file(tensors, out / file, {"format": "pt"})
        (out / file).chmod(0o666 & ~mask)  # safetensors lets nobody else read it
        weight_map |= dict.fromkeys(tensors, file)
        total += sum(value.nbytes for value in tensors.values())
        print(f"{file}: {total / 1e9:.2f} GB so far", flush=True)
        del tensors  # before the next shard's
    _write_json(out / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    if left := _copy_assets(assets, out):
        print(f"not copied from {assets}: {', '.join(left[:20])}{', ...' * (len(left) > 20)}")
    _write_json(out / "config.json", plan.config)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def _copy_assets(assets: Path, out: Path) -> list[str]:
    """Copies the small files of ``assets`` and its subfolders; returns the names of what it leaves."""
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
    return left


def verify(plan: Plan, out: Path) -> str:
    """Compares an export with its source, bit for bit, and returns a sentence of what was compared.

    The quantization is :mod:`titan_fp8moe.recipe` on the CPU, the specification of what training computes.

    Raises:
        ValueError: for the first difference.
        OSError: for a file that is missing.
    """
    if json.loads((out / "config.json").read_bytes()) != plan.config:
        raise ValueError(f"{out}/config.json is not what this export writes; remove {out} and export again")
    export, compared = HuggingFaceSource(out), set()
    for name in plan.source.tensors:
        for key, want in _convert(plan, name, recipe.quantize_weight).items():
            if key not in export.tensors or not _same(export.read(key), want):
                raise ValueError(f"{key} is missing, or differs from the checkpoint's; remove {out} and export again")
            compared.add(key)
    if more := export.tensors.keys() - compared:
        raise ValueError(f"{out} has {len(more)} tensors that the checkpoint lacks, such as {min(more)}")
    after = f" after rounding {plan.rounded} from fp32 to bf16" if plan.rounded else ""
    return f"{len(compared)} tensors are the checkpoint's, bit for bit{after}"


def _same(got: Tensor, want: Tensor) -> bool:
    if (got.dtype, got.shape) != (want.dtype, want.shape):
        return False
    return torch.equal(*(value.contiguous().flatten().view(torch.uint8) for value in (got, want)))
