"""Tables on pages are what the records say."""

import pytest

from experiments import headline, tables


def record(name, shape, value, reference, reference_value, date="2026-01-02", **fields):
    common = dict(hardware="1 x NVIDIA H200", commit=f"c{date[-1]}", date=date, command="python -m experiments.a.b --x")
    return dict(common, name=name, shape=shape, value=value, reference=reference, reference_value=reference_value,
                speedup=value / reference_value, **fields)  # fmt: skip


def test_pages_have_the_records_figures():
    records = tables.read()
    for name in tables.PAGES:
        text = (tables.ROOT / name).read_text()
        assert tables.page(text, records) == text, "run python -m experiments.tables"


def test_every_table_is_on_one_page():
    texts = [(tables.ROOT / name).read_text() for name in tables.PAGES]
    found = [name for text in texts for _, name, _ in tables.MARKED.findall(text)]
    assert sorted(found) == sorted(tables.TABLES)


SHAPE = "16B, 6 layers, sdpa, local batch 4, random routing, 1 GPU"


def test_a_row_is_of_one_run():
    """The newest. An older run's references, which met another machine, do not stand beside it."""
    records = tables.Records(
        [
            record("train_16b", SHAPE, 900, "torchao", 450, date="2026-01-01"),
            record("train_16b", SHAPE, 950, "naive_blockwise", 475) | {"commit": "c1"},
            record("train_16b", SHAPE, 1000, "bf16", 500),
            record("train_16b", SHAPE, 1000, "bf16_whole", 800),
            record("train_16b memory", SHAPE, 10.5, "bf16", 12.25),
        ]
    )
    page = tables.page("a\n<!-- table: training -->\nold\n<!-- end -->\nb\n", records)
    assert page.splitlines()[0] == "a" and page.splitlines()[-1] == "b" and "old" not in page
    assert "| 16B, 6 layers, sdpa, local batch 4 | 500, 12.2 | 800 | | | 1,000 (**2.00x**, 1.25x), 10.5 |" in page
    assert "Measured on one NVIDIA H200; 2026-01-02; commit `c2`; `python -m experiments.a.b`." in page


def test_what_was_not_measured_is_said():
    page = tables.page("<!-- table: training -->\n<!-- end -->\n", tables.Records([]))
    assert page == "<!-- table: training -->\n\nNot measured in this state.\n<!-- end -->\n"


def test_ablations_are_of_one_run_and_deepgemm_is_summarized():
    shape = "16B, 64 experts per GPU, 16384 tokens, 1 GPU"
    records = tables.Records(
        [
            record("moe_layer", shape, 8.0, "bf16", 20.0),
            record("moe_layer requantize", shape, 10.0, "bf16", 20.0),
            record("moe_layer requantize", shape, 10.0, "fp8", 7.5),  # of the same run
            record("grouped_mm", "a, back to back", 120, "deepgemm", 100),
            record("grouped_mm", "b, back to back", 100, "deepgemm", 120),
        ]
    )
    ablations = tables.layer_ablations(records)
    assert "| requantize | 16B, 64 experts, 16384 tokens | 10 | 1.333x |" in ablations
    assert "| forward | back to back | 1.000x | 0.833x to 1.200x | 1 of 2 |" in tables.deepgemm(records)


@pytest.mark.parametrize(("value", "text"), [(123456.7, "123,457"), (98.76, "98.8"), (1.234, "1.23"), (0.5, "0.5")])
def test_numbers(value, text):
    assert tables.number(value) == text


def test_bars_of_the_headline():
    """Of the newest run with peers, and not of an ablation's, which has others of ours."""
    shape = headline.SHAPE
    records = [
        record("train_16b", shape, 90.0, "torchao", 40.0, "2026-01-01"),
        record("train_16b", shape, 98.0, "bf16_whole", 67.0),
        record("train_16b", shape, 98.0, "bf16", 54.0),
        record("train_16b save_h=fp8", shape, 97.0, "bf16", 54.0, "2026-01-03"),
        record("train_16b", shape, 96.0, "unfused_permute", 95.0, "2026-01-03"),
    ]
    found = headline.bars(tables.Records(records), "train_16b")
    assert list(found.values()) == [54.0, 67.0, 98.0] and list(found)[-1] == "FP8, titan_fp8moe"
