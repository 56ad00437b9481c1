"""Checks the checkpoint that a job would resume from: torchtitan 0.2.2 finds some mistakes late, or begins anew."""

import re
from pathlib import Path

from torch.distributed.checkpoint import FileSystemReader
from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims

_RESUMED = "optimizer", "lr_scheduler", "train_state"  # besides the model, and data that TorchFT has elsewhere


def check_resumption(job: JobConfig, dims: ParallelDims) -> None:
    """Whether torchtitan will resume, and from a checkpoint that fits the ranks. PyTorch says which file is damaged.

    Raises:
        ValueError: there are checkpoints, but none that torchtitan would take: it would begin with step 1. Or the one
            that it takes has no readable metadata, holds the model only, or was saved on another number of
            data-parallel ranks.
    """
    settings = job.checkpoint
    folder = Path(job.job.dump_folder) / settings.folder
    if not settings.enable or not folder.is_dir():
        return
    found = {int(match[1]): path for path in folder.iterdir() if (match := re.fullmatch(r"step-(\d+)", path.name))}
    marks = ".metadata", "model.safetensors.index.json"  # by which torchtitan knows a checkpoint
    known = [step for step, path in found.items() if any((path / mark).is_file() for mark in marks)]
    step = max(known, default=-1) if settings.load_step == -1 else settings.load_step
    if found and not known and settings.load_step == -1:
        raise ValueError(
            f"{folder} has {', '.join(f'step-{n}' for n in sorted(found))}, but no .metadata in any: the saves did not "
            "finish, and torchtitan would begin with step 1; move them away to do so, or set another job.dump_folder"
        )
    if step not in known:
        return
    path, before = found[step], max((n for n in known if n < step), default=None)
    in_hf = not (path / ".metadata").is_file()
    try:
        keys = [] if in_hf else [*FileSystemReader(path).read_metadata().state_dict_metadata]
    except Exception as error:  # unpickling half a file raises many kinds
        raise ValueError(
            f"{path / '.metadata'} cannot be read ({error!r}): the checkpoint is damaged; remove {path} to resume from "
            "the one before, or set checkpoint.load_step"
        ) from error
    if step == 0:  # a seed checkpoint that one rank has made: torchtitan loads the model only
        return
    excluded = settings.exclude_from_loading
    missing = [name for name in _RESUMED if name not in excluded and not any(key.startswith(name) for key in keys)]
    if missing:
        resume = "" if before is None else f"checkpoint.load_step = {before} to resume from the one before, or "
        raise ValueError(
            f"{path} holds the model only, without {', '.join(missing)}: torchtitan cannot resume from it; set {resume}"
            f"another job.dump_folder and checkpoint.initial_load_path = {str(path)!r} to begin with its weights"
            f"{', with checkpoint.initial_load_in_hf' * in_hf}. checkpoint.last_save_model_only = false saves the rest"
        )
    saved, ranks = {key for key in keys if key.startswith("dataloader.dp_rank_")}, dims.dp_replicate * dims.dp_shard
    if saved and len(saved) != ranks and "dataloader" not in excluded:
        raise ValueError(
            f"{path} was saved on {len(saved)} data-parallel ranks, and this job has {ranks}: torchtitan cannot resume "
            "the data where it was; set checkpoint.exclude_from_loading = ['dataloader'] to begin the corpus anew. A "
            "dry run has the fewest ranks that the degrees allow, unless --world-size says otherwise"
        )
