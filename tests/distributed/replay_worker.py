"""Routing replay on two processes against one: torchtitan's expert parallelism, Transformers', and FSDP2.

    torchrun --nproc_per_node 2 replay_worker.py

The replayed experts are drawn at random, so a forward that routes by itself is off by 100%. Sums in another order may
move a value over an FP8 rounding boundary, which is visible at a fraction of a percent.
"""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torchtitan.models.moe.moe import MoE, MoEArgs

import titan_fp8moe.torchtitan  # noqa: F401  without a GPU, the router needs its patches
from experiments.reference import relative_error
from tests.distributed import runner
from tests.distributed.transformers_worker import CONFIG, expert_parallel, load, shard
from titan_fp8moe import Fp8FlowMoEConfig, replay_routing
from titan_fp8moe.torchtitan.modules import Fp8FlowMoE
from titan_fp8moe.transformers import register

D, EXPERTS, TOP_K = CONFIG["hidden_size"], CONFIG["num_experts"], CONFIG["num_experts_per_tok"]
TOLERANCE = 2e-2


def choose(*shape: int) -> Tensor:
    return torch.rand(*shape, EXPERTS).topk(TOP_K).indices


def check(name: str, got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    errors = {key: relative_error(got[key], want[key]) for key in want}
    worst = max(errors, key=lambda key: errors[key])
    runner.check(f"{name}: {worst} {errors[worst]:.2e}", errors[worst] < TOLERANCE)


def layer_step(layer: MoE, x: Tensor, routed: Tensor, dout: Tensor) -> dict[str, Tensor]:
    with replay_routing(layer, routed):
        out = layer(x)
        (grad,) = torch.autograd.grad(out, layer.router.gate.weight, dout)
    return {"out": out.detach(), "router": grad, "counted": layer.tokens_per_expert}


def torchtitan_layers(mesh: DeviceMesh, device: str) -> None:
    """Each rank has its own tokens, and half of the experts."""

    def make() -> MoE:
        torch.manual_seed(0)
        layer = MoE(MoEArgs(num_experts=EXPERTS, top_k=TOP_K), dim=D, hidden_dim=128)
        with torch.no_grad():
            layer.init_weights(0.05, torch.device("cpu"))
        Fp8FlowMoE.convert(layer, Fp8FlowMoEConfig())
        return layer.to(device)

    alone, spread = make(), make()
    for name, weight in spread.experts.named_parameters():
        setattr(spread.experts, name, nn.Parameter(distribute_tensor(weight.detach(), mesh, [Shard(0)])))
    spread.experts.set_meshes(mesh, None)
    torch.manual_seed(1 + dist.get_rank())
    x, dout = (torch.randn(2, 40 + 8 * dist.get_rank(), D).to(device) for _ in range(2))
    routed = choose(*x.shape[:-1], 1)
    want = layer_step(alone, x, routed, dout)
    check("torchtitan's expert parallelism", layer_step(spread, x, routed, dout), want)


def model_step(model: nn.Module, tokens: Tensor, routed: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    with replay_routing(model, routed):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
    return {"loss": loss.detach(), **runner.whole_gradients(model)}


def transformers_models(folder: Path, device: str) -> None:
    """The same tokens on both ranks, so that FSDP's mean is one rank's gradient."""
    torch.manual_seed(3)
    tokens = torch.randint(0, CONFIG["vocab_size"], (2, 48)).to(device)
    routed = choose(2, 48, CONFIG["num_hidden_layers"])
    want = model_step(load(folder, device), tokens, routed)

    ranks = dist.get_world_size()
    spread = load(folder, device, distributed_config=expert_parallel(ranks))
    check("Transformers' expert parallelism", model_step(spread, tokens, routed), want)

    sharded = load(folder, device)
    sharded.gradient_checkpointing_enable(dict(use_reentrant=False))
    sharded.train()
    shard(sharded, device)
    check("FSDP2 with checkpointing", model_step(sharded, tokens, routed), want)


def main() -> None:
    device = runner.start()
    torchtitan_layers(init_device_mesh(device, (dist.get_world_size(),)), device)
    register()
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    path = Path(str(folder[0]))
    if dist.get_rank() == 0:
        transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**CONFIG)).save_pretrained(path)
    dist.barrier()
    transformers_models(path, device)
    runner.end()


if __name__ == "__main__":
    main()
