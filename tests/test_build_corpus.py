"""tools/build_corpus.py: the split, the deduplication and what torchtitan reads of the result."""

import hashlib
import json
import re
import sys
import zipfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

import build_corpus
from torchtitan.components.tokenizer import build_hf_tokenizer
from torchtitan.config import JobConfig
from torchtitan.hf_datasets.text_datasets import build_text_dataloader, build_text_validation_dataloader

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
    return build_corpus.main(["--out", str(out), *map(str, arguments)])


def build_tree(out, tree, *arguments):
    return build(out, "--input", tree, "--vocab-size", VOCAB_SIZE, *arguments)


def read_records(folder):
    return [json.loads(line) for path in sorted(folder.glob("*.jsonl")) for line in path.read_text().splitlines()]


def read_manifest(out):
    return json.loads((out / "corpus.json").read_text())


def contents(out):
    return {path.relative_to(out): path.read_bytes() for path in out.rglob("*") if path.is_file()}


def test_splits_share_no_package(tmp_path, tree):
    out = tmp_path / "corpus"
    build_tree(out, tree)
    found = {split: read_records(out / split) for split in ("train", "validation")}
    packages = {split: sorted({record["package"] for record in found[split]}) for split in found}
    assert packages == read_manifest(out)["packages"]
    assert len({*packages["train"], *packages["validation"]}) == 20 and len(packages["validation"]) in (1, 2)
    order = [record["package"] for record in found["train"]]
    assert order != sorted(order) and len(order) > 85


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
    build_tree(out, tree)
    texts = [record["text"] for split in ("train", "validation") for record in read_records(out / split)]
    assert len(texts) == len(set(texts)) == 100


def test_edited_copies_are_left_out():
    """Documents most of whose long lines occurred before, in one document or in several; short lines do not count."""
    a, b, c, d, e, f, g = [[f"value_{name}_of_line_{line} = {line}\n" for line in range(10)] for name in "abcdefg"]
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
    files = [("package", name, "".join(lines).encode()) for name, lines in texts.items()]
    documents = build_corpus.read_documents(files)
    assert {*texts} - {document.path for document in documents} == {"edited", "of_two_files"}


def test_long_files_are_split_at_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(build_corpus, "MAX_BYTES", 300)
    text = "".join(f"a line with the number {n} and more, é\u2028\n" for n in range(40)) + "x" * 500
    found = [d.text for d in build_corpus.read_documents([("package", "long.py", text.encode())])]
    assert "".join(found) == text and len(found) > 5 and all(len(t.encode()) <= 300 for t in found[:-1])


def test_a_corpus_is_not_replaced(tmp_path, tree, capsys):
    out = tmp_path / "corpus"
    build_tree(out, tree)
    before = contents(out)
    build_tree(out, tree)
    assert "is there already; remove it" in capsys.readouterr().out
    for arguments in (
        [out, "--input", tree],
        [tree, "--input", tree],
        [tmp_path / "new", "--input", tmp_path / "absent"],
    ):
        with pytest.raises(SystemExit, match="not of these arguments|absent is no folder"):
            build(*arguments)
    assert contents(out) == before and len(contents(tree)) == 100


@pytest.fixture
def pinned(tmp_path, tree, monkeypatch):
    """Three wheels that pip finds without a network, and their pins. Returns these."""
    pins = ["# quickstart: 0 1"]
    for name, sets in (("one", "quickstart"), ("two_more", "quickstart large"), ("held", "-quickstart")):
        path = tmp_path / f"wheels/{name}-1.0-py3-none-any.whl"
        path.parent.mkdir(exist_ok=True)
        with zipfile.ZipFile(path, "w") as wheel:
            for index in range(5):
                text = (tree / f"package0{len(pins)}/module{index}.py").read_text()
                wheel.writestr(f"{name}/module{index}.py", text)
            wheel.writestr(f"{name}/data.bin", bytes(1000))
            wheel.writestr(
                f"{name}-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
            )
            wheel.writestr(f"{name}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
            wheel.writestr(f"{name}-1.0.dist-info/RECORD", "")
        pins.append(f"{name}==1.0 --hash=sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}  # {sets}")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setattr(build_corpus, "PINS", tmp_path / "corpus.txt")
    monkeypatch.setattr(build_corpus, "VOCAB_SIZES", {"quickstart": VOCAB_SIZE})
    (tmp_path / "corpus.txt").write_text("\n".join(pins) + "\n")
    return tmp_path / "corpus.txt"


def test_pinned_wheels_give_known_bytes(tmp_path, pinned):
    """A corpus of other bytes than those that are known is none."""
    with pytest.raises(SystemExit, match=r"have the SHA-256 (\w{64} \w{64}), not 0 1; tokenizers is ") as refused:
        build(tmp_path / "corpus")
    assert not (tmp_path / "corpus").exists()
    sums = re.search(r"\w{64} \w{64}", str(refused.value))[0]
    pinned.write_text(pinned.read_text().replace("# quickstart: 0 1", f"# quickstart: {sums}"))
    build(tmp_path / "corpus")
    assert read_manifest(tmp_path / "corpus")["packages"] == {"train": ["one", "two_more"], "validation": ["held"]}
    assert len(read_records(tmp_path / "corpus/train")) == 10


def test_other_wheels_are_refused(tmp_path, pinned):
    pinned.write_text(re.sub("sha256:....", "sha256:0000", pinned.read_text()))
    with pytest.raises(SystemExit, match="pip could not fetch"):
        build(tmp_path / "corpus")


def test_the_pins():
    """Each wheel is for any machine; the large set holds out other wheels than it trains on."""
    for name, least in (("quickstart", 2), ("large", 10)):
        train, validation, sums = build_corpus.pins_of(name)
        assert len(train) >= least and len(validation) == 1 and [len(value) for value in sums] == [64, 64]
        assert all("==" in pin and len(pin.split("--hash=sha256:")[1]) == 64 for pin in train + validation)


def job_config(out):
    config = JobConfig()
    config.model.hf_assets_path = str(out / "tokenizer")
    config.training.dataset = config.validation.dataset = "c4_test"
    config.training.dataset_path = str(out / "train")
    config.validation.dataset_path = str(out / "validation")
    config.training.seq_len = config.validation.seq_len = 64
    config.training.local_batch_size = config.validation.local_batch_size = 4
    return config


def test_torchtitan_loads_the_tokenizer(tmp_path, tree):
    """Small texts give fewer tokens than were asked for."""
    out = tmp_path / "corpus"
    build_tree(out, tree)
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

    build_tree(tmp_path / "small", tree, "--vocab-size", 30_000)
    vocab_size = build_hf_tokenizer(job_config(tmp_path / "small")).get_vocab_size()
    assert VOCAB_SIZE < vocab_size == read_manifest(tmp_path / "small")["vocab_size"] < 30_000


@pytest.mark.parametrize(
    ("split", "build_loader"),
    [("train", build_text_dataloader), ("validation", build_text_validation_dataloader)],
)
def test_torchtitan_trains_on_both_splits(tmp_path, tree, split, build_loader):
    """The whole split and nothing else, in its order."""
    out = tmp_path / "corpus"
    build_tree(out, tree)
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
    assert sum(read_manifest(out)["tokens"].values()) == sum(
        len(tokenizer.encode(record["text"], add_bos=True, add_eos=True))
        for part in ("train", "validation")
        for record in read_records(out / part)
    )
