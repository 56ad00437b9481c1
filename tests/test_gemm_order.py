"""The Hopper GEMMs' work tiles cover the results, and each tile has the right operands; without a GPU.

:mod:`tests.gluon_emulator` runs whole GEMMs, small ones. Here its language runs the tile schedulers alone, which is
fast enough for results of many waves.
"""

import itertools

import pytest
import torch

from tests.gluon_emulator import Partitions, Pointer, Value, language_of, patched
from titan_fp8moe.kernels.gemm import forward, wgrad
from titan_fp8moe.recipe import BLOCK


def work_tiles(module, num_ctas, ends, *problem):
    """The tiles of a launch, their fields as ints."""
    language, _ = language_of(Partitions(), num_ctas)
    with patched(gl=language):
        offsets = Pointer.to(torch.tensor(ends, dtype=torch.int32))
        scheduler = module.TileScheduler.create(module.Problem(offsets, *problem))
        tiles = [scheduler.locate(Value(index)) for index in range(int(scheduler.num_tiles))]
    return [tile._replace(**{name: int(x) for name, x in tile._asdict().items()}) for tile in tiles]


KINDS = {  # blocks of 128 rows of each of E groups
    "random": lambda E: torch.randint(0, 2 + 200 // E, (E,)).tolist(),
    "one has all": lambda E: [0] * (E // 2) + [100] + [0] * (E - E // 2 - 1),
    "none": lambda E: [0] * E,
}


def ends_of(blocks):
    return (torch.tensor(blocks).cumsum(0) * BLOCK).tolist()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("E", [1, 2, 40])
@pytest.mark.parametrize("N", [128, 384, 2048])
def test_grouped_mm_covers_every_tile_once(kind, E, N):
    K, blocks, seen = 640, KINDS[kind](E), []
    expert_of = [e for e, size in enumerate(blocks) for _ in range(size)]
    for tile in work_tiles(forward, 132, ends_of(blocks), N, K, E, 0):
        m, n = tile.row, tile.column
        seen += [(m, column) for column in range(n, n + BLOCK + BLOCK * tile.is_wide, BLOCK)]
        assert tile.expert == expert_of[m // BLOCK]
        assert (tile.a_row, tile.b_row, tile.first_column) == (m, tile.expert * N + n, 0)
        assert tile.num_k_blocks == K // BLOCK
    assert sorted(seen) == [*itertools.product(range(0, len(expert_of) * BLOCK, BLOCK), range(0, N, BLOCK))]


# Many waves; few; narrow tiles in the last column, one column; the result, K x N, stored transposed.
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "E, N, K, transposed",
    [(5, 2816, 2048, False), (1, 2816, 2048, False), (2, 2816, 2048, False), (2, 1408, 1408, False),
     (16, 384, 384, False), (3, 256, 2048, False), (2, 256, 128, False), (5, 1408, 2048, True), (1, 1408, 2048, True),
     (2, 1408, 2048, True), (3, 384, 512, True), (2, 128, 256, True)],
)  # fmt: skip
@pytest.mark.parametrize("num_ctas, parts", [(132, 1), (132, 2), (7, 1)])
def test_wgrad_covers_every_tile_once(kind, E, N, K, num_ctas, parts, transposed):
    rows = K if transposed else N
    if rows // parts % (2 * BLOCK if transposed else BLOCK):
        parts = 1
    blocks, seen = KINDS[kind](E), []
    ends = ends_of(blocks)
    for tile in work_tiles(wgrad, num_ctas, ends, N, K, E, parts, transposed):
        n, k, expert, width = tile.a_row, tile.b_row, tile.expert, BLOCK + BLOCK * tile.is_wide
        seen += [(expert, n, column) for column in range(k, k + width, BLOCK)]
        out_row, out_column = (k, n) if transposed else (n, k)
        part, row = divmod(out_row, rows // parts)
        assert (tile.row, tile.column) == ((part * E + expert) * (rows // parts) + row, out_column)
        assert row + (width if transposed else BLOCK) <= rows // parts
        assert (tile.first_column, tile.num_k_blocks) == (ends[expert] - blocks[expert] * BLOCK, blocks[expert])
    assert sorted(seen) == [*itertools.product(range(E), range(0, N, BLOCK), range(0, K, BLOCK))]


@pytest.mark.parametrize("blocks", [[90, 166], [166, 90], [128, 128], [0, 5]])
def test_longer_of_two_experts_is_first(blocks):
    tiles = work_tiles(wgrad, 132, ends_of(blocks), 1408, 2048, 2, 1, False)
    num_k_blocks = [tile.num_k_blocks for tile in tiles]
    assert num_k_blocks == sorted(num_k_blocks, reverse=True)
    # A wave of 132, then the halves of the remaining 44.
    assert [tile.is_wide for tile in tiles] == 132 * [True] + 88 * [False]
