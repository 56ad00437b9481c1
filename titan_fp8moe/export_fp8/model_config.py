"""Compares a checkpoint with its model's config.json: the decoder's layers and experts, and the sizes that it states.

Nothing is derived from shapes: what the file does not state is not compared, and ``--verify`` lists the keys that were.
"""

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from titan_fp8moe.export_fp8.sources import ConfigValues, Source, read_json

# The decoder in Transformers' names. Other stacks of layers are vision towers and multi-token prediction.
_DECODER = r"(?:model\.language_model\.|language_model\.model\.|thinker\.model\.|model\.llm\.|model\.|backbone\.)?"
_LAYER = re.compile(rf"{_DECODER}layers\.(\d+)\.")
_TEXT_CONFIGS = "thinker_config", "text_config", "language_config", "llm_config"
_NUM_EXPERTS = "n_routed_experts", "num_experts", "num_local_experts"
# The dims of a decoder's tensors as keys of config.json or products of them. Those of attention differ between models.
_DIMS = {
    "embed_tokens.weight": ("vocab_size", "hidden_size"),
    "lm_head.weight": ("vocab_size", "hidden_size"),
    "mlp.gate_proj.weight": ("intermediate_size", "hidden_size"),
    "mlp.experts.*.gate_proj.weight": ("moe_intermediate_size", "hidden_size"),
    "mlp.experts.*.up_proj.weight": ("moe_intermediate_size", "hidden_size"),
    "mlp.experts.*.down_proj.weight": ("hidden_size", "moe_intermediate_size"),
    "mlp.shared_experts.gate_proj.weight": ("n_shared_experts*moe_intermediate_size", "hidden_size"),
}
# Parts of names that a model has if it states these keys, and lacks if they are 0 or null.
_PARTS = {"vocab_size": "embed", "n_shared_experts": "shared_expert"}
_MOST = 30  # differences in an error
_UNSTATED = object()


class _Stated:
    """The decoder's values in config.json.

    Attributes:
        compared: the keys that were asked for and are there.
    """

    def __init__(self, config: dict[str, Any]):
        self.values = dict(config)
        for key in _TEXT_CONFIGS:
            self.values |= self.values.get(key) or {}
        self.values |= self.values.get("rope_parameters") or {}
        if "tie_word_embeddings" in config:  # a model of several has one head
            self.values["tie_word_embeddings"] = config["tie_word_embeddings"]
        self.compared: dict[str, None] = {}

    def get(self, key: str) -> Any:
        if key in self.values:
            self.compared[key] = None
        return self.values.get(key, _UNSTATED)

    def number(self, keys: str) -> int | None:
        """The product of these keys; None unless all are stated."""
        numbers = [self.get(key) for key in keys.split("*")]
        return math.prod(numbers) if all(isinstance(number, int) for number in numbers) else None

    def kind(self, layer: int, num_layers: int) -> list[object]:
        """What the lists with an entry per layer, such as ``layer_types``, state of this one."""
        return [v[layer] for v in self.values.values() if isinstance(v, list | str) and len(v) == num_layers]


def read_config(assets: Path) -> dict[str, Any]:
    path = assets / "config.json"
    if not path.exists():
        raise ValueError(f"{path} does not exist; --assets names a folder with the model's config.json and tokenizer")
    return read_json(path)


def check_config(source: Source, trained: ConfigValues, assets: Path) -> list[str]:
    """Compares the checkpoint and the run with config.json; returns the keys that were compared.

    Args:
        trained: the values that fit settings of the run.

    Raises:
        ValueError: with the differences, for a checkpoint that is incomplete or another model's.
    """
    stated, names = _Stated(read_config(assets)), [*source.tensors]
    num_layers = stated.number("num_hidden_layers") or len(stated.values.get("layers_block_type") or ())  # Nemotron's
    if not num_layers:
        raise ValueError(f"{assets}/config.json states no num_hidden_layers; pass the model's own config with --assets")
    layers: dict[int, list[str]] = {}
    for name in names:
        if match := _LAYER.match(name):
            layers.setdefault(int(match[1]), []).append(name)
    if not layers:
        raise ValueError(
            f"{names[0]} and the other tensors are of no decoder, such as model.layers.0.; if a wrapper has renamed "
            "them, save the state dict of the model inside it"
        )
    differences = [
        *_wrong_layers(layers, stated, num_layers),
        *_wrong_experts(names, stated),
        *_wrong_dims(source, stated),
        *_wrong_parts(layers, names, stated),
        *_wrong_settings(trained, stated),
    ]
    if differences:
        more = f"; and {len(differences) - _MOST} more" if len(differences) > _MOST else ""
        raise ValueError(
            f"{assets}/config.json has {'; '.join(differences[:_MOST])}{more}. Complete the checkpoint, or pass the "
            "model's own config"
        )
    return [*stated.compared]


