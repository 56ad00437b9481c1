"""Trains with torchtitan's own trainer from one checkpoint to another, on CPU processes.

    torchrun --nproc_per_node N checkpoint_worker.py OUT_DIR RUN...

Run R of :data:`RUNS` has OUT_DIR/R as its dump folder. Rank 0 writes OUT_DIR/R.pt: {"losses", "loaded", "saved"}, the
loss of each step and the full state before the first and after the last one; or {"error"}.
"""

import itertools
from pathlib import Path

import torch
import torch.distributed as dist
import torchtitan.train

from tests.distributed.cases import BASE, GLOBAL_BATCH, SHORT
from tests.distributed.runner import run_all, whole
from tests.distributed.worker import RecordingTrainer

NUM_BATCHES = 2

COMMON = [
    *BASE,
    f"--training.seq_len={SHORT}",
    "--optimizer.lr=4e-3",
    "--lr_scheduler.total_steps=100",  # runs that stop early are on the same schedule
    "--metrics.log_freq=1",
    "--checkpoint.enable",
    "--checkpoint.interval=2",
]
FP8 = ["--model.converters=fp8_flow_moe"]
KEEP_ALL = ["--checkpoint.no_last_save_model_only"]  # the last checkpoint, too, can be resumed
TO_HF = ["--checkpoint.last_save_in_hf"]
FROM_HF = ["--checkpoint.initial_load_in_hf"]


def steps(n: int) -> list[str]:
    return [f"--training.steps={n}"]


def model_of(path: str) -> list[str]:
    return [f"--checkpoint.initial_load_path={{out}}/{path}"]


def resume(path: str) -> list[str]:
    return [*model_of(path), "--checkpoint.no_initial_load_model_only"]


def expert_parallel(ranks: int) -> list[str]:
    return [f"--parallelism.expert_parallel_degree={ranks}", f"--training.local_batch_size={GLOBAL_BATCH // ranks}"]


EP2, EP4 = expert_parallel(2) + FP8, expert_parallel(4) + FP8
FSDP2 = [f"--training.local_batch_size={GLOBAL_BATCH // 2}", *FP8]
FP8_GATHER = ["--fp8_flow_moe.fp8_all_gather"]
QUANTIZED = [*model_of("quantized"), *FROM_HF, "--checkpoint.initial_load_in_hf_quantized"]
# Another data-parallel degree cannot continue the dataloader's position.
ANY_RANKS = ["--checkpoint.exclude_from_loading=dataloader"]

ONE_RANK = {
    "bf16": [*steps(6), *KEEP_ALL],
    "fp8_from_bf16": [*steps(4), *KEEP_ALL, *FP8, *resume("bf16/checkpoint/step-2")],
    "bf16_from_fp8": [*steps(6), *resume("fp8_from_bf16/checkpoint/step-4")],
    "bf16_to_hf": [*steps(4), *TO_HF, *resume("bf16/checkpoint/step-2")],
    "fp8_to_hf": [*steps(4), *TO_HF, *FP8, *resume("bf16/checkpoint/step-2")],
    "fp8_from_hf": [*steps(1), *FP8, *FROM_HF, *model_of("bf16_to_hf/checkpoint/step-4")],
    "bf16_from_hf": [*steps(1), *FROM_HF, *model_of("fp8_to_hf/checkpoint/step-4")],
    "quantized": [*steps(1), *FP8, *QUANTIZED],
}
TWO_RANKS = {
    "ep2": [*steps(4), *EP2, *TO_HF],
    "ep2_from_seed": [*steps(1), *EP2, *model_of("seed/checkpoint/step-0")],
    "ep2_from_hf": [*steps(1), *EP2, *FROM_HF, *model_of("bf16_to_hf/checkpoint/step-4")],
    "ep2_quantized": [*steps(1), *EP2, *QUANTIZED],
    "fsdp2_quantized": [*steps(1), *FSDP2, *QUANTIZED],
    "fsdp2_fp8_gather": [*steps(4), *KEEP_ALL, *FSDP2, *FP8_GATHER, *resume("bf16/checkpoint/step-2"), *ANY_RANKS],
}
FOUR_RANKS = {"ep4_from_ep2": [*steps(4), *EP4, *resume("ep2/checkpoint/step-2"), *ANY_RANKS]}
RUNS = ONE_RANK | TWO_RANKS | FOUR_RANKS


def arguments(run: str, out: Path) -> list[str]:
    """torchtitan's command line for a run; ``out`` has the tokenizer and the data."""
    own = [arg.format(out=out) for arg in RUNS[run]]
    # A run's own local batch size replaces this one; with one rank it is the global batch.
    batch = [f"--training.local_batch_size={GLOBAL_BATCH}"]
    data = ["--training.dataset=c4_test", f"--training.dataset_path={out}/data"]
    return [*COMMON, *batch, f"--job.dump_folder={out}/{run}", f"--model.hf_assets_path={out}/tokenizer", *data, *own]


class CheckpointTrainer(RecordingTrainer):
    """Keeps losses, and the state before the first step and after the last."""

    def __init__(self, job_config):
        super().__init__(job_config)
        self.losses, self.loaded = {}, None
        self.metrics_processor.log = lambda step, loss, *args, **kwargs: self.losses.update({step: float(loss)})

    def batch_generator(self, data_iterable):
        """NUM_BATCHES fixed global batches over and over; every run sees the same one in the same step."""
        micro = self.gradient_accumulation_steps
        batches = list(itertools.islice(super().batch_generator(data_iterable), NUM_BATCHES * micro))
        return itertools.islice(itertools.cycle(batches), self.step % NUM_BATCHES * micro, None)

    def train_step(self, data_iterator):
        if self.loaded is None:
            self.loaded = self.full_state(with_optimizer=self.step > 1)
        super().train_step(data_iterator)

    def full_state(self, with_optimizer: bool) -> dict[str, torch.Tensor]:
        """Whole tensors by their names in a checkpoint; collective."""
        states = self.checkpointer.states
        state = dict(states["model"].state_dict())
        if with_optimizer:
            state |= {f"optimizer.{k}": v for k, v in states["optimizer"].state_dict().items() if torch.is_tensor(v)}
        return {k: whole(v).detach().clone() for k, v in state.items()}


def run(name: str, out: Path) -> dict:
    trainer = CheckpointTrainer(torchtitan.train.ConfigManager().parse_args(arguments(name, out)))
    try:
        trainer.train()
        return {"losses": trainer.losses, "loaded": trainer.loaded, "saved": trainer.full_state(with_optimizer=True)}
    finally:
        trainer.close()


def main() -> None:
    dist.init_process_group("gloo")  # one for all runs: torchtitan uses what exists
    # The trainer ends with a pause in which the other ranks may finish.
    torchtitan.train.time.sleep = lambda seconds: None
    run_all(run)


if __name__ == "__main__":
    main()
