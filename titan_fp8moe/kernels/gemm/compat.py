"""Gluon interfaces whose names differ between Triton versions; checked with 3.6.0 to 3.9.0.

The Hopper GEMMs import these names from here. The import fails if a later version renames them again.
"""

from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.language import core

# Synchronizes the warps of one partition. Triton 3.6 calls it thread_barrier.
partition_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier

# TMA copies between global and shared memory. Triton 3.6 and 3.7 have only the long names, 3.9 only the short ones.
tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
tma_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global

# Private before Triton 3.8.
_aggregate = gluon.aggregate if hasattr(gluon, "aggregate") else core._aggregate


def aggregate(cls: Any) -> Any:
    """Turns a class with annotated fields and ``gluon.jit`` methods into a value of Gluon functions.

    Unlike a named tuple it has methods, and its constants stay constants: Triton turns those of a tuple into run-time
    values when the tuple is assigned or returned. The constructor takes the fields in order. Triton adds such a
    constructor itself only from 3.8 on.

    Returns:
        Triton's class; its ``__wrapped__`` is ``cls``.
    """
    names = tuple(cls.__annotations__)

    def __init__(self: Any, *values: Any) -> None:
        for name, value in zip(names, values, strict=True):
            setattr(self, name, value)

    setattr(__init__, "__triton_builtin__", True)  # noqa: B010  else Triton rejects it as a Python function that a kernel calls
    cls.__init__ = __init__
    value_class = _aggregate(cls)
    value_class.__wrapped__ = cls
    return value_class
