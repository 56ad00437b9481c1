"""LoRA on Qwen3-30B-A3B through Transformers and PEFT: experts frozen in FP8 beside the same in bf16. One GPU.

    python -m experiments.lora_qwen3_30b.run --out experiments/lora_qwen3_30b --phases full
    python -m experiments.lora_qwen3_30b.run --out OUT --tiny                                   # on a CPU

Weights are random and drawn on the device. Logits are made for 1,024 tokens at a time. The variants:

    ours          experts stored in FP8, one byte a parameter; adapters beside them
    ours merged   bf16 experts; PEFT adds the adapters to them in each forward, and FP8 quantizes the sum
    bf16          the same with Transformers' grouped_mm

The phases:

    full     all 48 layers, 2 x 4,096 tokens: tokens/s and peak memory of a step; bf16 may not fit
    layers   the same with 12 layers, for all variants
    loss     100 steps of 4 layers on bytes of Python sources, three seeds: mean loss of the last 10

PEFT 0.21 is needed. A step is forward, backward and optimizer. Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.
"""

import gc
import statistics
from typing import Any

import peft
import torch
import torch.nn.functional as F
from peft.tuners.lora import ParamWrapper
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import FineGrainedFP8Config, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear

from experiments.records import begin, record, script_parser, write_records
from experiments.timing import CUDA, elapsed_ms
from experiments.transformers.run import DEVICE, MODELS, TINY, Setting
from titan_fp8moe import Fp8FlowMoEConfig, Fp8Weight, patches
from titan_fp8moe.recipe import FP8, TILE, exp2, exponent
from titan_fp8moe.transformers import NAME, converted, register

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
RANK = 16
TIMED_STEPS, TRAINED_STEPS = 5, 100
CHUNK = 1024  # tokens whose logits exist at a time
RECORD, OURS, BF16 = "lora_qwen3_30b", "ours", "bf16"
IMPLEMENTATIONS = {OURS: NAME, "ours merged": NAME, BF16: "grouped_mm"}


# --- model ------------------------------------------------------------------------------------------------------------


def make_model(dims: dict[str, Any], variant: str, seed: int) -> Any:
    """PEFT's model with frozen random weights, the same for all variants up to the rounding of FP8."""
    config = Qwen3MoeConfig(**dims)
    with torch.device("meta"):
        model: Any = Qwen3MoeForCausalLM(config).bfloat16()
    if variant == OURS:
        replace_with_fp8_linear(model, [*ATTENTION, "lm_head"], FineGrainedFP8Config(weight_block_size=(TILE, TILE)))
    model.to_empty(device=DEVICE)
    with torch.device(DEVICE):
        model.model.rotary_emb = type(model.model.rotary_emb)(config)
    torch.manual_seed(seed)
    draw(model, config.initializer_range)
    model.set_experts_implementation(IMPLEMENTATIONS[variant])
    model.gradient_checkpointing_enable()
    targets: dict[str, Any] = dict(target_modules=ATTENTION, target_parameters=EXPERTS)
    lora = peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, init_lora_weights=False, **targets)
    with torch.device(DEVICE):
        adapted = peft.get_peft_model(model, lora, autocast_adapter_dtype=False)
    draw_adapters(adapted)
    if variant != BF16:
        assert len(converted(model)) == config.num_hidden_layers
    return adapted.train()


@torch.no_grad()
def draw(model: nn.Module, std: float) -> None:
    for module in model.modules():
        for name, param in [*module.named_parameters(recurse=False)]:
            if name.endswith("_scale_inv"):
                continue  # drawn with its weight
            if param.dim() == 1:
                param.fill_(1.0)
            elif param.dtype == FP8:
                weight = Fp8Weight.quantize(torch.empty_like(param, dtype=torch.bfloat16).normal_(std=std))
                param.view(torch.uint8).copy_(weight.q.view(torch.uint8))
                getattr(module, f"{name}_scale_inv").copy_(exp2(exponent(weight.scale)))
            else:
                param.normal_(std=std)


def draw_adapters(model: nn.Module) -> None:
    """PEFT's own initialization, in bf16: it would give adapters of FP8 weights their dtype."""
    for name, param in model.named_parameters():
        if "lora_" in name:
            data = torch.zeros_like(param, dtype=torch.bfloat16)
            param.data = data.uniform_(-1, 1).mul_(param.shape[1] ** -0.5) if "lora_A" in name else data


