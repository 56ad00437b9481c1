"""A MoE layer of one's own on titan_fp8moe, without a trainer: 20 steps in FP8 and in fp32, on a GPU or a CPU.

    python examples/plain_pytorch.py                              # one process
    python examples/plain_pytorch.py --compile                    # the layer as one graph
    torchrun --nproc_per_node 2 examples/plain_pytorch.py         # experts spread over two processes

The task: the layer learns a random linear map. Both runs see the same data and the same initial weights, and
their losses are printed side by side.
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titan_fp8moe import RoutedExperts, clip_grad_norm_

DIM, HIDDEN_DIM, EXPERTS, TOP_K, TOKENS = 256, 256, 8, 2, 512


class MoE(nn.Module):
    """A softmax router, routed experts in FP8 and a shared expert in the parameters' dtype."""

    def __init__(self, ep_group: dist.ProcessGroup | None = None):
        super().__init__()
        self.router = nn.Linear(DIM, EXPERTS, bias=False)
        self.experts = RoutedExperts(EXPERTS, DIM, HIDDEN_DIM, ep_group=ep_group)
        self.shared = nn.Sequential(nn.Linear(DIM, HIDDEN_DIM), nn.SiLU(), nn.Linear(HIDDEN_DIM, DIM))

    def forward(self, x: Tensor) -> Tensor:
        """(T, D) -> (T, D)"""
        scores, ids = self.router(x).softmax(-1).topk(TOP_K)
        return self.experts(x, ids, scores) + self.shared(x)


class ReferenceMoE(MoE):
    """The same layer in fp32, expert by expert."""

    def forward(self, x: Tensor) -> Tensor:
        scores, ids = self.router(x).softmax(-1).topk(TOP_K)
        out, experts = self.shared(x), self.experts
        for e in range(EXPERTS):
            token, k = (ids == e).nonzero(as_tuple=True)
            h = F.silu(x[token] @ experts.w1[e].T) * (x[token] @ experts.w3[e].T)
            out = out.index_add(0, token, scores[token, k].unsqueeze(1) * (h @ experts.w2[e].T))
        return out


def train(model: nn.Module, x: Tensor, target: Tensor, steps: int, group: dist.ProcessGroup | None) -> list[float]:
    """Losses of full-batch steps; replicated parameters get the mean of the ranks' gradients."""
    ranks = 1 if group is None else group.size()
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=2e-3), []
    for _ in range(steps):
        loss = F.mse_loss(model(x), target)
        (loss / ranks).backward()  # a rank's experts sum the gradients of all ranks' tokens
        for param in model.parameters():
            if group is not None and not isinstance(param, DTensor):  # the experts are DTensors
                dist.all_reduce(param.grad, group=group)
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        if group is not None:
            dist.all_reduce(mean, group=group)
        losses.append(float(mean) / ranks)
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--compile", action="store_true", help="torch.compile(fullgraph=True)")
    args = parser.parse_args()
    # A GPU for each process, or the CPU.
    device = "cuda" if torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", 1)) else "cpu"
    group, rank, ranks = None, 0, 1
    if "RANK" in os.environ:
        if device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
        group, rank, ranks = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
        if args.compile:
            raise SystemExit("experts that are spread over processes are not one graph; leave out --compile")

    torch.manual_seed(0)
    reference = ReferenceMoE().to(device)
    model = MoE(group).to(device)
    model.load_state_dict(reference.state_dict())  # each rank takes its experts
    x = torch.randn(TOKENS, DIM, device=device)
    target = x @ torch.randn(DIM, DIM, device=device) / DIM**0.5
    tokens = slice(rank * TOKENS // ranks, (rank + 1) * TOKENS // ranks)

    wanted = train(reference, x, target, args.steps, None)
    fp8 = train(
        torch.compile(model, fullgraph=True) if args.compile else model, x[tokens], target[tokens], args.steps, group
    )
    if rank == 0:
        print(f"{'step':>4} {'fp32':>9} {'FP8-Flow':>9}")
        for step in sorted({*range(0, args.steps, 5), args.steps - 1}):
            print(f"{step + 1:>4} {wanted[step]:>9.5f} {fp8[step]:>9.5f}")
        print(f"last loss {fp8[-1] / wanted[-1] - 1:+.2%} from fp32")
    if group is not None:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
