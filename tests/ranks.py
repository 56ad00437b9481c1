"""Several expert-parallel ranks in one process, whose workspaces are plain tensors."""

from typing import NamedTuple

import torch
from torch import Tensor

from titan_fp8moe import ops
from titan_fp8moe.dispatch.symmetric.workspace import COMBINE, DISPATCH, Sizes, Workspace, capacities
from titan_fp8moe.recipe import BLOCK, E8M0, FP8
from titan_fp8moe.rows import RowBias


def make_workspaces(sizes: Sizes, device: str = "cpu") -> list[Workspace]:
    """Each rank's, all on one device. Memory begins as 0xA5, but for the arrivals."""
    memory = [torch.full((sizes.nbytes,), 0xA5, dtype=torch.uint8, device=device) for _ in range(sizes.num_ranks)]
    workspaces = [Workspace(sizes, rank, memory, lambda: 1.0) for rank in range(sizes.num_ranks)]
    for workspace in workspaces:
        workspace.view("arrivals").zero_()
    return workspaces


class Tokens(NamedTuple):
    """One rank's inputs of an exchange."""

    q: Tensor
    scale: Tensor
    ids: Tensor
    scores: Tensor


def make_tokens(sizes: Sizes, ids: Tensor) -> Tokens:
    """Every e4m3 code but 0xFF, any scale, ``ids`` (T, K)."""
    (T, K), D, device = ids.shape, sizes.dim, ids.device
    q = torch.randint(0, 255, (T, D), dtype=torch.uint8, device=device).view(FP8)
    scale = torch.randint(1, 255, (T, D // BLOCK), dtype=torch.uint8, device=device).view(E8M0)
    return Tokens(q, scale, ids, torch.rand(T, K, device=device))


class Exchanged(NamedTuple):
    """What a rank gets. ``x`` and ``x_scale`` are the rows up to the last expert's end, ``token_q`` and
    ``token_scale`` the tokens that arrived; sums and gradients are those of stand-ins for the FFN's results."""

    x: Tensor
    x_scale: Tensor
    token_q: Tensor
    token_scale: Tensor
    offsets: Tensor
    token_M: Tensor
    score_M: Tensor
    row_CK: Tensor
    out: Tensor
    grad: Tensor
    ds: Tensor


def stand_in(x: Tensor, x_scale: Tensor, dim: int | None = None) -> tuple[Tensor, Tensor]:
    """In place of an FFN's results, by the row alone: (M, D) bf16, D or ``dim`` if tokens are padded, and (M,) fp32."""
    byte = x.view(torch.uint8).float() + x_scale.view(torch.uint8).float().sum(1, keepdim=True)
    return (byte * 0.37 - 11).bfloat16()[:, :dim].contiguous(), byte.sum(1)


def exchange_all(
    impl,
    workspaces: list[Workspace],
    tokens: list[Tokens],
    factor: float,
    b2_ED: Tensor | None = None,
    dim: int | None = None,
) -> list[Exchanged]:
    """A forward's exchange and a backward's of all ranks, with ``impl``: titan_fp8moe.dispatch.symmetric.exchange or
    its kernels. Each step runs on all ranks before the next begins. ``b2_ED``: a bias of all ranks' experts; ``dim``:
    D, if the tokens' is padded."""
    sizes, ranks = workspaces[0].sizes, range(len(workspaces))
    N, T, K = sizes.num_ranks, tokens[0].ids.shape[0], sizes.top_k
    M, C = capacities(T, K, N, sizes.num_local, factor)
    sent = [ops.dispatch_routing(t.ids, N, sizes.num_local) for t in tokens]
    for at, t, (_, token_C, counts_N) in zip(workspaces, tokens, sent, strict=True):
        impl.publish(at, t.q, t.scale, (t.ids, t.scores, token_C, counts_N, M, C))
    state = []
    for at in workspaces:
        plan = impl.plan(at)
        offsets, token_M, score_M, row_CK, token_C, pair_CK = impl.pull_routing(at, plan, M, C)
        x, x_scale, token_q, token_scale = impl.pull_rows(at, plan, token_C, row_CK, token_M, offsets, True)
        bias = None if b2_ED is None else RowBias(b2_ED, score_M, offsets)
        impl.push_sums(at, plan, stand_in(x, x_scale, dim)[0], None, row_CK, pair_CK, bias)
        end, count = int(offsets[-1]), int(plan[0, -1])
        kept = x[:end], x_scale[:end], token_q[:count], token_scale[:count]
        state.append((plan, token_C, pair_CK, kept, offsets, token_M, score_M, row_CK))
    outs = []
    for at, (sent_TK, *_) in zip(workspaces, sent, strict=True):
        impl.wait(at, COMBINE)
        outs.append(ops.unpermute_sum(at.sums(dim or sizes.dim), sent_TK, torch.float32))
    for at, t in zip(workspaces, tokens, strict=True):
        impl.publish(at, *gradient(t), None)
    for n, at in enumerate(workspaces):
        impl.wait(at, DISPATCH)
        plan, token_C, pair_CK, _, offsets, token_M, _, row_CK = state[n]
        dy = impl.pull_rows(at, plan, token_C, row_CK, token_M, offsets, False)[:2]
        impl.push_sums(at, plan, *stand_in(*dy, dim), row_CK, pair_CK)
    results = []
    for n in ranks:
        impl.wait(workspaces[n], COMBINE)
        sums, ds = workspaces[n].sums(dim or sizes.dim), workspaces[n].view("score_gradients")
        plan, _, _, kept, offsets, token_M, score_M, row_CK = state[n]
        end, count = int(offsets[-1]), int(plan[0, -1])
        grads = ops.unpermute_gradients(sums, ds, sent[n][0], torch.float32)
        results.append(Exchanged(*kept, offsets, token_M[:end], score_M[:end], row_CK[:count], outs[n], *grads))
    return results


def gradient(tokens: Tokens) -> tuple[Tensor, Tensor]:
    """Stands for the output's quantized gradient."""
    return tokens.q.flip(0), tokens.scale.view(torch.uint8).flip(0).view(E8M0)
