"""Reads a model's tensors from files, and writes and verifies those of an export.

One tensor of the source and one shard of the export are in memory at a time; mapped files do not count.
"""

import contextlib
import json
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from titan_fp8moe import recipe
from titan_fp8moe.export_fp8.format import ROUTED, buckets, check_merged, exported, fp32_that_stays
from titan_fp8moe.ops.self_check import same
from titan_fp8moe.trainer.plan import plain_name

INDEX = "model.safetensors.index.json"
FORMAT = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [recipe.BLOCK, recipe.BLOCK],
    "scale_fmt": "ue8m0",
}
_COPIED = ".json", ".jinja", ".model", ".py", ".tiktoken", ".txt"
_WEIGHTS = ".bin", ".distcp", ".gguf", ".pt", ".pth", ".safetensors"


class Checkpoint(NamedTuple):
    """A model's tensors under Hugging Face's names: :func:`open_folder`, or torchtitan's own format.

    Attributes:
        tensors: shapes and dtypes, as tensors whose values need not be there.
        read: yields names and values, on the CPU.
    """

    tensors: Mapping[str, Tensor]
    read: Callable[[], Iterable[tuple[str, Tensor]]]


def open_folder(folder: Path) -> Checkpoint:
    """The model in a folder: ``model.safetensors``, else the files of its index, else all of ``model-N-of-M``.

    The names lose the prefixes of wrappers around the model that was saved, such as DDP's ``module.``.

    Raises:
        ValueError: for files that are no model's, or adapters.
        SafetensorError: for files that are damaged.
        OSError: for files that are missing.
    """
    stored = {plain_name(name): value for path in _model_files(folder) for name, value in _mapped(path).items()}
    prefix = re.compile(r"^(module\.|base_model\.model\.)+")  # DDP's, DeepSpeed's, PEFT's
    tensors = {prefix.sub("", name): value for name, value in stored.items()}
    check_merged(tensors)
    return Checkpoint(tensors, tensors.items)


def _model_files(folder: Path) -> list[Path]:
    """The files that Transformers would read; other safetensors in the folder, such as an adapter's, are no part."""
    if (single := folder / "model.safetensors").exists():
        return [single]
    if (index := folder / INDEX).exists():
        return [folder / name for name in sorted({*json.loads(index.read_bytes())["weight_map"].values()})]
    files = sorted(folder.glob("model-*-of-*.safetensors"))
    if {path.stem[-5:] for path in files} != {f"{len(files):05}"}:
        raise ValueError(
            f"{folder} has neither .metadata, as torchtitan's checkpoints (step-N) do, nor model.safetensors, {INDEX} "
            "or all of model-N-of-M.safetensors; complete it, or merge adapters and save with save_pretrained"
        )
    return files


def _mapped(path: Path) -> dict[str, Tensor]:
    """The tensors of a file, whose values are read where they are used."""
    return dict(sorted(load_file(path).items()))


def published(folder: Path) -> dict[str, Tensor]:
    """The tensors of a published model, if there are any. A folder for its tokenizer may hold git-lfs's pointers."""
    tensors: dict[str, Tensor] = {}
    for path in folder.glob("*.safetensors"):
        with contextlib.suppress(OSError, SafetensorError):
            tensors |= _mapped(path)
    return tensors


