"""README and docs: their code runs as printed, their tables and figures are those of the records. Other tests have the
code of docs/parallel.md and the flavors."""

import json
import lzma
import re
import statistics
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import titan_fp8moe
import titan_fp8moe.transformers
from experiments import check, dry_runs, tables
from tests.jobs import make_config, make_model

ROOT = Path(__file__).parents[1]
SIZES = dict(hidden_size=128, moe_intermediate_size=128, num_experts=4, num_experts_per_tok=2, num_hidden_layers=2)
SIZES |= dict(num_attention_heads=2, num_key_value_heads=2, head_dim=64, vocab_size=64)
SMALLER = {'device="cuda"': 'device="cpu"', "dim=2048, hidden_dim=1408": "dim=256, hidden_dim=128"}


def run(page: str, part: str, **names: Any) -> dict[str, Any]:
    """Runs the page's block that has ``part`` in it; returns its names."""
    (code,) = [c for c in re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL) if part in c]
    for printed, smaller in SMALLER.items():
        code = code.replace(printed, smaller)
    exec(code, names)
    return names


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved model of Transformers."""
    folder = tmp_path_factory.mktemp("model")
    transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**SIZES)).save_pretrained(folder)
    return folder


def test_readme(path: Path):
    names = dict(titan_fp8moe=titan_fp8moe, AutoModelForCausalLM=transformers.AutoModelForCausalLM, path=path)
    names |= dict(x=torch.randn(32, 256), router=nn.Linear(256, 64, bias=False))
    got = run("README.md", "RoutedExperts", **names)
    assert got["y"].shape == (32, 256) and len(titan_fp8moe.transformers.converted(got["model"])) == 2


def test_transformers_model_and_its_fp8_weights(path: Path):
    model = run("docs/how-to.md", "from_pretrained", path=path)["model"]
    sent: dict[str, torch.Tensor] = {}
    run("docs/fp8-weights.md", "fp8_tensors", model=model, send=sent.update)
    assert sent["model.layers.1.mlp.experts.3.up_proj.weight"].dtype == torch.float8_e4m3fn


def test_own_dataset():
    from torchtitan.hf_datasets.text_datasets import DATASETS

    run("docs/how-to.md", "load_dataset")
    assert DATASETS.pop("mine").sample_processor({"text": "a"}) == "a"


def test_own_dispatch():
    weights = {name: torch.randn(2, 128, 128) for name in ("w1", "w2", "w3")}
    names = dict(x=torch.randn(40, 128), counts=torch.tensor([30, 10])) | weights
    assert run("docs/own-dispatch.md", "import grouped_ffn", **names)["y"].shape == (40, 128)


def test_torchao():
    model = make_model(make_config(), q_lora_rank=128)
    run("docs/torchao.md", "quantize_(", model=model)
    kinds = {name: type(module).__name__ for name, module in model.named_modules()}
    assert kinds["layers.1.moe"].startswith("Fp8Flow") and kinds["layers.1.attention.wo"].startswith("Fp8Flow")


def test_lora():
    experts = titan_fp8moe.RoutedExperts(4, 128, 128)
    with pytest.raises(NameError, match="model_registry"):  # its second half is torchtitan 0.3's
        run("docs/finetune.md", "add_lora", experts=experts)
    assert experts.lora_A["w1"].shape[1] == 16


def test_replay(path: Path):
    model = transformers.AutoModelForCausalLM.from_pretrained(path, experts_implementation="grouped_mm")
    model.generation_config.eos_token_id, prompts = None, torch.randint(64, (2, 5))
    names = dict(model=model, prompts=prompts, F=nn.functional, sequences=torch.randint(64, (2, 25)))
    routed = run("docs/rl.md", "replay_routing(model", **names, loss=lambda out: out.logits.sum())["routed"]
    assert routed.shape[0] == 2 and routed.shape[2] == 2 and (routed[:, -1] == -1).all()


def test_tests_that_pages_name_exist():
    tests = "".join(f"{path.stem}\n{path.read_text()}" for path in (ROOT / "tests").rglob("test_*.py"))
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("experiments/*/README.md")]:
        for name in re.findall(r"\btest_\w+", page.read_text()):
            assert re.search(rf"^(def )?{name}\b", tests, re.MULTILINE), f"{page}: {name}"


def test_pages_have_their_sources_figures():
    """Also a test of each table's code, whose cells would change."""
    pages, texts = tables.Pages(tables.read()), {name: (ROOT / name).read_text() for name in tables.PAGES}
    for name, text in texts.items():
        assert pages.errors(name, text) == [], name
    assert pages.ledger.unused() == []
    found = [name for text in texts.values() for _, name, _ in tables.MARKED.findall(text)]
    assert sorted(found) == sorted(tables.TABLES)  # each on one page