def _wrong_layers(layers: dict[int, list[str]], stated: _Stated, num_layers: int) -> Iterator[str]:
    """Layers that are missing or too many, or that lack a matrix which another layer of their kind has."""
    further = stated.number("num_nextn_predict_layers") or 0  # DeepSeek stores these behind the decoder's
    if lost := sorted({*range(num_layers)} - layers.keys()):
        yield f"num_hidden_layers = {num_layers}, but the checkpoint lacks layers.{lost[0]}."
    if more := sorted(layers.keys() - {*range(num_layers + further)}):
        yield f"num_hidden_layers = {num_layers}, but the checkpoint has {layers[more[0]][0]}"
    matrices = {
        layer: {_of_any_expert(_LAYER.sub("", name)) for name in names if name.endswith(".weight")}
        for layer, names in layers.items()
        if layer < num_layers
    }
    for layer, found in matrices.items():
        for other, fuller in matrices.items():
            if found < fuller and stated.kind(layer, num_layers) == stated.kind(other, num_layers):
                lacks = min(fuller - found)
                yield f"layers of one kind, but the checkpoint lacks layers.{layer}.{lacks}, which layer {other} has"
                break


def _of_any_expert(name: str) -> str:
    return re.sub(r"\bexperts\.\d+\.", "experts.*.", name)


def _wrong_experts(names: list[str], stated: _Stated) -> Iterator[str]:
    """Matrices of experts that are missing or too many."""
    modules: dict[str, dict[str, set[int]]] = {}
    for name in names:
        if match := re.match(r"(.*\bexperts\.)(\d+)(\..+)", name):
            modules.setdefault(match[1], {}).setdefault(match[3], set()).add(int(match[2]))
    counts = {module: 1 + max(set().union(*parts.values())) for module, parts in modules.items()}
    decoder = [module for module in modules if _LAYER.match(module)]
    key = next((key for key in _NUM_EXPERTS if stated.number(key)), "experts")
    count = stated.number(key) or max((counts[module] for module in decoder), default=0)
    for module, parts in modules.items():
        want = count if module in decoder else counts[module]
        for part, numbers in parts.items():
            if wrong := numbers ^ {*range(want)}:
                says = "has" if min(wrong) in numbers else "lacks"
                yield f"{key} = {want}, but the checkpoint {says} {module}{min(wrong)}{part}"


def _wrong_dims(source: Source, stated: _Stated) -> Iterator[str]:
    """Sizes of tensors, of which the first of each kind is told."""
    told = set()
    for name, info in source.tensors.items():
        kind = _of_any_expert(re.sub(rf"^{_DECODER}(layers\.\d+\.)?", "", name))
        for keys, size in zip(_DIMS.get(kind, ()), info.shape, strict=False):
            if (want := stated.number(keys)) not in (None, size) and (kind, keys) not in told:
                told.add((kind, keys))
                yield f"{keys} = {want}, but {name} has {size}"


def _wrong_parts(layers: dict[int, list[str]], names: list[str], stated: _Stated) -> Iterator[str]:
    """Parts of the model that are stated and missing, or the other way round."""
    for key, part in _PARTS.items():
        value, found = stated.get(key), [name for name in names if part in name]
        if value is not _UNSTATED and bool(value) != bool(found):
            yield f"{key} = {json.dumps(value)}, but the checkpoint {f'has {found[0]}' if found else f'lacks {part}'}"
    tied = stated.get("tie_word_embeddings")
    head = next((name for name in names if re.search(r"(^|\.)(lm_head|head|output|unembed)\.weight$", name)), None)
    if tied is False and head is None:
        yield "tie_word_embeddings = false, but the checkpoint lacks lm_head.weight"
    if tied is True and head is not None and "lm_head" in head:
        yield f"tie_word_embeddings = true, but the checkpoint has {head}"
    first, sparse = stated.get("first_k_dense_replace"), [i for i in layers if any(".experts." in n for n in layers[i])]
    if isinstance(first, int) and sparse and first != min(sparse):
        yield f"first_k_dense_replace = {first}, but the checkpoint has experts from layer {min(sparse)} on"


def _wrong_settings(trained: ConfigValues, stated: _Stated) -> Iterator[str]:
    for key, values in trained.items():
        value = stated.get(key)
        if value is not _UNSTATED and value not in values:
            yield f"{key} = {json.dumps(value)}, but the model was trained with {json.dumps(values[0])}"
