"""LoRA on Qwen3-30B-A3B through Transformers and PEFT: experts frozen in FP8 beside the same in bf16. One GPU.

    python -m experiments.lora_qwen3_30b.run --out experiments/lora_qwen3_30b --phases loss

Weights are random and drawn on the device. Logits are made for 1,024 tokens at a time. Variant ``ours`` has experts
stored in FP8, one byte a parameter, and adapters beside them. ``bf16`` has Transformers' grouped_mm, and PEFT adds the
adapters to the weights in each forward. The phases:

    loss     100 steps of 4 layers on bytes of Python sources, three seeds: mean loss of the last 10
    host     all 48 layers, 4 x 4,096 tokens, experts on the card and in host memory in turn
    glm      GLM-4.5-Air's sizes, 106B, experts in host memory; the bound is the longer of copies and computation alone

PEFT 0.21 is needed. A step is forward, backward and optimizer. Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True.
"""

import statistics
from typing import Any

import peft
import torch
import torch.nn.functional as F
from peft.tuners.lora import ParamWrapper
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM, FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear

from experiments.records import DEVICE, begin, record, script_parser, write_records
from experiments.timing import elapsed_ms
from experiments.transformers.run import MODELS, Setting
from titan_fp8moe import Fp8FlowMoEConfig, Fp8Weight, offload_experts, patches
from titan_fp8moe.layer.host import NUM_BUFFERS, pinned_like
from titan_fp8moe.recipe import BLOCK, FP8, exp2, exponent
from titan_fp8moe.transformers import NAME, converted, register

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
NOT_EXPERTS = [*ATTENTION, "gate_proj", "up_proj", "down_proj", "lm_head"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
RANK = 16
TRAINED_STEPS = 100
CHUNK = 1024  # tokens whose logits exist at a time
RECORD, OURS, BF16, CARD, HOST = "lora_qwen3_30b", "ours", "bf16", "ours, on the card", "ours, in host memory"


# --- model ------------------------------------------------------------------------------------------------------------


def make_model(dims: dict[str, Any], variant: str, seed: int, in_host: bool) -> Any:
    """PEFT's model with frozen random weights, the same for all variants up to the rounding of FP8."""
    config = AutoConfig.for_model(**dict(model_type="qwen3_moe") | dims)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if variant == OURS:
        replace_with_fp8_linear(model, NOT_EXPERTS, FineGrainedFP8Config(weight_block_size=(BLOCK, BLOCK)))
    torch.manual_seed(seed)
    draw(model, config.initializer_range, in_host)
    with torch.device(DEVICE):
        model.model.rotary_emb = type(model.model.rotary_emb)(config)
    model.set_experts_implementation(NAME if variant == OURS else "grouped_mm")
    model.gradient_checkpointing_enable()
    targets: dict[str, Any] = dict(target_modules=ATTENTION, target_parameters=EXPERTS)
    lora = peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, init_lora_weights=False, **targets)
    with torch.device(DEVICE):
        adapted = peft.get_peft_model(model, lora, autocast_adapter_dtype=False)
    if variant == OURS:
        assert len(converted(model)) == config.num_hidden_layers - getattr(config, "first_k_dense_replace", 0)
    if in_host:
        offload_experts(adapted)
    return adapted.train()


@torch.no_grad()
def draw(model: nn.Module, std: float, in_host: bool) -> None:
    for module in model.modules():
        module.to_empty(device=DEVICE, recurse=False)
        for name, param in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            if name.endswith("_scale_inv"):
                continue  # drawn with its weight
            if param.dim() == 1:
                param.fill_(1.0)
            elif param.dtype == FP8:
                weight = Fp8Weight.quantize(torch.empty_like(param, dtype=torch.bfloat16).normal_(std=std))
                param.view(torch.uint8).copy_(weight.q.view(torch.uint8))
                getattr(module, f"{name}_scale_inv").copy_(exp2(exponent(weight.scale)))
                if in_host:  # offload_experts would look for memory that this virtual machine gets by using it
                    param.data = pinned_like(param).copy_(param)
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

    def __init__(self, dims: dict[str, Any], variant: str, seed: int = 0, lr: float = 1e-4, in_host: bool = False):
        patches.undo_all()  # by register() of another variant
        register(Fp8FlowMoEConfig(recompute="none"))
        if variant != OURS:
            ParamWrapper._activate_lora = ParamWrapper._activate_lora.__wrapped__  # PEFT's own
        self.model = make_model(dims, variant, seed, in_host)
        self.start(seed, lr)

    def start(self, seed: int = 0, lr: float = 1e-4) -> None:
        torch.manual_seed(seed)
        draw_adapters(self.model)
        self.adapters = [p for p in self.model.parameters() if p.requires_grad]
        self.copies = [p.detach().float() for p in self.adapters]
        self.optimizer = torch.optim.AdamW(self.copies, lr=lr, weight_decay=0.0, fused=True)

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


