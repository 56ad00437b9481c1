"""Tables and texts of pages are what the records say."""

from random import Random

import pytest

from experiments import check, dry_runs, tables


def record(name, shape, value, reference, reference_value, date="2026-01-02", **fields):
    common = dict(hardware="1 x NVIDIA H200", commit=f"c{date[-1]}", date=date, command="python -m experiments.a.b --x")
    return dict(common, name=name, shape=shape, value=value, reference=reference, reference_value=reference_value,
                speedup=value / reference_value) | fields  # fmt: skip


@pytest.fixture(scope="module")
def pages() -> tables.Pages:
    return tables.Pages(tables.read())


def test_pages_have_their_sources_figures(pages):
    """Also a test of each table's code, whose cells would change."""
    for name in tables.PAGES:
        assert pages.errors(name, (tables.ROOT / name).read_text()) == [], name
    assert pages.ledger.unused() == []


def test_moved_figures_are_found(pages):
    """Of each page, by 3 to 15% at random, in tables too."""
    random, moved, found = Random(0), 0, 0
    for name in tables.PAGES:
        text = (tables.ROOT / name).read_text()
        for figure in check.FIGURE.finditer(check.hidden(text, check.NO_FIGURES)):
            value = float(figure[0].replace(",", "").replace(check.MINUS, "-"))
            value *= 1 + random.choice((-1, 1)) * random.uniform(0.03, 0.15)
            new = check.printed(value, figure[0])
            if new != figure[0]:
                moved += 1
                found += bool(pages.errors(name, text[: figure.start()] + new + text[figure.end() :]))
    assert moved > 300 and found / moved >= 0.97, f"{found} of {moved}"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "moe16b_8")) for name in dry_runs.JOBS]
)
def test_dry_runs_have_what_tables_show(name):
    assert dry_runs.estimate(dry_runs.JOBS[name]) == check.source("dry_runs")[name]


def test_every_table_is_on_one_page():
    texts = [(tables.ROOT / name).read_text() for name in tables.PAGES]
    found = [name for text in texts for _, name, _ in tables.MARKED.findall(text)]
    assert sorted(found) == sorted(tables.TABLES)


RECORDS = [
    record("layer", "16B", 5.25, "bf16", 7.5, commit="old"),
    record("layer", "16B", 5.0, "bf16", 7.5, "2026-01-03"),
    record("layer", "671B", 20.0, "bf16", 30.0),
    record("loss", "0.1B", -0.0003, "bf16", 1.0),
]
LEDGER = {
    "records": {"layers": {"name": "layer"}, "small": {"name": "layer", "shape": "16B"}, "loss": {"name": "loss"}},
    "pages": {"README.md": {"takes {} ms, {} to {}x": ["small.value", "layers.low", "layers.high"]}},
}
PUBLISHED = {"peak": {"value": 989}}


def ledger(monkeypatch, lines=LEDGER["pages"]["README.md"], records=RECORDS) -> check.Ledger:
    sources = {"figures": LEDGER | {"pages": {"README.md": lines}}, "published": PUBLISHED}
    monkeypatch.setattr(check, "source", sources.__getitem__)
    return check.Ledger(records)


def test_figures_are_those_of_their_lines(monkeypatch):
    """Of the newest run, in the decimals and with the sign of the page."""
    lines = {"takes {} ms": ["small.value"], "and {}%": ["100 * loss.value"], "of {} TFLOP/s": ["peak"]}
    found = ledger(monkeypatch, lines)
    text = f"It takes 5.00\nms, and {check.MINUS}0.03% of 989 TFLOP/s."
    assert found.page("README.md", text) == (text, [])
    assert found.page("README.md", text.replace("5.00", "4.9").replace("989", "1"))[0] == text.replace("5.00", "5.0")
    pinned = check.Key(RECORDS, name="layer", shape="16B", commit="old")
    assert pinned.value == 5.25 and pinned.low == 0.7
    with pytest.raises(LookupError):
        check.Key(RECORDS, name="layers")


@pytest.mark.parametrize(
    "text,missing",
    [
        (
            "16,384 tokens, 64 experts, batch 4, torch 2.11, Qwen3.5, 0.11B, arXiv 2511.02302, 80 GB, 2.14.1",
            [],
        ),
        ("`1.2x`, [a](b/1.2x), https://a/1.2\n```\n1.2x\n```\n<!-- table: gemms -->\n1.2x\n<!-- end -->", []),
        ("1.3x, 2% and 3 ms, 4 or 5 µs, +0.1%", ["1.3", "2", "3", "4", "5", "+0.1"]),
        ("0.0375, 1,030 to 1,159 TFLOP/s", ["0.0375", "1,030", "1,159"]),
        ("| 2.11x | 3 times | 7 tokens/s | 5 GiB / 6 GiB", ["2.11", "3", "7", "5", "6"]),
    ],
)
def test_a_figure_needs_a_line(monkeypatch, text, missing):
    errors = ledger(monkeypatch, {}).page("README.md", text)[1]
    assert [error.split()[3] for error in errors] == missing


def test_a_line_needs_one_place(monkeypatch):
    found = ledger(monkeypatch)
    assert found.unused() == ["loss"]
    for text, places in (("", 0), ("takes 5 ms, 0.7 to 1x, takes 5 ms, 0.7 to 1x", 2)):
        assert found.page("README.md", text)[1][0].startswith(f"{places} places have the ledger's 'takes")


def test_a_number_of_the_code():
    assert check.code("tests/test_memory.py", "\nTOLERANCE = ") == 0.1
    with pytest.raises(ValueError, match="not enough"):
        check.code("tests/test_memory.py", "no such text ")


def test_unused_records_go(tmp_path, monkeypatch):
    """What a table shows stays, and what the ledger names."""
    path = tmp_path / "experiments/a/results.json"
    tables.write_list(path, RECORDS)
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(tables, "TABLES", {"small": lambda records: str(records.of("layer", "671B"))})
    monkeypatch.setitem(LEDGER, "records", {"loss": {"name": "loss"}})
    ledger(monkeypatch, {})
    tables.prune()
    assert tables.read().all == RECORDS[2:]
