"""Sources of an export's tensors: one interface, and Hugging Face folders behind it.

:class:`titan_fp8moe.torchtitan.checkpoint.DcpSource` reads torchtitan's own checkpoints.
"""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import safe_open
from torch import Tensor

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
        ...


class HuggingFaceSource:
    """The safetensors files of a folder.

    Raises:
        ValueError: if a file of the folder's index is missing.
    """

    def __init__(self, folder: Path):
        files = sorted(folder.glob("*.safetensors"))
        index = folder / "model.safetensors.index.json"
        if index.exists():
            files = [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
            if missing := [file.name for file in files if not file.exists()]:
                raise ValueError(f"{index} names {', '.join(missing)}, which are not there; complete the download")
        self.tensors: dict[str, TensorInfo] = {}
        self.files: dict[str, Any] = {}
        self.left_out: list[str] = []
        for path in files:
            file = safe_open(path, framework="pt")  # maps the file, reads its header
            for name in file.keys():  # noqa: SIM118  not a dict
                if name in self.files:
                    raise ValueError(f"{folder} has {name} in two files; keep one of its checkpoints there")
                part = file.get_slice(name)
                self.tensors[name] = TensorInfo(tuple(part.get_shape()), _DTYPES.get(part.get_dtype(), torch.uint8))
                self.files[name] = file
        self.identity = file_identity(files)

    def read(self, name: str) -> Tensor:
        return self.files[name].get_tensor(name)


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
    """Changes with the names, sizes and times of the files."""
    stats = [(file.name, (stat := file.stat()).st_size, stat.st_mtime_ns) for file in files]
    return hashlib.sha256(json.dumps(stats).encode()).hexdigest()
