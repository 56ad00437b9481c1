"""A Transformers model in FP8 on two processes against the same model in one: FSDP2, and their expert parallelism.

    torchrun --nproc_per_node 2 transformers_worker.py FOLDER

Under FSDP2 the reference averages the gradients of both ranks' batches; with expert parallelism both ranks have the
same batch. Sums in another order may move a value over an FP8 rounding boundary, which is visible at a fraction of a
percent. A missing or doubled reduction is off by 30% and more.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from torch.distributed.fsdp import FSDPModule, fully_shard
from transformers.distributed import DistributedConfig

from experiments.reference import relative_error
from tests.distributed import runner
from titan_fp8moe.export_fp8 import fp8_tensors
from titan_fp8moe.transformers import converted, register

CONFIG = dict(
    vocab_size=128, hidden_size=256, intermediate_size=128, moe_intermediate_size=128, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=64, num_experts=8, num_experts_per_tok=2,
    max_position_embeddings=128, initializer_range=0.05,
)  # fmt: skip
TOLERANCE = 2e-2


def load(folder: Path, device: str, **arguments) -> torch.nn.Module:
    auto = transformers.AutoModelForCausalLM
    return auto.from_pretrained(folder, experts_implementation="fp8_flow", **arguments).to(device)


def expert_parallel(ranks: int) -> DistributedConfig:
    """Experts spread over ranks that have the same batch; Transformers 5.17 and 5.23 ask for it differently."""
    if hasattr(DistributedConfig, "ep_size"):
        plan = {"lm_head": "colwise_gather_output"}  # one is needed
        return DistributedConfig(tp_size=ranks, tp_plan=plan, ep_size=ranks, ep_implementation="all_reduce")
    return DistributedConfig(tp_size=ranks, enable_expert_parallel=True)


def gradients(model: torch.nn.Module, batches: list[torch.Tensor]) -> tuple[float, dict[str, torch.Tensor]]:
    """Mean loss and whole gradients over the batches."""
    losses = []
    for tokens in batches:
        loss = model(input_ids=tokens, labels=tokens).loss
        (loss / len(batches)).backward()
        losses.append(loss.item())
    return sum(losses) / len(losses), runner.whole_gradients(model)


def check(name: str, got: tuple[float, dict], want: tuple[float, dict]) -> None:
    errors = {key: relative_error(grad, want[1][key]) for key, grad in got[1].items()}
    ok = errors.keys() == want[1].keys() and all(error < TOLERANCE for error in errors.values())
    ok = ok and abs(got[0] / want[0] - 1) < 1e-4
    worst = max(errors, key=lambda key: errors[key])
    figures = f"loss {got[0]:.5f}, {want[0]:.5f}; {worst} {errors[worst]:.2e}"
    runner.check(f"{name}: {figures}", ok)


def check_fp8_tensors(name: str, model: torch.nn.Module, whole: torch.nn.Module) -> None:
    """Gathered, and each rank its own: bit for bit those of the model in one process."""
    want = {n: t for bucket in fp8_tensors(whole) for n, t in bucket.items()}
    for gather in (True, False):
        buckets = fp8_tensors(model, quantized_from=torch.float32, gather=gather)
        got = {n: t for bucket in buckets for n, t in bucket.items()}
        held = {n for names in runner.gather_list(list(got)) for n in names}
        same = held == want.keys() and all(runner.same_bits(t, want[n]) for n, t in got.items())
        fewer = len(got) == len(want) if gather else len(got) < len(want)
        runner.check(f"{name}: FP8 tensors, gather={gather}, {len(got)} of {len(want)}", same and fewer)


def shard(model: torch.nn.Module, device: str) -> None:
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(device == "cpu")  # gloo has no average


def main() -> None:
    folder, device = Path(sys.argv[1]), runner.start()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    register()
    if rank == 0:
        transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**CONFIG)).save_pretrained(folder)
    dist.barrier()
    torch.manual_seed(0)
    batches = [torch.randint(0, CONFIG["vocab_size"], (2, 48)).to(device) for _ in range(ranks)]

    model = load(folder, device)
    shard(model, device)
    assert len(converted(model)) == 2
    loss, grads = gradients(model, [batches[rank]])
    losses = torch.tensor(loss, device=device)
    dist.all_reduce(losses)
    check("fsdp2", (float(losses) / ranks, grads), gradients(load(folder, device), batches))
    check_fp8_tensors("fsdp2", model, load(folder, device))

    model = load(folder, device, distributed_config=expert_parallel(ranks))
    experts = model.model.layers[0].mlp.experts
    assert experts.down_proj.to_local().shape[0] == CONFIG["num_experts"] // ranks and len(converted(model)) == 2
    check("expert parallel", gradients(model, batches[:1]), gradients(load(folder, device), batches[:1]))
    check_fp8_tensors("expert parallel", model, load(folder, device))
    runner.end()


if __name__ == "__main__":
    main()
