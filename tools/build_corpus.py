"""Build a training data directory for torchtitan from text that is already on this machine.

The result needs no network, neither to build nor to train on::

    OUT/tokenizer/    tokenizer.json, tokenizer_config.json   (model.hf_assets_path)
    OUT/train/        part-00000.jsonl                        (training.dataset_path, dataset "c4_test")
    OUT/validation/   part-00000.jsonl                        (validation.dataset_path, dataset "c4_test")
    OUT/corpus.json   what was built, and from what

The text is the standard library of the running interpreter (sources and text documents), optionally the Python
sources of installed distributions and any other text tree. Every record has a "text", and the "package" and "path"
it came from. What the corpus guarantees:

* No two records have the same text, and most long lines of a record are in none before it: an edited copy, such as a
  vendored library of another version, is left out.
* A distribution that several environments have is read from the first of them.
* A package (a top-level module or package of the standard library, a distribution, or a top-level entry of an
  ``--input`` tree) is in train or in validation as a whole, so the validation loss never measures code whose other
  half was trained on. The tokenizer is trained on the train split alone.
* The same arguments and the same versions of interpreter, tokenizers and packages give the same files.

Example::

    python tools/build_corpus.py --out data/corpus --packages numpy torch
"""

import argparse
import hashlib
import io
import json
import os
import platform
import random
import re
import shutil
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import tokenizers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

BOS_TOKEN = "<|begin_of_text|>"
EOS_TOKEN = "<|end_of_text|>"

# One token per byte value and the two special tokens: below this, some text could not be encoded.
MIN_VOCAB_SIZE = 256 + 2

# Shorter documents are empty __init__.py files and the like.
MIN_DOCUMENT_BYTES = 128

# Longer documents are split. torchtitan tokenizes a record at once and holds its tokens until they are consumed.
MAX_DOCUMENT_BYTES = 64 * 1024

# A document is a near-duplicate when more than half of its distinct lines of this length occurred before. Shorter ones,
# such as "return None", are everywhere.
LONG_LINE = 20

STDLIB_SUFFIXES = {".py", ".md", ".rst", ".txt"}
SEED = 0  # of the order and the split


class UsageError(Exception):
    """The arguments cannot be satisfied; the message tells the user what to change."""


class SourceFile(NamedTuple):
    """A file to read. The order is by package and name, never by location, so that it is the same on every machine."""

    package: str
    name: str
    location: Path


class Document(NamedTuple):
    package: str
    path: str
    text: str
    num_bytes: int


def _log(message: str) -> None:
    print(f"[build_corpus] {message}", file=sys.stderr, flush=True)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"


def walk_files(root: Path) -> Iterator[Path]:
    """Yield the files below ``root`` in sorted order, without hidden entries, caches and installed packages."""
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(
            name for name in subfolders if not name.startswith(".") and name not in ("__pycache__", "site-packages")
        )
        for name in sorted(names):
            if not name.startswith("."):
                yield Path(folder, name)


def below(root: Path, package: str, suffixes: set[str] | None = None) -> list[SourceFile]:
    """The files below ``root``, of these suffixes; each top-level entry is a package."""
    found = []
    for location in walk_files(root):
        if suffixes is None or location.suffix in suffixes:
            relative = location.relative_to(root)
            top = relative.parts[0].removesuffix(".py") if suffixes else relative.parts[0]
            found.append(SourceFile(f"{package}/{top}", relative.as_posix(), location))
    return found


def _normalized(distribution_name: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution_name).lower()


def find_distributions(names: list[str], environments: list[Path]) -> dict[str, metadata.Distribution]:
    """The distributions called ``names``, or all of them for ``["all"]``, by normalized name.

    Looks in ``sys.path``, then in ``environments``. The first distribution of a name is taken.
    """
    path = [*sys.path, *map(str, environments)]
    # Leftovers of interrupted installs have no name.
    found = [(d.metadata["Name"], d) for d in metadata.distributions(path=path) if d.metadata["Name"]]
    by_name = {_normalized(name): distribution for name, distribution in reversed(found)}
    if "all" in names:
        return by_name
    for name in names:
        if _normalized(name) not in by_name:
            raise UsageError(
                f"--packages: no distribution {name!r} is installed for {sys.executable}; "
                "names are those that `pip list` shows, not import names"
            )
    return {_normalized(name): by_name[_normalized(name)] for name in names}


