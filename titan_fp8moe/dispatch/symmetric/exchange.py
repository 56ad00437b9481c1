"""Tokens travel through memory that ranks share: each step in plain PyTorch, the specification of the kernels.

One exchange of a rank, which every rank runs, needs no counts on the host:

1. :func:`publish` writes quantized tokens and, in a forward, their routing to the rank's own workspace, and arrives.
2. In a forward, :func:`plan` waits for all ranks, and reads how many tokens come from where, and whether every rank has
   room. :func:`pull_routing` copies the routed pairs that this rank's experts serve. In a backward, :func:`wait`.
3. :func:`pull_rows` copies what is for this rank's experts straight to expert order. A token is read once.
4. The FFN runs.
5. :func:`push_sums` adds each token's rows, writes the sum to the workspace of the token's rank, and arrives.
6. :func:`wait`; then the token's rank adds up what its ranks have sent.

Steps 2 and 3 run beside what the layer computes meanwhile, and so does step 5 up to the wait.

Tokens and sums are numbered as in the all-to-all path: :func:`titan_fp8moe.recipe.dispatch_routing` lists what a rank
sends, and arrived tokens are sorted by source, then by token. The results therefore have that path's bits.

One buffer of each kind suffices. A rank publishes again only after it has waited for step 6, which others reach after
their pulls. It pushes again only after the next step 2, which others reach after they have added up.

Shapes: P tokens that a rank may dispatch, C that may arrive; other letters as in :mod:`titan_fp8moe.recipe`.
"""

import time

import torch
from torch import Tensor

from titan_fp8moe import recipe
from titan_fp8moe.dispatch.symmetric.workspace import COMBINE, DISPATCH, LATE, ROWS, TOKENS, UNLIKE, Workspace
from titan_fp8moe.recipe import E8M0, FP8, ROW_ALIGN, SCALE_TILE
from titan_fp8moe.rows import RowBias

_POLL_S = 2e-5


def publish(
    workspace: Workspace, q_TD: Tensor, scale: Tensor, sent: tuple[Tensor, Tensor, Tensor, Tensor, int, int] | None
) -> None:
    """Copies a rank's tokens to its workspace, and arrives.

    Args:
        q_TD, scale: (T, D) e4m3 and (T, D // 128) e8m0.
        sent: topk_ids_TK, topk_scores_TK, token_C and counts_N of :func:`titan_fp8moe.recipe.dispatch_routing`, and the
            capacities M and C; None in a backward, where they are those of the forward.
    """
    T = q_TD.shape[0]
    workspace.view("q").view(torch.uint8)[:T] = q_TD.view(torch.uint8)
    workspace.view("scale").view(torch.uint8)[:T] = scale.view(torch.uint8)
    if sent is not None:
        ids_TK, scores_TK, token_C, counts_N, *capacity = sent
        workspace.view("ids")[:T], workspace.view("scores")[:T] = ids_TK, scores_TK
        workspace.view("token")[: token_C.shape[0]] = token_C
        workspace.view("counts").copy_(counts_N)
        workspace.view("capacity").copy_(torch.tensor(capacity, dtype=torch.int32, device="cpu"))
    arrive(workspace, DISPATCH)


def arrive(workspace: Workspace, channel: int) -> None:
    """Tells every rank that what this rank has written before can be read."""
    for n in range(workspace.sizes.num_ranks):
        workspace.view("arrivals", n)[channel, workspace.rank] += 1


def wait(workspace: Workspace, channel: int) -> None:
    """Returns when every rank has arrived once more than at the last wait. RuntimeError after the group's timeout."""
    workspace.rounds[channel] += 1
    wanted, arrivals = int(workspace.rounds[channel]), workspace.view("arrivals")[channel]
    deadline = time.monotonic() + workspace.timeout_s()
    while int(arrivals.min()) < wanted:
        if time.monotonic() > deadline:
            workspace.report[LATE] = (arrivals < wanted).int()
            workspace.check_arrivals()
        time.sleep(_POLL_S)


