"""Build a training data directory for torchtitan: from wheels that anyone can have, or from texts of one's own.

    OUT/tokenizer/    tokenizer.json, tokenizer_config.json   (model.hf_assets_path)
    OUT/train/        part-00000.jsonl                        (training.dataset_path, dataset "c4_test")
    OUT/validation/   part-00000.jsonl                        (validation.dataset_path, dataset "c4_test")
    OUT/corpus.json   what was built, and from what

The sets ``quickstart`` and ``large`` are the Python sources of the wheels in tools/corpus.txt, which pip fetches by
hash. Tokenizer and tokens must have the SHA-256 there, so every machine trains on the same bytes. ``--input`` takes
folders instead. No two documents are the same, and most long lines of one are in none before it. A package, which is a
wheel or a top-level entry of an input, is in train or in validation as a whole. The tokenizer knows train alone.
"""

import argparse
import array
import hashlib
import io
import json
import random
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter, namedtuple
from collections.abc import Iterable, Iterator
from pathlib import Path

import tokenizers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

PINS = Path(__file__).with_name("corpus.txt")
SPECIAL_TOKENS = BOS_TOKEN, EOS_TOKEN = "<|begin_of_text|>", "<|end_of_text|>"
MIN_BYTES, MAX_BYTES = 128, 2**16  # of a document: shorter ones are empty modules and the like, longer ones are split
QUICKSTART_BYTES = 2**10  # so that a batch of 1,024 tokens mixes packages, and single losses do not follow one of them
LONG_LINE = 20  # shorter lines, such as "return None", are everywhere
SUFFIXES, SPLITS = (".py", ".md", ".rst", ".txt"), ("train", "validation")
VOCAB_SIZES = {"quickstart": 2048, "large": 8192}
Document = namedtuple("Document", "package path text")


def pins_of(name: str) -> tuple[list[str], list[str], list[str]]:
    """The requirements of a set for train and for validation, and the SHA-256 of its tokenizer and its tokens."""
    lines = [line.partition("#")[::2] for line in PINS.read_text().splitlines()]
    train, validation = ([pin.strip() for pin, sets in lines if key in sets.split()] for key in (name, f"-{name}"))
    sums = next(words.split()[1:] for pin, words in lines if not pin and words.startswith(f" {name}:"))
    return train, validation, sums


def fetch(pins: list[str], folder: Path) -> None:
    (folder / "pins.txt").write_text("\n".join(["--require-hashes", "--only-binary :all:", *pins, ""]))
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    if subprocess.run([*pip, f"--dest={folder}", f"--requirement={folder}/pins.txt"]).returncode:
        sys.exit("error: pip could not fetch the wheels of tools/corpus.txt, see above; --input takes your own texts")


def files_of_wheels(folder: Path) -> Iterator[tuple[str, str, bytes]]:
    """Package, name and content of the Python sources."""
    for path in sorted(folder.glob("*.whl")):
        with zipfile.ZipFile(path) as wheel:
            for name in sorted(wheel.namelist()):
                if name.endswith(SUFFIXES):
                    yield path.name.partition("-")[0].lower(), name, wheel.read(name)


def files_of_input(root: Path) -> Iterator[tuple[str, str, bytes]]:
    for path in sorted(root.rglob("*")):
        parts = path.relative_to(root).parts
        if path.is_file() and not any(part.startswith((".", "__pycache__")) for part in parts):
            yield f"{root.name}/{parts[0]}", "/".join(parts), path.read_bytes()


def pieces(text: str, max_bytes: int) -> Iterator[str]:
    """Whole lines of at most ``max_bytes`` that join to the text; a longer line is a piece of its own."""
    lines, size = [], 0
    for line in io.StringIO(text):  # not splitlines(), which also breaks at separators inside of Python's lines
        if lines and size + len(line.encode()) > max_bytes:
            yield "".join(lines)
            lines, size = [], 0
        lines.append(line)
        size += len(line.encode())
    yield "".join(lines)


def digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=10).digest()


def read_documents(files: Iterable[tuple[str, str, bytes]], max_bytes: int) -> Iterator[Document]:
    """Distinct documents, without files that are no text."""
    seen: set[bytes] = set()
    for package, name, content in files:
        try:
            text = content.decode("utf-8-sig")
        except UnicodeDecodeError:
            continue
        for piece in pieces(text, max_bytes) if "\0" not in text else ():
            lines = {digest(line) for line in map(str.strip, piece.split("\n")) if len(line) >= LONG_LINE}
            whole = digest(piece)
            if len(piece.encode()) < MIN_BYTES or whole in seen or len(lines & seen) > len(lines) / 2:
                continue
            seen |= lines | {whole}
            yield Document(package, name, piece)