def distribution_files(name: str, distribution: metadata.Distribution) -> list[SourceFile]:
    # Entries that start with ".." are scripts outside site-packages.
    entries = [e for e in distribution.files or [] if e.suffix == ".py" and e.parts[0] != ".."]
    files = [SourceFile(f"distribution/{name}", entry.as_posix(), Path(entry.locate())) for entry in entries]
    return [file for file in files if file.location.is_file()]


def find_sources(args: argparse.Namespace, distributions: dict[str, metadata.Distribution]) -> list[SourceFile]:
    """Every file the arguments select, sorted. A source that was asked for by name and is empty is an error."""
    files = below(Path(sysconfig.get_paths()["stdlib"]), "stdlib", STDLIB_SUFFIXES) if args.stdlib else []
    for name, distribution in distributions.items():
        found = distribution_files(name, distribution)
        if not found and "all" not in args.packages:
            raise UsageError(
                f"--packages: {name} has no installed .py files; if it is an editable install or built from a source "
                "tree, pass that folder with --input"
            )
        files += found
    for root in args.input:
        found = below(root, f"input/{root.name}", args.suffixes and {*args.suffixes})
        if not found:
            of_suffixes = f" with suffixes {', '.join(args.suffixes)}" if args.suffixes else ""
            raise UsageError(f"--input: no files{of_suffixes} below {root}")
        files += found
    if not files:
        raise UsageError("--no-stdlib leaves no text; add --packages or --input")
    return sorted(files)


def split_at_lines(text: str, max_bytes: int) -> Iterator[tuple[str, int]]:
    """Split ``text`` into (piece, bytes) of whole lines that join to ``text`` again.

    Pieces have at most ``max_bytes`` bytes each, except that a single longer line is a piece of its own.
    """
    lines: list[str] = []
    num_bytes = 0
    # Not splitlines(): it also breaks at separators such as U+2028 that occur inside Python lines.
    for line in io.StringIO(text):
        line_bytes = len(line.encode())
        if lines and num_bytes + line_bytes > max_bytes:
            yield "".join(lines), num_bytes
            lines, num_bytes = [], 0
        lines.append(line)
        num_bytes += line_bytes
    if lines:
        yield "".join(lines), num_bytes


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=10).digest()


def read_documents(files: list[SourceFile], max_bytes: int | None) -> tuple[list[Document], Counter[str]]:
    """Read ``files`` in their order and split them into distinct documents, of at most ``max_bytes`` in total.

    Also counts what is left out: files that are not UTF-8 or contain NUL bytes (binary data), documents that are too
    short, documents whose text occurred before, and those of which most did.
    """
    documents: list[Document] = []
    left_out: Counter[str] = Counter()
    seen: set[bytes] = set()
    seen_lines: set[bytes] = set()
    total_bytes = 0
    for file in files:
        try:
            text = file.location.read_bytes().decode("utf-8-sig")
        except UnicodeDecodeError:
            text = "\0"
        if "\0" in text:
            left_out["not text"] += 1
            continue
        for piece, num_bytes in split_at_lines(text, MAX_DOCUMENT_BYTES):
            if num_bytes < MIN_DOCUMENT_BYTES:
                left_out["too short"] += 1
                continue
            digest = _digest(piece)
            if digest in seen:
                left_out["duplicates"] += 1
                continue
            lines = {_digest(line) for line in map(str.strip, piece.split("\n")) if len(line) >= LONG_LINE}
            if len(lines & seen_lines) > len(lines) / 2:
                left_out["near-duplicates"] += 1
                continue
            if max_bytes is not None and total_bytes + num_bytes > max_bytes:
                return documents, left_out
            seen.add(digest)
            seen_lines |= lines
            total_bytes += num_bytes
            documents.append(Document(file.package, file.name, piece, num_bytes))
    return documents, left_out


def choose_held_out(bytes_by_package: dict[str, int], fraction: float, rng: random.Random) -> set[str]:
    """Draw whole packages whose bytes add up to at most ``fraction`` of the total, and as near to it as they fit.

    When every package is larger than that, the smallest one is held out. ``fraction`` 0 holds out nothing.
    """
    if fraction == 0:
        return set()
    if len(bytes_by_package) < 2:
        raise UsageError(
            f"a held-out split by package needs at least two packages and the text has only {list(bytes_by_package)}; "
            "add --packages or --input, raise --max-bytes, or set --held-out-fraction 0"
        )
    budget = fraction * sum(bytes_by_package.values())
    candidates = sorted(bytes_by_package)
    rng.shuffle(candidates)
    held_out = set()
    for package in candidates:
        if bytes_by_package[package] <= budget:
            held_out.add(package)
            budget -= bytes_by_package[package]
    return held_out or {min(candidates, key=lambda package: (bytes_by_package[package], package))}


