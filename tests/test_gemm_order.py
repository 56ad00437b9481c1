"""The pieces of the Hopper GEMMs cover their results, and each has its operands' place; without a GPU.

Gluon has no interpreter. But the functions that place pieces are plain enough to run in Python, on numbers and, where
they work on a warp's lanes, tensors.
"""

import heapq
from types import SimpleNamespace

import pytest
import torch

from titan_fp8moe.kernels import grouped_mm_hopper, hopper, wgrad_hopper
from titan_fp8moe.recipe import TILE


class Pointer:
    """To an element of a list, or to one for each lane."""

    def __init__(self, values, offset=0):
        self.values, self.offset = values, offset

    def __add__(self, offset):
        return Pointer(self.values, self.offset + offset)

    __sub__ = lambda self, offset: self + -offset  # noqa: E731

    def load(self, mask=True, other=None):
        def one(offset, wanted):
            if not wanted:
                return other
            assert 0 <= offset < len(self.values), "read out of bounds"
            return self.values[offset]

        if not isinstance(self.offset, torch.Tensor):
            return one(self.offset, mask)
        mask = torch.as_tensor(mask).expand_as(self.offset)
        return torch.tensor([one(o, m) for o, m in zip(self.offset.tolist(), mask.tolist(), strict=True)])


def where(condition, x, y):
    return torch.where(condition, x, y) if isinstance(condition, torch.Tensor) else x if condition else y


@pytest.fixture
def programs(monkeypatch):
    """Sets the number of programs, and lets Gluon functions run in Python."""

    def install(num_programs):
        gl = SimpleNamespace(
            num_programs=lambda axis: num_programs,
            num_warps=lambda: 4,
            BlockedLayout=lambda *args: None,
            arange=lambda start, end, layout: torch.arange(start, end),
            zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
            zeros_like=torch.zeros_like,
            sum=lambda x, axis: int(x.sum(axis)),
            load=lambda pointer, mask=True, other=None: pointer.load(mask, other),
            minimum=min,
            maximum=max,
            where=where,
            static_range=range,
            int32=torch.int32,
        )
        for module in (hopper, grouped_mm_hopper, wgrad_hopper):
            monkeypatch.setattr(module, "gl", gl)
            for name, value in list(vars(module).items()):
                if hasattr(value, "fn") and value.fn.__module__ == module.__name__:
                    monkeypatch.setattr(module, name, value.fn)
        monkeypatch.setattr(hopper, "SUPER_ROW", 12)

    return install


def pieces(module, problem_args, sizes):
    problem, num_pieces = module._problem(*problem_args)
    return [module._locate(index, problem, *sizes) for index in range(num_pieces)]


def groups(kind, E):
    """Blocks of 128 rows of each group."""
    if kind == "random":
        return torch.randint(0, 40, (E,)).tolist()
    if kind == "one has all":
        return [0] * (E // 2) + [100] + [0] * (E - E // 2 - 1)
    return {"equal": [12] * E, "rising": list(range(1, E + 1)), "falling": list(range(E, 0, -1)), "none": [0] * E}[kind]


KINDS = ["random", "one has all", "equal", "rising", "falling", "none"]


def ends_of(blocks):
    return (torch.tensor(blocks).cumsum(0) * TILE).tolist()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("E", [1, 2, 8, 40])
@pytest.mark.parametrize("N", [128, 256, 384, 1408, 2048])
def test_grouped_mm_covers_every_tile_once(programs, kind, E, N):
    programs(132)
    K, blocks = 640, groups(kind, E)
    offsets = Pointer(ends_of(blocks))
    seen = torch.zeros(sum(blocks), N // TILE, dtype=torch.int)
    expert_of = [e for e, size in enumerate(blocks) for _ in range(size)]
    for place, wide, (m, n), expert in pieces(grouped_mm_hopper, (offsets, N, E), (N, K, E)):
        seen[m // TILE, n // TILE : n // TILE + 1 + wide] += 1
        assert expert == expert_of[m // TILE]
        assert place == (m, expert * N + n, 0, K // TILE)
    assert (seen == 1).all()


# Many waves; few, with and without a narrow last column, with more experts than are put in order; one column.
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "E, N, K",
    [(64, 2048, 1408), (1, 2048, 1408), (2, 2048, 1408), (8, 2048, 1408), (13, 2048, 1408), (4, 384, 384),
     (16, 384, 384), (17, 384, 384), (3, 256, 2048), (2, 256, 128)],
)  # fmt: skip
@pytest.mark.parametrize("num_programs", [132, 114, 7])
def test_wgrad_covers_every_tile_once(programs, kind, E, N, K, num_programs):
    programs(num_programs)
    blocks = groups(kind, E)
    ends = ends_of(blocks)
    seen = torch.zeros(E, N // TILE, K // TILE, dtype=torch.int)
    for (n, k, start, steps), wide, position, expert in pieces(wgrad_hopper, (Pointer(ends), N, K, E), (N, K, E)):
        seen[expert, n // TILE, k // TILE : k // TILE + 1 + wide] += 1
        assert position == (expert * N + n, k)
        assert (start, steps) == (ends[expert] - blocks[expert] * TILE, blocks[expert])
    assert (seen == 1).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("E", [1, 2, 8, 13])
def test_longest_pieces_come_first_in_few_waves(programs, kind, E):
    programs(132)
    N, K, blocks = 2048, 1408, groups(kind, E)
    placed = pieces(wgrad_hopper, (Pointer(ends_of(blocks)), N, K, E), (N, K, E))
    num_split = len(placed) - E * N // TILE * 6
    assert num_split in (0, E * N // TILE * 5 % 132)
    whole, halves = placed[: len(placed) - 2 * num_split], placed[len(placed) - 2 * num_split :]
    costs = [steps * (7 if wide else 4) for (_, _, _, steps), wide, _, _ in whole]
    assert costs == sorted(costs, reverse=True)
    assert all(not wide and steps == min(blocks) for (_, _, _, steps), wide, _, _ in halves)


# Two groups of 0.7 and 1.3 times the average, the shorter first, and a group with half of all rows.
@pytest.mark.parametrize(
    "blocks", [[128] * 2, [90, 166], [64] * 4, [21, 128, 21, 21], [32] * 8, [9] * 4 + [64] + [9] * 3]
)
def test_few_waves_end_nearly_together(programs, blocks):
    """If programs take pieces in this order, and a half takes 4 where a wide tile takes 7, they end at most 20% after
    the time that the same work would take if it could be divided at will. (39% in the second case, with all narrow
    tiles last.)"""
    programs(132)
    E, N, K = len(blocks), 2048, 1408
    busy_until, work = [0] * 132, 0
    for (_, _, _, steps), wide, _, _ in pieces(wgrad_hopper, (Pointer(ends_of(blocks)), N, K, E), (N, K, E)):
        heapq.heapreplace(busy_until, busy_until[0] + steps * (7 if wide else 4))
        work += steps * (7 if wide else 3.5)
    assert max(busy_until) <= 1.2 * work / 132
