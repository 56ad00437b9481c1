"""Tokens of a corpus made by tools/build_corpus.py: written once, then read by every variant from the same two files.

python -m experiments.convergence.data CORPUS    # CORPUS/train.npy, CORPUS/validation.npy, CORPUS/tokens.json
"""

import json
import sys
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

_DOCUMENTS_PER_BATCH = 1000
_KINDS = {
    "Python": "py pyi",
    "C, C++ and CUDA": "h hpp hh c cc cpp cu cuh inl tcc inc def td",
    "Perl, Vim, JavaScript, CMake and shell": "pm pl pod vim js cmake sh",
}
_KIND_OF = {f".{suffix}": kind for kind, suffixes in _KINDS.items() for suffix in suffixes.split()}


def write_tokens(corpus: Path, split: str) -> dict[str, dict[str, int]]:
    """Writes the split's documents, each between BOS and EOS, as one uint16 array; returns numbers of tokens in all,
    by kind of text and by source."""
    tokenizer = Tokenizer.from_file(str(corpus / "tokenizer" / "tokenizer.json"))
    bos, eos = (tokenizer.token_to_id(token) for token in ("<|begin_of_text|>", "<|end_of_text|>"))
    documents = [json.loads(line) for part in sorted((corpus / split).glob("*.jsonl")) for line in part.open()]
    pieces, kinds, sources = [], Counter(), Counter()
    for start in range(0, len(documents), _DOCUMENTS_PER_BATCH):
        batch = documents[start : start + _DOCUMENTS_PER_BATCH]
        encodings = tokenizer.encode_batch_fast([document["text"] for document in batch], add_special_tokens=False)
        for document, encoding in zip(batch, encodings, strict=True):
            pieces.append(np.array([bos, *encoding.ids, eos], dtype=np.uint16))
            kinds[_KIND_OF.get(Path(document["path"]).suffix, "documents")] += len(pieces[-1])
            source, name, *_ = document["package"].split("/")
            sources[name if source == "input" else source] += len(pieces[-1])
    tokens = np.concatenate(pieces)
    np.save(corpus / f"{split}.npy", tokens)
    return {"tokens": {"all": len(tokens)}, "kinds": dict(kinds.most_common()), "sources": dict(sources.most_common())}


def windows(corpus: Path, split: str, seq_len: int) -> np.ndarray:
    """(N, seq_len + 1) view of the split; the last token of a window is the first of the next."""
    tokens = np.load(corpus / f"{split}.npy", mmap_mode="r")
    return np.lib.stride_tricks.sliding_window_view(tokens, seq_len + 1)[::seq_len]


def as_batch(windows_BS: np.ndarray) -> tuple[dict[str, Tensor], Tensor]:
    """torchtitan's batch: {"input": (B, S)} and labels (B, S), int64."""
    tokens = torch.from_numpy(windows_BS.astype(np.int64))
    return {"input": tokens[:, :-1].contiguous()}, tokens[:, 1:].contiguous()


class OnePass:
    """Batches of the text for training in an order that ``seed`` alone decides, each window once. A rank has every
    ``ranks``-th."""

    def __init__(self, corpus: Path, seq_len: int, batch_size: int, seed: int, rank: int = 0, ranks: int = 1):
        self.windows = windows(corpus, "train", seq_len)
        count = len(self.windows) // (batch_size * ranks)
        self.order = np.random.default_rng(seed).permutation(len(self.windows))[: count * ranks * batch_size]
        self.order = self.order.reshape(count, ranks, batch_size)[:, rank]
        self.crc = 0  # checksum of the batches that were read

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        for inputs, labels in map(as_batch, map(self.windows.__getitem__, self.order)):
            self.crc = zlib.crc32(labels.numpy(), self.crc)
            yield inputs, labels

    def last(self, count: int) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        """The last batches, for what must not be trained on."""
        return map(as_batch, map(self.windows.__getitem__, self.order[-count:]))


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    held = {name: write_tokens(folder, name) for name in ("train", "validation")}
    (folder / "tokens.json").write_text(json.dumps(held, indent=1) + "\n")
    for name, groups in held.items():
        for group, numbers in groups.items():
            shares = (f"{key} {count:,} ({count / held[name]['tokens']['all']:.1%})" for key, count in numbers.items())
            print(f"{name}, {group}: {', '.join(shares)}")
