"""Tables on pages are what the records say."""

from experiments import headline, tables


def record(name, shape, value, reference, reference_value, date="2026-01-02", **fields):
    common = dict(hardware="1 x NVIDIA H200", commit=f"c{date[-1]}", date=date, command="python -m experiments.a.b --x")
    return dict(common, name=name, shape=shape, value=value, reference=reference, reference_value=reference_value,
                speedup=value / reference_value, **fields)  # fmt: skip


def test_pages_have_the_records_figures():
    """Also a test of each table's code, whose cells would change."""
    records = tables.read()
    for name in tables.PAGES:
        text = (tables.ROOT / name).read_text()
        assert tables.page(text, records) == text, "run python -m experiments.tables"
    unmeasured = tables.page("<!-- table: training -->\n<!-- end -->\n", tables.Records([]))
    assert unmeasured == "<!-- table: training -->\n\nNot measured in this state.\n<!-- end -->\n"


def test_every_table_is_on_one_page():
    texts = [(tables.ROOT / name).read_text() for name in tables.PAGES]
    found = [name for text in texts for _, name, _ in tables.MARKED.findall(text)]
    assert sorted(found) == sorted(tables.TABLES)


SHAPE = "16B, 6 layers, sdpa, local batch 4, random routing, 1 GPU"


def sweep_point(card: str, variant: str, batch: int, speed: float | None) -> dict:
    shape = f"16B, 6 layers, sdpa, random routing, 1 GPU, {card}"
    error = None if speed else "out of memory"
    state = dict(hardware=f"1 x NVIDIA {card}", commit="c", date="2026-01-04")
    return state | dict(
        shape=shape, variant=variant, local_batch=batch, tokens_per_second=speed, memory_gib=batch, error=error
    )


def test_the_picture(tmp_path, monkeypatch):
    """Bars of the card that ran torchtitan's bf16, with checkpointing per op, and not of an ablation's run, which has
    others of ours; ratios over the strongest bf16; a curve of each variant on that card, without what did not fit."""
    shape = headline.SHAPE
    records = [
        record("train_16b", shape, 98.0, "bf16_whole", 67.0),
        record("train_16b", shape, 98.0, "bf16_fused:checkpointing=saved", 70.0),
        record("train_16b", shape, 98.0, "bf16", 49.0),
        record("train_16b", shape, 98.0, "bf16_fused:checkpointing=none", 75.0),
        record("train_16b save_h=fp8", shape, 97.0, "bf16", 54.0, "2026-01-03"),
        record("train_16b", shape, 96.0, "unfused_permute", 95.0, "2026-01-03"),
        record("train_16b", shape, 87.0, "torchao", 54.0, "2026-01-03") | {"hardware": "1 x NVIDIA H100"},
    ]
    points = [sweep_point("H200", "fp8_flow", n, speed) for n, speed in ((8, 90.0), (4, 80.0), (16, None))]
    points += [sweep_point("H200", "bf16_fused", 4, 60.0), sweep_point("H100", "fp8_flow", 4, 70.0)]
    drawn, lines = [], []
    monkeypatch.setattr("matplotlib.axes.Axes.text", lambda self, x, y, text, **_: drawn.append(text.strip()))
    monkeypatch.setattr("matplotlib.axes.Axes.plot", lambda self, x, y, *_, **__: lines.append((x, y)))
    headline.draw(tables.Records(records), points, tmp_path / "headline.png")
    assert drawn == ["49 (0.70x)", "67 (0.96x)", "70 (1.00x)", "98 (1.40x)"]
    assert lines == [((4, 8), (80.0, 90.0)), ((4,), (60.0,))] and (tmp_path / "headline.png").stat().st_size > 0


def test_a_row_of_training_is_of_one_invocation():
    """Other checkpointing and other FP8 experts ran in calls of their own, with figures of ours of their own. The table
    of checkpointing also has rows for each commit."""
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
    earlier = [record("train_16b", SHAPE, 90.0, "bf16_fused:checkpointing=full", 70.0, "2026-01-01")]
    assert tables.checkpointing(tables.Records(earlier + records.all)).splitlines()[2:] == [
        f"| {title} | per op | 50 | | 100, 9 |",
        f"| {title} | per op, bf16's grouped GEMMs kept | | 80, 12 | |",
        f"| {title} | none | | 90 | 99 |",
        f"| {title} | full | | 70 | |",
    ]
    rows = tables.headline(records).splitlines()[2:]
    assert rows[0].endswith("| H200 | 50 | 80 (fused, saved) | 100 | 2.00x | **1.25x** |")
    assert rows[1].endswith("| H200 | | 90 (fused) | 99 | | **1.10x** |")
