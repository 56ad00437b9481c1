"""Inputs and comparisons the kernel tests share."""

from collections.abc import Iterable

import torch
from torch import Tensor

from titan_fp8moe import recipe
from titan_fp8moe.recipe import BLOCK


def bits(x: Tensor) -> Tensor:
    """The tensor's bit patterns as integers, logical layout kept."""
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()])


def assert_same_bits(got: Tensor | Iterable[Tensor], want: Tensor | Iterable[Tensor]) -> None:
    """Equality of dtype, shape and every bit, of one tensor or of several: NaN equals itself, -0 differs from 0."""
    if not isinstance(got, Tensor):
        for pair in zip(got, want, strict=True):
            assert_same_bits(*pair)
        return
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    torch.testing.assert_close(bits(got), bits(want), rtol=0, atol=0)


def randn(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, device=generator.device)


def randint(generator: torch.Generator, low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high, shape, generator=generator, device=generator.device)


def column_major_scale(generator: torch.Generator, M: int, D: int, low: int = 1, high: int = 255) -> Tensor:
    """(M, D // 128) random e8m0 scales with bytes in low..high - 1, in the expert-order layout."""
    byte = randint(generator, low, high, M, D // BLOCK)
    return recipe.column_major(byte.to(torch.uint8).view(recipe.E8M0))


def fp8_rows(generator: torch.Generator, M: int, D: int) -> Tensor:
    """(M, D) of every e4m3 code but 0xFF, which the recipe never writes."""
    return randint(generator, 0, 255, M, D).to(torch.uint8).view(recipe.FP8)


def offsets(*ends: int, device: torch.device) -> Tensor:
    return torch.tensor(ends, dtype=torch.int32, device=device)
