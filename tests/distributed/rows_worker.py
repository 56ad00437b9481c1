"""The routed experts on an expert-parallel group against all experts in one process, row by row.

    torchrun --nproc_per_node N rows_worker.py

Each rank holds its own tokens and its share of the experts. Output, input gradient and score gradient must equal the
single process's bit for bit; weight gradients up to fp8 noise, since their 128-token blocks hold other tokens.
"""

import os
import sys

import torch
import torch.distributed as dist

from titan_fp8moe.config import Fp8FlowMoEConfig
from titan_fp8moe.experts import ExpertWeights
from titan_fp8moe.moe import Route, routed_experts

D, H, EXPERTS, TOP_K = 256, 128, 8, 3


def route(scores_TK: torch.Tensor, experts_TK: torch.Tensor, score_before_experts: bool) -> Route:
    slots = torch.argsort(experts_TK.flatten(), stable=True)
    counts = torch.bincount(experts_TK.flatten(), minlength=EXPERTS)
    return Route(scores_TK.flatten()[slots], slots, counts, TOP_K, score_before_experts)


def choose(kind: str, tokens: int, generator: torch.Generator) -> torch.Tensor:
    if kind == "one_expert":  # all tokens to the last rank's last expert (and, being top-3, twice more)
        return torch.full((tokens, TOP_K), EXPERTS - 1)
    scores = torch.rand(tokens, EXPERTS, generator=generator)
    if kind == "skewed":
        scores[:, :2] += 0.5
    return scores.topk(TOP_K, dim=1, sorted=False).indices


def check(name: str, ok: bool) -> None:
    flags = [None] * dist.get_world_size()
    dist.all_gather_object(flags, bool(ok))
    if dist.get_rank() == 0:
        print(f"{'ok' if all(flags) else 'FAILED'} {name}", flush=True)
    if not all(flags):
        sys.exit(1)


def main() -> None:
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    device = "cuda" if cuda else "cpu"
    rank, ranks = dist.get_rank(), dist.get_world_size()
    seed = [torch.seed() % 2**31]
    dist.broadcast_object_list(seed)
    print(f"seed {seed[0]}", flush=True)
    generator = torch.Generator().manual_seed(seed[0])

    cases = [(kind, before) for kind in ("uniform", "skewed", "one_expert", "empty_rank") for before in (False, True)]
    for kind, before in cases:
        counts = [0 if kind == "empty_rank" and r == 0 else 50 + 90 * r for r in range(ranks)]
        experts = torch.cat([choose(kind, n, generator) for n in counts])
        total = sum(counts)
        x, dout = (torch.randn(total, D, generator=generator, dtype=torch.bfloat16) for _ in range(2))
        scores = torch.rand(total, TOP_K, generator=generator)
        weights = [torch.randn(EXPERTS, *shape, generator=generator) * 0.05 for shape in ((H, D), (D, H), (H, D))]
        mine = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
        local = EXPERTS // ranks

        def run(tokens: slice, held: slice, group, config, inputs=(x, scores, dout, experts, weights, before)):
            x, scores, dout, experts, weights, before = inputs
            leaves = [
                t.to(device).clone().requires_grad_() for t in (x[tokens], scores[tokens], *[w[held] for w in weights])
            ]
            r = route(leaves[1], experts[tokens].to(device), before)
            out = routed_experts(leaves[0], ExpertWeights(*leaves[2:]), r, config, group)
            out.backward(dout[tokens].to(device))
            return [out.detach(), *[leaf.grad for leaf in leaves]]

        for config in (Fp8FlowMoEConfig(), Fp8FlowMoEConfig(recompute="experts")):
            reference = run(slice(None), slice(None), None, config)
            result = run(mine, slice(rank * local, (rank + 1) * local), dist.group.WORLD, config)
            label = f"{kind} score_before={before} recompute={config.recompute}"
            for i, what in enumerate(("output", "dx", "dscore")):
                check(f"{label} {what}", torch.equal(result[i], reference[i][mine]))
            for i in (3, 4, 5):
                want = reference[i][rank * local : (rank + 1) * local]
                error = (result[i] - want).norm() / want.norm().clamp(min=1e-20)
                check(f"{label} dw{i - 2} {float(error):.1e}", error < 1e-3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