def plan(workspace: Workspace) -> Tensor:
    """Waits for all ranks. Finds this rank's tokens from the published counts, and whether every rank has room.

    Without room, or with different settings of two ranks, all ranks alike set
    :attr:`titan_fp8moe.dispatch.symmetric.workspace.Workspace.overflow`.

    Returns:
        (2, N + 1) int32. First row: the number of the first token that comes from each rank, then of all. Second row:
        the place of that token in the source's ``token`` list.
    """
    wait(workspace, DISPATCH)
    N, report = workspace.sizes.num_ranks, workspace.report
    counts_NNE = torch.stack([workspace.view("counts", n) for n in range(N)])  # source, destination
    capacity_N2 = torch.stack([workspace.view("capacity", n) for n in range(N)])
    rows_N = ((counts_NNE[:, :, 1:-2].sum(0) + ROW_ALIGN - 1) // ROW_ALIGN * ROW_ALIGN).sum(1)
    needed_N2 = torch.stack([rows_N, counts_NNE[:, :, 0].sum(0)], 1)
    lacking = (needed_N2 > capacity_N2).any(1)
    if lacking.any():
        workspace.overflow.fill_(1)
        report[[ROWS, TOKENS]] = torch.where(lacking.cpu(), needed_N2.t().cpu(), report[[ROWS, TOKENS]]).int()
    signature_N = counts_NNE[:, 0, -1] >> 1  # in the last bit ranks may differ
    if (signature_N != signature_N[0]).any():
        workspace.overflow.fill_(1)
        report[UNLIKE] = 1
    tokens_NN = counts_NNE[:, :, 0]
    first = torch.cat([tokens_NN.new_zeros(1), tokens_NN[:, workspace.rank].cumsum(0)])
    start = torch.cat([tokens_NN[:, : workspace.rank].sum(1), tokens_NN.new_zeros(1)])
    return torch.stack([first, start]).int()


def _arrivals(workspace: Workspace, plan: Tensor):
    """(source, its place in this rank's tokens, its place in the source's) of the tokens that come from each rank;
    none after an overflow."""
    if int(workspace.overflow):
        return
    first, start = plan.tolist()
    for n in range(workspace.sizes.num_ranks):
        count = first[n + 1] - first[n]
        yield n, slice(first[n], first[n + 1]), slice(start[n], start[n] + count)


def pull_routing(
    workspace: Workspace, plan: Tensor, M: int, C: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The routed pairs of the tokens that arrive, and the rows that they get. Of a token's pairs, those that this rank
    serves come first, in the order of k.

    Returns:
        offsets_E, token_M, score_M, row_CK: of :func:`titan_fp8moe.recipe.expert_routing`, for M rows.
        token_C: (C,) int32, each token's number on its own rank.
        pair_CK: (C, K) uint8, the k of each pair; undefined where there is none.
    """
    K, E = workspace.sizes.top_k, workspace.sizes.num_local
    ids_CK = torch.full((C, K), -1, dtype=torch.int32, device=plan.device)
    scores_CK = torch.zeros(C, K, dtype=torch.float32, device=plan.device)
    pair_CK = torch.zeros_like(ids_CK, dtype=torch.uint8)
    token_C = ids_CK.new_zeros(C)
    for n, here, there in _arrivals(workspace, plan):
        token = workspace.view("token", n)[there]
        local = workspace.view("ids", n)[token.long()] - workspace.rank * E
        served = (local >= 0) & (local < E)
        k = (~served).int().argsort(dim=1, stable=True)
        ids_CK[here] = torch.where(served, local, -1).gather(1, k)
        scores_CK[here] = workspace.view("scores", n)[token.long()].gather(1, k)
        pair_CK[here], token_C[here] = k.to(torch.uint8), token
    return *recipe.expert_routing(ids_CK, scores_CK, E, M), token_C, pair_CK


def pull_rows(
    workspace: Workspace, plan: Tensor, token_C: Tensor, row_CK: Tensor, token_M: Tensor, offsets_E: Tensor, keep: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The tokens that arrive, as rows in expert order.

    Args:
        token_C, row_CK, token_M, offsets_E: of :func:`pull_routing`.
        keep: whether the weight gradient needs the tokens themselves.

    Returns:
        (M, D) e4m3, (M, D // 128) e8m0 column-major, as :func:`titan_fp8moe.recipe.permute_rows`; (C, D) e4m3 and
        (C, D // 128) e8m0, empty unless ``keep``.
    """
    C, D, device = token_C.shape[0], workspace.sizes.dim, plan.device
    kept = torch.zeros(C, D, dtype=torch.uint8, device=device)
    kept_scale = torch.ones(C, D // SCALE_TILE, dtype=torch.uint8, device=device)
    for n, here, _ in _arrivals(workspace, plan):
        token = token_C[here].long()
        kept[here] = workspace.view("q", n).view(torch.uint8)[token]
        kept_scale[here] = workspace.view("scale", n).view(torch.uint8)[token]
    tokens = kept.view(FP8), kept_scale.view(E8M0)
    q, scale = recipe.permute_rows(*tokens, token_M)
    token_q, token_scale = tokens if keep else (t.new_empty(0) for t in tokens)
    return q, scale, token_q, token_scale


def push_sums(
    workspace: Workspace,
    plan: Tensor,
    y_MD: Tensor,
    ds_M: Tensor | None,
    row_CK: Tensor,
    pair_CK: Tensor,
    bias: RowBias | None = None,
) -> None:
    """Writes each token's sum, fp32 in the order of k and rounded to bf16 once, where its rank will look for it; then
    arrives.

    Args:
        y_MD: (M, D) bf16.
        ds_M: (M,) fp32, the gradients of the rows' scores, which go along; None in a forward.
        row_CK, pair_CK: of :func:`pull_routing`.
        bias: of the rows; ``b2_ED`` is contiguous.
    """
    if int(workspace.overflow):
        workspace.view("sums").fill_(torch.nan)
        workspace.view("score_gradients").fill_(torch.nan)
    sums_CD = recipe.unpermute_sum(y_MD, row_CK, torch.bfloat16, None, *(bias or ()))
    for n, here, there in _arrivals(workspace, plan):
        workspace.sums(y_MD.shape[1], n)[there] = sums_CD[here]
        if ds_M is not None:
            c, j = (row_CK[here] >= 0).nonzero(as_tuple=True)
            gradients = workspace.view("score_gradients", n)[there]
            gradients[c, pair_CK[here][c, j].long()] = ds_M[row_CK[here][c, j].long()]
    arrive(workspace, COMBINE)
