"""Before a job trains: dry runs of every file in train_configs, and what is wrong with its checkpoint."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torchtitan.config import ConfigManager

from tests.layer import refused
from tests.processes import run_script
from titan_fp8moe.dispatch import auto
from titan_fp8moe.torchtitan.dry_run import load, smallest_world_size
from titan_fp8moe.torchtitan.first_hour import check_resumption

ROOT = Path(__file__).parent.parent
CONFIGS = sorted((ROOT / "train_configs").glob("*.toml"))
EXPECTED = {  # lines of the dry run: the number of ranks, and w1 of the routed experts on rank 0
    "debug": ("1 ranks", "w1 (8, 256, 256), on this rank (8, 256, 256)"),
    "debugmodel": ("1 ranks", "w1 (8, 256, 256), on this rank (8, 256, 256)"),
    "deepseek_v3_16b": ("8 ranks", "w1 (64, 1408, 2048), on this rank (8, 1408, 2048)"),
    "deepseek_v3_16b_short": ("1 ranks", "w1 (64, 1408, 2048), on this rank (64, 1408, 2048)"),
    "qwen3_30b_a3b": ("8 ranks", "w1 (128, 768, 2048), on this rank (16, 768, 2048)"),
    "qwen3_235b_a22b": ("64 ranks", "w1 (128, 1536, 4096), on this rank (2, 1536, 4096)"),
    "deepseek_v3_671b": ("256 ranks", "w1 (256, 2048, 7168), on this rank (8, 2048, 7168)"),
}


def dry_run(*arguments: str | Path, before: str = "") -> str:
    """Output of the dry run, and what training would lack here: most files name a tokenizer that is not."""
    program = f"{before}\nfrom titan_fp8moe.torchtitan.dry_run import main\nmain()"
    done = run_script("-c", program, *arguments)
    assert done.returncode == 0 or "error: training would fail here: " in done.stderr, done.stderr
    return done.stdout + (done.stderr.splitlines()[-1] if done.returncode else "")


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_config_builds(config: Path):
    ranks, experts = EXPECTED[config.stem]
    output = dry_run(config, "--model.hf_assets_path=/no/such")  # the quickstart may have made a corpus here
    assert not [words for words in ("converters fp8_flow_moe", ranks, experts) if words not in output], output
    assert re.search(r"^memory    activations [\d.]+ GiB, peak about [\d.]+ GiB (at|in) ", output, re.MULTILINE)
    assert re.search(r"^fp8       \d+ MoE layers, .* in FP8; dry run; ", output, re.MULTILINE)
    assert output.splitlines()[-1].startswith("error: training would fail here: model.hf_assets_path = ")


def test_a_job_that_has_its_data(tmp_path: Path):
    """It lists what stays in bf16, and lacks nothing, or one of its two data sets. Nor need it convert anything."""
    config, data = ROOT / "train_configs/debug.toml", tmp_path / "data"
    data.mkdir()
    (data / "tokenizer.json").touch()
    job = f"--model.hf_assets_path={data}", f"--training.dataset_path={data}", "--fp8_flow_moe.filter_fqns=layers.1."
    output = dry_run(config, *job)
    assert "error" not in output and "\n          not in FP8: layers.1.moe, layers.1." in output
    plain = dry_run("experiments/throughput/train.toml", "--model.name=llama3", "--model.flavor=debugmodel")
    assert "llama3 debugmodel" in plain and "converters none" in plain
    missing = dry_run(config, *job, "--validation.enable", "--validation.dataset_path=/no/such")
    assert "here: validation.dataset_path = '/no/such' does not exist" in missing.splitlines()[-1]


def test_says_what_auto_will_do():
    """The peaks are those of ``symmetric`` with such buffers; on four H200s the smaller one was 89.4 GiB."""
    job = """
        experiments/throughput/train.toml --world-size=4 --parallelism.expert_parallel_degree=4 --model.name=deepseek_v3
        --model.flavor=16B_27_layers_sdpa --training.local_batch_size=4 --model.converters=fp8_flow_moe
    """.split()  # noqa: SIM905
    output = dry_run(*job)
    way = "\ndispatch  over all-to-all, and over symmetric memory once all rows fit, if the 4 ranks share a node\n"
    assert f"{way}memory    activations " in output
    about = re.search(r"\n {10}over symmetric memory about ([\d.]+) to ([\d.]+) GiB: it has room", output)
    assert float(about[1]) == pytest.approx(89.4, rel=0.03)
    output = dry_run(*job, "--fp8_flow_moe.dispatch=symmetric", f"--fp8_flow_moe.dispatch_capacity={auto.ROOMS[-1]}")
    assert f"peak about {about[2]} GiB" in output and "over symmetric memory about" not in output
    alone = dry_run(*job, "--optimizer.early_step_in_backward")
    assert "\ndispatch  over all-to-all: optimizer.early_step_in_backward\n" in alone


def test_own_flavor_of_the_how_to_builds(tmp_path: Path):
    """The config module of docs/how-to.md as it is printed there: Kimi-K2, a flavor of deepseek_v3."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/how-to.md").read_text(), re.DOTALL)
    (code,) = [block for block in blocks if "K2" in block]
    (tmp_path / "my_flavors.py").write_text(code)
    flags = "--job.custom_config_module=my_flavors", "--model.flavor=Kimi-K2", "--rank=100"
    path = f"import sys\nsys.path.insert(0, '{tmp_path}')"
    output = dry_run(ROOT / "train_configs/deepseek_v3_671b.toml", *flags, before=path)
    assert "deepseek_v3 Kimi-K2, 1,026" in output and "(384, 2048, 7168), on this rank (12, 2048, 7168)" in output


