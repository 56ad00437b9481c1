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
_MOST = 30  # differences in an error


class _Stated(dict[str, Any]):
    """The decoder's values in config.json.

    Attributes:
        compared: the keys that were asked for and are there.
    """

    def __init__(self, config: dict[str, Any]):
        super().__init__(config)
        for key in (*_TEXT_CONFIGS, "rope_parameters"):
            self.update(self.get(key) or {})
        self.update({key: config[key] for key in ("tie_word_embeddings",) if key in config})  # the whole model's
        self.compared: dict[str, None] = {}

    def number(self, keys: str) -> int | None:
        """The product of these keys; None unless all are stated."""
        numbers: list[Any] = [self.get(key) for key in keys.split("*")]
        if not all(isinstance(number, int) for number in numbers):
            return None
        self.compared |= dict.fromkeys(keys.split("*"))
        return math.prod(numbers)

    def kind(self, layer: int, num_layers: int) -> list[object]:
        """The entries for this layer in lists that have one per layer, such as ``layer_types``."""
        return [v[layer] for v in self.values() if isinstance(v, list | str) and len(v) == num_layers]


def read_config(assets: Path) -> dict[str, Any]:
    if not (path := assets / "config.json").exists():
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
    num_layers = stated.number("num_hidden_layers") or len(stated.get("layers_block_type") or ())  # Nemotron's
    if not num_layers:
        raise ValueError(f"{assets}/config.json states no num_hidden_layers; pass the model's own config with --assets")
    if not any(map(_LAYER.match, names)):
        raise ValueError(
            f"{names[0]} and the other tensors are of no decoder, such as model.layers.0.; if a wrapper has renamed "
            "them, save the state dict of the model inside it"
        )
    differences = [
        *_wrong_settings(trained, stated),
        *_wrong_head(names, stated),
        *_wrong_dims(source, stated),
        *_wrong_layers(names, stated, num_layers),
        *_wrong_experts(names, stated),
    ]
    if differences:
        more = "; ..." if len(differences) > _MOST else ""
        raise ValueError(
            f"{assets}/config.json has {'; '.join(differences[:_MOST])}{more}. Complete the checkpoint, or pass the "
            "model's own config"
        )
    return [*stated.compared]


def _wrong_layers(names: list[str], stated: _Stated, num_layers: int) -> Iterator[str]:
    """Layers that are missing or too many, or that lack a matrix which another layer of their kind has."""
    layers: dict[int, set[str]] = {layer: set() for layer in range(num_layers)}
    further = stated.number("num_nextn_predict_layers") or 0  # DeepSeek stores these behind the decoder's
    for name in names:
        if (match := _LAYER.match(name)) is None:
            continue
        if (layer := int(match[1])) >= num_layers + further:
            yield f"num_hidden_layers = {num_layers}, but the checkpoint has {name}"
            return
        if layer < num_layers and name.endswith(".weight"):
            layers[layer].add(_of_any_expert(name[match.end() :]))
    for layer, found in layers.items():
        for other, fuller in layers.items():
            if found < fuller and (not found or stated.kind(layer, num_layers) == stated.kind(other, num_layers)):
                lacks = f"layers.{layer}.{min(fuller - found)}"
                yield f"num_hidden_layers = {num_layers}, but the checkpoint lacks {lacks}, which layer {other} has"
                break


def _of_any_expert(name: str) -> str:
    return re.sub(r"\bexperts\.\d+\.", "experts.*.", name)


def _wrong_experts(names: list[str], stated: _Stated) -> Iterator[str]:
    """Matrices of experts that are missing or too many. Without a number, the decoder's largest counts."""
    modules: dict[str, dict[str, set[int]]] = {}
    for name in names:
        if match := re.match(r"(.*\bexperts\.)(\d+)(\..+)", name):
            modules.setdefault(match[1], {}).setdefault(match[3], set()).add(int(match[2]))
    counts = {module: 1 + max(set().union(*parts.values())) for module, parts in modules.items()}
    key = next((key for key in _NUM_EXPERTS if stated.number(key)), "experts")
    count = stated.number(key) or max((count for module, count in counts.items() if _LAYER.match(module)), default=0)
    for module, parts in modules.items():
        want = count if _LAYER.match(module) else counts[module]
        for part, numbers in parts.items():
            if wrong := numbers ^ {*range(want)}:
                says = "has" if min(wrong) in numbers else "lacks"
                yield f"{key} = {want}, but the checkpoint {says} {module}{min(wrong)}{part}"
                break


def _wrong_dims(source: Source, stated: _Stated) -> Iterator[str]:
    """Sizes of tensors, each key's first."""
    told = set()
    for name, info in source.tensors.items():
        kind = _of_any_expert(re.sub(rf"^{_DECODER}(layers\.\d+\.)?", "", name))
        for keys, size in zip(_DIMS.get(kind, ()), info.shape, strict=False):
            if (want := stated.number(keys)) not in (None, size) and keys not in told:
                told.add(keys)
                yield f"{keys} = {want}, but {name} has {size}"


def _wrong_head(names: list[str], stated: _Stated) -> Iterator[str]:
    """Embedding and output layer."""
    if stated.number("vocab_size") and not any("embed" in name for name in names):
        yield f"vocab_size = {stated['vocab_size']}, but the checkpoint lacks the embedding"
    if (tied := stated.get("tie_word_embeddings")) is not None:
        stated.compared["tie_word_embeddings"] = None
        heads = [name for name in names if re.search(r"(^|\.)(lm_head|head|output|unembed)\.weight$", name)]
        if tied and (own := [name for name in heads if "lm_head" in name]):
            yield f"tie_word_embeddings = {json.dumps(tied)}, but the checkpoint has {own[0]}"
        if not tied and not heads:
            yield f"tie_word_embeddings = {json.dumps(tied)}, but the checkpoint lacks lm_head.weight"


def _wrong_settings(trained: ConfigValues, stated: _Stated) -> Iterator[str]:
    for key in (key for key in trained if key in stated):
        stated.compared[key] = None
        if stated[key] not in trained[key]:
            yield f"{key} = {json.dumps(stated[key])}, but the model was trained with {json.dumps(trained[key][0])}"
