"""Exchanges through shared memory against the all-to-all path, bit for bit, several ranks in one process."""

import pytest
import torch

from tests.ranks import all_to_all, assert_equal, exchange_all, make_tokens, make_workspaces
from titan_fp8moe import recipe
from titan_fp8moe.dispatch.symmetric import exchange
from titan_fp8moe.dispatch.symmetric.workspace import ROWS, TOKENS, Sizes, capacities


def random_ids(T, K, experts):
    """Distinct experts for each token; sometimes skewed, sometimes with entries of -1."""
    scores = torch.rand(T, experts)
    if torch.rand(()) < 0.3:
        scores[:, : max(experts // 4, 1)] += torch.rand(())
    ids = scores.topk(K).indices
    return ids.masked_fill(torch.rand(T, K) < 0.2, -1) if torch.rand(()) < 0.4 else ids


def check(N, E, T, K, make_ids, D=128, workspaces=None):
    workspaces = workspaces or make_workspaces(Sizes(N, T, D, K, E))
    tokens = [make_tokens(workspaces[0].sizes, make_ids(n)) for n in range(N)]
    assert_equal(exchange_all(exchange, workspaces, tokens, N), all_to_all(tokens, E))
    assert not any(at.report.any() for at in workspaces)
    return workspaces


def test_random_routings():
    """200 of them, of all numbers of ranks; workspaces are used again, also for fewer tokens."""
    for N in range(2, 9):
        E = int(torch.randint(1, 9, ()))
        K = int(torch.randint(1, min(6, N * E) + 1, ()))
        workspaces = make_workspaces(Sizes(N, 40, 128, K, E))
        for _ in range(29):
            T = int(torch.randint(1, 41, ()))
            check(N, E, T, K, lambda _, T=T, K=K, N=N, E=E: random_ids(T, K, N * E), workspaces=workspaces)


@pytest.mark.parametrize("N", [2, 3, 8])
def test_extreme_routings(N):
    E, T = 4, 20
    check(N, E, T, 3, lambda _: torch.randint(0, E, (T, 3)))  # all to rank 0, the others get nothing
    check(N, E, T, 3, lambda _: torch.full((T, 3), N * E - 1))  # one expert gets all, three times
    check(N, 64, 5, 4, lambda _: random_ids(5, 4, N * 64))  # more experts than tokens
    check(N, E, T, 2, lambda _: torch.full((T, 2), -1))
    check(N, E, T, 1, lambda _: random_ids(T, 1, N * E))
    check(N, E, 1, 2, lambda n: torch.tensor([[(n + 1) % N * E, n * E]], dtype=torch.int32))
    check(N, E, 300, 2, lambda _: random_ids(300, 2, N * E), D=384)
    check(N, E, 0, 2, lambda _: torch.zeros(0, 2, dtype=torch.int64))


def test_capacities():
    """Factor 1 holds uniform routing's average, factor N everything."""
    for N, T, K, E in ((2, 64, 4, 8), (8, 4096, 8, 32), (4, 1000, 6, 16), (64, 512, 8, 4)):
        M, C = capacities(T, K, N, E, 1)
        assert recipe.row_capacity(T * K, E) == M and 0 <= C - N * T * (1 - (1 - 1 / N) ** K) < 1 + N * T / 1000
        assert capacities(T, K, N, E, N) == (recipe.row_capacity(N * T * K, E), N * T)
        assert capacities(T, K, N, E, 1000) == capacities(T, K, N, E, N)


def test_without_room_everything_is_nan_until_reported():
    """One rank has too many rows for a factor of 1; all ranks find out, in the same exchange."""
    sizes = Sizes(2, 300, 128, 2, 2)
    workspaces = make_workspaces(sizes)
    fits, too_many = torch.tensor([[0, 1], [2, 3]]).repeat(150, 1), torch.tensor([[0, 1]]).repeat(300, 1)

    def run(ids):
        return exchange_all(exchange, workspaces, [make_tokens(sizes, ids) for _ in range(2)], 1)

    assert all(r.out.isfinite().all() and r.grad.isfinite().all() for r in run(fits))
    for ids in (too_many, fits):
        results = run(ids)
        assert all(r.out.isnan().all() and r.grad.isnan().all() and r.ds.isnan().all() for r in results)
        assert all(at.report[[ROWS, TOKENS]].tolist() == [[2 * 640, 0], [600, 0]] for at in workspaces)
    for at in workspaces:
        with pytest.raises(RuntimeError, match="needed 1280 rows and 600 dispatched tokens.*larger dispatch_capacity"):
            at.check_room()
        at.check_room()
    assert all(r.out.isfinite().all() for r in run(fits))


def test_too_many_tokens_are_found_where_rows_fit():
    """Each token brings one pair to rank 0, though uniform routing would bring two of the same token more often."""
    sizes = Sizes(2, 512, 128, 4, 1)
    workspaces = make_workspaces(sizes)
    ids = torch.tensor([[0, -1, -1, -1]]).repeat(512, 1)
    exchange_all(exchange, workspaces, [make_tokens(sizes, ids) for _ in range(2)], 1)
    assert workspaces[0].report[TOKENS, 0] == 1024 > capacities(512, 4, 2, 1, 1)[1]


def test_late_rank_is_named():
    workspaces = make_workspaces(Sizes(3, 4, 128, 1, 1))
    for at in workspaces[:2]:
        exchange.arrive(at, 0)
    workspaces[0].timeout_s = lambda: 0.05
    with pytest.raises(RuntimeError, match=r"rank 0 of the .* group has waited 0 s.* for ranks \[2\]"):
        exchange.wait(workspaces[0], 0)
    with pytest.raises(RuntimeError, match=r"ranks \[2\]"):
        workspaces[0].begin()


def test_one_exchange_at_a_time():
    (at,) = make_workspaces(Sizes(1, 4, 128, 1, 1))
    at.begin()
    with pytest.raises(RuntimeError, match="two layers are in flight"):
        at.begin()
