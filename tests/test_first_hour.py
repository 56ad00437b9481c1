"""Unfinished and foreign checkpoints get a sentence before training."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torchtitan.config import ConfigManager

from tests.layer import refused
from titan_fp8moe.torchtitan.first_hour import check_resumption


@pytest.fixture
def check(tmp_path):
    """Checks a job with two whole checkpoints of two data-parallel ranks, after steps 8 and 16. Expects an error with
    these words."""
    job = ConfigManager().parse_args(["--checkpoint.enable", f"--job.dump_folder={tmp_path}"])
    for step in (8, 16):
        state = {"w": torch.randn(64, 64), "dataloader.dp_rank_0": b"0" * 9, "dataloader.dp_rank_1": b"1" * 9}
        state |= {"optimizer.state.w.step": torch.ones(()), "lr_scheduler.last_epoch": step, "train_state.step": step}
        dcp.save(state, checkpoint_id=tmp_path / f"checkpoint/step-{step}", no_dist=True)

    def check(*said, replicas=1, **settings):
        vars(job.checkpoint).update(dict(load_step=-1, exclude_from_loading=[], folder="checkpoint") | settings)
        with refused(*said):
            check_resumption(job, SimpleNamespace(dp_replicate=replicas, dp_shard=2))

    check()
    return check


@pytest.fixture
def step(tmp_path):
    return lambda number: tmp_path / f"checkpoint/step-{number}"


def test_a_save_did_not_finish(check, step):
    """The last one; then any. Other folders and other jobs have none."""
    check(folder="none")
    (step(16) / ".metadata").unlink()
    check()
    (step(8) / ".metadata").unlink()
    check("has step-8, step-16, but no .metadata in any", "begin with step 1; move them")
    check(enable=False)


def test_a_seed_checkpoint_of_one_rank(check, step, tmp_path):
    """Of step 0 torchtitan loads the model only, whatever the ranks are."""
    dcp.save({"w": torch.ones(4), "dataloader.dp_rank_0": b"0"}, checkpoint_id=step(0), no_dist=True)
    check(load_step=0)
    for number in (8, 16):
        step(number).rename(tmp_path / str(number))
    check()


def test_damaged(check, step):
    path = step(16) / ".metadata"
    path.write_bytes(path.read_bytes()[:100])
    check("cannot be read", "damaged; remove", "step-16 to resume from the one before")
    check(load_step=8)


def test_another_number_of_ranks(check):
    check("saved on 2 data-parallel ranks, and this job has 4", "exclude_from_loading", replicas=2)
    check(replicas=2, exclude_from_loading=["dataloader"])


def test_the_model_only(check, step):
    """The last save of torchtitan's defaults; a whole one before it can be named, and it begins another job."""
    dcp.save({"w": torch.ones(4)}, checkpoint_id=step(20), no_dist=True)
    check("step-20 holds the model only", "load_step = 16", "initial_load_path")
    check("without train_state: ", exclude_from_loading=["optimizer", "lr_scheduler"])
    check(exclude_from_loading=["optimizer", "lr_scheduler", "train_state"])
    check(load_step=16)
    step(21).mkdir()  # in Hugging Face's format
    (step(21) / "model.safetensors.index.json").write_text("{}")
    check("step-21 holds the model only", "load_step = 20", "initial_load_in_hf")
