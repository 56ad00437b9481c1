"""Does expert parallelism change training? The same batches on one process and on several, in bf16 and in FP8.

    python -m experiments.convergence.expert_parallel --out experiments/convergence [--ranks 2] [--steps 100]

The model is ``tiny``, with shared experts and a dense FFN; every rank of the second run holds its part of the experts.
bf16 says what another order of the sums is worth: one process autocasts fp32 weights, several shard them with FSDP.
Processes run on GPUs if there are enough, else on the CPU.
"""

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch

from experiments.convergence.data import ShuffledWindows, write_tokens
from titan_fp8moe.testing import write_records

CORPUS = Path("outputs/convergence/small_corpus")
RUNS = Path("outputs/convergence/expert_parallel")
INITIAL = RUNS / "initial.pt"
SEQUENCES, LENGTH, SEED = 8, 256, 0
RECIPES = {"bf16": [], "balanced": ["fp8_flow_moe"]}


def work(recipe: str, ranks: int, steps: int) -> None:
    """Trains in this process, one of ``ranks``, and logs the loss of all of them to TensorBoard."""
    from dataclasses import replace

    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
    from torchtitan.config import ConfigManager, JobConfig
    from torchtitan.protocols.train_spec import get_train_spec, register_train_spec
    from torchtitan.tools.logging import init_logger
    from torchtitan.train import Trainer

    from experiments.convergence.train import FLAVORS

    def build_dataloader(dp_world_size: int, dp_rank: int, job_config: JobConfig, **kwargs) -> ShuffledWindows:
        return ShuffledWindows(CORPUS, "train", LENGTH, SEQUENCES, SEED, dp_rank, dp_world_size)

    spec = get_train_spec("deepseek_v3")
    flavors = FLAVORS["deepseek_v3"]
    register_train_spec(
        "deepseek_v3_convergence",
        replace(spec, model_args=flavors, build_tokenizer_fn=None, build_dataloader_fn=build_dataloader),
    )
    settings = {
        "job.config_file": Path(__file__).with_name("config.toml"),
        "job.dump_folder": RUNS / name(recipe, ranks),
        "model.flavor": "tiny",
        "training.local_batch_size": SEQUENCES // ranks,
        "training.seq_len": LENGTH,
        "training.steps": steps,
        "lr_scheduler.warmup_steps": steps // 5,
        "parallelism.expert_parallel_degree": ranks,
        "metrics.log_freq": 1,
        "debug.seed": SEED,
    }
    init_logger()
    config = ConfigManager().parse_args(
        [*(f"--{key}={value}" for key, value in settings.items()), "--metrics.enable_tensorboard"]
    )
    config.model.converters = RECIPES[recipe]
    trainer = Trainer(config)
    (model,) = trainer.model_parts
    if ranks == 1:
        torch.save(model.state_dict(), INITIAL)
    else:  # ranks draw other numbers for their shards
        options = StateDictOptions(full_state_dict=True)
        set_model_state_dict(model, torch.load(INITIAL, map_location=trainer.device.type), options=options)
    trainer.train()
    trainer.close()
    torch.distributed.destroy_process_group()


def name(recipe: str, ranks: int) -> str:
    return f"{recipe}-ep{ranks}"


def run(recipe: str, ranks: int, steps: int) -> np.ndarray:
    """The loss of each step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = RUNS / name(recipe, ranks)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    command = ["torchrun", "--standalone", f"--nproc_per_node={ranks}", "-m", "experiments.convergence.expert_parallel"]
    command += ["--worker", recipe, "--ranks", str(ranks), "--steps", str(steps)]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    if torch.cuda.device_count() < ranks:
        environ["CUDA_VISIBLE_DEVICES"] = ""
    with (folder / "output.log").open("w") as log:
        done = subprocess.run(
            [sys.executable, "tools/launch.py", *command], stdout=log, stderr=subprocess.STDOUT, env=environ
        )
    if done.returncode:
        raise SystemExit(f"{name(recipe, ranks)} failed: {(folder / 'output.log').read_text().splitlines()[-1]}")
    (events,) = (folder / "tb").iterdir()
    log = EventAccumulator(str(events), size_guidance={"scalars": 0})
    log.Reload()
    return np.array([event.value for event in log.Scalars("loss_metrics/global_avg_loss")])


def build_corpus() -> None:
    if not (CORPUS / "train.npy").exists():
        command = [sys.executable, "tools/build_corpus.py", "--out", str(CORPUS), "--vocab-size", "8192"]
        subprocess.run([*command, "--max-bytes", "6000000"], check=True)
        write_tokens(CORPUS, "train")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder of results.json")
    parser.add_argument("--ranks", type=int, default=2, help="of expert parallelism (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=100, help="default: %(default)s")
    parser.add_argument("--worker", choices=RECIPES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return work(args.worker, args.ranks, args.steps)
    build_corpus()
    losses = {(recipe, ranks): run(recipe, ranks, args.steps) for recipe in RECIPES for ranks in (1, args.ranks)}
    records = []
    device = "GPUs" if torch.cuda.device_count() >= args.ranks else "CPU"
    shape = f"tiny, {SEQUENCES} x {LENGTH} tokens, {args.steps} steps, EP {args.ranks}, {device}"
    print(f"{shape}: deviation of the training loss")
    print(f"{'':36}{'mean':>9}{'largest':>9}{'last 10 steps':>15}")
    pairs = {recipe: ((recipe, args.ranks), (recipe, 1)) for recipe in RECIPES}
    pairs |= {f"balanced, EP {ranks}, from bf16": (("balanced", ranks), ("bf16", ranks)) for ranks in (1, args.ranks)}
    for title, (one, other) in pairs.items():
        title = f"{title}, EP {args.ranks} from one process" if title in RECIPES else title
        mine, theirs = losses[one], losses[other]
        apart = mine / theirs - 1
        final = mine[-10:].mean() / theirs[-10:].mean() - 1
        print(f"{title:36}{np.abs(apart).mean():9.3%}{np.abs(apart).max():9.3%}{final:+15.3%}")
        records.append(
            dict(name=f"expert_parallel {title}", shape=shape, value=float(np.abs(apart).mean()),
                 largest=float(np.abs(apart).max()), last_10_steps=float(final), unit="of the loss, mean of the steps",
                 reference=name(*other), reference_value=float(theirs[-10:].mean()), speedup=None)
        )  # fmt: skip
    if args.out:
        write_records(args.out / "results.json", records)


if __name__ == "__main__":
    main()