def train_tokenizer(documents: list[Document], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE, which encodes any text without loss.

    It has ``vocab_size`` tokens, or fewer if the documents are too small a text for that many merges.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS_TOKEN, EOS_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((document.text for document in documents), trainer)
    return tokenizer


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    # torchtitan reads the special tokens from here; its data loader asks for both around every record.
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS_TOKEN, "eos_token": EOS_TOKEN}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def write_jsonl(documents: list[Document], folder: Path) -> None:
    """Writes ``documents`` to one file.

    Its name carries no split on purpose: ``datasets`` infers splits from words such as "validation" in file names, and
    torchtitan's "c4_test" always loads the split "train", which has to be every file of the folder.
    """
    folder.mkdir()
    with (folder / "part-00000.jsonl").open("w", encoding="utf-8") as out:
        for document in documents:
            # Escaped to ASCII, so that no reader takes a separator such as U+2028 for the end of the line.
            record = {"text": document.text, "package": document.package, "path": document.path}
            out.write(json.dumps(record) + "\n")


def read_manifest(out: Path) -> dict | None:
    """Return the manifest of the corpus in ``out``, None if ``out`` is free; anything else there is an error."""
    path = out / "corpus.json"
    if path.is_file():
        return json.loads(path.read_text(encoding="utf-8"))
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return None
    raise UsageError(f"{out} exists and has no corpus.json, so it was not built by this tool; choose another --out")


def check_unchanged(out: Path, manifest: dict, arguments: dict, versions: dict) -> None:
    """Raise if the corpus in ``out`` was built from other arguments or versions.

    Runs and checkpoints may depend on a corpus and its tokenizer, so it is not replaced unasked.
    """
    changes = [
        f"{key} ({old.get(key)} -> {new.get(key)})"
        for old, new in ((manifest["arguments"], arguments), (manifest["versions"], versions))
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
    ]
    if changes:
        raise UsageError(
            f"{out} has a corpus that differs in {', '.join(changes)}; choose another --out, or replace it with --force"
        )


def build(args: argparse.Namespace, distributions: dict, arguments: dict, versions: dict) -> dict:
    """Build the corpus in ``args.out``, replacing what is there, and return its manifest."""
    start = time.monotonic()
    files = find_sources(args, distributions)
    _log(f"found {len(files)} files")
    # Shuffled before reading, so that --max-bytes keeps a sample of all sources and not the alphabetically first.
    random.Random(SEED).shuffle(files)
    documents, left_out = read_documents(files, args.max_bytes)
    _log(
        f"read {len(documents)} documents, {_mib(sum(d.num_bytes for d in documents))}; left out "
        f"{left_out['duplicates']} duplicates, {left_out['near-duplicates']} near-duplicates, "
        f"{left_out['too short']} too short, {left_out['not text']} not UTF-8 text"
    )
    if not documents:
        raise UsageError("no document is left; raise --max-bytes or add text")

    bytes_by_package: Counter[str] = Counter()
    for document in documents:
        bytes_by_package[document.package] += document.num_bytes
    held_out = choose_held_out(bytes_by_package, args.held_out_fraction, random.Random(SEED))
    splits = {"train": [document for document in documents if document.package not in held_out]}
    if held_out:
        splits["validation"] = [document for document in documents if document.package in held_out]

    _log(f"training a tokenizer of {args.vocab_size} tokens on {_mib(sum(d.num_bytes for d in splits['train']))}")
    tokenizer = train_tokenizer(splits["train"], args.vocab_size)
    vocab_size = tokenizer.get_vocab_size()
    if vocab_size < args.vocab_size:
        _log(f"the text yields only {vocab_size} tokens; add text to reach --vocab-size {args.vocab_size}")

    manifest = {
        "arguments": arguments,
        "versions": versions,
        "vocab_size": vocab_size,
        "documents": {split: len(members) for split, members in splits.items()},
        "bytes": {split: sum(d.num_bytes for d in members) for split, members in splits.items()},
        "duplicates_removed": left_out["duplicates"],
        "near_duplicates_removed": left_out["near-duplicates"],
        "too_short_removed": left_out["too short"],
        "files_not_text": left_out["not text"],
        "held_out_packages": sorted(held_out),
        "train_packages": sorted(bytes_by_package.keys() - held_out),
    }

    # Written next to the target and moved there at the end: an interrupted build never looks like a corpus.
    staging = args.out.with_name(args.out.name + ".partial")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    write_tokenizer(tokenizer, staging / "tokenizer")
    for split, members in splits.items():
        write_jsonl(members, staging / split)
    (staging / "corpus.json").write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    if args.out.exists():
        shutil.rmtree(args.out)
    staging.rename(args.out)
    _log(f"built in {time.monotonic() - start:.1f} s")
    return manifest


