"""Kernels of exchanges through shared memory against their specification, bit for bit, several ranks in one process.

tests/distributed/test_layers.py compares the specification with the all-to-all.
"""

import pytest
import torch

from tests.kernels.compare import assert_same_bits
from tests.ranks import exchange_all, make_tokens, make_workspaces
from titan_fp8moe import ops, recipe
from titan_fp8moe.dispatch.symmetric import exchange, kernels
from titan_fp8moe.dispatch.symmetric.workspace import COMBINE, DISPATCH, LATE, ROWS, TOKENS, Sizes, capacities

IMPLEMENTATIONS = [pytest.param(exchange, id="specification"), pytest.param(kernels, id="kernels")]


@pytest.fixture(autouse=True)
def few_ctas(device, monkeypatch):
    """So few on a CPU that each moves several tokens' parts."""
    for shape in (kernels.PULL, kernels.PUSH, kernels.BIASED_PUSH) if device == "cpu" else ():
        monkeypatch.setitem(shape, "CTAS", 8)
        monkeypatch.setitem(shape, "TOKENS", 4)


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
    options = tokens, len(tokens), bias, dim
    got, want = (exchange_all(impl, at, *options) for impl, at in zip((kernels, exchange), both, strict=True))
    assert_same_bits(got, want)  # of rows and tokens that count


@pytest.mark.parametrize("name", CASES)
def test_extreme_routings(device, name):
    N, T, D, K, E, experts = CASES[name]
    sizes = Sizes(N, T + 5, D, K, E)  # room for more tokens than there are
    both = [make_workspaces(sizes, device) for _ in range(2)]
    tokens = [make_tokens(sizes, random_ids(T, K, experts, device)) for _ in range(N)]
    compare(both, tokens)
    for at in (at for workspaces in both for at in workspaces):
        assert not at.report.any() and not at.overflow.any()
        assert torch.equal(at.view("arrivals"), at.rounds[:, None].expand(2, N)) and (at.rounds == 2).all()


def test_sums_of_padded_tokens_and_of_biases(device):
    """Tokens travel with 256 columns, of which a model may have 192."""
    N, T, K, E = 3, 17, 2, 5
    both = [make_workspaces(sizes := Sizes(N, T, 256, K, E), device) for _ in range(2)]
    tokens = [make_tokens(sizes, random_ids(T, K, N * E, device)) for _ in range(N)]
    for bias, dim in (
        (None, 192),
        (torch.randn(E, 192, device=device), 192),
        (torch.randn(E, 256, device=device), None),
    ):
        compare(both, tokens, bias, dim)


def test_random_routings(device):
    """Of all numbers of ranks; workspaces are used again, also for fewer tokens. The interpreter takes seconds."""
    for N in (2,) if device == "cpu" else range(2, 9):
        E = int(torch.randint(1, 9, ()))
        K = int(torch.randint(1, min(6, N * E) + 1, ()))
        both = [make_workspaces(sizes := Sizes(N, 40, 128, K, E), device) for _ in range(2)]
        for _ in range(2 if device == "cpu" else 12):
            T = int(torch.randint(1, 41, ()))
            compare(both, [make_tokens(sizes, random_ids(T, K, N * E, device)) for _ in range(N)])
        assert not any(at.report.any() for workspaces in both for at in workspaces)


def test_capacities():
    """Factor 1 holds uniform routing's average, factor N everything."""
    for N, T, K, E in ((2, 64, 4, 8), (8, 4096, 8, 32), (4, 1000, 6, 16), (64, 512, 8, 4)):
        M, C = capacities(T, K, N, E, 1)
        assert recipe.row_capacity(T * K, E) == M and 0 <= C - N * T * (1 - (1 - 1 / N) ** K) < 1 + N * T / 1000
        assert capacities(T, K, N, E, N) == (recipe.row_capacity(N * T * K, E), N * T)
        assert capacities(T, K, N, E, 1000) == capacities(T, K, N, E, N)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_without_room_everything_is_nan_until_reported(impl, device):
    """One rank has too many rows for a factor of 1; all ranks find out, in the same exchange."""
    sizes = Sizes(2, 100, 128, 2, 2)
    workspaces = make_workspaces(sizes, device)
    fits, too_many = torch.tensor([[0, 1], [2, 3]]).repeat(50, 1), torch.tensor([[0, 1]]).repeat(100, 1)

    def run(ids):
        return exchange_all(impl, workspaces, [make_tokens(sizes, ids.to(device)) for _ in range(2)], 1)

    for ids in (too_many, fits):
        results = run(ids)
        assert all(r.out.isnan().all() and r.grad.isnan().all() and r.ds.isnan().all() for r in results)
        assert all(at.report[[ROWS, TOKENS]].tolist() == [[512, 0], [200, 0]] for at in workspaces)
    for at in workspaces:
        assert "needed 512 rows and 200 dispatched tokens" in str(at.error()) and at.error() is None
    assert all(r.out.isfinite().all() and r.grad.isfinite().all() for r in run(fits))


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
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
    assert workspaces[0].report[LATE].tolist() == [0, 0, 1]
    with pytest.raises(RuntimeError, match=r"rank 0 of the .* group has waited 1 s.* for ranks \[2\]"):
        workspaces[0].begin()


@pytest.fixture
def at():
    """The workspace of a single rank."""
    (workspace,) = make_workspaces(Sizes(1, 4, 128, 1, 1))
    return workspace


def test_a_transfer_ends_before_the_memory_of_an_interrupted_op(at):
    joined = []
    at.join = lambda: joined.append(at.in_flight)
    at.begin()
    at.interrupt()
    assert joined == [True]


def test_an_interrupted_exchange_is_reset_with_all_ranks(at):
    """By the next one, once: what ranks have arrived for before is forgotten between two barriers."""
    barriers = []
    at.barrier = lambda: barriers.append((at.view("arrivals").any().item(), at.rounds.any().item()))
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
    assert barriers == [(True, True), (False, False)]
    at.begin()
    assert len(barriers) == 2 and torch.equal(at.view("arrivals")[:, 0], at.rounds)


def test_one_exchange_at_a_time(at):
    """Nor after an error between two ops, which some ranks may not have met: none resets its arrivals alone."""
    at.barrier = lambda: pytest.fail("a barrier that the other ranks do not reach")
    at.begin()
    with pytest.raises(RuntimeError, match="two layers are in flight .* an error came between two ops"):
        at.begin()
