"""Kernels of exchanges through shared memory against their specification, bit for bit, several ranks in one process.

tests/distributed/test_layers.py compares the specification with the all-to-all.
"""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tests.kernels.compare import assert_same_bits
from titan_fp8moe import ops, recipe
from titan_fp8moe.dispatch.symmetric import exchange, kernels, workspace
from titan_fp8moe.dispatch.symmetric.workspace import COMBINE, DISPATCH, ROWS, TOKENS, Sizes, Workspace, capacities
from titan_fp8moe.recipe import BLOCK, E8M0, FP8
from titan_fp8moe.rows import RowBias

EACH_IMPLEMENTATION = pytest.mark.parametrize("impl", [exchange, kernels], ids=["specification", "kernels"])


@pytest.fixture(autouse=True)
def few_ctas(device, monkeypatch):
    """So few on a CPU that each moves several tokens' parts."""
    for shape in (kernels.PULL, kernels.PUSH, kernels.BIASED_PUSH) if device == "cpu" else ():
        monkeypatch.setitem(shape, "CTAS", 8)
        monkeypatch.setitem(shape, "TOKENS", 4)


# --- several ranks in one process, whose workspaces are plain tensors -------------------------------------------------


def make_workspaces(sizes, device="cpu"):
    """Each rank's, all on one device. Memory begins as 0xA5, but for the arrivals."""
    memory = [torch.full((sizes.nbytes,), 0xA5, dtype=torch.uint8, device=device) for _ in range(sizes.num_ranks)]
    workspaces = [Workspace(sizes, rank, memory, lambda: 1.0) for rank in range(sizes.num_ranks)]
    for at in workspaces:
        at.view("arrivals").zero_()
    return workspaces


class Tokens(NamedTuple):
    """One rank's inputs of an exchange."""

    q: Tensor
    scale: Tensor
    ids: Tensor
    scores: Tensor