def _print_summary(out: Path, manifest: dict) -> None:
    for split, count in manifest["documents"].items():
        print(f"{split}: {count} documents, {_mib(manifest['bytes'][split])}")
    print(f"tokenizer: {manifest['vocab_size']} tokens")
    print("torchtitan options:")
    print(f"  --model.hf_assets_path {out / 'tokenizer'}")
    for section, split in (("training", "train"), ("validation", "validation")):
        if split in manifest["documents"]:
            print(f"  --{section}.dataset c4_test --{section}.dataset_path {out / split}")


def _parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="build_corpus.py",
        description="Build an offline torchtitan data directory: a BPE tokenizer and JSONL splits held out by package.",
    )
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="DIR", help="where to build the corpus")
    what = "also take the Python sources of these installed distributions; 'all' takes every one"
    add("--packages", nargs="+", default=[], metavar="NAME", help=what)
    what = "also look for --packages in this site-packages folder of another environment (repeatable)"
    add("--environment", type=Path, action="append", default=[], metavar="DIR", help=what)
    what = "also take every UTF-8 file of this tree (repeatable); each top-level entry counts as a package"
    add("--input", type=Path, action="append", default=[], metavar="DIR", help=what)
    add("--suffixes", nargs="+", metavar=".EXT", help="of the files of --input trees (default: all)")
    add("--no-stdlib", dest="stdlib", action="store_false", help="leave the Python standard library out")
    add("--vocab-size", type=int, default=2048, metavar="N", help="tokens (default: %(default)s)")
    what = "part of the bytes that whole packages hold out for validation; 0 builds none (default: %(default)s)"
    add("--held-out-fraction", type=float, default=0.05, metavar="F", help=what)
    add("--max-bytes", type=int, metavar="N", help="limit the text to N bytes, sampled from all files")
    add("--force", action="store_true", help="rebuild; needed to see changed files of an --input tree, too")
    return parser.parse_args(argv)


def _check_args(args: argparse.Namespace) -> None:
    if args.vocab_size < MIN_VOCAB_SIZE:
        raise UsageError(f"--vocab-size must be at least {MIN_VOCAB_SIZE} (bytes, BOS and EOS), not {args.vocab_size}")
    if not 0 <= args.held_out_fraction < 1:
        raise UsageError(f"--held-out-fraction must be at least 0 and below 1, not {args.held_out_fraction}")
    if args.max_bytes is not None and args.max_bytes < MIN_DOCUMENT_BYTES:
        raise UsageError(f"--max-bytes must be at least {MIN_DOCUMENT_BYTES}, not {args.max_bytes}")
    for option, folders in (("--input", args.input), ("--environment", args.environment)):
        for folder in folders:
            if not folder.is_dir():
                raise UsageError(f"{option}: {folder} is not a directory")
    for root in args.input:
        if args.out.is_relative_to(root):
            raise UsageError(f"--out {args.out} is inside --input {root}: a rebuild would read its own output")


def main(argv: list[str] | None = None) -> int:
    """Run the tool; returns 0, or 2 if the arguments cannot be satisfied."""
    args = _parse_args(argv)
    # Resolved once: the checks compare paths and a trailing "." or ".." has no name to derive others from.
    args.out = args.out.resolve()
    args.input = [root.resolve() for root in args.input]
    args.environment = [folder.resolve() for folder in args.environment]
    try:
        _check_args(args)
        distributions = find_distributions(args.packages, args.environment)
        arguments = {key: value for key, value in vars(args).items() if key not in ("out", "force")}
        arguments |= {key: [*map(str, arguments[key])] for key in ("input", "environment")}
        arguments |= {"packages": sorted(args.packages), "seed": SEED}
        versions = {
            "python": platform.python_version(),
            "tokenizers": tokenizers.__version__,
            "packages": {name: distribution.version for name, distribution in sorted(distributions.items())},
        }
        manifest = read_manifest(args.out)
        if manifest is None or args.force:
            manifest = build(args, distributions, arguments, versions)
        else:
            check_unchanged(args.out, manifest, arguments, versions)
            print(f"{args.out} is up to date; --force rebuilds it")
    except UsageError as error:
        print(f"build_corpus.py: error: {error}", file=sys.stderr)
        return 2
    _print_summary(args.out, manifest)
    return 0


if __name__ == "__main__":
    sys.exit(main())
