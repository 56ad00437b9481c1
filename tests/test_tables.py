"""Tables and texts of pages are what the records say."""

import json
import lzma
import statistics
from random import Random

import pytest

from experiments import check, dry_runs, tables


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
    assert moved > 900 and found / moved >= 0.97, f"{found} of {moved}"


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "moe16b_8")) for name in dry_runs.JOBS]
)
def test_dry_runs_have_what_tables_show(name):
    assert dry_runs.estimate(dry_runs.JOBS[name]) == check.source("dry_runs")[name]


def test_every_table_is_on_one_page():
    texts = [(tables.ROOT / name).read_text() for name in tables.PAGES]
    found = [name for text in texts for _, name, _ in tables.MARKED.findall(text)]
    assert sorted(found) == sorted(tables.TABLES)


def test_the_long_run_is_its_losses():
    """The kept losses of every step give the records of the 3,000 steps."""
    folder = check.HERE / "convergence"
    with lzma.open(folder / "3000_steps.json.xz") as file:
        runs = json.load(file)
    measured = {
        "training loss, last quarter": lambda run: statistics.fmean(run["loss_metrics/global_avg_loss"][-750:]),
        "held-out loss": lambda run: run["validation_metrics/loss"][-1],
        "speed": lambda run: statistics.harmonic_mean(run["throughput(tps)"][10:]),
        "memory": lambda run: max(run["memory/max_reserved(GiB)"]),
    }
    by_name = {name: {tag: list(values.values()) for tag, values in tags.items()} for name, tags in runs.items()}
    names = {"bf16": "bf16-s1", "bf16, one bit of a weight changed": "bf16_bit-s1"}
    records = [r for r in tables.read().all if r["name"].startswith("3,000 steps: ")]
    assert len(records) == 8
    for r in records:
        of = measured[r["name"].partition(": ")[2]]
        want = of(by_name["fp8-s1"]), of(by_name[names[r["reference"]]])
        assert (r["value"], r["reference_value"]) == pytest.approx(want), r["name"]


@pytest.mark.parametrize(("text", "missing"), [
    ("16,384 tokens, 64 experts, batch 4, torch 2.11, Qwen3.5, 0.11B, arXiv 2511.02302, 80 GB, 2.14.1", []),
    ("`1.2x`, [a](b/1.2x), https://a/1.2\n```\n1.2x\n```\n<!-- table: gemms -->\n1.2x\n<!-- end -->", []),
    ("1.3x, 2% and 3 ms, 4 or 5 µs, +0.1%", ["1.3", "2", "3", "4", "5", "+0.1"]),
    ("0.0375, 1,030 to 1,159 TFLOP/s", ["0.0375", "1,030", "1,159"]),
    ("| 2.11x | 3 times | 7 tokens/s | 5 GiB / 6 GiB", ["2.11", "3", "7", "5", "6"]),
])  # fmt: skip
def test_a_figure_needs_a_line(pages, text, missing):
    errors = pages.ledger.page("a new page", text)[1]
    assert [error.split()[3] for error in errors] == missing
