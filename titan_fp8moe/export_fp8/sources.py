"""Sources of an export's tensors: one interface, and Hugging Face folders behind it.

:class:`titan_fp8moe.torchtitan.checkpoint.DcpSource` reads torchtitan's own checkpoints.
"""

import contextlib
import hashlib
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from titan_fp8moe.export_fp8.format import check_merged, main_dtype
from titan_fp8moe.trainer.plan import plain_name

INDEX = "model.safetensors.index.json"

# By key of config.json, the values that fit a checkpoint. Errors name the first.
ConfigValues = dict[str, list[object]]


class TensorInfo(NamedTuple):
    """Shape and dtype of a stored tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Source(Protocol):
    """A checkpoint under Hugging Face's names.

    Attributes:
        tensors: what it holds, in the order in which it is read fastest.
        identity: changes when the stored files do.
        left_out: the model's tensors that Hugging Face's format has no name for.
    """

    tensors: dict[str, TensorInfo]
    identity: str
    left_out: list[str]

    def read(self, name: str) -> Tensor:
        """The tensor, on the CPU."""


class HuggingFaceSource:
    """The model in a folder: the files of its index, else ``model.safetensors``, else all of ``model-N-of-M``.

    The names lose the prefixes of wrappers around the model that was saved, such as DDP's ``module.``.

    Raises:
        ValueError: for files that are missing, damaged or no model's, an index that does not fit them, or adapters.
    """

    def __init__(self, folder: Path):
        weight_map = read_json(folder / INDEX).get("weight_map", {}) if (folder / INDEX).exists() else None
        files = _model_files(folder, weight_map)
        self.tensors: dict[str, TensorInfo] = {}
        self.left_out: list[str] = []
        self.stored: dict[str, tuple[Any, str]] = {}  # the open file, and the name there
        held = []
        for path in files:
            file = open_safetensors(path)  # maps the file, reads its header
            for stored in file.keys():  # noqa: SIM118  not a dict
                name = re.sub(r"^(module\.|base_model\.model\.)+", "", plain_name(stored))  # DDP's, DeepSpeed's, PEFT's
                if name in self.tensors:
                    raise ValueError(f"{folder} has {name} twice, the second in {path.name}; keep one of the two")
                self.tensors[name] = _info(file.get_slice(stored))
                self.stored[name] = file, stored
                held.append((stored, path.name))
        if weight_map is not None and (wrong := weight_map.items() ^ set(held)):
            name, file = min(wrong)
            what = "lacks {}, which {} names" if weight_map.get(name) == file else "has {}, which {} does not name"
            raise ValueError(
                f"{folder / file} {what.format(name, INDEX)}; complete the download, or save the model again"
            )
        check_merged(self.tensors)
        self.identity = file_identity(files)

    def read(self, name: str) -> Tensor:
        file, stored = self.stored[name]
        return file.get_tensor(stored)


def published_fp32(folder: Path) -> set[str]:
    """The names that the weights of a published model have in fp32; none without weights, or if all are fp32.

    Files that cannot be read count as none: a folder for its tokenizer may hold git-lfs's pointers.
    """
    found: dict[str, TensorInfo] = {}
    for path in folder.glob("*.safetensors"):
        with contextlib.suppress(OSError, SafetensorError), safe_open(path, framework="pt") as file:
            found |= {name: _info(file.get_slice(name)) for name in file.keys()}  # noqa: SIM118  not a dict
    if not found or main_dtype(found.values()) == torch.float32:
        return set()
    return {name for name, info in found.items() if info.dtype == torch.float32}


def _info(part: Any) -> TensorInfo:
    return TensorInfo(tuple(part.get_shape()), _DTYPES.get(part.get_dtype(), torch.uint8))


def _model_files(folder: Path, weight_map: dict[str, str] | None) -> list[Path]:
    """The files that Transformers would read; other safetensors in the folder, such as an adapter's, are no part."""
    found = {path.name for path in folder.glob("*.safetensors")}
    if weight_map is not None:
        files = set(weight_map.values())
        if "model.safetensors" in found - files:
            raise ValueError(f"{folder} has model.safetensors, which {INDEX} does not name; remove one of the two")
    elif "model.safetensors" in found:
        files = {"model.safetensors"}
    else:
        totals = {int(match[1]) for name in found if (match := re.fullmatch(r"model-\d+-of-(\d+)\.safetensors", name))}
        if len(totals) != 1:
            raise ValueError(
                f"{folder} has neither {INDEX}, model.safetensors nor the files of one model-N-of-M.safetensors, but "
                f"{', '.join(sorted(found)[:3])}; save the model with save_pretrained, adapters merged"
            )
        files = {f"model-{i + 1:05}-of-{total:05}.safetensors" for total in totals for i in range(total)}
    if missing := sorted(files - found):
        raise ValueError(f"{folder} lacks {', '.join(missing[:3])}; complete the download, or save the model again")
    return [folder / name for name in sorted(files)]


def open_safetensors(path: Path) -> Any:
    """Raises ValueError for a file that is missing or damaged."""
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{path} cannot be read ({error}); copy or save it again") from None


def read_json(path: Path) -> dict[str, Any]:
    """Raises ValueError for a file that is damaged, or holds no object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON ({error}); copy or save it again") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds no JSON object; copy or save it again")
    return value


# safetensors' names of the dtypes that the export tells apart; others are passed through or refused as they are.
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "I64": torch.int64,
    "I32": torch.int32,
}


def file_identity(files: Iterable[Path]) -> str:
    """Changes with the names, sizes and times of the files; folders among them do not count."""
    stats = [(file.name, (stat := file.stat()).st_size, stat.st_mtime_ns) for file in files if file.is_file()]
    return hashlib.sha256(json.dumps(stats).encode()).hexdigest()
