"""Sizes for launches: the limit on rows, and integer arithmetic.

A layer's Python calls these functions 20 times. Triton's ``cdiv`` and ``next_power_of_2`` took 6% of its time.
"""

MAX_ROWS = 2**21 - 128
"""The most rows that a rank may have in a layer, padding included. A CUDA grid has at most 65535 blocks along y, which
have 32 rows here."""


def cdiv(x: int, y: int) -> int:
    return -(-x // y)


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()