def loss_of(model: Any, tokens: Tensor) -> Tensor:
    """Mean cross entropy of each next token, with the logits of :data:`CHUNK` tokens at a time."""
    causal = model.get_base_model()
    hidden = causal.model(input_ids=tokens, use_cache=False).last_hidden_state[:, :-1].flatten(0, 1)

    def part(h: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(causal.lm_head(h).float(), targets, reduction="sum")

    pairs = zip(hidden.split(CHUNK), tokens[:, 1:].flatten().split(CHUNK), strict=True)
    return sum(checkpoint(part, *pair, use_reentrant=False) for pair in pairs) / hidden.shape[0]


class Trainer:
    """A model with AdamW, whose states and copy of the adapters are fp32."""

    def __init__(self, dims: dict[str, Any], variant: str, seed: int = 0, lr: float = 1e-4):
        patches.undo_all()  # by register() of another variant
        register(Fp8FlowMoEConfig(recompute="none"))
        if variant != OURS:
            ParamWrapper._activate_lora = ParamWrapper._activate_lora.__wrapped__  # PEFT's own
        self.model = make_model(dims, variant, seed)
        self.adapters = [p for p in self.model.parameters() if p.requires_grad]
        self.copies = [p.detach().float() for p in self.adapters]
        self.optimizer = torch.optim.AdamW(self.copies, lr=lr, weight_decay=0.0, fused=CUDA)

    def step(self, tokens: Tensor) -> Tensor:
        loss = loss_of(self.model, tokens)
        loss.backward()
        for adapter, copy in zip(self.adapters, self.copies, strict=True):
            copy.grad, adapter.grad = adapter.grad.float(), None
        self.optimizer.step()
        with torch.no_grad():
            for adapter, copy in zip(self.adapters, self.copies, strict=True):
                adapter.copy_(copy)
                copy.grad = None
        return loss.detach()


# --- phases -----------------------------------------------------------------------------------------------------------


def speed(setting: Setting, name: str) -> dict[str, float] | None:
    """Tokens/s of the median step, the largest memory of one, and the first loss; None if memory does not suffice."""
    gc.collect()
    torch.cuda.empty_cache()
    try:
        trainer, tokens = Trainer(setting.dims, name), setting.batches(1)[0]
        first = float(trainer.step(tokens))  # compiles
        if CUDA:
            torch.cuda.reset_peak_memory_stats()
        ms = statistics.median(elapsed_ms(lambda: trainer.step(tokens)) for _ in range(TIMED_STEPS))
    except torch.cuda.OutOfMemoryError:
        return None
    peak = torch.cuda.max_memory_allocated() / 2**30 if CUDA else 0.0
    return dict(tokens_per_s=tokens.numel() / ms * 1e3, peak_gib=peak, loss=first)


def compare(setting: Setting, references: list[str]) -> list[dict]:
    measured = {}
    for name in [OURS, *references]:
        measured[name] = speed(setting, name)
        print(f"{setting.shape}, {name}: {measured[name] or 'out of memory'}", flush=True)
    ours, records = measured.pop(OURS), []
    for name, found in measured.items():
        there = found or dict.fromkeys(ours)  # None is recorded where memory does not suffice
        more = {key: ours[key] for key in ("peak_gib", "loss")}
        more |= {f"reference_{key}": there[key] for key in more}
        speeds = ours["tokens_per_s"], name, there["tokens_per_s"]
        records.append(record(RECORD, setting.shape, "tokens/s", *speeds, **more))
    return records


def losses(setting: Setting) -> list[dict]:
    batches, records = setting.batches(TRAINED_STEPS), []
    for seed in (0, 1, 2):
        found = {}
        for name in (OURS, BF16):
            trainer = Trainer(setting.dims, name, seed, lr=1e-3)
            found[name] = torch.stack([trainer.step(tokens) for tokens in batches]).tolist()
        last = {name: statistics.mean(values[-10:]) for name, values in found.items()}
        shape = f"{setting.shape}, loss after {TRAINED_STEPS} steps, seed {seed}"
        print(f"{shape}: first {found[OURS][0]:.4f}, last {last}", flush=True)
        more = dict(losses=found[OURS], reference_losses=found[BF16])
        records.append(record(RECORD, shape, "nats", last[OURS], BF16, last[BF16], **more))
    return records


LAYERS = {"full": 48, "layers": 12, "loss": 4}
REFERENCES = {"full": [BF16], "layers": ["ours merged", BF16]}


def main(arguments: list[str] | None = None) -> None:
    parser = script_parser(__doc__, out="folder of results.json")
    parser.add_argument("--phases", nargs="+", choices=LAYERS, default=list(LAYERS))
    parser.add_argument("--tiny", action="store_true", help="small dims, for a CPU")
    args = parser.parse_args(arguments)
    if not args.tiny:
        begin(args.trial)
    for phase in args.phases:
        dims = MODELS["qwen3"].dims | dict(num_hidden_layers=LAYERS[phase], vocab_size=151936, pad_token_id=None)
        if args.tiny:
            dims |= TINY | dict(vocab_size=512)
        length = 64 if args.tiny else 4096
        shape = f"{dims['num_hidden_layers']} layers, 2 x {length:,} tokens"
        setting = Setting("Qwen3Moe", shape, dims, 2, length)
        records = losses(setting) if phase == "loss" else compare(setting, REFERENCES[phase])
        write_records(args.out / "results.json", records)


if __name__ == "__main__":
    main()
