"""Trains one run of a pair with torchtitan's Trainer, on one GPU or the CPU, or on the ranks of torchrun.

    python -m experiments.convergence.pair fp8-s1 --work DIR --corpus DIR [torchtitan overrides]
    python -m experiments.convergence.pair bf16-s1 --work DIR --corpus DIR --noise-after 0.25 0.5 1
    torchrun --nproc_per_node=4 -m experiments.convergence.pair fp8-s1 --work DIR --corpus DIR --model.flavor=16B

A pair is a run in FP8, the converter's defaults, and one of the strongest bf16 of experiments/throughput. Its seed
decides initialization and data order. No token is seen twice.

``DIR/NAME/log.jsonl`` gets settings, then loss and gradient norm of each step as they come: a run that is cut off can
be used as far as it came. The held-out loss is its last line.
"""

import argparse
import json
import os
import time
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torchtitan.components.metrics import BaseLogger
from torchtitan.config import ConfigManager, JobConfig
from torchtitan.models.deepseek_v3 import deepseekv3_args
from torchtitan.protocols.train_spec import get_train_spec, register_train_spec
from torchtitan.tools.logging import init_logger
from torchtitan.train import Trainer

from experiments.convergence.data import OnePass, as_batch, windows
from experiments.convergence.noise import measure
from experiments.provenance import environment
from experiments.records import script_parser
from experiments.throughput.train import CHECKPOINTING, CONVERTERS
from titan_fp8moe import check_room
from titan_fp8moe.dispatch import auto

RECIPES = {"fp8": CONVERTERS["fp8_flow"], "bf16": [*CHECKPOINTING["saved"][0], *CONVERTERS["bf16_fused"]]}
LOGGED = {"loss_metrics/global_avg_loss": "loss", "grad_norm": "grad_norm", "throughput(tps)": "tokens_per_second"}
VOCAB_SIZE = 8192


class Log(BaseLogger):
    """torchtitan's logger of metrics; writes them, and what else it is given, as lines of JSON."""

    def __init__(self, path: Path):
        self.file, self.start = path.open("w"), time.monotonic()

    def write(self, **record: Any) -> None:
        self.file.write(json.dumps(record) + "\n")
        self.file.flush()

    def log(self, metrics: dict[str, Any], step: int) -> None:
        figures = {ours: metrics[theirs] for theirs, ours in LOGGED.items()}
        self.write(step=step, **figures, seconds=round(time.monotonic() - self.start, 2))