def test_moved_figures_are_found():
    """Of each page, by 3 to 15% at random, in tables too."""
    pages, random, moved, found = tables.Pages(tables.read()), Random(0), 0, 0
    for name in tables.PAGES:
        text = (ROOT / name).read_text()
        for figure in check.FIGURE.finditer(check.hidden(text, check.NO_FIGURES)):
            value = float(figure[0].replace(",", "").replace(check.MINUS, "-"))
            value *= 1 + random.choice((-1, 1)) * random.uniform(0.03, 0.15)
            new = check.printed(value, figure[0])
            if new != figure[0]:
                moved += 1
                found += bool(pages.errors(name, text[: figure.start()] + new + text[figure.end() :]))
    assert moved > 900 and found / moved >= 0.97, f"{found} of {moved}"


def test_a_figure_needs_a_line():
    ledger = check.Ledger(tables.read().all)
    others = "16,384 tokens, batch 4, torch 2.11, Qwen3.5, 0.11B, arXiv 2511.02302, 80 GB, 2.14.1, `1.2x`\n"
    others += "[a](b/1.2x), https://a/1.2\n```\n1.2x\n```\n<!-- table: gemms -->\n1.2x\n<!-- end -->\n"
    figures = "1.3x, 2% and 3 ms, 4 or 5 µs, +0.1%\n0.0375, 10 to 1,159 TFLOP/s\n| 2.11x | 7 tokens/s | 5 GiB / 6 GiB"
    missing = [error.split()[3] for error in ledger.page("a new page", others + figures)[1]]
    assert missing == ["1.3", "2", "3", "4", "5", "+0.1", "0.0375", "10", "1,159", "2.11", "7", "5", "6"]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "moe16b_8")) for name in dry_runs.JOBS]
)
def test_dry_runs_have_what_tables_show(name):
    assert dry_runs.estimate(dry_runs.JOBS[name]) == check.source("dry_runs")[name]


def test_the_long_run_is_its_losses():
    """The kept metrics of every step give the records of the 3,000 steps."""
    runs = json.loads(lzma.decompress((check.HERE / "convergence/3000_steps.json.xz").read_bytes()))
    measured = {
        "training loss, last quarter": ("loss_metrics/global_avg_loss", lambda values: statistics.fmean(values[-750:])),
        "held-out loss": ("validation_metrics/loss", lambda values: values[-1]),
        "speed": ("throughput(tps)", lambda values: statistics.harmonic_mean(values[10:])),
        "memory": ("memory/max_reserved(GiB)", max),
    }
    names = {"bf16": "bf16-s1", "bf16, one bit of a weight changed": "bf16_bit-s1"}
    records = [r for r in tables.read().all if r["name"].startswith("3,000 steps: ")]
    assert len(records) == 8
    for r in records:
        tag, of = measured[r["name"].partition(": ")[2]]
        want = [of([*runs[run][tag].values()]) for run in ("fp8-s1", names[r["reference"]])]
        assert [r["value"], r["reference_value"]] == pytest.approx(want), r["name"]
