"""Tables, pictures and texts of pages are what the records say."""

import re
import subprocess

import pytest

from experiments import check, headline, tables


def record(name, shape, value, reference, reference_value, date="2026-01-02", **fields):
    common = dict(hardware="1 x NVIDIA H200", commit=f"c{date[-1]}", date=date, command="python -m experiments.a.b --x")
    return dict(common, name=name, shape=shape, value=value, reference=reference, reference_value=reference_value,
                speedup=value / reference_value, **fields)  # fmt: skip


def test_pages_have_the_records_figures():
    """Also a test of each table's code, whose cells would change."""
    records = tables.read()
    for name in tables.PAGES:
        text = (tables.ROOT / name).read_text()
        assert tables.page(text, records)[0] == text, "run python -m experiments.tables"
    unmeasured, shown = tables.page("<!-- table: training -->\n<!-- end -->\n", tables.Records([]))
    assert shown == [] and unmeasured == "<!-- table: training -->\nNot measured in this state.\n<!-- end -->\n"


def test_every_table_is_on_one_page():
    texts = [(tables.ROOT / name).read_text() for name in tables.PAGES]
    found = [name for text in texts for _, name, _ in tables.MARKED.findall(text)]
    assert sorted(found) == sorted(tables.TABLES)


SHAPE = "16B, 6 layers, sdpa, local batch 4, random routing, 1 GPU"


def test_the_picture(tmp_path, monkeypatch):
    """Two bars a row, and a ratio over bf16 that is the strongest."""
    records = []
    for i, (name, shape, _) in enumerate(tables.HEADLINE.values(), 1):
        for kind in ("", " memory"):
            records += [
                record(name + kind, shape, 10.0 * i, "bf16_fused:checkpointing=none", 8.0 * i),
                record(name + kind, shape, 10.0 * i, "bf16", 5.0 * i),
            ]
    drawn = []
    monkeypatch.setattr("matplotlib.axes.Axes.text", lambda self, x, y, text, **_: drawn.append(text.strip()))
    headline.draw(tables.Records(records), tmp_path / "headline.png")
    assert drawn[:2] == ["8  bf16, fused", "10  titan_fp8moe (1.25x)"] and drawn[-1] == "40  titan_fp8moe"
    assert (tmp_path / "headline.png").stat().st_size > 0


def test_a_row_of_training_is_of_one_invocation():
    """Other checkpointing and other FP8 experts ran in calls of their own, with figures of ours of their own. The pages
    show the other tables."""
    saved, none = ("bf16_fused:checkpointing=" + how for how in ("saved", "none"))
    other, fp8 = {"command": "python -m b"}, {"command": "python -m c"}
    records = tables.Records(
        [
            record("train_16b", SHAPE, 100.0, saved, 80.0),
            record("train_16b", SHAPE, 100.0, "bf16", 50.0),
            record("train_16b", SHAPE, 96.0, none, 90.0) | other,
            record("train_16b", SHAPE, 97.0, "torchao", 40.0) | fp8,
            record("train_16b memory", SHAPE, 9.0, saved, 12.0),
            record("train_16b memory", SHAPE, 8.0, "torchao", 11.0) | fp8,
        ]
    )
    title = "16B, 6 layers, sdpa, local batch 4"
    assert tables.training(records).splitlines()[2:] == [
        f"| {title} | H200 | 50 | 80 saved | | 100 (**1.25x**) | 12 | 9 |",
        f"| {title} | H200 | | | 40 | 97 (**2.42x**) | 11 | 8 |",
    ]


RECORDS = [
    record("train_16b", SHAPE, 13429.0, "bf16", 10251.0, unit="tokens/s/GPU", spread={"ours": 0.012}),
    record("train_16b memory", SHAPE, 13.4, "bf16", 20.0, unit="GiB reserved"),
    record("moe_layer", "16B", 5.25, "bf16", 7.5, unit="ms forward + backward"),
    record("loss", "0.1B", 0.00033, "bf16", 1.0, unit="of bf16's mean", half_width=0.00014),
]
LINKED = record("gemm", "s", 158.0, "bf16", 100.0, unit="TFLOP/s") | {"commit": "c9"}


def errors(text: str, changed: tuple[str, ...] = ()) -> list[str]:
    page = check.Page(text, RECORDS, {"kernels": [LINKED]})
    return [*page.errors(lambda commits: [*changed])]


