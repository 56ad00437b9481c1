"""Corrects faults of Triton's interpreter, so that kernels can be compared bit by bit on a CPU.

In Triton 3.6 to 3.9 the interpreter is silently wrong where a GPU is not: fp32 -> e4m3 rounds half up, loses the carry,
does not saturate and breaks subnormals; fp32 -> bf16 truncates; e4m3's NaN reads as 480. :func:`correct_conversions`
replaces the conversions between the formats below by torch's, with the two rules of a GPU's e4m3 cast: finite values
saturate, NaN is 0x7F.
"""

import functools
import math
from types import SimpleNamespace

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

_TORCH = {
    tl.float32: torch.float32,
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
}
_BYTES = {4: torch.int32, 2: torch.int16, 1: torch.uint8}


def _convert(data: np.ndarray, source: tl.dtype, target: tl.dtype) -> np.ndarray:
    """Bit patterns of ``data`` (the interpreter keeps bf16 as uint16, e4m3 as uint8) in the target format."""
    bits = torch.from_numpy(np.ascontiguousarray(data).view(f"i{data.itemsize}" if data.itemsize > 1 else np.uint8))
    x = bits.view(_TORCH[source]).float()
    if target == tl.float8e4nv:
        out = x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).masked_fill(x.isnan(), 0x7F)
    else:
        out = x.to(_TORCH[target])
    return out.view(_BYTES[out.element_size()]).numpy().reshape(data.shape)


def correct_conversions() -> None:
    """Patches the interpreter of this process; other pairs of formats stay with the original conversion."""
    if triton.__version__.startswith("3.6.") and np.lib.NumpyVersion(np.__version__) >= "2.4.0":
        raise RuntimeError("the interpreter of Triton 3.6 does not work with NumPy 2.4: pip install 'numpy<2.4'")
    original = getattr(interpreter, "_convert_float", None)
    if original is None:
        raise RuntimeError("triton.runtime.interpreter._convert_float is gone; tests/interpreter.py needs an update")

    def convert_float(data, source, target, rounding_mode):
        if source in _TORCH and target in _TORCH:
            return _convert(data, source, target)
        return original(data, source, target, rounding_mode)

    interpreter._convert_float = convert_float
    _make_masks_boolean()
    # Checks of integers for overflow, half of the time, assert nothing without ``debug``.
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    _patch_language_once()
    _remember_types()


def _patch_language_once() -> None:
    """Changes ``triton.language`` at the first launch and for good, not for each launch and device function."""
    both = SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    patch_once = functools.cache(functools.partial(interpreter._patch_lang, both))

    def patch(fn):
        patch_once()
        return SimpleNamespace(restore=lambda: None)

    interpreter._patch_lang = patch


def _remember_types() -> None:
    """Looks up types and shapes, which each operation would make and compare anew: half of the time."""
    # Names hold element types and shapes.
    tl.block_type.__hash__ = tl.pointer_type.__hash__ = tl.dtype.__hash__
    tl.block_type.__eq__ = lambda self, other: isinstance(other, tl.block_type) and self.name == other.name
    tl.block_type.to_ir = lambda self, builder: self
    tl.block_type.with_element_ty = functools.cache(tl.block_type.with_element_ty)
    interpreter._get_np_dtype = functools.cache(interpreter._get_np_dtype)
    semantic, broadcast = type(interpreter.interpreter_semantic), interpreter.interpreter_semantic.broadcast_impl_value

    @functools.cache
    def shape_of(sizes):
        return tl.tuple([tl.constexpr(size) for size in sizes]), tl.constexpr(math.prod(sizes))

    def init(self, handle, type):
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shape_of(tuple(type.shape) if type.is_block() else ())

    tl.tensor.__init__ = init
    semantic.broadcast_impl_value = lambda self, lhs, rhs: (lhs, rhs) if lhs.shape is rhs.shape else broadcast(lhs, rhs)


def _make_masks_boolean() -> None:
    """Triton 3.9's interpreter broadcasts a comparison of scalars to int32, and then refuses it as a mask.

    Before Triton 3.9, masks of descriptors are plain boolean arrays.
    """
    builder = interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store

    def boolean(mask):
        if isinstance(mask, interpreter.TensorHandle):
            return interpreter.TensorHandle(mask.data.astype(bool), tl.int1)
        return mask

    def masked_load(self, ptrs, mask, *args, **kwargs):
        return load(self, ptrs, boolean(mask), *args, **kwargs)

    def masked_store(self, ptrs, value, mask, *args, **kwargs):
        return store(self, ptrs, value, boolean(mask), *args, **kwargs)

    builder.create_masked_load, builder.create_masked_store = masked_load, masked_store
