"""tools/build_corpus.py: the split, near-duplicates and known bytes."""

import json
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

import build_corpus


def test_splits_share_no_package(tmp_path):
    for package, index in ((p, i) for p in range(20) for i in range(5)):
        (folder := tmp_path / f"tree/package{package}").mkdir(parents=True, exist_ok=True)
        lines = [f"def function_{package}_{index}_{line}(value): return value\n" for line in range(20)]
        (folder / f"module{index}.py").write_text("".join(lines))
    build_corpus.main([f"--out={tmp_path / 'out'}", f"--input={tmp_path / 'tree'}", "--vocab-size=300"])
    train, validation = (
        {json.loads(line)["package"] for line in (tmp_path / f"out/{split}/part-00000.jsonl").open()}
        for split in build_corpus.SPLITS
    )
    assert len(train | validation) == 20 == len(train) + len(validation) and len(validation) in (1, 2)


def test_near_duplicates_are_left_out():
    """Documents most of whose long lines occurred before, in one document or in several. Short lines do not count."""
    a, b, c, d = [[f"value_{name}_of_line_{line} = {line}\n" for line in range(10)] for name in "abcd"]
    short = ["    return None\n"] * 30
    texts = dict(first=a + b, half=a + c, edited=a + b[:1] + d[:9], of_two=a[:6] + c[:5] + short + d[:9], new=short + d)
    texts |= dict(short=short, copy=short)
    files = [("package", name, "".join(lines).encode()) for name, lines in texts.items()]
    assert [d.path for d in build_corpus.read_documents(files, 2**16)] == ["first", "half", "new", "short"]


def test_other_bytes_than_the_known_ones_are_an_error(tmp_path, monkeypatch):
    pins = "# quickstart: 0 1\none==1.0  # quickstart\nheld==1.0  # -quickstart\n"
    monkeypatch.setattr(build_corpus, "PINS", tmp_path / "pins.txt")
    (tmp_path / "pins.txt").write_text(pins)
    files = [(package, "a.py", f"name_of_{package} = 1\n".encode() * 20) for package in ("one", "held")]
    monkeypatch.setattr(build_corpus, "fetch", lambda pins, folder: None)
    monkeypatch.setattr(build_corpus, "files_of_wheels", lambda folder: files)
    with pytest.raises(SystemExit, match="have the SHA-256 .*, not 0 1; tokenizers is ") as refused:
        build_corpus.main([f"--out={tmp_path / 'out'}"])
    assert not (tmp_path / "out").exists()
    found = re.search(r"\w{64} \w{64}", str(refused.value))[0]
    (tmp_path / "pins.txt").write_text(pins.replace("0 1", found))
    build_corpus.main([f"--out={tmp_path / 'out'}"])