STATE = "Measured at `c2`. Since then `titan_fp8moe/` has changed in: nothing. <!-- state -->"


@pytest.mark.parametrize(
    "text,missing",
    [
        ("13,429 tokens/s instead of 10,251 tokens/s are 1.31x, in 13.4 GiB; 5.25 ms or 7.5 ms, ± 1.2%", []),
        ("+0.033% ± 0.014%, not 128x128 or 2.14.1", []),
        ("1.32x, then 13,430 tokens/s", ["1.32x", "13,430 tokens/s"]),
        ("5.26 ms, 13.5 GiB, 0.034%, 5 s", ["5.26 ms", "13.5 GiB", "0.034%", "5 s"]),
        ("1.29x in\none. 1.28x. <!-- from the log of a run: it is not kept -->", ["1.29x"]),
        ("| 1.29x | 1.28x <!-- from a paper: theirs --> | 1.27x |", ["1.29x", "1.27x"]),
        ("```\n1.29x\n```\n<!-- table: gemms -->\n1.29x\n<!-- end -->", []),
        ("* 1.31x\n* 1.58x\n* [1.31x](a/experiments/gemm)", ["1.58x"]),
    ],
)
def test_a_figure_of_the_text_needs_a_record(text, missing):
    found = errors(f"{STATE}\n\n{text}")
    assert [error.removeprefix("no record gives ").partition(";")[0] for error in found] == missing


def test_the_state_names_each_commit_and_change():
    """Also that of a record in a linked folder, and not those that are no longer cited."""
    assert errors(STATE) == [] and errors("") == []
    assert errors(STATE.replace("c2", "c1")) == [
        "the state lacks commit c2",
        "the state names commit c1, which is none",
    ]
    assert errors(f"{STATE}\n\n1.58x [here](experiments/kernels)") == ["the state lacks commit c9"]
    assert errors(STATE, ("layer",)) == ["the state lacks change of titan_fp8moe layer"]
    page = check.Page("<!-- another --> 1.58x experiments/kernels", RECORDS, {"kernels": [LINKED]})
    assert page.state(lambda _: ["layer"]) == STATE.replace("`c2`", "`c2`, `c9`").replace("nothing", "`layer`")
    points = {"points": {who: {"commit": commit} for who, commit in (("ours", "c3"), ("reference", "c4"))}}
    assert check.Page("", [RECORDS[0] | points], {}).cited() == {"c3", "c4"}


def test_what_changed_since_a_commit(tmp_path):
    def git(*args: str) -> str:
        command = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b", *args]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    def commit(text: str, *names: str) -> str:
        for name in names:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        git("add", ".")
        git("commit", "-qm", "a")
        return git("rev-parse", "--short", "HEAD")

    git("init", "-q")
    layer, own = "titan_fp8moe/layer/a.py", "titan_fp8moe/a.py"
    first, second = commit("1", layer, own, "titan_fp8moe/ops/a.py"), commit("2", layer, "README.md")
    changed = check.changed_in(tmp_path)
    assert changed({second}) == [] and changed({first + "+", second}) == ["layer"]
    commit("3", own)
    assert changed({first}) == ["layer", "top level"]


def test_unused_records_go(tmp_path, monkeypatch):
    """What a table shows stays, and what a page's text cites by name."""
    rows = [RECORDS[0], LINKED, record("ep_routed_experts x", "s", 1.0, "bf16", 1.0), RECORDS[0] | {"shape": "other"}]
    path = tmp_path / "experiments/a/results.json"
    tables.write_list(path, rows)
    (tmp_path / "page.md").write_text("<!-- table: training -->\n<!-- end -->\n")
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(tables, "PAGES", ("page.md",))
    monkeypatch.setattr(tables, "CITED", ("ep_routed_experts .*",))
    tables.prune()
    assert tables.read().all == [RECORDS[0], rows[2], rows[3]]


def test_parts_of_a_run():
    """Each says its GPUs, and ends within ten minutes."""
    command = ["bash", str(tables.ROOT / "experiments/run_all.sh"), "--list"]
    parts = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    found = [re.fullmatch(r"(\w+) +(\d) GPUs +(\d+) s  (done)?", part).groups() for part in parts]
    assert len({name for name, *_ in found}) == len(found) > 40
    assert {gpus for _, gpus, *_ in found} == {"0", "1", "2", "4"}
    assert all(0 < int(seconds) < 600 for *_, seconds, _ in found)