def timed(trainer: Trainer, tokens: Tensor, steps: int) -> dict[str, float]:
    losses = [trainer.step(tokens)]  # compiles
    torch.cuda.reset_peak_memory_stats()
    ms = statistics.median(elapsed_ms(lambda: losses.append(trainer.step(tokens))) for _ in range(steps))
    peak = torch.cuda.max_memory_allocated() / 2**30
    return dict(tokens_per_s=tokens.numel() / ms * 1e3, peak_gib=peak, loss=float(losses[0]), last=float(losses[-1]))


def losses(setting: Setting) -> list[dict]:
    batches, records = setting.batches(TRAINED_STEPS), []
    for seed in (0, 1, 2):
        found = {}
        for name in (OURS, BF16):
            trainer = Trainer(setting.dims, name, seed, lr=1e-3)
            found[name] = torch.stack([trainer.step(tokens) for tokens in batches]).tolist()
        last = {name: statistics.mean(values[-10:]) for name, values in found.items()}
        shape = f"{setting.shape}, loss after {TRAINED_STEPS} steps, seed {seed}"
        more = dict(losses=found[OURS], reference_losses=found[BF16])
        records.append(record(RECORD, shape, "nats", last[OURS], BF16, last[BF16], **more))
    return records


def host(setting: Setting) -> list[dict]:
    trainer, tokens = Trainer(setting.dims, OURS, in_host=True), setting.batches(1)[0]
    pinned = [(param, param.data) for param in trainer.model.parameters() if param.dtype == FP8]
    found: dict[str, list[dict[str, float]]] = {CARD: [], HOST: []}
    for place in [CARD, HOST] * 2:
        for param, values in pinned:
            param.data = values.to(DEVICE) if place == CARD else values
        for module in trainer.model.modules():
            vars(module).pop("fp8_host", None)
        if place == HOST:
            offload_experts(trainer.model)
        trainer.start()
        found[place].append(timed(trainer, tokens, 3))
    (_, theirs), (_, ours) = found.values()
    assert len({run["loss"] for runs in found.values() for run in runs}) == 1  # attention's backward has no fixed order
    more = dict(peak_gib=ours["peak_gib"], loss=ours["last"], reference_peak_gib=theirs["peak_gib"])
    return [record(RECORD, setting.shape, "tokens/s", ours["tokens_per_s"], CARD, theirs["tokens_per_s"], **more)]


def glm(setting: Setting) -> list[dict]:
    trainer, tokens = Trainer(setting.dims, OURS, in_host=True), setting.batches(1)[0]
    ours = timed(trainer, tokens, 3)
    experts = next(m.fp8_host.experts for m in trainer.model.modules() if "fp8_host" in vars(m))
    count, values, buffer = len(experts.values), experts.values[0], experts.buffers[0]
    pairs = [*zip(buffer.views(values), values, strict=True)]
    ms = elapsed_ms(lambda: [there.copy_(here, non_blocking=True) for there, here in pairs], 8)
    experts._copied = lambda _: buffer  # all layers read what is there
    alone = timed(trainer, tokens, 3)
    more = dict(copy_s=2 * (count - NUM_BUFFERS) * ms / 1e3, compute_s=tokens.numel() / alone["tokens_per_s"])
    speeds = ours["tokens_per_s"], "the longer alone", tokens.numel() / max(more["copy_s"], more["compute_s"])
    more |= dict(peak_gib=ours["peak_gib"], reference_peak_gib=alone["peak_gib"], loss=ours["last"])
    return [record(RECORD, setting.shape, "tokens/s", *speeds, **more)]


# Functions, layers, and the beginning of a record's shape.
PHASES = {"loss": (losses, 4, ""), "host": (host, 48, "Qwen3-30B-A3B, "), "glm": (glm, 46, "GLM-4.5-Air, ")}


def main() -> None:
    parser = script_parser(__doc__, out="folder of results.json")
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=list(PHASES))
    args = begin(parser)
    for phase in args.phases:
        run, layers, name = PHASES[phase]
        dims = MODELS["qwen3"].dims | dict(num_hidden_layers=layers, vocab_size=151936, pad_token_id=None)
        if phase == "glm":
            dims = dict(model_type="glm4_moe", head_dim=128, num_hidden_layers=layers)  # else the defaults
        batch = 2 if phase == "loss" else 4
        setting = Setting("Qwen3Moe", f"{name}{layers} layers, {batch} x 4,096 tokens", dims, batch)
        write_records(args.out / "results.json", run(setting))


if __name__ == "__main__":
    main()
