"""Models of Transformers, ``grouped_mm`` against ``fp8_flow``: speed, memory, losses and one-token forwards.

    python -m experiments.transformers.run --out experiments/transformers          # one GPU

Both implementations run the same module with the same bf16 parameters and attention, and take turns. The phases:

    eager      forward and backward of a batch: tokens/s, peak memory, loss
    training   50 steps of AdamW from the same weights on the same bytes of Python sources: losses at the end
    decode     the forward of one token of some sequences without gradients, also with Transformers' batched_mm
    compiled   the same as eager under torch.compile, with causal attention and no mask

The vocabulary has 32,768 tokens, so that the output layer does not dominate four layers.
"""

import functools
import gc
import statistics
import sysconfig
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from experiments.records import DEVICE, begin, record, script_parser, within, write_records
from experiments.timing import elapsed_ms, medians_in_turn
from titan_fp8moe import Fp8FlowMoEConfig
from titan_fp8moe.transformers import NAME, converted, register

REFERENCE, BATCHED = "grouped_mm", "batched_mm"
PHASES = ("eager", "training", "decode", "compiled")
SEQUENCES = (1, 8, 64, 256)  # of a decoding step
STEPS, SEEDS = 50, (0, 1, 2)  # of training
ROUNDS, CALLS = 5, 5  # turns, and steps in one

# Where torch is older than 2.14, compiled models build a causal mask, and attention then computes what it hides.
CAUSAL = "causal_sdpa"
AttentionInterface.register(CAUSAL, sdpa_attention_forward)
AttentionMaskInterface.register(CAUSAL, lambda *_, **__: None)


@dataclass
class Setting:
    """A model family with the dims of its layers, and the batch."""

    family: str
    shape: str
    dims: dict[str, Any]
    batch: int = 4
    length: int = 4096

    def make_model(self, seed: int = 0) -> Any:
        """The model with random bf16 weights, the same in every call."""
        torch.manual_seed(seed)
        config = getattr(transformers, f"{self.family}Config")(vocab_size=32768, pad_token_id=None, **self.dims)
        with torch.device(DEVICE):
            return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)

    def batches(self, count: int, seed: int = 0) -> Tensor:
        """(count, batch, length): bytes of the standard library's sources, others for each seed."""
        size = count * self.batch * self.length
        text, needed = bytearray(), (seed + 1) * size
        for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
            text += path.read_bytes()
            if len(text) >= needed:
                break
        rows = torch.frombuffer(text, dtype=torch.uint8)[seed * size : needed].long()
        return rows.view(count, self.batch, self.length).to(DEVICE)


MODELS = {
    "qwen3": Setting(
        "Qwen3Moe",
        "4 layers of Qwen3-30B-A3B",
        dict(
            hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_hidden_layers=4,
            num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8,
            norm_topk_prob=True,
        ),
    ),
    "deepseek_v3": Setting(
        "DeepseekV3",
        "5 layers of DeepSeek-V3 16B, one of them dense",
        dict(
            hidden_size=2048, intermediate_size=10944, moe_intermediate_size=1408, num_hidden_layers=5,
            num_attention_heads=16, num_key_value_heads=16, n_routed_experts=64, num_experts_per_tok=6, n_group=1,
            topk_group=1, first_k_dense_replace=1, n_shared_experts=2, q_lora_rank=None, kv_lora_rank=512,
            qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, routed_scaling_factor=1.0,
        ),
    ),
}  # fmt: skip


