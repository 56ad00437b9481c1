"""Damaged and foreign checkpoints get a sentence before training."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torchtitan.config import ConfigManager

from tests.layer import refused
from titan_fp8moe.torchtitan.first_hour import check_resumption

DIMS = SimpleNamespace(dp_replicate=1, dp_shard=2)


@pytest.fixture
def job(tmp_path):
    """Two whole checkpoints of two data-parallel ranks, after steps 8 and 16."""
    job = ConfigManager().parse_args(["--checkpoint.enable", f"--job.dump_folder={tmp_path}"])
    for step in (8, 16):
        state = {"w": torch.randn(64, 64), "dataloader.dp_rank_0": b"0" * 9, "dataloader.dp_rank_1": b"1" * 9}
        state |= {"optimizer.state.w.step": torch.ones(()), "lr_scheduler.last_epoch": step, "train_state.step": step}
        dcp.save(state, checkpoint_id=tmp_path / f"checkpoint/step-{step}", no_dist=True)
    return job


def step(tmp_path, number):
    return tmp_path / f"checkpoint/step-{number}"


def test_whole_checkpoints_and_none(job, tmp_path):
    check_resumption(job, DIMS)
    job.job.dump_folder += "/none"
    check_resumption(job, DIMS)


def test_a_save_did_not_finish(job, tmp_path):
    """The last one; then any."""
    (step(tmp_path, 16) / ".metadata").unlink()
    check_resumption(job, DIMS)
    (step(tmp_path, 8) / ".metadata").unlink()
    with refused("has step-8, step-16, but no .metadata in any", "begin with step 1; move them"):
        check_resumption(job, DIMS)
    job.checkpoint.enable = False
    check_resumption(job, DIMS)


def test_a_seed_checkpoint_of_one_rank(job, tmp_path):
    """Of step 0 torchtitan loads the model only, whatever the ranks are; damage is found all the same."""
    dcp.save({"w": torch.ones(4), "dataloader.dp_rank_0": b"0"}, checkpoint_id=step(tmp_path, 0), no_dist=True)
    job.checkpoint.load_step = 0
    check_resumption(job, DIMS)
    step(tmp_path, 16).rename(tmp_path / "16")
    step(tmp_path, 8).rename(tmp_path / "8")
    job.checkpoint.load_step = -1
    check_resumption(job, DIMS)
    (file,) = step(tmp_path, 0).glob("*.distcp")
    file.unlink()
    with refused("has 0 of"):
        check_resumption(job, DIMS)


@pytest.mark.parametrize("how", ["shorter", "gone", "metadata"])
def test_damaged(job, tmp_path, how):
    (file,) = step(tmp_path, 16).glob("*.distcp")
    if how == "gone":
        file.unlink()
    else:
        file = file if how == "shorter" else step(tmp_path, 16) / ".metadata"
        file.write_bytes(file.read_bytes()[:100])
    message = {"metadata": "cannot be read", "gone": "has 0 of", "shorter": "has 100 of"}[how]
    with refused(message, "damaged; remove", "step-16 to resume from the one before"):
        check_resumption(job, DIMS)
    job.checkpoint.load_step = 8
    check_resumption(job, DIMS)


def test_another_number_of_ranks(job):
    dims = SimpleNamespace(dp_replicate=2, dp_shard=2)
    with refused("saved on 2 data-parallel ranks, and this job has 4", "exclude_from_loading"):
        check_resumption(job, dims)
    job.checkpoint.exclude_from_loading = ["dataloader"]
    check_resumption(job, dims)


def test_the_model_only(job, tmp_path):
    """The last save of torchtitan's defaults; a whole one before it can be named, and it begins another job."""
    dcp.save({"w": torch.ones(4)}, checkpoint_id=step(tmp_path, 20), no_dist=True)
    with refused("step-20 holds the model only", "load_step = 16", "initial_load_path"):
        check_resumption(job, DIMS)
    job.checkpoint.exclude_from_loading = ["optimizer", "lr_scheduler"]
    with refused("without train_state: "):
        check_resumption(job, DIMS)
    job.checkpoint.exclude_from_loading += ["train_state"]
    check_resumption(job, DIMS)
    job.checkpoint.exclude_from_loading, job.checkpoint.load_step = [], 16
    check_resumption(job, DIMS)


def test_the_model_only_in_hugging_faces_format(job, tmp_path):
    step(tmp_path, 20).mkdir()
    (step(tmp_path, 20) / "model.safetensors.index.json").write_text("{}")
    with refused("step-20 holds the model only", "load_step = 16", "initial_load_in_hf"):
        check_resumption(job, DIMS)
