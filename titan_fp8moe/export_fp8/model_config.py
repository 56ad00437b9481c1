"""Compares a checkpoint with its model's config.json: the decoder's layers and experts, and the sizes that it states.

Nothing is derived from shapes: what the file does not state is not compared, and ``--verify`` lists the keys that were.
"""

import json
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from titan_fp8moe.export_fp8.files import Source

# By key of config.json, the values that fit a checkpoint. Errors name the first.
ConfigValues = dict[str, list[object]]
# The decoder in Transformers' names. Other stacks of layers are vision towers and multi-token prediction.
_DECODER = r"(?:model\.language_model\.|language_model\.model\.|thinker\.model\.|model\.llm\.|model\.|backbone\.)?"
_LAYER = re.compile(rf"{_DECODER}layers\.(\d+)\.")
_NESTED = "thinker_config", "text_config", "language_config", "llm_config", "rope_parameters"
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


Fact = tuple[str, Sequence[object], str]  # keys of config.json, the values that fit, and why others do not


def check_config(source: Source, trained: ConfigValues, assets: Path) -> list[str]:
    """Compares the checkpoint and the run with config.json; returns the keys that were compared.

    Args:
        trained: the values that fit settings of the run.

    Raises:
        ValueError: with the differences, for a checkpoint that is incomplete or another model's.
    """
    stated, compared, names = _stated(assets), dict[str, None](), [*source.tensors]
    differences = {difference: difference for difference in (*_wrong_layers(names, stated), *_wrong_experts(names))}
    settings = ((key, fits, f"the model was trained with {json.dumps(fits[0])}") for key, fits in trained.items())
    for keys, fits, why in (*_counts(names, stated), *settings, *_head(names), *_dims(source)):
        parts = keys.split("*")
        if not all(isinstance(stated.get(key), int) or (key in stated and key in trained) for key in parts):
            continue  # not stated, or for each layer
        compared |= dict.fromkeys(parts)
        value = stated[keys] if keys in stated else math.prod(stated[key] or 0 for key in parts)
        if value not in fits:
            differences.setdefault(keys, f"{keys} = {json.dumps(value)}, but {why}")
    if differences:
        raise ValueError(
            f"{assets}/config.json: {'; '.join([*differences.values()][:30])}. Complete the checkpoint, or pass the "
            "model's own config with --assets"
        )
    return [*compared]


def _stated(assets: Path) -> dict[str, Any]:
    """The decoder's values in config.json."""
    config = json.loads((assets / "config.json").read_bytes())
    stated = dict(config)
    for key in _NESTED:
        stated |= stated.get(key) or {}
    stated |= {key: config[key] for key in ("tie_word_embeddings",) if key in config}  # the whole model's
    if not stated.get("num_hidden_layers"):
        stated["num_hidden_layers"] = len(stated.get("layers_block_type", ()))  # Nemotron's
    return stated


def _wrong_layers(names: list[str], stated: dict[str, Any]) -> Iterator[str]:
    """Layers of the decoder that lack a matrix which another one of their kind has."""
    layers: dict[int, set[str]] = {layer: set() for layer in range(stated["num_hidden_layers"])}
    for name in names:
        if (match := _LAYER.match(name)) and name.endswith(".weight") and int(match[1]) in layers:
            layers[int(match[1])].add(_of_any_expert(name[match.end() :]))
    # A layer's entries in lists that have one per layer, such as layer_types.
    kinds = [value for value in stated.values() if isinstance(value, list | str) and len(value) == len(layers)]
    for layer, found in layers.items():
        for other, fuller in layers.items():
            if found < fuller and (not found or all(kind[layer] == kind[other] for kind in kinds)):
                yield f"the checkpoint lacks layers.{layer}.{min(fuller - found)}, which layer {other} has"
                break


def _of_any_expert(name: str) -> str:
    return re.sub(r"\bexperts\.\d+\.", "experts.*.", name)


def _experts(names: list[str]) -> tuple[dict[tuple[str, str], set[int]], dict[str, int]]:
    """The numbers of each matrix of experts, by module and name in it, and how many experts each module should have.

    Those of the decoder should have as many as the largest.
    """
    numbers: dict[tuple[str, str], set[int]] = {}
    counts: dict[str, int] = {}
    for name in names:
        if match := re.match(r"(.*\bexperts\.)(\d+)(\..+)", name):
            numbers.setdefault((match[1], match[3]), set()).add(int(match[2]))
            counts[match[1]] = max(counts.get(match[1], 0), int(match[2]) + 1)
    most = max((count for module, count in counts.items() if _LAYER.match(module)), default=0)
    return numbers, {module: most if _LAYER.match(module) else count for module, count in counts.items()}


def _wrong_experts(names: list[str]) -> Iterator[str]:
    numbers, counts = _experts(names)
    for (module, part), found in numbers.items():
        if missing := {*range(counts[module])} - found:
            yield f"the checkpoint lacks {module}{min(missing)}{part}"


def _counts(names: list[str], stated: dict[str, Any]) -> Iterator[Fact]:
    """Layers, with those for multi-token prediction that DeepSeek stores behind the decoder's, and experts."""
    layers = [int(match[1]) + 1 for name in names if (match := _LAYER.match(name))]
    further = stated.get("num_nextn_predict_layers") or 0
    why = f"the checkpoint has layers.{max(layers) - 1}" if layers else f"{names[0]} and the others are of no decoder"
    yield "num_hidden_layers", [max(layers, default=0) - n for n in range(further + 1)], why
    counts = [count for module, count in _experts(names)[1].items() if _LAYER.match(module)]
    if counts and (key := next((key for key in _NUM_EXPERTS if stated.get(key)), None)):
        yield key, counts[:1], f"the checkpoint has {counts[0]}"


def _head(names: list[str]) -> Iterator[Fact]:
    """Embedding and output layer."""
    if not any("embed" in name for name in names):
        yield "vocab_size", [], "the checkpoint lacks the embedding"
    heads = [name for name in names if re.search(r"(^|\.)(lm_head|head|output|unembed)\.weight$", name)]
    fits = [False] if heads else [True]
    if heads and not any("lm_head" in name for name in heads):  # an output layer of another name may be another's
        fits.append(True)
    yield "tie_word_embeddings", fits, f"the checkpoint {'has ' + heads[0] if heads else 'lacks lm_head.weight'}"


def _dims(source: Source) -> Iterator[Fact]:
    for name, info in source.tensors.items():
        kind = _of_any_expert(re.sub(rf"^{_DECODER}(layers\.\d+\.)?", "", name))
        for keys, size in zip(_DIMS.get(kind, ()), info.shape, strict=False):
            yield keys, [size], f"{name} has {size}"