@pytest.mark.parametrize("table", [True, False])
def test_a_missing_config_module_is_named(tmp_path: Path, table: bool):
    """torchtitan would name a table that it does not know, or lack the settings."""
    text = (ROOT / "train_configs/debug.toml").read_text().replace("custom_config_module", "#")
    if not table:
        text = re.sub(r"(?s)\[fp8_flow_moe\].*?\n\n", "", text)
    (tmp_path / "job.toml").write_text(text)
    with pytest.raises(ValueError, match='set job.custom_config_module = "titan_fp8moe.torchtitan"'):
        load(str(tmp_path / "job.toml"), [])


@pytest.mark.parametrize(("degrees", "ranks"), [
    ("tensor_parallel=2", 8),  # EP spans the TP ranks, too
    ("tensor_parallel=2 expert_parallel=2", 4),  # with TP it also needs two ranks of FSDP
    ("context_parallel=4 expert_parallel=6", 12),  # or of context parallelism
    ("tensor_parallel=2 expert_tensor_parallel=2 pipeline_parallel=4 data_parallel_shard=16", 128),
])  # fmt: skip
def test_smallest_world_size(degrees: str, ranks: int):
    flags = [f"--parallelism.{degree.replace('=', '_degree=')}" for degree in degrees.split()]
    assert smallest_world_size(load(f"{ROOT}/train_configs/deepseek_v3_16b.toml", flags)) == ranks


@pytest.fixture
def check(tmp_path, monkeypatch):
    """Checks a job with two whole checkpoints of two data-parallel ranks, after steps 8 and 16. Expects an error with
    these words."""
    monkeypatch.chdir(tmp_path)
    job = ConfigManager().parse_args(["--checkpoint.enable", "--job.dump_folder=."])
    for step in (8, 16):
        state = {"w": torch.randn(64, 64), "dataloader.dp_rank_0": b"0" * 9, "dataloader.dp_rank_1": b"1" * 9}
        state |= {"optimizer.state.w.step": torch.ones(()), "lr_scheduler.last_epoch": step, "train_state.step": step}
        dcp.save(state, checkpoint_id=f"checkpoint/step-{step}", no_dist=True)

    def check(*said, replicas=1, **settings):
        vars(job.checkpoint).update(dict(load_step=-1, exclude_from_loading=[], folder="checkpoint") | settings)
        with refused(*said):
            check_resumption(job, SimpleNamespace(dp_replicate=replicas, dp_shard=2))

    check()
    return check


def test_a_save_did_not_finish(check):
    """The last one; then any. Other folders and other jobs have none."""
    check(folder="none")
    Path("checkpoint/step-16/.metadata").unlink()
    check()
    Path("checkpoint/step-8/.metadata").unlink()
    check("has step-8, step-16, but no .metadata in any", "begin with step 1; move them")
    check(enable=False)


def test_a_seed_checkpoint_of_one_rank(check):
    """Of step 0 torchtitan loads the model only, whatever the ranks are."""
    dcp.save({"w": torch.ones(4), "dataloader.dp_rank_0": b"0"}, checkpoint_id="checkpoint/step-0", no_dist=True)
    check(load_step=0)
    for step in (8, 16):
        Path(f"checkpoint/step-{step}").rename(f"moved-{step}")
    check()


def test_a_damaged_one_and_another_number_of_ranks(check):
    check("saved on 2 data-parallel ranks, and this job has 4", "exclude_from_loading", replicas=2)
    check(replicas=2, exclude_from_loading=["dataloader"])
    path = Path("checkpoint/step-16/.metadata")
    path.write_bytes(path.read_bytes()[:100])
    check("cannot be read", "damaged; remove", "step-16 to resume from the one before")
    check(load_step=8)


def test_the_model_only(check):
    """The last save of torchtitan's defaults; a whole one before it can be named, and it begins another job."""
    dcp.save({"w": torch.ones(4)}, checkpoint_id="checkpoint/step-20", no_dist=True)
    check("step-20 holds the model only", "load_step = 16", "initial_load_path")
    check("without train_state: ", exclude_from_loading=["optimizer", "lr_scheduler"])
    check(exclude_from_loading=["optimizer", "lr_scheduler", "train_state"])
    check(load_step=16)
    Path("checkpoint/step-21").mkdir()  # in Hugging Face's format
    Path("checkpoint/step-21/model.safetensors.index.json").write_text("{}")
    check("step-21 holds the model only", "load_step = 20", "initial_load_in_hf")