class Bench:
    """One model, whose experts switch between implementations."""

    def __init__(self, name: str, cudnn: bool):
        self.name, self.setting, self.cudnn = name, MODELS[name], cudnn
        self.model = self.setting.make_model()
        self.tokens = self.setting.batches(1)[0]

    def record(self, what: str, value: float, reference: str, reference_value: float, unit: str, **more: Any) -> dict:
        shape = f"{self.setting.shape}, {self.setting.batch} x {self.setting.length} tokens, {what}"
        shape += ", cuDNN attention" if self.cudnn and unit != "ms" else ""  # one token has PyTorch's choice
        return record(f"transformers_{self.name}", shape, unit, value, reference, reference_value, **more)

    def step(self, implementation: str, call: Any) -> Tensor:
        self.model.set_experts_implementation(implementation)
        self.model.zero_grad(set_to_none=True)
        # The only backend allowed: where cuDNN's cannot run, the call fails and no other is measured in its place.
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if self.cudnn else nullcontext():
            loss = call(input_ids=self.tokens, labels=self.tokens, use_cache=False).loss
        loss.backward()
        return loss.detach()

    def forward_backward(self, what: str, call: Any) -> list[dict]:
        losses, peaks = {}, {}
        for name in (REFERENCE, NAME):
            self.step(name, call)  # compiles
            gc.collect()
            torch.cuda.reset_peak_memory_stats()
            losses[name] = float(self.step(name, call))
            peaks[name] = torch.cuda.max_memory_allocated() / 2**30
        steps = {name: functools.partial(self.step, name, call) for name in losses}
        ms = medians_in_turn(elapsed_ms, steps, ROUNDS, times=CALLS)
        speed = {name: self.tokens.numel() / ms[name] * 1e3 for name in ms}
        more = dict(peak_gib=peaks[NAME], reference_peak_gib=peaks[REFERENCE])
        more |= dict(loss=losses[NAME], reference_loss=losses[REFERENCE])
        return [self.record(what, speed[NAME], REFERENCE, speed[REFERENCE], "tokens/s", **more)]

    def eager(self) -> list[dict]:
        return self.forward_backward("eager", self.model)

    def compiled(self) -> list[dict]:
        torch._dynamo.reset()  # the graph depends on the config
        self.model.set_attn_implementation(CAUSAL)
        compiled = torch.compile(self.model, dynamic=False)
        return self.forward_backward("torch.compile", compiled)

    def losses(self, name: str, seed: int) -> list[float]:
        """A training run's: the seed draws weights and text."""
        self.model.load_state_dict(self.setting.make_model(seed).state_dict())
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4, fused=True)
        found = []
        for tokens in self.setting.batches(STEPS, seed):
            self.tokens = tokens
            found.append(self.step(name, self.model))
            optimizer.step()
        return torch.stack(found).tolist()

    def training(self) -> list[dict]:
        """Each seed trains in FP8 and twice in bf16, whose sums have no fixed order: runs of one seed differ."""
        found = [[self.losses(name, seed) for name in (NAME, REFERENCE, REFERENCE)] for seed in SEEDS]
        self.tokens = self.setting.batches(1)[0]
        self.model.zero_grad(set_to_none=True)
        ends = [[statistics.mean(losses[-10:]) for losses in runs] for runs in found]
        ours, bf16 = (statistics.mean(end[i] for end in ends) for i in range(2))
        more = dict(gaps=[fp8 / reference - 1 for fp8, reference, _ in ends])
        more |= dict(reference_gaps=[again / reference - 1 for _, reference, again in ends])
        more |= dict(losses=[runs[0] for runs in found], reference_losses=[runs[1] for runs in found])
        what = f"loss after {STEPS} steps, mean of the last 10"
        return [self.record(what, ours, REFERENCE, bf16, "nats", **more)]

    @torch.no_grad()
    def decode(self) -> list[dict]:
        found = []
        for sequences in SEQUENCES:
            tokens = self.tokens.flatten()[:sequences, None]

            def forward(name: str, tokens: Tensor = tokens) -> None:
                self.model.set_experts_implementation(name)
                self.model(input_ids=tokens, use_cache=False)

            runs = {name: functools.partial(forward, name) for name in (NAME, REFERENCE, BATCHED)}
            for run in runs.values():
                run()  # compiles
            ms = medians_in_turn(elapsed_ms, runs, ROUNDS, times=2 * CALLS)
            what = "forward of one token" + (f" of {sequences} sequences" if sequences > 1 else "")
            found += [self.record(what, ms[NAME], other, ms[other], "ms") for other in (REFERENCE, BATCHED)]
        return found


def main() -> None:
    parser = script_parser(__doc__, out="folder of results.json", budget="phase of a model")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["qwen3"])
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=list(PHASES))
    parser.add_argument("--attention", choices=("cudnn", "default"), default="cudnn", help="of training steps")
    args = begin(parser)
    register(Fp8FlowMoEConfig())
    for name in args.models:
        bench = Bench(name, args.attention == "cudnn")
        for phase in within(args.budget, args.phases):
            records = getattr(bench, phase)()
            bench.model.set_experts_implementation(NAME)
            count = len(converted(bench.model))
            write_records(args.out / "results.json", [r | {"experts_in_fp8": count} for r in records])


if __name__ == "__main__":
    main()
