"""Trains a small MoE of Transformers on Python sources with Trainer, without and with FP8 experts.

    pip install -e '.[transformers]'   # in a checkout of this repository
    python examples/finetune_transformers.py

Nothing is downloaded: the model is a Qwen3-MoE with random weights, its tokens are the bytes of the standard library.
Both runs begin with the same weights and see the same batches. Their losses and speeds are printed side by side. On one
Hopper GPU the model is bf16, with 64 experts of Qwen3-30B-A3B's dims in each layer. On a CPU it is fp32 and has 4M
parameters. A CPU emulates FP8, so its speed means nothing.

For a model of your own replace ``make_model`` with ``AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16,
experts_implementation="fp8_flow")``, and ``read_sequences`` with your data.
"""

import argparse
import itertools
import statistics
import sysconfig
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import (
    PrinterCallback,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from titan_fp8moe import transformers as fp8

CUDA = torch.cuda.is_available()
DTYPE = torch.bfloat16 if CUDA else torch.float32  # many CPUs are slow in bf16
ATTENTION = SDPBackend.CUDNN_ATTENTION if CUDA else SDPBackend.MATH  # whatever PyTorch would choose
DIMS = {
    "tiny": dict(hidden_size=128, moe_intermediate_size=128, num_experts=8, num_experts_per_tok=2, head_dim=32),
    "cpu": dict(hidden_size=256, moe_intermediate_size=256, num_experts=8, num_experts_per_tok=2, head_dim=64),
    "gpu": dict(hidden_size=2048, moe_intermediate_size=768, num_experts=64, num_experts_per_tok=8, head_dim=128),
}


def make_model(size: str) -> Qwen3MoeForCausalLM:
    """A model of bytes with random weights, the same in every call."""
    torch.manual_seed(0)
    dims = DIMS[size]
    heads = dims["hidden_size"] // dims["head_dim"]
    config = Qwen3MoeConfig(
        vocab_size=256,
        intermediate_size=dims["moe_intermediate_size"],
        num_hidden_layers=4 if size == "gpu" else 2,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        bos_token_id=None,
        eos_token_id=None,
        **dims,
    )
    return Qwen3MoeForCausalLM(config).to("cuda" if CUDA else "cpu", DTYPE)


def read_sequences(count: int, length: int) -> list[dict[str, Tensor]]:
    """The first bytes of the standard library, in sequences as Trainer takes them."""
    text, needed = bytearray(), count * length
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
    rows = torch.frombuffer(text, dtype=torch.uint8)[:needed].long().view(-1, length)
    return [{"input_ids": row, "labels": row} for row in rows]


class Clock(TrainerCallback):
    """Times steps; each ends with its loss, for which the host waits."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_log(self, *_: object, **__: object) -> None:
        self.ends.append(time.perf_counter())

    def median_s(self) -> float:
        """Of the second half: the first steps compile kernels."""
        ends = self.ends[len(self.ends) // 2 - 1 : -1]  # the last entry is Trainer's summary
        return statistics.median(end - begin for begin, end in itertools.pairwise(ends))


def train(implementation: str, size: str, steps: int, batch: int, length: int) -> tuple[list[float], float]:
    """Losses of all steps, and tokens per second."""
    model, clock = make_model(size), Clock()
    model.set_experts_implementation(implementation)
    if implementation == "fp8_flow":
        print(f"in FP8: {', '.join(fp8.converted(model))}")
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(  # with gradient checkpointing: register(Fp8FlowMoEConfig(recompute="none"))
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=batch,
            learning_rate=3e-4 if size == "gpu" else 2e-3,
            warmup_steps=steps // 10,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=not CUDA,
        )
        data = read_sequences(steps * batch, length)
        trainer = Trainer(model, arguments, train_dataset=data, callbacks=[clock])
        trainer.remove_callback(PrinterCallback)
        with sdpa_kernel(ATTENTION):
            trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, batch * length / clock.median_s()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--tiny", action="store_true", help="a smaller model, for tests")
    args = parser.parse_args()
    if args.steps < 6:
        parser.error("--steps must be at least 6")
    size = "tiny" if args.tiny else "gpu" if CUDA else "cpu"
    batch, length = (4, 64) if args.tiny else (4, 4096) if CUDA else (8, 256)

    fp8.register()
    results = {
        name: train(implementation, size, args.steps, batch, length)
        for name, implementation in (("bf16" if CUDA else "fp32", "grouped_mm"), ("FP8-Flow", "fp8_flow"))
    }
    print(f"{'':>8} {'first loss':>10} {'last loss':>10} {'tokens/s':>10}")
    for name, (losses, speed) in results.items():
        print(f"{name:>8} {losses[0]:>10.4f} {losses[-1]:>10.4f} {speed:>10,.0f}")
    (wanted, _), (got, _) = results.values()
    print(f"last loss {got[-1] / wanted[-1] - 1:+.2%} from {next(iter(results))}")


if __name__ == "__main__":
    main()
