"""Kernels that exchange tokens through shared memory, with several ranks in one process, against the all-to-all path
and the exchange in plain PyTorch."""

import pytest
import torch

from tests.kernels.compare import assert_same_bits, randn
from tests.ranks import all_to_all, assert_equal, exchange_all, make_tokens, make_workspaces
from titan_fp8moe.dispatch.symmetric import exchange, kernels
from titan_fp8moe.dispatch.symmetric.workspace import LATE, Sizes

CASES = {  # ranks, tokens, dim, top_k, experts of a rank, how many experts can be chosen
    "two ranks": (2, 70, 256, 3, 2, 4),
    "three ranks": (3, 17, 128, 2, 5, 15),
    "eight ranks": (8, 5, 128, 3, 2, 16),
    "rank 0 gets all": (4, 9, 128, 2, 3, 3),
    "one expert gets all": (2, 70, 128, 1, 3, 1),
    "more experts than tokens": (2, 3, 128, 6, 20, 40),
    "one rank": (1, 9, 128, 2, 3, 3),
    "one token": (2, 1, 384, 2, 4, 8),
    "no token": (2, 0, 128, 2, 4, 8),
}


def make_ids(generator, tokens, top_k, experts):
    ids = torch.rand(tokens, experts, generator=generator, device=generator.device).topk(top_k).indices
    return ids.masked_fill(torch.rand(tokens, 1, generator=generator, device=generator.device) < 0.1, -1)


@pytest.mark.parametrize("name", CASES)
def test_exchange_equals_the_all_to_all_path(generator, device, name, monkeypatch):
    N, T, D, K, E, experts = CASES[name]
    sizes = Sizes(N, T + 5, D, K, E)  # room for more tokens than there are
    workspaces = make_workspaces(sizes, device)
    for ctas in (3, None) if name in ("two ranks", "one token") else (None,):
        monkeypatch.setattr(kernels, "MAX_CTAS", ctas)  # with 3 CTAs, each handles several tiles
        tokens = [make_tokens(sizes, make_ids(generator, T, K, experts)) for _ in range(N)]
        assert_equal(exchange_all(kernels, workspaces, tokens, N), all_to_all(tokens, E))
    assert not any(at.report.any() or at.overflow.any() for at in workspaces)


@pytest.mark.parametrize("impl", [exchange, kernels])
def test_sums_with_a_bias(generator, device, impl):
    N, T, D, K, E, _ = CASES["three ranks"]
    workspaces, b2 = make_workspaces(Sizes(N, T, D, K, E), device), randn(generator, E, D)
    tokens = [make_tokens(workspaces[0].sizes, make_ids(generator, T, K, N * E)) for _ in range(N)]
    assert_equal(exchange_all(impl, workspaces, tokens, N, b2), all_to_all(tokens, E, b2))


@pytest.mark.parametrize("impl", [exchange, kernels])
def test_sums_of_padded_tokens(generator, device, impl):
    """Tokens travel with 256 columns, of which the model has 192."""
    N, T, K, E, dim = 3, 17, 2, 5, 192
    workspaces, b2 = make_workspaces(Sizes(N, T, 256, K, E), device), randn(generator, E, dim)
    tokens = [make_tokens(workspaces[0].sizes, make_ids(generator, T, K, N * E)) for _ in range(N)]
    for bias in (None, b2):
        assert_equal(exchange_all(impl, workspaces, tokens, N, bias, dim), all_to_all(tokens, E, bias, dim))


@pytest.mark.parametrize("impl", [exchange, kernels])
def test_plan_and_pairs(generator, device, impl):
    """From first principles: whose tokens arrive, in which order, with which pairs."""
    N, T, D, K, E = 3, 30, 128, 2, 2
    workspaces = make_workspaces(Sizes(N, T, D, K, E), device)
    tokens = [make_tokens(workspaces[0].sizes, make_ids(generator, T, K, N * E)) for _ in range(N)]
    exchange_all(impl, workspaces, tokens, N)
    for rank, at in enumerate(workspaces):
        plan = impl.plan(at)
        ids_CK, scores_CK, pair_CK, token_C = impl.pull_pairs(at, plan, N * T)
        want = [(n, t) for n in range(N) for t in range(T) if (tokens[n].ids[t] // E == rank).any()]
        first = [sum(n < source for n, _ in want) for source in range(N)]
        assert plan[0].tolist() == [*first, len(want)]
        assert token_C[: len(want)].tolist() == [t for _, t in want]
        for c, (n, t) in enumerate(want):
            k = (tokens[n].ids[t] // E == rank).nonzero().squeeze(1)
            assert ids_CK[c].tolist() == (tokens[n].ids[t][k] % E).tolist() + [-1] * (K - len(k))
            assert pair_CK[c][: len(k)].tolist() == k.tolist()
            assert_same_bits(scores_CK[c][: len(k)], tokens[n].scores[t][k])
        assert (ids_CK[len(want) :] == -1).all()


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the kernel that waits too long traps")
def test_late_rank_is_reported(device, monkeypatch):
    monkeypatch.setattr(kernels, "INTERPRETED_SPINS", 20)
    workspaces = make_workspaces(Sizes(3, 4, 128, 1, 1), device)
    for at in workspaces[:2]:
        kernels.arrive(at, 0)
    kernels.wait(workspaces[0], 0)
    assert workspaces[0].report[LATE].tolist() == [0, 0, 1]
    with pytest.raises(RuntimeError, match=r"for ranks \[2\]"):
        workspaces[0].check_arrivals()
