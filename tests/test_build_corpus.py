"""tools/build_corpus.py: the split, the deduplication and what torchtitan reads of the result."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

import build_corpus
import numpy as np
from torchtitan.components.tokenizer import build_hf_tokenizer
from torchtitan.config import JobConfig
from torchtitan.hf_datasets.text_datasets import build_text_dataloader, build_text_validation_dataloader

from experiments.convergence.data import write_tokens

VOCAB_SIZE = 300


@pytest.fixture(autouse=True)
def quiet_libraries(monkeypatch, tmp_path):
    """Keep the tokenizers on one thread and the Arrow cache of ``datasets`` out of the home folder."""
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "hf_cache")


@pytest.fixture
def tree(tmp_path):
    """A text tree of 20 packages with 5 different files each."""
    root = tmp_path / "tree"
    for package in range(20):
        folder = root / f"package{package:02d}"
        folder.mkdir(parents=True)
        for index in range(5):
            lines = [f"def function_{package}_{index}_{line}(value): return value * {line}\n" for line in range(20)]
            (folder / f"module{index}.py").write_text("".join(lines))
    return root


def build(out, *arguments):
    return build_corpus.main(["--out", str(out), "--vocab-size", str(VOCAB_SIZE), *map(str, arguments)])


def build_tree(out, tree, *arguments):
    return build(out, "--no-stdlib", "--input", tree, *arguments)


def read_records(folder):
    return [
        json.loads(line)
        for path in sorted(folder.glob("*.jsonl"))
        for line in path.read_text(encoding="utf-8").splitlines()
    ]


def read_manifest(out):
    return json.loads((out / "corpus.json").read_text())


def contents(out):
    return {path.relative_to(out): path.read_bytes() for path in out.rglob("*") if path.is_file()}


def test_splits_share_no_package(tmp_path, tree):
    out = tmp_path / "corpus"
    assert build_tree(out, tree, "--held-out-fraction", 0.2) == 0

    manifest = read_manifest(out)
    records = {split: read_records(out / split) for split in ("train", "validation")}
    packages = {split: {record["package"] for record in records[split]} for split in records}
    assert packages["train"].isdisjoint(packages["validation"])
    assert sorted(packages["validation"]) == manifest["held_out_packages"]
    assert sorted(packages["train"]) == manifest["train_packages"]
    assert len(packages["train"] | packages["validation"]) == 20
    # All packages are about equally long, so a fifth of the bytes is four of them, or three if they are the longer.
    assert len(packages["validation"]) in (3, 4)
    for split, members in records.items():
        assert manifest["documents"][split] == len(members)
        assert manifest["bytes"][split] == sum(len(record["text"].encode()) for record in members)


def test_duplicates_and_unusable_files_are_left_out(tmp_path, tree):
    text = (tree / "package00" / "module0.py").read_text()
    for name in ("copy_in_other_package.py", "and_another.txt"):
        (tree / "package07" / name).write_text(text)
    (tree / "package01" / "empty.py").write_text("")
    (tree / "package01" / "short.py").write_text("import this\n")
    (tree / "package02" / "latin1.txt").write_bytes(("é" * 200).encode("latin-1"))
    (tree / "package02" / "data.bin").write_bytes(bytes(1000))
    (tree / "package03" / ".hidden.py").write_text("x = 1\n" * 100)
    out = tmp_path / "corpus"
    assert build_tree(out, tree) == 0

    texts = [record["text"] for split in ("train", "validation") for record in read_records(out / split)]
    assert len(texts) == len(set(texts)) == 100
    manifest = read_manifest(out)
    assert manifest["duplicates_removed"] == 2
    assert manifest["too_short_removed"] == 1  # An empty file has no document at all.
    assert manifest["files_not_text"] == 2


def test_edited_copies_are_left_out(tmp_path):
    """Documents most of whose long lines occurred before, in one document or in several; short lines do not count."""
    blocks = [[f"value_{name}_of_line_{line} = {line}\n" for line in range(10)] for name in "abcdefg"]
    a, b, c, d, e, f, g = blocks
    texts = {
        "first": a + b,
        "second": c + d,
        "half": a + e,
        "edited": a + b[:1] + f[:9],
        "of_two_files": a[:6] + c[:5] + ["    return None\n"] * 30 + f[:9],
        "new": ["    return None\n"] * 30 + f,  # no line of the two before it has been taken
        "short_lines": ["    return None\n"] * 40,
        "repeated": (g + a[:1] * 50),
    }
    files = []
    for name, lines in texts.items():
        (tmp_path / name).write_text("".join(lines))
        files.append(build_corpus.SourceFile("package", name, tmp_path / name))
    documents, left_out = build_corpus.read_documents(files, None)
    assert {*texts} - {document.path for document in documents} == {"edited", "of_two_files"}
    assert left_out == {"near-duplicates": 2}


def install(site_packages, name, version, code):
    """A distribution of one module."""
    info = site_packages / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "RECORD").write_text(f"{name}.py,,\n")
    (site_packages / f"{name}.py").write_text(code)


def test_the_first_environment_of_a_distribution_is_read(tmp_path, monkeypatch):
    here, there, elsewhere = (tmp_path / name for name in ("here", "there", "elsewhere"))
    lines = [f"def function_{line}(value): return value\n" for line in range(90)]
    for folder, name, version, code in (
        (here, "one_package", "1", lines[:10]),
        (there, "One-Package", "2", lines[10:20]),
        (there, "two_package", "1", lines[20:30]),
        (elsewhere, "two_package", "2", lines[30:40]),
    ):
        install(folder, name, version, "".join(code))
    monkeypatch.setattr(sys, "path", [*sys.path, str(here)])
    out, more = tmp_path / "corpus", ["--environment", there, "--environment", elsewhere]
    chosen = ["--no-stdlib", "--packages", "one-package", "two-package", *more, "--held-out-fraction", 0]
    assert build(out, *chosen) == 0
    assert read_manifest(out)["versions"]["packages"] == {"one-package": "1", "two-package": "1"}
    texts = sorted(record["text"] for record in read_records(out / "train"))
    assert texts == sorted(["".join(lines[:10]), "".join(lines[20:30])])


def test_suffixes_select_files_of_trees(tmp_path, tree):
    text = (tree / "package00" / "module0.py").read_text()
    (tree / "package00" / "data.json").write_text(text.replace("function", "datum"))
    out = tmp_path / "corpus"
    assert build_tree(out, tree, "--suffixes", ".json", "--held-out-fraction", 0) == 0
    assert [record["path"] for record in read_records(out / "train")] == ["package00/data.json"]


def test_tokens_are_counted_by_kind_and_source(tmp_path, tree):
    (tree / "package00" / "notes.md").write_text("Some words about nothing in particular, on one line.\n" * 4)
    out = tmp_path / "corpus"
    assert build_tree(out, tree, "--held-out-fraction", 0) == 0
    found = write_tokens(out, "train")
    tokens = np.load(out / "train.npy")
    assert tokens.dtype == np.uint16 and len(tokens) == found["tokens"]["all"]
    assert found["kinds"].keys() == {"Python", "documents"} and found["kinds"]["documents"] < 300
    assert found["sources"] == {"tree": len(tokens)} and sum(found["kinds"].values()) == len(tokens)
    assert (tokens == 0).sum() == (tokens == 1).sum() == 101  # BOS and EOS of each document


def test_long_documents_split_at_line_boundaries(tmp_path, tree):
    # U+2028 and the form feed separate lines for str.splitlines, but not for Python or an editor.
    text = "".join(f"line {index} \u2028 \f {'ü' * 40}\n" for index in range(4000)) + "no newline at the end"
    (tree / "package00" / "long.txt").write_text(text, encoding="utf-8")
    out = tmp_path / "corpus"
    assert build_tree(out, tree, "--held-out-fraction", 0) == 0

    pieces = [r["text"] for r in read_records(out / "train") if r["path"] == "package00/long.txt"]
    assert "".join(pieces) == text
    assert len(pieces) == -(-len(text.encode()) // build_corpus.MAX_DOCUMENT_BYTES)
    assert all(piece.endswith("\n") for piece in pieces[:-1])
    assert all(len(piece.encode()) <= build_corpus.MAX_DOCUMENT_BYTES for piece in pieces)
    assert not (out / "validation").exists()


def test_a_single_long_line_stays_whole():
    line = "x" * 100 + "\n"
    pieces = list(build_corpus.split_at_lines("a\n" + line + "b\n", max_bytes=10))
    assert pieces == [("a\n", 2), (line, 101), ("b\n", 2)]


def test_builds_are_reproducible_and_seeded(tmp_path, tree, monkeypatch):
    for name, seed in (("first", 1), ("second", 1), ("other", 2)):
        monkeypatch.setattr(build_corpus, "SEED", seed)
        assert build_tree(tmp_path / name, tree) == 0
    first = contents(tmp_path / "first")
    assert first == contents(tmp_path / "second")
    order = [[record["path"] for record in read_records(tmp_path / name / "train")] for name in ("first", "other")]
    assert order[0] != order[1]
    assert order[0] != sorted(order[0])


def test_a_limited_corpus_samples_all_packages(tmp_path, tree):
    out = tmp_path / "corpus"
    assert build_tree(out, tree, "--max-bytes", 40_000) == 0
    manifest = read_manifest(out)
    assert 35_000 < sum(manifest["bytes"].values()) <= 40_000 and len(manifest["train_packages"]) > 10
    assert len(read_records(out / "train")) == manifest["documents"]["train"]


def test_rebuild_only_when_asked(tmp_path, tree, capsys):
    out = tmp_path / "corpus"
    assert build_tree(out, tree) == 0
    before = contents(out)
    (tree / "package05" / "new.py").write_text("value = 1\n" * 100)

    capsys.readouterr()
    assert build_tree(out, tree) == 0
    assert "up to date" in capsys.readouterr().out
    assert contents(out) == before

    assert build_tree(out, tree, "--max-bytes", 50_000) == 2
    assert "max_bytes (None -> 50000)" in capsys.readouterr().err
    assert contents(out) == before

    assert build_tree(out, tree, "--force") == 0
    assert sum(read_manifest(out)["documents"].values()) == 101


@pytest.mark.parametrize("force", [[], ["--force"]])
def test_foreign_folders_are_not_touched(tmp_path, tree, capsys, force):
    out = tmp_path / "thesis"
    out.mkdir()
    assert build_tree(out, tree, *force) == 0  # Empty folders are fine.

    (out / "corpus.json").unlink()
    before = contents(out)
    assert build_tree(out, tree, *force) == 2
    assert "not built by this tool" in capsys.readouterr().err
    assert contents(out) == before


@pytest.mark.slow
def test_standard_library_by_default(tmp_path):
    out = tmp_path / "corpus"
    assert build(out, "--max-bytes", 2_000_000) == 0
    manifest = read_manifest(out)
    packages = manifest["train_packages"] + manifest["held_out_packages"]
    assert all(package.startswith("stdlib/") for package in packages)
    assert "stdlib/asyncio" in packages
    assert not any("site-packages" in record["path"] for record in read_records(out / "train"))
    assert 0 < manifest["bytes"]["validation"] <= 0.05 * sum(manifest["bytes"].values())


def job_config(out):
    config = JobConfig()
    config.model.hf_assets_path = str(out / "tokenizer")
    config.training.dataset = config.validation.dataset = "c4_test"
    config.training.dataset_path = str(out / "train")
    config.validation.dataset_path = str(out / "validation")
    config.training.seq_len = config.validation.seq_len = 64
    config.training.local_batch_size = config.validation.local_batch_size = 4
    return config


def test_torchtitan_loads_the_tokenizer(tmp_path, tree, capsys):
    """Small texts give fewer tokens than were asked for."""
    out = tmp_path / "corpus"
    assert build_tree(out, tree) == 0
    tokenizer = build_hf_tokenizer(job_config(out))
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    assert None not in (tokenizer.bos_id, tokenizer.eos_id)
    assert tokenizer.bos_id != tokenizer.eos_id

    text = "def f(x):\n\treturn 'übung \U0001f600'  # nowhere in the corpus\n"
    tokens = tokenizer.encode(text)
    assert max(tokens) < VOCAB_SIZE
    assert tokenizer.decode(tokens) == text
    # torchtitan adds both tokens exactly when its data loader asks for them.
    assert tokenizer.encode(text, add_bos=True, add_eos=True) == [tokenizer.bos_id, *tokens, tokenizer.eos_id]

    assert build_tree(tmp_path / "small", tree, "--vocab-size", 100_000) == 0
    vocab_size = build_hf_tokenizer(job_config(tmp_path / "small")).get_vocab_size()
    assert VOCAB_SIZE < vocab_size == read_manifest(tmp_path / "small")["vocab_size"] < 100_000
    assert f"only {vocab_size} tokens" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("split", "build_loader"),
    [("train", build_text_dataloader), ("validation", build_text_validation_dataloader)],
)
def test_torchtitan_trains_on_both_splits(tmp_path, tree, split, build_loader):
    """The whole split and nothing else, in its order."""
    out = tmp_path / "corpus"
    assert build_tree(out, tree, "--held-out-fraction", 0.2) == 0
    config = job_config(out)
    tokenizer = build_hf_tokenizer(config)
    batches = list(build_loader(dp_world_size=1, dp_rank=0, tokenizer=tokenizer, job_config=config, infinite=False))
    inputs, labels = batches[0]
    assert inputs["input"].shape == labels.shape == (4, 64)
    assert (inputs["input"][:, 1:] == labels[:, :-1]).all()
    texts = [record["text"] for record in read_records(out / split)]
    stream = [token for text in texts for token in tokenizer.encode(text, add_bos=True, add_eos=True)]
    assert inputs["input"][0].tolist() == stream[:64]
    assert sum(len(labels) for _, labels in batches) == len(stream) // 65
