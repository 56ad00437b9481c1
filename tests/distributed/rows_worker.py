"""The routed experts on an expert-parallel group against all experts in one process, row by row.

    torchrun --nproc_per_node N rows_worker.py [D H]

Each rank holds its own tokens and its share of the experts. The reference needs no group: the part of a rank's experts
is computed for all tokens and rounded to bf16, and the parts are added in the order in which a rank does. Output, input
gradient and score gradient must equal it bit for bit. Weight gradients agree up to FP8 noise, since their 128-token
blocks hold other tokens.
"""

import os
import sys

import torch
import torch.distributed as dist

from tests.distributed.runner import check, end, gather_list, start
from titan_fp8moe import Fp8FlowMoEConfig, routed_experts

EXPERTS, TOP_K = 8, 3
CONFIGS = Fp8FlowMoEConfig(), Fp8FlowMoEConfig(recompute="experts"), Fp8FlowMoEConfig(save_h="fp8", recompute="none")


def choose(kind: str, tokens: int, generator: torch.Generator) -> torch.Tensor:
    if kind == "one_expert":  # all tokens to the last rank's last expert (and, being top-3, twice more)
        return torch.full((tokens, TOP_K), EXPERTS - 1)
    scores = torch.rand(tokens, EXPERTS, generator=generator)
    if kind == "skewed":
        scores[:, :2] += 0.5
    return scores.topk(TOP_K, dim=1, sorted=False).indices


def added_by_rank(parts: list[torch.Tensor], rank_TK: torch.Tensor) -> torch.Tensor:
    """The ranks' parts, each rounded to bf16, in the order of a token's first pair on each rank."""
    total = torch.zeros_like(parts[0])
    for k in range(TOP_K):
        first = (rank_TK[:, :k] != rank_TK[:, k : k + 1]).all(1)
        for rank, part in enumerate(parts):
            adds = first & (rank_TK[:, k] == rank)
            total[adds] += part[adds].bfloat16().float()
    return total


def main() -> None:
    device = start()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    seed = [int(os.environ.get("SEED", torch.seed() % 2**31))]
    dist.broadcast_object_list(seed)
    print(f"seed {seed[0]}", flush=True)
    generator = torch.Generator().manual_seed(seed[0])
    D, H = map(int, sys.argv[1:3] or (256, 128))

    local = EXPERTS // ranks
    cases = [(kind, before) for kind in ("uniform", "skewed", "one_expert", "empty_rank") for before in (False, True)]
    for kind, before in cases:
        counts = [0 if kind == "empty_rank" and r == 0 else 50 + 90 * r for r in range(ranks)]
        experts = torch.cat([choose(kind, n, generator) for n in counts])
        total = sum(counts)
        # fp32, so that the sum of what came back in bf16 is not rounded once more.
        x, dout = (torch.randn(total, D, generator=generator) for _ in range(2))
        scores = torch.rand(total, TOP_K, generator=generator)
        weights = [torch.randn(EXPERTS, *shape, generator=generator) * 0.05 for shape in ((H, D), (D, H), (H, D))]
        mine = slice(sum(counts[:rank]), sum(counts[: rank + 1]))

        def run(tokens, held, group, config, part=None, inputs=(x, scores, dout, experts, weights, before)):
            x, scores, dout, experts, weights, before = inputs
            leaves = [
                t.to(device).clone().requires_grad_() for t in (x[tokens], scores[tokens], *[w[held] for w in weights])
            ]
            ids = experts[tokens].to(device)
            if part is not None:  # the pairs of one rank's experts
                ids = ids.masked_fill(ids // local != part, -1)
            options = dict(config=config, ep_group=group, score_before_experts=before)
            out = routed_experts(leaves[0], *leaves[2:], ids, leaves[1], **options)
            out.backward(dout[tokens].to(device))
            return [out.detach(), *[leaf.grad for leaf in leaves]]

        for config in CONFIGS[: 3 if (ranks, D) == (2, 256) else 1]:
            everything = slice(None), slice(None), None, config
            # Each part by a process without a group, and only once.
            parts = gather_list([t.cpu() for t in run(*everything, rank)])
            reference = gather_list([t.cpu() for t in run(*everything)] if rank == 0 else [])[0]
            reference[0], reference[1] = (
                added_by_rank([part[i] for part in parts], experts // local).to(device) for i in (0, 1)
            )
            reference[2:] = [t.to(device) for t in reference[2:]]
            result = run(mine, slice(rank * local, (rank + 1) * local), dist.group.WORLD, config)
            label = f"{kind} score_before={before} save_h={config.save_h} recompute={config.recompute}"
            for i, what in enumerate(("output", "dx", "dscore")):
                check(f"{label} {what}", torch.equal(result[i], reference[i][mine]))
            for i in (3, 4, 5):
                want = reference[i][rank * local : (rank + 1) * local]
                error = (result[i] - want).norm() / want.norm().clamp(min=1e-20)
                check(f"{label} dw{i - 2} {float(error):.1e}", error < 1e-3)
    end()


if __name__ == "__main__":
    main()
