"""Tables on pages are what the records say."""

import pytest

from experiments import headline, tables
from experiments.kernels import routed_vs_fused_bf16
from experiments.kernels.routed_vs_fused_bf16 import ACCUMULATED, OURS


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
    assert "| 16B, 6 layers, sdpa, local batch 4 | H200 | 500, 12.2 | 800 | 1,000 (2.00x, **1.25x**), 10.5 |" in page
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


def sweep_point(card: str, variant: str, batch: int, speed: float | None) -> dict:
    shape = f"16B, 6 layers, sdpa, random routing, 1 GPU, {card}"
    error = None if speed else "out of memory"
    state = dict(hardware=f"1 x NVIDIA {card}", commit="c", date="2026-01-04")
    return state | dict(
        shape=shape, variant=variant, local_batch=batch, tokens_per_second=speed, memory_gib=batch, error=error
    )


def test_the_picture(tmp_path, monkeypatch):
    """Bars of the card that ran torchtitan's bf16, and not of an ablation's run, which has others of ours; ratios over
    the strongest bf16; a curve of each card and variant, without what did not fit."""
    shape = headline.SHAPE
    records = [
        record("train_16b", shape, 98.0, "bf16_whole", 67.0),
        record("train_16b", shape, 98.0, "bf16_fused:checkpointing=saved", 70.0),
        record("train_16b", shape, 98.0, "bf16", 49.0),
        record("train_16b checkpointing=none", shape, 99.0, "bf16_fused:checkpointing=none", 69.0),
        record("train_16b save_h=fp8", shape, 97.0, "bf16", 54.0, "2026-01-03"),
        record("train_16b", shape, 96.0, "unfused_permute", 95.0, "2026-01-03"),
        record("train_16b", shape, 87.0, "torchao", 54.0, "2026-01-03") | {"hardware": "1 x NVIDIA H100"},
    ]
    points = [sweep_point("H100", "fp8_flow", n, speed) for n, speed in ((8, 90.0), (4, 80.0), (16, None))]
    points += [sweep_point("H200", "bf16_fused", 4, 60.0)]
    drawn, lines = [], []
    monkeypatch.setattr("matplotlib.axes.Axes.text", lambda self, x, y, text, **_: drawn.append(text.strip()))
    monkeypatch.setattr("matplotlib.axes.Axes.plot", lambda self, x, y, *_, **__: lines.append((x, y)))
    headline.draw(tables.Records(records), points, tmp_path / "headline.png")
    assert drawn == ["49 (0.70x)", "67 (0.96x)", "70 (1.00x)", "99 (1.41x)"]
    assert lines == [((4, 8), (80.0, 90.0)), ((4,), (60.0,))] and (tmp_path / "headline.png").stat().st_size > 0


def test_the_headline_is_over_the_strongest_bf16():
    """The fastest variant of each name; bold is the smallest speedup, and the spread is the largest."""
    speeds = {"bf16": 50.0, "bf16_whole": 80.0, "bf16_fused": 70.0, "bf16_fused:checkpointing=none": 76.0}
    spread = {"ours": 0.011, "reference": 0.02}
    records = [record("train_16b", SHAPE, 100.0, reference, speed) for reference, speed in speeds.items()]
    records[0]["spread"] = spread
    row = next(line for line in tables.headline(tables.Records(records)).splitlines() if "16B" in line)
    assert row.endswith("tokens/s | H200 | 50 | 80 (whole) | 100 | 2.00x | **1.25x** | 2.0% |")
    page = tables.training(tables.Records(records))
    assert "| 50 | 80 | 76, none | 100 (2.00x, **1.25x**, 1.32x) | 2.0% |" in page


def test_a_row_of_training_is_of_one_invocation():
    """Other checkpointing and other FP8 experts ran in calls of their own, with figures of ours of their own."""
    saved, none = ("bf16_fused:checkpointing=" + how for how in ("saved", "none"))
    other, fp8 = {"command": "python -m b"}, {"command": "python -m c"}
    records = tables.Records(
        [
            record("train_16b", SHAPE, 100.0, saved, 80.0),
            record("train_16b", SHAPE, 100.0, "bf16", 50.0),
            record("train_16b", SHAPE, 96.0, none, 90.0) | other,
            record("train_16b checkpointing=none", SHAPE, 99.0, none, 90.0) | other,
            record("train_16b", SHAPE, 97.0, "torchao", 40.0) | fp8,
            record("train_16b memory", SHAPE, 9.0, saved, 12.0),
            record("train_16b memory", SHAPE, 8.0, "torchao", 11.0) | fp8,
        ]
    )
    title = "16B, 6 layers, sdpa, local batch 4"
    assert tables.training(records).splitlines()[2:] == [
        f"| {title} | H200 | 50 | 80, 12, saved | | 100 (2.00x, **1.25x**), 9 |",
        f"| {title} | H200 | | | 40, 11 | 97 (**2.42x**), 8 |",
    ]
    assert tables.checkpointing(records).splitlines()[2:] == [
        f"| {title} | per op | 50 | | 100, 9 |",
        f"| {title} | per op, bf16's grouped GEMMs kept | | 80, 12 | |",
        f"| {title} | none | | 90 | 99 |",
        f"| {title} | full | | | |",
    ]
    rows = tables.headline(records).splitlines()[2:]
    assert rows[0].endswith("| H200 | 50 | 80 (fused, saved) | 100 | 2.00x | **1.25x** |")
    assert rows[1].endswith("| H200 | | 90 (fused) | 99 | | **1.10x** |")


def test_tables_of_sweeps_and_of_routed_experts():
    points = {who: sweep_point("H100", f"{who}:a", 8, speed) for who, speed in (("ours", 90.0), ("reference", 60.0))}
    shape = "16B, 6 layers, sdpa, random routing, 1 GPU, H100"
    found = tables.sweep(tables.Records([record("train_16b fastest", shape, 90.0, "bf16", 60.0, points=points)]))
    cells = "60, 8.0 (local batch 8, a) | 90, 8.0 (local batch 8, a) | **1.50x**"
    assert f"| 16B, 6 layers, sdpa, H100 | {cells} |" in found
    ms = {"ours": 1.5, "bf16 fused": 3.0, OURS: 2.0} | dict(zip(ACCUMULATED.values(), (1.6, 1.8), strict=True))
    routed = routed_vs_fused_bf16.records("OLMoE", {"back to back": ms})
    found = tables.routed_vs_fused_bf16(tables.Records([record("", "", 1, "", 1) | each for each in routed]))
    assert "| OLMoE | 3 | 2 (**1.50x**) | 1.8 (**1.67x**) | 1.6 (**1.88x**) | 1.5 |" in found
    peers = {"bf16 whole": 4.0, "bf16 fused": 3.0, "ours with SwiGLU": 1.9}
    of_model = [record("layer_M", "M, 8 tokens, back to back", 2.0, peer, ms) for peer, ms in peers.items()]
    for each in of_model:
        each["speedup"] = each["reference_value"] / each["value"]
    assert "| M, 8 tokens | 4 | 3 | 2 (2.00x, **1.50x**) | 1.9 |" in tables.model_layers(tables.Records(of_model))
