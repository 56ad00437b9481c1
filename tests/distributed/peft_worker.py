"""PEFT's adapters on the FP8 experts of a Transformers model, on two processes against one: DDP and FSDP2.

    torchrun --nproc_per_node 2 peft_worker.py FOLDER

Each rank has a batch of its own. The reference is one process with both batches.
"""

import sys
from pathlib import Path

import peft
import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from experiments.reference import relative_error
from tests.distributed import runner
from tests.distributed.transformers_worker import CONFIG, TOLERANCE, load
from titan_fp8moe.transformers import converted, register

TARGETS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def adapted(folder: Path, device: str) -> nn.Module:
    torch.manual_seed(1)
    options = peft.LoraConfig(r=8, lora_alpha=16, target_modules=[], target_parameters=TARGETS)
    model = peft.get_peft_model(load(folder, device), options)
    for name, param in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(param, std=0.05)
    assert len(converted(model)) == CONFIG["num_hidden_layers"]
    return model


def gradients(model: nn.Module, batches: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Those of the mean loss, by the names of the adapters."""
    for tokens in batches:
        (model(input_ids=tokens, labels=tokens).loss / len(batches)).backward()
    named = {name.removeprefix("module."): param for name, param in model.named_parameters()}
    return {name: runner.whole(param.grad) for name, param in named.items() if param.requires_grad}


def main() -> None:
    folder, device = Path(sys.argv[1]), runner.start()
    register()
    if dist.get_rank() == 0:
        transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**CONFIG)).save_pretrained(folder)
    dist.barrier()
    torch.manual_seed(0)
    batches = [torch.randint(0, CONFIG["vocab_size"], (2, 48)).to(device) for _ in range(dist.get_world_size())]
    want = gradients(adapted(folder, device), batches)

    sharded = adapted(folder, device)
    for layer in sharded.get_base_model().model.layers:
        fully_shard(layer).set_force_sum_reduction_for_comms(device == "cpu")  # gloo has no average
    fully_shard(sharded).set_force_sum_reduction_for_comms(device == "cpu")
    for name, model in {"ddp": DistributedDataParallel(adapted(folder, device)), "fsdp2": sharded}.items():
        got = gradients(model, [batches[dist.get_rank()]])
        errors = {key: relative_error(got[key], want[key]) for key in want}
        runner.check(
            f"{name}: {max(errors.values()):.2e}", got.keys() == want.keys() and max(errors.values()) < TOLERANCE
        )
    alone = gradients(adapted(folder, device), [batches[dist.get_rank()]])
    apart = min(relative_error(alone[key], want[key]) for key in want)
    runner.check(f"a rank alone is off by {apart:.2f}", apart > 5 * TOLERANCE)
    runner.end()


if __name__ == "__main__":
    main()
