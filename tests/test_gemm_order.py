"""In which order the Hopper weight-gradient GEMM computes its work tiles, which no result shows; without a GPU."""

import pytest
import torch

from tests.gluon_emulator import Partitions, Pointer, Value, language_of, patched
from tests.offline_compile import meta, record_launches
from titan_fp8moe.kernels.gemm import grouped_mm, wgrad
from titan_fp8moe.recipe import E8M0, FP8, TILE


@pytest.mark.parametrize("blocks", [[90, 166], [166, 90], [128, 128], [0, 5]])
def test_longer_of_two_experts_is_first(blocks):
    language, _ = language_of(Partitions(), 132)
    with patched(gl=language):
        ends = Pointer.to((torch.tensor(blocks).cumsum(0) * TILE).int())
        scheduler = wgrad.TileScheduler.create(wgrad.Problem(ends, 1408, 2048, 2, 1, False))
        tiles = [scheduler.locate(Value(index)) for index in range(int(scheduler.num_tiles))]
    num_k_blocks = [int(tile.num_k_blocks) for tile in tiles]
    assert num_k_blocks == sorted(num_k_blocks, reverse=True)
    # A wave of 132, then the halves of the remaining 44.
    assert [int(tile.is_wide) for tile in tiles] == 132 * [True] + 88 * [False]


@pytest.mark.parametrize(
    "N, K, parts, transposed",
    [(2048, 1408, 1, True), (2816, 1408, 2, False), (2816, 2048, 2, False), (1408, 1408, 1, False),
     (512, 128, 2, True)],
)  # fmt: skip
def test_wgrad_is_transposed_where_that_avoids_narrow_tiles(N, K, parts, transposed, monkeypatch):
    """tests/kernels/test_grouped_mm.py has the results of both."""
    monkeypatch.setattr(grouped_mm, "is_hopper", lambda x: True)
    a, b = ((meta(n, 512, dtype=FP8), meta(n // TILE, 4, dtype=E8M0)) for n in (N, K))
    args = *a, *b, meta(2, dtype=torch.int32), torch.bfloat16, parts
    (launch,) = record_launches(grouped_mm.grouped_mm_wgrad, *args)
    assert launch.arguments["TRANSPOSED"] == transposed