def make_tokens(sizes, ids):
    """Every e4m3 code but 0xFF, any scale, ``ids`` (T, K)."""
    (T, K), D, device = ids.shape, sizes.dim, ids.device
    q = torch.randint(0, 255, (T, D), dtype=torch.uint8, device=device).view(FP8)
    scale = torch.randint(1, 255, (T, D // BLOCK), dtype=torch.uint8, device=device).view(E8M0)
    return Tokens(q, scale, ids, torch.rand(T, K, device=device))


def stand_in(x, x_scale, dim=None):
    """In place of an FFN's results, by the row alone: (M, D) bf16, D or ``dim`` if tokens are padded, and (M,) fp32."""
    byte = x.view(torch.uint8).float() + x_scale.view(torch.uint8).float().sum(1, keepdim=True)
    return (byte * 0.37 - 11).bfloat16()[:, :dim].contiguous(), byte.sum(1)


def exchange_all(impl, workspaces, tokens, factor, b2_ED=None, dim=None):
    """A forward's exchange and a backward's of all ranks, each step on all of them before the next, with ``impl``:
    titan_fp8moe.dispatch.symmetric.exchange or its kernels. ``b2_ED``: a bias of all ranks' experts; ``dim``: D, if the
    tokens' is padded.

    Returns what each rank gets: its rows up to the last expert's end, the tokens that arrived, the row maps, and at the
    end the sums ``out`` and the gradients ``dx`` and ``ds``, of stand-ins for the FFN's results."""
    sizes = workspaces[0].sizes
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
        scale = t.scale.view(torch.uint8).flip(0).view(E8M0)
        impl.publish(at, t.q.flip(0), scale, None)  # stand for the output's quantized gradient
    for at, (plan, token_C, pair_CK, _, offsets, token_M, _, row_CK) in zip(workspaces, state, strict=True):
        impl.wait(at, DISPATCH)
        dy = impl.pull_rows(at, plan, token_C, row_CK, token_M, offsets, False)[:2]
        impl.push_sums(at, plan, *stand_in(*dy, dim), row_CK, pair_CK)
    results = []
    for at, (sent_TK, *_), out, kept in zip(workspaces, sent, outs, state, strict=True):
        impl.wait(at, COMBINE)
        plan, _, _, rows, offsets, token_M, score_M, row_CK = kept
        end, count = int(offsets[-1]), int(plan[0, -1])
        ds = at.view("score_gradients")
        grads = ops.unpermute_gradients(at.sums(dim or sizes.dim), ds, sent_TK, torch.float32)
        results.append((*rows, offsets, token_M[:end], score_M[:end], row_CK[:count], out, *grads))
    return results


# --- the kernels' exchanges, and the specification's ------------------------------------------------------------------


def random_ids(T, K, experts, device):
    """Distinct experts for each token, sometimes skewed; some pairs are -1, and some tokens have no expert."""
    scores = torch.rand(T, experts)
    if torch.rand(()) < 0.3:
        scores[:, : max(experts // 4, 1)] += torch.rand(())
    ids, none = scores.topk(K).indices, torch.rand(T, 1) < 0.1
    if torch.rand(()) < 0.4:
        none = none | (torch.rand(T, K) < 0.2)
    return ids.masked_fill(none, -1).to(device)


CASES = {  # ranks, tokens, dim, top_k, experts of a rank, how many experts can be chosen
    "two ranks": (2, 70, 256, 3, 2, 4),
    "three ranks": (3, 17, 128, 2, 5, 15),
    "eight ranks": (8, 5, 128, 3, 2, 16),
    "rank 0 gets all": (4, 9, 128, 2, 3, 3),
    "one expert gets all": (2, 70, 128, 1, 3, 1),
    "more experts than tokens": (2, 3, 128, 6, 20, 40),
    "one rank": (1, 9, 128, 2, 3, 3),
    "one token": (2, 1, 1152, 2, 4, 8),  # a second CTA moves its last columns
    "no token": (2, 0, 128, 2, 4, 8),
}


def compare(both, tokens, bias=None, dim=None):
    """``both``: workspaces of the kernels, and of the specification."""
    impls = zip((kernels, exchange), both, strict=True)
    assert_same_bits(*(exchange_all(impl, at, tokens, len(tokens), bias, dim) for impl, at in impls))


@pytest.mark.parametrize("name", CASES)
def test_extreme_routings(device, name):
    """Also of a model whose tokens are padded, with biases; then there are fewer."""
    N, T, D, K, E, experts = CASES[name]
    sizes = Sizes(N, T + 5, D, K, E)  # room for more tokens than there are
    both = [make_workspaces(sizes, device) for _ in range(2)]
    tokens = [make_tokens(sizes, random_ids(T, K, experts, device)) for _ in range(N)]
    compare(both, tokens)
    fewer = [Tokens(*(t[: T - T // 3] for t in of)) for of in tokens]
    compare(both, fewer, torch.randn(E, D - 64, device=device), D - 64)
    for at in (at for workspaces in both for at in workspaces):
        assert not at.report.any() and not at.overflow.any()
        assert torch.equal(at.view("arrivals"), at.rounds[:, None].expand(2, N)) and (at.rounds == 4).all()


def test_capacities():
    """Factor 1 holds uniform routing's average, factor N everything."""
    for N, T, K, E in ((2, 64, 4, 8), (8, 4096, 8, 32), (4, 1000, 6, 16), (64, 512, 8, 4)):
        M, C = capacities(T, K, N, E, 1)
        assert recipe.row_capacity(T * K, E) == M and 0 <= C - N * T * (1 - (1 - 1 / N) ** K) < 1 + N * T / 1000
        assert capacities(T, K, N, E, N) == (recipe.row_capacity(N * T * K, E), N * T)
        assert capacities(T, K, N, E, 1000) == capacities(T, K, N, E, N)


@EACH_IMPLEMENTATION
def test_without_room_everything_is_nan_until_reported(impl, device):
    """One rank has too many rows for a factor of 1; all ranks find out, in the same exchange."""
    sizes = Sizes(2, 100, 128, 2, 2)
    workspaces = make_workspaces(sizes, device)
    fits, too_many = torch.tensor([[0, 1], [2, 3]]).repeat(50, 1), torch.tensor([[0, 1]]).repeat(100, 1)

    def run(ids):
        results = exchange_all(impl, workspaces, [make_tokens(sizes, ids.to(device)) for _ in range(2)], 1)
        return [t for result in results for t in result[-3:]]  # sums and gradients

    for ids in (too_many, fits):
        assert all(t.isnan().all() for t in run(ids))
        assert all(at.report[[ROWS, TOKENS]].tolist() == [[512, 0], [200, 0]] for at in workspaces)
    for at in workspaces:
        assert "needed 512 rows and 200 dispatched tokens" in str(at.error()) and at.error() is None
    assert all(t.isfinite().all() for t in run(fits))


@EACH_IMPLEMENTATION
@pytest.mark.parametrize("more", [0, 1])
def test_tokens_fill_the_room_exactly_or_are_too_many(impl, device, more):
    """The rows fit either way. Only plans: a plan that overlooks it would let the pulls write past their results."""
    sizes = Sizes(2, 20, 128, 2, 1)
    workspaces, C = make_workspaces(sizes, device), 30
    for at, arriving in zip(workspaces, (15, 15 + more), strict=True):
        ids = torch.tensor([[0, -1]]).repeat(arriving, 1).to(device)
        tokens = make_tokens(sizes, ids)
        _, token_C, counts_N = ops.dispatch_routing(ids, 2, 1)
        impl.publish(at, tokens.q, tokens.scale, (ids, tokens.scores, token_C, counts_N, 1024, C))
    for at in workspaces:
        impl.plan(at)
        assert int(at.overflow) == more
        assert at.report[[ROWS, TOKENS]].tolist() == [[128 * more, 0], [(C + 1) * more, 0]]


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the kernel that waits too long traps")
def test_late_rank_is_named(monkeypatch):
    """tests/distributed has the specification's."""
    monkeypatch.setattr(kernels, "INTERPRETED_SPINS", 20)
    workspaces = make_workspaces(Sizes(3, 4, 128, 1, 1))
    for at in workspaces[:2]:
        exchange.arrive(at, 0)
    kernels.wait(workspaces[0], 0)
    assert workspaces[0].report[workspace.LATE].tolist() == [0, 0, 1]
    with pytest.raises(RuntimeError, match=r"rank 0 of the .* group has waited 1 s.* for ranks \[2\]"):
        workspaces[0].begin()


def test_an_interrupted_exchange_is_reset_with_all_ranks():
    """By the next one, once: what ranks have arrived for before is forgotten between two barriers. Its transfer ends
    before its memory."""
    (at,) = make_workspaces(Sizes(1, 4, 128, 1, 1))
    barriers, joined = [], []
    at.barrier = lambda: barriers.append((at.view("arrivals").any().item(), at.rounds.any().item()))
    at.join = lambda: joined.append(at.in_flight)
    for interrupted in (True, False):
        at.begin()
        exchange.arrive(at, DISPATCH)
        exchange.wait(at, DISPATCH)
        exchange.arrive(at, COMBINE)
        if interrupted:
            at.interrupt()
        else:
            exchange.wait(at, COMBINE)
            at.in_flight = False
    assert barriers == [(True, True), (False, False)] and joined == [True]
    at.begin()
    # An error between two ops some ranks may not have met: none resets its arrivals alone.
    with pytest.raises(RuntimeError, match="two layers are in flight .* an error came between two ops"):
        at.begin()
    assert len(barriers) == 2 and torch.equal(at.view("arrivals")[:, 0], at.rounds)
