"""The Hopper GEMMs' work tiles cover the results, and each tile has the right operands; without a GPU.

:mod:`tests.gluon_emulator` runs whole GEMMs, small ones. The tile schedulers are simple enough to run on Python's
numbers, and on tensors for a warp's lanes. That is fast enough for results of many waves.
"""

from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch

from tests.gluon_emulator import patched
from tests.offline_compile import record_launches
from titan_fp8moe.kernels.gemm import forward, grouped_mm, wgrad
from titan_fp8moe.recipe import E8M0, FP8, TILE


class Pointer:
    """To an element of a list, or to one per lane."""

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
def set_num_ctas():
    """Sets the number of CTAs, and lets Gluon functions run in Python."""
    with ExitStack() as stack:

        def install(num_ctas):
            gl = SimpleNamespace(
                num_programs=lambda axis: num_ctas,
                num_warps=lambda: 4,
                BlockedLayout=lambda *args: None,
                arange=lambda start, end, layout: torch.arange(start, end),
                zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
                sum=lambda x, axis: int(x.sum(axis)),
                load=lambda pointer, mask=True, other=None: pointer.load(mask, other),
                minimum=min,
                maximum=max,
                where=where,
                int32=torch.int32,
            )
            stack.enter_context(patched(gl=gl))

        yield install


def work_tiles(module, *problem):
    scheduler = module.TileScheduler.create(module.Problem(*problem))
    return [scheduler.locate(index) for index in range(scheduler.num_tiles)]


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
@pytest.mark.parametrize("E", [1, 2, 40])
@pytest.mark.parametrize("N", [128, 384, 2048])
def test_grouped_mm_covers_every_tile_once(set_num_ctas, kind, E, N):
    set_num_ctas(132)
    K, blocks = 640, groups(kind, E)
    offsets = Pointer(ends_of(blocks))
    seen = torch.zeros(sum(blocks), N // TILE, dtype=torch.int)
    expert_of = [e for e, size in enumerate(blocks) for _ in range(size)]
    for tile in work_tiles(forward, offsets, N, K, E, 0):
        m, n, width = tile.row, tile.column, 1 + tile.is_wide
        assert n + TILE * width <= N
        seen[m // TILE, n // TILE : n // TILE + width] += 1
        assert tile.expert == expert_of[m // TILE]
        assert (tile.a_row, tile.b_row, tile.first_column) == (m, tile.expert * N + n, 0)
        assert tile.num_k_blocks == K // TILE
    assert (seen == 1).all()


# Many waves; few; narrow tiles in the last column, one column; the result, K x N, stored transposed.
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "E, N, K, transposed",
    [(16, 2816, 2048, False), (1, 2816, 2048, False), (2, 2816, 2048, False), (2, 1408, 1408, False),
     (16, 384, 384, False), (3, 256, 2048, False), (2, 256, 128, False), (16, 1408, 2048, True), (1, 1408, 2048, True),
     (2, 1408, 2048, True), (3, 384, 512, True), (2, 128, 256, True)],
)  # fmt: skip
@pytest.mark.parametrize("num_ctas, parts", [(132, 1), (132, 2), (7, 1)])
def test_wgrad_covers_every_tile_once(set_num_ctas, kind, E, N, K, num_ctas, parts, transposed):
    rows = K if transposed else N
    if rows // parts % (2 * TILE if transposed else TILE):
        parts = 1
    set_num_ctas(num_ctas)
    blocks = groups(kind, E)
    ends = ends_of(blocks)
    seen = torch.zeros(E, N // TILE, K // TILE, dtype=torch.int)
    for tile in work_tiles(wgrad, Pointer(ends), N, K, E, parts, transposed):
        n, k, expert, width = tile.a_row, tile.b_row, tile.expert, 1 + tile.is_wide
        assert k + TILE * width <= K
        seen[expert, n // TILE, k // TILE : k // TILE + width] += 1
        out_row, out_column = (k, n) if transposed else (n, k)
        part, row = divmod(out_row, rows // parts)
        assert (tile.row, tile.column) == ((part * E + expert) * (rows // parts) + row, out_column)
        assert row + (TILE * width if transposed else TILE) <= rows // parts
        assert (tile.first_column, tile.num_k_blocks) == (ends[expert] - blocks[expert] * TILE, blocks[expert])
    assert (seen == 1).all()


@pytest.mark.parametrize("blocks", [[90, 166], [166, 90], [128, 128], [0, 5]])
def test_longer_of_two_experts_is_first(set_num_ctas, blocks):
    set_num_ctas(132)
    tiles = work_tiles(wgrad, Pointer(ends_of(blocks)), 1408, 2048, 2, 1, False)
    num_k_blocks = [tile.num_k_blocks for tile in tiles]
    assert num_k_blocks == sorted(num_k_blocks, reverse=True)
    # A wave of 132, then the halves of the remaining 44.
    assert [tile.is_wide for tile in tiles] == 132 * [True] + 88 * [False]


@pytest.mark.parametrize(
    "N, K, parts, transposed",
    [
        (2048, 1408, 1, True),
        (2816, 1408, 2, False),
        (2816, 2048, 2, False),
        (1408, 1408, 1, False),
        (512, 128, 2, True),
    ],
)
def test_wgrad_is_transposed_where_that_avoids_narrow_tiles(N, K, parts, transposed, monkeypatch):
    """tests/kernels/test_grouped_mm.py has the results of both."""
    monkeypatch.setattr(grouped_mm, "is_hopper", lambda x: True)
    a, b = (torch.empty(n, 512, dtype=FP8, device="meta") for n in (N, K))
    a_scale, b_scale = (torch.empty(n // TILE, 4, dtype=E8M0, device="meta") for n in (N, K))
    offsets = torch.empty(2, dtype=torch.int32, device="meta")
    (launch,) = record_launches(grouped_mm.grouped_mm_wgrad, a, a_scale, b, b_scale, offsets, torch.bfloat16, parts)
    assert launch.arguments["TRANSPOSED"] == transposed