class Export:
    """A checkpoint in DeepSeek's FP8 format: decides the fate of each tensor, writes and verifies.

    Args:
        source: the checkpoint.
        names: the matrices that training multiplies in FP8.
        quantized_from: what it quantizes them from: ``fp32``, ``bf16`` or ``fp32-routed``. None if nobody says it.
        assets: the folder of the published model; its weights, if it has any, say what stays fp32.

    Attributes:
        fp8: by name of each matrix that is quantized, the precision that training quantizes it from.
        rounded: the number of tensors that are fp32 in the source and bf16 in the export.
        config: the config.json of the export.

    Raises:
        ValueError: for matrices that cannot be quantized so.
        OSError: without a config.json.
    """

    def __init__(self, source: Checkpoint, names: Collection[str], quantized_from: str | None, assets: Path):
        dtypes = {name: value.dtype for name, value in source.tensors.items()}
        self.source, self.assets = source, assets
        self.fp8 = {name: _precision(name, dtype, quantized_from) for name, dtype in dtypes.items() if name in names}
        if not self.fp8:
            raise ValueError("nothing is quantized: the checkpoint has no routed experts that the settings match")
        self.stays_fp32 = fp32_that_stays(source.tensors, published(assets))
        fp32 = [name for name, dtype in dtypes.items() if dtype == torch.float32 and name not in self.fp8]
        self.rounded = sum(not self.stays_fp32(name) for name in fp32)
        self.config = json.loads((assets / "config.json").read_bytes())
        self.config["torch_dtype" if "torch_dtype" in self.config else "dtype"] = "bfloat16"
        kept = _modules_to_not_convert(source.tensors, self.fp8)
        self.config["quantization_config"] = FORMAT | {"modules_to_not_convert": kept}

    def tensors(self, quantize: Callable) -> Iterator[dict[str, Tensor]]:
        """The exported tensors of one of the source's at a time, on the CPU.

        Args:
            quantize: :func:`titan_fp8moe.recipe.quantize_weight`, or an equal of it.
        """
        for name, value in self.source.read():
            found = exported(name, value, self.fp8.get(name), quantize, self.stays_fp32(name))
            del value  # with the layer's experts, before more is read
            yield {key: tensor.cpu() for key, tensor in found.items()}

    def write(self, out: Path, quantize: Callable, shard_bytes: float) -> None:
        """Writes shards, index, the assets and config.json, which comes last: with it the export is complete.

        Raises:
            ValueError: if ``out`` is not empty, as files of another export would stay; or for a matrix with a NaN.
        """
        if out.exists() and (there := sorted(out.iterdir())):
            raise ValueError(f"{there[0]} is there already; choose an empty folder or remove {out}")
        out.mkdir(parents=True, exist_ok=True)
        shards, total = [], 0
        for tensors in buckets(self.tensors(quantize), shard_bytes):
            shards.append([*tensors])
            save_file(tensors, out / f"{len(shards)}.safetensors", {"format": "pt"})
            total += sum(tensor.nbytes for tensor in tensors.values())
            print(f"{total / 1e9:.2f} GB written", flush=True)
            del tensors  # before the next shard's
        files = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
        weight_map = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        _write_json(out / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
        for i, file in enumerate(files):
            (out / f"{i + 1}.safetensors").rename(out / file)
            shutil.copymode(out / INDEX, out / file)  # safetensors lets nobody else read it
        if left := _copy_assets(self.assets, out):
            print(f"not copied from {self.assets}: {', '.join(left[:20])}{', ...' * (len(left) > 20)}")
        _write_json(out / "config.json", self.config)

    def verify(self, out: Path) -> int:
        """Compares the files in ``out`` with the source, bit for bit, and returns the number of tensors.

        The quantization is :mod:`titan_fp8moe.recipe` on the CPU, the specification of what training computes.

        Raises:
            ValueError: for the first difference, of config.json's ``quantization_config`` too.
            OSError: for a file that is missing. config.json is where the export was interrupted.
        """
        config, key = json.loads((out / "config.json").read_bytes()), "quantization_config"
        if config.get(key) != self.config[key]:
            raise ValueError(f"{out / 'config.json'} has another {key} than this export; export again")
        written, compared = open_folder(out).tensors, 0
        for found in self.tensors(recipe.quantize_weight):
            for name, want in found.items():
                if name not in written or not same(written[name], want):
                    raise ValueError(f"{name} is missing, or differs from the checkpoint's; export again")
                compared += 1
        if len(written) != compared:
            raise ValueError(f"{out} has {len(written)} tensors, and the checkpoint's are {compared}; export again")
        return compared


def _precision(name: str, stored: torch.dtype, quantized_from: str | None) -> torch.dtype:
    """The precision that training quantizes a matrix from."""
    fp32 = quantized_from == "fp32" or (quantized_from == "fp32-routed" and ROUTED in name)
    known = {torch.float32} if fp32 else {torch.bfloat16} | ({torch.float32} if quantized_from else set())
    if stored not in known:
        raise ValueError(
            f"{name} is {stored}, and training quantized {quantized_from or 'bf16, or fp32'}: export the checkpoint "
            "that it wrote, and pass --world-size with --config, or --quantized-from"
        )
    return torch.float32 if fp32 else torch.bfloat16


def _modules_to_not_convert(tensors: Mapping[str, Tensor], fp8: Collection[str]) -> list[str]:
    """Modules with a matrix that is not quantized; a layer's routed experts are one module, and all or none are FP8."""
    modules = {name: re.sub(r"(\.experts)\..*", r"\1", name.removesuffix(".weight")) for name in tensors}
    kept = dict.fromkeys(modules[name] for name, value in tensors.items() if value.dim() > 1 and name not in fp8)
    if mixed := kept.keys() & {modules[name] for name in fp8}:
        raise ValueError(f"some matrices of {min(mixed)} would be FP8 and others bf16; quantize all of them or none")
    return list(kept)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def _copy_assets(assets: Path, out: Path) -> list[str]:
    """Copies the small files of ``assets`` and its subfolders; returns the names of what it leaves."""
    names = [path.relative_to(assets) for path in sorted(assets.rglob("*")) if path.is_file()]
    models = {name.parts[0] for name in names if len(name.parts) > 1 and name.suffix in _WEIGHTS}
    left = [f"{folder}/" for folder in sorted(models) if not folder.startswith(".")]
    for name in names:
        if name.parts[0] in models or name.parts[0].startswith(".") or str(name) in ("config.json", INDEX):
            continue
        if name.suffix in _COPIED:
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(assets / name, out / name)
        elif name.suffix != ".safetensors":
            left.append(str(name))
    return left
