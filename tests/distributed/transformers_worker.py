"""A Transformers model in FP8 on two processes against the same model in one: FSDP2, and their expert parallelism.

    torchrun --nproc_per_node 2 transformers_worker.py FOLDER           # also its FP8 tensors
    torchrun --nproc_per_node 2 transformers_worker.py FOLDER replay    # with experts drawn at random
    torchrun --nproc_per_node 2 transformers_worker.py FOLDER peft      # PEFT's adapters under DDP and FSDP2

Where each rank has a batch of its own, the reference averages the gradients of both. Sums in another order may move a
value over an FP8 rounding boundary, which is visible at a fraction of a percent. A missing or doubled reduction is off
by 30% and more, a forward that routes by itself by 100%.
"""

import contextlib
import functools
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers.distributed import DistributedConfig

from experiments.reference import relative_error
from tests.distributed import runner
from titan_fp8moe import replay_routing
from titan_fp8moe.export_fp8 import fp8_tensors
from titan_fp8moe.transformers import converted, register

CONFIG = dict(
    vocab_size=128, hidden_size=256, intermediate_size=128, moe_intermediate_size=128, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=64, num_experts=8, num_experts_per_tok=2,
    max_position_embeddings=128, initializer_range=0.05,
)  # fmt: skip
TOLERANCE = 2e-2


def load(folder: Path, device: str, **arguments) -> nn.Module:
    auto = transformers.AutoModelForCausalLM
    return auto.from_pretrained(folder, experts_implementation="fp8_flow", **arguments).to(device)


def expert_parallel(ranks: int) -> DistributedConfig:
    """Experts spread over ranks that have the same batch; Transformers 5.17 and 5.23 ask for it differently."""
    if hasattr(DistributedConfig, "ep_size"):
        plan = {"lm_head": "colwise_gather_output"}  # one is needed
        return DistributedConfig(tp_size=ranks, tp_plan=plan, ep_size=ranks, ep_implementation="all_reduce")
    return DistributedConfig(tp_size=ranks, enable_expert_parallel=True)


def gradients(model: nn.Module, batches: list[Tensor], routed: Tensor | None = None) -> tuple[float, dict[str, Tensor]]:
    """Mean loss over the batches, and whole gradients of what is trained."""
    losses = []
    for tokens in batches:
        with contextlib.nullcontext() if routed is None else replay_routing(model, routed):
            loss = model(input_ids=tokens, labels=tokens).loss
            (loss / len(batches)).backward()
        losses.append(loss.item())
    named = {name.removeprefix("module."): p for name, p in model.named_parameters() if p.requires_grad}
    return sum(losses) / len(losses), {name: runner.whole(p.grad) for name, p in named.items()}


def check(name: str, got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    errors = {key: relative_error(value, want[key]) for key, value in got.items()}
    worst = max(errors, key=lambda key: errors[key])
    runner.check(f"{name}: {worst} {errors[worst]:.2e}", errors.keys() == want.keys() and errors[worst] < TOLERANCE)


def check_model(name: str, got: tuple[float, dict], want: tuple[float, dict]) -> None:
    runner.check(f"{name}: loss {got[0]:.5f}, {want[0]:.5f}", abs(got[0] / want[0] - 1) < 1e-4)
    check(name, got[1], want[1])


def check_fp8_tensors(name: str, model: nn.Module, whole: nn.Module) -> None:
    """Gathered, and each rank its own: bit for bit those of the model in one process."""
    want = {n: t for bucket in fp8_tensors(whole) for n, t in bucket.items()}
    for gather in (True, False):
        buckets = fp8_tensors(model, quantized_from=torch.float32, gather=gather)
        got = {n: t for bucket in buckets for n, t in bucket.items()}
        held = {n for names in runner.gather_list(list(got)) for n in names}
        same = held == want.keys() and all(runner.same_bits(t, want[n]) for n, t in got.items())
        fewer = len(got) == len(want) if gather else len(got) < len(want)
        runner.check(f"{name}: FP8 tensors, gather={gather}, {len(got)} of {len(want)}", same and fewer)


def shard(model: nn.Module, layers: nn.ModuleList, device: str) -> nn.Module:
    for module in (*layers, model):
        fully_shard(module)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(device == "cpu")  # gloo has no average
    return model


def models(make: Callable, batches: list[Tensor], device: str) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = make()
    shard(model, model.model.layers, device)
    assert len(converted(model)) == 2
    loss, grads = gradients(model, [batches[rank]])
    losses = torch.tensor(loss, device=device)
    dist.all_reduce(losses)
    check_model("fsdp2", (float(losses) / ranks, grads), gradients(make(), batches))
    check_fp8_tensors("fsdp2", model, make())

    model = make(distributed_config=expert_parallel(ranks))
    experts = model.model.layers[0].mlp.experts
    assert experts.down_proj.to_local().shape[0] == CONFIG["num_experts"] // ranks and len(converted(model)) == 2
    check_model("expert parallel", gradients(model, batches[:1]), gradients(make(), batches[:1]))
    check_fp8_tensors("expert parallel", model, make())


def choose(*shape: int) -> Tensor:
    return torch.rand(*shape, CONFIG["num_experts"]).topk(CONFIG["num_experts_per_tok"]).indices


def replay(make: Callable, batches: list[Tensor], device: str) -> None:
    """The same tokens on both ranks, so that FSDP's mean is one rank's gradient."""
    torch.manual_seed(3)
    arguments = batches[:1], choose(2, 48, CONFIG["num_hidden_layers"])
    want = gradients(make(), *arguments)
    spread = make(distributed_config=expert_parallel(dist.get_world_size()))
    check_model("replay under expert parallelism", gradients(spread, *arguments), want)
    sharded = make()
    sharded.gradient_checkpointing_enable(dict(use_reentrant=False))
    shard(sharded.train(), sharded.model.layers, device)
    check_model("replay under FSDP2 with checkpointing", gradients(sharded, *arguments), want)


def adapters(make: Callable, batches: list[Tensor], device: str) -> None:
    import peft

    def adapted() -> nn.Module:
        torch.manual_seed(1)
        targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        options = peft.LoraConfig(r=8, lora_alpha=16, target_modules=[], target_parameters=targets)
        model = peft.get_peft_model(make(), options)
        for name, param in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(param, std=0.05)
        assert len(converted(model)) == CONFIG["num_hidden_layers"]
        return model

    own, (_, want), sharded = batches[dist.get_rank()], gradients(adapted(), batches), adapted()
    shard(sharded, sharded.get_base_model().model.layers, device)
    for name, model in {"ddp": DistributedDataParallel(adapted()), "fsdp2": sharded}.items():
        check(f"adapters under {name}", gradients(model, [own])[1], want)
    _, alone = gradients(adapted(), [own])
    apart = min(relative_error(alone[key], want[key]) for key in want)
    runner.check(f"a rank alone is off by {apart:.2f}", apart > 5 * TOLERANCE)


def main() -> None:
    folder, device = Path(sys.argv[1]), runner.start()
    register()
    if dist.get_rank() == 0:
        transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**CONFIG)).save_pretrained(folder)
    dist.barrier()
    torch.manual_seed(0)
    batches = [torch.randint(0, CONFIG["vocab_size"], (2, 48)).to(device) for _ in range(dist.get_world_size())]
    run = {"replay": replay, "peft": adapters}.get(sys.argv[-1], models)
    run(functools.partial(load, folder, device), batches, device)
    runner.end()


if __name__ == "__main__":
    main()
