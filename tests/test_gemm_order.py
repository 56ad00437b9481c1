"""The pieces of the Hopper GEMMs cover their results, and each has its operands' place; without a GPU.

Gluon has no interpreter. But the functions that place pieces are plain enough to run in Python, on numbers and, where
they work on a warp's lanes, tensors.
"""

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

    def __sub__(self, offset):
        return self + -offset

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
            sum=lambda x, axis: int(x.sum(axis)),
            max=lambda x, axis: int(x.max()),
            load=lambda pointer, mask=True, other=None: pointer.load(mask, other),
            minimum=min,
            maximum=max,
            where=where,
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
    print(f"blocks of the groups: {blocks}")
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
        assert n + TILE * (1 + wide) <= N
        seen[m // TILE, n // TILE : n // TILE + 1 + wide] += 1
        assert expert == expert_of[m // TILE]
        assert place == (m, expert * N + n, 0, K // TILE)
    assert (seen == 1).all()


# Many waves; few, with a narrow last column, with and without halves; with more experts than lanes; one column.
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "E, N, K",
    [(64, 2048, 1408), (1, 2048, 1408), (2, 2048, 1408), (8, 2048, 1408), (13, 2048, 1408), (4, 384, 384),
     (16, 384, 384), (33, 384, 384), (3, 256, 2048), (2, 256, 128)],
)  # fmt: skip
@pytest.mark.parametrize("num_programs, parts", [(132, 1), (132, 2), (114, 1), (7, 1)])
def test_wgrad_covers_every_tile_once(programs, kind, E, N, K, num_programs, parts):
    if N // parts % TILE:
        parts = 1
    programs(num_programs)
    blocks = groups(kind, E)
    ends = ends_of(blocks)
    seen = torch.zeros(E, N // TILE, K // TILE, dtype=torch.int)
    placed = pieces(wgrad_hopper, (Pointer(ends), N, K, E, parts), (N, K, E))
    for (n, k, start, steps), wide, position, expert in placed:
        assert k + TILE * (1 + wide) <= K
        seen[expert, n // TILE, k // TILE : k // TILE + 1 + wide] += 1
        part, row = divmod(n, N // parts)
        assert position == ((part * E + expert) * (N // parts) + row, k)
        assert (start, steps) == (ends[expert] - blocks[expert] * TILE, blocks[expert])
    assert (seen == 1).all()


# Last unless an expert has twice its share of rows, as in the third and the fourth; 64 experts are many waves.
@pytest.mark.parametrize(
    "E, blocks, last",
    [(8, [12] * 8, True), (8, [9, 15] * 4, True), (8, [0] * 4 + [12] * 4, False), (8, [6] * 7 + [42], False),
     (2, [90, 166], True), (1, [12], True), (64, [12] * 64, False)],
)  # fmt: skip
def test_narrow_tiles_come_last_in_few_even_waves(programs, E, blocks, last):
    programs(132)
    N, K = 2048, 1408
    wides = [wide for _, wide, _, _ in pieces(wgrad_hopper, (Pointer(ends_of(blocks)), N, K, E, 1), (N, K, E))]
    assert (wides == sorted(wides, reverse=True)) == last


@pytest.mark.parametrize("blocks", [[90, 166], [166, 90], [12, 9, 15, 14, 12, 10, 15, 9]])
def test_longest_expert_is_first_in_few_even_waves(programs, blocks):
    programs(132)
    (N, K), E = (2048, 1408), len(blocks)
    placed = pieces(wgrad_hopper, (Pointer(ends_of(blocks)), N, K, E, 1), (N, K, E))
    whole = [steps for (_, _, _, steps), wide, _, _ in placed if wide]
    narrow = [steps for (_, k, _, steps), _, _, _ in placed if k == K - TILE]
    assert whole[0] == narrow[0] == max(blocks)
    halves = len(placed) - len(whole) - len(narrow)
    assert halves == (56 if E == 2 else 0)
    assert [k == K - TILE for (_, k, _, _), wide, _, _ in placed if not wide] == [True] * len(narrow) + [False] * halves