def hold_out(documents: list[Document]) -> set[str]:
    """Packages of a twentieth of the text or more, in an order that no name suggests."""
    sizes: Counter[str] = Counter()
    for document in documents:
        sizes[document.package] += len(document.text)
    if len(sizes) < 2:
        sys.exit(f"error: the text has the packages {[*sizes]}, but one is held out; add an --input or a folder to it")
    held: set[str] = set()
    for package in sorted(sizes, key=digest)[1:]:
        held |= {package} if sum(sizes[name] for name in held) < sizes.total() / 20 else set()
    return held


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE, which encodes any text without loss; small texts give fewer tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    options = dict(special_tokens=[*SPECIAL_TOKENS], initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=vocab_size, show_progress=False, **options))
    return tokenizer


def write(out: Path, splits: dict[str, list[Document]], vocab_size: int) -> dict:
    """Writes all but the manifest, which it returns."""
    tokenizer = train_tokenizer((document.text for document in splits["train"]), vocab_size)
    (out / "tokenizer").mkdir(parents=True)
    tokenizer.save(str(out / "tokenizer/tokenizer.json"))
    # torchtitan reads the special tokens from here; its data loader asks for both around every record.
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS_TOKEN, "eos_token": EOS_TOKEN}
    (out / "tokenizer/tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    tokens, counts = hashlib.sha256(), {}
    for split, documents in splits.items():
        (out / split).mkdir()
        counts[split] = 0
        # "c4_test" loads the split "train", which datasets infers from file names: the name has none.
        with (out / split / "part-00000.jsonl").open("w") as file:
            for batch in (documents[start : start + 1000] for start in range(0, len(documents), 1000)):
                file.writelines(json.dumps(document._asdict()) + "\n" for document in batch)
                for encoding in tokenizer.encode_batch_fast([document.text for document in batch]):
                    tokens.update(array.array("H", encoding.ids).tobytes())
                    counts[split] += len(encoding.ids) + len(SPECIAL_TOKENS)
    sha256 = [hashlib.sha256((out / "tokenizer/tokenizer.json").read_bytes()).hexdigest(), tokens.hexdigest()]
    return {"tokens": counts, "vocab_size": tokenizer.get_vocab_size(), "sha256": sha256}


def build(args: argparse.Namespace, out: Path) -> dict:
    """Builds the corpus in ``out`` and returns what its manifest says."""
    sums = None
    if args.input:
        documents = list(read_documents((file for root in args.input for file in files_of_input(root)), MAX_BYTES))
        held = hold_out(documents)
    else:
        train, validation, sums = pins_of(args.set)
        held = {pin.partition("==")[0] for pin in validation}
        with tempfile.TemporaryDirectory() as wheels:
            fetch(train + validation, Path(wheels))
            max_bytes = QUICKSTART_BYTES if args.set == "quickstart" else MAX_BYTES
            documents = list(read_documents(files_of_wheels(Path(wheels)), max_bytes))
    random.Random(0).shuffle(documents)
    splits = {split: [d for d in documents if (d.package in held) == (split == "validation")] for split in SPLITS}
    found = write(out, splits, args.vocab_size or VOCAB_SIZES[args.set])
    if sums and not args.vocab_size and found["sha256"] != sums:
        what = f"{' '.join(found['sha256'])}, not {' '.join(sums)}; tokenizers is {tokenizers.__version__}"
        sys.exit(f"error: tokenizer and tokens have the SHA-256 {what}, and theirs 0.23.3")
    return found | {"packages": {split: sorted({d.package for d in of}) for split, of in splits.items()}}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="build_corpus.py", description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="DIR", help="where to build the corpus")
    add("--set", choices=VOCAB_SIZES, default="quickstart", help="wheels of tools/corpus.txt (default: %(default)s)")
    add("--input", type=Path, action="append", default=[], metavar="DIR", help="a tree of texts instead (repeatable)")
    add("--vocab-size", type=int, metavar="N", help=f"of another tokenizer (default: {VOCAB_SIZES})")
    args = parser.parse_args(argv)
    arguments = {"set": args.set, "input": [*map(str, args.input)], "vocab_size": args.vocab_size}
    out, staging, manifest = args.out, args.out.with_name(f"{args.out.name}.partial"), args.out / "corpus.json"
    if missing := [root for root in arguments["input"] if not Path(root).is_dir()]:
        sys.exit(f"error: --input {', '.join(missing)} is no folder")
    if out.exists():
        if manifest.is_file() and json.loads(manifest.read_text())["arguments"] == arguments:
            return print(f"{out} is there already; remove it to build it anew")
        sys.exit(f"error: {out} is there already, but not of these arguments; remove it, or choose another --out")
    shutil.rmtree(staging, ignore_errors=True)
    found = build(args, staging)
    (staging / "corpus.json").write_text(json.dumps(found | {"arguments": arguments}, indent=2) + "\n")
    staging.rename(out)
    print(f"{out}: {found['tokens']} tokens, vocabulary of {found['vocab_size']}. torchtitan options:")
    print(f"  --model.hf_assets_path {out}/tokenizer")
    for section, split in zip(("training", "validation"), SPLITS, strict=True):
        print(f"  --{section}.dataset c4_test --{section}.dataset_path {out}/{split}")


if __name__ == "__main__":
    main()
