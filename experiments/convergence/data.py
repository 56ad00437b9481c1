"""Tokens of a corpus made by tools/build_corpus.py: written once, then read by every variant from the same two files.

python -m experiments.convergence.data CORPUS    # CORPUS/train.npy, CORPUS/validation.npy
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

_DOCUMENTS_PER_BATCH = 1000


def write_tokens(corpus: Path, split: str) -> int:
    """Writes the split's documents, each between BOS and EOS, as one uint16 array; returns its length."""
    tokenizer = Tokenizer.from_file(str(corpus / "tokenizer" / "tokenizer.json"))
    bos, eos = (tokenizer.token_to_id(token) for token in ("<|begin_of_text|>", "<|end_of_text|>"))
    texts = [json.loads(line)["text"] for part in sorted((corpus / split).glob("*.jsonl")) for line in part.open()]
    pieces = []
    for start in range(0, len(texts), _DOCUMENTS_PER_BATCH):
        for encoding in tokenizer.encode_batch_fast(
            texts[start : start + _DOCUMENTS_PER_BATCH], add_special_tokens=False
        ):
            pieces.append(np.array([bos, *encoding.ids, eos], dtype=np.uint16))
    tokens = np.concatenate(pieces)
    np.save(corpus / f"{split}.npy", tokens)
    return len(tokens)


def windows(corpus: Path, split: str, seq_len: int) -> np.ndarray:
    """(N, seq_len + 1) view of the split; the last token of a window is the first of the next."""
    tokens = np.load(corpus / f"{split}.npy", mmap_mode="r")
    return np.lib.stride_tricks.sliding_window_view(tokens, seq_len + 1)[::seq_len]


def as_batch(windows_BS: np.ndarray) -> tuple[dict[str, Tensor], Tensor]:
    """torchtitan's batch: {"input": (B, S)} and labels (B, S), int64."""
    tokens = torch.from_numpy(windows_BS.astype(np.int64))
    return {"input": tokens[:, :-1].contiguous()}, tokens[:, 1:].contiguous()


class ShuffledWindows:
    """Endless batches of a split in an order that ``seed`` alone decides, a new one for each epoch."""

    def __init__(self, corpus: Path, split: str, seq_len: int, batch_size: int, seed: int):
        self.windows = windows(corpus, split, seq_len)
        self.batch_size, self.seed = batch_size, seed
        self.skip = 0  # batches that a resumed run has behind it

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        per_epoch = len(self.windows) // self.batch_size
        index, epoch, order = self.skip, -1, None
        while True:
            if index // per_epoch != epoch:
                epoch = index // per_epoch
                order = np.random.default_rng([self.seed, epoch]).permutation(len(self.windows))
            start = index % per_epoch * self.batch_size
            yield as_batch(self.windows[order[start : start + self.batch_size]])
            index += 1


if __name__ == "__main__":
    for name in ("train", "validation"):
        print(f"{name}: {write_tokens(Path(sys.argv[1]), name):,} tokens")
