"""Compares a checkpoint with its model's config.json: the decoder's layers and experts, and the sizes that it states.

Nothing is derived from shapes: what the file does not state is not compared, and ``--verify`` lists the keys that were.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

# The decoder in Transformers' names. Other stacks of layers are vision towers and multi-token prediction.
_DECODER = r"(?:model\.language_model\.|language_model\.model\.|thinker\.model\.|model\.llm\.|model\.|backbone\.)?"
_LAYER = re.compile(rf"{_DECODER}layers\.(\d+)\.")
_EXPERT = re.compile(r"\bexperts\.\d+\.")
_NUM_EXPERTS = "n_routed_experts", "num_experts", "num_local_experts"
# The dims of a decoder's tensors as keys of config.json. Those of attention differ between models.
_DIMS = {
    "embed_tokens.weight": ("vocab_size", "hidden_size"),
    "lm_head.weight": ("vocab_size", "hidden_size"),
    "mlp.gate_proj.weight": ("intermediate_size", "hidden_size"),
    "mlp.experts.*.gate_proj.weight": ("moe_intermediate_size", "hidden_size"),
}


Fact = tuple[str, object, str]  # a key of config.json, the value that fits, and why


def check_config(tensors: Mapping[str, Tensor], trained: Iterable[Fact], assets: Path) -> list[str]:
    """Compares the checkpoint and the run with config.json; returns the keys that were compared.

    Args:
        trained: facts of the run.

    Raises:
        ValueError: with the differences, for a checkpoint that is incomplete or another model's.
    """
    config = json.loads((assets / "config.json").read_bytes())
    stated = config | (config.get("text_config") or {})
    stated |= stated.get("rope_parameters") or {}
    facts = [*_counts(tensors, stated), *trained, *_sizes(tensors)]
    facts = [fact for fact in facts if isinstance(stated.get(fact[0]), int | float | str)]  # not null, not per layer
    wrong = {key: f"{key} = {json.dumps(stated[key])}, but {why}" for key, value, why in facts if stated[key] != value}
    if wrong:
        raise ValueError(
            f"{assets}/config.json: {'; '.join(wrong.values())}. Complete the checkpoint, or pass the model's own "
            "config with --assets"
        )
    return [*dict.fromkeys(fact[0] for fact in facts)]


def _counts(tensors: Mapping[str, Tensor], stated: dict[str, Any]) -> Iterator[Fact]:
    """Layers, without those for multi-token prediction that DeepSeek stores behind the decoder's; and experts."""
    count = stated.get("num_hidden_layers") or 0
    further = range(count, count + (stated.get("num_nextn_predict_layers") or 0))
    layers = {int(match[1]) for name in tensors if (match := _LAYER.match(name))} - {*further}
    yield "num_hidden_layers", len(layers), f"the checkpoint has {len(layers)}"
    num_experts = next((key for key in _NUM_EXPERTS if stated.get(key)), "")
    kinds = Counter(_EXPERT.sub("experts.*.", name) for name in tensors if _LAYER.match(name) and _EXPERT.search(name))
    for name, count in kinds.items():
        yield num_experts, count, f"the checkpoint has {count} of {name}"


def _sizes(tensors: Mapping[str, Tensor]) -> Iterator[Fact]:
    """Dims, and whether there is an output layer beside the embedding."""
    head = next((name for name in tensors if name.endswith("head.weight")), None)
    yield "tie_word_embeddings", head is None, f"the checkpoint {f'has {head}' if head else 'lacks lm_head.weight'}"
    for name, value in tensors.items():
        kind = _EXPERT.sub("experts.*.", re.sub(rf"^{_DECODER}(layers\.\d+\.)?", "", name))
        for key, size in zip(_DIMS.get(kind, ()), value.shape, strict=False):
            yield key, size, f"{name} has {size}"
