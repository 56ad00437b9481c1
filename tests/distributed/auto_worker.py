"""``dispatch = "auto"`` under torchtitan's trainer, against the all-to-all, bit for bit, while the routing jumps.

    torchrun --nproc_per_node N auto_worker.py DIR [CASE...]

DIR: with the tokenizer and the data of the layouts. CASE: of CASES, by default all.
"""

import logging
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torchtitan.train
from torch._dynamo.utils import counters
from torchtitan.models.moe.moe import TokenChoiceTopKRouter

import titan_fp8moe.torchtitan  # noqa: F401  registers the flavor tiny
from tests.distributed.cases import BASE, COMPILE, GLOBAL_BATCH, INTERLEAVED_ZB, LONG, ONE_BY_ONE, OP_AC, _parallel
from tests.distributed.runner import batches, check, end, start
from tests.distributed.worker import VOCAB
from titan_fp8moe.dispatch import auto

STEPS, JUMPS = 5, (4, 5)
SPLIT = dict(pp=2) | INTERLEAVED_ZB | ONE_BY_ONE  # halves of a backward
CASES = {"eager": {}, "compiled": COMPILE, "checkpointed": COMPILE | OP_AC, "split": SPLIT}


class JumpingTrainer(torchtitan.train.Trainer):
    """Every expert gets equally many tokens, but in the steps of JUMPS all go to one rank of the first two, an
    expert-parallel group."""

    def batch_generator(self, data_iterable) -> Iterator:
        training = self.job_config.training
        sizes = GLOBAL_BATCH, training.seq_len, training.local_batch_size, VOCAB
        for inputs, labels in batches(self.parallel_dims, *sizes):
            yield {"input": inputs}, labels

    def biases(self) -> list[torch.Tensor]:
        return [b for part in self.model_parts for n, b in part.named_buffers() if n.endswith("expert_bias")]

    def routers(self) -> list[Any]:
        return [m for part in self.model_parts for m in part.modules() if isinstance(m, TokenChoiceTopKRouter)]

    def run(self) -> tuple[list[float], list[torch.Tensor], list[bool], list[int]]:
        losses, fast, graphs = [], [], []
        for part in self.model_parts:
            if part.tok_embeddings is not None:
                part.tok_embeddings.register_forward_hook(lambda *args: torch.nn.functional.dropout(args[-1], 0.1))
        self.metrics_processor.log = lambda step, loss, *args, **kwargs: losses.append(float(loss))
        self.metrics_processor.should_log = lambda step: True
        data = self.batch_generator(None)
        for self.step in range(1, STEPS + 1):
            kept = [bias.clone() for bias in self.biases()]
            jumps = self.step in JUMPS and dist.get_rank() < 2
            for router in self.routers():
                router._debug_force_load_balance = not jumps
            if jumps:
                for bias in self.biases():
                    bias[: len(bias) // 2] += 100
            fast.append(auto.is_fast())
            if auto.is_fast() and self.step == 4:
                auto._state.room = "1.0"  # graphs are made again, for less than the first jump needs
            before = counters["stats"]["unique_graphs"]
            self.train_step(data)
            graphs.append(counters["stats"]["unique_graphs"] - before)
            if jumps:
                for bias, before in zip(self.biases(), kept, strict=True):
                    bias.copy_(before)
        parameters = [p.detach().clone() for part in self.model_parts for p in part.parameters()]
        parameters = [getattr(p, "_local_tensor", p) for p in parameters]
        return losses, [*parameters, *self.biases()], fast, graphs


def train(folder: str, dispatch: str, overrides: dict) -> tuple[list[float], list[torch.Tensor], list[bool], list[int]]:
    torch._dynamo.reset()
    with tempfile.TemporaryDirectory() as dump:
        args = [*BASE, f"--job.dump_folder={dump}", f"--model.hf_assets_path={folder}/tokenizer"]
        args += ["--training.dataset=c4_test", f"--training.dataset_path={folder}/data"]
        args += _parallel(
            GLOBAL_BATCH * overrides.get("pp", 1) // dist.get_world_size(),
            ep=2,
            **LONG,
            fp8_flow_moe__dispatch=dispatch,
            **overrides,
        )
        trainer = JumpingTrainer(torchtitan.train.ConfigManager().parse_args(args))
        try:
            return trainer.run()
        finally:
            trainer.close()


class Records(logging.Handler):
    def __init__(self):
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def main() -> None:
    start()
    auto.CALM_STEPS = 2
    records = Records()
    auto.logger.addHandler(records)
    auto.logger.setLevel(logging.INFO)
    for name in sys.argv[2:] or CASES:
        overrides = CASES[name]
        want = train(sys.argv[1], "all_to_all", overrides)
        records.messages.clear()
        got = train(sys.argv[1], "auto", overrides)
        check(f"{name}: losses {got[0]} are {want[0]}", got[0] == want[0])
        check(f"{name}: weights and biases", all(map(torch.equal, got[1], want[1])))
        # Two calm steps, two over symmetric memory, the first jump runs again; the next attempt waits.
        check(f"{name}: {got[2]}", got[2] == [False, False, True, True, False])
        check(f"{name}: both layers share a graph: {got[3]}", got[3][2] == ("compile__enable" in CASES[name]))
        check(f"{name}: {records.messages}", [("run again" in m) for m in records.messages] == [False, True])
        check(f"{name}: nothing changes the way of another setting", not any(want[2]))
    end()


if __name__ == "__main__":
    main()