class PairTrainer(Trainer):
    """torchtitan's Trainer with a log of its own, the held-out loss at the end, and measurements of gradient noise."""

    def __init__(self, config: JobConfig, name: str, args: argparse.Namespace):
        super().__init__(config)
        self.args, training = args, config.training
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        first = self.rank == 0
        self.metrics_processor.logger = self.log = Log(args.work / name / "log.jsonl" if first else Path(os.devnull))
        needed = training.steps * self.gradient_accumulation_steps + args.minibatches
        if needed > len(self.dataloader.order):
            raise SystemExit(f"error: a pass needs {needed} batches, {args.corpus} has {len(self.dataloader.order)}")
        self.noise_steps = {round(share * training.steps) for share in args.noise_after}
        parameters = [*self.model_parts[0].parameters()]
        sums = [(p.detach().sum(dtype=torch.float64), p.detach().norm()) for p in parameters]
        weights = [[f"{whole(value).item():.5g}" for value in each] for each in sums]  # ranks add in several orders
        self.log.write(
            name=name,
            tokens_per_step=training.global_batch_size * training.seq_len,
            steps=training.steps,
            parameters=sum(p.numel() for p in parameters),
            weights=f"{zlib.crc32(repr(weights).encode()):08x}",
            config=config.to_dict(),
            environment=environment(),
        )

    def train_step(self, data_iterator: Iterator) -> None:
        super().train_step(data_iterator)
        if self.step in self.noise_steps:
            self.log.write(step=self.step, noise=measure(self, self.dataloader.last(self.args.minibatches)))
            self.metrics_processor.time_last_log = time.perf_counter()

    def train(self) -> None:
        super().train()
        self.log.write(step=self.step, tokens_crc=f"{self.dataloader.crc:08x}", held_out_loss=self.held_out_loss())

    def held_out_loss(self) -> float:
        """The mean over windows that are spread evenly over the held-out text."""
        training = self.job_config.training
        held_out = windows(self.args.corpus, "validation", training.seq_len)
        auto.disable()  # the all-to-all takes any routing
        batch = training.local_batch_size  # of training's shape, and with gradients, so that nothing compiles again
        count = self.args.eval_windows // (batch * self.ranks)
        chosen = np.linspace(0, len(held_out) - 1, count * batch * self.ranks).astype(int)
        losses = []
        for indices in chosen.reshape(-1, batch)[self.rank :: self.ranks]:
            inputs, labels = as_batch(held_out[indices])
            with self.maybe_enable_amp:
                pred = self.model_parts[0](inputs["input"].to(self.device))
            labels = labels.to(self.device).flatten()
            losses.append(F.cross_entropy(pred.detach().flatten(0, 1).float(), labels).double())
        check_room()
        mean = torch.stack(losses).mean() / self.ranks
        dist.all_reduce(mean)
        return mean.item()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def register_models(corpus: Path, seed: int) -> None:
    def build_dataloader(job_config: JobConfig, dp_rank: int, dp_world_size: int, **_: Any) -> OnePass:
        training = job_config.training
        return OnePass(corpus, training.seq_len, training.local_batch_size, seed, dp_rank, dp_world_size)

    tiny = deepseekv3_args["tiny"]
    flavors = {
        "16B": replace(deepseekv3_args["16B_27_layers_sdpa"], vocab_size=VOCAB_SIZE),
        "16B_6_layers": replace(deepseekv3_args["16B_6_layers_sdpa"], vocab_size=VOCAB_SIZE),
        # Queries, keys and values of one size: any attention kernel takes them.
        "tiny": replace(tiny, vocab_size=VOCAB_SIZE, qk_nope_head_dim=32, moe_args=replace(tiny.moe_args)),
    }
    spec = replace(
        get_train_spec("deepseek_v3"), model_args=flavors, build_tokenizer_fn=None, build_dataloader_fn=build_dataloader
    )
    register_train_spec("deepseek_v3_pairs", spec)


def main(argv: list[str] | None = None) -> None:
    names = ", ".join(f"{recipe}-sSEED" for recipe in RECIPES)
    parser = script_parser(__doc__)
    parser.add_argument("name", help=names)
    parser.add_argument("--work", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--corpus", type=Path, required=True, help="folder of train.npy and validation.npy")
    parser.add_argument("--eval-windows", type=int, default=256, help="of the held-out text (default: %(default)s)")
    noise = "shares of the steps after which to measure gradient noise, of bf16 only"
    parser.add_argument("--noise-after", type=float, nargs="+", default=[], metavar="SHARE", help=noise)
    parser.add_argument("--minibatches", type=int, default=16, help="for gradient noise (default: %(default)s)")
    args, overrides = parser.parse_known_args(argv)
    recipe, _, seed = args.name.partition("-s")
    if recipe not in RECIPES or not seed.isdecimal() or (args.noise_after and recipe != "bf16"):
        raise SystemExit(f"error: {args.name} is none of {names}, or --noise-after stands with FP8")

    init_logger()
    (args.work / args.name).mkdir(parents=True, exist_ok=True)
    toml = Path(__file__).with_name("pairs.toml")
    config = ConfigManager().parse_args([f"--job.config_file={toml}", *overrides])
    config.job.dump_folder = str(args.work / args.name)
    config.debug.seed, config.model.converters = int(seed), RECIPES[recipe]
    register_models(args.corpus, int(seed))
    if "WORLD_SIZE" not in os.environ:
        os.environ.setdefault("LOCAL_RANK", "0")
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        trainer = PairTrainer(config, args.name, args)
        trainer.train()
        trainer.close()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
